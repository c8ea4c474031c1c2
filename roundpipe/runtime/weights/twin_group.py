"""The twins of a model on all its workers' devices, as its optimizer's side sees them.

Each parameter has one twin at most, on the device of the worker that runs its layers.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from roundpipe.core.contexts import contextmanager
from roundpipe.core.storages import is_plain
from roundpipe.runtime.device.backend import Backend, Event, Lane, Move
from roundpipe.runtime.weights.twins import Twin, Twins


def _follow(backend: Backend, leader: Backend) -> None:
    backend.wait(Lane.COMPUTE, leader.record(Lane.COMPUTE))


class Tenants(NamedTuple):
    """What is to live on one worker's device."""

    parameters: Sequence[torch.Tensor]
    beside_bytes: int
    """Of the optimizer's side."""


class TwinGroup:
    """There are no twins until `begin`.

    Args:
        of_workers: per worker, those on its device.
    """

    def __init__(self, of_workers: Sequence[Twins]) -> None:
        self.of_workers = tuple(of_workers)
        self.is_unasked = False
        """Whether nobody has asked for twins, so that the host's parameters follow them."""
        self.homes: Mapping[int, int] = {}
        """By the identity of a parameter that has a twin, whose device it is on."""
        self._there: tuple[Twins, ...] = ()
        """Of workers that have some."""

    def __bool__(self) -> bool:
        return bool(self._there)

    def get(self, parameter: torch.Tensor) -> Twin | None:
        worker = self.homes.get(id(parameter))
        return None if worker is None else self.of_workers[worker].get(parameter)

    def are_of(self, parameters: Sequence[torch.Tensor], homes: Mapping[int, int]) -> bool:
        """Whether of these parameters those have twins that are trained now and have ``homes``, and there."""
        trained = {id(each) for each in parameters if each.requires_grad}
        ids = set(map(id, parameters))
        return {key: self.homes[key] for key in self.homes.keys() & ids} == {
            key: homes[key] for key in homes.keys() & trained
        }

    @staticmethod
    def suit(parameters: Iterable[torch.Tensor]) -> bool:
        """Whether these parameters can have twins."""
        return all(is_plain(each) and each.layout is torch.strided and not each.is_inference() for each in parameters)

    @property
    def devices(self) -> frozenset[torch.device]:
        """Where there are some."""
        return frozenset(twins.backend.device for twins in self._there)

    @property
    def share_devices(self) -> bool:
        """Whether a device has those of several workers."""
        return len(self.devices) < len(self._there)

    @property
    def are_on_host(self) -> bool:
        """Whether the devices are CPU workers."""
        return all(twins.backend.device.type == "cpu" for twins in self.of_workers)

    @property
    def are_apart(self) -> bool:
        """Whether there are twins, on devices that run beside the host's threads."""
        return any(twins.are_apart for twins in self._there)

    def begin(self, tenants: Mapping[int, Tenants]) -> None:
        """Make room on the devices of workers, for each of which something is to live there; see `Twins.begin`."""
        try:
            for worker, (parameters, beside_bytes) in tenants.items():
                self.of_workers[worker].begin(parameters, beside_bytes)
        except BaseException:
            for worker in tenants:
                self.of_workers[worker].end()
            raise
        self.homes = {id(each): worker for worker, (parameters, _) in tenants.items() for each in parameters}
        self._there = tuple(self.of_workers[worker] for worker in tenants)

    def end(self) -> None:
        """Give the memory back."""
        for twins in self._there:
            twins.end()
        self.homes, self._there, self.is_unasked = {}, (), False

    def activate(self) -> AbstractContextManager[object]:
        """A context for work on twins and copies; nothing without twins."""
        if len(self._there) <= 1:
            return self._there[0].activate() if self._there else contextlib.nullcontext()
        return self._activate_all()

    @contextmanager
    def _activate_all(self) -> Iterator[None]:
        """Of workers that have one device, one gets all the work: behind that of the others, and before it."""
        with contextlib.ExitStack() as stack:
            leaders: dict[torch.device, Backend] = {}
            for backend in (twins.backend for twins in self._there):
                leader = leaders.setdefault(backend.device, backend)
                if leader is backend:
                    stack.enter_context(backend.activate())
                else:
                    leader.wait(Lane.COMPUTE, backend.record(Lane.COMPUTE))
                    stack.callback(_follow, backend, leader)
            yield

    @contextmanager
    def moving(self) -> Iterator[Move]:
        """A context with a function that moves tensors to a device, or home; at its end they have arrived."""
        with contextlib.ExitStack() as stack:
            moves = {twins.backend.device: stack.enter_context(twins.backend.moving()) for twins in self._there}

            def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
                here = device if device in moves else tensor.device
                return moves[here](tensor, device) if here in moves else tensor.to(device)

            yield move

    def record(self) -> Sequence[Event]:
        """The events after what was given to the devices so far; none without twins, and on the CPU: it is done."""
        return [event for twins in self._there if (event := twins.record()) is not None]

    def follow(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy twins to parameters of the host, pairs of these, behind what was given so far; nothing waits."""
        of_workers: defaultdict[int, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
        for twin, parameter in copies:
            of_workers[self.homes[id(parameter)]].append((twin, parameter))
        for worker, pairs in of_workers.items():
            self.of_workers[worker].follow(pairs)

    def wait_followed(self) -> None:
        """Let what is given to the devices from now on run when the host's parameters have followed."""
        for twins in self._there:
            twins.wait_followed()

    def finish_following(self) -> bool:
        """Return when the host's parameters have followed, and whether they had to."""
        return sum(twins.finish_following() for twins in self._there) > 0  # each is waited for

    def follow_caller(self) -> None:
        """Let what is given to the devices from now on run behind what the calling thread's own streams have."""
        for twins in self._there:
            twins.follow_caller()

    def precede_caller(self) -> None:
        """Let what the calling thread gives to its own streams from now on run behind all that was given so far."""
        for twins in self._there:
            twins.precede_caller()
