"""Trained weights that live on one device: each parameter has a twin there, on which layers run.

All trained weights of a model have twins, or those of some layers.

    the user's parameter   on the host; behind its twin until somebody is about to read it
    its twin               on the device, with the model's gradient
    the optimizer's copy   on the device while there are twins, as are its gradient and the optimizer's states

Invariant: all that is done to twins and copies is given to the device's COMPUTE stream (`Twins.activate`), so that the
order in which threads give it is the order in which it is done. The host waits for it only where it reads; a caller's
own stream waits by events (`Twins.follow_caller`, `Twins.precede_caller`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import nn

from roundpipe.core.storages import is_plain
from roundpipe.runtime.device.backend import Backend, Event, Lane
from roundpipe.runtime.weights.fingerprint import Fingerprint
from roundpipe.runtime.weights.layer_weights import LayerWeights
from roundpipe.runtime.weights.slots import SlotSpan, aligned, place_of

PURPOSE = "weights that live here"
BESIDE = "the optimizer's copies and states"


@dataclass(slots=True, eq=False)
class Twin:
    """A parameter on the device."""

    weights: nn.Parameter
    """With the model's gradient."""
    print: Fingerprint | None = None
    """Of the host's parameter when the two last agreed; None: nothing was uploaded yet."""
    is_ahead: bool = False
    """Whether it was written since, so that the host's parameter is behind."""
    checked_in: int = -1
    """The step in which a sample of the host's values was last compared."""

    def is_current(self, step: int) -> bool:
        """Whether the host's parameter has nothing newer; a sample of its values is compared once per step."""
        if self.is_ahead:
            return True
        if self.print is None or self.print.is_marked:
            return False
        is_due, self.checked_in = self.checked_in != step, step
        return not (is_due and self.print.has_other_values)

    def agree(self, parameter: torch.Tensor) -> None:
        """The host's parameter has the twin's values now, or the other way round."""
        self.print, self.is_ahead = Fingerprint.of(parameter), False


class _Lent(NamedTuple):
    """A parameter that a layer runs on, in the memory of a twin; its gradient is that of one visit."""

    of_host: torch.Tensor
    twin: Twin
    on_device: nn.Parameter
    place: tuple[object, ...]

    @classmethod
    def of(cls, parameter: torch.Tensor, twin: Twin) -> Self:
        on_device = nn.Parameter(twin.weights.data, requires_grad=parameter.requires_grad)
        return cls(parameter, twin, on_device, place_of(on_device))

    def is_of(self, parameter: torch.Tensor) -> bool:
        return self.of_host is parameter and place_of(self.on_device) == self.place


