"""Weights that come up when code reads them: for Python that runs on a device as it is, not by a schedule.

A ``generate`` decides token by token what runs next, so nobody can say beforehand which weights it needs. Here the
tables in which a replica's modules hold their parameters bring them:

    module.weight -> `_Table` -> `OnDemandWeights.read` -> tensors of the group that the parameter is in
                                  `- another group than before: those that came next the last time are uploaded beside
                                     the computation, and those that are needed last give way

Groups stay as long as there is room. Their share of the device is small in the first pass, which has the whole prompt;
then it is the budget less the most that was in use beside them. Once nothing comes or goes any more, the tables hold
the tensors themselves, so that a read is a dict's: all tables without a budget, else all but one, whose reads see to
it that there still is room.

Invariant: the memory of weights goes with the last reference to them, so none that code still holds is overwritten.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.allocations import uncounted
from roundpipe.core.storages import bytes_of, is_plain
from roundpipe.runtime.device.backend import Backend, Event, Lane
from roundpipe.runtime.weights.layer_weights import LayerWeights
from roundpipe.runtime.weights.slots import Slot

LOOKAHEAD = 2
"""Groups that are brought before they are read."""
FIRST_SHARE = 0.25
"""What weights have of the budget in the first pass."""
LATER_SHARE, OTHERS_GROWTH = 0.95, 1.25
"""What is shared later; how much more than the most so far the code's own tensors may take until that is seen."""


