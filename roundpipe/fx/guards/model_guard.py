"""What a trace took for granted about the model itself: looked at again before the trace is used.

Code between two calls may set ``model.config.use_cache``, put another function into a module, add a hook, or change a
global that the forward reads. Attributes that leaves set themselves are theirs, and are left out; so are
hooks of leaves, which run with them.

Invariant: `ModelGuard.change` returns None only if the model's code would find what it found when it was traced.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.errors import ConfigError, enumerated
from roundpipe.core.module_tree import modules_in, named_modules_in
from roundpipe.effects.places import CONTAINER, OF_TORCH, Place, hook_tables
from roundpipe.effects.reach import BETWEEN_CALLS
from roundpipe.effects.reads import Reads
from roundpipe.effects.snapshot import PlaceValues, PythonSnapshot
from roundpipe.effects.uses import CodeUses, attributes_read, uses_of_forward, uses_of_functions, uses_of_hook
from roundpipe.fx.sizes import flat_values

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
        self._dicts = [module.__dict__ for module in self._modules]
        self._keep_modes = all("training" in own for own in self._dicts)
        self._training = self._modes()
        self._forms = _WeightForms(model, replaced)
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
        self._python = PythonSnapshot(self._modules, BETWEEN_CALLS)
        classes = [vars(place.owner) for place in self._python.reach.places if place.kind == "names"]
        self._sizes_of_classes = [(attributes, len(attributes)) for attributes in classes]
        kept_whole = [module for module in self._modules if module not in glue]
        own_names = own.attributes.union(*(uses_of_forward(type(module)).sets for module in kept_whole))
        self._own_names = dict.fromkeys(kept_whole, own_names)
        self._read = self._names_read()
        self._keys = list(map(set, self._dicts))
        self._lengths = list(map(len, self._dicts))
        known: dict[Any, list[str]] = {}  # of many modules that have the same attributes
        self._attributes: list[tuple[nn.Module, list[str], list[Any]]] = []
        for module, held in zip(self._modules, self._dicts, strict=True):
            form = type(module), module in self._own_names, *held
            if form not in known:
                known[form] = sorted(self._relevant(module, held))
            self._attributes.append((module, known[form], list(map(held.__getitem__, known[form]))))
        self._owners = [module.__dict__ for module, names, _ in self._attributes for _ in names]
        self._names = list(chain.from_iterable(names for _, names, _ in self._attributes))
        self._values = list(chain.from_iterable(values for *_, values in self._attributes))

    def restrict(self, reads: Reads) -> None:
        """From now on, of objects and registries that ``reads`` knows, only what was read counts."""
        for index, place in enumerate(self._python.reach.places):
            if place.view is CONTAINER and (view := reads.view(place.owner)) is not None:
                held = view.read(place.owner, None)
                self._python.reach.places[index] = replace(place, view=view, held=held)
        self.__dict__.pop("_quick", None)

    @functools.cached_property
    def _quick(self) -> _QuickComparison:
        return _QuickComparison(self._python.reach.places, self._sizes_of_classes)

    def _relevant(self, module: nn.Module, names: Iterable[str]) -> set[str]:
        """Those attributes of a module that its model's code may read, and that the graph would not set."""
        others = set(names) - OF_TORCH - self._own_names.get(module, set())
        return others if self._read is None or type(module).__module__.startswith("torch.") else others & self._read

    def _names_read(self) -> frozenset[str] | None:
        """Names of the attributes that the model's code can read; None if it makes up names."""
        kinds, codes = {type(module) for module in self._modules}, self._python.reach.codes
        uses = (uses_of_functions(codes, kinds), *map(uses_of_forward, kinds))
        if any(use.reads_any_name for use in uses):
            return None
        return frozenset({"forward"}).union(CodeUses.of(codes).reads, *map(attributes_read, kinds))

    def change(self) -> str | None:
        """What is otherwise now, in words.

        Raises:
            ConfigError: modules were replaced, added or removed.
        """
        return (
            self._change_of_mode()
            or self._change_of_weights()
            or self._change_of_structure()
            or self._change_of_attributes()
            or (None if self._quick.is_same() else self._change_of_python())
        )

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

    def _change_of_weights(self) -> str | None:
        if change := self._forms.change():
            return change
        for module, name, tensor in self._weights:
            if getattr(module, name, None) is not tensor:
                return f"{type(module).__name__}.{name} is another tensor now"
        return None

    def _change_of_structure(self) -> str | None:
        if not all(map(operator.eq, self._child_dicts, self._children)):  # modules are equal by identity
            triples = zip(self._modules, self._child_dicts, self._children, strict=True)
            kind = next(type(module).__name__ for module, now, before in triples if now != before)
            raise ConfigError(
                f"submodules of a {kind} were replaced, added or removed since the model was compiled; compile it again"
            )
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

    def _change_of_attributes(self) -> str | None:
        values_now = map(dict.get, self._owners, self._names, repeat(_MISSING))  # of thousands: no Python for each
        for module, names, values in () if all(map(operator.is_, values_now, self._values)) else self._attributes:
            for name, before in zip(names, values, strict=True):
                value = module.__dict__.get(name, _MISSING)
                if not trees.same(before, value) and not self._sets_itself(module, name, value):
                    return f"{type(module).__name__}.{name} is {_words(value)}, traced with {_words(before)}"
        if list(map(len, self._dicts)) != self._lengths:
            for module, keys in zip(self._modules, self._keys, strict=True):
                for name in sorted(self._relevant(module, module.__dict__.keys() - keys)):
                    if not self._sets_itself(module, name, module.__dict__[name]):
                        return f"{type(module).__name__}.{name} is new"
        return None

    def _change_of_python(self) -> str | None:
        place = next(self._python.changed(self.own.places), None)
        if place is None:
            return None
        names = enumerated(place.changed_items(), most=3)
        return f"{place.words} holds something else now{names and f' ({names})'}"

    def _sets_itself(self, module: nn.Module, name: str, value: Any) -> bool:
        """Whether the forward itself puts such a value there."""
        return self.own.values.get((module, name)) == kind_and_value(value)

    def _keeps_more(self, leaf: nn.Module, hooks: Mapping[int, Any], known: Mapping[int, Any]) -> bool:
        """Whether a leaf has a new hook that keeps something, other than those that the forward installs."""
        codes = {*map(_code_of, known.values()), *self.own.hooks.get(leaf, ())}
        uses = [uses_of_hook(hook) for hook in hooks.values() if _code_of(hook) not in codes]
        return any(use.sets or use.rebinds or use.changes_items for use in uses)


