"""Symbolic sizes: their expressions, and an environment that records what is assumed of them.

The environment takes nothing for granted: not that equal numbers are one size, nor that a size is neither 0 nor 1.
It tells the assumptions of the model's own Python ("glue") from those that an operator makes to infer its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.printers import PythonPrinter

from roundpipe.fx.locations import model_location
from roundpipe.fx.operations import SizeExpression, compile_expression

Symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _never() -> bool:
    return False


def _nothing() -> None:
    pass


class ShapeWorld(ShapeEnv):
    """A shape environment that knows which of its answers the model's own Python asked for."""

    def __init__(self, in_glue: Callable[[], bool] = _never) -> None:
        super().__init__(duck_shape=False, specialize_zero_one=False)
        self.in_glue = in_glue
        self.on_fixed_size: Callable[[], None] = _nothing
        """Called when glue turns a size into a plain number, such as for a loop over it."""
        self.glue_guards: dict[sympy.Basic, str] = {}
        """What held when glue asked, in the order asked, and where it asked."""
        self.recent: list[sympy.Basic] = []
        """What held when the call in progress asked; for `promote_recent`."""

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        answer = super().evaluate_expr(orig_expr, *args, **kwargs)
        if getattr(orig_expr, "free_symbols", None):
            holds = _that(orig_expr, answer)
            if self.in_glue():
                if holds not in self.glue_guards:
                    self.glue_guards[holds] = model_location()
                    if not orig_expr.is_Boolean and not orig_expr.is_Relational:
                        self.on_fixed_size()
            else:
                self.recent.append(holds)
        return answer

    def forget_listeners(self) -> None:
        """Tracing is over; torch's caches keep this object, which must not keep the model."""
        self.in_glue, self.on_fixed_size = _never, _nothing

    def promote_recent(self) -> None:
        """Counts what the call just made asked as asked by glue: its result was a Python value."""
        for holds in self.recent:
            self.glue_guards.setdefault(holds, model_location())

    def num_fixed_sizes(self) -> int:
        """Number of size symbols that turned out to be one number."""
        return sum(bool(value.is_number) for value in self.replacements.values())

    def size_guards(self) -> list[sympy.Basic]:
        """Every assumption made about sizes so far, whoever made it."""
        return list(dict.fromkeys(guard.expr for guard in self.guards))


def _that(expression: sympy.Basic, answer: Any) -> sympy.Basic:
    """The proposition that ``expression`` evaluates to ``answer``."""
    if answer in (True, sympy.true):
        return expression if expression.is_Boolean or expression.is_Relational else sympy.Eq(expression, 1)
    if answer in (False, sympy.false):
        return sympy.Not(expression)
    return sympy.Eq(expression, answer, evaluate=False)


def expression_of(size: Any) -> Any:
    """The expression a symbolic number stands for now; a plain number as it is."""
    return size.node.expr if isinstance(size, Symbolic) else size


def is_data_dependent(expression: Any) -> bool:
    """Whether an expression contains a size that only the data determine."""
    symbols = getattr(expression, "free_symbols", ())
    return any(str(symbol).startswith(("u", "zuf")) for symbol in symbols)


def expression_source(expression: sympy.Basic) -> str:
    """Python source of an expression."""
    return str(PythonPrinter().doprint(expression))


def size_function(expression: sympy.Basic, symbols: Iterable[sympy.Symbol]) -> SizeExpression:
    """A callable of the symbols' values that evaluates an expression."""
    return SizeExpression(expression_source(expression), tuple(str(symbol) for symbol in symbols))


def compiled(expression: sympy.Basic, symbols: Iterable[sympy.Symbol]) -> Callable[..., Any]:
    """A plain function of the symbols' values that evaluates an expression."""
    return compile_expression(expression_source(expression), tuple(str(symbol) for symbol in symbols))
