"""Modules that run apart from the model around them, and tell when that would differ from running in place.

Such a module gets copies of its arguments and runs on a copy of itself, so only what it returns reaches the others.
`WatchedModule` raises `SideEffect` where a module also hands on something in another way.
"""

from __future__ import annotations

import contextvars
import copy
import dataclasses
import enum
import itertools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.aliasing import address_of, overlapping
from roundpipe.core.errors import ConfigError
from roundpipe.core.layers import Carry
from roundpipe.core.module_tree import weight_bytes_of
from roundpipe.effects.places import CONTAINER, same_contents
from roundpipe.effects.run_once import hooks_run_around
from roundpipe.effects.snapshot import AttributeChange, ContentsSnapshot
from roundpipe.effects.uses import attributes_read, uses_of_forward
from roundpipe.effects.versions import WeightSnapshot
from roundpipe.runtime.engine.recompute import doing_recompute

RETURNS_ARGUMENTS = "it returns memory of a tensor that it is given"

_IMMUTABLE = (
    *(bool, int, float, complex, str, bytes, type, type(None), slice, range, frozenset, enum.Enum),
    *(torch.Tensor, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.EllipsisType),
)


class SideEffect(Exception):
    """A module did something for others beside returning a value; says what."""


class SameTensor:
    """Stands in an output for a tensor of the arguments, or of the output itself, that is there once more."""

    __slots__ = ("is_argument", "index")

    def __init__(self, is_argument: bool, index: int) -> None:
        self.is_argument = is_argument
        self.index = index
        """Among the tensors of the arguments, or of the output."""


class SharingExit:
    """The exit of a part that is one module: puts the same tensors at the places of `SameTensor`."""

    def __init__(self, output: str, arguments: str) -> None:
        self.reads = output, arguments
        self.places: list[dict[int, tuple[bool, int]]] = []
        """Per microbatch of a call: what each `SameTensor` says, by its position among the output's leaves."""

    def __call__(self, carry: Carry) -> Any:
        output, arguments = (carry[name] for name in self.reads)
        leaves = enumerate(trees.leaves(output))
        same = {position: (leaf.is_argument, leaf.index) for position, leaf in leaves if isinstance(leaf, SameTensor)}
        self.places.append(same)
        return _with_same(output, same, arguments)

    def restore_same(self, output: Any, arguments: Any) -> Any:
        """The merged output of a batch, with the same tensors where all microbatches agree on them."""
        first = self.places[0] if self.places else {}
        return _with_same(output, first, arguments) if all(same == first for same in self.places) else output


def _with_same(output: Any, same: Mapping[int, tuple[bool, int]], arguments: Any) -> Any:
    if not same:
        return output
    inputs, leaves = trees.tensors(arguments), trees.leaves(output)
    own = [leaf for place, leaf in enumerate(leaves) if place not in same and isinstance(leaf, torch.Tensor)]
    for place, (is_argument, index) in same.items():
        leaves[place] = (inputs if is_argument else own)[index]
    return trees.rebuild(output, leaves)


