"""Graph shapes that models have: compiled, each equals eager at two batch sizes and lengths."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tests.fx.against_eager import Inputs, check, vectors


def linears(number: int = 4) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(8, 8) for _ in range(number))


class Layers(nn.Module):
    """Four linear layers for a forward to use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))


class SkipsOfAnySpan(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = [x]
        for layer in self.layers:
            seen.append(torch.tanh(layer(seen[-1])) + seen[len(seen) // 2])
        return seen[-1] + seen[1] * seen[0]


class DenseConnections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8 * (index + 1), 8) for index in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = [x]
        for layer in self.layers:
            seen.append(torch.tanh(layer(torch.cat(seen, -1))))
        return torch.stack(seen).mean(0)


class SharedModule(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        x = self.layers[1](torch.tanh(self.layers[0](x)))
        return self.layers[0](x) @ self.layers[1].weight


class WritesInPlace(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layers[0](x)
        view = h[:, ::2]
        h += 1.0
        view.mul_(0.5)
        other = self.layers[2](h)
        h = self.layers[1](h) + view.sum(1, keepdim=True)
        h[..., :4] = other[..., 4:]
        flat = h.view(-1, 8)
        flat[0] = 0.0
        return self.layers[3](h)


class WritesAnInput(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x[:, 0] = 0.5
        h = self.layers[0](x.clone()) + x
        x.mul_(2.0)
        h = self.layers[1](h) + x
        return self.layers[2](h)


class RecurrentLoop(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x[:, 0])
        states = []
        for row in x.unbind(1):
            state = torch.tanh(self.layers[0](row) + self.layers[1](state))
            states.append(state)
        return self.layers[2](torch.stack(states, 1))


class RecurrentModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        x, last = self.gru(x)
        x, (hidden, cell) = self.lstm(x)
        return self.head(x), last.transpose(0, 1), hidden.sum(0) + cell.sum(0)


class ReadsItsMask(Layers):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:3]:
            x = layer(x)
            if not mask.all():
                x = x * mask[..., None]
        return self.layers[3](x) if int(mask.sum()) % 2 else x


class Regions(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        with torch.no_grad():
            gate = self.layers[1](x).softmax(-1)
            x.mul_(0.5)
            with torch.enable_grad():
                x = self.layers[2](x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = (self.layers[3].weight.float() @ self.weight.float()).double().sum()
            with torch.autocast("cpu", enabled=False):
                x = x @ self.weight
        return x * gate + y


class AttentionKernels(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layers[0](x)[:, None]
        with sdpa_kernel(SDPBackend.MATH):
            h = F.scaled_dot_product_attention(h, h, h, is_causal=True)
        h = self.layers[1](h)
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            h = F.scaled_dot_product_attention(h, h, h)
        return self.layers[2](h[:, 0])


class Checkpoints(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.layers[0], x, use_reentrant=False)
        x = checkpoint(lambda a, b: self.layers[1](a) * b.sigmoid(), x, x, use_reentrant=False)
        x = checkpoint(self.layers[2], x, use_reentrant=True)
        return self.layers[3](x)


class ReentrantWithoutGradient(Layers):
    """A reentrant checkpoint gives no gradients if no input requires one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = checkpoint(self.layers[0], x, use_reentrant=True)
        return self.layers[2](self.layers[1](h)) + x


class Hooks(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].register_forward_hook(lambda module, inputs, output: output * 1.25)
        self.layers[1].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 0.5,))
        self.layers[2].register_full_backward_hook(lambda module, below, above: tuple(one * 2 for one in below))
        self.weight.register_hook(lambda gradient: gradient * 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * 1.5)
            x = torch.tanh(x)
        return x @ self.weight


class HookOnGlue(Layers):
    """A hook on a value that every layer could make again by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x * 2.0
        if scaled.requires_grad:
            scaled.register_hook(lambda gradient: gradient * 3)
        h = x
        for layer in self.layers:
            h = layer(h) + scaled
        return h


class WritesBuffers(Layers):
    """In place, through a view, twice in one forward, and by assignment."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        for layer in self.layers:
            x = layer(x)
            self.mean[:4] += 0.25
            self.mean[4:].add_(x.detach().mean((0, 1))[4:])
            x = x + self.mean
        self.mean = self.mean * 0.5 + x.detach().mean((0, 1))
        return x * self.steps


class BranchInside(Layers):
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.left(x) if x.sum() > 0 else self.right(x)

    def __init__(self) -> None:
        super().__init__()
        self.branch = BranchInside.Branch()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.branch(layer(x)) + x
        return x


class BranchAtRoot(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.sum() > 0:
                x = x * 2
        return x


class BranchThenWritesAnInput(Layers):
    """Its input gets an activation in place, and so a history that other microbatches must not share."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layers[0](x.clone())
        if h.sum() > 0:
            h = h * 2
        x.add_(self.layers[1](h))
        return self.layers[2](x)


class EarlyExit(Layers):
    def forward(self, x: torch.Tensor, ids: torch.Tensor, depth: int = 4) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == depth - 1 or (index == 1 and bool((ids > 3).all())):
                return x
        return x * 2


@dataclass
class Result:
    hidden: torch.Tensor
    extra: Any = None
    count: int = 0


class Both(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Structures(Layers):
    """Dataclasses, named tuples, dicts, None and numbers, between modules and out of the model."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, result: Result, *, scale: float = 1.0, extra: Any = None) -> Result:
            hidden = self.linear(result.hidden) * scale
            return Result(hidden, Both(hidden, result.hidden * 2), result.count + 1)

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Structures.Inner() for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        result = Result(x)
        for inner in self.inner:
            result = inner(result, scale=0.5, extra=None)
        named = collections.OrderedDict(hidden=self.layers[0](result.hidden), none=None)
        return {"result": result, "nested": [named, (result.extra.left, {"n": result.count})], "nothing": None}


class ReturnsItsInput(Layers):
    def forward(self, x: torch.Tensor) -> Any:
        h = self.layers[1](self.layers[0](x))
        return h, x, h


class ChangesTheGraph(Layers):
    def forward(self, x: torch.Tensor) -> Any:
        h = self.layers[0](x)
        cut = h.clone()
        cut.detach_()
        leaf = h.detach().requires_grad_()
        return self.layers[1](h) + self.layers[2](cut) + self.layers[3](leaf)


class AsksForGradients(Layers):
    """A module that takes another path while gradients are recorded."""

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x) * (2.0 if torch.is_grad_enabled() else 1.0)
            return x * (3.0 if x.requires_grad else 1.0)

    def __init__(self) -> None:
        super().__init__()
        self.asks = nn.ModuleList(AsksForGradients.Asks() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for asks, layer in zip(self.asks, self.layers, strict=False):
            x = layer(asks(x))
        return x


class AsksItsWeight(Layers):
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                x = self.linear(x) * (2.0 if self.linear.weight.requires_grad else 1.0)
            self.mean.copy_(x.detach().mean((0, 1)))
            return x

    def __init__(self) -> None:
        super().__init__()
        self.asks = nn.ModuleList(AsksItsWeight.Asks() for _ in range(3))
        self.asks[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for asks, layer in zip(self.asks, self.layers, strict=False):
            x = layer(asks(x))
        return x


def masked(batch: int, length: int) -> dict[str, Any]:
    return {**vectors(batch, length), "mask": torch.rand(batch, length) > (0.5 if batch % 2 else -1.0)}


def with_ids(batch: int, length: int) -> dict[str, Any]:
    return {**vectors(batch, length), "ids": torch.randint(0 if batch == 4 else 4, 9, (batch, length))}


SHAPES: list[tuple[Callable[[], nn.Module], Inputs, dict[str, Any]]] = [
    (SkipsOfAnySpan, vectors, {}),
    (DenseConnections, vectors, {}),
    (SharedModule, vectors, {}),
    (WritesInPlace, vectors, {}),
    (WritesAnInput, vectors, {"needs_grad": False}),
    (RecurrentLoop, vectors, {}),
    (RecurrentModules, vectors, {}),
    (ReadsItsMask, masked, {}),
    (Regions, vectors, {"tolerance": 1e-2}),
    (AttentionKernels, vectors, {}),
    (Checkpoints, vectors, {}),
    (ReentrantWithoutGradient, vectors, {"needs_grad": False}),
    (Hooks, vectors, {}),
    (HookOnGlue, vectors, {}),
    (WritesBuffers, vectors, {}),
    (BranchInside, vectors, {}),
    (EarlyExit, with_ids, {}),
    (Structures, vectors, {}),
    (ReturnsItsInput, vectors, {}),
    (ChangesTheGraph, vectors, {}),
    (AsksForGradients, vectors, {}),
    (AsksItsWeight, vectors, {}),
]


OPAQUE: dict[Any, set[str]] = {BranchInside: {"branch"}}
"""Modules whose inside is not traced: a branch on data."""


@pytest.mark.parametrize(("build", "inputs", "options"), SHAPES, ids=[build.__name__ for build, *_ in SHAPES])
def test_a_graph_shape_equals_eager(build: Callable[[], nn.Module], inputs: Inputs, options: dict[str, Any]) -> None:
    seen = check(build, inputs, **options)
    assert not seen.fell_back
    assert seen.num_layers > 1 or build is WritesBuffers  # what touches a buffer that is written stays together
    assert set(seen.opaque) == OPAQUE.get(build, set())


def test_a_branch_at_the_root_equals_eager_without_a_graph() -> None:
    assert check(BranchAtRoot).fell_back
    assert check(BranchThenWritesAnInput, needs_grad=False).fell_back
