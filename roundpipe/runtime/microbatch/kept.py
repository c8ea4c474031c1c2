"""What the microbatches of a call leave in Python, put there once the call is over, as the whole batch would.

A mean that the graph of the loss weighs adds up to that of the batch, and what has a row for each sample is put
together. Of anything else the last microbatch's stays, or all of them where each is appended to a list, in the order of
the samples.
"""

from __future__ import annotations

import copy
import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch

from roundpipe.core import trees
from roundpipe.effects.kept import Kept, KeptLeaf


class KeptOfCall:
    """By microbatch, what is left; whichever thread has it tells it."""

    def __init__(self) -> None:
        self.moved: dict[int, Any] = {}
        """See `KeptPlaces`."""
        self._values: dict[int, tuple[Sequence[Kept], list[Any]]] = {}

    def note(self, microbatch: int, places: Sequence[Kept], values: list[Any]) -> None:
        """Values of one microbatch, with a `KeptLeaf` in place of each that was computed; takes the place of others.

        Args:
            microbatch: its position in the whole call.
            places: where the values are to be, one for each.
        """
        self._values[microbatch] = places, values

    def put(self, num_ranks: int = 1) -> list[str]:
        """Leave all of it, on the host and without a graph.

        Args:
            num_ranks: that have parts of the batch, of which the means are weighed in all.

        Returns:
            In words, the places that have a value of the last microbatch alone, where others had other values.
        """
        if not self._values:
            return []
        of_last: dict[str, None] = {}
        each = [self._values[microbatch] for microbatch in sorted(self._values)]
        places, _ = each[-1]
        of_one_form = [values for own, values in each if len(own) == len(places)]
        columns = [(place, values) for place, *values in zip(places, *of_one_form, strict=True)]
        for is_of_each, run in itertools.groupby(columns, _is_of_each):
            if is_of_each:  # as the function does: all of a microbatch before any of the next
                rows = zip(*([(place, value) for value in values] for place, values in run), strict=True)
                for place, value in itertools.chain.from_iterable(rows):
                    place.put(trees.map_leaves(value, lambda leaf: _plain([_on_host(leaf)], 1)), self.moved)
                continue
            for place, values in run:
                leaves = [[*map(_on_host, column)] for column in zip(*map(trees.leaves, values), strict=True)]
                merged = [_plain(column, num_ranks) for column in leaves]
                place.put(trees.rebuild(values[-1], merged), self.moved)
                if any(map(_is_of_last, leaves)):
                    of_last[place.words] = None
        return list(of_last)


def _is_of_each(column: tuple[Kept, list[Any]]) -> bool:
    """Whether a place, with what microbatches give for it, gets the values of all of them: they add up to none."""
    place, values = column
    return place.is_appended and not all(map(_is_added, trees.leaves(values[-1])))


def _is_added(leaf: Any) -> bool:
    return isinstance(leaf, KeptLeaf) and leaf.is_added


def _on_host(leaf: Any) -> Any:
    """The same without a graph."""
    if not isinstance(leaf, KeptLeaf) or not isinstance(leaf.value, torch.Tensor):
        return leaf
    other = copy.copy(leaf)
    other.value = leaf.value.detach().cpu()
    return other


def _is_of_last(leaves: Sequence[Any]) -> bool:
    """Whether microbatches have given other values for one place, which do not make up one."""
    if any(not isinstance(leaf, KeptLeaf) or _is_added(leaf) for leaf in leaves) or _are_pieces(leaves):
        return False
    first, *others = (torch.as_tensor(leaf.value) for leaf in leaves)
    return any(other.shape != first.shape or not _are_same(other, first) for other in others)


def _are_same(first: torch.Tensor, other: torch.Tensor) -> bool:
    are_nan = (first != first) & (other != other)
    return bool(((first == other) | are_nan).all())


def _are_pieces(leaves: Sequence[Any]) -> bool:
    """Whether what microbatches give for one place is that of the batch, one behind the other."""
    if len(leaves) < 2 or not all(isinstance(leaf, KeptLeaf) and leaf.is_in_rows for leaf in leaves):
        return False
    return len({leaf.value.shape[1:] for leaf in leaves}) == 1  # padding may differ


def _plain(leaves: Sequence[Any], num_ranks: int) -> Any:
    """What is left of those that microbatches give for one place, which are on the host."""
    last = leaves[-1]
    if not isinstance(last, KeptLeaf):
        return last
    value = last.value
    if _are_pieces(leaves):
        return torch.cat([leaf.value for leaf in leaves])
    if all(map(_is_added, leaves)) and len(leaves) > 1:
        value = functools.reduce(operator.add, [leaf.value for leaf in leaves]) * num_ranks
    return value.item() if last.is_number else value
