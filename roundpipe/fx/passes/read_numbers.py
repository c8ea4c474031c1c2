"""Numbers that code read from data of its arguments, and that a graph has as literals: a microbatch has others."""

from __future__ import annotations

import torch

from roundpipe.fx.graph.nodes import PRODUCTS, called_name, value_of
from roundpipe.fx.graph.traced import TracedGraph

_LEAST = 3
"""What is smaller is as likely a number of the code's, unless the numbers of a batch's pieces differ."""


def is_read(traced: TracedGraph, number: float) -> bool:
    """Whether a number, or one over it, is what data gave."""
    return bool(number) and not traced.read_numbers.keys().isdisjoint((number, -number, 1 / number, -1 / number))


def where_sums_are_read(traced: TracedGraph) -> str:
    """What reads a number made of all samples, by which something is multiplied or divided; empty if nothing does."""
    least = 1 if traced.has_own_numbers else _LEAST
    for node in traced.graph.nodes if any(traced.read_numbers.values()) else ():
        value = value_of(node)
        if called_name(node) not in PRODUCTS or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        for number in (each for each in node.args if type(each) in (int, float) and each):
            for read in (number, 1 / number):
                if read >= least and (where := traced.read_numbers.get(read, "")):
                    return f"the number that is read at {where} is made of all of them"
    return ""
