"""Hands over between the model and the optimizer: new weights in, gradients out, by groups of parameters.

While steps run, a group's weights are written after their last upload, and its gradients taken once all have been
added. Of weights that may be written, those go first that the next step needs first; gradients go in the order in which
the steps are done with them. A group is what steps have in the same jobs, since a stage waits for all of its weights:
one call converts it, beside which other threads run Python; between calls this one has to wait for its turn. Weights
that were made ready behind the update before, in second memory, only change places. What lives on a device
(`roundpipe.runtime.weights.twins`) is one group per turn: its work is given to the device in a few launches, and
nothing waits until it is done.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from roundpipe.core.together import in_groups
from roundpipe.core.watched import unnoticed
from roundpipe.runtime.device.backend import Event
from roundpipe.runtime.profiling.host_log import HostLog
from roundpipe.runtime.ranks.exchange import Exchange
from roundpipe.runtime.weights.gate import Gates, ParameterUse
from roundpipe.runtime.weights.master_weights import written_beside_update
from roundpipe.runtime.weights.pairs import follow_twins, look, stage_all, take_gradients, write_all, write_twins
from roundpipe.runtime.weights.parameter_pair import ParameterPair
from roundpipe.runtime.weights.twin_group import TwinGroup

HAND_OVER_BYTES = 1024**3
"""Of copies in a group, at most, but for a parameter that has more: to convert them takes longer than a turn to run
Python, 5 ms, and other ranks get gradients before all are converted.
"""


@dataclass(slots=True)
class _Group:
    """Parameters that are handed over at once, and what the steps that are running do with them."""

    pairs: list[ParameterPair]
    turns: tuple[int, ...]
    """When the steps first read their weights, are done with them, and with their gradients."""
    jobs: list[tuple[ParameterUse, list[int], list[int]]]
    """Per step, the jobs that upload them and those that add to their gradients."""

    @property
    def is_there(self) -> bool:
        """Whether they live on a device."""
        return self.pairs[0].twin is not None

    def uploads(self) -> list[Event] | None:
        """The events after which they are on their devices, or not read any more; None: there are not all of them."""
        events: list[Event] = []
        if self.is_there:  # read where they are, to the end of each job
            return events if all(step.has_added(uploads) for step, uploads, _ in self.jobs) else None
        for step, uploads, _ in self.jobs:
            if (of_step := step.uploads(uploads)) is None:
                return None
            events += of_step
        return events

    def is_uploaded(self) -> bool:
        events = self.uploads()
        return events is not None and all(event.is_done() for event in events)

    def is_added(self) -> bool:
        return all(step.has_added(adds) for step, _, adds in self.jobs)


class HandOver:
    """Hands over for one model."""

    def __init__(self, gates: Gates, log: HostLog, twins: TwinGroup | None = None) -> None:
        self._gates = gates
        self._log = log
        self._twins = twins
        self._lost: list[str] = []
        """Parameters that somebody had written where an update's weights came."""

    def refuse_lost(self) -> None:
        """Raise a `ConfigError`, once, if weights that somebody had written were overwritten."""
        if self._lost:
            names, self._lost = self._lost, []
            raise written_beside_update(names)

    @torch.no_grad()
    def exchange(
        self,
        pairs: Sequence[ParameterPair],
        steps: Sequence[ParameterUse],
        weights_changed: bool,
        *,
        only_behind: bool = False,
        swaps: bool = False,
        late: bool = False,
        ranks: Exchange | None = None,
    ) -> None:
        """Latest weights into the model, gradients out of it; opens the gates of parameters as they are done.

        The exchange with other ``ranks`` is told of pairs whose gradients are taken, unless a step failed; if it moves
        weights, it writes them and opens their gates.

        With ``only_behind`` only weights that differ are written, so that others keep their version. Weights that
        `stage` has made ready change places if ``swaps``; else all parameters lie in their own memory then. With
        ``late``, an update follows, which may take gradients in the model's dtype. To `follow` is left to the caller.
        """
        if self._twins is not None:
            self._twins.wait_followed()
        groups = _groups_by_turn(pairs, steps)
        to_write = sorted(groups, key=lambda group: (not group.is_there, group.turns[0]))
        to_take = deque(sorted(groups, key=lambda group: group.turns[2]))
        if swaps:  # of an asynchronous step
            self._log.begun("begin")
        try:
            while to_write or to_take:
                ready = next((group for group in to_write if group.is_uploaded()), None)
                self._gates.writes(ready is not None and weights_changed and not ready.is_there)
                if ready is not None:
                    to_write.remove(ready)
                    self._release(ready.pairs, weights_changed, only_behind, swaps, ranks)
                elif to_take and to_take[0].is_added():
                    self._take(to_take.popleft().pairs, steps, late, ranks)
                else:
                    with self._log.doing("waits", "wait for uploads" if to_write else "wait for gradients"):
                        self._wait(to_write, to_take[0] if to_take else None)
        finally:
            self._gates.writes(False)

    def _release(
        self,
        group: Sequence[ParameterPair],
        weights_changed: bool,
        only_behind: bool,
        swaps: bool,
        ranks: Exchange | None,
    ) -> None:
        """Write new weights that nothing reads any more, and let the next steps have them."""
        if ranks is not None and ranks.moves_weights:
            ranks.released(group)
            return
        if weights_changed:
            self.write_weights([pair for pair in group if pair.is_behind] if only_behind else group, swaps)
        for pair in () if swaps else group:
            pair.go_home()
        self._gates.weights.open(pair.parameter for pair in group)

    def _take(
        self, group: Sequence[ParameterPair], steps: Sequence[ParameterUse], late: bool, ranks: Exchange | None
    ) -> None:
        """Take gradients that are whole, unless a step failed."""
        if not any(step.failed for step in steps):
            with self._log.doing("hand-over", "gradients to the optimizer", bytes=_model_bytes(group)):
                with contextlib.nullcontext() if group[0].twin is None else unnoticed():
                    take_gradients(group, late=late)
            if ranks is not None:
                ranks.complete(group)
        self._gates.gradients.open(pair.parameter for pair in group)

    def _wait(self, to_write: Sequence[_Group], to_take: _Group | None) -> None:
        """Until gradients can be taken or, once all uploads of some of these have begun, weights can be written."""

        def can_go_on() -> bool:
            is_added = to_take is not None and to_take.is_added()
            return is_added or any(group.uploads() is not None for group in to_write)

        self._gates.board.wait(can_go_on, "the optimizer's thread", "steps that use its parameters")
        if to_take is None or not to_take.is_added():
            begun = next((uploads for group in to_write if (uploads := group.uploads()) is not None), ())
            for event in begun:
                event.synchronize()

    @torch.no_grad()
    def write_weights(self, pairs: Iterable[ParameterPair], swaps: bool = False) -> None:
        """The latest ones into the model, or the twins; to `follow` is left to the caller."""
        for group in _groups(pairs):
            with self._log.doing("hand-over", "weights into the model", bytes=_model_bytes(group)):
                if group[0].twin is not None:
                    with unnoticed():
                        write_twins(group, with_samples=self._twins is None or not self._twins.is_unasked)
                    continue
                if swaps:
                    self._note_lost(group)
                unstaged: list[ParameterPair] = []
                for pair in group:
                    if swaps and pair.is_staged:
                        pair.swap_weights()
                    else:
                        unstaged.append(pair)
                write_all(unstaged)

    def _note_lost(self, group: Sequence[ParameterPair]) -> None:
        """Of an asynchronous step: what was written since it was asked for."""
        look(group)
        for pair in group:
            if pair.is_written:
                pair.is_written = False
                self._lost.append(pair.names[0])

    def follow(self, pairs: Sequence[ParameterPair]) -> None:
        """Where nobody has asked for twins, let the host's parameters follow those that were written.

        No step waits for that, so it may come once the next one has what it waits for.
        """
        if self._twins is not None and self._twins.is_unasked:
            with unnoticed():
                follow_twins(pairs, self._twins)

    @torch.no_grad()
    def stage(self, pairs: Iterable[ParameterPair]) -> None:
        """Convert weights that an update has made, for those that have memory for it beside the model's."""
        for group in _groups(pair for pair in pairs if pair.banks is not None):
            with self._log.doing("hand-over", "weights made ready", bytes=_model_bytes(group)):
                stage_all(group)


