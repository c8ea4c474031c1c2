"""What a model's parameters and buffers look like: dtypes, shapes, and which are trained."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from roundpipe.core.module_tree import named_modules_in
from roundpipe.effects.uses import uses_of_forward


class WeightForms:
    """What a model's parameters and buffers look like, whichever tensors are in their places later.

    ``model.double()`` and ``p.data = other`` leave the objects as they are. What code of the model puts somewhere
    itself, such as a table that grows, looks as that code decides.
    """

    def __init__(self, model: nn.Module, replaced: Collection[str]) -> None:
        modules = named_modules_in(model)
        uses = {kind: uses_of_forward(kind) for kind in set(map(type, modules.values()))}
        set_anywhere: frozenset[str] = frozenset().union(*(use.sets for use in uses.values()))
        parameters, buffers = [], []
        self._tables: list[tuple[str, Any, set[str]]] = []
        """Of buffers: the module's prefix, and the names that may be there."""
        for path, module in modules.items():
            use, prefix, get = uses[type(module)], f"{path}." if path else "", _getter(module._parameters)
            for name in module._parameters.keys():  # without keys(), those of scripted modules can't be iterated
                parameters.append((prefix + name, get, name, _LOOSE if name in use.sets else _STRICT))
            if "register_buffer" not in use.reads:
                get, names = _getter(module._buffers), module._buffers.keys()
                buffers += [(prefix + name, get, name, _BUFFER) for name in names if name not in set_anywhere]
                self._tables.append((prefix, module._buffers, {*names, *set_anywhere}))
        places = parameters + buffers
        self._lengths = [len(table) for _, table, _ in self._tables]
        absent = [(get, name) for _, get, name, _ in places if get(name) is None]
        self._absent = [get for get, _ in absent], [name for _, name in absent]
        self._places = [place for place in places if place[1](place[2]) is not None and place[0] not in replaced]
        self._gets, self._names = [place[1] for place in self._places], [place[2] for place in self._places]
        self._looks = [place[3] for place in self._places]
        self._forms = self._forms_now()

    def _forms_now(self) -> list[Any]:
        """Of thousands at each call: no Python for each."""
        return list(map(operator.call, self._looks, map(operator.call, self._gets, self._names)))

    def change(self) -> str | None:
        """What is otherwise now, in words."""
        has_lengths = [len(table) for _, table, _ in self._tables] == self._lengths
        for prefix, table, names in () if has_lengths else self._tables:
            if new := sorted(set(table.keys()) - names):
                return f"{prefix}{new[0]}, a buffer, is new"
        for tensor, name in zip(map(operator.call, *self._absent), self._absent[1], strict=True):
            if tensor is not None:
                return f"{name}, which was None, is a tensor now"
        try:
            if self._forms_now() == self._forms:
                return None
        except AttributeError:  # there is None in a place
            pass
        for (qualified, get, name, look), form in zip(self._places, self._forms, strict=True):
            if (tensor := get(name)) is None:
                return f"{qualified} is None now"
            for before, now in zip(form, look(tensor), strict=True):
                if now != before:
                    return f"{qualified} has {_form_words(now)} now, traced with {_form_words(before)}"
        return None


def _getter(tensors: Any) -> Callable[[str], torch.Tensor | None]:
    """Looks up a name among a module's parameters or buffers; those of scripted modules have no ``get``."""
    return tensors.get if isinstance(tensors, dict) else lambda name: tensors[name] if name in tensors else None


_STRICT = operator.attrgetter("dtype", "shape", "requires_grad")
_LOOSE = operator.attrgetter("dtype", "requires_grad")
_BUFFER = operator.attrgetter("dtype", "shape")


def _form_words(value: Any) -> str:
    if isinstance(value, torch.Size):
        return f"shape {tuple(value)}"
    return f"requires_grad {value}" if isinstance(value, bool) else f"dtype {value}"
