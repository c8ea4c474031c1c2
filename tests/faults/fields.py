"""Edits of a checkpoint's state, each of which makes it one that must not be loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Edit = Callable[[dict[str, Any]], Any]


def _set(*path: Any, value: Any) -> Edit:
    def edit(state: dict[str, Any]) -> None:
        for key in path[:-1]:
            state = state[key]
        state[path[-1]] = value

    return edit


def _drop(*path: Any) -> Edit:
    def edit(state: dict[str, Any]) -> None:
        for key in path[:-1]:
            state = state[key]
        del state[path[-1]]

    return edit


FIELDS = ("format", "optimizer", "optimizer_class", "optimizer_weights", "scheduler", "scaler", "module_state")
MOMENT = ("optimizer", "state", "0.weight", "exp_avg")
GROUP = ("optimizer", "param_groups", 0)

EDITS: dict[str, Edit] = {
    **{f"no {name}": _drop(name) for name in (*FIELDS, "random", "step", "extra")},
    **{
        f"{name} is text": _set(name, value="text") for name in (*FIELDS, "random", "step") if name != "optimizer_class"
    },
    **{f"{name} is a list": _set(name, value=[1]) for name in (*FIELDS, "random", "step")},
    "a field too many": _set("other", value=1),
    "a list": lambda state: [state],
    "a tensor": lambda state: torch.zeros(3),
    "a format of the future": _set("format", value=99),
    "no optimizer state": _drop("optimizer", "state"),
    "no groups": _drop("optimizer", "param_groups"),
    "a group too many": lambda state: state["optimizer"]["param_groups"].append({"params": []}),
    "groups are text": _set("optimizer", "param_groups", value="text"),
    "a group is text": _set(*GROUP, value="text"),
    "a group without parameters": _drop(*GROUP, "params"),
    "a group without lr": _drop(*GROUP, "lr"),
    "lr is text": _set(*GROUP, "lr", value="0.1"),
    "a beta is text": _set(*GROUP, "betas", value=("0.9", 0.99)),
    "betas are a number": _set(*GROUP, "betas", value=0.9),
    "a parameter of another name": _set(*GROUP, "params", 0, value="other"),
    "a parameter without a name": _set(*GROUP, "params", 0, value=3),
    "a moment of another shape": _set(*MOMENT, value=torch.zeros(3)),
    "a moment of more elements": _set(*MOMENT, value=torch.zeros(5, 4)),
    "a moment of one element": _set(*MOMENT, value=torch.zeros(())),
    "a moment is text": _set(*MOMENT, value="text"),
    "no moment": _drop(*MOMENT),
    "a parameter's state is text": _set("optimizer", "state", "0.weight", value="text"),
    "a copy of another shape": _set("optimizer_weights", "0.weight", value=torch.zeros(2)),
    "a copy is text": _set("optimizer_weights", "0.weight", value="text"),
    "a copy of nothing": _set("optimizer_weights", "other", value=torch.zeros(2)),
    "a copy is complex": _set("optimizer_weights", "0.weight", value=torch.zeros(4, 4, dtype=torch.complex64)),
    "no step_size": _drop("scheduler", "step_size"),
    "gamma is text": _set("scheduler", "gamma", value="0.5"),
    "base_lrs are text": _set("scheduler", "base_lrs", value=["0.5"]),
    "last_epoch is a list": _set("scheduler", "last_epoch", value=[1]),
    "no scale": _drop("scaler", "scale"),
    "the scale is text": _set("scaler", "scale", value="big"),
    "no state of a module": _drop("module_state", "2._extra_state"),
    "another state of a module": _set("module_state", "2._extra_state", value={"other": 1}),
    "a module's state is text": _set("module_state", "2._extra_state", "seen", value="text"),
    "module state for a weight": _set("module_state", "0.weight", value=3),
    "a module that is not there": _set("module_state", "other", value=3),
    "no generator": _drop("random", "torch"),
    "a generator of no bytes": _set("random", "torch", value=torch.zeros(0, dtype=torch.uint8)),
    "a generator is text": _set("random", "torch", value="text"),
    "Python's generator is short": _set("random", "python", value=(3, (1, 2), None)),
    "Python's generator is text": _set("random", "python", value="text"),
    "numpy's generator is text": _set("random", "numpy", value="text"),
    "numpy's keys are few": _set("random", "numpy", "state", "key", value=torch.zeros(3, dtype=torch.int64)),
    "accelerators are text": _set("random", "accelerator", value=3),
}
