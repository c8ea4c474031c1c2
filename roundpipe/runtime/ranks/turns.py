"""What ranks do together, turn by turn, in a thread of its own.

The training thread makes the turns, so that their order is that of the program, the same on every rank. The thread
takes them one after the other. A turn waits until this rank has what it needs, and begins with a state of numbers from
every rank, by which each finds out whether all are at the same place.

    turn          made by               ready once                       gives
    `CallShare`   forward_backward      the losses have their weights    what this rank's gradients count for
                                        or their targets are counted     what all ranks' means count for
    `Exchange`    step, see there       all have added their gradients   averaged gradients in the copies
                  step, synchronize     no round reads the old weights   new weights of all shards in the model
    `Joining`     save_checkpoint       at once                          whole tensors of all shards, on rank 0

Invariant: a rank that fails closes its connection, or says so in its state; the others then raise a `RankError`.
"""

from __future__ import annotations

import logging
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from enum import IntEnum
from typing import Any, Self

import torch
from torch import nn

from roundpipe.core.errors import LossError, RankError, RoundPipeError, said
from roundpipe.runtime.ranks.group import ProcessGroupLike, RankGroup
from roundpipe.runtime.ranks.other_wrappers import refuse_parallelism_inside
from roundpipe.runtime.threads import Board, TaskThread
from roundpipe.runtime.weights.shard import Shard

logger = logging.getLogger(__name__)

CLOSE_S = 10.0
"""How long `Ranks.close` waits for a turn that other ranks have not come to."""


class Action(IntEnum):
    """What a turn is about."""

    CALL, STEP, READ, SAVE = range(4)


@dataclass(frozen=True, slots=True)
class RankState:
    """What a rank tells of itself when a turn begins."""

    action: int
    num_calls: int
    """Calls of ``forward_backward`` so far."""
    num_steps: int
    num_elements: int = 0
    """Of the parameters that are updated."""
    is_async: bool = False
    gives_weights: bool = False
    """Whether the loss does, from ``loss_fn`` or as a mean of the model's own over its targets; else samples count."""
    terms: int = 0
    """Stands for the names of the means that its loss adds up, if each counts by its own targets; else 0."""
    has_failed: bool = False
    weight: float = 0.0

    def __str__(self) -> str:
        if self.has_failed:
            return "has failed"
        call = f"call {self.num_calls} of forward_backward"
        if self.action == Action.CALL:
            weighs = f"weights of its loss{' and of the means in it' if self.terms else ''}"
            return f"runs {call}, {f'with {weighs}' if self.gives_weights else 'by samples'}"
        kind = "asynchronous " if self.is_async else ""
        what = {
            Action.STEP: f"makes {kind}update {self.num_steps} of {self.num_elements} elements",
            Action.READ: "reads the latest weights, whose shards are on all ranks,",
            Action.SAVE: f"saves {self.num_elements} elements of the optimizer's state",
        }[Action(self.action)]
        return f"{what} after {call}"

    @property
    def place(self) -> RankState:
        """What must be the same on all ranks."""
        return replace(self, weight=0.0)

    @property
    def numbers(self) -> list[float]:
        return [float(getattr(self, each.name)) for each in fields(self)]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> RankState:
        kinds: Any = (type(each.default) if each.default is not MISSING else int for each in fields(cls))
        return cls(*(kind(number) for kind, number in zip(kinds, numbers, strict=True)))


class Turn(ABC):
    """One thing that all ranks do at the same place of their programs."""

    def __init__(self, board: Board, state: RankState) -> None:
        self.board = board
        self.state = state
        self.is_ready = self.is_dropped = self.is_done = False
        """Whether it may begin; whether it never will; whether it is over. Changed under the board's lock."""
        self.error: BaseException | None = None

    @abstractmethod
    def talk(self, group: RankGroup, states: Sequence[RankState]) -> None:
        """Do it, in the ranks' thread."""

    def change(self, **values: Any) -> None:
        with self.board.lock:
            for name, value in values.items():
                setattr(self, name, value)
            self.board.notify()

    def fail(self, error: BaseException) -> None:
        """This rank can't do its part; the others are told."""
        if self.error is None:
            self.change(error=error)

    def wait(self) -> None:
        """Return when it is over; raises what went wrong."""
        self.board.wait(lambda: self.is_done, "a round or an update", "other ranks")
        if self.error is not None:
            raise self.error


