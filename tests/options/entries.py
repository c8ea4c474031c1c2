"""Every public entry point: how it is called with one argument in question, and what each of its arguments takes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe
from roundpipe import distributed as ranks
from roundpipe.integrations.arguments import RoundPipeArguments
from tests.options.values import (
    ANYTHING,
    COUNT,
    DEVICES,
    EMPTY,
    FLAG,
    FUNCTION,
    NONE,
    NOTHING,
    POSITIVE,
    SECONDS,
    TENSOR,
    TEXT,
    Rule,
    takes,
)


@dataclass(frozen=True)
class Entry:
    """A public entry point."""

    call: Callable[..., Any]
    """Uses it with what is given, and with right values for all else."""
    rules: dict[str, Rule]
    """What each of its arguments takes, by name."""


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))


def batch() -> tuple[torch.Tensor]:
    return (torch.ones(4, 6),)


def loss_fn(outputs: torch.Tensor, label: Any) -> torch.Tensor:
    return outputs.sum()


def folder() -> Path:
    return Path(tempfile.mkdtemp(dir=Path.cwd())) / "checkpoint"


def parameters() -> list[nn.Parameter]:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    return [parameter]


def making(make: Callable[..., Any], **right: Any) -> Callable[..., Any]:
    """Makes a wrapper and, if it is one, trains with it."""

    def call(**given: Any) -> None:
        made = make(**{"devices": ["cpu"], **right, **given})
        if isinstance(made, RoundPipe):
            with made:
                train(made)

    return call


def on_wrapper(use: Callable[..., Any]) -> Callable[..., Any]:
    def call(**given: Any) -> Any:
        with RoundPipe(network(), devices=["cpu"]) as piped:
            return use(piped, **given)

    return call


def method(name: str, **right: Callable[[], Any]) -> Callable[..., Any]:
    """Calls a method of a wrapper."""
    return on_wrapper(lambda piped, **given: getattr(piped, name)(**made(right), **given))


def made(right: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    return {name: make() for name, make in right.items()}


def train(piped: RoundPipe, **given: Any) -> None:
    piped.forward_backward(**{"input_args": batch(), "loss_fn": loss_fn, **given})


def evaluate(piped: RoundPipe, **given: Any) -> None:
    piped.forward_loss(**{"input_args": batch(), "loss_fn": loss_fn, **given})


def record(piped: RoundPipe, **given: Any) -> None:
    with piped.record_timeline(**given):
        train(piped)


def load(piped: RoundPipe, **given: Any) -> None:
    there = folder()
    piped.save_checkpoint(there)
    piped.load_checkpoint(**{"dir": there, **given})


def configure(**given: Any) -> None:
    config = roundpipe.RoundPipeRunConfig(**given)
    on_wrapper(train)(label=torch.ones(4, 6), run_config=config, return_outputs=True)


def open_device(**given: Any) -> None:
    RoundPipe(network(), devices=[roundpipe.Device(**given)]).close()


def scaler(name: str, **right: Callable[[], Any]) -> Callable[..., Any]:
    return lambda **given: getattr(roundpipe.GradScaler("cpu"), name)(**made(right), **given)


def timeline(name: str, **right: Any) -> Callable[..., Any]:
    return lambda **given: getattr(roundpipe.Timeline(), name)(**{**right, **given})


def plan(**given: Any) -> roundpipe.ExecutePlan:
    return roundpipe.ExecutePlan(**{"forward": [(0, 1)], "fused": (1, 2), "backward": [(0, 1)], **given})


def stages(**given: Any) -> Any:
    return ranks.partition_stages(**{"model": network(), "num_stages": 2, "example_args": batch(), **given})


def stage(**given: Any) -> Any:
    right = {"model": network(), "stage_index": 0, "num_stages": 2, "example_args": batch()}
    return ranks.pipeline_stage(**{**right, **given})


OPTIONS = {
    "optim_dtype": NONE,
    "name": NONE | TEXT,
    "model_run_config": NOTHING,
    "pin_model": NOTHING,
    "devices": DEVICES,
    "process_group": NONE,
    "shard_optimizer": takes("False"),
}
MODEL = {"model": takes("module")}
CUT = {
    "example_args": takes("empty tuple"),
    "example_kwargs": NONE | takes(either=("empty dict",)),
    "balance": FUNCTION,
}
BYTES = takes("0") | COUNT
PARTS = {
    "lower_threshold": BYTES,
    "upper_threshold": NONE | BYTES,
    "skip_modules": takes("empty tuple", "empty list", "empty dict"),
    "override_config": takes("empty dict"),
}
CALL = {
    "input_args": takes(either=("empty tuple", "empty list", "list of None")),
    "input_kwargs": takes("empty dict"),
    "label": ANYTHING,
    "loss_fn": FUNCTION,
    "return_outputs": FLAG,
    "run_config": NONE,
    "loss_reduction": NONE,
    "loss_scope": NONE,
}
STATEFUL = {"optimizer": NONE, "scheduler": NONE | takes("module"), "scaler": NONE | takes("module")}
STAGES = {"model": NOTHING, "example_args": NOTHING, "example_kwargs": takes("None", "empty dict"), "balance": FUNCTION}
SPEED = NONE | POSITIVE
PLAN = EMPTY
SPEC = NONE | FUNCTION

ENTRIES: dict[str, Entry] = {
    "compile": Entry(
        making(roundpipe.compile, model=network()), {**MODEL, **CUT, **OPTIONS, **PARTS, "fallback": FLAG}
    ),
    "wrap_model_to_roundpipe": Entry(
        making(roundpipe.wrap_model_to_roundpipe, model=network()),
        {**MODEL, **CUT, **OPTIONS, **PARTS, "use_sequential_preset": NONE | FLAG},
    ),
    "RoundPipe": Entry(making(RoundPipe, model=network()), {**MODEL, **OPTIONS}),
    "AutoRoundPipe": Entry(making(roundpipe.AutoRoundPipe, model=network()), {**MODEL, **OPTIONS}),
    "Pipe": Entry(
        making(roundpipe.Pipe, module=network()),
        {"module": NOTHING, "chunks": COUNT, "balance": NONE, "devices": DEVICES},
    ),
    "explain": Entry(
        lambda **given: roundpipe.explain(**{"model": network(), "example_args": batch(), **given}),
        {**MODEL, **STAGES, "model": takes("module"), "graph": NONE, "devices": DEVICES},
    ),
    "RoundPipe.forward": Entry(
        on_wrapper(lambda piped, **given: piped(*batch(), **given)), {"roundpipe_run_config": NONE}
    ),
    "RoundPipe.forward_backward": Entry(on_wrapper(train), CALL),
    "RoundPipe.forward_loss": Entry(on_wrapper(evaluate), CALL),
    "RoundPipe.optim_named_parameters": Entry(
        on_wrapper(lambda piped, **given: list(piped.optim_named_parameters(**given))),
        {"prefix": TEXT, "remove_duplicate": FLAG},
    ),
    "RoundPipe.adopt": Entry(method("adopt"), {"optimizer": NOTHING}),
    "RoundPipe.step": Entry(
        on_wrapper(lambda piped, **given: piped.step(**{"step_fn": print, **given})),
        {"step_fn": FUNCTION, "is_async": FLAG},
    ),
    "RoundPipe.save_checkpoint": Entry(
        on_wrapper(lambda piped, **given: piped.save_checkpoint(**{"dir": folder(), **given})),
        {
            **STATEFUL,
            "dir": NOTHING,
            "step": NONE | takes("0", "-1") | COUNT,
            "extra": takes("None", "0", "-1", "dtype", "dict of numbers", "list of None", "set", "nan", "inf", "-1.5")
            | takes("bytes", "empty tuple", "empty list", "empty dict")
            | (FLAG | COUNT | POSITIVE | TEXT | TENSOR),
            "is_async": FLAG,
        },
    ),
    "RoundPipe.load_checkpoint": Entry(
        on_wrapper(load),
        {"dir": NOTHING, "optimizer": NONE, "scheduler": NONE, "scaler": NONE, "weights_only": FLAG},
    ),
    "RoundPipe.record_timeline": Entry(on_wrapper(record), {"path": NONE}),
    "RoundPipe.peak_device_bytes": Entry(method("peak_device_bytes"), {"reset": FLAG}),
    "RoundPipe.set_original_model": Entry(method("set_original_model"), {"original_model": takes("module")}),
    "StepHandle.wait": Entry(
        on_wrapper(lambda piped, **given: piped.step(print).wait(**given)),
        {"timeout": takes("None", "0", "1", "1.5", "large", "inf")},
    ),
    "StepHandle.result": Entry(
        on_wrapper(lambda piped, **given: piped.step(print).result(**given)),
        {"timeout": takes("None", "1", "1.5", "large", "inf", either=("0",))},
    ),
    "RoundPipeRunConfig": Entry(
        configure,
        {
            "num_microbatch": NONE | COUNT,
            "recompute_grain": NONE,
            "output_device": NONE,
            "split_input": SPEC,
            "split_label": SPEC,
            "merge_output": SPEC | FLAG,
            "requires_grad": NONE | FLAG,
            "preserve_rng_state": NONE | FLAG,
            "execute_plan": NONE,
            "replicas": NONE,
            "tiles": NONE | COUNT,
            "residency": NONE,
            "loss_reduction": NONE,
            "loss_scope": NONE,
            "check_finite": NONE | FLAG,
        },
    ),
    "Device": Entry(
        open_device,
        {
            "device": NOTHING,
            "memory_bytes": NONE | POSITIVE,
            "upload_bytes_per_s": SPEED,
            "download_bytes_per_s": SPEED,
        },
    ),
    "ExecutePlan": Entry(plan, {"forward": PLAN, "fused": NONE, "backward": PLAN, "replicas": PLAN, "rotates": FLAG}),
    "ExecutePlan.validate": Entry(
        lambda **given: plan().validate(**given), {"num_layers": takes(either=("1", "large", "huge"))}
    ),
    "GradScaler": Entry(
        lambda **given: roundpipe.GradScaler(**given),
        {
            "device": NONE | TEXT,
            "init_scale": POSITIVE,
            "growth_factor": takes("1.5", "large"),
            "backoff_factor": NOTHING,
            "growth_interval": COUNT,
            "enabled": FLAG,
        },
    ),
    "GradScaler.load_state_dict": Entry(scaler("load_state_dict"), {"state_dict": NOTHING}),
    "GradScaler.scale": Entry(scaler("scale"), {"outputs": TENSOR | takes("empty tuple", "empty list")}),
    "GradScaler.step": Entry(scaler("step"), {"optimizer": NOTHING}),
    "GradScaler.unscale_": Entry(scaler("unscale_"), {"optimizer": NOTHING}),
    "GradScaler.update": Entry(scaler("update"), {"new_scale": NONE | POSITIVE}),
    "clip_grad_norm_": Entry(
        lambda **given: roundpipe.clip_grad_norm_(**{"parameters": parameters(), "max_norm": 1.0, **given}),
        {
            "parameters": EMPTY | TENSOR,
            "max_norm": takes("0", "inf") | POSITIVE,
            "norm_type": takes("inf") | POSITIVE,
            "error_if_nonfinite": FLAG,
        },
    ),
    "balance_by_size": Entry(
        lambda **given: roundpipe.balance_by_size(**{"num_stages": 2, "module": network(), **given}),
        {"num_stages": takes("1"), "module": NOTHING},
    ),
    "balance_by_time": Entry(
        lambda **given: roundpipe.balance_by_time(
            **{"num_stages": 2, "module": network(), "sample": batch()[0], **given}
        ),
        {"num_stages": takes("1"), "module": NOTHING, "sample": Rule(either=ANYTHING.right)},
    ),
    "RoundPipePackedData": Entry(
        lambda **given: roundpipe.RoundPipePackedData(**given).synchronize(),
        {
            "values": EMPTY | takes("list of None", "dict of numbers", "set", "tensor"),
            "events": NONE | EMPTY,
        },
    ),
    "Timeline": Entry(lambda **given: roundpipe.Timeline(**given), {"spans": EMPTY, "name": TEXT}),
    "Timeline.fill": Entry(timeline("fill"), {"spans": EMPTY}),
    "Timeline.between": Entry(timeline("between", start_s=0, end_s=1), {"start_s": SECONDS, "end_s": SECONDS}),
    "Timeline.lanes": Entry(timeline("lanes"), {"device": TEXT}),
    "Timeline.on": Entry(timeline("on", device="cpu", lane="upload"), {"device": TEXT, "lane": TEXT}),
    "Timeline.save": Entry(timeline("save"), {"path": NOTHING}),
    "save_for_recompute": Entry(roundpipe.save_for_recompute, {}),
    "integrations.RoundPipeArguments": Entry(
        lambda **given: RoundPipeArguments(**given),
        {"devices": DEVICES, "is_async": FLAG, "optim_dtype": NONE, "run_config": takes("None", "empty dict")},
    ),
    "distributed.partition_stages": Entry(stages, {**STAGES, "num_stages": takes("1")}),
    "distributed.pipeline_stage": Entry(
        stage,
        {
            **{name: Rule(either=rule.right | rule.either) for name, rule in STAGES.items()},
            "stage_index": takes(either=("0", "1")),
            "num_stages": takes(either=("1",)),
            "device": takes(either=("None",)),
            "group": takes(either=("None",)),
            "weights": takes(either=("None", "empty dict", "dict of numbers")),
        },
    ),
    "distributed.save_stages": Entry(
        lambda **given: ranks.save_stages(**{"stages": stages(), "folder": "there", **given}),
        {"stages": NOTHING, "folder": NOTHING},
    ),
    "distributed.StageState": Entry(
        lambda **given: ranks.StageState(**{"stages": [], "optimizer": None, **given}),
        {"stages": NOTHING, "optimizer": takes(either=("None",))},
    ),
    "distributed.StageState.load_state_dict": Entry(
        object.__new__(ranks.StageState).load_state_dict, {"state_dict": NOTHING}
    ),
    "distributed.sum_tied_gradients": Entry(lambda **given: ranks.sum_tied_gradients(**given), {"stages": NOTHING}),
    "distributed.model_outputs": Entry(
        lambda **given: ranks.model_outputs(**{"stage": stages()[-1], "tensors": batch()[0], **given}),
        {"stage": NOTHING, "tensors": TENSOR},
    ),
}
