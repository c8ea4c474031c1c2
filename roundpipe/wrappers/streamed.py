"""A model's own Python on a device: ``generate``, and whatever else is no call of ``forward``.

It runs in the caller's thread, as eager code of a replica of the model, whose weights come to the device when they are
read (`OnDemandWeights`). So every model's code is right as it is; its caches stay on the device, where it makes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.compiled_modules import nothing_compiled
from roundpipe.core.contexts import contextmanager
from roundpipe.core.errors import DeviceMemoryError, release_frames, said
from roundpipe.core.module_tree import Structure, weight_bytes_of
from roundpipe.runtime.device.backend import OUT_OF_MEMORY, Backend, Lane
from roundpipe.runtime.engine.engine import Engine
from roundpipe.runtime.weights.download import write_buffer
from roundpipe.runtime.weights.host_weights import HostWeights
from roundpipe.runtime.weights.on_demand import OnDemandWeights, as_parameter, groups_of
from roundpipe.runtime.weights.replica import Replica
from roundpipe.runtime.weights.slots import attributes_of
from roundpipe.runtime.weights.weight_tables import AbsentWeight

SMALL_BYTES = 1 << 16
"""Buffers up to this size stay on the device, where the code may write them."""
GROUPS, GROUPS_IN_BUDGET = 64, 24
"""At least so many groups have the model's weights; at least so many fit the device."""


class StreamedModel:
    """A model whose code runs on one of an engine's devices."""

    def __init__(self, model: nn.Module, name: str, engine: Engine, host: HostWeights) -> None:
        self._engine = engine
        engine.release_memory()
        self._model = model
        self._structure = Structure(model.modules())
        self._backend = engine.backends[0]
        budget_bytes = self._backend.take_budget()
        target_bytes = weight_bytes_of(model) // GROUPS
        if budget_bytes is not None:
            target_bytes = min(target_bytes, budget_bytes // GROUPS_IN_BUDGET)
        groups, self._small = groups_of(model, target_bytes)
        names = [f"{name} weights {index}" for index in range(len(groups))]
        with torch.inference_mode(False):
            self._layers = engine.lay_out(self, names, groups, host)
        self._weights = OnDemandWeights(self._backend, self._layers, budget_bytes)

    def is_of(self, model: nn.Module) -> bool:
        """Whether this is for a model as it is now."""
        is_same = model is self._model and self._structure.changed() is None
        return is_same and all(weights.is_current() for weights in self._layers)

    def close(self) -> None:
        """Give back the memory of weights that stay between uses."""
        self._weights.close()

    @contextmanager
    def open(self, is_one_prompt: bool = False) -> Iterator[nn.Module]:
        """The replica; inside, the device is current, and no gradients are recorded.

        ``is_one_prompt`` is whether all that follows a prompt takes less memory than it does.

        Raises:
            DeviceMemoryError: what the code makes does not fit beside the largest of its weights.
        """
        backend, weights = self._backend, self._weights
        self._engine.release_memory(weights.held_bytes)  # what stays there between rounds
        replica = Replica(self._model, backend.device)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_with_advice())
            stack.callback(backend.synchronize)
            backend.follow_caller()  # whose stream may be making the arguments
            closing = stack.enter_context(contextlib.ExitStack())
            closing.callback(weights.close)
            weights.begin(backend.take_budget(), is_one_prompt)
            stack.enter_context(torch.no_grad())
            stack.enter_context(nothing_compiled())
            stack.enter_context(backend.activate())
            with torch.inference_mode(False), torch.no_grad():  # versions tell what the code writes
                buffers = self._bind(replica, weights, stack)
            with backend.activations([]):
                yield replica.module
            weights.let_go()
            for slot, buffer in weights.written_buffers():
                for attribute in slot.attributes:
                    write_buffer(attribute, fetch(buffer, backend))
            self._hand_back(replica, buffers)
            weights.rest()
            closing.pop_all()

    def _bind(
        self, replica: Replica, weights: OnDemandWeights, stack: contextlib.ExitStack
    ) -> dict[int, tuple[torch.Tensor, int]]:
        """Point the replica at weights on demand and at small ones on the device; these, each with its version."""
        backend, stand_ins = self._backend, dict[int, torch.Tensor]()
        for attribute in attributes_of(self._model):
            tensor = attribute.get()
            if tensor is None or id(tensor) in stand_ins or isinstance(attribute.module, torch.jit.ScriptModule):
                continue
            is_small_buffer = attribute.table == "_buffers" and tensor.nbytes <= SMALL_BYTES
            if is_small_buffer or attribute.module in self._small:
                stack.enter_context(backend.hold(tensor.nbytes, "weights"))
                stand_ins[id(tensor)] = as_parameter(backend.upload(tensor), tensor)
            else:
                stand_ins[id(tensor)] = weights.stand_in(tensor)
        backend.wait(Lane.COMPUTE, backend.record(Lane.UPLOAD))
        backend.take_uploads()  # kept by the replica
        replica.refresh(stand_ins)
        for module in self._model.modules():
            twin = replica.twin(module)
            if isinstance(twin, torch.jit.ScriptModule):
                twin.to(backend.device)
                continue
            twin.__dict__["_parameters"] = weights.table(module._parameters, stand_ins)
            twin.__dict__["_buffers"] = weights.table(module._buffers, stand_ins)
        return {key: (tensor, tensor._version) for key, tensor in stand_ins.items()}

    def _hand_back(self, replica: Replica, bound: Mapping[int, tuple[torch.Tensor, int]]) -> None:
        """Give the model what the code has written: buffers and plain attributes."""
        for module, name, value in replica.changed_attributes():
            module.__dict__[name] = value
        for attribute in attributes_of(self._model):
            if attribute.table == "_buffers" and not isinstance(attribute.module, torch.jit.ScriptModule):
                original = attribute.get()
                value = dict.get(replica.twin(attribute.module)._buffers, attribute.name)
                tensor, version = bound.get(id(original), (None, -1))
                has_statistics = attribute.module.training and hasattr(attribute.module, "track_running_stats")
                if isinstance(value, AbsentWeight):
                    continue
                if value is not tensor or (tensor is not None and tensor._version != version) or has_statistics:
                    write_buffer(attribute, value if value is None else fetch(value, self._backend))

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output_device: torch.device) -> Any:
        """A method of the model, with tensors from anywhere; those of its result go to ``output_device``."""
        backend = self._backend
        with self.open(is_one_prompt=True) as model:
            backend.wait(Lane.UPLOAD, backend.record(Lane.COMPUTE))
            args, kwargs = move((args, kwargs), backend.upload)
            backend.record(Lane.UPLOAD).synchronize()  # the code may hand them on, such as to another wrapper
            kept = backend.take_uploads()
            result = getattr(model, name)(*args, **kwargs)
            if output_device.type == "cpu":
                result = move(result, lambda tensor: fetch(tensor, backend))
            else:
                result = move(result, lambda tensor: tensor.to(output_device))
            backend.synchronize()
            del kept
        return result


