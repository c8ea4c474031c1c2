"""How fast links are taken to be, from what was copied over them."""

from __future__ import annotations

from math import inf

import torch
from torch import nn

import roundpipe
from roundpipe.runtime.device.backend import Lane
from roundpipe.runtime.profiling.meter import MeterReading, link_speeds


def reading(**lanes: tuple[int, float]) -> MeterReading:
    link = tuple(lanes.get(str(lane), (0, 0.0)) for lane in Lane)
    return MeterReading(0.0, {}, tuple(num_bytes for num_bytes, _ in link), link)


def test_small_gradients_do_not_make_a_link_slow_for_large_values() -> None:
    """An adapter's gradients take a second for 83 MiB, where 66 GiB of values go down at 48 GB/s."""
    gigabyte = 10**9
    found = reading(weights=(30 * gigabyte, 0.6), gradients=(87 * 10**6, 1.0), download=(71 * gigabyte, 1.5))
    up, down = link_speeds([found, found])
    assert up == 30 * gigabyte / 0.6
    assert down == 71 * gigabyte / 1.5
    faster = reading(weights=(30 * gigabyte, 0.6), gradients=(gigabyte, 0.02), download=(10**6, 0.01))
    assert link_speeds([faster]) == (30 * gigabyte / 0.6, gigabyte / 0.02)


def test_values_alone_say_nothing_of_links() -> None:
    """Where everything stays on the device, a batch's few bytes are all that goes up."""
    assert link_speeds([reading(upload=(10**6, 0.001), download=(32, 0.001))]) == (inf, inf)
    assert link_speeds([]) == (inf, inf)


def test_values_between_stages_are_measured() -> None:
    torch.manual_seed(0)
    net, inputs = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6))), torch.randn(4, 32)
    budget = roundpipe.Device("cpu", memory_bytes=24_000)
    config = roundpipe.RoundPipeRunConfig(num_microbatch=2)
    with roundpipe.compile(net, example_args=(inputs[:2],), devices=[budget], model_run_config=config) as model:
        for _ in range(3):
            model.forward_backward((inputs,), label=inputs, loss_fn=lambda found, label: (found - label).sum())
        assert len(model.report().stages) > 1
        (found,) = model._session.engine.read_meters()  # reports have bytes alone
        for lane in (Lane.WEIGHTS, Lane.UPLOAD, Lane.GRADIENTS, Lane.DOWNLOAD):
            assert found.link[lane][0] > 0
