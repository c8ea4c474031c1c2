"""Forecasts against runs: room for temporaries, and host memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import roundpipe
from roundpipe.planning.stage_costs import plan_peak_bytes
from roundpipe.runtime.engine.plan_choice import PlanChooser
from roundpipe.tools import forecast
from roundpipe.tools.device_data import EFFICIENCY, DeviceSpec
from roundpipe.tools.forecast import Forecast, Machine, Training, forecast_at
from roundpipe.tools.target import Target

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
        self.layers = forecast.Layers.of(self.target, 2, on(10**9))

    def on(self, memory_bytes: int) -> Forecast:
        return forecast_at(self.layers, on(memory_bytes), TRAINING)


@pytest.fixture(scope="module")
def layers() -> Layers:
    return Layers(torch.float32)


def test_temporaries_are_counted_as_a_run_on_accelerators_counts_them(layers: Layers) -> None:
    roomy = layers.on(10**9)
    assert roomy.plan is not None and roomy.device is not None
    plans = PlanChooser(2, [10**9], accelerators=True)
    counted = plans.costs(roomy.layers.chain, roomy.layers.chain.example_elements)
    assert all(cost.temporary_bytes == cost.workspace_bytes for cost in counted)
    assert roomy.device.total == plan_peak_bytes(roomy.plan, counted, num_workers=2)
    plain = [replace(cost, temporary_bytes=0) for cost in counted]
    assert roomy.device.total > plan_peak_bytes(roomy.plan, plain, num_workers=2)


def test_what_leaves_too_little_room_does_not_fit(layers: Layers) -> None:
    found = [layers.on(memory_bytes) for memory_bytes in range(900_000, 2_000_000, 100_000)]
    over = [one for one in found if one.plan is not None and not one.fits_devices]
    assert 0 < len(over) < len(found)
    for one in found:
        assert one.fits == one.fits_devices
        if one.fits:
            assert one.device is not None and one.device.total <= one.machine.budget_bytes
    for one in over:
        assert one.device is not None and f"{one.device.total:,} bytes" in one.reasons[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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
