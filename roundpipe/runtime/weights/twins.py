"""Trained weights that live on a device: each parameter has a twin there, on which layers run.

All trained weights of a model have twins, or those of some layers, each on the device of the one worker that runs the
layer (`roundpipe.runtime.weights.twin_group` has those of all workers).

    the user's parameter   on the host; behind its twin until somebody is about to read it
    its twin               on the device, with the model's gradient
    the optimizer's copy   on the device while there are twins, as are its gradient and the optimizer's states

Invariant: all that is done to twins and copies is given to the device's COMPUTE stream (`Twins.activate`), so that the
order in which threads give it is the order in which it is done. The host waits for it only where it reads; a caller's
own stream waits by events (`Twins.follow_caller`, `Twins.precede_caller`).
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import nn

from roundpipe.runtime.device.backend import Backend, Event, Lane
from roundpipe.runtime.weights.fingerprint import Fingerprint, any_marked
from roundpipe.runtime.weights.layer_weights import LayerWeights
from roundpipe.runtime.weights.slots import SlotSpan, aligned, places_of

PURPOSE = "weights that live here"
BESIDE = "the optimizer's copies and states"


@dataclass(slots=True, eq=False)
class Twin:
    """A parameter on the device."""

    weights: nn.Parameter
    """With the model's gradient."""
    of_host: torch.Tensor
    print: Fingerprint | None = None
    """Of the host's parameter when the two last agreed; None: nothing was uploaded yet."""
    is_ahead: bool = False
    """Whether it was written since, so that the host's parameter is behind."""
    checked_in: int = -1
    """The step in which a sample of the host's values was last compared."""

    @property
    def is_current(self) -> bool:
        """Whether the host's parameter has nothing newer, as far as marks tell."""
        return self.is_ahead or (self.print is not None and not self.print.is_marked)

    def agree(self, parameter: torch.Tensor) -> None:
        """The host's parameter has the twin's values now, or the other way round."""
        self.print, self.is_ahead = Fingerprint.of(parameter), False


@dataclass(slots=True)
class _Lent:
    """What a layer runs on, in the memory of twins; its gradients are those of one visit."""

    of_host: list[torch.Tensor]
    twins: list[Twin]
    on_device: list[nn.Parameter]
    places: tuple[object, ...]

    @classmethod
    def of(cls, of_host: list[torch.Tensor], twins: list[Twin]) -> Self:
        pairs = zip(of_host, twins, strict=True)
        on_device = [nn.Parameter(twin.weights.data, requires_grad=each.requires_grad) for each, twin in pairs]
        return cls(of_host, twins, on_device, places_of(on_device))

    def is_of(self, of_host: Sequence[torch.Tensor]) -> bool:
        is_same = len(of_host) == len(self.of_host) and all(map(operator.is_, self.of_host, of_host))
        return is_same and places_of(self.on_device) == self.places

    def written(self, step: int) -> list[tuple[torch.Tensor, Twin, nn.Parameter]]:
        """Those of which the host has something newer; a sample of values is compared once per step."""
        behind = [twin for twin in self.twins if not twin.is_ahead]
        if not behind:
            return []
        due = [twin for twin in behind if twin.checked_in != step]
        for twin in due:
            twin.checked_in = step
        others = {id(twin) for twin in due if twin.print is not None and twin.print.has_other_values}
        prints = [twin.print for twin in behind if twin.print is not None]
        if not others and len(prints) == len(behind) and not any_marked(prints):
            return []
        each = zip(self.of_host, self.twins, self.on_device, strict=True)
        return [one for one in each if id(one[1]) in others or not one[1].is_current]


class Twins:
    """The twins of one model on the device of one worker; there are none until `begin`."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._twins: dict[int, Twin] = {}
        """By the identity of the host's parameter, which they keep alive: to hash a tensor takes Python."""
        self._lent: dict[nn.Module, _Lent] = {}
        """By layer, what it runs on."""
        self._memory: torch.Tensor | None = None
        self._beside = contextlib.ExitStack()
        self._beside_bytes = 0
        self._followed: Event | None = None
        """After the copies that are on their way to the host."""
        self._is_following = False

    def __bool__(self) -> bool:
        return self._memory is not None

    def get(self, parameter: torch.Tensor) -> Twin | None:
        return self._twins.get(id(parameter))

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
            self._twins[id(each)] = Twin(nn.Parameter(SlotSpan.of(each, 0).view(memory.data, start)), each)
            start += aligned(each.nbytes)

    def forget(self, layer: nn.Module) -> None:
        """Drop what is known of a layer."""
        self._lent.pop(layer, None)

    def end(self) -> None:
        """Give the memory back."""
        memory, self._memory = self._memory, None
        self._twins.clear()
        self._lent.clear()
        self._beside.close()
        self._beside_bytes, self._followed = 0, None
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
        for parameter, twin, on_device in lent.written(step):
            if not copies:
                backend.wait(Lane.WEIGHTS, backend.record(Lane.COMPUTE))  # behind the visits that read it
            twin.agree(parameter)
            copies.append(backend.upload(parameter, on_device.detach(), Lane.WEIGHTS))
        return lent.on_device, copies

    def _lent_to(self, weights: LayerWeights, slots: tuple[int, ...]) -> _Lent:
        parameters = weights.tensors_at(slots)
        known = self._lent.get(weights.layer)
        if known is None or not known.is_of(parameters):
            known = self._lent[weights.layer] = _Lent.of(parameters, [self._twins[id(each)] for each in parameters])
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
