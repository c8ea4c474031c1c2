"""A twin of a model, for its Python to run on: the user's classes and attributes, with other tensors.

It has its own module objects and attribute dicts: whatever a forward does to it, the user's model is never touched, not
even for a moment.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from roundpipe.core.compiled_modules import WRITTEN, as_written, is_compiled, is_made_by_torch
from roundpipe.core.module_tree import named_modules_in
from roundpipe.effects.places import REGISTERED


def make_twin(model: nn.Module, fake_of: Mapping[torch.Tensor, torch.Tensor]) -> tuple[nn.Module, dict[nn.Module, str]]:
    """A copy of a module tree with fakes as its state, and the names of its modules.

    Modules are replaced in lists and other containers of attributes too. Modules of the original, which is only read
    and which code still reaches through closures, have their names too. Scripted modules can't be copied and stay. What
    torch has compiled of a module is there as written.
    """
    twins: dict[nn.Module, nn.Module] = {}
    names: dict[nn.Module, str] = {}
    for name, module in named_modules_in(model).items():
        names[module] = name
        is_scripted = isinstance(module, torch.jit.ScriptModule)
        twins[module] = module if is_scripted else object.__new__(type(module))
    replacements: dict[Any, Any] = {**twins, **fake_of}
    for module, twin in twins.items():
        if twin is not module:
            held = twin.__dict__
            held.update(module.__dict__)
            for key, value in module.__dict__.items():
                kind = type(value)
                if kind in _MOST_VALUES:
                    continue
                if kind in _MOST_CONTAINERS and not value:  # nearly all: hooks that are not there
                    held[key] = kind()
                elif kind is dict and key in REGISTERED:
                    held[key] = {name: replacements.get(each, each) for name, each in value.items()}
                else:
                    held[key] = _replaced(value, replacements)
            if is_compiled(module):
                held[WRITTEN] = True
    for module, twin in twins.items():  # once they are whole: a module's own hash may read what is in it
        names[twin] = names[module]
    return twins[model], names


def users_own(function: Any, original: Mapping[nn.Module, nn.Module]) -> Any:
    """A function as the user's model has it, with originals in the place of twins; itself if it holds no twin."""
    if not isinstance(function, types.FunctionType):
        own = _replaced(function, original)
        return function if own == function else own
    cells = [_own_cell(cell, original) for cell in function.__closure__ or ()]
    if cells == [*(function.__closure__ or ())]:
        return function
    own = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def _own_cell(cell: types.CellType, original: Mapping[nn.Module, nn.Module]) -> types.CellType:
    try:
        held = cell.cell_contents
    except ValueError:  # it is empty
        return cell
    is_function = isinstance(held, (types.FunctionType, types.MethodType, functools.partial))
    own = users_own(held, original) if is_function else original.get(held) if isinstance(held, nn.Module) else held
    return cell if own is held or own is None else types.CellType(own)


_MAX_DEPTH = 3
"""Of containers in an attribute."""
_MOST_VALUES = frozenset({type(None), bool, int, float, str})
_MOST_CONTAINERS = frozenset({dict, OrderedDict, list})


def _replaced(value: Any, replacements: Mapping[Any, Any], depth: int = 0) -> Any:
    """An attribute's value with other modules and tensors in it, containers copied."""
    kind = type(value)
    if kind in _MOST_VALUES:
        return value
    if kind is dict and _MOST_VALUES.issuperset(map(type, value.values())):
        return value.copy()
    if isinstance(value, (nn.Module, torch.Tensor)):
        return replacements.get(value, value)
    if depth > _MAX_DEPTH:
        return value
    replace = functools.partial(_replaced, replacements=replacements, depth=depth + 1)
    if kind in (list, set, deque, tuple):
        return kind(map(replace, value))
    if kind in (dict, OrderedDict):
        return kind((key, replace(item)) for key, item in value.items())
    if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
        return types.MethodType(value.__func__, replace(value.__self__))
    if kind is functools.partial:

        def replace_in(item: Any) -> Any:  # what else it holds is the user's own, as in closures
            return replace(item) if _has_any(replacements, item) else item

        keywords = {key: replace_in(item) for key, item in value.keywords.items()}
        return functools.partial(replace(value.func), *map(replace_in, value.args), **keywords)
    if is_made_by_torch(value):
        written = as_written(value)
        other = replace(written)
        return value if other is written else other
    return value


def _has_any(replacements: Mapping[Any, Any], value: Any, depth: int = 0) -> bool:
    """Whether a value is, or holds, something that may be replaced."""
    if isinstance(value, (list, set, deque, tuple, dict)) and depth <= _MAX_DEPTH:
        items = value.values() if isinstance(value, dict) else value
        return any(_has_any(replacements, item, depth + 1) for item in items)
    if isinstance(value, (nn.Module, torch.Tensor)):
        return value in replacements
    return isinstance(value, (types.MethodType, functools.partial)) or is_made_by_torch(value)
