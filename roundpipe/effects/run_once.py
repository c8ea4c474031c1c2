"""Which modules must run once, on the host: a backward runs what is on the devices a second time.

Their code tells before anything ran; what a first call changed does afterwards (`FirstCall`).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.attributes import stored_attribute
from roundpipe.effects.bytecode import codes_of, names_in, words_in
from roundpipe.effects.places import (
    CONTAINER,
    CONTAINERS,
    has_attributes,
    is_closed,
    is_library,
    same_contents,
    view_of,
)
from roundpipe.effects.reach import MAX_DEPTH
from roundpipe.effects.snapshot import ModuleSnapshot, PythonSnapshot
from roundpipe.effects.uses import (
    CodeUses,
    asks_for_gradients,
    codes_of_forward,
    filled_cells,
    forward_hooks,
    methods_of_forward,
    uses_of_forward,
    uses_of_hook,
    uses_of_methods,
)

_MAX_ITEMS = 256
_OF_DECORATOR = torch.no_grad()(lambda: None).__code__.co_name
"""Of the function that torch puts around one that is decorated with a mode for gradients."""


def hooks_run_around(module: nn.Module) -> bool:
    """Whether a part's module has hooks that run once, on the host, around what the devices do."""
    return bool(module._forward_hooks or module._forward_pre_hooks) and not (
        module._backward_hooks or module._backward_pre_hooks or isinstance(module, torch.jit.ScriptModule)
    )


def _without_hooks(module: nn.Module) -> nn.Module:
    """A module as what calls it finds it once its hooks have run."""
    if not module._forward_hooks and not module._forward_pre_hooks or isinstance(module, torch.jit.ScriptModule):
        return module
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__, _forward_hooks={}, _forward_pre_hooks={})
    return twin


def must_run_once(module: nn.Module) -> bool:
    """Whether a module's forward, as far as its code tells, remembers something or asks whether gradients are recorded.

    For modules that were never traced: too careful rather than too bold.
    """
    kind = type(module)
    uses = uses_of_forward(kind)
    if uses.sets & uses.reads or uses.rebinds or asks_for_gradients(kind):
        return True
    in_place = any(name.endswith("_") and not name.startswith("_") for name in uses.reads)
    is_without = "no_grad" in uses.reads or any(code.co_name == _OF_DECORATOR for code in codes_of_forward(kind))
    if "data" in uses.reads or is_without and in_place or _hooks_must(module):  # the first two: weights
        return True
    values = [module.__dict__.get(name) for name in uses.reads]
    for name in methods_of_forward(kind):
        if isinstance(function := getattr(kind, name, None), types.FunctionType):
            values += [function.__globals__.get(name) for name in names_in(function.__code__)]
    return any(_may_change(value, uses) for value in values)


def _hands_on(hook: Any) -> bool:
    """Whether a hook may leave something for a forward, in an attribute, a variable, or a container of a module.

    Or takes from a random generator or an iterator of its own, which runs of the forward share.
    """
    uses = uses_of_hook(hook)
    if uses.sets or uses.rebinds or _may_change(hook, None):
        return True
    function = hook.func if isinstance(hook, functools.partial) else hook
    values = [stored_attribute(function, "__self__"), *(cell.cell_contents for cell in filled_cells(function))]
    return uses.changes_items and any(isinstance(value, nn.Module) for value in values)


def _may_change(value: Any, uses: CodeUses | None, depth: int = 0) -> bool:
    """Whether code, as far as it tells, changes at every call a value that is ``depth`` steps from one that it names.

    Without ``uses``, only what gives another value whenever it is asked counts.
    """
    if isinstance(value, (*trees.PLAIN, torch.Tensor, nn.Module, types.ModuleType, type)) or depth > MAX_DEPTH:
        return False
    inside: list[Any] = []
    if isinstance(value, types.FunctionType):
        if is_library(value):
            return False
        if uses is not None and CodeUses.of([value.__code__]).rebinds:
            return True
        uses, inside = None, [cell.cell_contents for cell in filled_cells(value)]
    elif isinstance(value, functools.partial):
        if uses is not None and isinstance(value.func, types.FunctionType):
            uses = CodeUses.of([value.func.__code__])
        inside = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)):
        inside = [value.__self__]
    elif isinstance(value, (tuple, *CONTAINERS)):
        if uses is not None and uses.changes_items and not isinstance(value, tuple):
            return True
        inside = list(value.values() if isinstance(value, dict) else value)[:_MAX_ITEMS]
    else:
        view = view_of(value)
        if isinstance(value, torch.Generator) or hasattr(type(value), "__next__") and is_closed(value):
            return True
        if view is not None and view.kind != "slots":
            return view.kind == "random" or uses is not None and uses.changes_items
        if view is not None or has_attributes(value):
            attributes = value.__dict__ if view is None else view.read(value, None)
            own = uses_of_methods(type(value), () if uses is None else uses.reads)
            if uses is not None and own.sets & attributes.keys():
                return True
            uses = own if uses is not None else None
            inside = [item for name, item in attributes.items() if name in own.reads or depth == 0]
    return any(_may_change(item, uses, depth + 1) for item in inside)


