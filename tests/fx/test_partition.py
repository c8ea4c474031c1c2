"""Cuts: legal ones only, the right ones taken; random models run in any number of pieces."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx import Node

from roundpipe.core.errors import PartitionError
from roundpipe.fx.graph.nodes import draws_random, has_effect, mutated_by, storage_key
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.passes import cuts
from roundpipe.fx.passes import partition as partition_pass
from roundpipe.fx.passes.codegen import generate
from roundpipe.fx.passes.cost import measure
from roundpipe.fx.passes.partition import Partition, partition
from tests.fx import handmade
from tests.fx.layerwise import assert_equals_eager

WIDTH = 6


def cut(traced: TracedGraph, **options: Any) -> Partition:
    return partition(traced, measure(traced), **options)


def covered(parts: Partition) -> list[tuple[str, ...]]:
    return [chunk.module_names for chunk in parts.chunks]


def assert_is_a_chain(traced: TracedGraph, parts: Partition) -> None:
    """Every node in one place, every read made before, every value under one name."""
    made = set(traced.placeholders)
    owned = [node for chunk in parts.chunks for node in chunk.nodes if node not in parts.recomputed]
    assert len(owned) == len(set(owned))
    unused: set[Node] = set()
    for node in reversed(traced.body):
        matters = node.op == "call_module" or has_effect(node) or draws_random(node)
        if not matters and all(user in unused for user in node.users):
            unused.add(node)
    assert all(node in parts.recomputed or node in set(owned) or node in unused for node in traced.body)
    for chunk in parts.chunks:
        assert set(chunk.reads) <= made
        assert not made & set(chunk.makes)
        assert set(chunk.clones) <= set(chunk.reads)
        inside = set(chunk.nodes) | set(chunk.reads)
        for node in chunk.nodes:
            assert all(source in inside or source.op == "get_attr" for source in node.all_input_nodes)
        made |= set(chunk.makes)
    assert all(node in made for node in traced.outputs)
    for earlier, later in pairwise(parts.chunks):
        carried = set(earlier.makes) | set(earlier.passes)
        assert {n for n in later.reads if n.op != "placeholder"} <= carried


# ---------------------------------------------------------------------------------- random models

Step = tuple[str, int, int]
KINDS = ("linear", "shared", "norm", "tanh", "add", "view", "detach", "scale_", "add_", "slice_", "gate")


class RandomModel(nn.Module):
    """Runs a list of steps; each takes one or two earlier values, and may write them in place."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.steps = steps
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in steps])
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [x, self.shared(x)]
        for index, (kind, first, second) in enumerate(self.steps):
            a, b = values[first % len(values)], values[second % len(values)]
            if kind == "linear":
                values.append(self.layers[index](a))
            elif kind == "shared":
                values.append(self.shared(a))
            elif kind == "norm":
                values.append(self.norm(a))
            elif kind == "tanh":
                values.append(torch.tanh(a))
            elif kind == "add":
                values.append(a + b)
            elif kind == "view":
                values.append(a.view(-1, WIDTH))
            elif kind == "detach":
                values.append(a.detach() * 2)
            elif kind == "scale_":
                values.append(a.mul_(0.5))
            elif kind == "add_":
                values.append(a.add_(b))
            elif kind == "slice_":
                a[:, :2].mul_(2)
            elif kind == "gate":
                values.append(a * (y > 0))
        return tuple(values[-3:])


