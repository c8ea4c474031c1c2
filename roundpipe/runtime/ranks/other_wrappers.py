"""Refuses models that torch's own parallelism averages gradients of, or spreads over ranks.

It averages in a backward of its own. A wrapped model's gradients come to its parameters without one, so that each rank
would train alone, without a word.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from roundpipe.core.errors import ConfigError

_INSTEAD = (
    "its gradients would not be averaged, and each rank would train alone. Wrap the model itself on every rank, "
    "compile(model, process_group='world'), and leave out DistributedDataParallel. A library that adds it where there "
    "are several processes, as Accelerate, Fabric and Lightning do, must get one process, or its data loaders alone"
)


def refuse_parallelism_inside(model: nn.Module) -> None:
    """Raise if a model, or a module of it, is a `DistributedDataParallel` of several ranks, or has parts of weights."""
    imported: Any = sys.modules.get("torch.distributed.tensor")  # without it there is none
    for name, parameter in model.named_parameters() if imported is not None else ():
        if isinstance(parameter, imported.DTensor):
            raise ConfigError(
                f"{name} is a DTensor, of which each rank has a part, as fully_shard and parallelize_module make them; "
                "weights are streamed whole. Wrap the model without these: devices hold a few layers at a time, and "
                "process_group='world' with shard_optimizer=True spreads the optimizer's states over ranks"
            )
    for name, module in model.named_modules():
        if _averages(module):
            place = f"its module {name} is" if name else "it is"
            raise ConfigError(f"{place} a DistributedDataParallel, whose backward never runs: {_INSTEAD}")


def refuse_averaging_around(name: str) -> None:
    """Raise if a `DistributedDataParallel` of several ranks calls the model."""
    if dist.is_available() and _averages(DistributedDataParallel._get_active_ddp_module()):
        raise ConfigError(f"{name} is inside a DistributedDataParallel, which sees none of its backward: {_INSTEAD}")


def _averages(module: Any) -> bool:
    return isinstance(module, DistributedDataParallel) and bool(module.process_group.size() > 1)