class CallShare(Turn):
    """What a rank's gradients count for in a mean over the batches of all ranks, for one call.

    A context around the call, which fails if the call does.
    """

    def __init__(self, board: Board, state: RankState, num_samples: int | None, num_ranks: int) -> None:
        super().__init__(board, state)
        self.num_ranks = num_ranks
        self._num_samples = num_samples
        self._factor = 1.0
        self._counts: dict[str, float] = {}

    def tell(self, given: float | None) -> None:
        """The losses of this rank are known: the sum of their weights, or None if there are none."""
        if self.is_ready or self.error is not None:
            return
        weight = self._num_samples if given is None else given
        if weight is None:
            raise LossError(
                "loss_reduction='mean' with process_group=: how many samples this rank has is not known, since no "
                "tensor that is split tells; let loss_fn return (loss, weight)"
            )
        self.change(state=replace(self.state, gives_weights=given is not None, weight=weight), is_ready=True)

    def tell_terms(self, counts: Mapping[str, float]) -> None:
        """Before this rank's losses are known: what it counts for in each of the means that they add up."""
        names = zlib.crc32("\n".join(counts).encode()) or 1
        state = replace(self.state, gives_weights=True, terms=names)
        self.change(state=state, _counts=dict(counts), is_ready=True)

    def totals(self) -> Mapping[str, float]:
        """What all ranks together count for in each mean; waits for the other ranks."""
        self.wait()
        return self._counts

    def factor(self) -> float:
        """The average over ranks of gradients times this is the gradient of the mean; waits for the other ranks."""
        self.wait()
        return self._factor

    def talk(self, group: RankGroup, states: Sequence[RankState]) -> None:
        if self._counts:
            rows = group.gather(list(self._counts.values()))
            self._counts = dict(zip(self._counts, map(sum, zip(*rows, strict=True)), strict=True))
            return
        total = sum(state.weight for state in states)
        self._factor = self.state.weight * group.size / total if total else 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self.is_ready:
            self.fail(error or RoundPipeError("a call ended without losses"))


class Joining(Turn):
    """Tensors of which each rank has its shards, whole on rank 0."""

    def __init__(self, ranks: Ranks, parts: Sequence[torch.Tensor], lengths: Sequence[int]) -> None:
        """``lengths`` are the elements of the whole tensors."""
        super().__init__(ranks.board, RankState(Action.SAVE, ranks.num_calls, 0, sum(lengths)))
        self._shard = ranks.shard
        self._parts, self._lengths = parts, lengths
        self.is_ready = True
        self.whole: list[torch.Tensor] = []
        """On rank 0."""

    @torch.no_grad()
    def talk(self, group: RankGroup, states: Sequence[RankState]) -> None:
        assert self._shard is not None
        for part, length in zip(self._parts, self._lengths, strict=True):
            bounds = [self._shard.bounds(length, rank) for rank in range(group.size)]
            whole = torch.empty(length if group.rank == 0 else 0, dtype=part.dtype)
            group.send_to_first(whole, part.contiguous(), [each.stop - each.start for each in bounds])
            if group.rank == 0:
                self.whole.append(whole)


