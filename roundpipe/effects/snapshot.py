"""What some modules and their code held at one moment: what has changed since, and the way back.

A graph runs no Python, and a recomputation runs it twice, so whoever counts, caches or remembers there must be found.

Invariant: after `restore`, every place that a snapshot has holds what it held when the snapshot was taken.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.attributes import attributes_of
from roundpipe.core.contexts import contextmanager
from roundpipe.effects import places
from roundpipe.effects.places import REGISTERED, Place, holds_tensors, same_contents
from roundpipe.effects.reach import BETWEEN_CALLS, EVERYTHING, Limits, StateWalk
from roundpipe.effects.uses import reached_by
from roundpipe.effects.versions import version_of

_CONTAINERS = frozenset(places.CONTAINERS)
_SYMBOLIC = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)


class AttributeChange(NamedTuple):
    """An attribute of a module that was set to something else."""

    module: nn.Module
    name: str
    before: Any
    now: Any
    position: int
    """Of the module in its snapshot."""

    @property
    def is_cached_property(self) -> bool:
        """Whether it holds what a property computed."""
        return isinstance(getattr(type(self.module), self.name, None), functools.cached_property)

    @property
    def is_torchs(self) -> bool:
        """Whether the module is one of torch's, such as an RNN, which has its weights in a list, too."""
        return type(self.module).__module__.startswith("torch.")


class _Record(NamedTuple):
    attributes: dict[str, Any]
    parameters: dict[str, Any]
    buffers: dict[str, Any]
    training: bool
    position: int

    @classmethod
    def of(cls, module: nn.Module, position: int) -> _Record:
        tensors = dict(module._parameters), dict(module._buffers)
        return cls(dict(module.__dict__), *tensors, module.training, position)

    def has_attributes_of(self, module: nn.Module) -> bool:
        """Whether a module has these very attributes; of thousands of modules, this is no Python for each."""
        before, now = self.attributes, module.__dict__
        return (
            len(now) == len(before)
            and all(map(operator.is_, now.values(), before.values()))
            and list(now) == list(before)
        )

    def put_buffers(self, module: nn.Module) -> None:
        module._buffers.clear()
        module._buffers.update(self.buffers)


