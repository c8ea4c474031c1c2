"""What a trace took for granted about the model itself: looked at again before the trace is used.

Code between two calls may set ``model.config.use_cache``, put another function into a module, add a hook, or change a
global that the forward reads. Attributes that leaves set themselves are theirs, and are left out; so are
hooks of leaves, which run with them.

Invariant: `ModelGuard.change` returns None only if the model's code would find what it found when it was traced.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.attributes import stored_attribute
from roundpipe.core.errors import ConfigError, enumerated
from roundpipe.core.module_tree import modules_in
from roundpipe.effects.kept import Kept, KeptPlaces, Moved
from roundpipe.effects.places import (
    CLASS,
    CONTAINER,
    CONTAINERS,
    NAMES,
    OF_TORCH,
    Place,
    are_other_numbers,
    hook_tables,
    items_of,
    same_contents,
)
from roundpipe.effects.reach import BETWEEN_CALLS
from roundpipe.effects.reads import Reads
from roundpipe.effects.snapshot import PlaceValues, PythonSnapshot
from roundpipe.effects.uses import (
    CodeUses,
    function_of,
    uses_of_forward,
    uses_of_functions,
    uses_of_hook,
    uses_of_methods,
    uses_of_properties,
)
from roundpipe.fx.guards.failure import OF_LOSS, OF_MODEL, Failure
from roundpipe.fx.guards.quick_comparison import QuickComparison
from roundpipe.fx.guards.weight_forms import WeightForms
from roundpipe.fx.sizes import flat_values
from roundpipe.fx.varying import ValuePlace, are_other_values, may_vary, without_items

MAX_COMPARED_WEIGHT = 1 << 14
"""Elements of a weight that is looked at in each call, since a forward may write it."""
_MISSING = object()
_TRAINING = operator.itemgetter("training")


@dataclass(slots=True)
class OwnChanges:
    """What a forward changes in Python by itself, without any change to the graph."""

    attributes: set[str] = field(default_factory=set)
    """Names of attributes that leaves set."""
    values: dict[tuple[nn.Module, str], tuple[type, Any]] = field(default_factory=dict)
    """What attributes of modules that were looked into hold afterwards, by `kind_and_value`."""
    hooks: dict[nn.Module, list[Any]] = field(default_factory=dict)
    """Hooks that modules have afterwards, by their code."""
    places: PlaceValues = field(default_factory=dict)
    counts: list[str] = field(default_factory=list)
    """What it changes at every call, in words."""
    kept: Sequence[Kept] = ()
    """Values that it leaves and never reads: anything may be in their places."""
    inputs: Sequence[ValuePlace] = ()
    """Where it finds what are arguments of the graph."""


@dataclass(frozen=True, slots=True)
class Write:
    """A call that wrote a tensor in place."""

    tensor: torch.Tensor
    function: Callable[..., Any]
    args: Any
    kwargs: Any

    def leaves_alone(self, real: torch.Tensor) -> bool:
        """Whether it would change nothing of this tensor, as clamping weights that are small does."""
        if real.is_meta or real.numel() > MAX_COMPARED_WEIGHT or self.tensor.shape != real.shape:
            return False
        if not self.args or self.args[0] is not self.tensor or flat_values(self.args[1:], self.kwargs):
            return False
        with torch.no_grad():
            written = real.detach().clone()
            self.function(written, *self.args[1:], **self.kwargs)
            return torch.equal(written, real)


class ModelGuard:
    """Compares a model with what it is now.

    Args:
        model, own: the user's, and what its forward was seen to change.
        glue: modules of it that were looked into.
        passing: leaves that return what they are given, and all within, past which readers of their output may read.
        weights: qualified names of parameters and buffers that traced code used itself: they must stay the same.
        replaced: those of tensors that the forward replaces, which may be anything.
    """

    def __init__(
        self,
        model: nn.Module,
        glue: Collection[nn.Module],
        passing: Collection[nn.Module],
        own: OwnChanges,
        weights: Collection[str],
        replaced: Collection[str],
    ) -> None:
        self.own = own
        self._modules = modules_in(model)
        self._kinds = list(map(type, self._modules))
        self._dicts = [module.__dict__ for module in self._modules]
        self._keep_modes = all("training" in own for own in self._dicts)
        self._training = self._modes()
        self._forms = WeightForms(model, replaced)
        places = [name.rpartition(".") for name in weights]
        owners = [(model.get_submodule(path), name) for path, _, name in places]
        self._weights = [(owner, name, getattr(owner, name)) for owner, name in owners]
        tables = [module._modules for module in self._modules]
        self._child_dicts = [getattr(table, "_python_modules", table) for table in tables]  # scripted modules' dict
        self._children = list(map(dict, self._child_dicts))
        self._weight_dicts = [module._parameters for module in self._modules]
        self._num_weights = list(map(len, self._weight_dicts))
        seen_through = {*glue, *passing}
        self._hooked = [module for module in self._modules if module in seen_through]
        self._hook_dicts = [*map(hook_tables, self._hooked)]
        self._hooks = [tuple(map(dict, own)) for own in self._hook_dicts]
        hooks = list(chain.from_iterable(self._hook_dicts))
        self._no_hooks, self._some_hooks = [each for each in hooks if not each], [each for each in hooks if each]
        self._hooks_there = list(map(dict, self._some_hooks))
        leaves = [module for module in self._modules if module not in seen_through]
        leaf_hooks = [(leaf, hooks) for leaf in leaves for hooks in (leaf._forward_hooks, leaf._forward_pre_hooks)]
        self._leaf_hooks = [(leaf, hooks, dict(hooks)) for leaf, hooks in leaf_hooks]
        self._leaf_hook_dicts = [hooks for _, hooks in leaf_hooks]
        self._num_leaf_hooks = list(map(len, self._leaf_hook_dicts))
        self._inputs = {place.identity for place in own.inputs}
        self._open_items: dict[tuple[int, str], set[Any]] = {}
        """Of attributes that are containers, the items that are arguments of the graph."""
        for attribute, container, item in filter(None, (place.of_attribute for place in own.inputs)):
            self._open_items.setdefault(attribute, set()).add(item)
            self._inputs.add((container, item))
        self._python = PythonSnapshot(self._modules, BETWEEN_CALLS)
        self._read = self._names_read()
        if self._read is not None and self._hold_unread(self._read):
            self._python = PythonSnapshot(self._modules, replace(BETWEEN_CALLS, names=self._read))
        self._python.reach.places[:] = [each for each in map(self._without_inputs, self._python.reach.places) if each]
        self._quick = QuickComparison(self._python.reach.places)
        self._kept = KeptPlaces(own.kept, self._python.reach.places, self._modules)
        kept_whole = [module for module in self._modules if module not in glue]
        own_names = own.attributes.union(*(uses_of_forward(type(module)).sets for module in kept_whole))
        self._own_names = dict.fromkeys(kept_whole, own_names)
        self._keys = list(map(set, self._dicts))
        self._lengths = list(map(len, self._dicts))
        known: dict[Any, list[str]] = {}  # of many modules that have the same attributes
        self._attributes: list[tuple[nn.Module, list[str], list[Any]]] = []
        for module, held in zip(self._modules, self._dicts, strict=True):
            form = type(module), module in self._own_names, *held
            if form not in known:
                known[form] = sorted(self._relevant(module, held))
            names = known[form]
            if self._inputs:
                names = [name for name in names if (id(held), name) not in self._inputs]
            self._attributes.append((module, names, list(map(held.__getitem__, names))))
        self._owners = [module.__dict__ for module, names, _ in self._attributes for _ in names]
        self._names = list(chain.from_iterable(names for _, names, _ in self._attributes))
        self._values = list(chain.from_iterable(values for *_, values in self._attributes))

    def restrict(self, reads: Reads) -> None:
        """From now on, of objects and registries that ``reads`` knows, only what was read counts.

        Their classes, which told that, are again what they were.
        """
        for index, place in enumerate(self._python.reach.places):
            view = reads.view(place.owner) if place.view.kind == CONTAINER.kind else None
            if view is not None or place.view in (CLASS, NAMES):
                view = view or place.view
                if keys := self._keys_of_inputs(place):
                    view = without_items(view, keys)
                self._python.reach.places[index] = replace(place, view=view, held=view.read(place.owner, place.key))
        self._quick = QuickComparison(self._python.reach.places)

    def _without_inputs(self, place: Place) -> Place | None:
        """A place without what are arguments of the graph; None if it is one itself."""
        if not self._inputs or place.view.is_variable:
            return None if (id(place.owner), place.key) in self._inputs else place
        if not (keys := self._keys_of_inputs(place)):
            return place
        view = without_items(place.view, keys)
        return replace(place, view=view, held=view.read(place.owner, place.key))

    def _keys_of_inputs(self, place: Place) -> set[Any]:
        return {key for owner, key in self._inputs if owner == id(place.owner)} if not place.view.is_variable else set()

    def _relevant(self, module: nn.Module, names: Iterable[str]) -> set[str]:
        """Those attributes of a module that its model's code may read, and that the graph would not set."""
        others = set(names) - OF_TORCH - self._own_names.get(module, set())
        return others if self._read is None or type(module).__module__.startswith("torch.") else others & self._read

    def _names_read(self) -> frozenset[str] | None:
        """Names of the attributes that the model's code can read; None if it makes up names."""
        kinds = {type(module) for module in self._modules}
        codes = [each.__code__ for each in self._python.reach.functions]
        uses = (uses_of_functions(codes, kinds), *map(uses_of_forward, kinds))
        if any(use.reads_any_name for use in uses):
            return None
        found = frozenset({"forward"}).union(CodeUses.of(codes).reads, *(uses_of_forward(kind).reads for kind in kinds))
        while True:
            called = (uses_of_methods(kind, found).reads for kind in kinds)
            more = found.union(uses_of_properties(kinds, found).reads, *called)
            if more == found:
                return found
            found = more

    def _hold_unread(self, read: frozenset[str]) -> bool:
        """Whether modules have containers or objects under names that no code reads, such as a list of rewards."""
        known = OF_TORCH | read
        held = (own[name] for own in self._dicts for name in own if name not in known)
        return any(not isinstance(value, (*trees.PLAIN, torch.Tensor)) for value in held)

    @property
    def moved(self) -> Moved:
        """See `KeptPlaces`."""
        return self._kept.moved

    def follow(self, copy: Iterable[tuple[str, Any, Any]]) -> Failure | None:
        """See `KeptPlaces.follow`."""
        words = self._kept.follow(copy)
        return Failure(f"{words} is another object, in which it may keep values", to_fix=OF_LOSS) if words else None

    def change(self) -> Failure | None:
        """What is otherwise now.

        Raises:
            ConfigError: modules were replaced, added or removed.
        """
        if words := self._change_of_mode():
            return Failure(words, is_of_modes=True)
        if words := self._forms.change():
            return Failure(words, to_fix=OF_MODEL)
        failure = self._change_of_weights()
        if failure is None and (words := self._change_of_structure()):
            return Failure(words, to_fix=OF_MODEL)
        failure = failure or self._change_of_attributes()
        failure = failure or (None if self._quick.is_same() else self._change_of_python())
        return failure and replace(failure, to_fix=OF_MODEL)

    def _change_of_mode(self) -> str | None:
        training = self._modes()
        if training == self._training:
            return None
        changed = [m for m, before in zip(self._modules, self._training, strict=True) if m.training != before]
        mode, first = "train" if changed[0].training else "eval", type(changed[0]).__name__
        return f"{len(changed)} of {len(self._modules)} modules are now in {mode} mode, a {first} first"

    def _modes(self) -> list[bool]:
        if self._keep_modes:
            return list(map(_TRAINING, self._dicts))
        return [module.training for module in self._modules]  # scripted and compiled ones ask another

    def _change_of_weights(self) -> Failure | None:
        others = [each for each in self._weights if getattr(each[0], each[1], None) is not each[2]]
        if not others:
            return None
        words = [f"{type(module).__name__}.{name}" for module, name, _ in others]
        buffers = (
            ValuePlace(where, module._buffers, name)
            for where, (module, name, tensor) in zip(words, others, strict=True)
            if are_other_values(tensor, module._buffers.get(name))
        )
        return Failure(f"{words[0]} is another tensor now", tuple(buffers))

    def _change_of_structure(self) -> str | None:
        if not all(map(operator.eq, self._child_dicts, self._children)):  # modules are equal by identity
            triples = zip(self._modules, self._child_dicts, self._children, strict=True)
            name = next(type(module).__name__ for module, now, before in triples if now != before)
            raise ConfigError(
                f"submodules of a {name} were replaced, added or removed since the model was compiled; compile it again"
                " and make the optimizer again from its optim_parameters()"
            )
        if (kinds := list(map(type, self._modules))) != self._kinds:
            pairs = zip(kinds, self._kinds, strict=True)
            kind, was = next((kind, was) for kind, was in pairs if kind is not was)
            return f"a {was.__name__} is of another class now, {kind.__module__}.{kind.__name__}"
        if any(self._no_hooks) or self._some_hooks != self._hooks_there:
            for module, now, before in zip(self._hooked, self._hook_dicts, self._hooks, strict=True):
                # its forward may install some itself
                if now != before and hooks_by_code(module) != self.own.hooks.get(module):
                    return f"the hooks of a {type(module).__name__} are others now"
        has_more = any(map(operator.gt, map(len, self._leaf_hook_dicts), self._num_leaf_hooks))
        for module, hooks, known in self._leaf_hooks if has_more else ():
            if len(hooks) > len(known) and self._keeps_more(module, hooks, known):
                return f"a {type(module).__name__} has got a hook that may keep what it is given"
        if list(map(len, self._weight_dicts)) != self._num_weights:
            return "parameters came or went"
        return None

    def _change_of_attributes(self) -> Failure | None:
        values_now = map(dict.get, self._owners, self._names, repeat(_MISSING))  # of thousands: no Python for each
        for module, names, values in () if all(map(operator.is_, values_now, self._values)) else self._attributes:
            for name, before in zip(names, values, strict=True):
                value = module.__dict__.get(name, _MISSING)
                open_items = self._open_items.get((id(module.__dict__), name), ())
                is_same = _are_alike(before, value, open_items)
                if not is_same and not self._sets_itself(module, name, value, before):
                    place = f"{type(module).__name__}.{name}"
                    words = f"{place} is {_words(value)}, traced with {_words(before)}"
                    number = place if are_other_numbers(before, value) else ""
                    return Failure(words, self._changed_values(), number=number)
        if list(map(len, self._dicts)) != self._lengths:
            for module, keys in zip(self._modules, self._keys, strict=True):
                for name in sorted(self._relevant(module, module.__dict__.keys() - keys)):
                    if not self._sets_itself(module, name, module.__dict__[name]):
                        return Failure(f"{type(module).__name__}.{name} is new")
        return None

    def _changed_values(self) -> tuple[ValuePlace, ...]:
        """All attributes of modules that hold other numbers now, or other tensors which code of the graph finds."""
        found: list[ValuePlace] = []
        for module, names, values in self._attributes:
            for name, before in zip(names, values, strict=True):
                places = ValuePlace.in_attribute(f"{type(module).__name__}.{name}", module.__dict__, name, before)
                # what the code of a layer that stays whole finds, it finds itself
                found += (place for place in places if module not in self._own_names or may_vary(place.read()))
        return tuple(found)

    def _change_of_python(self) -> Failure | None:
        changed = [each for each in self._python.changed(self.own.places) if not self._kept.explain(each)]
        if not changed:
            return None
        place = changed[0]
        now = place.now()
        names = enumerated(place.changed_items(), most=3)
        words = f"{place.words} holds something else now{names and f' ({names})'}"
        if place.view.is_variable and isinstance(now, trees.PLAIN) and isinstance(place.held, trees.PLAIN):
            words = f"{place.words} is {now!r}, traced with {place.held!r}"
        varying = tuple(number for each in changed for number in ValuePlace.changed_in(each))
        return Failure(words, varying, number=next(iter(place.changed_values(are_other_numbers).values()), ""))

    def _sets_itself(self, module: nn.Module, name: str, value: Any, before: Any = _MISSING) -> bool:
        """Whether the forward itself puts such a value there, or leaves values in it."""
        is_kept = self._kept.has(module.__dict__, name) or self._kept.is_moved(before, value)
        return is_kept or self.own.values.get((module, name)) == kind_and_value(value)

    def _keeps_more(self, leaf: nn.Module, hooks: Mapping[int, Any], known: Mapping[int, Any]) -> bool:
        """Whether a leaf has a new hook that keeps something, other than those that the forward installs."""
        codes = {*map(_code_of, known.values()), *self.own.hooks.get(leaf, ())}
        uses = [uses_of_hook(hook) for hook in hooks.values() if _code_of(hook) not in codes]
        return any(use.sets or use.rebinds or use.changes_items for use in uses)


