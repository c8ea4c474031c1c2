"""Numbers that code read from data of its arguments, and that a graph has as literals: a microbatch has others."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from roundpipe.fx.graph.nodes import PRODUCTS, called_name, value_of
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.sizes import Symbolic

_LEAST = 3
"""What is smaller is as likely a number of the code's, unless the numbers of a batch's pieces differ."""


def is_read(traced: TracedGraph, number: Any) -> bool:
    """Whether a number, one over it, or a value made of it is what data of each piece gave."""
    if isinstance(number, Node):
        own = set[str]().union(*traced.own_numbers)
        return bool(own) and not own.isdisjoint(_inputs_of(number))
    return bool(number) and not traced.read_numbers.keys().isdisjoint((number, -number, 1 / number, -1 / number))


def is_made_of_numbers(traced: TracedGraph, value: Node) -> bool:
    """Whether a value is a number that is an input, or made of such alone."""
    inputs = _inputs_of(value) if isinstance(value_of(value), Symbolic) else set()
    return bool(inputs) and inputs <= traced.numbers.keys()


def where_sums_are_read(traced: TracedGraph) -> str:
    """What reads a number made of all samples, by which something is multiplied or divided; empty if nothing does."""
    if traced.has_own_ratios:
        return "a number that is read from data is divided by a size of each microbatch"
    if not any(traced.read_numbers.values()) and not any(traced.own_numbers.values()):
        return ""
    for node in traced.graph.nodes:
        value = value_of(node)
        if called_name(node) not in PRODUCTS or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        if where := next(filter(None, (_where_read(traced, each) for each in node.args)), ""):
            return f"the number that is read at {where} is made of all of them"
    return ""


def _where_read(traced: TracedGraph, factor: Any) -> str:
    if isinstance(factor, Node) and isinstance(value_of(factor), Symbolic):
        inputs = _inputs_of(factor)
        return next((where for own, where in traced.own_numbers.items() if where and own <= inputs), "")
    if type(factor) not in (int, float) or not factor:
        return ""
    least = 1 if traced.has_own_numbers else _LEAST
    found = (traced.read_numbers.get(read, "") for read in (factor, 1 / factor) if read >= least)
    return next(filter(None, found), "")


def _inputs_of(node: Node) -> set[str]:
    """Names of the inputs that a number is made of."""
    seen, pending = {node}, [node]
    while pending:
        new = set(pending.pop().all_input_nodes) - seen
        seen |= new
        pending += new
    return {each.name for each in seen if each.op == "placeholder"}
