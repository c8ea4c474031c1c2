"""Small models with what once went wrong in a model of the zoo."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import roundpipe
from roundpipe import RoundPipeRunConfig
from roundpipe.fx.world import FakeWorld
from tests.zoo.compare import largest_difference

WIDTH = 8


def assert_equals_eager(model: nn.Module, *batches: tuple[torch.Tensor, ...], traces: int = 1) -> Any:
    """Compiled on the first batch, it equals eager on all of them."""
    torch.manual_seed(0)
    reference = copy.deepcopy(model)
    config = RoundPipeRunConfig(num_microbatch=1)
    options: dict[str, Any] = {"devices": ["cpu"], "model_run_config": config, "fallback": False}
    with roundpipe.compile(model, example_args=batches[0], **options) as pipe:
        for batch in batches:
            model.zero_grad()
            reference.zero_grad()
            loss = pipe.forward_backward(input_args=batch, loss_fn=lambda out, label: out.square().sum())
            pipe.synchronize()
            expected = reference(*batch).square().sum()
            expected.backward()
            found, where = largest_difference(loss, model, expected.detach(), reference)
            assert found < 1e-5, where
        assert pipe.trace_count == traces
        return pipe


def stack(block: type[nn.Module], num_blocks: int = 3) -> nn.ModuleList:
    return nn.ModuleList(block() for _ in range(num_blocks))


class Router(nn.Module):
    """How many samples go to each half is told as numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        choice = self.score(x).argmax(1)
        counts = torch.zeros([x.size(0), 2]).scatter(1, choice[:, None], 1).long().sum(0)
        return choice.argsort(), counts.tolist()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / 4)

    def forward(self, x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        return torch.cat([part @ weight for part, weight in zip(x.split(sizes), self.weight, strict=True)])


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = Router(), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order, sizes = self.router(x)
        return x + torch.zeros_like(x).index_add(0, order, self.experts(x[order], sizes))


class Stack(nn.Module):
    def __init__(self, block: type[nn.Module], num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = stack(block, num_blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_sizes_that_data_determine_are_those_of_each_layer() -> None:
    """Layers of one form have one outcome on fakes, but not the same number of samples per expert."""
    torch.manual_seed(1)
    assert_equals_eager(Stack(Routed), (torch.randn(12, WIDTH),), (torch.randn(9, WIDTH),))


class Switched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.mode = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), "relu"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.up(x)
        return x + self.down(torch.relu(inner) if self.mode == "relu" else torch.tanh(inner))


class Switching(Stack):
    """Sets its layers' mode by the length of what it gets."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            block.mode = "tanh" if x.shape[0] < 10 else "relu"
        return super().forward(x)


def test_attributes_that_other_code_sets_are_seen() -> None:
    """A layer left whole would run with the attributes that it has, not with those that the forward gives it."""
    short, long = (torch.randn(4, WIDTH),), (torch.randn(12, WIDTH),)
    assert_equals_eager(Switching(Switched, num_blocks=8), short, (torch.randn(6, WIDTH),), long, short, traces=2)


class Replacing(Stack):
    """Puts new modules with the old weights into its layers when it is first called."""

    was_called = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.was_called:
            for block in self.blocks:
                new = nn.Linear(WIDTH, 16)
                new.weight, new.bias = block.up.weight, block.up.bias
                block.up = new
            self.was_called = True
        return super().forward(x)


def test_modules_that_the_first_call_makes() -> None:
    """The first run initialises weights that it drops at once, and is else the run of all other calls."""
    assert_equals_eager(Replacing(Switched), (torch.randn(12, WIDTH),), (torch.randn(9, WIDTH),))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor, embedding: nn.Embedding) -> torch.Tensor:
        return x @ embedding.weight.t() + self.bias


class Tied(nn.Module):
    """Hands a module with weights to another one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks, self.head = nn.Embedding(WIDTH, WIDTH), stack(Switched), Head()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x, self.embedding)


def test_a_module_as_an_argument() -> None:
    assert_equals_eager(Tied(), (torch.randint(0, WIDTH, (4, 6)),), (torch.randint(0, WIDTH, (5, 7)),))


class OnRealData(nn.Module):
    """Its shapes need the data of activations, so that they are found by running it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def decide(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if float(x.detach().sum()) > 1e9 else torch.tanh(self.layer(x))


class Masked(OnRealData):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.decide(x) * mask[..., None]


class InFours(OnRealData):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        assert x.shape[1] % 4 == 0, "lengths are multiples of four"
        return self.decide(x) * mask[..., None]


class Pooled(OnRealData):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.decide(x)[:, ::3] * mask[:, ::3, None]


class Embedded(nn.Module):
    def __init__(self, inner: type[nn.Module]) -> None:
        super().__init__()
        self.embedding, self.inner, self.blocks = nn.Embedding(9, WIDTH), inner(), stack(Switched)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.inner(self.embedding(ids), mask)
        for block in self.blocks:
            x = block(x)
        return x.reshape(x.shape[0], -1, WIDTH).sum(1)


@pytest.mark.parametrize("inner", [Masked, InFours, Pooled])
def test_output_sizes_found_by_running(inner: type[nn.Module]) -> None:
    """Sizes that must agree, that must be multiples, and outputs of a part of the input's length."""

    def batch(num: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randint(0, 9, (num, length)), torch.ones(num, length, dtype=torch.long)

    pipe = assert_equals_eager(Embedded(inner), batch(3, 16), batch(5, 16), batch(3, 20))
    assert "inner" in pipe._runner.source.opaque  # `explain` would trace it again


class Listed(nn.Module):
    """Reaches its modules through a list."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = [nn.AdaptiveAvgPool2d(size), nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4))]
        for index, layer in enumerate(self.layers):
            self.add_module(str(index), layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = [Listed(size) for size in (1, 2, 3)]
        for index, block in enumerate(self.blocks):
            self.add_module(str(index), block)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [nn.functional.interpolate(block(x), size=x.shape[2:], mode="bilinear") for block in self.blocks]


class Pyramid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.scales, self.last = nn.Conv2d(4, 4, 1), Scales(), nn.Conv2d(12, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.cat(self.scales(self.first(x)), 1))


def test_modules_in_lists_are_not_run_to_find_their_cost() -> None:
    model = Pyramid()
    pipe = roundpipe.compile(model, example_args=(torch.randn(3, 4, 6, 6),), devices=["cpu"])
    pipe.close()
    assert {int(b) for name, b in model.named_buffers() if "num_batches" in name} == {0}
    assert_equals_eager(Pyramid(), (torch.randn(3, 4, 6, 6),), (torch.randn(5, 4, 6, 6),))


@functools.lru_cache(maxsize=1)
def table(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32)


class Remembering(Stack):
    """Keeps its last table, as models keep position embeddings."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + table(WIDTH))


def test_a_full_cache_is_rid_of_fakes() -> None:
    """It is as large as before when all that it held was replaced."""
    table(WIDTH + 1)
    pipe = roundpipe.compile(Remembering(Switched), example_args=(torch.ones(3, WIDTH),), devices=["cpu"])
    pipe.close()
    assert not isinstance(table(WIDTH), FakeTensor)
    table.cache_clear()
    assert_equals_eager(Remembering(Switched), (torch.ones(3, WIDTH),))


def test_fakes_are_not_cached() -> None:
    """Keys with symbolic sizes cost more than running an operator on fakes again."""
    world = FakeWorld(nn.Linear(2, 2), ((torch.ones(2, 2),), {}))
    assert world.mode.cache_enabled is False
    assert "cache_enabled" in vars(FakeTensorMode()), "torch has another name for it"