class ModuleSnapshot:
    """What modules hold themselves; their parameters and buffers by identity, and buffers by version, too."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._records = {module: _Record.of(module, position) for position, module in enumerate(modules)}
        buffers = [buffer for record in self._records.values() for buffer in record.buffers.values()]
        self._versions = [(buffer, version_of(buffer)) for buffer in buffers]

    @property
    def modules(self) -> Iterable[nn.Module]:
        return self._records

    def copied(self) -> Self:
        """The same, for which other changes are accepted."""
        other = copy.copy(self)
        other._records = dict(self._records)
        return other

    def diff(self, modules: Iterable[nn.Module] | None = None) -> list[AttributeChange]:
        """Attributes of these modules (None: of all) that were set to something else, but for `REGISTERED`."""
        changes = []
        for module in self._records if modules is None else modules:
            record = self._records.get(module)
            if record is None or record.has_attributes_of(module):
                continue
            before = record.attributes
            for name, now in module.__dict__.items():
                if before.get(name, before) is not now and name not in REGISTERED:
                    if not trees.same(before.get(name), now):
                        changes.append(AttributeChange(module, name, before.get(name), now, record.position))
        return changes

    def accept_attributes(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            record = self._records.get(module)
            if record is not None and not record.has_attributes_of(module):
                self._records[module] = record._replace(attributes={**record.attributes, **module.__dict__})

    def accept_buffers(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            record = self._records.get(module)
            if record is not None and (record.buffers or module._buffers):
                self._records[module] = record._replace(buffers=dict(module._buffers))

    def buffers_written(self) -> bool:
        return any(version_of(buffer) != version for buffer, version in self._versions) or any(
            module._buffers.get(name) is not buffer
            for module, record in self._records.items()
            for name, buffer in record.buffers.items()
        )

    def replaced_parameter(self) -> tuple[nn.Module, str] | None:
        """A parameter that is another tensor, gone or new: its module and name."""
        for module, record in self._records.items():
            before, now = record.parameters, module._parameters
            if len(before) == len(now) and all(map(operator.is_, before.values(), now.values())):
                continue
            now = dict(now)
            for name in sorted({*before, *now}):
                if before.get(name) is not now.get(name):
                    return module, name
        return None

    def changed_mode(self) -> nn.Module | None:
        others = (module for module, record in self._records.items() if module.training is not record.training)
        return next(others, None)

    def rebuilt(self, modules: Iterable[nn.Module]) -> tuple[nn.Module, str] | None:
        """Which module has another mode, parameter or buffer, and its name."""
        for module in modules:
            if (record := self._records.get(module)) is None:
                continue
            if module.training is not record.training:
                return module, "training"
            for before, now in ((record.parameters, module._parameters), (record.buffers, module._buffers)):
                for name, tensor in now.items():
                    if before.get(name) is not tensor:
                        return module, name
        return None

    def restore(self) -> None:
        """Puts back attributes, and which buffers there were."""
        for module, record in self._records.items():
            if isinstance(module, torch.jit.ScriptModule):  # can't be changed
                continue
            held: dict[str, Any] = module.__dict__
            for name in held.keys() - record.attributes.keys():
                del held[name]
            held.update(record.attributes)
            record.put_buffers(module)

    def restore_tensors(self, keep: Iterable[tuple[nn.Module, str]] = ()) -> None:
        """Puts back buffers, and each attribute that holds tensors or symbolic sizes now, but for those to keep."""
        keep = set(keep)
        for change in self.diff():
            leaves = trees.leaves(change.now)
            if (change.module, change.name) in keep or not any(isinstance(leaf, _SYMBOLIC) for leaf in leaves):
                continue
            before = self._records[change.module].attributes
            del change.module.__dict__[change.name]
            if change.name in before:
                change.module.__dict__[change.name] = before[change.name]
        for module, record in self._records.items():
            if not isinstance(module, torch.jit.ScriptModule):
                record.put_buffers(module)


class ContentsSnapshot(ModuleSnapshot):
    """The same, and what is in their lists and dicts, and the state of their generators."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__(modules)
        self._lengths: list[tuple[Any, int]] = []
        self._containers: list[tuple[str, Any, Any]] = []
        self._generators: list[tuple[str, torch.Generator, torch.Tensor]] = []
        for record in self._records.values():
            for name, value in record.attributes.items():
                kind = type(value)
                if kind in _CONTAINERS:
                    self._lengths.append((value, len(value)))
                    if (kind is dict or kind is list) and name not in REGISTERED:
                        self._containers.append((name, value, value.copy()))
                elif kind is torch.Generator:
                    self._generators.append((name, value, value.get_state()))

    def holds_new_values(self) -> bool:
        """Whether an attribute was set, to the same value even, or a container among them grew or shrank."""
        return any(len(value) != length for value, length in self._lengths) or any(
            record.attributes.get(name, record) is not value
            for module, record in self._records.items()
            for name, value in module.__dict__.items()
        )

    def changed_container(self, restore: bool = False) -> tuple[str, Any] | None:
        """Name and value of the first attribute whose list or dict holds something else; all such can be put back."""
        changed = [
            (name, value, before) for name, value, before in self._containers if not same_contents(before, value)
        ]
        for _, value, before in changed if restore else ():
            places.CONTAINER.write(value, None, before)
        return changed[0][:2] if changed else None

    def drawn(self) -> str | None:
        """The name of an attribute whose generator drew."""
        draws = (name for name, value, state in self._generators if not torch.equal(value.get_state(), state))
        return next(draws, None)


PlaceValues = Mapping[tuple[str, int, Any], Any]
"""What places hold, by `Place.identity`."""


