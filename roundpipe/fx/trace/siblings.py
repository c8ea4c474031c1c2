"""Runs of leaf modules on fakes, shared by modules that can't differ in what a run shows.

A block gets copies of the outputs of one that ran before if their modules, weights, attributes and arguments agree.
Numbers, strings and containers may also differ (the index of a block, its name in an adapter) where a run
showed that nothing depends on them: in their place it had an object that tells when it is used. The first run of a
form is made like this where the next module of the class shows what differs; else it is repeated.
Functions and other objects agree only by identity, and a module with forward hooks runs by itself. More arguments may
require grad than in the run that is shared if all that it returned requires grad already.

Invariant: a run that is shared would have gone the same way, statement by statement.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.modes import Modes
from roundpipe.core.module_tree import modules_in, places_in
from roundpipe.core.watched import unseen
from roundpipe.effects.places import CONTAINERS, OF_TORCH, REGISTERED
from roundpipe.effects.snapshot import ModuleSnapshot, PythonSnapshot
from roundpipe.fx.sizes import Symbolic, expression_of, expressions_of, flat_sizes, flat_tensors, is_data_dependent
from roundpipe.fx.trace.leaves import LeafRun, unread_in

_CONTAINERS = (tuple, *CONTAINERS)
_MAY_GO_UNREAD = frozenset((int, float, str, *_CONTAINERS))
"""Kinds of attributes that may differ; not bool and None, which code tells apart by identity."""
_NOT_OF_CALLS = frozenset(name for name in OF_TORCH if "state_dict" in name).union(REGISTERED)
"""Attributes that are looked at otherwise, or are no matter of a call: hooks on saving and loading, ours too."""
_OF_CALLS = [name for name, value in vars(nn.Module()).items() if value == {} and name not in _NOT_OF_CALLS]
_TABLES_OF_CALLS = operator.itemgetter(*_OF_CALLS)
"""Torch's own tables that are a matter of calls: hooks."""
_NOT_LOOKED_AT = _NOT_OF_CALLS.union(_OF_CALLS)
"""Attributes of a module whose tables are empty, as nearly all are."""
_PLAIN = frozenset(trees.PLAIN)
_EMPTY = {kind: (kind, ()) for kind in _CONTAINERS}
"""Keys of empty containers, such as of hooks that are not there; with `_PLAIN` nearly all attributes."""
_MAX_DEPTH = 3
_MAX_COMPARED = 16
"""Runs of one form that are compared attribute by attribute."""


Place = tuple[nn.Module, str]
"""An attribute: its owner and its name."""


