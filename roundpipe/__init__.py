"""Train models that do not fit on the accelerator: compile any PyTorch module, stream it, step.

import roundpipe

model = roundpipe.compile(model)
optimizer = torch.optim.AdamW(model.optim_parameters(), lr=1e-4)
loss = model.forward_backward(
    input_kwargs=batch, loss_fn=lambda outputs, label: outputs.loss, loss_reduction="mean"
)
model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
"""

from importlib import import_module
from typing import Any

from roundpipe.api import compile, wrap_model_to_roundpipe
from roundpipe.core.errors import (
    BackwardError,
    CheckpointError,
    CheckpointNotFoundError,
    ClosedError,
    ConfigError,
    DeadlockError,
    DeviceMemoryError,
    ForkError,
    HostMemoryError,
    LossError,
    MicrobatchError,
    NonFiniteError,
    NotCopyableError,
    PartitionError,
    RankError,
    RoundPipeError,
    ScheduleError,
    SynchronizationError,
    TraceError,
)
from roundpipe.core.execute_plan import ExecutePlan, ModelExecutePlan
from roundpipe.reports.timeline import Span, Timeline
from roundpipe.runtime.config import RoundPipeRunConfig, num_microbatches
from roundpipe.runtime.device.backend import Device
from roundpipe.runtime.engine.recompute import doing_recompute, get_recompute_data, save_for_recompute
from roundpipe.runtime.microbatch.merge import RoundPipePackedData
from roundpipe.runtime.optimizer.clipping import clip_grad_norm_
from roundpipe.runtime.optimizer.grad_scaler import GradScaler
from roundpipe.runtime.optimizer.update import OptimizerCtx
from roundpipe.tools.explain import explain
from roundpipe.wrappers.auto import AutoRoundPipe
from roundpipe.wrappers.classic import Pipe, balance_by_size, balance_by_time
from roundpipe.wrappers.pipe import RoundPipe
from roundpipe.wrappers.run_report import RunReport

__version__ = "0.1.0"

__all__ = [
    "AutoRoundPipe",
    "BackwardError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "ClosedError",
    "ConfigError",
    "DeadlockError",
    "Device",
    "DeviceMemoryError",
    "ExecutePlan",
    "ForkError",
    "GradScaler",
    "HostMemoryError",
    "LossError",
    "MicrobatchError",
    "ModelExecutePlan",
    "NonFiniteError",
    "NotCopyableError",
    "OptimizerCtx",
    "PartitionError",
    "Pipe",
    "RankError",
    "RoundPipe",
    "RoundPipeError",
    "RoundPipePackedData",
    "RoundPipeRunConfig",
    "RunReport",
    "ScheduleError",
    "Span",
    "SynchronizationError",
    "Timeline",
    "TraceError",
    "balance_by_size",
    "balance_by_time",
    "clip_grad_norm_",
    "compile",
    "distributed",
    "doing_recompute",
    "explain",
    "get_recompute_data",
    "num_microbatches",
    "save_for_recompute",
    "wrap_model_to_roundpipe",
]


def __getattr__(name: str) -> Any:
    """`roundpipe.distributed` on first use: torch's pipelining takes as long to import as torch."""
    if name == "distributed":
        return import_module("roundpipe.distributed")
    raise AttributeError(f"module 'roundpipe' has no attribute {name!r}")
