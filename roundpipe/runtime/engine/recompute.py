"""What recomputation needs to repeat a forward: seeds, buffers, and what a layer saved by itself.

Random numbers: each (layer, microbatch) derives its seed from one base seed per call; no generator state is saved.
Buffers: a layer that writes buffers in forward (BatchNorm) sees, in microbatch m, what the microbatches before it left.
A copy is kept per microbatch; recomputation runs on it, and what it writes goes nowhere.
Decisions that must not be taken again, such as routing: `save_for_recompute` and `get_recompute_data`.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from roundpipe.core import trees
from roundpipe.core.errors import ConfigError
from roundpipe.runtime.device.backend import Backend, Event, Lane
from roundpipe.runtime.weights.replica import BoundLayer

_state = threading.local()


def layer_seed(base_seed: int, layer_index: int, microbatch: int) -> int:
    """Seed of one layer and microbatch: splitmix64 of the three, in [0, 2^63)."""
    mask = (1 << 64) - 1
    mixed = (base_seed + 0x9E3779B97F4A7C15 * (1 + layer_index * 1_000_003 + microbatch)) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return (mixed ^ (mixed >> 31)) >> 1


def draw_base_seed() -> int:
    """A base seed from torch's default generator, so that ``torch.manual_seed`` fixes it."""
    return int(torch.empty((), dtype=torch.int64).random_().item())


@contextlib.contextmanager
def recomputing() -> Iterator[None]:
    """Marks the calling thread as recomputing."""
    before = getattr(_state, "recomputing", False)
    _state.recomputing = True
    try:
        yield
    finally:
        _state.recomputing = before


def doing_recompute() -> bool:
    """Whether the calling code runs in the recomputation of a layer, not in its first forward."""
    return getattr(_state, "recomputing", False)


class _LayerScope:
    """Names the layer that runs in the calling thread; a class, since every task opens one."""

    __slots__ = ("_before", "_layer")

    def __init__(self, layer: tuple[SavedData, tuple[int, int], Backend]) -> None:
        self._layer = layer

    def __enter__(self) -> None:
        self._before = getattr(_state, "layer", None)
        _state.layer = self._layer

    def __exit__(self, *exception: object) -> None:
        _state.layer = self._before


class SavedData:
    """What layers asked to be given back in their recomputation; on the host, in the order it was saved."""

    def __init__(self) -> None:
        self._saved: dict[tuple[int, int], deque[tuple[Any, Event | None]]] = {}

    def layer(self, layer_index: int, microbatch: int, backend: Backend) -> _LayerScope:
        """While open, `save_for_recompute` and `get_recompute_data` in this thread mean this layer."""
        return _LayerScope((self, (layer_index, microbatch), backend))

    def save(self, key: tuple[int, int], data: tuple[Any, ...], backend: Backend) -> None:
        self._saved.setdefault(key, deque()).append(_download(data, backend))

    def get(self, key: tuple[int, int], backend: Backend) -> Any:
        if not self._saved.get(key):
            raise ConfigError(
                "get_recompute_data() has nothing left to give: call it in the recomputation as often, and in the same "
                "order, as save_for_recompute() was called in the layer's forward"
            )
        return _upload(*self._saved[key].popleft(), backend)


def save_for_recompute(*data: Any) -> None:
    """Keep values of a layer's forward for its recomputation, such as a routing decision.

    Does nothing where no recomputation follows (inference, the fused stage, outside a pipeline).

    Args:
        *data: tensors, or structures of them; detached copies are kept on the host.
    """
    layer = getattr(_state, "layer", None)
    if layer is not None and not doing_recompute():
        saved, key, backend = layer
        saved.save(key, data, backend)


