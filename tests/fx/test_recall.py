"""Operators on fakes of one form are inferred once, and what is recalled is what would be inferred again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe.fx.fakes import RecallingMode, is_fake
from roundpipe.fx.recall import OperatorMemo
from roundpipe.fx.sizes import expression_of, flat_tensors
from roundpipe.fx.trace.tracer import trace
from roundpipe.fx.world import FakeWorld
from tests.fx.models import CASES, causal_inputs, llama
from tests.fx.replay import eager_difference


@pytest.fixture
def world() -> Iterator[FakeWorld]:
    world = FakeWorld(nn.Linear(6, 6), ((), {"x": torch.randn(4, 6, requires_grad=True), "i": torch.ones(2, 3).long()}))
    with world.entered():
        yield world


@pytest.fixture
def inferred(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Gets every operator that is inferred, one that another is made of left out."""
    operators: list[Any] = []
    original = OperatorMemo.call

    def call(self: OperatorMemo, operator: Any, args: Any, kwargs: Any, modes: Any, infer: Callable[[], Any]) -> Any:
        def inferring() -> Any:
            operators.append(operator)
            return infer()

        is_inner = self._is_inferring  # operators that an operator is made of are no calls of the model's
        return original(self, operator, args, kwargs, modes, infer if is_inner else inferring)

    monkeypatch.setattr(OperatorMemo, "call", call)
    return operators


def form(tensor: torch.Tensor) -> Any:
    sizes = (tuple(map(expression_of, group)) for group in (tensor.shape, tensor.stride(), (tensor.storage_offset(),)))
    memory = expression_of(tensor.untyped_storage().nbytes())
    return *sizes, memory, tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_leaf, tensor._is_view()


CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "pointwise": lambda x, i: -x * 2.5 + x.sin(),
    "dtype": lambda x, i: x.to(torch.bfloat16) + i[0, 0],
    "reduction": lambda x, i: (x.sum(), x.mean(-1, keepdim=True), x.amax(0)),
    "matmul": lambda x, i: x @ x.transpose(0, 1),
    "views": lambda x, i: (x.view(-1, 2, 3), x[1:, ::2], x.t(), x.unsqueeze(1).expand(-1, 5, -1), x[..., 3:]),
    "several views": lambda x, i: x.chunk(3, dim=-1),
    "copy or view": lambda x, i: (x.reshape(-1), x.t().reshape(-1), x.t().contiguous(), x.contiguous()),
    "joined": lambda x, i: torch.cat([x, x[1:], x.new_zeros(3, 6)]),
    "several outputs": lambda x, i: (*x.max(dim=1), *torch.sort(x)),
    "attention": lambda x, i: torch.nn.functional.scaled_dot_product_attention(*[x.view(1, 2, -1, 3)] * 3),
    "made of sizes": lambda x, i: torch.arange(i.shape[1]) + torch.zeros(i.shape),
    "no gradient": lambda x, i: x.detach() * 2,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_recalled_operator_gives_what_it_would(world: FakeWorld, inferred: list[Any], name: str) -> None:
    arguments = world.arguments[1]
    first = flat_tensors(CALLS[name](arguments["x"], arguments["i"]))
    before = len(inferred)
    second = flat_tensors(CALLS[name](arguments["x"], arguments["i"]))
    assert len(inferred) == before, inferred[before:]
    assert [form(tensor) for tensor in first] == [form(tensor) for tensor in second]
    x = arguments["x"].untyped_storage()._cdata
    for one, other in zip(first, second, strict=True):
        places = [tensor.untyped_storage()._cdata for tensor in (one, other)]
        assert is_fake(other) and (places[0] == x) == (places[1] == x) and (places[0] != places[1] or places[1] == x)
        assert other.grad_fn is None or type(other.grad_fn) is type(one.grad_fn)