@contextmanager
def _with_advice() -> Iterator[None]:
    """Say what helps where a device runs out of memory and there is no smaller plan."""
    try:
        yield
    except OUT_OF_MEMORY as error:
        reason = said(error).partition("\n")[0].rstrip(".")
        release_frames(error)
        raise DeviceMemoryError(
            f"{reason}. The model's own code runs as it is, on one device: give generate() fewer or shorter prompts, "
            "fewer beams or fewer new tokens, have cache_implementation='offloaded' keep keys and values on the host, "
            "or use a device with more memory"
        ) from error


def fetch(tensor: torch.Tensor, backend: Backend) -> torch.Tensor:
    """A copy of a device's tensor in host memory."""
    if tensor.device != backend.device:
        return tensor
    backend.wait(Lane.DOWNLOAD, backend.record(Lane.COMPUTE))
    copy = backend.download(tensor)
    backend.record(Lane.DOWNLOAD).synchronize()
    return copy


def move(value: Any, function: Any) -> Any:
    """A value with ``function`` applied to the tensors in its tuples, lists, dicts and dataclasses, and in no other
    objects, such as caches, which live where they were made.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (tuple, list, Mapping)) or (dataclasses.is_dataclass(value) and trees.tensors(value)):
        below = [child for _, child in trees.children(value) or ()]
        moved = [move(child, function) for child in below]
        return value if all(a is b for a, b in zip(below, moved, strict=True)) else trees.with_children(value, moved)
    return value
