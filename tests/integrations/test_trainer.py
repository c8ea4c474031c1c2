"""RoundPipeTrainer against Trainer: logs, metrics, checkpoints and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

import roundpipe
from roundpipe.integrations.transformers import RoundPipeTrainer
from tests.integrations.trainers import (
    assert_same_log,
    assert_same_weights,
    llama,
    make_trainer,
    texts,
    train_both,
)


def accuracy(predicted: Any) -> dict[str, float]:
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


def test_a_decoder_with_padding_is_equal(tmp_path: Path) -> None:
    """Accumulation of 3, the last uneven; three workers; evaluation; a checkpoint in the middle, resumed by both."""
    options = {
        "devices": 3,
        "gradient_accumulation_steps": 3,
        "num_train_epochs": 2,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "compute_metrics": accuracy,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_accuracy",
    }
    plain, ours = train_both(llama, tmp_path, **options)
    assert ours.model_wrapped is ours.pipe and ours.model is ours.pipe.model
    assert isinstance(ours.model_wrapped, roundpipe.RoundPipe)
    assert ours.pipe.trace_count == 2  # training and evaluation
    predictions = [trainer.predict(texts(3, 5)) for trainer in (plain, ours)]
    torch.testing.assert_close(*(torch.tensor(each.predictions) for each in predictions), rtol=1e-4, atol=1e-5)
    assert predictions[0].metrics["test_loss"] == pytest.approx(predictions[1].metrics["test_loss"], abs=1e-5)

    saved = tmp_path / "RoundPipeTrainer" / "checkpoint-2"
    names = {path.name for path in (tmp_path / "Trainer" / "checkpoint-2").iterdir()}
    assert {path.name for path in saved.iterdir()} == names
    del options["load_best_model_at_end"]
    exchanged = make_trainer(Trainer, llama(), tmp_path / "exchanged", **options)
    exchanged.train(resume_from_checkpoint=str(saved))
    resumed = make_trainer(RoundPipeTrainer, llama(), tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "Trainer" / "checkpoint-2"))
    assert_same_log(exchanged, resumed)
    assert_same_weights(exchanged.model, resumed.model)
