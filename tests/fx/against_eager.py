"""One model through `roundpipe.compile` and through the eager loop over microbatches, equal in everything.

Every layer is a stage of its own and two workers take turns, so that whatever crosses a cut crosses the host, and
whatever is recomputed is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import roundpipe
from roundpipe import AutoRoundPipe, RoundPipeRunConfig
from roundpipe.core import trees
from tests.equality import assert_same_gradients, assert_same_state, difference
from tests.fx.fuzz.cases import loss_of
from tests.fx.fuzz.sides import one_layer_per_stage

WIDTH = 8
SIZES = ((4, 6), (3, 6), (5, 4))
"""Batch and length of the calls; the model is traced at the first."""

Inputs = Callable[[int, int], dict[str, Any]]


def vectors(batch: int, length: int) -> dict[str, Any]:
    """``x`` [B, L, 8]."""
    return {"x": torch.randn(batch, length, WIDTH, dtype=torch.float64)}


@dataclass(slots=True)
class Seen:
    """What became of a model."""

    num_layers: int
    trace_count: int
    opaque: dict[str, str]
    fell_back: bool


def _pieces(inputs: dict[str, Any], number: int) -> list[dict[str, Any]]:
    def piece(value: Any, index: int) -> Any:
        return trees.map_tensors(value, lambda tensor: tensor.tensor_split(number)[index] if tensor.dim() else tensor)

    return [{name: piece(value, index) for name, value in inputs.items()} for index in range(number)]


def check(
    build: Callable[[], nn.Module],
    inputs: Inputs = vectors,
    *,
    sizes: Sequence[tuple[int, int]] = SIZES,
    num_microbatches: int = 2,
    loss: Callable[[Any], torch.Tensor] = loss_of,
    needs_grad: bool = True,
    tolerance: float = 1e-9,
) -> Seen:
    """Losses, gradients of parameters and inputs, and buffers equal eager's at every size.

    Args:
        build: makes the model; called twice, under the same seed.
        inputs: ``(batch, length) -> keyword arguments``.
        needs_grad: whether floating-point inputs require grad.
    """
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(build().double().train())
    reference, model = models
    config = RoundPipeRunConfig(num_microbatch=num_microbatches)
    torch.manual_seed(1)
    calls = [inputs(*size) for size in sizes]
    for call in calls:
        for tensor in trees.tensors(call):
            tensor.requires_grad_(needs_grad and tensor.is_floating_point())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = roundpipe.compile(
            model, example_kwargs=calls[0], devices=["cpu", "cpu"], model_run_config=config, name="checked"
        )
        with pipe:
            if not isinstance(pipe, AutoRoundPipe):
                # a plan can be given only to a call whose number of layers is known before
                pipe._runner.builder.plans.plan = lambda call: one_layer_per_stage(len(call.chain))  # type: ignore[method-assign]
            for call in calls:
                mine = trees.map_tensors(
                    call, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad)
                )
                losses = []
                for piece in _pieces(call, num_microbatches):
                    piece = trees.map_tensors(piece, lambda tensor: tensor if needs_grad else tensor.clone())
                    one = loss(reference(**piece))
                    one.backward()
                    losses.append(one.detach())
                found = pipe.forward_backward(input_kwargs=mine, loss_fn=lambda outputs, label: loss(outputs))
                pipe.synchronize()
                assert difference(found, torch.stack(losses).sum()) <= tolerance
                assert_same_gradients(model, reference, tolerance)
                assert_same_state(model, reference, tolerance)
                for a, b in zip(trees.tensors(call), trees.tensors(mine), strict=True):
                    assert difference(b.grad, a.grad) <= tolerance
        source = None if isinstance(pipe, AutoRoundPipe) else pipe._runner.source  # whether a trace ran
        chain = None if source is None else source.latest
        return Seen(
            0 if chain is None else len(chain),
            pipe.trace_count,
            dict(getattr(source, "opaque", {})),
            chain is None,
        )
