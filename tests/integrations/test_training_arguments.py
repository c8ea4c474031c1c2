"""What training arguments ask for beside the loss: optimizers, stopping early, checkpoints, half precision."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import Trainer

import roundpipe
from roundpipe.integrations.transformers import RoundPipeTrainer, RoundPipeTrainerMixin
from roundpipe.runtime.engine import full_plans
from roundpipe.wrappers.pipe import RoundPipe
from tests.integrations.trainers import (
    assert_same_log,
    assert_same_weights,
    llama,
    make_trainer,
    padded,
    texts,
    train_both,
)
from tests.runtime.cases_twins import lives_there


def one_layer() -> Any:
    return llama(num_hidden_layers=1)


@pytest.mark.long
@pytest.mark.parametrize("name", ["adamw_torch", "adafactor", "sgd", "rmsprop"])
def test_optimizers_by_name_are_equal(name: str, tmp_path: Path) -> None:
    """With the trainer's groups, of which one has no weight decay, and its schedule."""
    plain, ours = train_both(
        one_layer, tmp_path, optim=name, lr_scheduler_type="linear", gradient_accumulation_steps=2, weight_decay=0.3
    )
    groups = [[(len(g["params"]), g["weight_decay"]) for g in each.optimizer.param_groups] for each in (plain, ours)]
    assert groups[0] == groups[1] and {decay for _, decay in groups[0]} == {0.3, 0.0}


@pytest.mark.long
def test_an_own_optimizer_and_schedule_are_equal(tmp_path: Path) -> None:
    trained = []
    for kind in (Trainer, RoundPipeTrainer):
        model = one_layer()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        options = {"optimizers": (optimizer, schedule), "gradient_accumulation_steps": 2}
        trained.append(make_trainer(kind, model, tmp_path, **options))
        trained[-1].train()
    assert_same_log(*trained)
    assert_same_weights(*(trainer.model for trainer in trained))


@pytest.mark.long
def test_training_stops_early_and_ends_with_the_best_model(tmp_path: Path) -> None:
    """The loss gets worse soon; of the checkpoints the best and the latest are left, in the same files."""
    folders, trained = [], []
    for kind in (Trainer, RoundPipeTrainer):
        folders.append(tmp_path / kind.__name__)
        trainer = make_trainer(
            kind,
            one_layer(),
            folders[-1],
            learning_rate=0.3,
            lr_scheduler_type="constant",
            num_train_epochs=4,
            gradient_accumulation_steps=2,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="steps",
            save_steps=1,
            save_total_limit=2,
            load_best_model_at_end=True,
            metric_for_best_model="eval_loss",
            callbacks=[transformers.EarlyStoppingCallback(2)],
        )
        trainer.train()
        trained.append(trainer)
    plain, ours = trained
    assert plain.state.global_step == ours.state.global_step < plain.state.max_steps
    assert Path(plain.state.best_model_checkpoint).name == Path(ours.state.best_model_checkpoint).name
    assert plain.evaluate()["eval_loss"] == pytest.approx(ours.evaluate()["eval_loss"], abs=1e-5)
    assert_same_log(plain, ours)
    assert_same_weights(plain.model, ours.model)
    files = [{str(path.relative_to(folder)) for path in folder.rglob("*")} for folder in folders]
    assert files[0] == files[1]
    assert len(list(folders[1].glob("checkpoint-*"))) == 2
    ours.save_model(str(tmp_path / "saved"))
    saved = (Path(plain.state.best_model_checkpoint), tmp_path / "saved")
    assert len({(folder / "config.json").read_text() for folder in saved}) == 1


@pytest.mark.long
def test_a_model_that_is_made_anew_for_each_training_is_equal(tmp_path: Path) -> None:
    """As `model_init` does, for a search of hyperparameters: the second training begins with another model."""
    trained = []
    for kind in (Trainer, RoundPipeTrainer):
        trainer = make_trainer(kind, None, tmp_path, model_init=one_layer, gradient_accumulation_steps=2)
        first = trainer.train().training_loss, trainer.model
        second = trainer.train().training_loss, trainer.model
        assert first[0] == second[0] and first[1] is not second[1]
        trained.append(trainer)
    assert_same_log(*trained)
    assert_same_weights(*(trainer.model for trainer in trained))


