"""Tensors that a forward keeps on its model and that sizes alone tell, as a causal mask made at the first call.

A graph computes such a tensor anew at each call. Where the model's code finds one that an earlier run has left, the
nodes that made it there are written once more. That gives what the code finds only if a longer one begins as a shorter
one does, since it may have been left at another size; so that is tried out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from roundpipe.fx.fakes import real_world
from roundpipe.fx.graph.nodes import GraphInterpreter, draws_random, has_effect, mutated_by, needed_for, value_of
from roundpipe.fx.sizes import Symbolic, expression_of

MAX_ELEMENTS = 1 << 24
"""Of a tensor that is tried out."""
SMALL_SIZE = 64


class Recipe:
    """The nodes that made a tensor, in order, in a graph of their own."""

    def __init__(self, nodes: Sequence[Node], last: Node) -> None:
        self.sizes: dict[Node, Any] = {}
        """Nodes of sizes, which are made anew, with the sizes."""
        self.nodes: list[Node] = []
        copies: dict[Node, Node] = {}
        graph = Graph()
        for node in nodes:
            is_size = isinstance(value_of(node), Symbolic)
            copies[node] = graph.placeholder(node.name) if is_size else graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {**node.meta, "mutates": tuple(copies[value] for value in mutated_by(node))}
            if is_size:
                self.sizes[copies[node]] = value_of(node)
            else:
                self.nodes.append(copies[node])
        self.last = copies[last]

    def made(self, sizes: Mapping[sympy.Symbol, int]) -> torch.Tensor:
        """The tensor at some sizes."""
        run = _RecipeRun(self, sizes)
        with torch.no_grad():
            for node in self.nodes:
                run.values[node] = run.run_node(node)
        made: torch.Tensor = run.values[self.last]
        return made

    def is_same_at_all_sizes(self, example: Mapping[sympy.Symbol, int]) -> bool:
        """Whether it begins with the same where sizes are larger, as far as it goes."""
        for limit, most in ((SMALL_SIZE, 2 * SMALL_SIZE), (max(example.values(), default=0), 2)):
            sizes = {symbol: min(size, limit) for symbol, size in example.items()}
            more = [1, min(most, max(sizes.values(), default=0) + 3)]
            with suppress(Exception), real_world():  # its code may ask for other sizes
                first = self.made(sizes)
                others = [self.made({symbol: size + each for symbol, size in sizes.items()}) for each in more]
                return all(_begins_alike(first, other) for other in others)
        return False


def _begins_alike(first: torch.Tensor, other: torch.Tensor) -> bool:
    common = tuple(slice(min(pair)) for pair in zip(first.shape, other.shape, strict=True))
    return torch.equal(first[common].nan_to_num(), other[common].nan_to_num())


class _RecipeRun(GraphInterpreter):
    """Runs a recipe at some sizes."""

    def __init__(self, recipe: Recipe, sizes: Mapping[sympy.Symbol, int]) -> None:
        super().__init__()
        self.values = {node: int(expression_of(size).subs(sizes)) for node, size in recipe.sizes.items()}


def recipe_of(order: Sequence[Node], last: Node, symbols: Mapping[sympy.Symbol, int]) -> Recipe | None:
    """How a tensor was made, if of nothing but sizes of arguments, and alike at all sizes.

    ``symbols``: those sizes, with the example's.
    """
    nodes = _made_of_sizes(order, last)
    if nodes is None:
        return None
    recipe = Recipe(nodes, last)
    known = set(symbols)
    is_of_sizes = all(expression_of(size).free_symbols <= known for size in recipe.sizes.values())
    is_small = sum(value.numel() for node in nodes if isinstance(value := value_of(node), torch.Tensor)) <= MAX_ELEMENTS
    return recipe if is_of_sizes and is_small and recipe.is_same_at_all_sizes(symbols) else None


def _made_of_sizes(order: Sequence[Node], last: Node) -> list[Node] | None:
    """The nodes that make a value, in order, if it is made of sizes alone; those of the sizes are among them."""
    needed, behind = set(needed_for(order, [last])), [last]
    found: set[Node] = set()
    while behind:
        node = behind.pop()
        if node in found:
            continue
        found.add(node)
        if isinstance(value_of(node), Symbolic):
            continue
        writes = mutated_by(node)
        if node.op not in ("call_function", "call_method") or draws_random(node) or (has_effect(node) and not writes):
            return None
        behind += node.all_input_nodes
        behind += [each for each in needed - found if not found.isdisjoint(mutated_by(each))]
    return [node for node in order if node in found]
