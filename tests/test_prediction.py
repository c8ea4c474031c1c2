"""Device memory that is predicted before a run, against the workers' accounting after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import roundpipe
from roundpipe.core.schedule import make_schedule
from roundpipe.fx.passes.memory import Loss, measure_memory
from roundpipe.planning.machine import HardwareProfile
from roundpipe.planning.simulator import simulate
from roundpipe.planning.stage_costs import plan_peak_bytes
from tests.repeats import repeats

NUM_MICROBATCHES = 4


def own_loss(outputs: Any, label: Any) -> torch.Tensor:
    loss: torch.Tensor = outputs.loss
    return loss


@pytest.mark.parametrize(("num_workers", "grain"), repeats([(1, "stage"), (3, "layer")], ["3-layer"]))
def test_peak_of_a_compiled_model(num_workers: int, grain: Any) -> None:
    transformers = pytest.importorskip("transformers", reason="trains a Llama")
    config = transformers.LlamaConfig(
        vocab_size=260,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(0, 256, (NUM_MICROBATCHES, 48))
    budget_bytes = 5 * sum(parameter.nbytes for parameter in model.parameters()) // 4
    device = roundpipe.Device("cpu", memory_bytes=budget_bytes)
    run = roundpipe.RoundPipeRunConfig(num_microbatch=NUM_MICROBATCHES, recompute_grain=grain)
    with roundpipe.compile(model, devices=[device] * num_workers, model_run_config=run) as pipe:
        for _ in range(2):
            pipe.forward_backward(input_kwargs={"input_ids": ids, "labels": ids}, loss_fn=own_loss)
        pipe.synchronize()
        # as values: tables show them only as text
        plan, chain = pipe._runner.builder.last_plan, pipe._runner.source.latest
        measured = pipe.peak_device_bytes()
    assert plan is not None and chain is not None
    one = {"input_ids": ids[:1], "labels": ids[:1]}
    costs = measure_memory(chain, (), one, Loss(own_loss, None))  # as plans are made of before a run
    assert costs is not None
    schedule = make_schedule(plan, num_workers, NUM_MICROBATCHES)
    found = simulate(schedule, costs, HardwareProfile(), recompute_grain=grain)
    assert max(found.peak_bytes) == pytest.approx(measured, rel=0.1)
    # The planner also counts what accelerators hold longer: copies of carried values.
    assert measured <= plan_peak_bytes(plan, costs, num_workers=num_workers, recompute_grain=grain) <= budget_bytes
