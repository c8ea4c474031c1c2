"""A stage's weights: models without them, reading those of one stage, writing those of all as one checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from roundpipe.core.checks import path_of
from roundpipe.core.contexts import contextmanager
from roundpipe.core.errors import CheckpointError, ConfigError, enumerated
from roundpipe.distributed.module import StageModule
from roundpipe.wrappers.checkpoint_files import Draft, check_storable, read_weights, write_index, write_part

Weights = str | os.PathLike[str] | Mapping[str, torch.Tensor]


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that are built inside have their parameters on ``meta``, their buffers where they are.

    So a model of any size takes no memory for its weights, and has what no file of weights holds. (Under
    ``torch.device("meta")`` buffers are lost, too, such as those of rotary embeddings.) Each parameter is made
    before it goes to ``meta``; torch's functions of ``nn.init`` do nothing there.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.data.to("meta"), param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def materialise(stage: StageModule, device: torch.device, weights: Weights | None) -> StageModule:
    """A copy of a stage on a device, with values from ``weights`` or else the model's own."""
    model = stage.stage_program.whole.traced.model
    given = None if weights is None else _read(weights)
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
    own = {id(tensor) for tensor in (*stage.parameters(), *stage.buffers())}
    saved = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    copies: dict[int, torch.Tensor] = {}
    missing = []
    for tensor in (*(tensor for _, tensor in named), *stage.buffers()):
        key, value = id(tensor), tensor
        if key in copies:
            continue
        if key not in own:  # a module may refer to it all the same
            copies[key] = _like(tensor, tensor, torch.device("meta"))
            continue
        aliases = names.get(key, ["a constant"])
        if given is not None and key in saved:
            found = [given[name] for name in aliases if name in given]
            if found and found[0].shape != tensor.shape:
                shapes = f"{tuple(found[0].shape)} in weights=, and {tuple(tensor.shape)} in the model"
                raise ConfigError(f"{aliases[0]} has shape {shapes}")
            value = found[0] if found else torch.empty(0, device="meta")
        if value.is_meta:
            missing.append(aliases[0])
        else:
            copies[key] = _like(tensor, value, device)
    if missing:
        raise ConfigError(
            f"{enumerated(list(dict.fromkeys(missing)))}: no values. Give weights= with the keys of the model's "
            "state_dict; buffers that are not saved come with the model, if it is built under "
            "roundpipe.distributed.parameters_on_meta()"
        )
    return stage.copy_with(copies)


def _like(tensor: torch.Tensor, value: torch.Tensor, device: torch.device) -> torch.Tensor:
    data = value.detach().to(device, tensor.dtype, copy=True)
    return nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data


def _read(weights: Weights) -> Mapping[str, torch.Tensor]:
    if isinstance(weights, Mapping):
        return weights
    tensors, aliases = read_weights(path_of("weights", weights, "the path of a folder, or a dict of tensors"))
    return {**tensors, **{alias: tensors[name] for alias, name in aliases.items()}}


def save_stages(stages: Any, folder: str | os.PathLike[str]) -> None:
    """Write the weights of all ranks' stages as one checkpoint in safetensors, with the model's own keys.

    Called on every rank of the pipeline. Each writes its own file; the first writes the index, when all files are
    there. The folder can be read by ``from_pretrained``, by `pipeline_stage` with any number of stages, and by
    ``RoundPipe.load_checkpoint(folder, weights_only=True)``. For states of optimizers there is
    `StageState`.

    Args:
        stages: those of this rank: one, or a list.
        folder: new or empty, on a file system that all ranks see.

    Raises:
        ConfigError: a tensor can't be in a safetensors file, or the safetensors library is missing.
        CheckpointError: the folder is not empty, or can't be written. All ranks raise it.
    """
    path = path_of("folder", folder, "the path of a folder")
    stages = [*stages] if isinstance(stages, Sequence) else [stages]
    if not stages or not all(isinstance(stage, PipelineStage) for stage in stages):
        kinds = enumerated([type(stage).__name__ for stage in stages]) or "an empty list"
        raise ConfigError(f"stages is {kinds}; give the stages of this rank, as pipeline_stage made them")
    rank, group = stages[0].group_rank, stages[0].group
    tensors: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for stage in stages:
        for name, tensor in stage.submod.state_dict(keep_vars=True).items():
            first = names.setdefault(id(tensor), name)
            if first != name:
                aliases[name] = first
            else:
                tensors[name] = tensor.detach()
    problem = None
    try:
        for name, tensor in tensors.items():
            check_storable(name, tensor)
        if rank == 0:
            path.mkdir(parents=True, exist_ok=True)
            problem = f"{path} is not empty; give a new folder" if any(path.iterdir()) else None
    except (OSError, ConfigError) as error:
        problem = str(error)
    _gather(problem, {}, group)
    try:
        problem, num_bytes = None, write_part(Draft(path), tensors, aliases, rank, stages[0].group_size)
    except OSError as error:
        problem, num_bytes = str(error), {}
    parts = _gather(problem, num_bytes, group)
    if rank == 0:
        write_index(Draft(path), parts)
    dist.barrier(group)


def _gather(problem: str | None, value: Any, group: Any) -> list[Any]:
    """The values of all ranks; a `CheckpointError` on each if one has a problem."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, (problem, value), group=group)
    if problems := [f"rank {rank}: {text}" for rank, (text, _) in enumerate(found) if text]:
        raise CheckpointError("; ".join(problems))
    return [value for _, value in found]
