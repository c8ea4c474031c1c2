"""Weights that come up when code reads them: for Python that runs on a device as it is, not by a schedule.

A ``generate`` decides token by token what runs next, so nobody can say beforehand which weights it needs. Here the
tables in which a replica's modules hold their parameters bring them:

    module.weight -> `WeightTable` -> `OnDemandWeights.read` -> tensors of the group that the parameter is in
                                       `- another group than before: those that came next the last time are uploaded
                                          beside the computation, and those that are needed last give way

Groups stay as long as there is room. Their share of the device is small in the first pass, which has the whole prompt;
then it is the budget less the most that was in use beside them: ever, or, where it is known that no other prompt
follows, of late. Once nothing comes or goes any more, the tables hold the tensors themselves, so that a read is a
dict's: all tables without a budget, else all but one, whose reads see to it that there still is room.

Between two uses (`rest`, `begin`) the groups that the first pass of the next has room for stay, and are taken as long
as the host has not changed since.

Invariant: the memory of weights goes with the last reference to them, so none that code still holds is overwritten.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from roundpipe.core.allocations import uncounted
from roundpipe.core.storages import bytes_of, is_plain
from roundpipe.runtime.device.backend import Backend, Event, Lane
from roundpipe.runtime.weights.layer_weights import LayerWeights
from roundpipe.runtime.weights.residents import ResidentPart
from roundpipe.runtime.weights.slots import Slot
from roundpipe.runtime.weights.weight_tables import AbsentWeight, WeightTable

LOOKAHEAD = 2
"""Groups that are brought before they are read."""
FIRST_SHARE = 0.25
"""What weights have of the budget in the first pass."""
LATER_SHARE, OTHERS_GROWTH = 0.95, 1.25
"""What is shared later; how much more than the most so far the code's own tensors may take until that is seen."""
PASSES, LEAST_OTHERS = 4, 0.25
"""Passes that tell what the code's own tensors take of late; the least that is left to them, of the most ever."""


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
    may_rest: bool
    """Whether they may stay between two uses."""
    part: ResidentPart | None = None
    """What is on the device; None while they are at home."""
    uploaded: Event | None = None
    """The upload, until COMPUTE waits for it."""
    copies: list[torch.Tensor] = field(default_factory=list)
    """What it makes, until then."""
    memory: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def tensors(self) -> list[torch.Tensor | None]:
        """On the device, by slot; none while they are at home."""
        return [] if self.part is None else self.part.tensors

    def is_current(self, use: int) -> bool:
        """Whether the host's tensors are those that were uploaded, and neither has been written since."""
        part, slots = self.part, self.weights.slots
        return (
            part is not None
            and part.is_of(self.weights, range(len(slots)))
            and part.is_current(use)
            and not part.is_written
            and all(tensor is None or _requires(tensor) == _requires(slot.current) for slot, tensor in self._pairs())
        )

    def _pairs(self) -> Iterator[tuple[Slot, torch.Tensor | None]]:
        return zip(self.weights.slots, self.tensors, strict=bool(self.tensors))

    def written(self) -> list[tuple[Slot, torch.Tensor]]:
        """The buffers that the code has written; they would be lost with the group."""
        return [(slot, tensor) for slot, tensor in self._pairs() if tensor is not None and _is_written(slot, tensor)]


