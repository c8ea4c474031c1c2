"""What a whole batch decides for its pieces, of all that code reads from data.

Of a microbatch that is a piece of a batch, decisions are asked of the whole batch, if that is known: they are those of
eager mode. What gives True or False is one, and so is the largest or smallest of some numbers, such as the length of
the longest sample, and a number with a fraction, which is no size. Whether there are any of something is not: a piece
that has none would average over nothing. Nor is whether there are as many of something as code expects, such as places
for images: a piece has to have its own. What an integer is, what code does with it tells (`NumberOfPiece`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from roundpipe.fx.graph.nodes import called_name, past_calls, value_of
from roundpipe.fx.sizes import expression_of

_EXTREMES = frozenset("max amax min amin".split())
_CASTS = frozenset("to bool int long float double cpu squeeze".split())
_MORE, _COUNTS = frozenset("gt ne".split()), frozenset("sum count_nonzero".split())
"""Ways to ask whether there are any."""
_EQUALITIES = frozenset("eq ne".split())
_OF_ONE_ANSWER = _CASTS | frozenset("all is_all_true logical_not".split())
_OF_ONE_COUNT = _CASTS | frozenset("mul div floordiv add sub".split())
"""What a count goes through before it is compared."""


def is_decision(nodes: Sequence[Node], answer: Any) -> bool:
    """Whether a read of some values, and what it gives, is what a whole batch decides for its pieces."""
    if len(nodes) != 1 or not isinstance(answer, int | float):
        return isinstance(answer, bool)
    (node,) = nodes
    if _equates_counts(node):
        return False
    node = past_calls(node, _CASTS)
    if not isinstance(answer, bool):
        return called_name(node) in _EXTREMES
    counted = node.args[0] if called_name(node) in _MORE and len(node.args) == 2 and node.args[1] == 0 else None
    return called_name(node) != "any" and not (isinstance(counted, Node) and called_name(counted) in _COUNTS)


def _equates_counts(node: Node) -> bool:
    """Whether it tells if a count is a certain number, other than that of all that were counted."""
    node = past_calls(node, _OF_ONE_ANSWER)
    operands = node.args if called_name(node) in _EQUALITIES else ()
    for operand, other in zip(operands, operands[::-1], strict=True):
        if isinstance(operand, Node) and called_name(past_calls(operand, _OF_ONE_COUNT)) in _COUNTS:
            return not _is_number_of_all(past_calls(operand, _CASTS), other)
    return False


def _is_number_of_all(count: Node, other: Any) -> bool:
    """Whether something is the number of elements that a node counts."""
    counted = value_of(count.all_input_nodes[0]) if called_name(count) in _COUNTS else None
    number = value_of(other) if isinstance(other, Node) else other
    if not isinstance(counted, torch.Tensor) or isinstance(number, torch.Tensor):
        return False
    return bool(expression_of(counted.numel()) == expression_of(number))
