"""The longest sequence that a device and its host hold, and what another length would need: by `plan`'s own code."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

import roundpipe
from roundpipe.reports.tables import format_bytes
from roundpipe.runtime.device.device_memory import PLANNED_SHARE, memory_budget_bytes
from roundpipe.runtime.device.host_limit import RESERVE_BYTES, available_bytes
from roundpipe.tools.device_data import DEVICES, EFFICIENCY, find_device
from roundpipe.tools.forecast import forecast_at
from roundpipe.tools.largest import Largest, largest
from roundpipe.tools.problem import Layers, Machine, Training
from roundpipe.tools.target import Target

HOST_BYTES_PER_S = 100e9
SPARE_SHARE = 0.05
"""Of what the host has: for values that wait for the end of a copy, and for the process."""


class LengthPlan:
    """Plans for one sequence through a model that computes its own loss."""

    def __init__(self, model: nn.Module, device: roundpipe.Device, training: Training, host_bytes: int | None) -> None:
        self._model = model.train()
        self._training = training
        self._machine = Machine(_spec(device), 1, EFFICIENCY, HOST_BYTES_PER_S, host_memory_bytes=host_bytes)

    def longest(self) -> Largest:
        """The longest sequence; raises a `DeviceMemoryError` if none fits."""
        return largest("length", self._target(2048), self._machine, self._training)

    def needs(self, length: int) -> dict[str, Any]:
        """Bytes of the device and of the host, by term, and seconds of a step at this length."""
        machine = replace(self._machine, host_memory_bytes=None)
        found = forecast_at(Layers.of(self._target(length), 1, machine), machine, self._training)
        step = found.simulation
        return {
            "length": length,
            "reasons": found.reasons,
            "step_s": None if step is None else step.seconds_per_step,
            "device": None if found.device is None else {**found.device._asdict(), "total": found.device.total},
            "host": {**asdict(found.host), "total": found.host.total},
        }

    def _target(self, length: int) -> Target:
        def kwargs_for(num_samples: int) -> dict[str, Any]:
            ids = torch.zeros(num_samples, length, dtype=torch.long)
            return {"input_ids": ids, "labels": ids.clone()}

        return Target("model", self._model, kwargs_for, None, length, has_loss=True, with_tokens=self._target)


def told(needs: dict[str, Any]) -> str:
    """What a length needs, in words."""
    if needs["device"] is None:
        return f"{needs['length']:,} tokens: {'; '.join(needs['reasons'])}"
    device, host = needs["device"], needs["host"]
    return (
        f"{needs['length']:,} tokens need {format_bytes(device['total'])} of the device and "
        f"{format_bytes(host['total'])} of the host, {format_bytes(host['carried'])} of it for values between layers; "
        f"predicted are {needs['step_s']:.0f} s a step"
    )


def host_bytes(model: nn.Module) -> int | None:
    """What the host has for training a model that is in its memory; None if the system does not say."""
    left_bytes = available_bytes()
    if left_bytes is None:
        return None
    weights_bytes = sum(tensor.nbytes for tensor in model.parameters() if not tensor.is_meta)
    return int((left_bytes - RESERVE_BYTES) * (1 - SPARE_SHARE)) + weights_bytes


def _spec(device: roundpipe.Device) -> Any:
    """Figures of the card, with the memory that plans have of it."""
    kind = torch.device(device.device)
    if kind.type == "cpu":
        assert device.memory_bytes is not None
        return replace(find_device("H100"), memory_bytes=-(-device.memory_bytes // PLANNED_SHARE))
    name = torch.cuda.get_device_name(kind).upper()
    known = [spec for spec in DEVICES if spec.name.removeprefix("RTX-").replace("-", " ") in name.replace("-", " ")]
    spec = max(known, key=lambda spec: len(spec.name), default=find_device("H100"))
    return replace(spec, memory_bytes=int(memory_budget_bytes(device) / PLANNED_SHARE))