class OnDemandWeights:
    """The weights of some layers on one device; used by one thread, under `Backend.activate`, from `begin` to `close`.

    ``budget_bytes`` is what there is for a first use; `begin` says what there is for each.
    """

    def __init__(self, backend: Backend, layers: Sequence[LayerWeights], budget_bytes: int | None) -> None:
        self._backend = backend
        self._groups: list[_WeightGroup] = []
        rest_bytes = 0
        for weights in layers:
            rest_bytes += weights.device_bytes
            has_room = budget_bytes is None or rest_bytes <= FIRST_SHARE * budget_bytes
            may_rest = has_room and not weights.has_loose
            self._groups.append(_WeightGroup(weights, weights.device_bytes, may_rest))
        self._places: dict[int, tuple[int, int]] = {}
        """By the identity of the tensor at home, its group and its slot."""
        self._held_bytes = self._num_uses = 0
        self._following: dict[tuple[int, int], int] = {}
        """By a group and the one before it, the one that came behind them the last time."""
        self._ahead = deque[int]()
        """The groups to be read next, as they were the last time; at first, as they are in the model."""
        self._tables: list[WeightTable] = []
        self._calm: list[int] = []
        """The groups read since one came or went."""
        self._held: set[int] = set()
        """Groups whose tensors the tables hold."""
        self.num_uploads = 0

    def begin(self, budget_bytes: int | None, is_one_prompt: bool) -> None:
        """Another use begins: what the host has written meanwhile goes, and nothing is known of the code's tensors.

        ``is_one_prompt`` is whether the passes after the first are known to take less than it does.
        """
        self._budget_bytes = budget_bytes
        self._least_others = LEAST_OTHERS if is_one_prompt else 1.0
        self._most_others_bytes = 0
        self._is_noted = True
        """Whether `_note_others` was called since `_watch_others`; weights may come and go only between the two."""
        self._recent_others_bytes = deque([0], maxlen=PASSES)
        """What was in use beside weights in the last passes."""
        self._current = self._before = -1
        self._ahead.clear()
        self._first: int | None = -1
        """The group that was read first, or -1; None once the first pass is over."""
        self._num_entered = 0
        self._countdown = len(self._groups)
        self._num_uses += 1
        self._places.clear()
        for index, group in enumerate(self._groups):
            if group.part is not None and not group.is_current(self._num_uses):
                self._drop(group)
            for position, slot in enumerate(group.weights.slots):
                self._places.setdefault(id(slot.tensor), (index, position))
        self._watch_others()

    def rest(self) -> None:
        """The use is over: keep what the first pass of another has room for."""
        self.let_go()
        self._tables.clear()
        for group in self._groups:
            if not group.may_rest or group.written() or group.uploaded is not None:
                self._drop(group)

    @property
    def held_bytes(self) -> int:
        """Of weights that are on the device."""
        return self._held_bytes

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
        self._tables.append(WeightTable(entries, places, self))
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
        self._tables.clear()
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
        self._watch_others()
        return self._held_bytes <= self._allowed_bytes()

    def _enter(self, index: int) -> None:
        """The code reads another group than before."""
        self._following[self._before, self._current] = index
        self._before, self._current = self._current, index
        self._num_entered += 1
        if self._first == -1:
            self._first = index
        elif index == self._first or self._num_entered > 2 * len(self._groups):  # an encoder is read in no other pass
            self._first = None
        group = self._groups[index]
        self._calm.append(index)
        self._countdown -= 1
        if group.part is None or self._countdown <= 0:
            self._countdown = len(self._groups)
            self._note_others()
        if self._num_entered % len(self._groups) == 0:
            self._recent_others_bytes.append(0)
        self._look_ahead()
        for following in dict.fromkeys([index, *itertools.islice(self._ahead, LOOKAHEAD)]):
            if self._groups[following].part is None and (self._make_room(following) or following == index):
                self._load(self._groups[following])
        self._make_room()
        self._watch_others()
        if group.uploaded is not None:
            self._backend.wait(Lane.COMPUTE, group.uploaded)
            self._backend.check_ready(group.copies)
            group.uploaded, group.copies = None, []

    def _look_ahead(self) -> None:
        """Have `_ahead` begin with what comes behind the present group."""
        ahead = self._ahead
        if not ahead or ahead.popleft() != self._current:
            ahead.clear()
        before, current = [self._before, self._current, *ahead][-2:]
        while len(ahead) < len(self._groups):
            before, current = current, self._following.get((before, current), current + 1)
            if current == len(self._groups):
                break
            ahead.append(current)

    def _allowed_bytes(self) -> float:
        """Of weights."""
        if self._budget_bytes is None:
            return float("inf")
        if self._first is not None:
            return FIRST_SHARE * self._budget_bytes
        others_bytes = max(*self._recent_others_bytes, self._least_others * self._most_others_bytes)
        return LATER_SHARE * self._budget_bytes - OTHERS_GROWTH * others_bytes

    def _make_room(self, wanted: int | None = None) -> bool:
        """Have those give way that are needed later than a wanted one, or that are too many; whether there is room."""
        allowed = self._allowed_bytes() - (0 if wanted is None else self._groups[wanted].num_bytes)
        if self._held_bytes <= allowed:
            return True
        last = len(self._groups)
        turns = dict.fromkeys(range(last), last)
        turns |= {index: turn for turn, index in reversed([*enumerate([self._current, *self._ahead])])}
        needed = LOOKAHEAD if wanted is None else turns[wanted]
        held = [index for index, group in enumerate(self._groups) if group.part is not None]
        for index in sorted(held, key=turns.__getitem__, reverse=True):
            if self._held_bytes <= allowed or turns[index] <= needed:
                break
            if not self._groups[index].written():
                self._drop(self._groups[index])
        return self._held_bytes <= allowed

    def _note_others(self) -> None:
        """Note the most that was in use beside weights since `_watch_others`, before any come or go."""
        if self._budget_bytes is not None and not self._is_noted:
            self._is_noted = True
            peak_bytes = self._backend.visit_peak_bytes()
            others_bytes = self._budget_bytes // 2 if peak_bytes is None else peak_bytes - self._held_bytes
            self._most_others_bytes = max(self._most_others_bytes, others_bytes)
            self._recent_others_bytes[-1] = max(self._recent_others_bytes[-1], others_bytes)

    def _watch_others(self) -> None:
        """No more weights come or go until `_note_others`; once for all, since an accelerator takes long to tell."""
        if self._is_noted:
            self._is_noted = False
            self._backend.begin_visit()

    def _load(self, group: _WeightGroup) -> None:
        self._note_others()
        backend, weights = self._backend, group.weights
        group.memory.enter_context(backend.hold(group.num_bytes, "weights"))
        self._held_bytes += group.num_bytes
        with uncounted(), torch.inference_mode(False), torch.no_grad():
            region = torch.empty(weights.num_bytes, dtype=torch.uint8, device=backend.device)
            backend.wait(Lane.WEIGHTS, backend.record(Lane.COMPUTE))  # which may be at work on what lay there before
            part, group.copies = ResidentPart.upload(
                backend, weights, range(len(weights.slots)), region, self._num_uses, with_samples=group.may_rest
            )
            group.uploaded = backend.record(Lane.WEIGHTS)
            part.replace_tensors(
                [
                    tensor if tensor is None else as_parameter(tensor, slot.current)
                    for slot, tensor in zip(weights.slots, part.tensors, strict=True)
                ]
            )
            group.part = part
        self.num_uploads += 1
        self._calm.clear()

    def _drop(self, group: _WeightGroup) -> None:
        if group.part is None:
            return
        self._note_others()
        if group.uploaded is not None:  # nothing on COMPUTE may take the memory before
            self._backend.wait(Lane.COMPUTE, group.uploaded)
        group.part, group.copies, group.uploaded = None, [], None
        self._held_bytes -= group.num_bytes
        group.memory.close()
        self._calm.clear()


def as_parameter(tensor: torch.Tensor, original: torch.Tensor | None) -> torch.Tensor:
    """A tensor on the device, as a parameter if the original is one."""
    if isinstance(tensor, nn.Parameter) or not isinstance(original, nn.Parameter):
        return tensor
    return nn.Parameter(tensor, requires_grad=original.requires_grad)


def _requires(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def _is_written(slot: Slot, tensor: torch.Tensor) -> bool:
    return not slot.is_parameter and tensor._version > 0
