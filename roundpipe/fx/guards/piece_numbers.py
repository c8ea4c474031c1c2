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

_OPERATIONS = PRODUCTS | frozenset("add radd iadd sub rsub isub subtract".split())
"""Names, without underscores around them, of what computes with the number of a tensor's operand."""


class NumberOfPiece(int):
    """The piece's number, which is also what C code takes it for.

    Args:
        own: the piece's.
        whole: the batch's.
        note_whole: told when the batch's is taken.
    """

    whole: int
    note_whole: Callable[[], None]

    def __new__(cls, own: int, whole: int, note_whole: Callable[[], None]) -> NumberOfPiece:
        number = super().__new__(cls, own)
        number.whole, number.note_whole = whole, note_whole
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


def whole_operands(function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a function of torch's is called with: numbers of the batch where it computes fractions with them.

    What is added to integers may be an offset into the piece.
    """
    if not any(type(each) is NumberOfPiece for each in args):
        return args
    name = getattr(function, "__name__", "").strip("_")
    floats = "div" in name or any(isinstance(each, torch.Tensor) and each.dtype.is_floating_point for each in args)
    return tuple(
        (each.take_whole() if floats and name in _OPERATIONS else int(each)) if type(each) is NumberOfPiece else each
        for each in args
    )


_FRACTIONS = (operator.truediv, operator.pow)
"""With a size they are refused, since that is the piece's: the batch runs whole."""


def _arithmetic(function: Callable[..., Any], is_reflected: bool = False) -> Callable[[NumberOfPiece, Any], Any]:
    """What is an integer may be a size yet; a number with a fraction is not."""

    def computed(number: NumberOfPiece, other: Any) -> Any:
        if isinstance(other, torch.SymInt) and function not in _FRACTIONS:
            return function(*((other, int(number)) if is_reflected else (int(number), other)))
        if not isinstance(other, int | float):
            return NotImplemented
        numbers = [each for each in (number, other) if isinstance(each, NumberOfPiece)]

        def result(*pair: float) -> Any:
            return function(*(pair[::-1] if is_reflected else pair))

        def note() -> None:
            for each in numbers:
                each.note_whole()

        whole = result(number.whole, other.whole if isinstance(other, NumberOfPiece) else other)
        if type(whole) is int:
            own = result(int(number), int(other) if isinstance(other, NumberOfPiece) else other)
            if type(own) is int:
                return NumberOfPiece(own, whole, note)
        note()
        return whole

    return computed


def _order(function: Callable[[Any, Any], bool], least: int) -> Callable[[NumberOfPiece, Any], Any]:
    """Compared with ``least``, it tells whether there are any."""

    def compared(number: NumberOfPiece, other: Any) -> Any:
        if isinstance(other, torch.SymInt | torch.SymFloat):
            return function(int(number), other)  # a size of the piece's
        if not isinstance(other, int | float):
            return NotImplemented
        if not isinstance(other, NumberOfPiece) and other <= least:
            return function(int(number), other)
        other = other.take_whole() if isinstance(other, NumberOfPiece) else other
        return function(number.take_whole(), other)

    return compared


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _function = getattr(operator, _name)
    setattr(NumberOfPiece, f"__{_name}__", _arithmetic(_function))
    setattr(NumberOfPiece, f"__r{_name}__", _arithmetic(_function, is_reflected=True))
for _name, _least in (("gt", 0), ("ge", 1), ("lt", 1), ("le", 0)):
    setattr(NumberOfPiece, f"__{_name}__", _order(getattr(operator, _name), _least))