def _are_alike(before: Any, value: Any, open_items: Collection[Any] = ()) -> bool:
    """Whether they are the same, or containers that hold the same: the snapshot tells if the one before has changed.

    ``open_items``: those that are arguments of the graph.
    """
    if type(value) is not type(before) or type(value) not in (tuple, *CONTAINERS):
        return trees.same(before, value)
    if not open_items:
        return same_contents(before, value)
    items = [
        {item: held for item, held in items_of(each).items() if item not in open_items} for each in (before, value)
    ]
    return len(before) == len(value) and same_contents(*items)


def kind_and_value(value: Any) -> tuple[type, Any]:
    """A value's type, and the value if it is plain."""
    return type(value), value if isinstance(value, trees.PLAIN) else None


def hooks_by_code(module: nn.Module) -> list[Any]:
    """A module's hooks, each by its code, which is the same for one that is installed again."""
    return [_code_of(hook) for table in hook_tables(module) if table for hook in table.values()]


def _code_of(hook: Any) -> Any:
    return stored_attribute(
        function_of(hook.func if isinstance(hook, functools.partial) else hook), "__code__", id(hook)
    )


def _words(value: Any) -> str:
    if value is _MISSING:
        return "gone"
    return repr(value) if isinstance(value, trees.PLAIN) else f"another {type(value).__name__}"
