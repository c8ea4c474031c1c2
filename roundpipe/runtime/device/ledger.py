"""The memory of a CPU worker: bytes in use by purpose, among them what autograd saves, under a budget."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from roundpipe.core.errors import DeviceMemoryError
from roundpipe.core.modes import saved_tensor_hooks_aside


class Ledger:
    """Bytes in use on a device by purpose, with a peak and a limit."""

    def __init__(self, name: str, budget_bytes: int | None) -> None:
        self.name = name
        self.budget_bytes = budget_bytes
        self.by_purpose: Counter[str] = Counter()
        self.total_bytes = 0
        self.peak_bytes = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int, purpose: str) -> None:
        """Count bytes; past the budget raise `DeviceMemoryError` and count nothing."""
        with self._lock:
            total = self.total_bytes + num_bytes
            if self.budget_bytes is not None and total > self.budget_bytes:
                in_use = ", ".join(f"{use} {size:,}" for use, size in self.by_purpose.items() if size)
                raise DeviceMemoryError(
                    f"{self.name} is out of memory: {num_bytes:,} more bytes for {purpose} with {self.total_bytes:,} "
                    f"of {self.budget_bytes:,} in use ({in_use or 'nothing'}). Use more microbatches, "
                    "recompute_grain='layer', shorter stages or a larger budget."
                )
            self.total_bytes = total
            self.by_purpose[purpose] += num_bytes
            self.peak_bytes = max(self.peak_bytes, total)

    def remove(self, num_bytes: int, purpose: str) -> None:
        with self._lock:
            self.total_bytes -= num_bytes
            self.by_purpose[purpose] -= num_bytes


@dataclass(slots=True)
class Hold:
    """Bytes counted while a context is open; a class, since every task opens one."""

    ledger: Ledger
    num_bytes: int
    purpose: str

    def __enter__(self) -> None:
        self.ledger.add(self.num_bytes, self.purpose)

    def __exit__(self, *exception: object) -> None:
        self.ledger.remove(self.num_bytes, self.purpose)


class _Storages:
    """Storages that autograd keeps, each counted once; those of ``known`` tensors are counted elsewhere."""

    def __init__(self, ledger: Ledger, known: Sequence[torch.Tensor]) -> None:
        self._ledger = ledger
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known if tensor.layout is torch.strided}
        self._uses: Counter[int] = Counter()

    def pack(self, tensor: torch.Tensor) -> _Saved:
        try:
            storage = tensor.untyped_storage()
            address, num_bytes = storage.data_ptr(), storage.nbytes()
        except RuntimeError:  # sparse, or of one of torch.func's transforms: nothing to look at
            num_bytes = 0
        if not num_bytes or address in self._known:
            return _Saved(tensor.detach())
        if not self._uses[address]:
            self._ledger.add(num_bytes, "activations")
        self._uses[address] += 1
        return _Saved(tensor.detach(), self, address, num_bytes)

    def forget(self, address: int, num_bytes: int) -> None:
        self._uses[address] -= 1
        if not self._uses[address]:
            self._ledger.remove(num_bytes, "activations")


@dataclass(slots=True, eq=False)
class _Saved:
    """A tensor that autograd keeps; gives its bytes back to the ledger when autograd lets go of it."""

    tensor: torch.Tensor
    storages: _Storages | None = None
    address: int = 0
    num_bytes: int = 0

    def __del__(self) -> None:
        if self.storages is not None:
            self.storages.forget(self.address, self.num_bytes)


def _unpack(saved: _Saved) -> torch.Tensor:
    return saved.tensor


@contextlib.contextmanager
def saved_tensors_counted(ledger: Ledger, known: Sequence[torch.Tensor]) -> Iterator[None]:
    """Count what autograd saves in this thread, but for what it saves inside torch.func's transforms.

    These refuse to run under any hooks, with `torch.autograd.graph.disable_saved_tensors_hooks`. So while anybody
    counts, that function puts the counting hooks aside first; the hooks of others are refused as always.
    """
    global _num_counting
    with _counting_lock:
        if not _num_counting:
            torch.autograd.graph.disable_saved_tensors_hooks = _disable_beside_counting
        _num_counting += 1
    try:
        with torch.autograd.graph.saved_tensors_hooks(_Storages(ledger, known).pack, _unpack):
            yield
    finally:
        with _counting_lock:
            _num_counting -= 1
            if not _num_counting:
                torch.autograd.graph.disable_saved_tensors_hooks = _disable_hooks


_num_counting = 0
_counting_lock = threading.Lock()
_disable_hooks = torch.autograd.graph.disable_saved_tensors_hooks


@contextlib.contextmanager
def _disable_beside_counting(error_message: str) -> Iterator[None]:
    """What `saved_tensors_counted` puts in the place of `torch.autograd.graph.disable_saved_tensors_hooks`."""
    with saved_tensor_hooks_aside(lambda unpack: unpack is _unpack), _disable_hooks(error_message):
        yield
