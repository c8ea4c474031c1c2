"""Numbers that a model's code reads from data of its arguments, in a piece of a batch.

``tokens = mask.sum().item()`` may be a size, which is the piece's own, or what something is divided by or compared
with, which is the batch's. What the code does with it tells: arithmetic with tensors, a number with a fraction, or an
order takes the batch's. Whether there are any, or as many as of something else, each piece decides for itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from roundpipe.fx.graph.nodes import PRODUCTS
from roundpipe.fx.sizes import is_shared_number

_OPERATIONS = PRODUCTS | frozenset(
    "add radd iadd sub rsub isub subtract gt lt ge le eq ne greater less clamp clip clamp_min clamp_max "
    "lerp where masked_fill fill".split()
)
"""Names, without underscores around them, of what computes with the number of a tensor's operand."""


class NumberOfPiece(int):
    """The piece's number, which is also what C code takes it for.

    Args:
        own: the piece's.
        whole: the batch's.
        note_whole: told when the batch's is taken.
        refuse: raises where the number is divided by a size of the piece's: neither number will do.
    """

    whole: int
    note_whole: Callable[[], None]
    refuse: Callable[[], None]

    def __new__(
        cls, own: int, whole: int, note_whole: Callable[[], None], refuse: Callable[[], None] = lambda: None
    ) -> NumberOfPiece:
        number = super().__new__(cls, own)
        number.whole, number.note_whole, number.refuse = whole, note_whole, refuse
        return number

    def take_whole(self) -> int:
        """The batch's number."""
        self.note_whole()
        return self.whole

    def __float__(self) -> float:
        return float(self.take_whole())

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)

    def __eq__(self, other: object) -> Any:
        return int(self) == (int(other) if isinstance(other, NumberOfPiece) else other)

    def __ne__(self, other: object) -> Any:
        return int(self) != (int(other) if isinstance(other, NumberOfPiece) else other)

    __hash__ = int.__hash__


class SymbolOfPiece(torch.SymInt):
    """The same of numbers that are inputs of a graph.

    Args:
        own: the piece's.
        whole: the batch's.
        refuse: as above.
    """

    def __init__(self, own: torch.SymInt, whole: torch.SymInt, refuse: Callable[[], None]) -> None:
        super().__init__(own.node)
        self.whole, self.refuse = whole, refuse

    def take_whole(self) -> torch.SymInt:
        """The batch's number."""
        return self.whole

    def __float__(self) -> float:
        return float(self.whole)


_OfPiece = NumberOfPiece | SymbolOfPiece


def whole_operands(function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a function of torch's is called with: numbers of the batch where it computes fractions with them.

    What is added to integers may be an offset into the piece.
    """
    if not any(isinstance(each, _OfPiece) for each in args):
        return args
    name = getattr(function, "__name__", "").strip("_")
    floats = "div" in name or any(isinstance(each, torch.Tensor) and each.dtype.is_floating_point for each in args)
    return tuple(
        (each.take_whole() if floats and name in _OPERATIONS else _own(each)) if isinstance(each, _OfPiece) else each
        for each in args
    )


def _own(number: Any) -> Any:
    """The piece's number; a plain number as it is."""
    if isinstance(number, SymbolOfPiece):
        return torch.SymInt(number.node)
    return int(number) if isinstance(number, NumberOfPiece) else number


def _whole(number: Any) -> Any:
    return number.whole if isinstance(number, _OfPiece) else number


def _is_size(number: Any) -> bool:
    """Whether it is made of sizes, or of other numbers, of the piece's."""
    is_symbol = isinstance(number, torch.SymInt | torch.SymFloat) and not isinstance(number, SymbolOfPiece)
    return is_symbol and not is_shared_number(number)


_FRACTIONS = (operator.truediv, operator.pow)
"""With a size they are refused, since that is the piece's."""


def _arithmetic(function: Callable[..., Any], is_reflected: bool = False) -> Callable[[_OfPiece, Any], Any]:
    """What is an integer may be a size yet; a number with a fraction is not."""

    def computed(number: _OfPiece, other: Any) -> Any:
        def result(*pair: Any) -> Any:
            return function(*(pair[::-1] if is_reflected else pair))

        if _is_size(other):
            if function not in _FRACTIONS:
                return result(_own(number), other)
            number.refuse()
            return NotImplemented
        if not isinstance(other, int | float | torch.SymInt | torch.SymFloat):
            return NotImplemented
        numbers = [each for each in (number, other) if isinstance(each, _OfPiece)]

        def note() -> None:
            for each in numbers:
                each.take_whole()

        whole = result(_whole(number), _whole(other))
        if isinstance(whole, int | torch.SymInt):
            own = result(_own(number), _own(other))
            if type(own) is int and type(whole) is int:
                return NumberOfPiece(own, whole, note, number.refuse)
            symbol = next((each for each in numbers if isinstance(each, SymbolOfPiece)), None)
            if symbol is not None and isinstance(own, torch.SymInt) and isinstance(whole, torch.SymInt):
                return SymbolOfPiece(own, whole, symbol.refuse)
        note()
        return whole

    return computed


def _order(function: Callable[[Any, Any], bool], least: int) -> Callable[[_OfPiece, Any], Any]:
    """Compared with ``least``, it tells whether there are any."""

    def compared(number: _OfPiece, other: Any) -> Any:
        if _is_size(other):
            return function(_own(number), other)
        if not isinstance(other, int | float | torch.SymInt | torch.SymFloat):
            return NotImplemented
        if isinstance(other, int | float) and not isinstance(other, NumberOfPiece) and other <= least:
            return function(_own(number), other)
        other = other.take_whole() if isinstance(other, _OfPiece) else other
        return function(number.take_whole(), other)

    return compared


for _kind in (NumberOfPiece, SymbolOfPiece):
    for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        _function = getattr(operator, _name)
        setattr(_kind, f"__{_name}__", _arithmetic(_function))
        setattr(_kind, f"__r{_name}__", _arithmetic(_function, is_reflected=True))
    for _name, _least in (("gt", 0), ("ge", 1), ("lt", 1), ("le", 0)):
        setattr(_kind, f"__{_name}__", _order(getattr(operator, _name), _least))
