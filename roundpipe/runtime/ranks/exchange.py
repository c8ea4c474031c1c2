"""One exchange with the other ranks: new weights into the model, gradients out of it, bucket by bucket.

A bucket's gradients travel once this rank has all of them; with a sharded optimizer, its new weights do once no round
that runs reads the old ones any more.

Invariant: afterwards weights, and gradients of whole copies, are the same on all ranks, bit for bit. So are the norms,
the infinities and the updates that are made of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from roundpipe.core.errors import RankError
from roundpipe.runtime.profiling.host_log import HostLog
from roundpipe.runtime.ranks import buckets
from roundpipe.runtime.ranks.group import RankGroup
from roundpipe.runtime.ranks.turns import Action, Ranks, RankState, Turn
from roundpipe.runtime.weights.gate import Gates
from roundpipe.runtime.weights.parameter_pair import ParameterPair


def begin_exchange(
    ranks: Ranks | None,
    pairs: Sequence[ParameterPair],
    gates: Gates,
    weights_changed: bool,
    log: HostLog,
    num_steps: int = 0,
    is_async: bool = False,
) -> Exchange | None:
    """The exchange of update ``num_steps``, or of ``weights_changed`` alone if that is 0, as the next turn.

    None: there are no ranks, or nothing to exchange. In the training thread.
    """
    moves_weights = weights_changed and ranks is not None and ranks.shard is not None
    if ranks is None or not (num_steps or moves_weights):
        return None
    exchange = Exchange(ranks, pairs, gates, log, num_steps, is_async, moves_weights)
    ranks.submit(exchange)
    return exchange


class Exchange(Turn):
    """Whoever hands over between model and copies tells of pairs that are `released` and of those that are `complete`.

    Where it `moves_weights`, it opens the gates of parameters that have them.
    """

    def __init__(
        self,
        ranks: Ranks,
        pairs: Sequence[ParameterPair],
        gates: Gates,
        log: HostLog,
        num_steps: int,
        is_async: bool,
        moves_weights: bool,
    ) -> None:
        num_elements = sum(pair.parameter.numel() for pair in pairs)
        action = Action.STEP if num_steps else Action.READ
        super().__init__(ranks.board, RankState(action, ranks.num_calls, num_steps, num_elements, is_async))
        self._shard = ranks.shard
        self._gates = gates
        self._log = log
        self.moves_weights = moves_weights
        self._buckets = list(buckets.buckets_of(pairs))
        self._bucket_of = {pair: index for index, bucket in enumerate(self._buckets) for pair in bucket}
        of_pairs = Counter(self._bucket_of.values())
        self._read = Counter(of_pairs if self.moves_weights else ())
        """By bucket, the pairs whose weights a round still reads."""
        self._missing = Counter(of_pairs if num_steps else ())
        """By bucket, the pairs whose gradients are not whole."""
        self.is_ready = not self._buckets

    def released(self, pairs: Iterable[ParameterPair]) -> None:
        """No round reads the weights of these any more."""
        self._count_down(self._read, pairs)

    def complete(self, pairs: Iterable[ParameterPair]) -> None:
        """All gradients of these that this rank has are taken."""
        self._count_down(self._missing, pairs)

    def _count_down(self, counts: Counter[int], pairs: Iterable[ParameterPair]) -> None:
        with self.board.lock:
            counts.subtract(self._bucket_of[pair] for pair in pairs)
            self.is_ready = self.is_ready or not (self._read if self.moves_weights else self._missing)[0]
            self.board.notify()

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """All that comes has come; waits until it has travelled."""
        if error is not None or (self.state.num_steps and any(self._missing.values())):
            self.fail(error or RankError("a round of this rank failed, so that it has no gradients"))
        else:
            self.wait()

    @torch.no_grad()
    def talk(self, group: RankGroup, states: Sequence[RankState]) -> None:
        space = buckets.Workspace()
        for index, bucket in enumerate(self._buckets):
            num_bytes = sum(pair.parameter.nbytes for pair in bucket)
            if self.moves_weights and self._shard is not None:
                self._wait_for(self._read, index, "rounds of this rank")
                with self._log.doing("other ranks", "wait for other ranks"):
                    group.meet()
                with self._log.doing("averaging", "weights of all shards", bytes=num_bytes):
                    buckets.gather(bucket, group, self._shard, space)
                self._gates.weights.open(pair.parameter for pair in bucket)
            if not self.state.num_steps:
                continue
            self._wait_for(self._missing, index, "gradients of this rank")
            with self._log.doing("other ranks", "wait for other ranks"):
                present = buckets.present(bucket, group, self._shard)
            with self._log.doing("averaging", "gradients averaged", bytes=num_bytes):
                if self._shard is None:
                    buckets.average(present, group, space)
                else:
                    buckets.scatter(present, group, self._shard, space)

    def _wait_for(self, counts: Counter[int], index: int, what: str) -> None:
        self.board.wait(lambda: not counts[index] or self.error is not None, "the ranks' thread", what)
        if self.error is not None:
            raise self.error