def groups_of(model: nn.Module, target_bytes: int) -> tuple[list[nn.Module], set[nn.Module]]:
    """A model's modules in groups of about so many bytes, in their order; and those with the smallest weights.

    These, such as norms, lie between all others and are worth no group: they have a quarter of one's bytes at most.
    """
    sizes = dict(_sizes_of(model))
    smallest = sorted((module for module in sizes if _has_plain(module)), key=sizes.__getitem__)
    totals = itertools.accumulate(sizes[module] for module in smallest)
    small = {module for module, total in zip(smallest, totals, strict=True) if total <= target_bytes // 4}
    groups: list[list[nn.Module]] = []
    room_bytes = 0
    for module, num_bytes in sizes.items():
        if module in small:
            continue
        if num_bytes > room_bytes:
            groups.append([])
            room_bytes = target_bytes
        groups[-1].append(_without_submodules(module))
        room_bytes -= num_bytes
    return [nn.ModuleList(group) for group in groups], small


def _sizes_of(model: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """The modules that hold weights, and bytes of these; of those that hold none but others' only the first."""
    seen = set[int]()
    for module in model.modules():
        tensors = _tensors_in(module)
        if not tensors.keys() <= seen and not isinstance(module, torch.jit.ScriptModule):
            seen |= tensors.keys()
            yield module, sum(map(bytes_of, tensors.values()))


def _tensors_in(module: nn.Module) -> dict[int, torch.Tensor]:
    tensors = (*module._parameters.values(), *module._buffers.values())
    return {id(tensor): tensor for tensor in tensors if tensor is not None}


def _has_plain(module: nn.Module) -> bool:
    return all(map(is_plain, _tensors_in(module).values()))


def _without_submodules(module: nn.Module) -> nn.Module:
    if not module._modules:
        return module
    own = nn.Module()
    own.__dict__.update(_parameters=module._parameters, _buffers=module._buffers)
    return own


@dataclass(slots=True)
class _WeightGroup:
    """Weights that come and go together."""

    weights: LayerWeights
    num_bytes: int
    tensors: list[torch.Tensor | None] = field(default_factory=list)
    """By slot; empty while they are at home."""
    uploaded: Event | None = None
    """The upload, until COMPUTE waits for it."""
    copies: list[torch.Tensor] = field(default_factory=list)
    """What it makes, until then."""
    memory: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def written(self) -> list[tuple[Slot, torch.Tensor]]:
        """The buffers that the code has written; they would be lost with the group."""
        slots = zip(self.weights.slots, self.tensors, strict=bool(self.tensors))
        return [(slot, tensor) for slot, tensor in slots if tensor is not None and _is_written(slot, tensor)]


class OnDemandWeights:
    """The weights of some layers on one device; used by one thread, under `Backend.activate`, until `close`."""

    def __init__(self, backend: Backend, layers: Sequence[LayerWeights], budget_bytes: int | None) -> None:
        self._backend = backend
        self._groups = [_WeightGroup(weights, weights.device_bytes) for weights in layers]
        self._places: dict[int, tuple[int, int]] = {}
        """By the identity of the tensor at home, its group and its slot."""
        for index, weights in enumerate(layers):
            for position, slot in enumerate(weights.slots):
                self._places.setdefault(id(slot.tensor), (index, position))
        self._budget_bytes = budget_bytes
        self._held_bytes = self._others_bytes = 0
        self._current = self._before = -1
        self._first: int | None = None
        """The group that was read first; None once the first pass is over."""
        self._following: dict[tuple[int, int], int] = {}
        """By a group and the one before it, the one that came behind them the last time."""
        self._countdown = len(layers)
        self._tables: list[_Table] = []
        self._calm: list[int] = []
        """The groups read since one came or went."""
        self._held: set[int] = set()
        """Groups whose tensors the tables hold."""
        self.num_uploads = 0
        backend.begin_visit()

    def table(self, originals: Mapping[str, torch.Tensor | None], stand_ins: Mapping[int, Any]) -> dict[str, Any]:
        """A module's table of parameters or buffers; ``stand_ins`` are on the device already, by their originals."""
        entries: dict[str, Any] = {}
        places: dict[str, tuple[int, int]] = {}
        for name, tensor in originals.items():
            entries[name] = tensor if tensor is None else stand_ins.get(id(tensor), tensor)
            if isinstance(entries[name], AbsentWeight):
                places[name] = self._places[id(tensor)]
        if not places:
            return entries
        self._tables.append(_Table(entries, places, self))
        return self._tables[-1]

    def stand_in(self, tensor: torch.Tensor) -> AbsentWeight:
        return AbsentWeight.of(tensor, self._backend.device, self, self._places[id(tensor)])

    def read(self, index: int, position: int) -> torch.Tensor:
        """A tensor on the device, by its group and slot."""
        if self._held and not (index in self._held and self._has_room()):
            self.let_go()
        if index != self._current and not self._held:
            self._enter(index)
            if len(self._calm) > 2 * len(self._groups):
                self._hold(but=(index, position))
        tensor = self._groups[index].tensors[position]
        assert tensor is not None
        return tensor

    def written_buffers(self) -> Iterator[tuple[Slot, torch.Tensor]]:
        """What the code has written in place, on the device."""
        return itertools.chain.from_iterable(group.written() for group in self._groups)

    def close(self) -> None:
        self.let_go()
        for group in self._groups:
            self._drop(group)

    def _hold(self, but: tuple[int, int]) -> None:
        """Have the tables hold what they were asked for; under a budget not the one that was asked for ``but``."""
        self._held.update(self._calm)
        for table in self._tables:
            is_watched = self._budget_bytes is not None and but in table.places.values()
            if not is_watched and all(index in self._held for index, _ in table.places.values()):
                table.hold({name: self._groups[index].tensors[at] for name, (index, at) in table.places.items()})

    def let_go(self) -> None:
        """Have the tables ask again."""
        self._held.clear()
        self._calm.clear()
        for table in self._tables:
            table.let_go()

    def _has_room(self) -> bool:
        """Whether all weights that are there may stay."""
        self._note_others()
        if self._budget_bytes is not None:
            self._backend.begin_visit()
        return self._held_bytes <= self._allowed_bytes()

    def _enter(self, index: int) -> None:
        """The code reads another group than before."""
        self._following[self._before, self._current] = index
        self._before, self._current = self._current, index
        if index == self._first:
            self._first = None
        elif self._before < 0:
            self._first = index
        group = self._groups[index]
        self._calm.append(index)
        self._countdown -= 1
        if not group.tensors or self._countdown <= 0:
            self._countdown = len(self._groups)
            self._note_others()
            self._backend.begin_visit()
        ahead = self._ahead()
        for following in dict.fromkeys([index, *ahead[:LOOKAHEAD]]):
            wanted = self._groups[following]
            if not wanted.tensors and (self._make_room(wanted, ahead) or following == index):
                self._load(wanted)
        self._make_room(None, ahead)
        if group.uploaded is not None:
            self._backend.wait(Lane.COMPUTE, group.uploaded)
            self._backend.check_ready(group.copies)
            group.uploaded, group.copies = None, []

    def _ahead(self) -> list[int]:
        """The groups to be read next, as they were the last time; at first, as they are in the model."""
        if all(group.tensors for group in self._groups) and not self._held_bytes > self._allowed_bytes():
            return []
        before, current, ahead = self._before, self._current, list[int]()
        for _ in self._groups:
            following = self._following.get((before, current), current + 1)
            if following == len(self._groups):
                break
            ahead.append(following)
            before, current = current, following
        return ahead

    def _allowed_bytes(self) -> float:
        """Of weights."""
        if self._budget_bytes is None:
            return float("inf")
        if self._first is not None:
            return FIRST_SHARE * self._budget_bytes
        return LATER_SHARE * self._budget_bytes - OTHERS_GROWTH * self._others_bytes

    def _make_room(self, wanted: _WeightGroup | None, ahead: list[int]) -> bool:
        """Have those give way that are needed later than a wanted one, or that are too many; whether there is room."""
        allowed = self._allowed_bytes() - (wanted.num_bytes if wanted else 0)
        if self._held_bytes <= allowed:
            return True
        turns = {index: turn for turn, index in reversed([*enumerate([self._current, *ahead])])}
        last = len(self._groups)
        needed = min((turns.get(i, last) for i, group in enumerate(self._groups) if group is wanted), default=LOOKAHEAD)
        for index in sorted(range(last), key=lambda index: -turns.get(index, last)):
            group = self._groups[index]
            if self._held_bytes <= allowed or turns.get(index, last) <= needed:
                break
            if group.tensors and not group.written():
                self._drop(group)
        return self._held_bytes <= allowed

    def _note_others(self) -> None:
        """Note the most that was in use beside weights since the last time."""
        if self._budget_bytes is not None:
            peak_bytes = self._backend.visit_peak_bytes()
            others_bytes = self._budget_bytes // 2 if peak_bytes is None else peak_bytes - self._held_bytes
            self._others_bytes = max(self._others_bytes, others_bytes)

    def _load(self, group: _WeightGroup) -> None:
        self._note_others()
        backend, weights = self._backend, group.weights
        group.memory.enter_context(backend.hold(group.num_bytes, "weights"))
        self._held_bytes += group.num_bytes
        backend.begin_visit()
        with uncounted(), torch.inference_mode(False), torch.no_grad():
            region = torch.empty(weights.num_bytes, dtype=torch.uint8, device=backend.device)
            backend.wait(Lane.WEIGHTS, backend.record(Lane.COMPUTE))  # which may be at work on what lay there before
            found, group.copies = weights.upload(backend, region, range(len(weights.slots)))
            group.uploaded = backend.record(Lane.WEIGHTS)
            group.tensors = [
                tensor if tensor is None else as_parameter(tensor, slot.current)
                for slot, tensor in zip(weights.slots, found.values(), strict=True)
            ]
        self.num_uploads += 1
        self._calm.clear()

    def _drop(self, group: _WeightGroup) -> None:
        if not group.tensors:
            return
        self._note_others()
        if group.uploaded is not None:  # nothing on COMPUTE may take the memory before
            self._backend.wait(Lane.COMPUTE, group.uploaded)
        group.tensors, group.copies, group.uploaded = [], [], None
        self._held_bytes -= group.num_bytes
        group.memory.close()
        self._backend.begin_visit()
        self._calm.clear()


def _is_written(slot: Slot, tensor: torch.Tensor) -> bool:
    return not slot.is_parameter and tensor._version > 0


def as_parameter(tensor: torch.Tensor, original: torch.Tensor | None) -> torch.Tensor:
    """A tensor on the device, as a parameter if the original is one."""
    if isinstance(tensor, nn.Parameter) or not isinstance(original, nn.Parameter):
        return tensor
    return nn.Parameter(tensor, requires_grad=original.requires_grad)


class _Entries(dict[str, Any]):
    """A module's parameters or buffers; those at ``places`` are held, and `_Table` lets them go."""

    def __init__(
        self, entries: Mapping[str, Any], places: dict[str, tuple[int, int]], weights: OnDemandWeights
    ) -> None:
        super().__init__(entries)
        self.places = places
        self._weights = weights
        self._held: dict[str, tuple[Any, Any]] = {}
        """By name, what is held and what stands for it."""

    def hold(self, tensors: Mapping[str, Any]) -> None:
        """Have these tensors as entries, until `let_go`."""
        self._held = {name: (tensor, self.get(name)) for name, tensor in tensors.items()}
        self.__class__ = _Entries
        self.update(tensors)

    def let_go(self) -> None:
        """Have none of the tensors of `hold`; what the code has put in their places stays."""
        for name, (tensor, stand_in) in self._held.items():
            if self.get(name) is tensor:
                self[name] = stand_in
            else:
                del self.places[name]
        self._held = {}
        self.__class__ = _Table


class _Table(_Entries):
    """Entries that come when they are read by name."""

    def __getitem__(self, name: str) -> Any:
        place = self.places.get(name)
        return super().__getitem__(name) if place is None else self._weights.read(*place)

    def __setitem__(self, name: str, value: Any) -> None:
        self.places.pop(name, None)
        super().__setitem__(name, value)


class AbsentWeight(torch.Tensor):
    """A tensor of a device with the form of a weight that is at home; an operator gets the weight itself."""

    _weights: OnDemandWeights
    _place: tuple[int, int]

    @classmethod
    def of(cls, tensor: torch.Tensor, device: torch.device, weights: OnDemandWeights, place: tuple[int, int]) -> Self:
        form = torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
        stand_in: Any = torch.Tensor._make_subclass(cls, form, tensor.requires_grad)
        stand_in._is_param = isinstance(tensor, nn.Parameter)
        stand_in._weights, stand_in._place = weights, place
        return cast(Self, stand_in)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _OF_FORM:
            args, kwargs = trees.map_tensors((args, kwargs), _weight_of)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _weight_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._weights.read(*tensor._place) if isinstance(tensor, AbsentWeight) else tensor


def _functions(names: str) -> Iterator[Any]:
    for name in names.split():
        attribute = getattr(torch.Tensor, name)
        yield attribute if callable(attribute) else attribute.__get__


_OF_FORM = frozenset(
    _functions(
        "device dtype shape layout ndim size dim numel nelement element_size nbytes requires_grad is_leaf grad is_meta "
        "is_cuda is_cpu is_quantized is_sparse is_floating_point is_complex __hash__ __len__ _backward_hooks _version"
    )
)
"""What asks a tensor for its form alone."""
