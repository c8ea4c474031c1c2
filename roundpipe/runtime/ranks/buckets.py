"""What travels at once: the gradients, or the new weights, of a bucket of parameters.

Buckets are of parameters in the reverse of the model's order, so that those come first whose backward ends first, and
the same on every rank, whatever its devices and its plan. Where no rank has a gradient of a parameter, its copy gets
none; else ranks that have none count as zero.

    average   each rank has whole copies: their gradients become the mean of all ranks', the same bits everywhere
    scatter   each rank has a shard of the copies: its gradients get the mean of that shard, which is sent in the
              model's dtype and added up in the copies'
    gather    shards of the copies, in the model's dtype, become the model's weights on every rank
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from roundpipe.core.errors import ConfigError
from roundpipe.core.together import add_converted
from roundpipe.runtime.device.host_memory import on_huge_pages
from roundpipe.runtime.ranks.group import RankGroup
from roundpipe.runtime.weights.parameter_pair import ParameterPair
from roundpipe.runtime.weights.shard import Shard

BUCKET_BYTES = 16 * 1024**2


def buckets_of(pairs: Sequence[ParameterPair]) -> Iterator[list[ParameterPair]]:
    """Of one dtype each, in the model and in the copies, and of about `BUCKET_BYTES`."""
    bucket: list[ParameterPair] = []
    num_bytes, dtypes = 0, None
    for pair in reversed(pairs):
        assert pair.copy is not None
        own = pair.parameter.numel() * pair.copy.itemsize
        if bucket and (num_bytes + own > BUCKET_BYTES or (pair.parameter.dtype, pair.copy.dtype) != dtypes):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(pair)
        num_bytes, dtypes = num_bytes + own, (pair.parameter.dtype, pair.copy.dtype)
    if bucket:
        yield bucket


class Workspace:
    """Memory for what travels, the same for every bucket: for new memory the system takes as long as for the way."""

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def take(self, name: str, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """In one dimension, with any values."""
        num_bytes = num_elements * dtype.itemsize
        if name not in self._memory or len(self._memory[name]) < num_bytes:
            self._memory[name] = on_huge_pages(torch.empty(num_bytes, dtype=torch.uint8))
        return self._memory[name][:num_bytes].view(dtype)

    def joined(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Contiguous tensors, one after the other."""
        joined = self.take(name, sum(part.numel() for part in parts), parts[0].dtype)
        _join(joined, parts)
        return joined


def present(bucket: Sequence[ParameterPair], group: RankGroup, shard: Shard | None) -> list[ParameterPair]:
    """Those of which some rank has a gradient; waits for the other ranks."""
    gradients = [None if pair.copy is None else pair.copy.grad if shard is None else pair.whole for pair in bucket]
    for pair, gradient in zip(bucket, gradients, strict=True):
        if gradient is not None and gradient.layout is not torch.strided:
            raise ConfigError(
                f"{pair.names[0]}: its gradient is sparse, and ranks average dense ones only; make the embedding with "
                "sparse=False, or train without process_group="
            )
    holders = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.int32)
    group.count(holders)
    return [pair for pair, num_holders in zip(bucket, holders.tolist(), strict=True) if num_holders]


def average(pairs: Sequence[ParameterPair], group: RankGroup, space: Workspace) -> None:
    """Let the copies' gradients be the mean of all ranks'."""
    gradients = []
    for pair in pairs:
        assert pair.copy is not None
        if pair.copy.grad is None:
            pair.copy.grad = torch.zeros_like(pair.copy)
        gradients.append(pair.copy.grad)
    if not gradients:
        return
    if all(each.is_contiguous() for each in gradients) and (group.joins or len(gradients) == 1):
        group.add_up([gradient.view(-1) for gradient in gradients], group.size)
        return
    flat = space.joined("gradients", [gradient.contiguous() for gradient in gradients])
    group.add_up([flat], group.size)
    for gradient, mean in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(mean.view(gradient.shape))


def scatter(pairs: Sequence[ParameterPair], group: RankGroup, shard: Shard, space: Workspace) -> None:
    """Add the mean of all ranks' gradients to those of the copies."""
    flats, totals = [], []
    for pair in pairs:
        assert pair.copy is not None
        whole, pair.whole = pair.whole, None
        flats.append(torch.zeros_like(pair.parameter).view(-1) if whole is None else whole.detach().reshape(-1))
        adds = pair.copy.grad is not None
        if pair.copy.grad is None:
            pair.copy.grad = on_huge_pages(torch.empty_like(pair.copy))
        totals.append((pair.copy.grad, adds))
    for window in _windows(pairs, shard):
        parts_of = [_parts(flats, shard, rank, window) for rank in range(shard.count)]
        lengths = [sum(map(len, parts)) for parts in parts_of]
        sent = space.joined("sent", [part for parts in parts_of for part in parts])
        received = space.take("received", shard.count * lengths[shard.index], sent.dtype)
        received = received.view(shard.count, lengths[shard.index])
        group.swap(received, sent, lengths)
        mean = space.take("mean", received.shape[1], totals[0][0].dtype).copy_(received[0])
        for row in received[1:]:
            add_converted(mean, row)
        mean.div_(shard.count)
        own = [(total[window], adds) for total, adds in totals]
        for (total, adds), part in zip(own, mean.split([len(each) for each, _ in own]), strict=True):
            if adds:
                total += part
            else:
                total.copy_(part)


def gather(bucket: Sequence[ParameterPair], group: RankGroup, shard: Shard, space: Workspace) -> None:
    """Let the model's weights be the copies'."""
    copies = [pair.copy.detach() for pair in bucket if pair.copy is not None]
    flats = [
        parameter.view(-1) if parameter.is_contiguous() else torch.empty_like(parameter).reshape(-1)
        for parameter in (pair.parameter.detach() for pair in bucket)
    ]
    for window in _windows(bucket, shard):
        parts_of = [_parts(flats, shard, rank, window) for rank in range(shard.count)]
        lengths = [sum(map(len, parts)) for parts in parts_of]
        length = max(lengths)  # equally long on all ranks
        own = space.take("sent", length, flats[0].dtype)
        _join(own[: lengths[shard.index]], [copy[window] for copy in copies])
        found = space.take("received", shard.count * length, own.dtype).view(shard.count, length)
        group.collect(found, own)
        for row, parts, length in zip(found, parts_of, lengths, strict=True):
            for part, new in zip(parts, row[:length].split([len(part) for part in parts]), strict=True):
                part.copy_(new)
    for pair, flat in zip(bucket, flats, strict=True):
        if not pair.parameter.is_contiguous():
            pair.parameter.copy_(flat.view(pair.parameter.shape))
        pair.agree()


def _windows(bucket: Sequence[ParameterPair], shard: Shard) -> Iterator[slice]:
    """Pieces of the shards, so that of parameters larger than a bucket no more than a bucket travels at once."""
    if bucket:
        step = max(BUCKET_BYTES // shard.count // bucket[0].parameter.itemsize, 1)
        longest = max(shard.bounds(pair.parameter.numel(), 0).stop for pair in bucket)
        yield from (slice(start, start + step) for start in range(0, longest, step))


def _join(flat: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Write contiguous tensors one after the other into one that has room for just them."""
    for place, part in zip(flat.split([part.numel() for part in parts]), parts, strict=True):
        place.copy_(part.view(-1))


def _parts(flats: Sequence[torch.Tensor], shard: Shard, rank: int, window: slice) -> list[torch.Tensor]:
    """A piece of a rank's shard of each."""
    return [flat[shard.bounds(len(flat), rank)][window] for flat in flats]
