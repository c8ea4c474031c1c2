"""Compiled models against eager PyTorch: losses, gradients, buffers, trajectories (rows P3, P8, C1, D2)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipeRunConfig
from tests.equality import assert_same_gradients, assert_same_state, difference, eager_forward_backward
from tests.models import CASES, Case, in_dtype

NUM_MICROBATCHES = 2


def tolerance_of(case: Case) -> float:
    return 1e-9 if case.dtype is torch.float64 else 1e-5


def compiled(case: Case, model: nn.Module, num_workers: int, grain: str = "stage", **options: Any) -> Any:
    torch.manual_seed(3)
    example = in_dtype(case.inputs(4, 16), case.dtype)
    config = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCHES, recompute_grain=grain, **options)
    return roundpipe.compile(
        model, example_kwargs=example, devices=["cpu"] * num_workers, model_run_config=config, fallback=False
    )


def one_layer_per_stage(num_layers: int) -> roundpipe.ExecutePlan:
    """Every layer its own stage, so that everything crosses the host."""
    stages = [(i, i + 1) for i in range(num_layers - 1)]
    return roundpipe.ExecutePlan(stages, (num_layers - 1, num_layers), stages[::-1])


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loss_gradients_and_buffers_equal_eager(case: Case, num_workers: int, grain: str) -> None:
    model = case.make()
    reference = copy.deepcopy(model)
    tolerance = tolerance_of(case)
    with compiled(case, model, num_workers, grain) as pipe:
        num_layers = len(pipe._state.source.latest)
        assert num_layers >= case.min_layers
        plans = [None, one_layer_per_stage(num_layers)]
        for call, (batch, length) in enumerate([(4, 16), (6, 24), (3, 16)]):
            inputs = in_dtype(case.inputs(batch, length), case.dtype)
            expected = eager_forward_backward(reference, inputs, case.loss, NUM_MICROBATCHES)
            config = RoundPipeRunConfig(execute_plan=plans[call % 2])
            loss = pipe.forward_backward(input_kwargs=inputs, loss_fn=case.loss, run_config=config)
            assert difference(loss, expected) <= tolerance
            assert_same_gradients(model, reference, tolerance)
            assert_same_state(model, reference, tolerance)
        assert pipe.trace_count == 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_result_does_not_depend_on_the_number_of_workers(case: Case) -> None:
    found = []
    for num_workers in (1, 2, 3):
        model = case.make()
        with compiled(case, model, num_workers) as pipe:
            torch.manual_seed(5)
            inputs = in_dtype(case.inputs(5, 16), case.dtype)
            plan = one_layer_per_stage(len(pipe._state.source.latest))
            config = RoundPipeRunConfig(execute_plan=plan, num_microbatch=3)
            losses = [pipe.forward_backward(input_kwargs=inputs, loss_fn=case.loss, run_config=config) for _ in range(2)]
        found.append((losses, {name: p.grad for name, p in model.named_parameters()}, model.state_dict()))
    for losses, gradients, state in found[1:]:
        assert all(map(torch.equal, losses, found[0][0]))
        for name, gradient in gradients.items():
            expected = found[0][1][name]
            assert (gradient is None) == (expected is None)
            assert gradient is None or torch.equal(gradient, expected), name
        assert all(torch.equal(tensor, found[0][2][name]) for name, tensor in state.items())


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("optimizer_name", list(OPTIMIZERS))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_five_steps_equal_eager(case: Case, optimizer_name: str, is_async: bool) -> None:
    """Sync against plain PyTorch; async against a loop that takes gradients at weights one step old."""
    make_optimizer = OPTIMIZERS[optimizer_name]
    model, tolerance = case.make(), tolerance_of(case) * 10
    latest = copy.deepcopy(model)
    stale = copy.deepcopy(model)
    reference_optimizer = make_optimizer(latest.parameters())
    with compiled(case, model, 2) as pipe:
        optimizer = make_optimizer(pipe.optim_parameters())

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        for step in range(5):
            inputs = in_dtype(case.inputs(4, 16), case.dtype)
            trained_on = stale if is_async else latest
            trained_on.zero_grad()
            expected = eager_forward_backward(trained_on, inputs, case.loss, NUM_MICROBATCHES)
            loss = pipe.forward_backward(input_kwargs=inputs, loss_fn=case.loss)
            assert difference(loss, expected) <= tolerance, f"step {step}"
            pipe.step(update, is_async=is_async)
            if is_async:
                with torch.no_grad():  # the next gradients are taken at the weights before this update
                    for kept, new in zip(stale.parameters(), latest.parameters(), strict=True):
                        new.grad = None if kept.grad is None else kept.grad.clone()
                        kept.copy_(new)
            reference_optimizer.step()
        pipe.synchronize()
        expected_state = dict(latest.named_parameters())
        for name, parameter in model.named_parameters():
            assert difference(parameter, expected_state[name]) <= tolerance, name
