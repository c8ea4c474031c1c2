"""What a trace took for granted about the user's own Python: looked at again before the trace is used.

Code between two calls may set ``model.config.use_cache``, put another function into a module, add a hook, or change a
global that the forward reads. A graph has burned in what it found, so each such place is compared:

    modules       the same objects under the same names; else there is no way on but to compile again
    hooks         of modules that were looked into; those of leaves run with them
    attributes    that some code of the model reads, by its names
    weights       `WeightForms`: what tensors in their places look like
    the rest      containers, objects, closures, globals and class attributes: `PythonSnapshot`

Attributes that leaves set themselves are theirs, and are left out.

Invariant: `ModelState.change` returns None only if the model's code would find what it found when it was traced.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from roundpipe.core import trees
from roundpipe.core.errors import ConfigError
from roundpipe.effects.places import HOOKS, OF_TORCH
from roundpipe.effects.reach import BETWEEN_CALLS
from roundpipe.effects.snapshot import PlaceValues, PythonSnapshot, QuickComparison
from roundpipe.effects.uses import CodeUses, attributes_read, uses_of_forward, uses_of_functions, uses_of_hook

_MISSING = object()


@dataclass(slots=True)
class Own:
    """What a forward changes in Python by itself, without any change to the graph."""

    attributes: set[str] = field(default_factory=set)
    """Names of attributes that leaves set."""
    values: dict[tuple[nn.Module, str], tuple[type, Any]] = field(default_factory=dict)
    """Kinds of what attributes of modules that were looked into hold afterwards; plain values themselves, too."""
    hooks: dict[nn.Module, list[Any]] = field(default_factory=dict)
    """Hooks that modules have afterwards, by their code."""
    places: PlaceValues = field(default_factory=dict)
    counts: list[str] = field(default_factory=list)
    """What it changes at every call, in words."""


class ModelState:
    """The Python side of a model at one moment.

    Args:
        model: the user's.
        glue: those of its modules that were looked into.
        passing: leaves that return what they are given, and all within, past which readers of their output may read.
        own: what its forward was seen to change.
    """

    def __init__(self, model: nn.Module, glue: Collection[nn.Module], passing: Collection[nn.Module], own: Own) -> None:
        self._modules = list(model.modules())
        self._child_dicts = [module._modules for module in self._modules]
        self._children = [dict(module._modules) for module in self._modules]
        self._weight_dicts = [module._parameters for module in self._modules]
        self._num_weights = list(map(len, self._weight_dicts))
        self._hooked = [module for module in self._modules if module in glue or module in passing]
        self._hook_dicts = [module.__dict__[name] for module in self._hooked for name in HOOKS]
        self._hooks = list(map(dict, self._hook_dicts))
        self._leaf_hooks = [
            (module, held, dict(held))
            for module in self._modules
            if module not in glue and module not in passing
            for held in (module._forward_hooks, module._forward_pre_hooks)
        ]
        self._settled = own
        self._python = PythonSnapshot(self._modules, BETWEEN_CALLS)
        self._quick = QuickComparison(self._python.reach.places)
        leaves = [module for module in self._modules if module not in glue]
        own_names = own.attributes.union(*(uses_of_forward(type(module)).sets for module in leaves))
        self._own = {module: own_names if module not in glue else set() for module in self._modules}
        self._read = self._names_read()
        self._keys = [set(module.__dict__) for module in self._modules]
        self._dicts = [module.__dict__ for module in self._modules]
        self._lengths = list(map(len, self._dicts))
        self._attributes: list[tuple[nn.Module, list[str], list[Any]]] = []
        for module in self._modules:
            names = sorted(self._relevant(module, module.__dict__))
            if names:
                self._attributes.append((module, names, [module.__dict__[name] for name in names]))

    @property
    def counts(self) -> list[str]:
        """What the forward changes at every call, and the graph does not, in words."""
        return self._settled.counts

    def _relevant(self, module: nn.Module, names: Iterable[str]) -> set[str]:
        """Those attributes of a module that its model's code may read, and that the graph would not set."""
        found = set(names) - OF_TORCH - self._own[module]
        return found if self._read is None or _is_of_torch(module) else found & self._read

    def _names_read(self) -> frozenset[str] | None:
        """Names of the attributes that the model's code can read; None if it makes up names."""
        kinds = {type(module) for module in self._modules}
        uses = CodeUses.of(self._python.reach.codes)
        if uses_of_functions(self._python.reach.codes, kinds).reads_any_name:
            return None
        if any(uses_of_forward(kind).reads_any_name for kind in kinds):
            return None
        return frozenset({"forward"}).union(uses.reads, *map(attributes_read, kinds))

    def change(self) -> str | None:
        """What is otherwise now, in words.

        Raises:
            ConfigError: modules were replaced, added or removed.
        """
        if not all(map(operator.eq, self._child_dicts, self._children)):  # modules are equal by identity
            kind = next(
                type(module).__name__
                for module, was in zip(self._modules, self._children, strict=True)
                if module._modules != was
            )
            raise ConfigError(
                f"submodules of a {kind} were replaced, added or removed since the model was compiled; compile it again"
            )
        if not all(map(operator.eq, self._hook_dicts, self._hooks)):
            for index, module in enumerate(self._hooked):
                if self._other_hooks(index, module):
                    return f"the hooks of a {type(module).__name__} are others now"
        for module, hooks, known in self._leaf_hooks:
            if len(hooks) > len(known) and self._keeps_more(module, hooks, known):
                return f"a {type(module).__name__} has got a hook that may keep what it is given"
        if list(map(len, self._weight_dicts)) != self._num_weights:
            return "parameters came or went"
        for module, names, held in self._attributes:
            now = [module.__dict__.get(name, _MISSING) for name in names]
            if not all(map(operator.is_, now, held)):
                for name, one, was in zip(names, now, held, strict=True):
                    if not trees.same(was, one) and not self._is_own(module, name, one):
                        return f"{type(module).__name__}.{name} is {_in_words(one)}, traced with {_in_words(was)}"
        if list(map(len, self._dicts)) != self._lengths:
            for module, keys in zip(self._modules, self._keys, strict=True):
                for name in sorted(self._relevant(module, module.__dict__.keys() - keys)):
                    if not self._is_own(module, name, module.__dict__[name]):
                        return f"{type(module).__name__}.{name} is new"
        if self._quick.is_same():
            return None
        for words in self._python.side_effects(self._settled.places):
            return f"{words} holds something else now"
        return None

    def _is_own(self, module: nn.Module, name: str, now: Any) -> bool:
        """Whether the forward itself puts such a value there."""
        return self._settled.values.get((module, name)) == kind_and_value(now)

    def _other_hooks(self, index: int, module: nn.Module) -> bool:
        """Whether a module has neither the hooks that it had nor those that its forward installs."""
        first = index * len(HOOKS)
        if self._hook_dicts[first : first + len(HOOKS)] == self._hooks[first : first + len(HOOKS)]:
            return False
        return hooks_by_code(module) != self._settled.hooks.get(module)

    def _keeps_more(self, leaf: nn.Module, hooks: Mapping[int, Any], known: Mapping[int, Any]) -> bool:
        """Whether among hooks of a leaf there is one that keeps something, and that neither was there nor is the
        forward's own.
        """
        codes = {*map(_code_of, known.values()), *self._settled.hooks.get(leaf, ())}
        return any(_keeps(hook) and _code_of(hook) not in codes for hook in hooks.values())