class _QuickComparison:
    """Tells cheaply whether places hold the same objects as when this was made; too careful rather than too bold.

    Random generators among them are not looked at.

    Args:
        sizes_of_classes: attributes of the classes among them, and how many there were.
    """

    def __init__(self, all_places: Iterable[Place], sizes_of_classes: Sequence[tuple[Any, int]]) -> None:
        by_kind: dict[str, list[Place]] = {}
        for place in all_places:
            by_kind.setdefault(place.kind, []).append(place)
        containers = [place for place in by_kind.get("container", ()) if place.view is CONTAINER]
        dicts = [(place.owner, place.held) for place in containers if isinstance(place.owner, dict)]
        lists = [(place.owner, place.held) for place in containers if isinstance(place.owner, (list, deque))]
        self._contents = _Contents(dict.__len__, dict.values, dicts), _Contents(len, iter, lists)
        self._sets = [(p.owner, p.held) for p in containers if isinstance(p.owner, set)]
        self._variables = [(p.owner, p.key, p.held) for p in by_kind.get("global", [])]
        self._variables += [(vars(p.owner), p.key, p.held) for p in by_kind.get("class", [])]
        self._names = sizes_of_classes
        self._others = [place for kind in ("cell", "array", "slots", "context") for place in by_kind.get(kind, [])]
        self._others += [place for place in by_kind.get("container", ()) if place.view is not CONTAINER]

    def is_same(self) -> bool:
        return (
            all(held.is_same() for held in self._contents)
            and all(owner == held for owner, held in self._sets)
            and all(owner.get(key) is held for owner, key, held in self._variables)
            and all(len(owner) == number for owner, number in self._names)
            and not any(place.is_changed() for place in self._others)
        )


class _Contents:
    """What containers hold, compared all at once."""

    def __init__(
        self,
        length: Callable[[Any], int],
        items: Callable[[Any], Iterable[Any]],
        containers: Sequence[tuple[Any, Any]],
    ) -> None:
        self._length, self._items = length, items
        self._owners = [owner for owner, _ in containers]
        self._lengths = [len(held) for _, held in containers]
        self._held = list(chain.from_iterable(items(held) for _, held in containers))

    def is_same(self) -> bool:
        """Whether they hold these very objects in this order."""
        if list(map(self._length, self._owners)) != self._lengths:
            return False
        return all(map(operator.is_, chain.from_iterable(map(self._items, self._owners)), self._held))


class _WeightForms:
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


def kind_and_value(value: Any) -> tuple[type, Any]:
    """A value's type, and the value if it is plain."""
    return type(value), value if isinstance(value, trees.PLAIN) else None


def hooks_by_code(module: nn.Module) -> list[Any]:
    """A module's hooks, each by its code, which is the same for one that is installed again."""
    return [_code_of(hook) for table in hook_tables(module) if table for hook in table.values()]


def _code_of(hook: Any) -> Any:
    return getattr(getattr(hook, "func", hook), "__code__", id(hook))


def _words(value: Any) -> str:
    if value is _MISSING:
        return "gone"
    return repr(value) if isinstance(value, trees.PLAIN) else f"another {type(value).__name__}"
