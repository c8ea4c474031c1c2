"""Reads of the user's own model, behind the wrapper: they see the latest update.

    state_dict, save_pretrained    a hook before each module's ``state_dict``, for as long as the wrapper is open
    deepcopy, pickling             that hook is asked for its state; what is read of a module comes behind it
    the same of a parameter        torch has no hook for it, so the two methods of `nn.Parameter` are wrapped
    an average of weights          so is the method of torch's `AveragedModel` that reads them
    a call that does not train     a hook before each module's forward, only while an update or a round is under way and
                                   no call of the wrapper runs: no layer, no trace and no copy ever finds one
    another wrapper                made of the same model, or whose loss trains it, asks by `settle_reads_of`

Whoever reads waits for what is under way, as `RoundPipe.synchronize` does. Reads in threads other than the one that
trains, and of a parameter's values, can't be seen.
"""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from roundpipe.core.module_tree import modules_in
from roundpipe.runtime.optimizer.optimizer import OptimizerSide

_READ_LAST = ("_parameters", "_buffers", "_forward_pre_hooks")
"""Attributes of a module that are copied behind the hooks, which come in the order in which they were set."""


class _ReadHook:
    """Called by torch with the module that is read; does nothing in a copy."""

    def __init__(self, watch: ReadWatch) -> None:
        self._watch: weakref.ref[ReadWatch] | None = weakref.ref(watch)

    def settle(self, *, looks: bool = False) -> None:
        watch = None if self._watch is None else self._watch()
        if watch is not None:
            watch.settle(looks=looks)

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        return {"_watch": None}


class _BeforeState(_ReadHook):
    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self.settle(looks=not prefix)  # once for all modules


class _BeforeForward(_ReadHook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not (module.training and torch.is_grad_enabled()):
            self.settle()


def settle_reads_of(parameters: Iterable[torch.Tensor], *, trains: bool = False) -> None:
    """Wait for what models lack that have some of these, as a read of them does, before another wrapper reads them.

    Args:
        parameters: of any models.
        trains: whether it adds gradients to them, too.
    """
    parameters = list(parameters)
    for watch in list(_watches or ()):
        if (parameter := next(filter(watch.is_of, parameters), None)) is not None:
            watch.settle(parameter, trains=trains)


_PRE_HOOKS = operator.itemgetter("_forward_pre_hooks")
_LOCK = threading.Lock()
_watches: weakref.WeakSet[ReadWatch] | None = None
"""Of models whose wrappers are open; None: the methods of parameters are torch's own yet."""


def _settling(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method by which a parameter is copied or pickled, which first waits for what the parameter lacks."""

    @functools.wraps(method)
    def settled(parameter: nn.Parameter, *args: Any) -> Any:
        for watch in list(_watches or ()):
            watch.settle(parameter)
        return method(parameter, *args)

    return settled


_average = AveragedModel.update_parameters


@functools.wraps(_average)
def _settled_average(averaged: AveragedModel, model: nn.Module) -> None:
    settle_reads_of(model.parameters())
    _average(averaged, model)


def _open(watch: ReadWatch) -> None:
    global _watches
    with _LOCK:
        if _watches is None:
            _watches = weakref.WeakSet()
            for name in ("__deepcopy__", "__reduce_ex__"):
                setattr(nn.Parameter, name, _settling(getattr(nn.Parameter, name)))
            setattr(AveragedModel, "update_parameters", _settled_average)  # noqa: B010 - not ours, says mypy
        _watches.add(watch)


def _do_all(function: Callable[..., object], *arguments: Iterable[Any]) -> None:
    """Call a function for each of some arguments: for thousands of modules at each call, so that this is no Python."""
    deque(map(function, *arguments), maxlen=0)


class ReadWatch:
    """Watches the modules that a model has now, and its parameters."""

    def __init__(self, model: nn.Module, optimizer: OptimizerSide) -> None:
        self._optimizer = optimizer
        self._modules = [module for module in modules_in(model) if not isinstance(module, torch.jit.ScriptModule)]
        before_state, self._before_forward = _BeforeState(self), _BeforeForward(self)
        self._is_open = False
        self._handles = [module.register_state_dict_pre_hook(before_state) for module in self._modules]
        for module in self._modules:
            for name in _READ_LAST:
                module.__dict__[name] = module.__dict__.pop(name)
        self._attributes = [module.__dict__ for module in self._modules]
        _open(self)

    def is_of(self, parameter: torch.Tensor) -> bool:
        """Whether it is the model's."""
        return self._optimizer.has(parameter)

    def settle(self, parameter: torch.Tensor | None = None, *, looks: bool = False, trains: bool = False) -> None:
        """Wait for what the model lacks, if a parameter is given only where it is the model's.

        A worker that calls a layer may find the hook, too, and passes.
        """
        if parameter is not None and not self.is_of(parameter):
            return
        if self._optimizer.is_callers:
            self.close_forward()
        self._optimizer.settle(looks=looks)
        self._optimizer.is_trained_elsewhere |= trains

    def settle_others(self) -> None:
        """Wait for what other wrappers of some of the model's parameters have under way."""
        for watch in list(_watches or ()):
            if watch is not self and watch._optimizer.is_stale:
                own = (parameter for module in self._modules for parameter in module._parameters.values())
                if (shared := next((each for each in own if each is not None and watch.is_of(each)), None)) is not None:
                    watch.settle(shared)

    def open_forward(self) -> None:
        """Calls are read from now on, if the model lacks something."""
        if not self._is_open and self._optimizer.is_stale:
            self._is_open, hook = True, self._before_forward
            _do_all(operator.setitem, map(_PRE_HOOKS, self._attributes), repeat(id(hook)), repeat(hook))

    def close_forward(self) -> None:
        """Calls are the wrapper's own from now on."""
        if self._is_open:
            self._is_open = False
            hooks, key = map(_PRE_HOOKS, self._attributes), id(self._before_forward)
            try:
                _do_all(operator.delitem, hooks, repeat(key))
            except KeyError:  # somebody has cleared hooks
                for module in self._modules:
                    module._forward_pre_hooks.pop(key, None)

    def end(self) -> None:
        """Take the hooks off the model; safe to call twice."""
        if _watches is not None:
            _watches.discard(self)
        self.close_forward()
        for handle in self._handles:
            handle.remove()