def test_what_is_recalled_can_be_used_like_what_was_inferred(world: FakeWorld) -> None:
    x = world.arguments[1]["x"].detach()
    (first, view), (second, other) = [(y := x * 2, y.t()[1:]) for _ in range(2)]
    versions = [tensor._version for tensor in (first, view, second, other)]
    other.add_(1)  # a view and what it lies in have one version
    assert [now._version - then for now, then in zip((first, view, second, other), versions, strict=True)] == [
        0,
        0,
        1,
        1,
    ]
    second.untyped_storage().resize_(0)
    assert second.untyped_storage().nbytes() == 0 and first.untyped_storage().nbytes() == x.untyped_storage().nbytes()
    assert (first + other.t().sum()).shape == x.shape


def test_assumptions_are_heard_of_again(world: FakeWorld, inferred: list[Any]) -> None:
    """Those that an operator makes about sizes, here that one is at most the other."""
    x, i = world.arguments[1]["x"], world.arguments[1]["i"]
    heard = []
    for _ in range(2):
        world.shapes.recent.clear()
        inferred.clear()
        x.narrow(0, 0, i.shape[0])
        heard.append(set(world.shapes.recent))
    assert heard[0] and heard[1] == heard[0] and not inferred
    asked = []
    world.shapes.in_glue, world.shapes.on_assumption = lambda: True, asked.append
    x.narrow(0, 0, i.shape[0])
    assert heard[0] <= set(asked) and not inferred


def test_what_modes_change_is_inferred_anew(world: FakeWorld) -> None:
    x, i = world.arguments[1]["x"], world.arguments[1]["i"]
    assert (i / 2).dtype is torch.float32 and (x @ x.t()).dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x.t()).dtype is torch.bfloat16
    with torch.no_grad():
        assert not (x * 2).requires_grad
    assert (x * 2).requires_grad
    torch.set_default_dtype(torch.float64)
    try:
        assert (i / 2).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert (x * 2).dtype is torch.float32 and (x * True).dtype is torch.float32
    assert (i * 2).dtype is torch.int64 and (i * 2.0).dtype is torch.float32 and (i * True).dtype is torch.int64


def test_what_data_determine_and_what_is_written_is_not_recalled(world: FakeWorld) -> None:
    x = world.arguments[1]["x"].detach()
    sizes = [x.nonzero().shape[0] for _ in range(2)]
    assert expression_of(sizes[0]) != expression_of(sizes[1]) or x.nonzero_memo is not None
    sizes = [(x + 1).nonzero().shape[0] for _ in range(2)]
    assert expression_of(sizes[0]) != expression_of(sizes[1])
    y = x.clone()
    for _ in range(2):
        version = y._version
        y.mul_(2)
        assert y._version == version + 1
    assert [(torch.tensor(number) * 1).item() for number in (3, 4)] == [3, 4]


def test_blocks_with_a_cache_are_inferred_once(inferred: list[Any]) -> None:
    """A cache that the blocks fill has each of them looked into, call by call."""
    pytest.importorskip("transformers")
    numbers = []
    for num_layers in (2, 5):
        inferred.clear()
        model = llama(num_layers=num_layers, use_cache=True)
        trace(model, (), causal_inputs(2, 8))
        numbers.append(len(inferred))
    assert numbers[1] <= numbers[0] + 3 * 12  # a block's empty tensors of its cache have data


@pytest.mark.parametrize("batch", [1, 2])
def test_a_cache_is_that_of_eager(batch: int) -> None:
    """A batch of one has the graph run on fakes once more."""
    pytest.importorskip("transformers")
    model = llama(num_layers=4, use_cache=True)
    traced = trace(model, (), causal_inputs(batch, 8))
    for inputs in (causal_inputs(batch, 8), causal_inputs(3, 12)):
        assert traced.guards.check((), inputs) is None
        difference, where = eager_difference(traced, inputs, CASES["llama_with_cache"].loss)
        assert difference < 1e-5, where


def test_a_mode_is_one_worlds(world: FakeWorld) -> None:
    other = FakeWorld(nn.Linear(6, 6), ((), {"x": torch.randn(4, 6)}))
    assert isinstance(world.mode, RecallingMode) and world.mode is not other.mode
    x = other.arguments[1]["x"]
    with other.mode:
        assert (x * 2).fake_mode is other.mode
