"""Losses that are no means all the time, and those that keep something, in a trainer that measures them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import Trainer

from roundpipe.integrations.microbatches import MEASURED_EACH, Batch, LossKind
from roundpipe.integrations.transformers import RoundPipeTrainerMixin
from tests.integrations.trainers import llama, train_both


def shifted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class OwnLoss(Trainer):
    """Its loss is `of`, of the logits and the labels."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs.get("attention_mask"))
        loss = self.of(outputs.logits, inputs["labels"])
        return (loss, outputs) if return_outputs else loss

    def of(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Flooded(OwnLoss):
    """Far from the level a mean, and near it none."""

    def of(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (shifted(logits, labels) - 3.4).abs() + 3.4


class Criterion(nn.Module):
    """Counts its calls, in a buffer and in an attribute, and keeps what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.number, self.seen = 0, []

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.calls: torch.Tensor
        self.calls += 1
        self.number += 1
        self.seen.append(len(labels))
        return shifted(logits, labels) * torch.clamp(self.calls / 20, max=1.0)


class Counted(OwnLoss):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.criterion = Criterion()

    def of(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.criterion(logits, labels)
        self.log({"samples": len(labels)})
        return loss


class FloodedInRotation(RoundPipeTrainerMixin, Flooded):
    pass


class CountedInRotation(RoundPipeTrainerMixin, Counted):
    pass


def test_a_function_of_a_mean_is_not_cut(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="function of means.*not cut into microbatches"):
        train_both(llama, tmp_path, (Flooded, FloodedInRotation), max_steps=8, learning_rate=0.05, devices=2)


def test_a_loss_that_changes_is_measured_again() -> None:
    kind, measured = LossKind(["labels"]), []

    def measure(batches: list[Batch]) -> list[float]:
        measured.append(len(sizes))
        outs = [batch.kwargs["scores"] for batch in batches]
        return [float(each.square().mean() if len(sizes) < 100 else each.mean().square()) for each in outs]

    sizes: list[int] = []
    generator = torch.Generator().manual_seed(0)
    with pytest.warns(UserWarning, match="neither a sum nor a mean.*not cut into microbatches"):
        while len(sizes) < 100 * MEASURED_EACH:
            sizes.append(len(kind.cut(Batch((), {"scores": torch.randn(4, 3, generator=generator)}), 2, measure)))
    later = [number for number in measured if number]
    assert later == sorted(later) and 100 <= later[-1] < 100 * MEASURED_EACH and len(later) < 5
    assert set(sizes[: later[-1]]) == {2} and set(sizes[later[-1] :]) == {1}


@pytest.mark.filterwarnings("ignore:the loss is neither a sum nor a mean")
def test_a_measurement_leaves_nothing_behind(tmp_path: Path) -> None:
    plain, ours = train_both(llama, tmp_path, (Counted, CountedInRotation), max_steps=4, devices=2)
    assert ours.criterion.calls == plain.criterion.calls == 4
    assert ours.criterion.number == plain.criterion.number and ours.criterion.seen == plain.criterion.seen
    logs = [[each for each in trainer.state.log_history if "samples" in each] for trainer in (ours, plain)]
    assert logs[0] == logs[1] and len(logs[1]) == 4
