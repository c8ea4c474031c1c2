"""Forecasts against runs: room for temporaries, and host memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import roundpipe
from roundpipe.tools import problem
from roundpipe.tools.device_data import EFFICIENCY, DeviceSpec
from roundpipe.tools.forecast import Forecast, forecast, forecast_at
from roundpipe.tools.forecast_report import verdict
from roundpipe.tools.problem import Machine, Training
from roundpipe.tools.target import Target
from tests.repeats import repeats

transformers = pytest.importorskip("transformers", reason="plans for a Llama")

LENGTH = 32


def llama(dtype: torch.dtype, num_layers: int = 4) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    # the public constructor takes no dtype
    return transformers.LlamaForCausalLM._from_config(config, dtype=dtype).train()


def kwargs_for(num_samples: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(num_samples * LENGTH).reshape(num_samples, LENGTH) % 512
    return {"input_ids": ids, "labels": ids}


def on(memory_bytes: int, num_devices: int = 2) -> Machine:
    device = DeviceSpec("device", memory_bytes, 1e13, 1e12, 1e10, "made up")
    return Machine(device, num_devices, EFFICIENCY, host_bytes_per_s=1e11)


TRAINING = Training(batch=6, num_microbatches=3)


def target_of(dtype: torch.dtype) -> Target:
    with torch.device("meta"):
        model = llama(dtype)
    return Target("llama", model, kwargs_for, None, LENGTH, True)


class Layers:
    """A model that is traced once and planned for several devices."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.target = target_of(dtype)
        self.layers = problem.Layers.of(self.target, 2, on(10**9))

    def on(self, memory_bytes: int) -> Forecast:
        return forecast_at(self.layers, on(memory_bytes), TRAINING)


@pytest.fixture(scope="module")
def layers() -> Layers:
    return Layers(torch.float32)


@pytest.mark.parametrize("num_devices", repeats([1, 2], ["2"]))
def test_device_memory_is_what_a_run_takes(layers: Layers, num_devices: int) -> None:
    """Forecast on meta tensors, for accelerators, which hold the gradients of the visit before and more of the cuts."""
    machine = on(10**9, num_devices)
    found = forecast_at(layers.layers, machine, TRAINING)
    assert found.plan is not None and found.device is not None
    run = roundpipe.RoundPipeRunConfig(num_microbatch=3, execute_plan=found.plan)
    devices = [roundpipe.Device("cpu", memory_bytes=10**9)] * num_devices
    inputs = kwargs_for(6)
    with roundpipe.compile(llama(torch.float32), example_kwargs=kwargs_for(2), devices=devices) as pipe:
        for _ in range(2):
            pipe.forward_backward(input_kwargs=inputs, loss_fn=lambda outputs, _: outputs.loss, run_config=run)
        pipe.synchronize()
        measured = pipe.peak_device_bytes()
    largest = max(memory.gradients + memory.leaving_gradients for memory in found.stages.values()) // 2
    assert measured <= found.device.total <= 1.1 * (measured + largest)


def test_the_verdict_says_bytes_as_tables_do(layers: Layers) -> None:
    found = layers.on(10**9)
    reason = "The device is out of memory. layer 2 does not fit the device budget of 3,221,225,472 bytes: weights 5,000"
    found.reasons[:] = [reason]
    assert verdict(found) == "doesn't fit, because layer 2 does not fit the device budget of 3.00 GiB: weights 5,000"


def test_no_other_cut_is_tried_where_a_parameter_alone_is_too_large(
    layers: Layers, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def others(self: problem.Layers, profile: object) -> Iterator[problem.Layers]:
        tried.append(self)
        yield self

    monkeypatch.setattr(problem.Layers, "others", others)
    least_bytes = layers.layers.indivisible_bytes
    for budget_bytes, number in ((least_bytes - 1, 0), (least_bytes, 1)):
        tried.clear()
        monkeypatch.setattr(Machine, "budget_bytes", budget_bytes)
        found = layers.on(10**9)
        assert not found.fits and "does not fit the device budget" in found.reasons[0]
        assert len(tried) == number


@pytest.mark.long
def test_what_leaves_too_little_room_does_not_fit(layers: Layers) -> None:
    found = [layers.on(memory_bytes) for memory_bytes in range(300_000, 2_000_000, 100_000)]
    over = [one for one in found if not one.fits_devices]
    assert 0 < len(over) < len(found)
    for one in found:
        assert one.fits == one.fits_devices == (one.plan is not None)
        if one.plan is not None:
            assert one.device is not None and one.device.total <= one.machine.budget_bytes
    for one in over:
        assert f"does not fit the device budget of {one.machine.budget_bytes:,} bytes" in one.reasons[0]


@pytest.mark.parametrize("dtype", repeats([torch.float32, torch.bfloat16], ["torch.bfloat16"]))
def test_host_memory_is_what_a_run_with_adamw_holds(layers: Layers, dtype: torch.dtype) -> None:
    """At its most: an optimizer's step is under way while the gradients of the next one come down."""
    predicted = (layers if dtype is torch.float32 else Layers(dtype)).on(10**9).host
    inputs, most = kwargs_for(6), 0
    with roundpipe.compile(llama(dtype), devices=["cpu"] * 2, optim_dtype=torch.float32) as pipe:
        optimizer = torch.optim.AdamW(pipe.optim_parameters(), lr=1e-3)

        def step_until(seen: threading.Event) -> Callable[[], None]:
            def step() -> None:
                optimizer.step()
                assert seen.wait(30)
                optimizer.zero_grad()

            return step

        seen = threading.Event()
        for number in range(3):
            pipe.forward_backward(input_kwargs=inputs, loss_fn=lambda outputs, _: outputs.loss)
            deadline_s = time.monotonic() + 20
            while number and time.monotonic() < deadline_s:
                memory = pipe.report().host_memory
                most = max(most, memory.total)
                if memory.gradients == predicted.gradients and memory.optimizer_gradients:
                    break
                time.sleep(0.01)
            seen.set()
            seen = threading.Event()
            pipe.step(step_until(seen))
        seen.set()
        pipe.synchronize()
        states = sum(value.nbytes for state in optimizer.state.values() for value in state.values() if value.ndim)
    assert predicted.optimizer_states == states
    assert predicted.total - predicted.carried == pytest.approx(most + states, rel=0.1)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_what_would_help_is_no_more_of_what_there_is(is_frozen: bool) -> None:
    """Frozen weights need no adapters."""
    target = target_of(torch.float32)
    for parameter in target.model.model.layers[:3].parameters() if is_frozen else ():
        parameter.requires_grad_(False)
    found = forecast(target, on(100_000), TRAINING)
    assert not found.fits_devices
    assert any("shorter sequences" in change for change in found.changes)
    assert any("--lora" in change for change in found.changes) != is_frozen