class Scaled(Trainer):
    """Scales its loss as fp16 does on a GPU, by so much that the first gradients overflow."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-16)


class ScaledInRotation(RoundPipeTrainerMixin, Scaled):
    """The same in rotation."""


def test_steps_whose_gradients_overflow_are_left_out_alike(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "num_train_epochs": 2, "max_grad_norm": 0.0}
    trained = []
    for kind in (Scaled, ScaledInRotation):
        rotation = {"run_config": {"num_microbatch": 1}}
        trained.append(make_trainer(kind, one_layer(), tmp_path, **options, rotation=rotation))
        trained[-1].train()
    scales = [trainer.accelerator.scaler.get_scale() for trainer in trained]
    assert scales[0] == scales[1] < 2.0**127
    rates = [[entry.get("learning_rate") for entry in trainer.state.log_history] for trainer in trained]
    assert rates[0] == rates[1]
    assert_same_weights(*(trainer.model for trainer in trained))


def padded_alike(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """All batches of one length."""
    return padded(samples, min_padding=12 - max(len(sample["input_ids"]) for sample in samples))


def test_with_bf16_batches_that_are_cut_are_smaller_batches_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What sets their weights apart from those of whole batches is where gradients are rounded."""
    rounds: list[int] = []
    train = RoundPipe.forward_backward
    monkeypatch.setattr(
        RoundPipe,
        "forward_backward",
        lambda pipe, **given: rounds.append(len(given["input_args"])) or train(pipe, **given),
    )
    common = {"bf16": True, "data_collator": padded_alike, "train_dataset": texts(8)}
    plain = make_trainer(
        Trainer,
        one_layer(),
        tmp_path,
        **common,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
    )
    ours = make_trainer(
        RoundPipeTrainer,
        one_layer(),
        tmp_path,
        **common,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        rotation={"run_config": {"num_microbatch": 4}},
    )
    plain.train()
    ours.train()
    assert rounds == [4, 4]
    assert_same_log(plain, ours)
    assert_same_weights(plain.model, ours.model, within=0)


@pytest.mark.long
def test_adamw_sets_apart_only_what_has_no_gradient_but_rounding(tmp_path: Path) -> None:
    """The bias of keys changes no attention: its gradients are rounding, which AdamW makes full steps of."""
    options = {"devices": 2, "num_train_epochs": 2, "learning_rate": 1e-2, "data_collator": padded_alike}
    make = functools.partial(llama, num_hidden_layers=1, attention_bias=True)
    train_both(make, tmp_path, adam_epsilon=1e-5, **options)
    plain, ours = (make_trainer(kind, make(), tmp_path, **options) for kind in (Trainer, RoundPipeTrainer))
    plain.train()
    ours.train()
    assert_same_log(plain, ours)
    for (name, one), other in zip(plain.model.named_parameters(), ours.model.parameters(), strict=True):
        apart = (one - other).abs() > 1e-5
        mean_square = plain.optimizer.state[one]["exp_avg_sq"]
        assert not apart.any() or name.endswith("k_proj.bias") and mean_square[apart].max() < 1e-7**2, name


@pytest.mark.long
def test_weights_may_live_on_the_device_where_updates_run_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer clips and steps inside the update, and looks at no copies: nothing has them streamed again."""
    monkeypatch.setattr(full_plans, "AUTO_GAIN", -1e9)  # as if the worker were an accelerator on which it is faster
    init = full_plans.FullPlans.__init__
    monkeypatch.setattr(full_plans.FullPlans, "__init__", lambda self, costs, accelerators: init(self, costs, True))
    states = []
    for residency in ("off", "auto"):
        rotation = {
            "devices": [roundpipe.Device("cpu", memory_bytes="1GiB")],
            "is_async": True,
            "run_config": {"residency": residency, "num_microbatch": 1},
        }
        trainer = make_trainer(
            RoundPipeTrainer, one_layer(), tmp_path, rotation=rotation, num_train_epochs=2, data_collator=padded_alike
        )
        trainer.train()
        assert lives_there(trainer.pipe) == (residency == "auto")
        states.append({name: value.clone() for name, value in trainer.model.state_dict().items()})
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