def total(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return sum((value * (index + 1)).square().sum() for index, value in enumerate(outputs))  # type: ignore[return-value]


@st.composite
def random_steps(draw: st.DrawFn) -> list[Step]:
    step = st.tuples(st.sampled_from(KINDS), st.integers(0, 40), st.integers(0, 40))
    return draw(st.lists(step, min_size=2, max_size=14))


@pytest.mark.long
@given(random_steps(), st.integers(1, 8), st.booleans())
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
def test_random_models_run_in_any_number_of_pieces(steps: list[Step], pieces: int, grad: bool) -> None:
    torch.manual_seed(0)
    model = RandomModel(steps).double()
    x, y = torch.randn(2, 5, WIDTH, dtype=torch.float64).unbind(0)
    given_x = x.clone().requires_grad_(grad)
    try:
        total(model(given_x * 1 if grad else x.clone(), y)).backward()
    except RuntimeError:
        assume(False)  # eager itself can't write this value in place
    model.zero_grad()
    model.norm.reset_running_stats()
    traced = handmade.trace(model, x.clone(), y)
    with mock.patch.object(cuts, "NARROW", float("inf")), handmade.cuts_into(pieces):
        parts = cut(traced)
    assert_is_a_chain(traced, parts)
    inputs = {storage_key(node) for node in traced.placeholders}
    writes_input = any(storage_key(value) in inputs for node in traced.body for value in mutated_by(node))
    if writes_input:  # eager would change the caller's tensor, a chain works on a clone
        return
    chain = generate(traced, parts, measure(traced))
    assert_equals_eager(model, chain, x, y, loss_of=total)


# ---------------------------------------------------------------------------------- which cuts


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class Stack(nn.Module):
    def __init__(self, num_blocks: int = 5, vocabulary: int = 500) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 32)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.embed(ids))
        for block in self.blocks:
            x = block(x)
        return torch.log_softmax(self.head(self.norm(x)), -1)


def stack(num_blocks: int = 5, vocabulary: int = 500, leaves: Any = ()) -> TracedGraph:
    ids = torch.randint(0, vocabulary, (4, 16))
    return handmade.trace(Stack(num_blocks, vocabulary), ids, leaves=leaves)


@pytest.mark.parametrize("leaves", [(), (Block,)], ids=["descended", "blocks"])
@pytest.mark.parametrize("vocabulary", [500, 100_000])
@pytest.mark.parametrize("num_blocks", [1, 5, 40])
def test_blocks_embedding_and_head_are_layers(num_blocks: int, vocabulary: int, leaves: Any) -> None:
    traced = stack(num_blocks, vocabulary, leaves)
    parts = cut(traced)
    assert_is_a_chain(traced, parts)
    blocks = [{n for n in names if n.startswith("blocks")} for names in covered(parts)]
    assert all(len({name.split(".")[1] for name in names}) <= 1 for names in blocks)
    assert len(parts.chunks) >= num_blocks
    first, last = covered(parts)[0], covered(parts)[-1]
    assert first[:2] == ("embed", "dropout") and last == ("norm", "head")
    if vocabulary == 100_000:
        assert first == ("embed", "dropout")
    for chunk in parts.chunks[:-1]:
        assert len([node for node in (*chunk.makes, *chunk.passes) if node.op != "placeholder"]) == 1


class Keeping(Stack):
    """Returns what its blocks have inside, as decoders do with keys and values."""

    def __init__(self, keeps: bool) -> None:
        super().__init__(num_blocks=12)
        self.keeps = keeps

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.dropout(self.embed(ids))
        kept = []
        for block in self.blocks:
            kept.append(block.up(block.norm(x)))
            x = x + block.dropout(block.down(torch.relu(kept[-1])))
        scores = self.head(self.norm(x))
        return (scores, kept) if self.keeps else scores


def test_what_is_only_returned_does_not_decide_about_cuts() -> None:
    """It is carried past all of them; beside it, places inside blocks would seem narrow."""
    ids = torch.randint(0, 500, (4, 16))
    chunks = [cut(handmade.trace(Keeping(keeps), ids)).chunks for keeps in (False, True)]
    assert [chunk.module_names for chunk in chunks[0]] == [chunk.module_names for chunk in chunks[1]]
    assert len(chunks[1][-1].passes) == 12


def test_layers_are_called_by_their_modules() -> None:
    names = [chunk.name for chunk in cut(stack(leaves=(Block,), vocabulary=100_000)).chunks]
    assert names == ["embed .. dropout", *(f"blocks.{index}" for index in range(5)), "norm .. head"]
    names = [chunk.name for chunk in cut(stack()).chunks]
    assert names[1] == "blocks.0 (norm .. dropout)"


def test_small_layers_in_a_sequential_are_grouped() -> None:
    parts = []
    for _ in range(6):
        parts += [nn.Linear(2048, 2048), nn.ReLU(), nn.LayerNorm(2048)]
    found = covered(cut(handmade.trace(nn.Sequential(*parts), torch.randn(4096, 2048))))
    assert len(found) == 6
    assert all(sum(int(name) % 3 == 0 for name in names) == 1 for names in found)


