"""Ranges in profilers' traces: every call of a layer has one, and without a profiler there are none."""

import json

import pytest
import torch

import roundpipe
from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.runtime.device import backend as backend_module
from roundpipe.runtime.device.cpu import CpuBackend
from tests.runtime.models import batch, config, mlp, square_loss

pytestmark = pytest.mark.timeout(60)

PLAN = ExecutePlan([(0, 2), (2, 4)], (4, 6), [(2, 4), (0, 2)])


def names_in_trace(piped, tmp_path, everywhere=True):
    settings = config(2, plan=PLAN, preserve_rng_state=False)
    experimental = torch.profiler._ExperimentalConfig(profile_all_threads=True) if everywhere else None
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=experimental
    ) as profiler:
        piped.forward_backward((batch(),), loss_fn=square_loss, run_config=settings)
        piped.synchronize()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    return [event["name"] for event in events if str(event.get("name", "")).startswith("roundpipe")]


def test_every_layer_call_is_a_range_in_a_profilers_trace(tmp_path):
    with roundpipe.RoundPipe(mlp(6), devices=["cpu"] * 2) as piped:
        names = names_in_trace(piped, tmp_path)
    expected = [f"roundpipe layer {layer} ({layer}) m{m} forward" for layer in range(6) for m in range(2)]
    expected += [f"roundpipe layer {layer} ({layer}) m{m} recomputation" for layer in range(4) for m in range(2)]
    stages = ((4, 5), (2, 3), (0, 1))
    expected += [f"roundpipe layers {a} to {b} ({a} .. {b}) m{m} backward" for a, b in stages for m in range(2)]
    assert sorted(names) == sorted(expected)


def test_without_a_profiler_there_are_no_ranges(monkeypatch):
    made = []
    monkeypatch.setattr(CpuBackend, "annotate", lambda self, name: made.append(name))
    assert backend_module.is_profiled() is False
    with roundpipe.RoundPipe(mlp(6), devices=["cpu"]) as piped:
        piped.forward_backward((batch(),), loss_fn=square_loss)
        piped.synchronize()
    assert not made


def test_torch_says_whether_a_profiler_is_on():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert backend_module.is_profiled() is True
    assert backend_module.is_profiled() is False
