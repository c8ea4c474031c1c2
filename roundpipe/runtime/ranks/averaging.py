"""Averages the gradients of one update over the ranks, bucket by bucket, as they come home.

Buckets are of parameters in the reverse of the model's order, so that those come first whose backward ends first, and
the same on every rank, whatever its devices and its plan. A bucket travels once this rank has all of its gradients in
the copies. One whose gradient no rank has stays without; else ranks that have none count as zero.

Invariant: afterwards the copies' gradients are the same on all ranks, bit for bit. So are the norms, the infinities
and the updates that are made of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch

from roundpipe.core.errors import ConfigError, RankError
from roundpipe.runtime.ranks.group import RankGroup
from roundpipe.runtime.ranks.turns import Ranks, RankState, Turn
from roundpipe.runtime.weights.parameter_pair import ParameterPair

BUCKET_BYTES = 16 * 1024**2


class Averaging(Turn):
    """Of one update; whoever puts gradients into the copies tells which are `complete`."""

    def __init__(self, ranks: Ranks, pairs: Sequence[ParameterPair], num_steps: int, is_async: bool) -> None:
        num_elements = sum(pair.parameter.numel() for pair in pairs)
        super().__init__(ranks.board, RankState(True, ranks.num_calls, num_steps, num_elements, is_async))
        self._buckets = list(_buckets(pairs))
        self._bucket_of = {pair: index for index, bucket in enumerate(self._buckets) for pair in bucket}
        self._missing = Counter(self._bucket_of.values())
        self.is_ready = not self._buckets

    def complete(self, pairs: Iterable[ParameterPair]) -> None:
        """The copies of these have all the gradients of this rank."""
        with self.board.lock:
            self._missing.subtract(self._bucket_of[pair] for pair in pairs)
            self.is_ready = self.is_ready or not self._missing[0]
            self.board.notify()

    def __enter__(self) -> Averaging:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """All that comes has come; waits until it is averaged."""
        if error is not None or any(self._missing.values()):
            self.fail(error or RankError("a round of this rank failed, so that it has no gradients"))
        else:
            self.wait()

    @torch.no_grad()
    def talk(self, group: RankGroup, states: Sequence[RankState]) -> None:
        for index, bucket in enumerate(self._buckets):
            self._wait_for(index)
            _average(bucket, group)

    def _wait_for(self, index: int) -> None:
        self.board.wait(
            lambda: not self._missing[index] or self.error is not None, "the ranks' thread", "gradients of this rank"
        )
        if self.error is not None:
            raise self.error


def _buckets(pairs: Sequence[ParameterPair]) -> Iterator[list[ParameterPair]]:
    """Of one dtype each, and of about `BUCKET_BYTES`."""
    bucket: list[ParameterPair] = []
    num_bytes, dtype = 0, None
    for pair in reversed(pairs):
        assert pair.copy is not None
        if bucket and (num_bytes + pair.copy.nbytes > BUCKET_BYTES or pair.copy.dtype != dtype):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(pair)
        num_bytes, dtype = num_bytes + pair.copy.nbytes, pair.copy.dtype
    if bucket:
        yield bucket


def _average(bucket: Sequence[ParameterPair], group: RankGroup) -> None:
    """Let the copies' gradients be the mean of all ranks'."""
    copies = [pair.copy for pair in bucket if pair.copy is not None]
    for pair, copy in zip(bucket, copies, strict=True):
        if copy.grad is not None and copy.grad.layout is not torch.strided:
            raise ConfigError(
                f"{pair.names[0]}: its gradient is sparse, and ranks average dense ones only; make the embedding with "
                "sparse=False, or train without process_group="
            )
    holders = torch.tensor([copy.grad is not None for copy in copies], dtype=torch.int32)
    group.add_up(holders)
    present = [copy for copy, num_holders in zip(copies, holders.tolist(), strict=True) if num_holders]
    for copy in present:
        if copy.grad is None:
            copy.grad = torch.zeros_like(copy)
    gradients = [copy.grad for copy in present if copy.grad is not None]
    if len(gradients) == 1 and gradients[0].is_contiguous():
        group.add_up(gradients[0])
        gradients[0].div_(group.size)
    elif gradients:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        group.add_up(flat)
        flat.div_(group.size)
        for gradient, mean in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))
