"""What values of a graph look like in a call: sizes, strides and kinds, from the sizes of the call's arguments.

Nothing runs for it: the trace knows the sizes of every value in symbols, which are sizes of the arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from roundpipe.core import trees
from roundpipe.core.layers import Carry
from roundpipe.fx.arguments import CallForm
from roundpipe.fx.graph.nodes import number_of_input, value_of
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.operations import SizeExpression
from roundpipe.fx.sizes import Symbolic, expression_of, size_function

_Size = int | float | bool | SizeExpression


@dataclass(frozen=True, slots=True)
class _TensorForm:
    dtype: torch.dtype
    requires_grad: bool
    sizes: tuple[_Size, ...]
    strides: tuple[_Size, ...]


class ValueForms:
    """The forms of those values of a graph that have some names."""

    def __init__(self, traced: TracedGraph, form: CallForm, names: Iterable[str]) -> None:
        self._call_form = form
        self._places: dict[str, tuple[trees.Path, int]] = {}
        """By symbol: a tensor of the arguments, and the position of the symbol in its sizes and strides."""
        for node in traced.placeholders:
            for position, size in enumerate(_sizes_of(node)):
                expression = expression_of(size)
                if getattr(expression, "is_Symbol", False):
                    self._places.setdefault(str(expression), (traced.input_paths[node.name], position))
        wanted = set(names)
        nodes = {node.name: node for node in traced.graph.nodes if node.name in wanted}
        self._forms = {name: self._form(nodes[name]) for name in wanted}

    def _form(self, node: Node) -> Any:
        """A tensor's form, a number or what evaluates it; None if the arguments' sizes don't tell."""
        value = value_of(node)
        if not isinstance(value, torch.Tensor):
            return self._size(value)
        if value.layout is not torch.strided:
            return None
        sizes, strides = tuple(map(self._size, value.shape)), tuple(map(self._size, value.stride()))
        if None in sizes or None in strides:
            return None
        return _TensorForm(value.dtype, value.requires_grad, sizes, strides)

    def _size(self, size: Any) -> Any:
        expression = expression_of(size)
        if not isinstance(size, Symbolic):
            return size
        if expression.is_number:
            return size.node.pytype(expression)
        symbols = sorted(expression.free_symbols, key=str)
        return size_function(expression, symbols) if all(str(each) in self._places for each in symbols) else None

    def examples(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Carry:
        """Tensors without data, on the meta device, and numbers, by name: those that the arguments tell of."""
        arguments = self._call_form.normalise(args, kwargs)
        places = self._places.items()
        sizes = {symbol: _layout(trees.get(arguments, path))[position] for symbol, (path, position) in places}

        def evaluate(size: _Size) -> Any:
            return size(*map(sizes.__getitem__, size.names)) if isinstance(size, SizeExpression) else size

        def example(form: Any) -> Any:
            if not isinstance(form, _TensorForm):
                return evaluate(form)
            shape, strides = tuple(map(evaluate, form.sizes)), tuple(map(evaluate, form.strides))
            tensor = torch.empty_strided(shape, strides, dtype=form.dtype, device="meta")
            return tensor.requires_grad_() if form.requires_grad else tensor

        return {name: example(form) for name, form in self._forms.items() if form is not None}


def _sizes_of(node: Node) -> tuple[Any, ...]:
    """What arguments tell of sizes: the layout of an input, as `_layout` gives it of a call's."""
    number = number_of_input(node)
    return _layout(value_of(node) if number is None else number)


def _layout(value: Any) -> tuple[Any, ...]:
    """The sizes of a tensor, then its strides if it has any; a number itself."""
    if not isinstance(value, torch.Tensor):
        return (value,)
    return (*value.shape, *value.stride()) if value.layout is torch.strided else tuple(value.shape)
