"""How often gradients came to tensors of the user's, told by hooks: nothing reads ``.grad``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.utils.hooks import RemovableHandle


@dataclass(slots=True, eq=False)
class GradientCount:
    """How often gradients came to a tensor, at least so that it differs once one has."""

    number: int = 0
    handle: RemovableHandle | None = None
    leaf: weakref.ref[torch.Tensor] | None = None

    def __call__(self, leaf: torch.Tensor) -> None:
        self.number += 1


class GradientCounts:
    """Counts the gradients that autograd adds to tensors, from when it is first told of them."""

    def __init__(self) -> None:
        self._counts: dict[int, GradientCount] = {}

    def of(self, leaves: Iterable[torch.Tensor], wait_idle: Callable[[], None]) -> list[int]:
        """Per tensor, how many came; ``wait_idle`` returns when no backward is running, and is called for new ones."""
        leaves = list(leaves)
        new = [leaf for leaf in leaves if id(leaf) not in self._counts]
        if new:
            wait_idle()
        for leaf in new:
            self._watch(leaf)
        return [self._counts[id(leaf)].number for leaf in leaves]

    def _watch(self, leaf: torch.Tensor) -> None:
        count, key, counts = GradientCount(), id(leaf), weakref.ref(self)

        def forget(_: object) -> None:
            if (known := counts()) is not None:
                known._counts.pop(key, None)

        count.handle, count.leaf = leaf.register_post_accumulate_grad_hook(count), weakref.ref(leaf, forget)
        self._counts[key] = count

    def end(self) -> None:
        """Leave no hooks behind."""
        while self._counts:
            _, count = self._counts.popitem()
            if count.handle is not None:
                count.handle.remove()
