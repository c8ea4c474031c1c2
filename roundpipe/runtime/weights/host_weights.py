"""All weights of a model in host memory: packed into one buffer per layer, pinned.

A layer's parameters and buffers lie in one byte buffer, each aligned to 64 bytes; the user's parameter objects become
views of it, so an upload is one copy. What can't be moved (tied to another layer's buffer, a tensor subclass,
``pin_model="off"``) stays and is copied by itself; so do large tensors with ``pin_model="register"``, pinned in place.

With ``"double"`` what is trained has a second buffer, in which the optimizer's thread gets the next weights ready while
those that a round reads stay as they are; then the parameters change places (`Banks`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Literal

import torch
from torch import nn

from roundpipe.core.aliasing import overlapping
from roundpipe.core.errors import ConfigError
from roundpipe.core.storages import is_plain, stored_tensors, unshare
from roundpipe.runtime.device.host_limit import HOST_LIMIT
from roundpipe.runtime.device.host_memory import Registrar
from roundpipe.runtime.weights.gradient_counts import GradientCount
from roundpipe.runtime.weights.layer_weights import LayerWeights
from roundpipe.runtime.weights.slots import tensors_of

logger = logging.getLogger(__name__)

NUM_PACKED_AT_ONCE = 3
"""Layers, each in memory twice meanwhile. To copy, to pin and to give back where it lay are the steps of a thread."""
PACKED_IN_THREAD_BYTES = 32 * 1024**2
"""Layers below this size are packed by the caller."""

PinMode = Literal["alloc", "double", "register", "off"]
Key = tuple[int, ...]
"""Identities of all tensors of a layer."""


class HostWeights:
    """All weights on the host: packs layers once, also when a later trace cuts them again.

    Args:
        pin: how to pin; see `roundpipe.RoundPipe`.
        allocate: makes a (pinned) host byte buffer.
        registrar: for ``"register"``; pins the whole model at the first layer, since tensors may share pages.
        model: all layers that will ever be asked for.
    """

    def __init__(
        self,
        pin: PinMode,
        allocate: Callable[[int], torch.Tensor],
        registrar: Registrar | None = None,
        model: nn.Module | None = None,
    ) -> None:
        assert (pin == "register") == (registrar is not None)
        self._pin = pin
        self._allocate = allocate
        self.registrar = registrar
        self._model = model
        for parameter in model.parameters() if model is not None else ():
            unshare(parameter)  # before a graph goes by which objects there are
        self._compared: set[int] = set()
        """Tensors that are known not to share memory; empty: all are to be compared again."""
        self.num_laid_out = 0
        """Layers with weights laid out so far; each may have moved its weights."""
        self._packed: dict[Key, list[torch.Tensor]] = {}
        """By layer, the buffers that it lies in, as all its `LayerWeights` have them."""
        self._is_told = False
        """Whether the log says what kind of memory the first of them is."""
        self._has_room = pin == "double"
        self._owners: dict[int, Key] = {}
        """By tensor, the layer whose buffer it lies in."""
        self._layers: dict[int, LayerWeights] = {}
        """By the identity of the layer, which they keep."""

    def is_prepared(self, layer: nn.Module) -> bool:
        """Whether `prepare` would change nothing."""
        known, is_pinned = self._layers.get(id(layer)), self.registrar is None or not self.registrar.has_lost
        return is_pinned and known is not None and known.is_current()

    def has(self, layers: Iterable[LayerWeights]) -> bool:
        """Whether these are still the host's side of their layers, pinned as they were."""
        is_pinned = self.registrar is None or not self.registrar.has_lost
        return is_pinned and all(self._layers.get(id(weights.layer)) is weights for weights in layers)

    def prepare(self, names: Sequence[str], layers: Sequence[nn.Module]) -> None:
        """Pack layers at first sight, and again if their structure, or shapes or dtypes of their tensors changed since.

        Large ones are packed side by side.
        """
        for layer in layers:
            known = self._layers.get(id(layer))
            if known is not None and not known.is_current():
                self._unpack(self._layers.pop(id(layer)))
        if self.registrar is not None and self.registrar.has_lost:
            self._register((), whole_model=True)
        with torch.inference_mode(False):  # also if the first call is for inference, the weights can be trained later
            self._lay_out(names, layers)

    def forget(self, layer: nn.Module) -> None:
        """Drop a layer, and its buffer if no other layer has the same tensors."""
        weights = self._layers.pop(id(layer), None)
        if weights is not None and all(other.packed is not weights.packed for other in self._layers.values()):
            self._unpack(weights)

    def _unpack(self, weights: LayerWeights) -> None:
        self._compared.clear()  # packed again, tensors move: no other may share their memory by then
        for key in [key for key, banks in self._packed.items() if banks is weights.banks]:
            del self._packed[key]
            self._owners = {tensor: owner for tensor, owner in self._owners.items() if owner != key}

    def layer(self, name: str, layer: nn.Module) -> LayerWeights:
        """The host's side of a layer, laid out at first sight."""
        if (known := self._layers.get(id(layer))) is None:
            self._lay_out([name], [layer])
            known = self._layers[id(layer)]
        return known

    def _lay_out(self, names: Sequence[str], layers: Sequence[nn.Module]) -> None:
        """Lay out those layers that are new."""
        new = {id(layer): (name, layer) for name, layer in zip(names, layers, strict=True)}
        for key in self._layers.keys() & new.keys():
            del new[key]
        for _, layer in new.values():  # before any moves
            self._check_shared(layer)
        try:
            with _LayerPacker(self._allocate) as packer:
                for key, (name, layer) in new.items():
                    self._layers[key] = self._laid_out(name, layer, packer)
        except BaseException:
            for weights in [each for each in self._layers.values() if each.num_packed and not each.banks]:
                self._unpack(self._layers.pop(id(weights.layer)))
            raise
        if self._packed and not self._is_told:
            self._is_told = True
            kind = "pinned" if next(iter(self._packed.values()))[0].is_pinned() else "unpinned"
            logger.info("pin_model=%r: weights are packed into %s host memory", self._pin, kind)

    def _laid_out(self, name: str, layer: nn.Module, packer: _LayerPacker) -> LayerWeights:
        tensors = [tensor for tensor, _ in tensors_of(layer)]
        key = tuple(map(id, tensors))
        banks = self._packed.get(key)
        if banks is None and tensors:
            self.num_laid_out += 1
            for tensor in tensors:
                if not tensor.is_meta and tensor.device.type != "cpu":
                    logger.warning("%s: moving weights from %s to host memory", name, tensor.device)
                    tensor.data = tensor.data.cpu()
            self._register(tensors, whole_model=self.num_laid_out == 1)
        weights = LayerWeights(name, layer, partial(self._may_pack, key))
        if banks is not None:
            weights.banks = banks
        elif weights.num_packed:
            packer.add(weights)
            self._packed[key] = weights.banks
            self._owners.update((id(slot.tensor), key) for slot in weights.slots[: weights.num_packed])
        return weights

    def add_second_banks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """With ``"double"``, second memory for trained weights of layers that have none, while there is room.

        Gives parameters, each with memory that it may lie in as well.
        """
        for weights in self._layers.values() if self._has_room else ():
            if len(weights.banks) == 1 and weights.is_packed() and weights.trained_bytes():
                if not HOST_LIMIT.has_room(weights.trained_bytes()):
                    self._has_room = False
                    logger.info("pin_model='double': host memory has no room for second weights of %s", weights.name)
                    return
                yield from weights.add_second_bank(self._allocate)

    def _may_pack(self, key: Key, tensor: torch.Tensor) -> bool:
        """Whether a tensor may lie in the buffer of a layer: not if it lies in another's, or is pinned by itself."""
        parts = stored_tensors(tensor)
        if self._pin == "off" or not parts or (tensor.requires_grad and not is_plain(tensor)):
            return False
        if self.registrar is not None and any(map(self.registrar.suits, parts)):
            return False
        return self._owners.get(id(tensor), key) == key

    def _check_shared(self, layer: nn.Module) -> None:
        """Raise `ConfigError` if two parameters, or a parameter and a buffer, share memory: packed, they would not."""
        own = {id(parameter) for parameter in layer.parameters()}
        if own <= self._compared:
            return
        model = layer if self._model is None else self._model
        named = [
            (name, tensor)
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
            if is_plain(tensor) and not tensor.is_meta and tensor.numel()
        ]
        for i, j in overlapping([tensor for _, tensor in named]):
            (name, tensor), (other_name, other) = named[i], named[j]
            if isinstance(tensor, nn.Parameter):
                kind = "parameters" if isinstance(other, nn.Parameter) else "a parameter and a buffer"
                raise ConfigError(
                    f"{name} and {other_name} are {kind} in the same memory, as .data or a view of the one gives the "
                    "other; they would get memory of their own, and changes of the one would not reach the other. Tie "
                    "parameters by assigning the same one (as in decoder.weight = encoder.weight), or give "
                    f"{other_name} a copy (.data = .data.clone()); then wrap the model again"
                )
        self._compared = own | {id(tensor) for _, tensor in named}

    def check_hooks(self, layers: Iterable[LayerWeights], parameters: Iterable[torch.Tensor]) -> None:
        """Raise `ConfigError` for a trained parameter with a hook that can't be run when its gradient is there.

        ``parameters`` are all that the layers have.
        """
        if not any(parameter._post_accumulate_grad_hooks for parameter in parameters):
            return
        for slot in (slot for weights in layers for slot in weights.slots if slot.is_parameter):
            parameter = slot.current
            hooks = None if parameter is None else parameter._post_accumulate_grad_hooks
            is_told = any(not isinstance(hook, GradientCount) for hook in (hooks or {}).values())
            if parameter is not None and is_told and parameter.requires_grad:
                names = () if self._model is None else self._model.named_parameters()
                where = next((name for name, other in names if other is parameter), slot.attributes[0].name)
                raise ConfigError(
                    f"{where} has a hook of register_post_accumulate_grad_hook, which would not run: gradients are "
                    "added to .grad as they come from the devices, and not by autograd. Remove the hook; an "
                    "optimizer in it goes into model.step(lambda: (optimizer.step(), optimizer.zero_grad())), and "
                    "hooks of register_hook run, once per microbatch"
                )

    def _register(self, tensors: Sequence[torch.Tensor], whole_model: bool) -> None:
        """Pin a layer's tensors where they lie, and the whole model's."""
        if self.registrar is not None:
            model = self._model if whole_model else None
            whole = () if model is None else (*model.parameters(), *model.buffers())
            self.registrar.register(part for tensor in (*whole, *tensors) for part in stored_tensors(tensor))


class _LayerPacker:
    """A context in which layers are packed, large ones in threads; at its end all are. Raises what packing raises."""

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
        self._allocate = allocate
        self._threads = ThreadPoolExecutor(NUM_PACKED_AT_ONCE, "roundpipe-packing")
        self._running: deque[tuple[int, Future[None]]] = deque()
        """With the bytes of each."""

    def __enter__(self) -> _LayerPacker:
        return self

    def add(self, weights: LayerWeights) -> None:
        """Pack a layer, now or before the end."""
        if len(self._running) == NUM_PACKED_AT_ONCE:
            self._running.popleft()[1].result()
        needed = {f"weights of {weights.name}": weights.packed_bytes}
        if running_bytes := sum(num_bytes for num_bytes, _ in self._running):
            needed["weights that are packed meanwhile"] = running_bytes
        HOST_LIMIT.check(needed)
        if weights.packed_bytes < PACKED_IN_THREAD_BYTES:
            self._pack(weights)
        else:
            self._running.append((weights.packed_bytes, self._threads.submit(self._pack, weights)))

    def _pack(self, weights: LayerWeights) -> None:
        weights.pack(self._allocate(weights.packed_bytes))

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown()
        while self._running:
            self._running.popleft()[1].result()
