"""`pipeline_stage`: a stage of a model on this rank, for the schedules of `torch.distributed.pipelining`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from roundpipe.core.checks import check_count, check_type, items_of
from roundpipe.core.errors import ConfigError
from roundpipe.distributed.module import StageModule
from roundpipe.distributed.partition import partition_stages
from roundpipe.distributed.weights import Weights, materialise
from roundpipe.fx.passes.cuts import Balance
from roundpipe.runtime.device.backend import Device

_DRY_RUN = "_compute_outputs"
"""What torch calls to find out a stage's shapes: private, and the only way to know that it is no real run."""


def pipeline_stage(
    model: nn.Module | Sequence[StageModule],
    stage_index: int,
    num_stages: int,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    example_args: tuple[Any, ...] = (),
    example_kwargs: dict[str, Any] | None = None,
    balance: Balance = "time",
    weights: Weights | None = None,
) -> ModelStage:
    """A stage of a model, with its own copy of its weights on its device.

    On the rank of the first stage, a schedule's ``step`` takes the model's arguments; on that of the last one, the
    target. The arguments of all microbatches of a schedule have the same shapes; for other shapes, make another
    schedule of the same stages.

    Args:
        model: see `partition_stages`; or what that returned, so that a rank with several stages traces once.
        stage_index: which of the stages, from 0.
        num_stages: of all ranks together.
        device: where it runs; None: the CPU.
        group: the ranks of the pipeline; None: all.
        example_args: see `partition_stages`, likewise ``example_kwargs`` and ``balance``.
        example_kwargs: see there.
        balance: see there.
        weights: values by the model's keys, or a folder of safetensors files that have them. None: the model's own.
            Of a model on ``meta``, so only this stage's weights ever come into memory.

    Raises:
        ConfigError: an argument can't be used, ``weights`` lacks a key, or a weight has no values.
        CheckpointError: the files of ``weights`` can't be read.
        TraceError, PartitionError: see `partition_stages`.
    """
    if not hasattr(PipelineStage, _DRY_RUN):
        raise ConfigError(f"torch {torch.__version__} sends no integers between stages; install torch 2.13 or newer")
    check_count("num_stages", num_stages, "a number of at least 1")
    check_count("stage_index", stage_index, f"one of the stages, 0 to {num_stages - 1}", 0, num_stages - 1)
    place = torch.device(Device("cpu" if device is None else device).device)
    check_type("group", group, dist.ProcessGroup | None, "a group of torch.distributed, or None for all ranks")
    if isinstance(model, nn.Module):
        stages: Sequence[StageModule] = partition_stages(
            model, num_stages, example_args=example_args, example_kwargs=example_kwargs, balance=balance
        )
    else:
        stages = items_of("model", model, "an nn.Module, or what partition_stages returned")
        for stage in stages:
            check_type("an item of model", stage, StageModule, "what partition_stages returned")
    if len(stages) != num_stages:
        raise ConfigError(f"num_stages={num_stages}, and the model was cut into {len(stages)} stages")
    module = materialise(stages[stage_index], place, weights)
    return ModelStage(module, stage_index, num_stages, place, group=group, dw_builder=_whole_backward)


class ModelStage(PipelineStage):
    """A ``PipelineStage`` of torch whose run without data, by which torch finds out shapes, leaves no trace."""

    submod: StageModule

    def _compute_outputs(self, *args: Any, module: nn.Module, **kwargs: Any) -> Any:
        if not self.is_first:
            for arg in args:
                arg.detach().zero_()  # what is in memory may be no index
        tables = [submodule._buffers for submodule in self.submod.modules()]
        originals = [dict(table) for table in tables]
        clones = {buffer: buffer.clone() for buffer in self.submod.buffers()}
        try:
            for table in tables:  # not put back in place: a backward comes, for which they may be kept
                table.update((name, clones[buffer]) for name, buffer in table.items() if buffer is not None)
            return super()._compute_outputs(*args, module=module, **kwargs)
        finally:
            for table, original in zip(tables, originals, strict=True):
                table.update(original)


def _whole_backward() -> Callable[[], None]:
    """The second half of a backward whose first half was all of it, in schedules that want two.

    Torch's own split loses the gradients of weights from which no path leads to an input, and goes twice through what
    several weights share.
    """
    return lambda: None
