"""What a trace assumed about the sizes of its inputs.

Assumptions are of two kinds. What the model's own Python asked (``if x.shape[0] == 1``) must hold, and so must sizes be
equal that were taken for one. What operators asked to infer a shape only matters through the shape: if such an
assumption fails, the graph is run once on fakes of the new sizes, and if every node has the shape that the trace says,
the assumptions made in that run are a second sufficient set (a *variant*).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import sympy
import torch

from roundpipe.fx.fakes import FakeWorld
from roundpipe.fx.sizes import compiled, expression_source


@dataclass(frozen=True, slots=True)
class SizeGuard:
    """One assumption about sizes."""

    source: str
    """The assumption as Python."""
    holds: Callable[..., Any]
    location: str = ""
    """Where the model's code asked; empty for what an operator asked."""


class SizeSystem:
    """Assumptions over the sizes of one world's inputs: expressions in its symbols, with where they were asked."""

    def __init__(self, world: FakeWorld, expressions: dict[sympy.Basic, str]) -> None:
        symbols = world.symbols()
        self.positions = list(symbols.values())
        self.symbols = list(symbols)
        self.guards: list[SizeGuard] = []
        for expression, location in expressions.items():
            # others are about numbers, or about a size that only data determine: no input decides them
            if expression.free_symbols and expression.free_symbols <= set(symbols):
                source, holds = expression_source(expression), compiled(expression, self.symbols)
                self.guards.append(SizeGuard(source, holds, location))

    def first_failure(self, shapes: Sequence[torch.Size]) -> SizeGuard | None:
        """The first assumption that tensors of these shapes break."""
        sizes = [shapes[index][dim] for index, dim in self.positions]
        for guard in self.guards:
            try:
                if not guard.holds(*sizes):
                    return guard
            except ZeroDivisionError:
                return guard
        return None


class Verifier(Protocol):
    """Runs the traced graph on fakes of other sizes."""

    def __call__(self, arguments: Any) -> SizeSystem | str:
        """What the run assumed if every shape is the traced one, otherwise which one is not."""
        ...


def glue_assumptions(world: FakeWorld) -> dict[sympy.Basic, str]:
    """What the model's own Python asked, with where, and the sizes that were taken for equal."""
    return {**_equalities(world), **world.shapes.glue_guards}


def size_assumptions(world: FakeWorld) -> dict[sympy.Basic, str]:
    """All that a world assumed about sizes, whoever asked."""
    return {**dict.fromkeys(world.shapes.size_guards(), ""), **_equalities(world)}


def _equalities(world: FakeWorld) -> dict[sympy.Basic, str]:
    """The sizes that a world took for equal to another or to a number."""
    return {
        sympy.Eq(symbol, value, evaluate=False): ""
        for symbol, value in world.shapes.replacements.items()
        if isinstance(symbol, sympy.Symbol)
    }