def _model_bytes(group: Iterable[ParameterPair]) -> int:
    return sum(pair.parameter.nbytes for pair in group)


def _groups(pairs: Iterable[ParameterPair]) -> Iterator[list[ParameterPair]]:
    """The pairs in order, in groups of about `HAND_OVER_BYTES` of copies; first those on a device, all in one."""
    pairs = list(pairs)
    if there := [pair for pair in pairs if pair.twin is not None]:
        yield there
    streamed = (pair for pair in pairs if pair.twin is None)
    yield from in_groups(streamed, lambda pair: 0 if pair.copy is None else pair.copy.nbytes, HAND_OVER_BYTES)


def _groups_by_turn(pairs: Iterable[ParameterPair], steps: Sequence[ParameterUse]) -> list[_Group]:
    alike_in_steps: defaultdict[tuple[tuple[int, int, int], ...], list[ParameterPair]] = defaultdict(list)
    for pair in pairs:
        alike_in_steps[tuple([step.turns(pair.parameter) for step in steps])].append(pair)
    by_turn: defaultdict[tuple[int, ...], list[ParameterPair]] = defaultdict(list)
    for of_steps, group in alike_in_steps.items():
        by_turn[tuple(map(max, zip((0, 0, 0), *of_steps, strict=True)))] += group
    return [
        _Group(group, turns, [(step, *step.jobs_of([pair.parameter for pair in group])) for step in steps])
        for turns, alike in by_turn.items()
        for group in _groups(alike)
    ]
