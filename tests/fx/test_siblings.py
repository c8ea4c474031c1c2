"""Runs of leaves are shared by those that can't differ, and by no others."""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Node

import roundpipe
from roundpipe.core.errors import TraceError
from roundpipe.fx.graph.nodes import hint, value_of
from roundpipe.fx.trace.leaves import Unread
from roundpipe.fx.trace.siblings import arguments_key, module_key
from roundpipe.fx.trace.tracer import trace

SIZE = 6
RUNS: Any = types.ModuleType("torch.runs")
RUNS.number = 0
"""Counts runs of blocks, out of sight: what packages such as torch have is no forward's state."""


class Block(nn.Module):
    """A leaf whose output has as many rows more as ``decide`` says."""

    def __init__(self, decide: Callable[..., int] | None = None, **attributes: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(SIZE, SIZE)
        self.decide = decide or (lambda *_: 0)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor, *further: Any) -> torch.Tensor:
        RUNS.number += 1
        num_rows = self.decide(self, *further)
        return torch.cat([self.inner(x)] * (1 + num_rows))


class Apart(nn.Module):
    """Gives every block the same input."""

    def __init__(self, blocks: Sequence[nn.Module], further: list[tuple[Any, ...]] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.further = further or [()] * len(blocks)
        self.unused = nn.Linear(100, 100)  # a small part of a model is one leaf

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [block(x, *further) for block, further in zip(self.blocks, self.further, strict=True)]


def num_runs(model: nn.Module) -> int:
    """How often blocks ran while a model was traced, whose traced shapes and gradients are those of eager."""
    x = torch.randn(4, SIZE)
    forms = [(tuple(output.shape), output.requires_grad) for output in model(x)]
    start = RUNS.number
    traced = trace(model, (x,), {})
    runs = RUNS.number - start
    assert [_form(node) for node in traced.graph.nodes if node.op == "call_module"] == forms
    return runs


def _form(node: Node) -> tuple[tuple[int, ...], bool]:
    """Of a leaf's output: the shape at the example's sizes, and whether it requires grad."""
    value = value_of(node)
    assert isinstance(value, torch.Tensor)
    return tuple(hint(size) for size in value.shape), value.requires_grad


def nothing(*_: Any) -> int:
    return 0


def test_blocks_that_are_alike_run_once() -> None:
    one = num_runs(Apart([Block(nothing)]))
    assert num_runs(Apart([Block(nothing) for _ in range(20)])) == one


@pytest.mark.parametrize(
    "values",
    [range(20), [f"blocks.{index}" for index in range(20)], [{"name": [str(i)]} for i in range(20)]],
    ids=["indices", "names", "dicts"],
)
def test_what_no_run_uses_may_differ(values: Any) -> None:
    """Of twenty blocks the first runs, without what the second differs in."""
    same = num_runs(Apart([Block(nothing, which=values[0]) for _ in values]))
    assert num_runs(Apart([Block(nothing, which=value) for value in values])) == same


def test_what_the_next_block_does_not_show_is_learned_in_a_run_of_its_own() -> None:
    """Only the last block differs."""
    same = num_runs(Apart([Block(nothing, which=0) for _ in range(5)]))
    assert num_runs(Apart([Block(nothing, which=int(index == 4)) for index in range(5)])) == same + 1


def test_what_a_run_uses_is_tried_once() -> None:
    """The first block begins without it, and again with it; then every block runs by itself."""
    one = num_runs(Apart([Block(uses, which=0)]))
    assert num_runs(Apart([Block(uses, which=which) for which in range(4)])) == 5 * one


def uses(block: Block) -> int:
    return int(block.which)


class Setting(Block):
    """Sets an attribute that blocks differ in, and never reads it."""

    def forward(self, x: torch.Tensor, *further: Any) -> torch.Tensor:
        self.which = self.then
        return super().forward(x)


@pytest.mark.parametrize("then", [0, 5], ids=["to what the first had", "to something else"])
def test_what_a_run_sets_is_set_when_blocks_differ_in_it(then: int) -> None:
    model = Apart([Setting(nothing, which=index, then=then) for index in range(3)])
    x = torch.randn(4, SIZE)
    traced = trace(model, (x,), {})
    assert [block.which for block in model.blocks] == [0, 1, 2]
    assert len([node for node in traced.graph.nodes if node.op == "call_module"]) == 3


class Counting(Block):
    """Changes its own list before it uses what blocks differ in."""

    def forward(self, x: torch.Tensor, *further: Any) -> torch.Tensor:
        self.seen.append(len(self.seen))
        return super().forward(x)


def test_a_run_that_is_begun_again_finds_what_the_first_found() -> None:
    def decide(block: Block) -> int:
        return len(block.seen) + 0 * block.which

    model = Apart([Counting(decide, seen=[], which=which) for which in range(3)])
    with pytest.raises(TraceError, match="seen"):  # it counts, which a graph would not; and counts to one
        trace(model, (torch.randn(4, SIZE),), {})
    assert [block.seen for block in model.blocks] == [[], [], []]


class InTurn(Apart):
    """Gives every block the output of the one before; the first input requires no grad."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        outputs = [x]
        for block in self.blocks:
            outputs.append(block(outputs[-1]))
        return outputs[1:]


def test_an_input_without_grad_makes_no_other_run() -> None:
    """As in the first block behind frozen embeddings."""
    one = num_runs(InTurn([Block(nothing)]))
    assert num_runs(InTurn([Block(nothing) for _ in range(20)])) == one


def test_an_input_with_grad_makes_another_run_if_outputs_have_none() -> None:
    """Frozen blocks around one that is trained: those behind it hand gradients on."""
    blocks = [Block(nothing) for _ in range(20)]
    for index, block in enumerate(blocks):
        block.requires_grad_(index == 5)
    one = num_runs(InTurn([Block(nothing)]))
    assert num_runs(InTurn(blocks)) == 3 * one  # frozen, trained, frozen behind it


def test_what_is_left_in_attributes_makes_another_run() -> None:
    """The first block keeps an activation without grad; with grad a loss might take it, which is refused."""

    class Keeping(Block):
        def forward(self, x: torch.Tensor, *further: Any) -> torch.Tensor:
            self.kept = x * 2
            return super().forward(x)

    trace(InTurn([Keeping(nothing)]), (torch.randn(4, SIZE),), {})
    with pytest.raises(TraceError, match="Keeping.kept"):
        trace(InTurn([Keeping(nothing), Keeping(nothing)]), (torch.randn(4, SIZE),), {})


def test_several_attributes_are_learned_one_after_the_other() -> None:
    """One in the first block's run, the other in one of its own."""
    blocks = [Block(nothing, one=0, other=0), Block(nothing, one=1, other=0), Block(nothing, one=0, other=1)]
    more = [Block(nothing, one=index, other=index) for index in range(2, 9)]
    assert num_runs(Apart(blocks + more)) == num_runs(Apart(blocks[:1])) + 1


USES: dict[str, tuple[Callable[..., int], Any, Any]] = {
    "a number": (lambda block: block.which, 1, 2),
    "a number named like a counter": (lambda block: int(block.layer_idx == 1), 0, 1),
    "a number, swallowing errors": (lambda block: _or_zero(lambda: block.which + 0), 1, 2),
    "a float": (lambda block: int(block.which * 2), 0.5, 1.0),
    "a truth": (lambda block: 1 if block.which is True else 0, False, True),
    "a truth or a number": (lambda block: 1 if block.which is True else 0, 1, True),
    "None or not": (lambda block: 0 if block.which is None else 1, None, 3),
    "a word": (lambda block: int(block.which == "wide"), "wide", "deep"),
    "a word inside another": (lambda block: int("wide" in f"{block.which}s"), "wide", "deep"),
    "a list's length": (lambda block: len(block.which), [1], [1, 2]),
    "a list's items": (lambda block: sum(block.which), [1, 1], [1, 2]),
    "a dict": (lambda block: block.which.get("rows", 0), {"rows": 1}, {"rows": 2}),
    "a dict's kind of items": (lambda block: int(isinstance(block.which["rows"], str)), {"rows": 1}, {"rows": "1"}),
    "a key of a dict": (lambda block: {0: 1}.get(block.which, 2), 0, 1),
    "a set": (lambda block: int(1 in block.which), {1}, {2}),
    "unpacking": (lambda block: [*block.which][-1], (1, 1), (1, 2)),
    "an object": (lambda block: block.which.rows, SimpleNamespace(rows=1), SimpleNamespace(rows=2)),
    "a closure": (lambda block: block.which(), (lambda rows: lambda: rows)(1), (lambda rows: lambda: rows)(2)),
    "a module that is not registered": (
        lambda block: block.which[0].out_features,
        [nn.Linear(1, 1)],
        [nn.Linear(1, 2)],
    ),
    "getattr with a default": (lambda block: getattr(block, "which", 0), 1, 2),
    "its dict": (lambda block: vars(block)["which"] + 0, 1, 2),
}


def _or_zero(function: Callable[[], int]) -> int:
    try:
        return function()
    except Exception:
        return 0


@pytest.mark.parametrize("use", USES)
def test_what_a_run_uses_makes_another(use: str) -> None:
    decide, one, other = USES[use]
    name = "layer_idx" if "counter" in use else "which"
    num_runs(Apart([Block(decide, **{name: value}) for value in (one, other, one, other)]))


def test_attributes_of_other_paths_are_not_taken_for_unused() -> None:
    """What the first kind never looks at, the second does."""

    def decide(block: Block) -> int:
        return int(vars(block)["rows"]) if block.kind == "wide" else 0

    kinds = ["deep", "deep", "wide", "wide", "deep", "wide"]
    num_runs(Apart([Block(decide, kind=kind, rows=index) for index, kind in enumerate(kinds)]))


def test_hooks_make_another_run() -> None:
    blocks = [Block(nothing) for _ in range(3)]
    blocks[1].register_forward_hook(lambda module, args, output: torch.cat([output, output]))
    blocks[2].inner.register_forward_pre_hook(lambda module, args: (torch.cat([args[0], args[0]]),))
    num_runs(Apart(blocks))


def test_a_model_that_is_compiled_makes_no_other_run() -> None:
    """Its state is watched, by hooks on saving and loading that each module has by itself."""
    one = num_runs(Apart([Block(nothing)]))
    model = Apart([Block(nothing) for _ in range(5)])
    with roundpipe.compile(model, devices=["cpu"]):
        assert num_runs(model) == one


def test_a_forward_of_its_own_makes_another_run() -> None:
    blocks = [Block(nothing) for _ in range(3)]
    blocks[1].__dict__["forward"] = lambda x: torch.cat([x, x])
    num_runs(Apart(blocks))


def test_training_makes_another_run() -> None:
    blocks = [Block(lambda block: int(block.training)) for _ in range(2)]
    blocks[1].decide = blocks[0].decide
    blocks[1].eval()
    num_runs(Apart(blocks))


@pytest.mark.parametrize(
    "further",
    [[(), ([],)], [((),), ([],)], [(1,), (2,)], [(1,), (True,)], [("a",), ("b",)], [([1],), ((1,),)], [({},), ([],)]],
    ids=repr,
)
def test_arguments_make_another_run(further: list[tuple[Any, ...]]) -> None:
    def decide(block: Block, *given: Any) -> int:
        return sum(map(ord, repr(given))) % 7

    num_runs(Apart([Block(decide), Block(decide)], further))


def changed_key(change: Callable[[Block], Any]) -> bool:
    """Whether a change gives a block another form."""
    block, other = Block(nothing), Block(nothing)
    change(other)
    keys = module_key(block), module_key(other)
    return keys[0] != keys[1]


def test_weights_make_another_form() -> None:
    def tied(block: Block) -> None:
        block.again = nn.Linear(SIZE, SIZE)
        block.again.weight = block.inner.weight

    def not_tied(block: Block) -> None:
        block.again = nn.Linear(SIZE, SIZE)

    assert not changed_key(lambda block: None)
    assert changed_key(lambda block: block.inner.requires_grad_(False))
    assert changed_key(lambda block: block.inner.double())
    assert changed_key(lambda block: block.inner.to("meta"))
    assert changed_key(lambda block: setattr(block, "inner", nn.Linear(SIZE, SIZE, bias=False)))
    assert changed_key(lambda block: setattr(block, "inner", nn.Linear(SIZE, SIZE + 1)))
    assert changed_key(lambda block: setattr(block.inner.weight, "data", torch.zeros(SIZE, SIZE + 1)))
    assert changed_key(lambda block: block.register_buffer("more", torch.zeros(1)))
    one, other = Block(nothing), Block(nothing)
    tied(one)
    not_tied(other)
    assert module_key(one) != module_key(other)


def test_tensors_among_arguments_make_another_key() -> None:
    one, other = torch.zeros(2, 3), torch.zeros(2, 3)
    assert arguments_key(((one, one), {})) == arguments_key(((other, other), {}))
    assert arguments_key(((one, one), {})) != arguments_key(((one, other), {}))
    for changed in (one.double(), one.t(), one[:, :2], torch.zeros(3, 2).t()):
        assert arguments_key(((one,), {})) != arguments_key(((changed,), {}))
    assert arguments_key(((one,), {})) != arguments_key(((), {"x": one}))


def test_random_numbers_of_python_are_noticed_in_every_block() -> None:
    """A block that draws is marked, the second one as well as the first."""

    def decide(block: Block) -> int:
        random.random()
        return 0

    traced = trace(Apart([Block(decide), Block(decide)]), (torch.randn(4, SIZE),), {})
    assert [node.meta["random"] for node in traced.graph.nodes if node.op == "call_module"] == [True, True]


def test_the_stand_in_tells_whatever_is_done_with_it() -> None:
    uses: list[Callable[[Any], Any]] = [
        bool, len, str, repr, iter, hash, int, float, list, "{}".format, range, callable_attribute,
        lambda x: x + 1, lambda x: 1 + x, lambda x: x == x, lambda x: x[0], lambda x: 1 in x, lambda x: x < 1,
        lambda x: f"{x}", lambda x: -x, lambda x: x.items(), lambda x: {x: 1}, lambda x: x(), lambda x: [0][x],
        lambda x: x**2, lambda x: hasattr(x, "keys"), lambda x: setattr(x, "a", 1), lambda x: isinstance(x, str),
    ]  # fmt: skip
    for use in uses:
        unread = Unread()
        with pytest.raises((LookupError, TypeError)):
            use(unread)
        assert unread.is_used()
    unread = Unread()
    assert unread is not None and not unread.is_used()


def callable_attribute(value: Any) -> Any:
    return value.bit_length()
