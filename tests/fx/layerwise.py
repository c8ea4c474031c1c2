"""Runs chains the way a pipeline does, layer by layer, and compares with eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.layers import LayerChain, is_differentiable

LossFunction = Callable[[Any], torch.Tensor]


def total(outputs: Any) -> torch.Tensor:
    """A loss that every differentiable output takes part in, each with another weight."""
    parts = [t for t in trees.tensors(outputs) if is_differentiable(t) and t.requires_grad]
    assert parts, "no output has a gradient"
    return sum((part.sin() * (index + 1)).sum() for index, part in enumerate(parts))  # type: ignore[return-value]


def run_layers(chain: LayerChain, *args: Any, **kwargs: Any) -> Any:
    """The outputs, each layer given nothing but what its spec reads."""
    values = chain.entry(args, kwargs)
    for layer, spec in zip(chain, chain.specs, strict=True):
        result = layer({name: values[name] for name in spec.reads})
        values.update({name: result[name] for name in spec.makes})
    return chain.exit({name: values[name] for name in chain.exit.reads})


def train_layers(chain: LayerChain, loss_of: LossFunction, *args: Any, **kwargs: Any) -> Any:
    """Forward without autograd, then each layer again with it, from last to first, and its backward."""
    values = chain.entry(args, kwargs)
    buffers, seeds = [], []
    with torch.no_grad():
        for layer, spec in zip(chain, chain.specs, strict=True):
            buffers.append({name: buffer.clone() for name, buffer in layer.named_buffers()})
            seeds.append(torch.get_rng_state())
            result = layer({name: values[name] for name in spec.reads})
            values.update({name: result[name] for name in spec.makes})
    differentiable = frozenset().union(*(spec.differentiable or () for spec in chain.specs))
    leaves = {name: _leaf(value, name in differentiable) for name, value in values.items()}
    outputs = chain.exit({name: leaves[name] for name in chain.exit.reads})
    loss_of(outputs).backward()
    backwards = list(zip(chain, chain.specs, buffers, seeds, strict=True))[::-1]
    for layer, spec, before, seed in backwards:
        after = {name: buffer.clone() for name, buffer in layer.named_buffers()}
        _set_buffers(layer, before)
        torch.set_rng_state(seed)
        own = {name: _leaf(values[name], name in differentiable) for name in spec.reads}
        result = layer(own)
        tensors, gradients = [], []
        for name in spec.makes:
            pairs = zip(trees.tensors(result[name]), trees.tensors(leaves[name]), strict=True)
            for made, leaf in pairs:
                if made.requires_grad and leaf.grad is not None:
                    tensors.append(made)
                    gradients.append(leaf.grad)
        if tensors:
            torch.autograd.backward(tensors, gradients)
        _set_buffers(layer, after)
        for name, value in own.items():
            for mine, shared in zip(trees.tensors(value), trees.tensors(leaves[name]), strict=True):
                if mine.grad is not None:
                    shared.grad = mine.grad if shared.grad is None else shared.grad + mine.grad
    return outputs


def _leaf(value: Any, requires_grad: bool) -> Any:
    return trees.map_tensors(
        value,
        lambda tensor: tensor.detach().requires_grad_(
            requires_grad and is_differentiable(tensor) or tensor.requires_grad
        ),
    )


def _set_buffers(layer: nn.Module, values: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in layer.named_buffers():
            buffer.copy_(values[name])


def state_after(model: nn.Module, run: Callable[[], Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Gradients and buffers that a training run leaves; the model is put back."""
    saved = copy.deepcopy(model.state_dict())
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    run()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.load_state_dict(saved)
    model.zero_grad(set_to_none=True)
    return gradients, buffers


def assert_equals_eager(
    model: nn.Module,
    chain: LayerChain,
    *args: Any,
    loss_of: LossFunction = total,
    tolerance: float = 1e-12,
    **kwargs: Any,
) -> None:
    """Outputs, loss, every gradient and every buffer equal eager's: whole, layer by layer, recomputed."""
    outputs: dict[str, Any] = {}
    losses: dict[str, float] = {}

    def training(kind: str, forward: Callable[..., Any]) -> Callable[[], None]:
        def run() -> None:
            outputs[kind] = forward(*args, **kwargs)
            loss = loss_of(outputs[kind])
            losses[kind] = loss.item()
            loss.backward()

        return run

    def recompute() -> None:
        outputs["recomputed"] = train_layers(chain, loss_of, *args, **kwargs)
        losses["recomputed"] = loss_of(outputs["recomputed"]).item()

    want_gradients, want_buffers = state_after(model, training("eager", model))
    runs: dict[str, Callable[[], Any]] = {
        "whole": training("whole", chain.run),
        "by layer": training("by layer", lambda *a, **k: run_layers(chain, *a, **k)),
        "recomputed": recompute,
    }
    for kind, run in runs.items():
        gradients, buffers = state_after(model, run)
        assert type(outputs[kind]) is type(outputs["eager"]), kind
        want = trees.tensors(outputs["eager"])
        got = trees.tensors(outputs[kind])
        assert len(want) == len(got), kind
        for index, (left, right) in enumerate(zip(want, got, strict=True)):
            assert_close(right, left, tolerance, f"{kind}: output {index}")
        assert abs(losses[kind] - losses["eager"]) <= tolerance * max(abs(losses["eager"]), 1), kind
        scale = max(float(g.abs().max()) for g in want_gradients.values() if g is not None)
        for name, gradient in want_gradients.items():
            if gradient is None:
                assert gradients[name] is None or not gradients[name].any(), f"{kind}: gradient of {name}"
            else:
                assert gradients[name] is not None, f"{kind}: {name} has no gradient"
                assert_close(gradients[name], gradient, tolerance, f"{kind}: gradient of {name}", scale)
        for name, buffer in want_buffers.items():
            assert_close(buffers[name], buffer, tolerance, f"{kind}: buffer {name}")


def assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float, what: str, scale: float = 0.0) -> None:
    """Equal up to a share of the largest element, or of ``scale`` if that is larger."""
    assert got.shape == want.shape and got.dtype == want.dtype, what
    if not is_differentiable(got):
        assert torch.equal(got, want), what
    elif got.numel():
        scale = max(want.abs().max().item(), scale)
        error = (got - want).abs().max().item()
        assert error <= tolerance * scale, f"{what}: {error} of {scale}"