def get_recompute_data() -> Any:
    """In a recomputation, the tuple given to the matching `save_for_recompute`, on the device.

    Raises:
        ConfigError: not called in a recomputation, or more often than data was saved.
    """
    layer = getattr(_state, "layer", None)
    if layer is None or not doing_recompute():
        raise ConfigError("get_recompute_data() works only in a recomputation; ask doing_recompute() before")
    saved, key, backend = layer
    return saved.get(key, backend)


class BufferHistory:
    """Buffers of the layers that write them, as each microbatch's forward saw them; on the host."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], tuple[list[torch.Tensor | None], Event | None]] = {}
        self._unwritten: dict[int, list[int]] = {}
        """By layer, the microbatches that nothing was kept for, since no forward so far wrote a buffer."""

    @contextlib.contextmanager
    def recording(self, bound: BoundLayer, layer_index: int, microbatch: int, backend: Backend) -> Iterator[None]:
        """Keep the buffers that the forward inside sees, if the layer writes any in the current mode."""
        if bound.habits.writes_buffers:
            self._seen[layer_index, microbatch] = _download(bound.buffer_values(), backend)
            yield
            return
        versions = bound.buffer_versions() if bound.versions_tell else None
        with self.learning(bound) as before:
            yield
        unwritten = self._unwritten.setdefault(layer_index, [])
        if versions is not None and bound.buffer_versions() != versions:  # the first write of all
            bound.habits.writes_buffers = True
            values = bound.buffers_on_host()
            for unseen in (*unwritten, microbatch):
                self._seen[layer_index, unseen] = values, None
        elif bound.versions_tell:
            unwritten.append(microbatch)
        elif before:  # a later microbatch may write what this one has seen
            self._seen[layer_index, microbatch] = _download(before, backend)

    @contextlib.contextmanager
    def learning(self, bound: BoundLayer) -> Iterator[list[torch.Tensor | None]]:
        """Find out whether the forward inside writes buffers, if that is not known; gives them as they were."""
        if not bound.has_buffers or bound.habits.writes_buffers or bound.versions_tell:
            yield []
            return
        before = [None if buffer is None else buffer.detach().clone() for buffer in bound.buffer_values()]
        yield before
        bound.habits.writes_buffers = any(map(_differ, before, bound.buffer_values()))

    @contextlib.contextmanager
    def as_forward_saw(self, bound: BoundLayer, layer_index: int, microbatch: int, backend: Backend) -> Iterator[None]:
        """Run the recomputation inside on the buffers of the forward."""
        seen = self._seen.pop((layer_index, microbatch), None)
        if seen is None:
            yield
            return
        copies = _upload(*seen, backend)
        now = bound.buffer_values()
        bound.set_buffers(copies)
        try:
            yield
        finally:
            bound.set_buffers(now)


@dataclass(slots=True)
class ForwardRecord:
    """What the forwards of one step leave for their recomputation; workers write it."""

    plain: dict[tuple[int, str], frozenset[int]]
    """By microbatch and name of values that gradients flow through, the tensors that take no part, such as a mask."""
    buffers: BufferHistory = field(default_factory=BufferHistory)
    saved: SavedData = field(default_factory=SavedData)


def _download(values: Any, backend: Backend) -> tuple[Any, Event]:
    backend.wait(Lane.DOWNLOAD, backend.record(Lane.COMPUTE))
    copies = trees.map_tensors(values, backend.download)
    copied = backend.record(Lane.DOWNLOAD)
    backend.wait(Lane.COMPUTE, copied)  # the tensors may be written or freed right after
    return copies, copied


def _upload(values: Any, event: Event | None, backend: Backend) -> Any:
    if event is not None:
        backend.wait(Lane.UPLOAD, event)
    copies = trees.map_tensors(values, backend.upload)
    backend.wait(Lane.COMPUTE, backend.record(Lane.UPLOAD))
    return copies


def _differ(before: torch.Tensor | None, now: torch.Tensor | None) -> bool:
    if before is None or now is None:
        return before is not now
    return before.shape != now.shape or before.dtype != now.dtype or not torch.equal(before, now)