def _forward_must(module: nn.Module) -> bool:
    renormalizes = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
    return renormalizes or must_run_once(_without_hooks(module))


def _hooks_must(module: nn.Module) -> bool:
    """Whether a hook leaves something for a forward; what it notes for the user it may note twice."""
    return any(map(_hands_on, forward_hooks(module)))


def first_to_run_once(module: nn.Module) -> str | None:
    """The kind of the first module, of a part's module and those below it, that must run once, if there is any.

    Hooks of the part's module itself are left out where they run around it.
    """
    for inner in module.modules():
        if _forward_must(inner) or _hooks_must(inner) and not (inner is module and hooks_run_around(inner)):
            return type(inner).__name__
    return None


def holders_of(name: str) -> Iterator[str]:
    """Qualified names of the modules that hold one, up to the model itself, ``""``."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def holders_of_those(model: nn.Module) -> set[nn.Module]:
    """The modules whose forward must run on the host: those that must run once, and those that hold them.

    One that only its hooks keep from running twice is none: as a part it has them around it.
    """
    on_host: set[nn.Module] = set()
    by_name = dict(model.named_modules(remove_duplicate=False))
    for name, module in by_name.items():
        by_hooks = _hooks_must(module)
        if _forward_must(module) or by_hooks and not hooks_run_around(module):
            on_host.add(module)
        elif not by_hooks:
            continue
        on_host.update(by_name[holder] for holder in holders_of(name))
    return on_host


_FUNCTIONAL = frozenset({"hessian", "jacfwd", "jacrev", "jvp", "vjp"})
_AUTOGRAD = frozenset({"autograd", "backward", "grad"}) | _FUNCTIONAL


def runs_autograd(module: nn.Module) -> bool:
    """Whether a module's code seems to compute gradients itself, which can't go twice through what is on a device."""
    return any(not _AUTOGRAD.isdisjoint(names_in(code)) for code in codes_of(type(module)))


def differentiates_gradients(module: nn.Module) -> bool:
    """Whether a module's code seems to make gradients that a loss goes through, as models of forces do."""
    codes = list(codes_of(type(module)))
    return any("create_graph" in words_in(code) or not _FUNCTIONAL.isdisjoint(names_in(code)) for code in codes)


class FirstCall:
    """A part's module before its first call: attributes, buffers, and whatever Python its code reaches.

    Also attributes of parameters and buffers, in which quantized weights have their scales.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = ModuleSnapshot(module.modules())
        around = hooks_run_around(module)
        self._python = PythonSnapshot(
            (_without_hooks(inner) if around and inner is module else inner for inner in module.modules()),
            known=module.modules(),
        )
        self._buffers = [(buffer, buffer.clone(), "") for buffer in module.buffers()]
        """With words for those of modules that are no submodules."""
        self._buffers += [
            (buffer, buffer.clone(), f"buffer {name} of {way.words}")
            for hidden, way in self._python.reach.hidden
            for name, buffer in hidden._buffers.items()
            if buffer is not None and not buffer.is_meta
        ]
        self._of_tensors = [
            (name, tensor.__dict__, dict(tensor.__dict__))
            for name, tensor in chain(module.named_parameters(), module.named_buffers())
        ]

    @property
    def closed(self) -> str | None:
        """What its code uses although nothing tells whether it changes it, such as an iterator, in words."""
        return next((f"{words}, of type {kind}" for words, kind in self._python.reach.closed.items()), None)

    def diff(self) -> str | None:
        """What of Python was changed since, in words; of what hooks write down, tensors only.

        Generators that drew are put back where they were.
        """
        changed = list(self._python.diff())
        for place in changed:
            if not place.by_hooks:
                return place.words
        for buffer, before, words in self._buffers:
            if words and not torch.equal(buffer, before):
                return words
        for name, attributes, held in self._of_tensors:
            if not same_contents(held, attributes):
                return f"attributes of {name}"
        if any(trees.tensors(place.now()) for place in changed):
            return "what its hooks hold"
        return "a random generator of its own" if self._python.restore_generators() else None

    def restore(self) -> None:
        self._modules.restore()
        with torch.no_grad():
            for buffer, before, _ in self._buffers:
                buffer.copy_(before)
        for _, attributes, held in self._of_tensors:
            if not same_contents(held, attributes):
                CONTAINER.write(attributes, None, held)
        self._python.restore()
        self._python.restore_generators()
