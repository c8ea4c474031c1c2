"""A layer's weights in host memory: laid out, packed into one buffer, pinned.

A layer's parameters and buffers lie in one byte buffer, each aligned to 64 bytes, pinned once; the user's parameter
objects become views of it, so an upload is one copy. What can't be moved (tied to another layer's buffer, a tensor
subclass, ``pin_model="off"``) stays where it is and is copied by itself; so does all but the small with
``pin_model="register"``, which is pinned where it lies.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from roundpipe.core.aliasing import overlapping
from roundpipe.core.errors import ConfigError
from roundpipe.core.module_tree import Structure, changed_in_a_round
from roundpipe.effects.user_code import codes_of, names_in
from roundpipe.runtime.device.backend import Backend, Lane
from roundpipe.runtime.device.host_memory import is_plain
from roundpipe.runtime.device.pinning import Registrar

logger = logging.getLogger(__name__)

ALIGNMENT = 64
_UNSEEN_WRITES = frozenset({"data", "batch_norm", "instance_norm"})
"""What Python code calls or reads to write a tensor without a change of its version."""
PinMode = Literal["alloc", "register", "off"]


def aligned(num_bytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's strides if its memory is dense, else those of a contiguous copy."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return torch.empty(tensor.shape, device="meta").stride()
            expected *= size
    return tensor.stride()


@dataclass(slots=True)
class Entry:
    """One parameter or buffer of a layer and its place in the layer's layout."""

    places: list[tuple[nn.Module, str]]
    """Modules of the original tree that hold it, with the attribute's name."""
    is_parameter: bool
    offset: int
    num_bytes: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    loose: bool
    """A tensor subclass: not laid out, moved as a whole."""

    @property
    def fits(self) -> bool:
        """Whether the original module still has a tensor there that goes into this place."""
        module, name = self.places[0]
        now = _held(module._parameters if self.is_parameter else module._buffers, name)
        return now is not None and now.shape == self.shape and now.dtype == self.dtype

    @property
    def is_tied_as_laid_out(self) -> bool:
        """Whether all modules that held it still hold one and the same tensor."""
        now = self.found
        return all(
            _held(module._parameters if self.is_parameter else module._buffers, name) is now
            for module, name in self.places[1:]
        )

    @property
    def found(self) -> torch.Tensor | None:
        """What the original module has there now."""
        module, name = self.places[0]
        return _held(module._parameters if self.is_parameter else module._buffers, name)

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor as the original module has it now.

        Raises:
            ConfigError: it has none.
        """
        found = self.found
        if found is None:
            raise ConfigError(changed_in_a_round(*self.places[0]))
        return found

    def view(self, region: torch.Tensor) -> torch.Tensor:
        """The entry's part of a byte region, with a version counter of its own."""
        flat = region[self.offset : self.offset + self.num_bytes].view(self.dtype)
        return torch.as_strided(flat, self.shape, self.strides, flat.storage_offset()).data

    def own_view(self, region: torch.Tensor) -> torch.Tensor:
        """The same, with a storage of its own too: what saves or copies a tensor takes the whole storage."""
        if not self.num_bytes:
            return self.view(region)
        part = region[self.offset : self.offset + self.num_bytes]
        block = (ctypes.c_ubyte * self.num_bytes).from_address(part.data_ptr())
        block.memory = part  # type: ignore[attr-defined]  # keeps it
        return torch.as_strided(torch.frombuffer(block, dtype=torch.uint8).view(self.dtype), self.shape, self.strides)


def _collect(layer: nn.Module) -> list[tuple[torch.Tensor, bool, list[tuple[nn.Module, str]]]]:
    found: dict[int, tuple[torch.Tensor, bool, list[tuple[nn.Module, str]]]] = {}
    for module in layer.modules():
        for is_parameter, held in ((True, module._parameters), (False, module._buffers)):
            for name, tensor in held.items():
                if tensor is not None:
                    found.setdefault(id(tensor), (tensor, is_parameter, []))[2].append((module, name))
    return list(found.values())


def _held(held: Any, name: str) -> torch.Tensor | None:
    """What a module has under a name; the dicts of script modules can do no more than this."""
    found: torch.Tensor | None = held[name] if name in held else None
    return found


def _writes_data(kind: type) -> bool:
    """Whether a class has Python that may write tensors without a change of their version."""
    return any(not _UNSEEN_WRITES.isdisjoint(names_in(code)) for _, code in codes_of(kind))


