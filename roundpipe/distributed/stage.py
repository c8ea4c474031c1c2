"""`pipeline_stage`: a stage of a model on this rank, for the schedules of `torch.distributed.pipelining`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from roundpipe.core.checks import check_count, check_type, items_of
from roundpipe.core.contexts import contextmanager
from roundpipe.core.errors import ConfigError
from roundpipe.distributed.module import StageModule
from roundpipe.distributed.partition import partition_stages
from roundpipe.distributed.weights import Weights, materialise
from roundpipe.fx.passes.cuts import Balance
from roundpipe.runtime.device.backend import Device

_DRY_RUN = "_compute_outputs"
"""What torch calls to find out a stage's shapes: private, and the only way to know that it is no real run."""
_EARLIER_DRY_RUN = "_shape_inference"
"""The same before torch 2.12."""


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
    return _kind()(module, stage_index, num_stages, place, group=group, dw_builder=_whole_backward)


def _kind() -> type[ModelStage]:
    """What fits this torch."""
    if hasattr(PipelineStage, _DRY_RUN):
        return ModelStage
    if hasattr(PipelineStage, _EARLIER_DRY_RUN):
        return _EarlierStage
    raise ConfigError(f"torch {torch.__version__} finds out shapes of stages in an unknown way; install torch 2.13")


class ModelStage(PipelineStage):
    """A ``PipelineStage`` of torch whose run without data, by which torch finds out shapes, leaves no trace."""

    submod: StageModule

    def _compute_outputs(self, *args: Any, module: nn.Module, **kwargs: Any) -> Any:
        if not self.is_first:
            for arg in args:
                arg.detach().zero_()  # what is in memory may be no index
        with _buffers_kept(self.submod):
            return super()._compute_outputs(*args, module=module, **kwargs)


class _EarlierStage(ModelStage):
    """The same before torch 2.12, where a stage has the shapes of one schedule only, and every tensor has a gradient.

    Torch waits for a gradient of each tensor that a stage sends, also of one that no path leads to.
    """

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        self.inputs_meta = self._outputs_meta = None  # they may be those of another schedule
        return super()._prepare_forward_infra(*args, **kwargs)

    def _shape_inference(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        module = self.submod

        def dry_run(*zeros: torch.Tensor, **kwargs: Any) -> Any:
            """With a graph, as a real run has one: strides may depend on it."""
            with torch.set_grad_enabled(self.has_backward):
                inputs = args if self.is_first else [zero.requires_grad_(self.has_backward) for zero in zeros]
                outputs = module(*inputs, **kwargs)
            return tuple(output.detach() for output in ([outputs] if isinstance(outputs, torch.Tensor) else outputs))

        self.submod = dry_run  # type: ignore[assignment]
        try:
            with _buffers_kept(module), torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                return super()._shape_inference(args, kwargs)  # type: ignore[misc]
        finally:
            self.submod = module

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Without those between stages of this rank, for which gloo waits in vain."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if self.has_backward:
            for buffer in self._received(fwd_chunk_id):
                buffer.requires_grad_()  # not so if the schedule has evaluated first
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if self.has_backward and not self.is_first:
            gradients = self.bwd_cache[bwd_chunk_id]  # of what was received, then of the keywords
            self.bwd_cache[bwd_chunk_id] = tuple(
                torch.zeros_like(buffer) if gradient is None else gradient
                for buffer, gradient in zip(self._received(bwd_chunk_id), gradients, strict=False)
            )

    def _received(self, chunk_id: int) -> list[torch.Tensor]:
        """What the stage before sends of a microbatch."""
        infos = () if self.is_first else self.args_recv_info[chunk_id]
        return [info.buffer for info in infos if info.buffer is not None]


def stages_of_this_rank(stages: ModelStage | Sequence[ModelStage]) -> list[ModelStage]:
    """The stages that an argument called ``stages`` gives: one, or several."""
    advice = "the stages of this rank, as pipeline_stage made them"
    given = [stages] if isinstance(stages, ModelStage) else items_of("stages", stages, advice)
    for each in given:
        check_type("an item of stages", each, ModelStage, advice)
    if not given:
        raise ConfigError(f"stages is empty; give {advice}")
    return given


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Runs inside write to copies of a module's buffers."""
    tables = [submodule._buffers for submodule in module.modules()]
    originals = [dict(table) for table in tables]
    clones = {buffer: buffer.clone() for buffer in module.buffers()}
    try:
        for table in tables:  # not put back in place: a backward comes, for which they may be kept
            table.update((name, clones[buffer]) for name, buffer in table.items() if buffer is not None)
        yield
    finally:
        for table, original in zip(tables, originals, strict=True):
            table.update(original)


def _whole_backward() -> Callable[[], None]:
    """The second half of a backward whose first half was all of it, in schedules that want two.

    Torch's own split loses the gradients of weights from which no path leads to an input, and goes twice through what
    several weights share.
    """
    return lambda: None