class Ranks:
    """The ranks of one model; with ``shards``, each has a part of the optimizer's side."""

    def __init__(
        self,
        process_group: ProcessGroupLike,
        model: nn.Module,
        name: str,
        options: Sequence[Any],
        board: Board,
        shards: bool = False,
    ) -> None:
        """Connect, check that all have the same model, and take over the weights of rank 0; on all ranks at once."""
        self._name = name
        self.board = board
        self._group = RankGroup(process_group, model, options)
        self.shard = Shard(self._group.rank, self._group.size) if shards else None
        self._thread = TaskThread(f"roundpipe ranks {name}", board=board)
        self._broken: RankError | None = None
        self._latest: Turn | None = None
        self.num_calls = 0

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes checkpoints."""
        return self._group.rank == 0

    def share(self, num_samples: int | None) -> CallShare:
        """The turn of a ``forward_backward`` whose loss is a mean; after `num_calls` was counted."""
        share = CallShare(self.board, RankState(Action.CALL, self.num_calls, 0), num_samples, self._group.size)
        self.submit(share)
        return share

    def submit(self, turn: Turn) -> None:
        """Take a turn after those before; in the training thread."""
        self._latest = turn
        self._thread.submit(self._take, turn)

    def join(self, parts: Sequence[torch.Tensor], lengths: Sequence[int]) -> list[torch.Tensor]:
        """The whole tensors, flat, of which each rank has a shard; on rank 0, on the others none."""
        joining = Joining(self, parts, lengths)
        self.submit(joining)
        joining.wait()
        return joining.whole

    def agree(self, value: float) -> list[float]:
        """The numbers that all ranks give inside ``step_fn``, if each has a part of what they are about."""
        if self.shard is None:
            return [value]
        try:
            return [number for (number,) in self._group.agree([value])]
        except BaseException as error:
            raise RankError(
                f"{self._name}: another rank has ended, hangs or raised in its step_fn, as this one clipped or "
                "unscaled gradients. Its own output says why. Start all ranks again, from the latest checkpoint"
            ) from error

    def update_failed(self) -> None:
        """``step_fn`` has raised: ranks that want this one to `agree` are told."""
        if self.shard is not None:
            self._group.close_second()

    def _take(self, turn: Turn) -> None:
        board = self.board
        board.wait(lambda: turn.is_ready or turn.is_dropped or turn.error is not None, "the ranks' thread", "this rank")
        try:
            if turn.is_dropped:
                return
            if self._broken is not None:
                raise self._broken
            self._talk(turn)
        except BaseException as error:
            if turn.error is None:
                turn.error = error
            self._group.close()
        finally:
            turn.change(is_done=True)

    def _talk(self, turn: Turn) -> None:
        """Raises a `RankError` if the ranks can't go on together, now and from then on."""
        group, failed = self._group, turn.error is not None
        own = replace(turn.state, has_failed=failed)
        try:
            states = [RankState.of(numbers) for numbers in group.gather(own.numbers)]
            if any(state.place != own.place for state in states):
                which = "; ".join(f"rank {rank} {state}" for rank, state in enumerate(states))
                raise RankError(
                    f"{self._name}: ranks are not at the same place: {which}. All must make the same calls in the same "
                    "order. What a rank that failed has raised is in its own output"
                )
            if failed:
                raise RankError(f"{self._name}: this rank and all others have failed")
            turn.talk(group, states)
        except BaseException as error:
            self._broken = error if isinstance(error, RankError) else self._lost(turn, error)
            raise self._broken from (None if error is self._broken else error)

    def _lost(self, turn: Turn, error: BaseException) -> RankError:
        reason, state = said(error).partition("\n")[0], turn.state
        if error is turn.error or isinstance(error, RoundPipeError):
            return RankError(f"{self._name}: this rank has failed ({reason}), and the others can't go on without it")
        return RankError(
            f"{self._name}: another rank has ended, failed or closed its model, or hangs for longer than the timeout "
            f"of the group, as rank {self._group.rank} of {self._group.size} {state} ({reason}). Its own output "
            "says why. Start all ranks again, from the latest checkpoint"
        )

    def close(self) -> None:
        """End the thread and the connection."""
        turn = self._latest
        if turn is not None and not self.board.wait(lambda: turn.is_done, "close()", "other ranks", CLOSE_S):
            logger.error("%s: closed while other ranks were waited for", self._name)
            return  # the thread is a daemon; the connection ends with the process
        self._thread.close()
        self._group.close()


def connected(
    process_group: ProcessGroupLike | None,
    model: nn.Module,
    name: str,
    options: Sequence[Any],
    board: Board,
    shards: bool,
) -> Ranks | None:
    """The ranks of a model; None: this process trains it alone, and nothing else averages its gradients either."""
    refuse_parallelism_inside(model)
    return None if process_group is None else Ranks(process_group, model, name, options, board, shards)
