"""The optimizer's side of a forecast: the memory that it takes, of the host or of a device, and its traffic."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from roundpipe.core.storages import bytes_of
from roundpipe.reports.memory import HostMemory
from roundpipe.runtime.optimizer.temporaries import bytes_by_default
from roundpipe.tools.target import Target

OptimizerName = Literal["adamw", "sgd"]

STATES = {"adamw": 2, "sgd": 0}
"""Optimizer states per trained parameter, as large as its copy."""
_COUNT_BYTES = {"adamw": 4, "sgd": 0}
"""Of the tensor that counts the updates of each parameter."""
_TEMPORARIES = {"adamw": 1, "sgd": 0}
"""Tensors that an update makes for each parameter, unless it is a fused one."""
COPY_ACCESSES = {"adamw": 8, "sgd": 3}
"""Reads and writes of values of the optimizer's dtype in one update of one parameter: copy, gradient, states."""


def conversion_bytes(optim_itemsize: float, model_itemsize: float) -> tuple[float, float]:
    """What a parameter's weight takes on its way into the model, and its gradient on its way to the optimizer.

    Read in one dtype, written in the other; a gradient of the optimizer's own dtype is handed over as it is.
    """
    both = optim_itemsize + model_itemsize
    return both, both if model_itemsize != optim_itemsize else 0


@dataclass(frozen=True, slots=True)
class ExpectedOptimizer:
    """One of torch's, stepped by ``step`` beside the next round, as plans ask about it before anything has run."""

    name: OptimizerName
    dtype: torch.dtype
    """Of the copies."""
    seconds: tuple[float, float] | None = None
    """Of an update on the host, its hand-over among them, and of a step that streams."""
    homes: Mapping[int, int] = field(default_factory=dict)
    """The parameters that live on a device, by their identities, and the worker whose it is."""
    is_unasked: bool = False
    may_stay_unasked: bool = True
    is_over: bool = False
    is_async: bool = True
    adds_up: bool = False

    def suits(self) -> bool:
        return True

    def foresees(self) -> bool:
        return False

    @property
    def has_twins(self) -> bool:
        return bool(self.homes)

    def rest(self) -> None:
        """Nothing is under way."""

    def on_host_s(self) -> tuple[float, float] | None:
        return self.seconds

    def end_measuring(self) -> None:
        """Nothing was measured."""

    def device_bytes(self, parameters: Collection[torch.Tensor]) -> int:
        """Of copies, gradients and states, and of what an update makes besides."""
        sizes_bytes = [parameter.numel() * self.dtype.itemsize for parameter in parameters]
        lasting_bytes = sum(sizes_bytes) * (2 + STATES[self.name]) + len(sizes_bytes) * _COUNT_BYTES[self.name]
        return lasting_bytes + bytes_by_default(_TEMPORARIES[self.name], sizes_bytes, self.dtype.itemsize)

    def host_memory(
        self, target: Target, carried_bytes: int, there: Collection[torch.Tensor] = frozenset()
    ) -> HostMemory:
        """What training takes of the host while the parameters ``there`` live on a device."""
        parameters = {id(parameter): parameter for parameter in target.model.parameters()}.values()
        buffers = {id(buffer): buffer for buffer in target.model.buffers()}.values()
        trained = [parameter for parameter in parameters if parameter.requires_grad and parameter not in there]
        copies_bytes = sum(parameter.numel() for parameter in trained) * self.dtype.itemsize
        return HostMemory(
            weights=sum(map(bytes_of, (*parameters, *buffers))),
            gradients=sum(parameter.nbytes for parameter in trained),
            optimizer_copies=copies_bytes,
            optimizer_gradients=copies_bytes,
            optimizer_states=copies_bytes * STATES[self.name],
            carried=carried_bytes,
        )