class LayerWeights:
    """One layer's weights on the host.

    Args:
        name: the layer's name, for messages.
        layer: its module.
        num_packed_bytes: filled by `HostWeights`.
    """

    def __init__(self, name: str, layer: nn.Module) -> None:
        self.name = name
        self.layer = layer
        self.entries: list[Entry] = []
        self.empty: list[tuple[nn.Module, str]] = []
        """Buffers that are None."""
        self._absent: list[tuple[nn.Module, str]] = []
        """Parameters that are None."""
        self._structure = Structure(())
        """All modules as they were laid out."""
        self._tied: list[Entry] = []
        """Those in several places."""
        self.packed: torch.Tensor | None = None
        self.num_packed = 0
        self.num_bytes = 0
        self.writes_buffers: dict[bool, bool] = {}
        """Whether a forward writes buffers, by whether any module of the layer is in training mode; learned
        by comparing values, since some operators (batch_norm) write without a change of version."""
        self.leaves_traces: dict[bool, bool] = {}
        """Whether a forward leaves other buffers or attributes behind, by the same; learned at each release."""
        self.draws_python: dict[bool, bool] = {}
        """Whether a forward draws from Python's or NumPy's generators, by the same; learned at the first call."""
        self._writers: list[nn.Module] | None = None

    @property
    def may_write_unseen(self) -> bool:
        """Whether a forward may write buffers without a change of version on a way that it has not gone so far."""
        if self._writers is None:
            modules = self.layer.modules()
            self._writers = [one for one in modules if hasattr(one, "track_running_stats") or _writes_data(type(one))]
        return any(one.training or not hasattr(one, "track_running_stats") for one in self._writers)

    def lay_out(self, may_pack: Callable[[torch.Tensor], bool]) -> None:
        """Place every tensor; those that may be packed come first."""
        found = _collect(self.layer)
        modules = list(self.layer.modules())
        self._structure = Structure(modules)
        self.empty = [(one, name) for one in modules for name, held in one._buffers.items() if held is None]
        self._absent = [(one, name) for one in modules for name, held in one._parameters.items() if held is None]
        ordered = [one for one in found if may_pack(one[0])] + [one for one in found if not may_pack(one[0])]
        self.num_packed = sum(1 for one in found if may_pack(one[0]))
        offset = 0
        for tensor, is_parameter, places in ordered:
            if tensor.is_meta:
                raise ConfigError(
                    f"{self.name}.{places[0][1]} is on the meta device, so it has no values to train or run with; "
                    "load the model's weights (model.to_empty, from_pretrained) before the first call"
                )
            loose = not is_plain(tensor)
            num_bytes = 0 if loose else tensor.numel() * tensor.element_size()
            strides = tensor.stride() if loose else _dense_strides(tensor)
            entry = Entry(places, is_parameter, offset, num_bytes, tensor.shape, strides, tensor.dtype, loose)
            self.entries.append(entry)
            offset += aligned(num_bytes)
        self.num_bytes = offset
        self._tied = [entry for entry in self.entries if len(entry.places) > 1]

    def check_structure(self) -> None:
        """Raise `ConfigError` if the layer has other modules, or parameters under other names, than as laid out."""
        changed = self._structure.changed()
        if changed is not None:
            raise ConfigError(changed_in_a_round(changed))
        gone = [entry.places[0] for entry in self.entries if entry.is_parameter and entry.found is None]
        came = [(one, name) for one, name in self._absent if _held(one._parameters, name) is not None]
        for module, name in (*gone, *came):
            raise ConfigError(changed_in_a_round(module, name))

    def is_current(self) -> bool:
        """Whether the layer still is as it was laid out: the same modules of the same classes, which hold tensors of
        the same shapes and dtypes under the same names, tied alike. Values and memory may differ.
        """
        return (
            self._structure.changed() is None
            and all(name in one._buffers and one._buffers[name] is None for one, name in self.empty)
            and all(name in one._parameters and one._parameters[name] is None for one, name in self._absent)
            and all(entry.fits for entry in self.entries)
            and all(entry.is_tied_as_laid_out for entry in self._tied)
        )

    def pack(self, buffer: torch.Tensor) -> None:
        """Move the packed tensors into ``buffer`` and make the user's objects views of it."""
        with torch.no_grad():
            for entry in self.entries[: self.num_packed]:
                tensor = entry.tensor
                view = entry.own_view(buffer)
                view.copy_(tensor)
                tensor.data = view
        self.packed = buffer

    def is_packed(self) -> bool:
        """Whether the user's tensors still are the views that `pack` made."""
        if self.packed is None:
            return False
        base = self.packed.data_ptr()
        return all(
            entry.fits and (entry.tensor.data_ptr() == base + entry.offset or not entry.num_bytes)
            for entry in self.entries[: self.num_packed]
        )

    @property
    def _is_training(self) -> bool:
        return any(module.training for module in self.layer.modules())

    def may_leave_traces(self) -> bool:
        """Whether a forward in the present mode leaves buffers or attributes changed, as far as is known."""
        return self.leaves_traces.get(self._is_training, True)

    def read_again(self) -> Iterator[tuple[str, torch.Tensor, Entry]]:
        """Names and tensors that a recomputation finds as they are by then, and their places.

        Those are not the buffers of a layer that writes them: each of its forwards keeps what it saw.
        """
        keeps_buffers = self.writes_buffers.get(self._is_training, True)
        names = {id(tensor): name for name, tensor in (*self.layer.named_buffers(), *self.layer.named_parameters())}
        for entry in self.entries:
            tensor = entry.found
            if tensor is not None and is_plain(tensor) and not (keeps_buffers and not entry.is_parameter):
                yield names[id(tensor)], tensor, entry

    def parameters(self) -> list[torch.Tensor]:
        """The layer's parameters as the original modules have them now."""
        return [entry.tensor for entry in self.entries if entry.is_parameter and entry.fits]

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed prefix of the layout."""
        if self.num_packed == 0:
            return 0
        last = self.entries[self.num_packed - 1]
        return last.offset + last.num_bytes

    def upload(
        self, backend: Backend, region: torch.Tensor
    ) -> tuple[dict[int, torch.Tensor | None], list[torch.Tensor]]:
        """Copy all weights into a device region.

        Returns:
            what does not lie in the region, by entry index (None: gone since), and all copies made.
        """
        start = 0
        copies = []
        if self.is_packed():
            assert self.packed is not None
            source, target = self.packed[: self.packed_bytes], region[: self.packed_bytes]
            copies.append(backend.upload(source, target, Lane.WEIGHTS))
            start = self.num_packed
        loose: dict[int, torch.Tensor | None] = {}
        for index in range(start, len(self.entries)):
            entry = self.entries[index]
            if entry.loose or not entry.fits:  # a buffer may get another shape while a round runs
                now = entry.tensor if entry.is_parameter else entry.found
                loose[index] = None if now is None else backend.upload(now, lane=Lane.WEIGHTS)
                copies += [tensor for tensor in (loose[index],) if tensor is not None]
            elif entry.num_bytes:
                copies.append(backend.upload(entry.tensor.detach(), entry.view(region), Lane.WEIGHTS))
        return loose, copies


class HostWeights:
    """All weights on the host: packs layers once, also when a later trace cuts them again.

    Args:
        pin: how to pin; see `roundpipe.RoundPipe`.
        allocate: makes a (pinned) host byte buffer.
        registrar: pins memory where it lies; for ``"register"``.
        model: all that will ever be asked for; with a registrar, its tensors are pinned at the first layer asked for,
            together, since some may share pages.
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
        self._to_register = True
        self._compared: set[int] = set()
        """Parameters that are known not to share memory; empty: it is to be looked at all of them again."""
        self._said_where = False
        self.num_laid_out = 0
        """How many layers were laid out so far, which may have moved their weights."""
        self._packed: dict[tuple[int, ...], torch.Tensor] = {}
        self._owner: dict[int, tuple[int, ...]] = {}
        self._layers: dict[int, LayerWeights] = {}

    def is_prepared(self, layer: nn.Module) -> bool:
        """Whether `prepare` would change nothing."""
        known = self._layers.get(id(layer))
        pinned = self.registrar is None or not self.registrar.has_lost
        return pinned and known is not None and known.layer is layer and known.is_current()

    def prepare(self, name: str, layer: nn.Module) -> None:
        """Pack a layer at first sight, and again if its structure, or shapes or dtypes of its tensors changed since."""
        known = self._layers.get(id(layer))
        if known is not None and known.layer is layer and not known.is_current():
            self._compared.clear()
            self._unpack(self._layers.pop(id(layer)))
        if self.registrar is not None and self.registrar.has_lost:
            self._to_register = True
            self._register(())
        with torch.inference_mode(False):  # also if the first call is for inference, the weights can be trained later
            self.layer(name, layer)

    def forget(self, layer: nn.Module) -> None:
        """Drop what is known of a layer, and its buffer if no other layer known here has the same tensors."""
        weights = self._layers.pop(id(layer), None)
        if weights is not None and all(other.packed is not weights.packed for other in self._layers.values()):
            self._unpack(weights)

    def _unpack(self, weights: LayerWeights) -> None:
        for key in [key for key, buffer in self._packed.items() if buffer is weights.packed]:
            del self._packed[key]
            self._owner = {one: owner for one, owner in self._owner.items() if owner != key}

    def layer(self, name: str, layer: nn.Module) -> LayerWeights:
        """The host side of a layer, packed at first sight."""
        known = self._layers.get(id(layer))
        if known is not None and known.layer is layer:
            return known
        self._check_shared(layer)
        weights = LayerWeights(name, layer)
        self.num_laid_out += 1
        tensors = [tensor for tensor, *_ in _collect(layer)]
        key = tuple(id(tensor) for tensor in tensors)
        ids = set(key)

        def may_pack(tensor: torch.Tensor) -> bool:
            if self._pin == "off" or not is_plain(tensor):
                return False
            if self.registrar is not None and self.registrar.suits(tensor):
                return False
            owner = self._owner.get(id(tensor))
            return owner is None or owner == key

        if not ids:
            weights.lay_out(may_pack)
        elif key in self._packed:
            weights.lay_out(may_pack)
            weights.packed = self._packed[key]
        else:
            for tensor in tensors:
                if not tensor.is_meta and tensor.device.type != "cpu":
                    logger.warning("%s: moving weights from %s to host memory", name, tensor.device)
                    tensor.data = tensor.data.cpu()
            self._register(tensors)
            weights.lay_out(may_pack)
            if weights.num_packed:
                buffer = self._allocate(weights.packed_bytes)
                self._say_where(buffer)
                weights.pack(buffer)
                self._packed[key] = buffer
                for entry in weights.entries[: weights.num_packed]:
                    self._owner[id(entry.tensor)] = key
        self._layers[id(layer)] = weights
        return weights

    def _check_shared(self, layer: nn.Module) -> None:
        """Raise `ConfigError` if different parameters, or a parameter and a buffer, have memory in common.

        A write into one of them, such as an update's, would change the other, and here each gets memory of its own.
        """
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
            (one, tensor), (other, second) = named[i], named[j]
            if isinstance(tensor, nn.Parameter):
                kind = "parameters" if isinstance(second, nn.Parameter) else "a parameter and a buffer"
                raise ConfigError(
                    f"{one} and {other} are {kind} in the same memory, as .data or a view of the one gives the other; "
                    "they would get memory of their own, and changes of the one would not reach the other. Tie "
                    f"parameters by assigning the same one (as in decoder.weight = encoder.weight), or give {other} a "
                    "copy (.data = .data.clone()); then wrap the model again"
                )
        self._compared = own | {id(tensor) for _, tensor in named}

    def check_hooks(self, layers: Iterable[LayerWeights]) -> None:
        """Raise `ConfigError` for a trained parameter with a hook that can't be run when its gradient is there."""
        for weights in layers:
            for entry in weights.entries:
                tensor = entry.found if entry.is_parameter else None
                if tensor is not None and tensor._post_accumulate_grad_hooks and tensor.requires_grad:
                    names = (self._model or weights.layer).named_parameters()
                    where = next((name for name, one in names if one is tensor), entry.places[0][1])
                    raise ConfigError(
                        f"{where} has a hook of register_post_accumulate_grad_hook, which would not run: gradients are "
                        "added to .grad as they come from the devices, and not by autograd. Remove the hook; an "
                        "optimizer in it goes into model.step(lambda: (optimizer.step(), optimizer.zero_grad())), and "
                        "hooks of register_hook run, once per microbatch"
                    )

    def _say_where(self, buffer: torch.Tensor) -> None:
        if not self._said_where:
            self._said_where = True
            kind = "pinned" if buffer.is_pinned() else "unpinned"
            logger.info("pin_model=%r: weights are packed into %s host memory", self._pin, kind)

    def _register(self, tensors: Sequence[torch.Tensor]) -> None:
        """Pin a layer's tensors where they lie, and the whole model's, if that is due."""
        if self.registrar is None:
            return
        is_due, self._to_register = self._to_register, False
        whole = [*self._model.parameters(), *self._model.buffers()] if is_due and self._model is not None else []
        self.registrar.register(tensor for tensor in [*whole, *tensors] if is_plain(tensor))