class WatchedModule(nn.Module):
    """A module of a part, which refuses to go on where running it apart would differ.

    The first (``index`` 0) gets the part's arguments, the others what was made for them alone. ``passing_on`` gets the
    index if the module returns memory of one of its arguments: where all modules of a part do, code around it may write
    into the output and read the argument. None: there is no other module in the part; its output has a `SameTensor` for
    each tensor that is an argument, or there twice.
    """

    def __init__(self, module: nn.Module, index: int, passing_on: set[int] | None) -> None:
        super().__init__()
        self.module = module
        self._index = index
        self._passing_on = passing_on
        self._proven_modes: set[tuple[bool, bool]] = set()
        """Those in which it ran and wrote no weights: whether training, and whether gradients were recorded."""
        self._has_weights = weight_bytes_of(module) > 0
        kinds = {type(submodule) for submodule in module.modules()}
        self._read = frozenset().union(*map(attributes_read, kinds))
        """Names of attributes that its code reads."""
        self._reads_any_name = any(uses_of_forward(kind).reads_any_name for kind in kinds)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises `SideEffect` if running apart differs; in a recomputation, too late for that, `ConfigError`."""
        try:
            return self._run(args, kwargs)
        except SideEffect as error:
            if not doing_recompute():
                raise
            kind = type(self.module).__name__
            raise ConfigError(
                f"the forward of a {kind}, run again for the backward, did what it had not done before: {error}. The "
                f"gradients would not be eager's. Keep the {kind} on the CPU with skip_modules, see "
                "wrap_model_to_roundpipe and compile"
            ) from None

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outside = (*args, *kwargs.values()) if self._index == 0 else ()
        versions = [(tensor, tensor._version) for tensor in trees.tensors(outside)]
        containers = [(value, copy.copy(value)) for value in _containers(outside)]
        collectors = [(value, copy.copy(value)) for value in _containers(contextvars.copy_context().values())]
        snapshot = ContentsSnapshot(self.module.modules())
        mode = self.module.training, torch.is_grad_enabled()
        weights = WeightSnapshot(self.module, with_norms=mode not in self._proven_modes)
        run = self.module.forward if self._passing_on is None and hooks_run_around(self.module) else self.module
        result = run(*args, **kwargs)
        if any(tensor._version != version for tensor, version in versions):
            raise SideEffect("it writes into a tensor that it is given")
        if not all(same_contents(before, value) for value, before in containers):
            raise SideEffect("it changes a list or dict that it is given")
        changed_collectors = [(value, before) for value, before in collectors if not same_contents(before, value)]
        for value, before in changed_collectors:
            CONTAINER.write(value, None, before)
        if changed_collectors:
            raise SideEffect("it changes a list or dict that a context variable holds")
        if collection := snapshot.changed_container(restore=True):
            name, value = collection
            raise SideEffect(f"its forward changes the {type(value).__name__} in attribute {name!r}")
        if written := weights.diff():
            raise SideEffect(f"its forward writes its parameter {written!r}")
        self._proven_modes.add(mode)
        for change in snapshot.diff():
            if change.is_torchs:
                continue
            if trees.tensors(change.now):
                raise SideEffect(f"its forward stores tensors in attribute {change.name!r}")
            if self._is_state(change):
                raise SideEffect(f"its forward changes attribute {change.name!r}")
        if self._passing_on is None:
            return self._with_references(result, [tensor for tensor, _ in versions])
        if not _memory(trees.tensors((args, kwargs))).isdisjoint(_memory(trees.tensors(result))):
            self._passing_on.add(self._index)
        return result

    def _is_state(self, change: AttributeChange) -> bool:
        """Whether a later call could find the change of an attribute, or others would not see it."""
        before, now = change.before, change.now
        is_same = type(before) is type(now) and isinstance(now, tuple) and before == now
        if is_same or change.is_cached_property:
            return False
        return not isinstance(now, trees.PLAIN) or self.may_read(change.name)

    def may_read(self, name: str) -> bool:
        return name in self._read or self._reads_any_name

    def _with_references(self, result: Any, arguments: list[torch.Tensor]) -> Any:
        """The output with a `SameTensor` for each tensor that is an argument, or in the output already."""
        outputs = trees.tensors(result)
        known = {id(tensor): SameTensor(True, index) for index, tensor in reversed(list(enumerate(arguments)))}
        own = list({id(tensor): tensor for tensor in outputs if id(tensor) not in known}.values())
        if not _memory(arguments).isdisjoint(_memory(own if self._has_weights else outputs)):
            raise SideEffect(RETURNS_ARGUMENTS)
        if any(True for _ in overlapping([tensor for tensor in own if tensor.layout is torch.strided])):
            raise SideEffect("it returns tensors that share memory")
        if len(own) == len(outputs):
            return result
        indices = itertools.count()

        def refer(tensor: torch.Tensor) -> Any:
            if id(tensor) in known:
                return known[id(tensor)]
            known[id(tensor)] = SameTensor(False, next(indices))
            return tensor

        return trees.map_tensors(result, refer)


def _memory(tensors: list[torch.Tensor]) -> set[int]:
    return {address_of(tensor) for tensor in tensors if tensor.layout is torch.strided and tensor.numel()}


def _containers(values: Iterable[Any]) -> Iterator[Any]:
    """What can be changed in values beside tensors."""
    pending = list(values)
    while pending:
        value = pending.pop()
        if isinstance(value, (list, dict)):
            yield value
        elif dataclasses.is_dataclass(value) and hasattr(value, "__dict__"):
            yield value.__dict__
        pending += [child for _, child in trees.children(value) or ()]


def why_unfit(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why arguments can't be sent to a device, if they can't."""
    pending: list[Any] = [*args, *kwargs.values()]
    while pending:
        value = pending.pop()
        kind = type(value)
        is_config = kind.__module__.startswith("transformers.") and kind.__name__.endswith("Config")
        if isinstance(value, _IMMUTABLE) or is_config:
            continue
        if not (isinstance(value, (list, tuple, Mapping)) or dataclasses.is_dataclass(value)):
            return f"it is given a {kind.__name__}, which it may change"
        pending += [child for _, child in trees.children(value) or ()]
    return None
