"""Loads into the user's own model, behind the wrapper: the optimizer's copies must not bring the old weights back.

Each module with parameters of its own gets a hook before its ``load_state_dict`` (wait for the running update, which
writes into the model) and one after (start the copies of these parameters again from what was loaded, with
``assign=True`` new objects). So a load into any part of the model counts, and one into the whole costs each copy once.
The model itself, and modules that load in a way of their own, get them, too.
Invariant: hooks in copies and pickles of the model do nothing; a model whose wrapper is gone or closed has none.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from roundpipe.core.module_tree import places_in
from roundpipe.runtime.optimizer.optimizer import OptimizerSide

_LOADING = {name: getattr(nn.Module, name) for name in ("_load_from_state_dict", "set_extra_state")}
"""Methods by which a module loads what is its own; those of torch."""


class _Hook:
    """Called by torch with the module that loads; does nothing in a copy, which has no optimizer's side."""

    def __init__(self, optimizer: OptimizerSide, module_name: str, is_before: bool) -> None:
        self._optimizer: weakref.ref[OptimizerSide] | None = weakref.ref(optimizer)
        self._name = module_name
        self._is_before = is_before

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_optimizer": None}

    def __call__(self, module: nn.Module, *arguments: Any) -> None:
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is not None and self._is_before:
            optimizer.before_load()
        elif optimizer is not None:
            optimizer.after_load(_own_parameters(self._name, module))


def _own_parameters(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """A module's own parameters, and those of script modules right below it, which take no hooks."""
    yield from module.named_parameters(name, recurse=False, remove_duplicate=False)
    for child_name, child in module.named_children():
        if isinstance(child, torch.jit.ScriptModule):
            yield from child.named_parameters(f"{name}.{child_name}" if name else child_name, remove_duplicate=False)


def _loads_weights(module: nn.Module) -> bool:
    """Whether a load may write parameters by what is the module's own, beside what those below it load."""
    if module._parameters or module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks:
        return True
    kind, children = type(module), module._modules
    if any(getattr(kind, name) is not of_torch for name, of_torch in _LOADING.items()):
        return True
    return any(isinstance(child, torch.jit.ScriptModule) for child in children.values()) if children else False


class LoadWatch:
    """Watches the ``load_state_dict`` of the user's model; holds the optimizer's side, whose copies follow, weakly."""

    def __init__(self, model: nn.Module, optimizer: OptimizerSide) -> None:
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        for name, module in places_in(model):
            is_scripted = isinstance(module, torch.jit.ScriptModule)
            if not is_scripted and (module is model or _loads_weights(module)):
                before, after = (_Hook(optimizer, name, is_before) for is_before in (True, False))
                self._handles.append(module.register_load_state_dict_pre_hook(before))
                self._handles.append(module.register_load_state_dict_post_hook(after))

    def end(self) -> None:
        """Take the hooks off the model; safe to call twice."""
        for handle in self._handles:
            handle.remove()