class WeightForms:
    """What a model's parameters and buffers look like at one moment, whichever tensors are in their places later.

    A graph has dtypes and shapes burned in, and ``model.double()`` or ``p.data = other`` leave the objects as they are.
    What code of the model puts somewhere itself, such as a table that grows, looks as that code decides.

    Args:
        model: the user's.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        set_anywhere = _set_in_forwards(modules.values())
        parameters, own = _Places("dtype", "shape", "requires_grad"), _Places("dtype", "requires_grad")
        buffers = _Places("dtype", "shape")
        self._absent: list[tuple[dict[str, Any], str]] = []
        for path, module in modules.items():
            uses = uses_of_forward(type(module))
            for name, tensor in module._parameters.items():
                if tensor is None:
                    self._absent.append((module._parameters, name))
                else:
                    (own if name in uses.sets else parameters).add(module._parameters, path, name)
            for name, tensor in module._buffers.items():
                if _sets_buffer(uses, name, set_anywhere):
                    continue
                if tensor is None:
                    self._absent.append((module._buffers, name))
                else:
                    buffers.add(module._buffers, path, name)
        self._all = [parameters, own, buffers]
        for places in self._all:
            places.look()

    def leave_out(self, names: Collection[str]) -> None:
        """From now on, what is in these places, given by their qualified names, may be anything."""
        for places in self._all:
            places.leave_out(names)

    def change(self) -> str | None:
        """What is otherwise now, in words."""
        for held, name in self._absent:
            if held.get(name) is not None:
                return f"{name}, which was None, is a tensor now"
        return next((change for places in self._all for change in [places.change()] if change is not None), None)


class _Places:
    """Places of tensors, of which the same attributes are compared."""

    def __init__(self, *attributes: str) -> None:
        self._attributes = attributes
        self._look = operator.attrgetter(*attributes)
        self._places: list[tuple[dict[str, Any], str]] = []
        self._names: list[str] = []
        self._seen: list[Any] = []

    def add(self, held: dict[str, Any], path: str, name: str) -> None:
        self._places.append((held, name))
        self._names.append(f"{path}.{name}".lstrip("."))

    def leave_out(self, names: Collection[str]) -> None:
        kept = [index for index, name in enumerate(self._names) if name not in names]
        self._places = [self._places[index] for index in kept]
        self._names = [self._names[index] for index in kept]
        self.look()

    def look(self) -> None:
        self._seen = list(map(self._look, self._tensors()))

    def _tensors(self) -> list[Any]:
        return [held.get(name) for held, name in self._places]

    def change(self) -> str | None:
        tensors = self._tensors()
        try:
            if list(map(self._look, tensors)) == self._seen:
                return None
        except AttributeError:  # there is None in a place
            pass
        for name, tensor, was in zip(self._names, tensors, self._seen, strict=True):
            if tensor is None:
                return f"{name} is None now"
            seen = was if len(self._attributes) > 1 else (was,)
            for attribute, value in zip(self._attributes, seen, strict=True):
                now = getattr(tensor, attribute)
                if now != value:
                    return f"{name} has {_of_tensor(attribute, now)} now, traced with {_of_tensor(attribute, value)}"
        return None


def _of_tensor(attribute: str, value: Any) -> str:
    return f"shape {tuple(value)}" if attribute == "shape" else f"{attribute} {value}"


def _set_in_forwards(modules: Iterable[nn.Module]) -> frozenset[str]:
    """Names of attributes that forwards of some modules set, on whatever."""
    return frozenset().union(*(uses_of_forward(kind).sets for kind in set(map(type, modules))))


def _sets_buffer(uses: CodeUses, name: str, set_anywhere: Collection[str]) -> bool:
    """Whether a forward may put another tensor into a buffer of a module, of whose forward these are the uses."""
    return name in set_anywhere or "register_buffer" in uses.reads


def kind_and_value(value: Any) -> tuple[type, Any]:
    """A value's type, and the value if it is plain."""
    return type(value), value if isinstance(value, trees.PLAIN) else None


def hooks_by_code(module: nn.Module) -> list[Any]:
    """A module's hooks, each by its code, which is the same for one that is installed again."""
    return [_code_of(hook) for name in HOOKS for hook in module.__dict__[name].values()]


def _keeps(hook: Any) -> bool:
    """Whether a hook may put what it is given somewhere."""
    uses = uses_of_hook(hook)
    return bool(uses.sets) or uses.rebinds or uses.changes_items


def _code_of(hook: Any) -> Any:
    return getattr(getattr(hook, "func", hook), "__code__", id(hook))


def _in_words(value: Any) -> str:
    if value is _MISSING:
        return "gone"
    return repr(value) if isinstance(value, trees.PLAIN) else f"another {type(value).__name__}"


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")
