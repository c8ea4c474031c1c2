"""Watches what leaf modules do while they run on fakes for the shapes of their outputs.

Invariant: an activation that a leaf uses is one of its arguments, and one that it makes and that is
used outside is in what it returns.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from roundpipe.core.errors import TraceCause, TraceError, TraceFacts
from roundpipe.effects.uses import GRADIENT_ATTRIBUTES
from roundpipe.fx.fakes import written_unseen
from roundpipe.fx.flat import flat_tensors
from roundpipe.fx.guards.writes import Write
from roundpipe.fx.locations import is_model_file, model_location
from roundpipe.fx.trace.builder import GraphBuilder


class LeafWatch(TorchFunctionMode):
    """Sees the calls inside a leaf.

    Args:
        inputs: the leaf's arguments.
        weights: its own parameters and buffers; those of others would not be there when it runs.
        refuse_hidden: what to raise if it uses an activation that is not among its arguments.
        refuse_foreign: what to raise if it uses a weight that is not its own.
        born_in: gets every tensor made inside.
    """

    def __init__(
        self,
        name: str,
        builder: GraphBuilder,
        inputs: Iterable[torch.Tensor],
        weights: Iterable[torch.Tensor],
        refuse_hidden: Callable[[TraceError], BaseException],
        refuse_foreign: Callable[[TraceError], BaseException],
        born_in: dict[torch.Tensor, str],
    ) -> None:
        super().__init__()
        self._name = name
        self._node_of = builder.node_of
        self._name_of = builder.world.name_of
        self._inputs = frozenset(inputs)
        self._own = self._inputs.union(weights)
        self._refuse_hidden = refuse_hidden
        self._refuse_foreign = refuse_foreign
        self._born_in = born_in
        self.runs_autograd = False
        self.written: set[int] = set()
        """Storages of what was written in place, or given other data."""
        self.writes: list[Write] = []
        self.asks_for_grad = ""
        """Where the model's own code asked whether an activation requires grad, if it did."""
        self._generators: list[weakref.ref[torch.Generator]] = []
        self.computed: set[torch.Tensor] = set()
        """Tensors made inside of arguments, parameters or buffers; what is made of sizes alone is not among them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = flat_tensors(args, kwargs)
        arguments = (*args, *kwargs.values())
        self._generators += [weakref.ref(value) for value in arguments if isinstance(value, torch.Generator)]
        self.runs_autograd |= func in (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
        for tensor in inputs:
            node = self._node_of.get(tensor)
            if node is not None and node.op != "get_attr" and not self._is_known(tensor):
                words = f"{self._name} uses {node.name}, which is not one of its arguments"
                raise self._refuse_hidden(TraceError(words, TraceCause.UNTRACED_VALUE))
        versions = [tensor._version for tensor in inputs]
        name = getattr(func, "__name__", "")
        if name == "__set__" and func.__self__.__name__ == "data":
            self.written.add(args[0].untyped_storage()._cdata)
        out = func(*args, **kwargs)
        for tensor, version in zip(inputs, versions, strict=True):
            if tensor._version != version:
                self.written.add(tensor.untyped_storage()._cdata)
                self.writes.append(Write(tensor, func, args, kwargs))
        self.written.update(tensor.untyped_storage()._cdata for tensor in written_unseen(func, args, kwargs))
        outputs = flat_tensors(out)
        for tensor in inputs if outputs else ():  # whose form it asks for may be anyone's
            if tensor in self._name_of and tensor not in self._own:
                words = f"{self._name} uses {self._name_of[tensor]}, which is not a weight of its own"
                raise self._refuse_foreign(TraceError(words))
        if not outputs and name == "__get__":
            self._note_attribute(func.__self__.__name__, args[0])
        computed = any(tensor in self.computed or self._is_known(tensor) for tensor in inputs)
        for tensor in outputs:
            if computed:
                self.computed.add(tensor)
            if tensor not in self._node_of:
                self._born_in[tensor] = self._name
        return out

    def _is_known(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is an argument or a weight."""
        return tensor in self._inputs or tensor in self._name_of

    def wrote_any(self, tensors: Iterable[torch.Tensor]) -> bool:
        return any(tensor.untyped_storage()._cdata in self.written for tensor in tensors)

    def drew_from_kept(self) -> bool:
        """Whether it drew random numbers from a generator that outlives the call."""
        return any(generator() is not None for generator in self._generators)

    def _note_attribute(self, attribute: str, tensor: torch.Tensor) -> None:
        asks = attribute in GRADIENT_ATTRIBUTES and not getattr(tensor, "_is_param", False)
        if asks and is_model_file(sys._getframe(2).f_code.co_filename):
            self.asks_for_grad = self.asks_for_grad or model_location()


@dataclass(frozen=True, slots=True)
class LeafRun:
    """What a run of a leaf on fakes showed."""

    out: Any
    random: bool
    buffers_written: bool
    written: tuple[torch.Tensor, ...]
    """Arguments that it wrote in place."""


def output_origins(out: Any, args: Any, kwargs: Any, name_of: Mapping[torch.Tensor, str]) -> tuple[str, ...]:
    """For each tensor that a call returned, the argument or weight that it is or lies in; nothing for a new one."""
    inputs: dict[Any, str] = {}
    for index, tensor in enumerate(flat_tensors(args, kwargs)):
        inputs.setdefault(tensor, f"argument {index}")
        inputs.setdefault(tensor.untyped_storage()._cdata, f"in argument {index}")
    return tuple(
        inputs.get(tensor) or name_of.get(tensor) or inputs.get(tensor.untyped_storage()._cdata, "")
        for tensor in flat_tensors(out)
    )


def left_behind(kind: type, attribute: str) -> TraceError:
    """The error for an activation in an attribute, from where a loss function may take it."""
    words = (
        f"{kind.__name__}.{attribute} is set to an activation in the forward, and would not be set when the graph runs"
    )
    return TraceError(words, TraceCause.ACTIVATION_LEFT, TraceFacts(attribute=attribute))
