"""Many tensors in one call: what is a launch per tensor otherwise is a few for all of them on an accelerator.

The values are those of one call per tensor. Only this file names torch's functions for lists of tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch

Pairs = Iterable[tuple[torch.Tensor, torch.Tensor]]
"""Tensors that are written, each with the one that is read."""


def copy_all(pairs: Pairs) -> None:
    """Copy each pair's second tensor into the first, which may have another dtype."""
    for written, read in _alike(pairs):
        torch._foreach_copy_(written, read)


def add_all(pairs: Pairs) -> None:
    """Add each pair's second tensor to the first."""
    for written, read in _alike(pairs):
        torch._foreach_add_(written, read)


def _alike(pairs: Pairs) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Lists whose tensors have one device and one dtype each, as fast kernels need them."""
    lists: defaultdict[tuple[object, ...], tuple[list[torch.Tensor], list[torch.Tensor]]]
    lists = defaultdict(lambda: ([], []))
    for written, read in pairs:
        of_written, of_read = lists[written.device, written.dtype, read.device, read.dtype]
        of_written.append(written)
        of_read.append(read)
    yield from lists.values()
