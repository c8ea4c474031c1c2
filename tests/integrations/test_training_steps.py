"""Trainers that do more in a step, or are given batches that can't be cut, or clip updates that come later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from roundpipe.core.errors import ConfigError
from roundpipe.integrations.microbatches import Batch, LossKind
from roundpipe.integrations.transformers import RoundPipeTrainer, RoundPipeTrainerMixin
from tests.integrations.trainers import VOCAB, assert_same_weights, llama, make_trainer, padded, texts, train_both
from tests.runtime.cases_late_gradients import used

__all__ = ["used"]  # a fixture


class Counting(Trainer):
    """As trainers of reinforcement learning do: batches depend on the number of steps so far."""

    steps = 0

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.steps += 1
        return loss

    def _prepare_inputs(self, inputs: Any) -> Any:
        given = super()._prepare_inputs(inputs)
        return {**given, "input_ids": (given["input_ids"] + self.steps) % VOCAB}


class CountingInRotation(RoundPipeTrainerMixin, Counting):
    pass


class Own(Trainer):
    """Does all of a step itself."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = model(**inputs).loss
        loss.backward()
        return loss.detach()


class OwnInRotation(RoundPipeTrainerMixin, Own):
    pass


def test_a_step_of_a_class_is_made_around_that_of_the_rotation(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "devices": 2}
    original = Trainer.training_step
    plain, ours = train_both(llama, tmp_path, (Counting, CountingInRotation), **options)
    assert plain.steps == ours.steps == 5
    assert Trainer.training_step is original


def test_a_step_that_is_not_that_of_the_rotation_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(OwnInRotation, llama(), tmp_path)
    with pytest.raises(ConfigError, match="Own.training_step does not call Trainer.training_step"):
        trainer.train()


class Checked(torch.nn.Module):
    """A decoder that wants as many marks as there are extras."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()
        self.config = self.inner.config

    def forward(self, input_ids: Any, extras: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        if (input_ids == 1).sum() != extras.numel():
            raise ValueError("marks and extras differ")
        return self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


def with_extras(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Every second batch has its marks in one text."""
    batch = padded(samples)
    is_even = int(batch["input_ids"].sum()) % 2 == 0
    batch["input_ids"][: None if is_even else 1, : 1 if is_even else len(samples)] = 1
    return {**batch, "extras": torch.zeros(len(samples), 1)}


def test_batches_that_can_not_be_cut_run_in_one_piece(tmp_path: Path) -> None:
    torch.manual_seed(0)
    options = {"data_collator": with_extras, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    options |= {"train_dataset": texts(16), "eval_dataset": texts(8, 2), "eval_strategy": "epoch", "devices": 2}
    with pytest.warns(UserWarning, match="can't run a piece of a batch by itself .marks and extras differ") as warned:
        train_both(Checked, tmp_path, remove_unused_columns=False, **options)
    assert sum("a piece of a batch" in str(each.message) for each in warned) == 1


@pytest.mark.parametrize("number", [1, 2])
def test_the_first_updates_of_asynchronous_steps_are_clipped(number: int, tmp_path: Path) -> None:
    """No norm is known before one is over; a trainer asks for that of all gradients then."""
    options = {"optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant", "warmup_steps": 0}
    options |= {"max_grad_norm": 0.1, "weight_decay": 0.0, "train_dataset": texts(2), "num_train_epochs": number}
    start = llama().state_dict()
    trainer = make_trainer(RoundPipeTrainer, llama(), tmp_path, rotation={"is_async": True}, **options)
    trainer.train()
    now = trainer.model.state_dict()
    change = torch.stack([(now[name] - value).square().sum() for name, value in start.items()]).sum().sqrt()
    assert change <= 0.5 * 0.1 * number * 1.001
    if number == 1:
        plain = make_trainer(Trainer, llama(), tmp_path, **options)
        plain.train()
        assert_same_weights(plain.model, trainer.model)


def test_asynchronous_steps_clip_and_step_without_a_look_at_gradients(tmp_path: Path, used: list[torch.dtype]) -> None:
    model = llama().bfloat16()
    options = {"max_grad_norm": 0.1, "train_dataset": texts(8), "max_steps": 3}
    trainer = make_trainer(RoundPipeTrainer, model, tmp_path, rotation={"is_async": True}, **options)
    trainer.train()
    trainer.pipe.synchronize()
    assert used == [torch.bfloat16] * (3 * len([*model.parameters()]))


def test_samples_are_measured_that_tell_means_apart() -> None:
    """The first two are of one length, by which a mean over tokens is one over samples."""
    labels = torch.full((6, 5), -100)
    for row, length in enumerate((3, 3, 3, 5, 3, 2)):
        labels[row, :length] = 1
    each = torch.tensor([1.0, 4.0, 2.0, 8.0, 3.0, 5.0])
    batch = Batch((), {"each": each, "labels": labels})
    kind = LossKind(["labels"])
    for number in (1, 2):  # not cut as long as both may be meant
        pieces = kind.cut(batch, 2, lambda batches: [float(one.kwargs["each"].mean()) for one in batches])
        assert len(pieces) == number
    assert list(kind.errors) == ["a mean over samples"]
    assert [factor for _, factor in pieces] == [0.5, 0.5]
