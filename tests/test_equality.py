"""Compiled models against eager PyTorch: losses, gradients, buffers, trajectories (rows P3, P8, C1, D2)."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig, TraceError
from roundpipe.fx.passes.lower import LowerOptions
from roundpipe.fx.source import TracedSource
from roundpipe.wrappers.calls import ChainProgram
from tests.equality import assert_same_gradients, assert_same_state, difference, eager_forward_backward
from tests.models import CASES, Case, in_dtype
from tests.repeats import repeats

NUM_MICROBATCHES = 2
KEPT = ("llama", "gpt2", "t5", "vit", "resnet", "unet", "shared_twice", "many_outputs")
"""Cases that are like no other."""


def tolerance_of(case: Case) -> float:
    return 1e-9 if case.dtype is torch.float64 else 1e-5


class Traced:
    """A case's model, traced once for all tests; every test starts from the same weights."""

    def __init__(self, case: Case) -> None:
        self.model = case.make()
        self.state = copy.deepcopy(self.model.state_dict())
        self.source = TracedSource(self.model, LowerOptions(), on_failure=fail)
        torch.manual_seed(3)
        self.num_layers = len(self.source.chain_for((), in_dtype(case.inputs(4, 16), case.dtype)))

    def fresh_model(self) -> nn.Module:
        self.model.load_state_dict(self.state)
        self.model.zero_grad()
        return self.model

    def pipe(self, num_workers: int, grain: str = "stage", num_microbatches: int = NUM_MICROBATCHES) -> RoundPipe:
        config = RoundPipeRunConfig(num_microbatch=num_microbatches, recompute_grain=grain)
        return RoundPipe(
            ChainProgram(self.fresh_model(), self.source), devices=["cpu"] * num_workers, model_run_config=config
        )


def fail(error: TraceError) -> None:
    raise error


@functools.cache
def traced(case: Case) -> Traced:
    return Traced(case)


def one_layer_per_stage(num_layers: int) -> roundpipe.ExecutePlan:
    """Every layer its own stage, so that everything crosses the host."""
    stages = [(i, i + 1) for i in range(num_layers - 1)]
    return roundpipe.ExecutePlan(stages, (num_layers - 1, num_layers), stages[::-1])


@pytest.mark.parametrize(
    "num_workers, grain", repeats(itertools.product((1, 2, 3), ("stage", "layer")), ("2-stage", "3-layer"))
)
@pytest.mark.parametrize("case", repeats(CASES, KEPT))
def test_loss_gradients_and_buffers_equal_eager(case: Case, num_workers: int, grain: str) -> None:
    shared = traced(case)
    model = shared.fresh_model()
    reference = copy.deepcopy(model)
    tolerance = tolerance_of(case)
    with shared.pipe(num_workers, grain) as pipe:
        assert shared.num_layers >= case.min_layers
        plans = [None, one_layer_per_stage(shared.num_layers)]
        for call, (batch, length) in enumerate([(4, 16), (6, 24), (3, 16)]):
            inputs = in_dtype(case.inputs(batch, length), case.dtype)
            expected = eager_forward_backward(reference, inputs, case.loss, NUM_MICROBATCHES)
            config = RoundPipeRunConfig(execute_plan=plans[call % 2])
            loss = pipe.forward_backward(input_kwargs=inputs, loss_fn=case.loss, run_config=config)
            assert difference(loss, expected) <= tolerance
            assert_same_gradients(model, reference, tolerance)
            assert_same_state(model, reference, tolerance)
        assert pipe.trace_count == 1


@pytest.mark.parametrize("case", repeats(CASES, ("unet",)))
def test_result_does_not_depend_on_the_number_of_workers(case: Case) -> None:
    found = []
    for num_workers in (1, 2, 3):
        shared = traced(case)
        with shared.pipe(num_workers, num_microbatches=3) as pipe:
            torch.manual_seed(5)
            inputs = in_dtype(case.inputs(5, 16), case.dtype)
            config = RoundPipeRunConfig(execute_plan=one_layer_per_stage(shared.num_layers))
            losses = [
                pipe.forward_backward(input_kwargs=inputs, loss_fn=case.loss, run_config=config) for _ in range(2)
            ]
        gradients = {name: parameter.grad for name, parameter in shared.model.named_parameters()}
        found.append((losses, gradients, copy.deepcopy(shared.model.state_dict())))
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
@pytest.mark.parametrize("optimizer_name", repeats(OPTIMIZERS, ["adamw"]))
@pytest.mark.parametrize("case", repeats(CASES, [name for name in KEPT if name != "t5"]))
def test_five_steps_equal_eager(case: Case, optimizer_name: str, is_async: bool) -> None:
    """Sync against plain PyTorch; async against a loop that takes gradients at weights one step old."""
    make_optimizer = OPTIMIZERS[optimizer_name]
    shared, tolerance = traced(case), tolerance_of(case) * 10
    model = shared.fresh_model()
    latest = copy.deepcopy(model)
    stale = copy.deepcopy(model)
    reference_optimizer = make_optimizer(latest.parameters())
    with shared.pipe(2) as pipe:
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