class Identity:
    """An object by identity, as part of a key."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value

    def __hash__(self) -> int:
        return object.__hash__(self.value)


@dataclass(frozen=True, slots=True)
class ModuleKey:
    """What of a module tree can change the outcome of a call on fakes."""

    form: Any
    """Must be equal."""
    values: tuple[Any, ...]
    """Must be equal where they are read."""
    places: tuple[Place, ...] = field(compare=False)
    """Where the values stand."""


@dataclass(slots=True)
class _SharedRun:
    """A run with the values that its module had, and those of them that it does not depend on."""

    values: tuple[Any, ...]
    run: LeafRun
    gradients: tuple[bool, ...]
    """Which tensors among the arguments require grad."""
    unread: set[int] = field(default_factory=set)

    def differing(self, values: tuple[Any, ...]) -> set[int]:
        pairs = enumerate(zip(self.values, values, strict=True))
        return {index for index, (first, second) in pairs if first != second} - self.unread

    def serves(self, gradients: tuple[bool, ...]) -> bool:
        """Whether it shows a run in which other arguments require grad, too."""
        if gradients == self.gradients:
            return True
        outputs = [tensor for tensor in trees.tensors(self.run.out) if _may_require_grad(tensor)]
        return (
            all(now or not then for then, now in zip(self.gradients, gradients, strict=True))
            and not self.run.not_kept  # what is left in attributes would require grad
            and all(tensor.requires_grad for tensor in outputs)
        )


@dataclass(slots=True)
class _Kin:
    """Runs of modules of one form."""

    runs: list[_SharedRun] = field(default_factory=list)
    read: set[int] = field(default_factory=set)
    """Values that some run depends on."""


class FirstRun(NamedTuple):
    """A run of a module that its kin may share."""

    out: Any
    unread: frozenset[int]
    """Values that it does not depend on."""


class SiblingCache:
    """Runs of leaves in one world, shared by leaves that can't differ."""

    def __init__(self) -> None:
        self._modules: dict[nn.Module, ModuleKey | None] = {}
        self._forms: dict[Any, int] = {}
        """Numbers of forms: one form is kept of many equal ones, each of which is thousands of tuples."""
        self._kin: dict[Any, _Kin] = {}

    def find(self, module: nn.Module, args: Any, kwargs: Any, call: Callable[[], Any]) -> LeafRun | None:
        """A run that shows what ``call``, the leaf with these arguments, would; with outputs of its own."""
        key, own = self._keys(module, args, kwargs)
        kin = self._kin.get(key)
        if kin is None or own is None:
            return None
        gradients = _gradients((args, kwargs))
        runs = [shared for shared in kin.runs[:_MAX_COMPARED] if shared.serves(gradients)]
        alike = (shared for shared in runs if not shared.differing(own.values))
        shared = next(alike, None) or _proven(runs, kin.read, own, module, call)
        if shared is None:
            return None
        run = shared.run
        return LeafRun(trees.map_tensors(run.out, _like), run.random, run.buffers_written)

    def put(self, module: nn.Module, run: LeafRun, args: Any, kwargs: Any) -> None:
        """Keeps a run, unless its outputs share memory with its arguments or each other, or have sizes of their own.

        A size that data determine (how many tokens go to an expert) is another one in every call.
        """
        key, own = self._keys(module, args, kwargs)
        if own is None or run.written or any(is_data_dependent(expression_of(size)) for size in flat_sizes(run.out)):
            return
        inside = [tensor.untyped_storage()._cdata for tensor in flat_tensors(run.out)]
        outside = {tensor.untyped_storage()._cdata for tensor in flat_tensors(args, kwargs)}
        if len(set(inside)) == len(inside) and not outside & set(inside):
            unread = set() if run.buffers_written else run.unread
            shared = _SharedRun(own.values, run, _gradients((args, kwargs)), set(unread))
            self._kin.setdefault(key, _Kin()).runs.append(shared)

    def first_run(
        self, module: nn.Module, args: Any, kwargs: Any, other: nn.Module, call: Callable[[], Any]
    ) -> FirstRun | None:
        """What a call gives without what the module differs in from another of its form.

        None: it needs that, or does not differ; all is taken back then.
        """
        key, own = self._keys(module, args, kwargs)
        with unseen():
            theirs = None if own is None else self._numbered(module_key(other))
        if own is None or theirs is None or own.form != theirs.form:
            return None
        pairs = enumerate(zip(own.values, theirs.values, strict=True))
        places = {index: own.places[index] for index, (first, second) in pairs if first != second}
        kin = self._kin.setdefault(key, _Kin())
        if not places or kin.read & places.keys():
            return None
        snapshots = ModuleSnapshot(modules_in(module)), PythonSnapshot(modules_in(module))
        without = _called_without(places, call)
        if without.used or without.is_set:
            kin.read |= without.used
            for snapshot in snapshots:
                snapshot.restore()
            return None
        return FirstRun(without.out, frozenset(places))

    def forget(self, module: nn.Module) -> None:
        """Shares no run of a module or of its kin from now on."""
        own = self._modules.get(module)
        if own is not None:
            self._kin = {key: kin for key, kin in self._kin.items() if key[0] != own.form}
            self._modules[module] = None

    def _numbered(self, key: ModuleKey | None) -> ModuleKey | None:
        """A module's key with the number of its form in the form's place."""
        return None if key is None else replace(key, form=self._forms.setdefault(key.form, len(self._forms)))

    def _keys(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, ModuleKey | None]:
        """A key equal for calls of one form, and the module's; None for a module that must run by itself."""
        with unseen():
            if module not in self._modules:
                self._modules[module] = self._numbered(module_key(module))
            own = self._modules[module]
            return (None if own is None else (own.form, arguments_key((args, kwargs)), Modes.current())), own


def _proven(
    runs: list[_SharedRun], read: set[int], own: ModuleKey, module: nn.Module, call: Callable[[], Any]
) -> _SharedRun | None:
    """A run that depends on nothing in which the module differs, as running the module without that shows.

    Args:
        read: values that some run depends on; more may come in.
    """
    for shared in runs:
        differing = shared.differing(own.values)
        if differing & read or shared.run.buffers_written:
            continue
        used = _used(module, {index: own.places[index] for index in sorted(differing)}, call)
        if not used:
            shared.unread |= differing
            return shared
        read |= used
    return None


def _used(module: nn.Module, places: Mapping[int, Place], call: Callable[[], Any]) -> set[int]:
    """Which of these attributes a call uses; all of them if it fails for an unknown reason."""
    snapshots = ModuleSnapshot(modules_in(module)), PythonSnapshot(modules_in(module))
    try:
        return _called_without(places, call).used
    finally:
        for snapshot in snapshots:
            snapshot.restore()


