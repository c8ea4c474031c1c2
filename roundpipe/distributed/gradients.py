"""Gradients of weights that several stages use."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from roundpipe.distributed.stage import ModelStage, stages_of_this_rank


def sum_tied_gradients(stages: ModelStage | Sequence[ModelStage]) -> None:
    """Give each weight that several stages use the sum of the stages' gradients, the same bits everywhere.

    Called on every rank of the pipeline, between a schedule's ``step`` and the optimizer's. So copies that start
    equal stay equal, with an optimizer that treats them alike. Does nothing if no weight is shared.

    Args:
        stages: all of this rank, in the order of their indexes.
    """
    local = {stage.stage_index: stage for stage in stages_of_this_rank(stages)}
    stage = next(iter(local.values()))
    for tie in stage.submod.stage_program.whole.ties:
        own = [local[index].submod.get_parameter(tie.name) for index in tie.stages if index in local]
        ranks = sorted({stage.stage_index_to_group_rank[index] for index in tie.stages})
        if not own:
            continue
        total = torch.zeros_like(own[0])
        for weight in own:
            if weight.grad is not None:
                total += weight.grad
        _sum_over(ranks, total, stage)
        for weight in own:
            weight.grad = total.clone()


def _sum_over(ranks: Sequence[int], total: torch.Tensor, stage: ModelStage) -> None:
    """Add up a tensor in place over ranks of a stage's group: the first adds, and sends the sum to the others."""
    root, *others = ranks
    if stage.group_rank == root:
        part = torch.empty_like(total)
        for rank in others:
            dist.recv(part, group=stage.group, group_src=rank)
            total += part
        for rank in others:
            dist.send(total, group=stage.group, group_dst=rank)
    else:
        dist.send(total, group=stage.group, group_dst=root)
        dist.recv(total, group=stage.group, group_src=root)
