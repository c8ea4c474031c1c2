"""The options of a rotation beside a trainer's own, and which of these it can't follow."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch

from roundpipe.core.checks import check_flag
from roundpipe.core.errors import ConfigError, shown
from roundpipe.core.options import with_options
from roundpipe.runtime.config import RoundPipeRunConfig
from roundpipe.runtime.device.resolve import resolve_devices


@with_options("RoundPipeArguments({0}=...)")
@dataclass
class RoundPipeArguments:
    """Options of the rotation, for ``RoundPipeTrainer(..., roundpipe=...)`` or ``HfArgumentParser``.

    Raises:
        ConfigError: an option can't be used.
    """

    devices: list[str] | None = field(
        default=None, metadata={"help": "The rotation, such as cuda:0 cuda:1; default: all accelerators, or the CPU."}
    )
    is_async: bool = field(
        default=False,
        metadata={"help": "Run updates beside the next step, which trains on weights that are one update old."},
    )
    optim_dtype: str | None = field(
        default=None,
        metadata={"help": "Dtype that the optimizer computes in; default: float32 for weights of half precision."},
    )
    run_config: dict | str | None = field(  # type: ignore[type-arg]  # as HfArgumentParser reads it
        default=None, metadata={"help": "Fields of RoundPipeRunConfig, as a dict or as JSON."}
    )

    def __post_init__(self) -> None:
        resolve_devices(self.devices)
        check_flag("is_async", self.is_async)
        given: Any = self.optim_dtype
        dtype: Any = getattr(torch, given.removeprefix("torch."), given) if isinstance(given, str) else given
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            name = shown(given)
            raise ConfigError(f"optim_dtype={name}; give the name of a floating-point dtype, such as 'float32'")
        self.dtype: torch.dtype | None = dtype
        config: Any = self.run_config
        try:
            config = json.loads(config) if isinstance(config, str) else config
            if not isinstance(config, RoundPipeRunConfig):
                config = RoundPipeRunConfig(**({} if config is None else config))
        except (TypeError, json.JSONDecodeError) as error:
            given = shown(self.run_config)
            raise ConfigError(f"run_config={given}: {error}; give fields of RoundPipeRunConfig") from None
        is_refused = {
            "split_input": config.split_input is not None,
            "split_label": config.split_label is not None,
            "merge_output=False": config.merge_output is False,
            "loss_reduction='mean'": config.loss_reduction == "mean",
            "loss_scope='batch'": config.loss_scope == "batch",
        }
        if names := ", ".join(name for name, is_given in is_refused.items() if is_given):
            raise ConfigError(
                f"run_config has {names}; leave it out: a trainer's batches are cut, and their losses and outputs put "
                "together, so that its numbers are those without a rotation"
            )
        self.config: RoundPipeRunConfig = config


def check_training_arguments(args: Any, rotation: RoundPipeArguments) -> None:
    """Raise `ConfigError` for training arguments that a rotation can't follow."""
    optim = str(getattr(args.optim, "value", args.optim))
    launched = f"a launcher with {args.world_size} processes (torchrun, accelerate launch)"
    one_process = "start the script with python: one process uses all devices"
    reasons = {
        "deepspeed": (args.deepspeed, one_process),
        "fsdp": (args.fsdp, one_process),
        "parallelism_config": (getattr(args, "parallelism_config", None) is not None, one_process),
        launched: (args.world_size > 1, one_process),
        "torch_compile": (
            args.torch_compile,
            "leave it out, or compile modules of the model before",
        ),
        "bf16_full_eval or fp16_full_eval": (
            args.bf16_full_eval or args.fp16_full_eval,
            "convert the model, or use bf16",
        ),
        f"optim={optim!r}": ("lomo" in optim or "layerwise" in optim, "it updates inside the backward; choose another"),
        "fp16 with is_async": (args.fp16 and rotation.is_async, "use bf16, or is_async=False"),
    }
    for name, (is_given, advice) in reasons.items():
        if is_given:
            raise ConfigError(f"RoundPipeTrainer can't train with {name}; {advice}")
