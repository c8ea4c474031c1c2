"""Losses that are modules and hold the model: the trainer's loss code puts the wrapped one in its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer

from roundpipe.integrations.transformers import RoundPipeTrainerMixin
from tests.integrations.trainers import bert, classified, train_both


class Agreement(nn.Module):
    """Calls the model twice, as losses of pairs do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: dict[str, Any]) -> torch.Tensor:
        first = self.model(**inputs)
        second = self.model(**{**inputs, "input_ids": inputs["input_ids"].flip(0)})
        return first.loss + (first.logits - second.logits.detach()).square().mean()


class Holding(Trainer):
    """The model may be wrapped only once training begins."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.agreement = Agreement(self.model)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **given: Any) -> Any:
        loss = self.agreement
        if model == self.model_wrapped and model != self.model and loss.model != model:
            loss.model = model
        return loss(inputs)


class HoldingInRotation(RoundPipeTrainerMixin, Holding):
    """The same in rotation."""


@pytest.mark.filterwarnings("ignore:.*does not call the model exactly once")
def test_the_devices_run_it(tmp_path: Path) -> None:
    _, ours = train_both(bert, tmp_path, (Holding, HoldingInRotation), devices=2, data_collator=classified)
    assert ours.agreement.model == ours.pipe and ours.agreement.model is not ours.model
    assert ours.pipe.report().num_calls >= 2 * ours.state.global_step
