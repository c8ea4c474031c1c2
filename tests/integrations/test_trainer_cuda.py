"""RoundPipeTrainer against Trainer on one card, in mixed precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from roundpipe.integrations.transformers import RoundPipeTrainer
from tests.integrations.trainers import assert_same_log, assert_same_weights, llama, make_trainer

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none"),
]

LOG_TOLERANCE = {"fp16": 1e-3, "bf16": 1e-2}
"""A few roundings."""


def trained(kind: type[Trainer], folder: Path, precision: str, **options: Any) -> Any:
    """SGD, since AdamW makes full steps of gradients that are nothing but rounding; no batch is cut."""
    common = {
        precision: True,
        "optim": "sgd",
        "learning_rate": 0.5,
        "lr_scheduler_type": "constant",
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "eval_strategy": "epoch",
        "use_cpu": False,
        "rotation": {"devices": ["cuda:0"], "run_config": {"num_microbatch": 1}},
    }
    trainer = make_trainer(kind, llama(), folder, **{**common, **options})
    trainer.train()
    return trainer


def assert_both_train_alike(folder: Path, precision: str, **options: Any) -> None:
    plain, ours = (trained(kind, folder, precision, **options) for kind in (Trainer, RoundPipeTrainer))
    assert {weight.device.type for weight in ours.model.parameters()} == {"cpu"}
    assert {weight.dtype for weight in ours.model.parameters()} == {torch.float32}
    assert_same_log(plain, ours, within=LOG_TOLERANCE[precision])
    plain.model.cpu()
    assert_same_weights(plain.model, ours.model, within=1e-4)
    before = llama().state_dict()
    assert max((weight - before[name]).abs().max() for name, weight in ours.model.state_dict().items()) > 5e-3
    scales = [scaler and scaler.get_scale() for scaler in (plain.accelerator.scaler, ours.accelerator.scaler)]
    assert scales[0] == scales[1]
    assert (scales[0] is None) == (precision == "bf16")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_is_equal(precision: str, tmp_path: Path) -> None:
    """Logs, evaluation, weights, and by what fp16 scales losses."""
    assert_both_train_alike(tmp_path, precision)


def test_steps_whose_gradients_overflow_are_left_out_alike(tmp_path: Path) -> None:
    """The first scale of fp16 is made so large that gradients are not finite until it has shrunk."""
    trainers = []
    for kind in (Trainer, RoundPipeTrainer):

        class Overflowing(kind):  # type: ignore[misc, valid-type]
            """Begins with a scale that is far too large."""

            def create_accelerator_and_postprocess(self) -> None:
                super().create_accelerator_and_postprocess()
                self.accelerator.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24, backoff_factor=2.0**-8)

        trainers.append(trained(Overflowing, tmp_path, "fp16", max_grad_norm=0.0, num_train_epochs=3))
    plain, ours = trainers
    scales = [trainer.accelerator.scaler.get_scale() for trainer in trainers]
    assert scales[0] == scales[1] < 2.0**24
    rates = [[entry.get("learning_rate") for entry in trainer.state.log_history] for trainer in trainers]
    assert rates[0] == rates[1]
    plain.model.cpu()
    assert_same_weights(plain.model, ours.model, within=1e-4)
