"""What `python -m roundpipe plan` says of a row before it is measured: from a card's datasheet, on ``meta``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from row_cases import Row, Stack, loss_of_logits
from torch import nn

from roundpipe.tools.device_data import EFFICIENCY, find_device
from roundpipe.tools.forecast import Layers, Machine, Training, forecast_at
from roundpipe.tools.target import Target


@dataclass
class _Outputs:
    loss: torch.Tensor


class _WithLoss(nn.Module):
    """A stack that computes its loss itself, which makes the loss a part of the last layer as in a run."""

    def __init__(self, stack: nn.Module) -> None:
        super().__init__()
        self.stack = stack

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> _Outputs:
        return _Outputs(loss_of_logits(self.stack(input_ids), labels))


def predict(
    row: Row,
    card: str,
    small: bool,
    host_bytes_per_s: float,
    update_bytes_per_s: float,
    conversion_bytes_per_s: float,
    visit_s: float = 0.0,
) -> dict[str, Any]:
    """Seconds and bytes of a step; what of trained weights may stay on a device is not known to it."""
    source = row.source(small)
    model = source.build()
    if isinstance(source, Stack):
        model = _WithLoss(model)

    def kwargs_for(num_samples: int) -> dict[str, Any]:
        ids = torch.zeros(num_samples, row.length, dtype=torch.long)
        return {"input_ids": ids, "labels": ids.clone()}

    device = find_device(card)
    if row.cap != "all":
        device = replace(device, memory_bytes=min(device.memory_bytes, int(float(row.cap) * 1e9)))
    machine = Machine(
        device,
        row.cards,
        EFFICIENCY,
        host_bytes_per_s,
        update_bytes_per_s=update_bytes_per_s,
        conversion_bytes_per_s=conversion_bytes_per_s,
        visit_s=visit_s,
    )
    training = Training(row.num_microbatches * row.samples, row.num_microbatches)
    target = Target(row.name, model.train(), kwargs_for, None, row.length, has_loss=True)
    found = forecast_at(Layers.of(target, training.microbatch, machine), machine, training)
    if not found.fits or found.simulation is None:
        return {"error": "; ".join(found.reasons)}
    step = found.simulation
    return {
        "card": card,
        "seconds": step.seconds_per_step,
        "tokens_per_s": row.tokens / step.seconds_per_step,
        "idle": {"total": step.mean_idle.total, **asdict(step.mean_idle)},
        "least_s": found.least_s(),
        "moved_bytes": {"up": step.uploaded_bytes, "down": step.downloaded_bytes},
        "peak_bytes": None if found.device is None else found.device.total,
        "plan": None if found.plan is None else asdict(found.plan),
    }
