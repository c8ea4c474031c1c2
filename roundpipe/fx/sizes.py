"""Symbolic sizes: their expressions, an environment that records what is assumed of them, and a check of that.

The environment takes nothing for granted: not that equal numbers are one size, nor that a size is neither 0 nor 1.
It tells the assumptions of the model's own Python ("glue") from those that an operator makes to infer its shape.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._sympy.printers import PythonPrinter

from roundpipe.core import trees
from roundpipe.core.contexts import contextmanager
from roundpipe.fx.locations import model_location
from roundpipe.fx.operations import MATH_FUNCTIONS, SizeExpression

Symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool)
_VALUES = (torch.Tensor, *Symbolic)


class SizeFixed(BaseException):
    """Code asked for a size as a plain number, such as for a loop over it; no `Exception`, which it may catch."""


class Noted(NamedTuple):
    """Something assumed about sizes."""

    holds: sympy.Basic
    gives_number: bool
    """Whether it says what number a size is."""


class ShapeWorld(ShapeEnv):
    """A shape environment that knows which of its answers the model's own Python asked for."""

    def __init__(self) -> None:
        super().__init__(duck_shape=False, specialize_zero_one=False)
        self.forget_listeners()
        self.glue_guards: dict[sympy.Basic, str] = {}
        """What held when glue asked, in the order asked, and where it asked."""
        self.decisions: dict[sympy.Basic, str] = {}
        """Those of them that say whether something holds, and not what number a size is.

        Whether a size is 1 is asked to broadcast, which gives the same whatever the answer.
        """
        self.recent: list[sympy.Basic] = []
        """What held when the call in progress asked; for `promote_recent`."""
        self._numbers_given: set[sympy.Basic] = set()
        self.keeps_open = False
        """Whether no size becomes a plain number now."""
        self.numbers: dict[sympy.Basic, sympy.Basic] = {}
        """Symbols that stand for no size, but for a number of Python's, and what they are in the example."""
        self._asked_of_numbers: dict[sympy.Basic, str] = {}
        """What held when operators asked about numbers alone, of which torch's own guards know nothing."""
        self.own_numbers: set[sympy.Basic] = set()
        """Those of them that each piece of a batch has its own of."""
        self._log: dict[Noted, None] | None = None

    def open_number(self, number: float, name: str, *, is_own: bool = False) -> tuple[sympy.Symbol, Any]:
        """A symbol for a number of Python's, and what code gets in its place; ``is_own``: as in `own_numbers`."""
        source = source_named(name)
        symbol = self.create_unspecified_symbol(number, source, DimDynamic.DYNAMIC)
        self.numbers[symbol] = sympy.sympify(number)
        if is_own:
            self.own_numbers.add(symbol)
        make = self.create_symfloatnode if isinstance(number, float) else self.create_symintnode
        return symbol, make(symbol, hint=number, source=source)

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        gives_number = _gives_number(orig_expr)
        if self.numbers and self.is_of_numbers(orig_expr):
            answer = orig_expr.xreplace(self.numbers)
            self._note(Noted(_that(orig_expr, answer), gives_number))
            return answer
        if gives_number and self.keeps_open:
            raise SizeFixed
        try:
            answer = super().evaluate_expr(orig_expr, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            taken = None if self.in_glue() else self._taken(orig_expr)
            if taken is None:
                raise
            return taken
        if gives_number:
            self._numbers_given.add(orig_expr)
        if getattr(orig_expr, "free_symbols", None):
            self._note(Noted(_that(orig_expr, answer), gives_number))
        return answer

    def is_of_numbers(self, expression: Any) -> bool:
        """Whether somebody asks about numbers alone: they hear what these are, and the graph keeps the symbols."""
        symbols: set[sympy.Basic] = getattr(expression, "free_symbols", set())
        return bool(symbols) and symbols <= self.numbers.keys()

    def _get_stack_summary(self, is_debug: bool = False, framework_loc: str | None = None) -> tuple[Any, str]:
        """Torch would note lines of code that nobody reads, and import for it what exports models."""
        return super()._get_stack_summary(is_debug, framework_loc or "the model's forward")

    def _taken(self, expression: sympy.Basic) -> bool | None:
        """What an operator is told that compares sizes of which only the data tell some; None: it asks another thing.

        Those of torch before 2.12 ask whether two sizes are equal, and refuse them else, and whether one is 1, to
        broadcast it. Sizes are taken to be equal and not to be 0 or 1; when the model runs, the operator sees them.
        """
        unknown = {symbol for symbol in expression.free_symbols if is_data_dependent(symbol)}
        if not isinstance(expression, (sympy.Eq, sympy.Ne)) or not unknown <= self.size_like:
            return None
        is_small = any(side.is_number and side <= 1 for side in expression.args)
        return isinstance(expression, sympy.Ne) == is_small

    def _note(self, noted: Noted) -> None:
        if self._log is not None:
            self._log[noted] = None
        if self.in_glue():
            if noted.holds not in self.glue_guards:
                location = self.glue_guards[noted.holds] = model_location()
                if not noted.gives_number and not _asks_for_one(noted.holds):
                    self.decisions[noted.holds] = location
                self.on_assumption(noted.holds)
                if noted.gives_number:
                    self.on_fixed_size()
        else:
            self.recent.append(noted.holds)
            if self.numbers and self.is_of_numbers(noted.holds):
                self._asked_of_numbers[noted.holds] = ""

    def asked_of_numbers(self) -> list[sympy.Basic]:
        """What held when the call in progress asked about numbers alone."""
        return [holds for holds in self.recent if holds in self._asked_of_numbers]

    def promote(self, asked: Iterable[sympy.Basic]) -> None:
        """Counts this as asked by glue."""
        for holds in asked:
            self.glue_guards.setdefault(holds, model_location())

    def note_again(self, noted: Iterable[Noted]) -> None:
        """What was assumed before is assumed once more."""
        for each in noted:
            self._note(each)

    @contextmanager
    def notes(self) -> Iterator[dict[Noted, None]]:
        """What is assumed inside, in order."""
        log: dict[Noted, None] = {}
        self._log = log
        try:
            yield log
        finally:
            self._log = None

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """Inside, no size becomes a plain number.

        Raises:
            SizeFixed: one would.
        """
        self.keeps_open = True
        try:
            yield
        finally:
            self.keeps_open = False

    def forget_listeners(self) -> None:
        """Tracing is over; torch's caches keep this object, which must not keep the model."""
        self.in_glue: Callable[[], bool] = lambda: False
        self.on_fixed_size: Callable[[], None] = lambda: None
        """Called when glue turns a size into a plain number, such as for a loop over it."""
        self.on_assumption: Callable[[sympy.Basic], None] = lambda holds: None
        """Called with what held when glue asked."""

    def promote_recent(self) -> None:
        """Counts what the call just made asked as asked by glue: its result was a Python value."""
        self.promote(self.recent)

    def num_fixed_sizes(self) -> int:
        """Number of sizes that turned out to be one number, or were asked for as one."""
        return len(self._numbers_given) + sum(bool(value.is_number) for value in self.replacements.values())

    def glue_assumptions(self) -> dict[sympy.Basic, str]:
        """What the model's own Python asked, with where, and the sizes that were taken for equal."""
        return {**self._equalities(), **self.glue_guards}

    def size_assumptions(self) -> dict[sympy.Basic, str]:
        """All that was assumed about sizes, whoever asked."""
        asked = dict.fromkeys((guard.expr for guard in self.guards), "")
        return {**asked, **self._asked_of_numbers, **self._equalities()}

    def _equalities(self) -> dict[sympy.Basic, str]:
        """The sizes that were taken for equal to another or to a number."""
        pairs = self.replacements.items()
        return {sympy.Eq(size, to, evaluate=False): "" for size, to in pairs if isinstance(size, sympy.Symbol)}


class MathFunction(sympy.Function):
    """A function of Python's ``math`` of a symbol; of a number it is the number."""

    is_real = True

    @classmethod
    def eval(cls, number: sympy.Basic) -> sympy.Basic | None:
        """What it is, if that is known."""
        function = getattr(math, cls.__name__.removeprefix("math_"))
        return sympy.Float(function(float(number))) if number.is_number else None


_MATH = {name: type(f"math_{name}", (MathFunction,), {}) for name in MATH_FUNCTIONS}


def math_of(name: str, number: Any) -> Any:
    """A function of Python's ``math`` of a symbolic number that is made of inputs that are numbers; None for others."""
    world, expression = number.node.shape_env, expression_of(number)
    if not isinstance(world, ShapeWorld) or not world.is_of_numbers(expression):
        return None
    value = getattr(math, name)(number.node.hint)
    return world.create_symfloatnode(_MATH[name](expression), hint=value)


def source_named(name: str) -> Any:
    """What torch wants to know of where a symbol comes from."""
    from torch._dynamo.source import ConstantSource  # takes seconds, which torch takes when operators run on fakes

    return ConstantSource(name)


def forget_worlds() -> None:
    """Empty the caches of torch's shape environments: some keep every one that they were asked about, for ever."""
    for method in vars(ShapeEnv).values():
        if hasattr(method, "cache_clear"):
            method.cache_clear()


def _that(expression: sympy.Basic, answer: Any) -> sympy.Basic:
    """The proposition that ``expression`` evaluates to ``answer``."""
    if answer in (True, sympy.true):
        return expression if expression.is_Boolean or expression.is_Relational else sympy.Eq(expression, 1)
    if answer in (False, sympy.false):
        return sympy.Not(expression)
    return sympy.Eq(expression, answer, evaluate=False)


def _asks_for_one(holds: sympy.Basic) -> bool:
    return isinstance(holds, (sympy.Eq, sympy.Ne)) and 1 in holds.args


def equates_with(holds: sympy.Basic, numbers: Collection[float]) -> bool:
    """Whether it says if a size is one of some numbers."""
    return isinstance(holds, (sympy.Eq, sympy.Ne)) and any(each.is_number and each in numbers for each in holds.args)


@functools.lru_cache(maxsize=4096)  # operators ask the same of the same sizes again and again
def _gives_number(expression: Any) -> bool:
    """Whether the answer to an expression is a size itself, and not whether something holds."""
    is_open = bool(getattr(expression, "free_symbols", None)) and not is_data_dependent(expression)
    return is_open and not expression.is_Boolean and not expression.is_Relational


def expression_of(size: Any) -> Any:
    """The expression a symbolic number stands for now; a plain number as it is."""
    return size.node.expr if isinstance(size, Symbolic) else size


def expressions_of(sizes: Sequence[Any]) -> tuple[Any, ...]:
    """`expression_of` each."""
    return tuple(sizes) if _INTEGERS.issuperset(map(type, sizes)) else tuple(map(expression_of, sizes))


_INTEGERS = frozenset({int})


def is_shared_number(size: Any) -> bool:
    """Whether a symbolic number is made of numbers that all pieces of a batch have in common, and of no size."""
    world, symbols = size.node.shape_env, size.node.expr.free_symbols
    return isinstance(world, ShapeWorld) and symbols <= world.numbers.keys() - world.own_numbers


def is_data_dependent(expression: Any) -> bool:
    """Whether an expression contains a size that only the data determine."""
    return type(expression) is not int and any(
        symbol.name.startswith(("u", "zuf")) for symbol in getattr(expression, "free_symbols", ())
    )


def size_function(expression: sympy.Basic, symbols: Iterable[sympy.Symbol]) -> SizeExpression:
    """A callable of the symbols' values that evaluates an expression."""
    return SizeExpression(str(PythonPrinter().doprint(expression)), tuple(map(str, symbols)))


@dataclass(frozen=True, slots=True)
class SizeGuard:
    """One assumption about sizes."""

    holds: SizeExpression
    location: str
    """Where the model's code asked; empty for what an operator asked."""
    is_equality: bool = False
    """Whether it says that something is a certain number."""


class SizeSystem:
    """Assumptions over the sizes of inputs.

    Args:
        symbols: each size symbol with the index of its input and its dimension.
        expressions: the assumptions in these symbols, with where they were asked.
    """

    def __init__(self, symbols: Mapping[sympy.Symbol, tuple[int, int]], expressions: Mapping[sympy.Basic, str]) -> None:
        self.positions = {str(symbol): position for symbol, position in symbols.items()}
        self.guards = [
            SizeGuard(size_function(expression, symbols), location, isinstance(expression, sympy.Eq))
            for expression, location in expressions.items()
            # others are about numbers, or about a size that only data determine: no input decides them
            if expression.free_symbols and expression.free_symbols <= symbols.keys()
        ]

    def first_failure(self, shapes: Sequence[Sequence[Any]]) -> SizeGuard | None:
        """The first assumption that tensors of these shapes break; a number that varies is like a shape of one size."""
        return next(self.failures(shapes), None)

    def failures(self, shapes: Sequence[Sequence[Any]]) -> Iterator[SizeGuard]:
        """Every one, in order."""
        sizes = [shapes[index][dim] for index, dim in self.positions.values()]
        for guard in self.guards:
            try:
                if not guard.holds(*sizes):
                    yield guard
            except (ArithmeticError, ValueError):  # of a number that a function of math doesn't take
                yield guard


def flat_values(*values: Any) -> list[Any]:
    """The tensors and symbolic numbers in some arguments, fast for the usual containers."""
    result: list[Any] = []
    for value in values:
        if isinstance(value, _VALUES):
            result.append(value)
        elif isinstance(value, (list, tuple)):
            result += flat_values(*value)
        elif type(value) is dict:
            result += flat_values(*value.values())
        elif not isinstance(value, trees.PLAIN):
            result += [leaf for leaf in trees.leaves(value) if isinstance(leaf, _VALUES)]
    return result


def flat_tensors(*values: Any) -> list[torch.Tensor]:
    """The tensors in some arguments."""
    return [value for value in flat_values(*values) if isinstance(value, torch.Tensor)]


def flat_sizes(*values: Any) -> list[Any]:
    """The symbolic numbers in some arguments, and every dimension of the tensors."""
    flat = flat_values(*values)
    return [size for value in flat for size in (value.shape if isinstance(value, torch.Tensor) else (value,))]


def tensor_of_sizes(data: Any, **options: Any) -> torch.Tensor:
    """The fake of ``torch.tensor(sizes)``; torch itself would fix the sizes, and remember them."""
    numbers = trees.map_leaves(data, lambda leaf: 2 if isinstance(leaf, Symbolic) else leaf)
    like = torch.tensor(numbers, **options)
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)
