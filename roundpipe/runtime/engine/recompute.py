"""What recomputation needs to repeat a forward: seeds, buffers, and what a layer saved by itself.

Random numbers: each (layer, microbatch) derives its seed from one base seed per call; no generator state is saved.
Buffers: a layer that writes buffers in forward (BatchNorm) sees, in microbatch m, what the microbatches before it left.
A copy is kept per microbatch; recomputation runs on it, and what it writes goes nowhere.
Decisions that must not be taken again, such as routing: `save_for_recompute` and `get_recompute_data`.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from roundpipe.core import trees
from roundpipe.core.contexts import contextmanager
from roundpipe.core.errors import ConfigError
from roundpipe.core.layers import LayerSpec
from roundpipe.core.random_state import generator_held
from roundpipe.runtime.device.backend import Backend, Event, Lane
from roundpipe.runtime.weights.layer_weights import LayerWeights
from roundpipe.runtime.weights.replica import BoundLayer

LayerKey = tuple[int, int]
"""Index of a layer, and a microbatch."""
_Buffers = tuple[list[torch.Tensor | None], Event | None]
RecordEntries = tuple[dict[LayerKey, deque[tuple[Any, Event]]], dict[LayerKey, _Buffers]]
"""What layers saved, and the buffers that they saw."""

_state = threading.local()


def layer_seed(base_seed: int, layer_index: int, microbatch: int) -> int:
    """Seed of one layer and microbatch: splitmix64 of the three, in [0, 2^63)."""
    mask = (1 << 64) - 1
    mixed = (base_seed + 0x9E3779B97F4A7C15 * (1 + layer_index * 1_000_003 + microbatch)) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return (mixed ^ (mixed >> 31)) >> 1


def base_seed(drawing: Collection[int], specs: Sequence[LayerSpec], weights: Sequence[LayerWeights]) -> int:
    """A seed from torch's default generator, so that ``torch.manual_seed`` fixes it.

    ``drawing`` are layers that may draw. Where they may only through hooks, which have drawn nothing so far, the
    generator stays as it is: the caller draws the same as in eager mode.
    """
    if not drawing:
        return 0
    layers = ((specs[index], weights[index]) for index in drawing)
    stays = not any(spec.draws_random or each.habits_of(each.modules).draws for spec, each in layers)
    with generator_held(torch.device("cpu")):
        before = torch.get_rng_state()
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
        if stays:
            torch.set_rng_state(before)
    return seed


class LayerScope:
    """Says which layer the calling thread runs; a class, since every task opens some."""

    __slots__ = ("_before", "backend", "is_recomputation", "key", "record")

    def __init__(self, record: ForwardRecord, key: LayerKey, backend: Backend, *, is_recomputation: bool) -> None:
        self.record, self.key, self.backend, self.is_recomputation = record, key, backend, is_recomputation

    def __enter__(self) -> None:
        self._before, _state.scope = _scope(), self

    def __exit__(self, *exception: object) -> None:
        _state.scope = self._before


def _scope() -> LayerScope | None:
    return getattr(_state, "scope", None)


def doing_recompute() -> bool:
    """Whether the calling code runs in the recomputation of a layer, not in its first forward."""
    scope = _scope()
    return scope is not None and scope.is_recomputation


def save_for_recompute(*data: Any) -> None:
    """Keep values of a layer's forward for its recomputation, such as a routing decision.

    Does nothing where no recomputation follows (inference, the fused stage, outside a pipeline).

    Args:
        *data: tensors, or structures of them; detached copies are kept on the host.
    """
    scope = _scope()
    if scope is not None and not scope.is_recomputation:
        scope.record.saved[scope.key].append(_download(data, scope.backend))


def get_recompute_data() -> Any:
    """In a recomputation, the tuple given to the matching `save_for_recompute`, on the device.

    Raises:
        ConfigError: not called in a recomputation, or more often than data was saved.
    """
    scope = _scope()
    if scope is None or not scope.is_recomputation:
        raise ConfigError("get_recompute_data() works only in a recomputation; ask doing_recompute() before")
    saved = scope.record.saved[scope.key]
    if not saved:
        raise ConfigError(
            "get_recompute_data() has nothing left to give: call it in the recomputation as often, and in the same "
            "order, as save_for_recompute() was called in the layer's forward"
        )
    return _upload(*saved.popleft(), scope.backend)


class ForwardRecord:
    """What the forwards of one step leave for their recomputation, on the host; workers write it."""

    def __init__(self, plain: dict[tuple[int, str], frozenset[int]]) -> None:
        self.plain = plain
        """By microbatch and name of values that gradients flow through, the tensors that take no part: a mask's."""
        self.saved: defaultdict[LayerKey, deque[tuple[Any, Event]]] = defaultdict(deque)
        """What layers asked to be given back, in the order in which it was saved."""
        self._buffers: dict[LayerKey, _Buffers] = {}
        """Of layers that write them, as the forward saw them."""
        self._unwritten: defaultdict[int, list[int]] = defaultdict(list)
        """By layer, the microbatches that nothing was kept for, since no forward so far wrote a buffer."""

    def entries(self, layers: Iterable[int], microbatch: int) -> RecordEntries:
        """What recomputation of these layers will use up."""
        keys = [(layer, microbatch) for layer in layers]
        saved = {key: deque(self.saved[key]) for key in keys if key in self.saved}
        return saved, {key: self._buffers[key] for key in keys if key in self._buffers}

    def put_back(self, entries: RecordEntries) -> None:
        """Have these again, for another recomputation."""
        saved, buffers = entries
        self.saved.update((key, deque(values)) for key, values in saved.items())
        self._buffers.update(buffers)

    @contextmanager
    def keep_buffers(self, bound: BoundLayer, key: LayerKey, backend: Backend) -> Iterator[None]:
        """Keep the buffers that the forward inside sees, if the layer writes any in the current mode."""
        if bound.habits.writes_buffers:
            self._buffers[key] = _download(bound.buffer_values(), backend)
            yield
            return
        versions = bound.buffer_versions() if bound.versions_tell else None
        with learn_writes(bound) as before:
            yield
        layer, microbatch = key
        if versions is not None and bound.buffer_versions() != versions:  # the first write of all
            bound.habits.writes_buffers = True
            values = bound.buffers_on_host()
            self._buffers.update({(layer, unseen): (values, None) for unseen in (*self._unwritten[layer], microbatch)})
        elif bound.versions_tell:
            self._unwritten[layer].append(microbatch)
        elif before:  # a later microbatch may write what this one has seen
            self._buffers[key] = _download(before, backend)

    @contextmanager
    def use_buffers(self, bound: BoundLayer, key: LayerKey, backend: Backend) -> Iterator[None]:
        """Run the recomputation inside on the buffers of the forward."""
        seen = self._buffers.pop(key, None)
        if seen is None:
            yield
            return
        now = bound.buffer_values()
        bound.set_buffers(_upload(*seen, backend))
        try:
            yield
        finally:
            bound.set_buffers(now)


@contextmanager
def learn_writes(bound: BoundLayer) -> Iterator[list[torch.Tensor | None]]:
    """Find out whether the forward inside writes buffers, if that is not known; gives them as they were."""
    if not bound.has_buffers or bound.habits.writes_buffers or bound.versions_tell:
        yield []
        return
    before = [None if buffer is None else buffer.detach().clone() for buffer in bound.buffer_values()]
    yield before
    bound.habits.writes_buffers = any(map(_differ, before, bound.buffer_values()))


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