class _CalledWithout(NamedTuple):
    """A call while some attributes had no value."""

    out: Any
    used: set[int]
    """Those of them that it used; all if it failed for an unknown reason."""
    is_set: bool
    """Whether it gave one of them a value."""


def _called_without(places: Mapping[int, Place], call: Callable[[], Any]) -> _CalledWithout:
    """Makes a call while attributes have no value; afterwards they are what they were."""
    out, unexplained = None, set()
    with unread_in(places.values()) as unread:
        try:
            out = call()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # also what ends an attempt to trace, for which the missing attribute may be the cause
            unexplained = set(places)
        pairs = list(zip(places.items(), unread, strict=True))
        is_set = any(owner.__dict__.get(name) is not value for (_, (owner, name)), value in pairs)
    return _CalledWithout(out, {index for (index, _), value in pairs if value.is_used()} or unexplained, is_set)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """A fake of the same form, made by an operation if the other one was."""
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return fake.requires_grad_().clone() if tensor.requires_grad else fake


def _may_require_grad(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _gradients(value: Any) -> tuple[bool, ...]:
    return tuple(tensor.requires_grad for tensor in trees.tensors(value))


def arguments_key(value: Any, seen: dict[torch.Tensor, int] | None = None, depth: int = 0) -> Any:
    """What of a call's arguments can change its outcome on fakes, but for whether they require grad."""
    seen = {} if seen is None else seen
    if isinstance(value, torch.Tensor):
        stride = tuple(map(expression_of, value.stride()))
        *kind, _ = _tensor_key(value)
        return *kind, stride, seen.setdefault(value, len(seen))
    if isinstance(value, Symbolic):
        return type(value), expression_of(value)
    below = trees.children(value) if depth < trees.MAX_DEPTH else None
    if below is None:
        return _value_key(value, {})
    return type(value), tuple((step, arguments_key(child, seen, depth + 1)) for step, child in below)


def module_key(module: nn.Module) -> ModuleKey | None:
    """What of a module can change the outcome of a call on fakes; None if hooks can."""
    form: list[Any] = []
    values: list[Any] = []
    places: list[tuple[nn.Module, str]] = []
    named = places_in(module)
    inside: dict[nn.Module, int] = {}
    for _, inner in named:
        inside.setdefault(inner, len(inside))
    weights: dict[torch.Tensor, int] = {}
    for name, inner in named:
        if isinstance(inner, torch.jit.ScriptModule) or inner._forward_hooks or inner._forward_pre_hooks:
            return None
        attributes = []
        key: Any
        held = inner.__dict__
        skipped = _NOT_OF_CALLS if any(_TABLES_OF_CALLS(held)) else _NOT_LOOKED_AT
        for attribute, value in held.items():
            if attribute in skipped:
                continue
            kind = type(value)
            if kind in _PLAIN:
                key = kind, value
            elif kind in _EMPTY and not value:
                key = _EMPTY[kind]
            else:
                key = _value_key(value, inside)
            if kind in _MAY_GO_UNREAD and attribute not in OF_TORCH:
                values.append(key)
                places.append((inner, attribute))
                key = kind
            attributes.append((attribute, key))
        tensors = [
            (attribute, None if t is None else (_tensor_key(t), weights.setdefault(t, len(weights))))
            for attribute, t in (*inner._parameters.items(), *inner._buffers.items())
        ]
        form.append((name, type(inner), inside[inner], tuple(attributes), tuple(tensors)))
    return ModuleKey(tuple(form), tuple(values), tuple(places))


def _tensor_key(tensor: torch.Tensor) -> Any:
    return type(tensor), expressions_of(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad


def _value_key(value: Any, inside: dict[Any, int], depth: int = 0) -> Any:
    """An attribute's value; other modules of the same tree by their position."""
    if isinstance(value, trees.PLAIN):
        return type(value), value
    if isinstance(value, torch.Tensor):
        return _tensor_key(value)
    if isinstance(value, torch.Size):
        return torch.Size, tuple(expression_of(size) for size in value)
    if type(value) in _CONTAINERS and depth < _MAX_DEPTH:
        if type(value) is dict and _PLAIN.issuperset(map(type, chain(value, value.values()))):  # as of an adapter
            return dict, tuple(map(type, chain(value, value.values()))), tuple(value.items())
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return type(value), tuple(
            (_value_key(k, inside, depth + 1), _value_key(item, inside, depth + 1)) for k, item in items
        )
    if isinstance(value, nn.Module) and value in inside:
        return nn.Module, inside[value]
    return Identity(value)
