"""Hands over between the model and the optimizer: new weights in, gradients out, by groups of parameters.

While steps run, a group's weights are written after their last upload, and its gradients taken once all have been
added. Groups go in the order in which the steps are done with them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from roundpipe.runtime.profiling.recorder import HostLog
from roundpipe.runtime.weights.gate import Gates, ParameterUse
from roundpipe.runtime.weights.master_weights import ParameterPair, copy_in, groups_of, num_bytes, take_gradients


@dataclass(slots=True)
class _Group:
    """Parameters that are handed over at once, and what the steps that are running do with them."""

    pairs: list[ParameterPair]
    turn: tuple[int, int]
    jobs: list[tuple[ParameterUse, list[int], list[int]]]
    """Per step, the jobs that upload them and those that add to their gradients."""

    def wait_uploaded(self) -> None:
        """Return when they are on their devices; behind `are_uploads_begun`."""
        for step, uploads, _ in self.jobs:
            for event in step.uploads(uploads) or ():
                event.synchronize()

    def are_uploads_begun(self) -> bool:
        return all(step.uploads(uploads) is not None for step, uploads, _ in self.jobs)

    def is_uploaded(self) -> bool:
        events = [step.uploads(uploads) for step, uploads, _ in self.jobs]
        return all(each is not None and all(event.is_done() for event in each) for each in events)

    def is_added(self) -> bool:
        return all(step.has_added(adds) for step, _, adds in self.jobs)


class HandOver:
    """Hands over for one model; without gates no step runs meanwhile."""

    def __init__(self, gates: Gates | None, log: HostLog) -> None:
        self._gates = gates or Gates()
        self._log = log

    @torch.no_grad()
    def exchange(
        self,
        pairs: Sequence[ParameterPair],
        steps: Sequence[ParameterUse] = (),
        *,
        weights_changed: bool,
        only_behind: bool = False,
    ) -> None:
        """Latest weights into the model, gradients out of it; opens the gates of parameters as they are done.

        With ``only_behind`` only weights that differ are written, so that others keep their version.
        """
        groups = _groups(pairs, steps)
        to_write = deque(sorted(groups, key=lambda group: group.turn[0]))
        to_take = deque(sorted(groups, key=lambda group: group.turn[1]))
        try:
            while to_write or to_take:
                if to_write and to_write[0].is_uploaded():
                    group = to_write.popleft().pairs
                    if weights_changed:
                        self.write_weights([pair for pair in group if pair.is_behind] if only_behind else group)
                    self._gates.weights.open(pair.parameter for pair in group)
                elif to_take and to_take[0].is_added():
                    group = to_take.popleft().pairs
                    if not any(step.failed for step in steps):
                        with self._log.doing("hand-over", "gradients to the optimizer", bytes=num_bytes(group)):
                            take_gradients(group)
                    self._gates.gradients.open(pair.parameter for pair in group)
                else:
                    with self._log.doing("waits", "wait for uploads" if to_write else "wait for gradients"):
                        self._wait(to_write[0] if to_write else None, to_take[0] if to_take else None)
        finally:
            self._gates.open(pair.parameter for pair in pairs)

    def _wait(self, to_write: _Group | None, to_take: _Group | None) -> None:
        """Until gradients can be taken or, once all of its uploads have begun, weights can be written."""

        def can_go_on() -> bool:
            is_added = to_take is not None and to_take.is_added()
            return is_added or (to_write is not None and to_write.are_uploads_begun())

        self._gates.board.wait(can_go_on, "the optimizer's thread", "steps that use its parameters")
        if to_write is not None and (to_take is None or not to_take.is_added()):
            to_write.wait_uploaded()

    @torch.no_grad()
    def write_weights(self, pairs: Iterable[ParameterPair]) -> None:
        for _, group in groups_of(pairs):
            with self._log.doing("hand-over", "weights into the model", bytes=num_bytes(group)):
                copy_in(group)


def _groups(pairs: Iterable[ParameterPair], steps: Sequence[ParameterUse]) -> list[_Group]:
    def turns(pair: ParameterPair) -> tuple[int, int]:
        uploads, adds = zip((0, 0), *(step.turns(pair.parameter) for step in steps), strict=True)
        return max(uploads), max(adds)

    return [
        _Group(group, turn, [(step, *step.jobs_of([pair.parameter for pair in group])) for step in steps])
        for turn, group in groups_of(pairs, turns)
    ]