class Twins:
    """The twins of one model, on the device of one worker; there are none until `begin`."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._twins: dict[torch.Tensor, Twin] = {}
        self._lent: dict[nn.Module, list[_Lent]] = {}
        """By layer, what it runs on."""
        self.ids: frozenset[int] = frozenset()
        """Identities of the parameters that have twins, which these keep alive."""
        self._memory: torch.Tensor | None = None
        self._beside = contextlib.ExitStack()
        self._beside_bytes = 0
        self.is_unasked = False
        """Whether nobody has asked for twins, so that the host's parameters follow them."""
        self._followed: Event | None = None
        """After the copies that are on their way to the host."""
        self._is_following = False

    def __bool__(self) -> bool:
        return self._memory is not None

    def get(self, parameter: torch.Tensor) -> Twin | None:
        return self._twins.get(parameter)

    def are_of(self, parameters: Sequence[torch.Tensor], staying: Collection[int]) -> bool:
        """Whether of these parameters those have twins that are trained now and ``staying``, by their identities."""
        trained = {id(each) for each in parameters if each.requires_grad}
        return self.ids.intersection(map(id, parameters)) == trained.intersection(staying)

    @staticmethod
    def suit(parameters: Iterable[torch.Tensor]) -> bool:
        """Whether these parameters can have twins."""
        return all(is_plain(each) and each.layout is torch.strided and not each.is_inference() for each in parameters)

    @property
    def num_bytes(self) -> int:
        """What it takes of the device, the optimizer's side included."""
        return self.weights_bytes + self._beside_bytes

    @property
    def weights_bytes(self) -> int:
        return 0 if self._memory is None else self._memory.numel()

    @property
    def gradient_bytes(self) -> int:
        """Of the model's gradients that are there now, which come and go with rounds and updates."""
        gradients = (twin.weights.grad for twin in self._twins.values())
        return sum(gradient.nbytes for gradient in gradients if gradient is not None)

    @torch.inference_mode(False)
    def begin(self, parameters: Sequence[torch.Tensor], beside_bytes: int) -> None:
        """Make room for twins of these; they get their values when a visit asks for them.

        ``beside_bytes`` are counted for what the optimizer's side will take. What is raised leaves nothing behind.
        """
        backend = self.backend
        with backend.activate():  # for memory that is COMPUTE's
            memory = backend.allocate(sum(aligned(each.nbytes) for each in parameters), PURPOSE)
        try:
            self._beside.enter_context(backend.hold(beside_bytes, BESIDE))
        except BaseException:
            backend.free(memory, PURPOSE)
            raise
        self._memory, self._beside_bytes, start = memory, beside_bytes, 0
        for each in parameters:
            self._twins[each] = Twin(nn.Parameter(SlotSpan.of(each, 0).view(memory.data, start)))
            start += aligned(each.nbytes)
        self.ids = frozenset(map(id, parameters))

    def forget(self, layer: nn.Module) -> None:
        """Drop what is known of a layer."""
        self._lent.pop(layer, None)

    def end(self) -> None:
        """Give the memory back."""
        memory, self._memory = self._memory, None
        self._twins.clear()
        self._lent.clear()
        self.ids = frozenset()
        self._beside.close()
        self._beside_bytes, self.is_unasked, self._followed = 0, False, None
        if memory is not None:
            self.backend.free(memory, PURPOSE)

    def bring(
        self, weights: LayerWeights, slots: tuple[int, ...], step: int
    ) -> tuple[list[nn.Parameter], list[torch.Tensor]]:
        """What a layer runs on in a step, uploaded if the host has something newer, and the copies that were made.

        The same layer gets the same parameters as before.
        """
        lent, backend = self._lent_to(weights, slots), self.backend
        copies: list[torch.Tensor] = []
        for parameter, twin, on_device, _ in lent:
            if not twin.is_current(step):
                if not copies:
                    backend.wait(Lane.WEIGHTS, backend.record(Lane.COMPUTE))  # behind the visits that read it
                twin.agree(parameter)
                copies.append(backend.upload(parameter, on_device.detach(), Lane.WEIGHTS))
        return [each.on_device for each in lent], copies

    def _lent_to(self, weights: LayerWeights, slots: tuple[int, ...]) -> list[_Lent]:
        parameters = [weights.slots[index].tensor for index in slots]
        known = self._lent.get(weights.layer, [])
        if len(known) != len(parameters) or not all(map(_Lent.is_of, known, parameters)):
            known = self._lent[weights.layer] = [_Lent.of(each, self._twins[each]) for each in parameters]
        return known

    def activate(self) -> contextlib.AbstractContextManager[object]:
        """A context for work on twins and copies; nothing without twins."""
        return self.backend.activate() if self else contextlib.nullcontext()

    @property
    def are_apart(self) -> bool:
        """Whether there are twins, on a device that runs beside the host's threads."""
        return bool(self) and self.backend.device.type != "cpu"

    def record(self) -> Event | None:
        """The event after what was given to the device so far; None without twins, and on the CPU: it is done."""
        return self.backend.record(Lane.COMPUTE) if self.are_apart else None

    def follow(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy twins to parameters of the host, pairs of these, behind what was given so far; nothing waits."""
        backend = self.backend
        if (given := self.record()) is not None:
            backend.wait(Lane.GRADIENTS, given)
        backend.write_home(copies)
        self._is_following = True
        self._followed = None if given is None else backend.record(Lane.GRADIENTS)

    def wait_followed(self) -> None:
        """Let what is given to the device from now on run when the host's parameters have followed."""
        if self._followed is not None:
            self.backend.wait(Lane.COMPUTE, self._followed)

    def finish_following(self) -> bool:
        """Return when the host's parameters have followed, and whether they had to."""
        is_due, self._is_following = self._is_following, False
        if self._followed is not None:
            self._followed.synchronize()
        return is_due

    def follow_caller(self) -> None:
        """Let what is given to the device from now on run behind what the calling thread's own stream has."""
        if self:
            self.backend.follow_caller()

    def precede_caller(self) -> None:
        """Let what the calling thread gives to its own stream from now on run behind all that was given so far."""
        if self:
            self.backend.precede_caller()