def test_balance_decides_what_weighs() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
            self.large = nn.Linear(8, 8000)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.small:
                x = layer(x)
            return self.large(x)

    traced = handmade.trace(Model(), torch.randn(4, 8))
    with handmade.cuts_into(2):
        by_size = covered(cut(traced, balance="size"))
        even = covered(cut(traced, balance=lambda module: 1.0))
    assert by_size[1] == ("large",)
    assert [len(names) for names in even] in ([2, 3], [3, 2])


@pytest.mark.parametrize("balance", ["speed", 3, None])
def test_an_unknown_balance_is_refused(balance: Any) -> None:
    with pytest.raises(PartitionError, match="'time', 'size' or a function"):
        cut(stack(1), balance=balance)


def test_a_model_without_layers_is_refused() -> None:
    class Nothing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    with pytest.raises(PartitionError, match="computes nothing"):
        cut(handmade.trace(Nothing(), torch.randn(2)))


def test_a_model_of_glue_alone_is_one_layer() -> None:
    class Glue(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 2).sum()

    parts = cut(handmade.trace(Glue(), torch.randn(2)))
    assert len(parts.chunks) == 1 and [node.name for node in parts.chunks[0].makes] == ["sum_1"]


# ---------------------------------------------------------------------------------- recomputed glue


class Masked(nn.Module):
    """A mask from a long input, read by every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.register_buffer("table", torch.ones(16))

    def forward(self, x: torch.Tensor, picture: torch.Tensor) -> torch.Tensor:
        mask = picture.mean((1, 2, 3)).unsqueeze(1) * self.table
        for layer in self.layers:
            x = layer(x) * mask
        return x


def test_cheap_glue_is_recomputed_and_dear_glue_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 16)
    cheap = cut(handmade.trace(Masked(), x, torch.randn(4, 3, 8, 8)))
    assert {node.name for node in cheap.recomputed} == {"mean", "unsqueeze", "mul"}
    assert all("picture" in [node.name for node in chunk.reads] for chunk in cheap.chunks)
    dear = cut(handmade.trace(Masked(), x, torch.randn(4, 3, 1024, 1024)))
    assert not dear.recomputed & {node for chunk in dear.chunks for node in chunk.makes}
    assert [chunk.reads[-1].name for chunk in dear.chunks[1:]] != []
    assert not any("picture" in [node.name for node in chunk.reads] for chunk in dear.chunks[1:])
    monkeypatch.setattr(partition_pass, "ALLOWANCE_S", -1.0)
    never = cut(handmade.trace(Masked(), x, torch.randn(4, 3, 8, 8)))
    assert not never.recomputed


def test_glue_on_a_written_buffer_is_not_recomputed() -> None:
    class Model(Masked):
        def forward(self, x: torch.Tensor, picture: torch.Tensor) -> torch.Tensor:
            scale = picture * self.table
            for layer in self.layers:
                x = layer(x) * scale
            self.table.add_(1)
            return x

    traced = handmade.trace(Model(), torch.randn(4, 16), torch.randn(4, 16))
    table = next(node for node in traced.graph.nodes if node.op == "get_attr" and node.name == "table")
    assert not table.meta.get("effect")
    with traced.graph.inserting_before(traced.graph.output_node()):
        write = traced.graph.call_method("add_", (table, 1))
    write.meta.update(value=table.meta["value"], effect=True, mutates=(table,))
    parts = cut(traced)
    assert not parts.recomputed
    chunks = [c for c in parts.chunks if any(write is n or table in n.all_input_nodes for n in c.nodes)]
    assert len(chunks) == 1


# ---------------------------------------------------------------------------------- gradients


def test_differentiable_is_decided_by_structure() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.register_buffer("table", torch.ones(4))

        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> Any:
            h = self.a(x)
            cut_off = h.detach()
            positions = ids * self.table
            largest = h.argmax(-1)
            return self.b(h + cut_off + positions), largest, cut_off * 2, x * 2

    traced = handmade.trace(Model(), torch.randn(3, 4), torch.ones(3, 4, dtype=torch.int64))
    parts = cut(traced)
    names = {node.name for node in parts.differentiable if node.op.startswith("call_")}
    assert names == {"a", "add", "add_1", "b", "mul_2"}
    assert {node.name for node in parts.differentiable if node.op == "placeholder"} == {"x"}


def test_frozen_parameters_still_count_as_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    parts = cut(handmade.trace(model, torch.randn(3, 4)))
    assert {node.name for node in parts.differentiable} >= {"_0", "_1"}
