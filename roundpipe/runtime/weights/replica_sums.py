"""Gradients that replicas of a stage have of the same weights: added up on their devices, so that one goes home.

Each device adds up some of the parameters, and brings home these alone: with N replicas, links and the host carry one
N-th of what they would. Sums are those that the host makes of what comes down: in the order of replicas, in the
gradients' dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from roundpipe.runtime.device.backend import Lane
from roundpipe.runtime.weights.download import Addends, Download

PIECE_BYTES = 16 * 1024**2
"""Of gradients that come from another device at once, each of which takes as much memory meanwhile."""


@dataclass(slots=True)
class _Sharer:
    """A replica, and what it is to bring home."""

    download: Download
    addends: Addends
    num_bytes: int = 0


def bring_sums(downloads: Sequence[Download]) -> None:
    """Begin adding up what replicas, given in their order, have on their devices, and bringing it home.

    The devices do it behind this call; `Download.wait` comes before anybody reads it, `drop_addends` at the end.
    """
    sharers = [_Sharer(download, download.addends) for download in downloads if download.addends is not None]
    if not sharers:
        return
    by_parameter: dict[torch.Tensor, list[tuple[_Sharer, torch.Tensor]]] = {}
    for sharer in sharers:
        for host, gradient in sharer.addends.gradients:
            by_parameter.setdefault(host, []).append((sharer, gradient))
    for sharer in sharers:  # all that follows would fill the lanes' queues: who asks for more then holds all of Python
        sharer.addends.computed.synchronize()
    with ExitStack() as lanes, torch.no_grad():
        for sharer in sharers:
            backend = sharer.addends.backend
            for other in sharers:
                backend.wait(Lane.GRADIENTS, other.addends.computed)
            lanes.enter_context(backend.on(Lane.GRADIENTS))
        begun = [sharer.addends.backend.moment(Lane.GRADIENTS) for sharer in sharers]
        try:
            for host, shared in by_parameter.items():
                for alike in _alike(shared):
                    _bring_sum(host, alike)
        finally:  # also behind an error: the devices may be at it
            for sharer in sharers:
                sharer.download.event = sharer.addends.backend.record(Lane.GRADIENTS)
    for sharer, began in zip(sharers, begun, strict=True):
        sharer.addends.note_moved(sharer.num_bytes, began, sharer.addends.backend.moment(Lane.GRADIENTS))


def _bring_sum(host: torch.Tensor, shared: Sequence[tuple[_Sharer, torch.Tensor]]) -> None:
    """Add up a parameter's gradients where the least is brought home so far, and bring that home."""
    own = min(range(len(shared)), key=lambda position: shared[position][0].num_bytes)
    owner, gradient = shared[own]
    backend = owner.addends.backend
    with backend.on(Lane.GRADIENTS):
        _add_up([each for _, each in shared], own)
    owner.num_bytes += gradient.nbytes
    owner.download.add(host, backend.download(gradient, Lane.GRADIENTS), backend)


def _alike(shared: list[tuple[_Sharer, torch.Tensor]]) -> Iterator[list[tuple[_Sharer, torch.Tensor]]]:
    """Those that can be added up; a forward may have converted a parameter in one place only."""
    kinds = {(gradient.dtype, gradient.shape) for _, gradient in shared}
    yield from [shared] if len(kinds) == 1 else [[each] for each in shared]


def _add_up(gradients: Sequence[torch.Tensor], own: int) -> None:
    """Write their sum into the ``own``-th, on its device; the others are left as they are."""
    if len(gradients) == 1:
        return
    flat = [each.view(-1) for each in gradients] if all(each.is_contiguous() for each in gradients) else gradients
    size = max(PIECE_BYTES // gradients[own].element_size(), 1)
    split = [each.split(size) if each.ndim == 1 else (each,) for each in flat]
    for pieces in zip(*split, strict=True):
        target = pieces[own]
        if own < 2:  # of the first two, the order does not matter
            total, others = target.add_(_at(pieces[1 - own], target)), pieces[2:]
        else:
            total, others = pieces[0].to(target.device, copy=True, non_blocking=True), pieces[1:]
        for other in others:
            total.add_(_at(other, target))
        if total is not target:
            target.copy_(total)


def _at(piece: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A piece where the target is."""
    return piece.to(target.device, non_blocking=True)
