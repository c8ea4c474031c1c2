"""Large tensors between ordinary host memory and an accelerator, in pieces by way of pinned memory.

A driver copies what is not pinned with one thread, at a fraction of what the link carries. Here several threads copy a
piece while those before it are under way. What moves only once, such as states that an optimizer made on the host, is
not worth being pinned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

import torch

from roundpipe.core.storages import is_plain
from roundpipe.runtime.device.backend import Event, moved_at_once
from roundpipe.runtime.device.host_memory import on_huge_pages

PIECE_BYTES = 2**26
"""Of a piece: some milliseconds of a link, and of the threads that copy it."""
NUM_BUFFERS = 3
LEAST_BYTES = 2**20
"""Smaller tensors take as long to be cut as to be copied."""


class PiecesAcross:
    """A context in which tensors are moved; at its end all have arrived.

    Args:
        host_buffer: gives that many bytes of pinned memory.
        record: an event after all that the current stream was given so far.
    """

    def __init__(
        self, host_buffer: Callable[[int], torch.Tensor], record: Callable[[], Event], piece_bytes: int = PIECE_BYTES
    ) -> None:
        self._host_buffer, self._record, self._piece_bytes = host_buffer, record, piece_bytes
        self._num_buffers = 0
        self._under_way: deque[tuple[Event, torch.Tensor, Callable[[], object]]] = deque()
        """Pieces that the current stream copies: when it has, which buffer is free, and what comes before that."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._under_way:  # also behind an error: a copy must not outlive its buffer
            self._end_oldest()

    def move(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A tensor's values in new memory, there or on the host; read it on the host only behind this context."""
        is_dense = is_plain(tensor) and tensor.is_contiguous()
        if not is_dense or tensor.nbytes < LEAST_BYTES or tensor.is_pinned():
            return moved_at_once(tensor, device)
        moved = on_huge_pages(torch.empty_like(tensor, device=device))
        for source, target in zip(self._pieces(tensor), self._pieces(moved), strict=True):
            buffer = self._take_buffer()
            piece = buffer[: source.numel()]
            if tensor.device.type == "cpu":
                piece.copy_(source)
                target.copy_(piece, non_blocking=True)
                self._under_way.append((self._record(), buffer, lambda: None))
            else:
                piece.copy_(source, non_blocking=True)
                self._under_way.append((self._record(), buffer, _later(target, piece)))
        return moved

    def _pieces(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        yield from tensor.detach().view(-1).view(torch.uint8).split(self._piece_bytes)

    def _take_buffer(self) -> torch.Tensor:
        """One that nothing copies from or to."""
        if self._num_buffers < NUM_BUFFERS:
            self._num_buffers += 1
            return self._host_buffer(self._piece_bytes)
        return self._end_oldest()

    def _end_oldest(self) -> torch.Tensor:
        """Wait for the piece that was begun first; its buffer."""
        event, buffer, finish = self._under_way.popleft()
        event.synchronize()
        finish()
        return buffer


def _later(target: torch.Tensor, piece: torch.Tensor) -> Callable[[], object]:
    return lambda: target.copy_(piece)