class PythonSnapshot:
    """Everything outside of tensors and the attributes of modules that the code of some modules can change in Python.

    Containers, objects, closures, globals, classes.
    The modules' attributes and classes are looked through (torch's own have none), and ``with_hidden`` also other
    modules that a forward may reach, such as those in a list; ``known`` modules are no such others.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        limits: Limits = EVERYTHING,
        with_hidden: bool = True,
        known: Iterable[nn.Module] = (),
    ) -> None:
        modules = list(modules)
        self.reach = StateWalk(modules, limits, {*modules, *known} if with_hidden else None).reach

    def diff(self) -> Iterator[Place]:
        return (place for place in self.reach.places if place.is_changed())

    def narrowed(self) -> PythonSnapshot:
        """The same of those places alone that hold something else now: quick to look at several times."""
        narrowed = copy.copy(self)
        narrowed.reach = replace(self.reach, places=list(self.diff()))
        return narrowed

    def side_effects(self, expected: PlaceValues | None = None) -> list[str]:
        """What the modules' own code has changed, in words; not that a dict got tensors.

        If ``expected`` is given, neither draws count nor places that hold what it has there.
        """
        return list(dict.fromkeys(place.words for place in self.changed(expected)))

    def changed(self, expected: PlaceValues | None = None) -> Iterator[Place]:
        """The places of `side_effects`."""
        changed = (place for place in self.diff() if not place.by_hooks and not place.gained_tensors_only())
        if expected is not None:
            changed = (place for place in changed if place.kind != "random" and not _is_expected(place, expected))
        return changed

    def changed_values(self) -> PlaceValues:
        return {place.identity: place.value() for place in self.diff()}

    def restore(self) -> None:
        """Puts back what every place held, but for `torch.Generator`: on fakes, none draws."""
        for place in list(self.diff()):
            place.restore()
        self._clear_caches()

    def restore_tensors(self) -> None:
        """The same, only where there are tensors or symbolic sizes now."""
        for place in list(self.diff()):
            owner = place.owner
            if not holds_tensors(place.now()):
                continue
            is_list = place.view is places.CONTAINER and isinstance(owner, (list, deque))
            if is_list and not any(isinstance(item, torch.Tensor) for item in owner):  # how many sizes still counts
                for index, item in enumerate(owner):
                    owner[index] = 0 if holds_tensors(item) else item
            else:
                place.restore()
        self._clear_caches()

    def _clear_caches(self) -> None:
        for function, num_misses in self.reach.caches:
            if function.cache_info().misses != num_misses:  # its size stays what it was when it was full
                function.cache_clear()  # it may hold fakes

    def restore_generators(self) -> bool:
        """Puts back every `torch.Generator`; says whether any had drawn."""
        drew = [(gen, state) for gen, state in self.reach.generators if not torch.equal(gen.get_state(), state)]
        for generator, state in drew:
            generator.set_state(state)
        return bool(drew)


def snapshot_of_hooks(hooks: Iterable[Any]) -> PythonSnapshot:
    """What forward hooks can change, large tables and what lies deep inside others left out."""
    carrier = nn.Module()
    carrier._forward_hooks.update(enumerate(hooks))
    return PythonSnapshot([carrier], BETWEEN_CALLS)


def _is_expected(place: Place, expected: PlaceValues) -> bool:
    """Whether a place holds what it held, or what is expected; a dict item by item."""
    if place.identity not in expected:
        return False
    now, other = place.now(), expected[place.identity]
    if place.view.is_variable or not isinstance(now, dict) or not isinstance(other, dict):
        return place.view.is_same(other, now)
    missing = object()
    return all(
        any(trees.same(values.get(key, missing), dict.get(now, key, missing)) for values in (place.held, other))
        for key in {*place.held, *other, *dict.keys(now)}
    )


class _Holder(nn.Module):
    """Where a snapshot finds a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self) -> Any:
        return self.function()


class CodeSnapshot:
    """What some modules can change in Python, and a function, with the attributes of all objects that it names."""

    def __init__(self, modules: Iterable[nn.Module], function: Any = None) -> None:
        self._python = PythonSnapshot(modules if function is None else (*modules, _Holder(function)))
        objects = () if function is None else reached_by(function)
        dicts = map(attributes_of, objects)
        self._attributes = [(held, dict(held)) for held in dicts if held is not None]

    def restore(self) -> None:
        self._python.restore()
        for now, before in self._attributes:
            if now.keys() != before.keys() or any(now[name] is not value for name, value in before.items()):
                now.clear()
                now.update(before)


@contextmanager
def python_restored(modules: Iterable[nn.Module], function: Any = None) -> Iterator[None]:
    """Whatever the code of modules and a function does inside, such as to put fakes into a cache, is taken back."""
    snapshot = CodeSnapshot(modules, function)
    try:
        yield
    finally:
        snapshot.restore()
