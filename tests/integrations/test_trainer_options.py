"""What reaches into the step: a scaled loss, noise on embeddings, batch sizes found by trial; and TRL's trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import Trainer

import roundpipe
from roundpipe.integrations.transformers import RoundPipeArguments, RoundPipeTrainer, RoundPipeTrainerMixin
from tests.integrations.trainers import (
    adapted,
    assert_same_log,
    assert_same_weights,
    llama,
    make_trainer,
    texts,
    train_both,
)


class Scaled(Trainer):
    """Scales its loss as fp16 does on a GPU, by another factor after each step."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=1)


class ScaledInRotation(RoundPipeTrainerMixin, Scaled):
    """The same in rotation."""


def test_a_scaled_loss_is_equal(tmp_path: Path) -> None:
    plain, ours = train_both(
        lambda: llama(num_hidden_layers=1),
        tmp_path,
        (Scaled, ScaledInRotation),
        gradient_accumulation_steps=2,
        rotation={"run_config": {"num_microbatch": 1}},
    )
    scales = [trainer.accelerator.scaler.get_scale() for trainer in (plain, ours)]
    assert scales[0] == scales[1] == 2.0 ** (16 + ours.state.global_step)


def test_scales_of_copies_change_nothing(tmp_path: Path) -> None:
    """Powers of two, exact in bfloat16; of copies, which may be on devices, the scale is on the host all the same."""
    trained = []
    for kind in (RoundPipeTrainer, ScaledInRotation):
        model = llama(num_hidden_layers=1).to(torch.bfloat16)
        trained.append(make_trainer(kind, model, tmp_path, max_grad_norm=0.0))
        trained[-1].train()
    assert_same_weights(*(trainer.model for trainer in trained), within=0.0)
    scaler = trained[1].accelerator.scaler
    assert isinstance(scaler, roundpipe.GradScaler)
    assert scaler.get_scale() == 2.0 ** (16 + trained[1].state.global_step)


@pytest.mark.parametrize("make", [llama, adapted])
def test_a_decoder_keeps_no_keys_and_values_for_its_own_loss(make: Any, tmp_path: Path) -> None:
    """They are in its outputs by default, and would be carried past all layers behind them."""
    trainer = make_trainer(RoundPipeTrainer, make(), tmp_path)
    for run in (trainer.evaluate, trainer.train):
        trainer.model.config.use_cache = True
        run()
        # what is carried for the outputs shows in no report: the loss and scores
        assert len(trainer.pipe._runner.last_chain.exit.reads) == 2


class Observed(RoundPipeTrainer):
    """Keeps losses, and the gradients of the latest step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []
        self.gradients: dict[str, torch.Tensor] = {}

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(float(loss))
        self.gradients = {name: each.grad.clone() for name, each in self.model.named_parameters()}
        return loss


@pytest.mark.long
def test_noise_on_embeddings_is_in_loss_and_gradients(tmp_path: Path) -> None:
    """NEFTune's: the slope of the loss, of the same draws, is the gradient's; evaluation has no noise."""

    def in_float64(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch

    size, model = 3e-3, llama(num_hidden_layers=1).double()  # its norms compute in float32
    trainer = make_trainer(
        Observed,
        model,
        tmp_path,
        devices=2,
        compute_loss_func=in_float64,
        neftune_noise_alpha=5.0,
        max_steps=1,
        max_grad_norm=0.0,
        learning_rate=0.0,
    )
    weights = dict(model.named_parameters())

    def train(seed: int = 5) -> float:
        torch.manual_seed(seed)
        trainer.train()
        return trainer.losses[-1]

    train()  # measures what the loss is, too, which draws numbers
    train()
    gradients = trainer.gradients
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"):
        direction = gradients[name] / gradients[name].norm() + torch.randn_like(weights[name]) / 100
        around = []
        for step in (-size, 2 * size, -size):
            with torch.no_grad():
                weights[name].add_(step * direction)
            around.append(train())
        slope = float((gradients[name] * direction).sum())
        assert (around[1] - around[0]) / (2 * size) == pytest.approx(slope, rel=1e-3), name
    assert train(6) != pytest.approx(around[-1], rel=1e-6)
    evaluated = [trainer.evaluate()["eval_loss"] for _ in range(2)]
    assert evaluated[0] == evaluated[1] and not model.get_input_embeddings()._forward_hooks


@pytest.mark.long
def test_a_batch_size_is_found_by_trial(tmp_path: Path) -> None:
    def without_room(kind: type[Trainer]) -> type[Trainer]:
        class WithoutRoom(kind):  # type: ignore[misc, valid-type]
            """Has room for three samples."""

            def training_step(self, model: Any, inputs: Any, *args: Any) -> torch.Tensor:
                if len(inputs["input_ids"]) > 3:
                    raise RuntimeError("CUDA out of memory.")
                result: torch.Tensor = super().training_step(model, inputs, *args)
                return result

        return WithoutRoom

    options = {"auto_find_batch_size": True, "per_device_train_batch_size": 4}
    kinds = without_room(Trainer), without_room(RoundPipeTrainer)
    plain, ours = train_both(llama, tmp_path, kinds, **options)
    assert plain._train_batch_size == ours._train_batch_size <= 3


@pytest.mark.long
def test_a_batch_size_is_found_that_fits_the_device(tmp_path: Path) -> None:
    """Steps that do not fit leave nothing behind: training is that of a plain trainer with the size that is found."""
    options = {"max_steps": 2, "train_dataset": texts(128), "optim": "sgd", "learning_rate": 0.1}
    rotation = {
        "devices": [roundpipe.Device("cpu", memory_bytes="640KiB")],
        "run_config": {"num_microbatch": 1, "tiles": 1},
    }
    ours = make_trainer(
        RoundPipeTrainer,
        llama(),
        tmp_path,
        rotation=rotation,
        auto_find_batch_size=True,
        per_device_train_batch_size=64,
        **options,
    )
    ours.train()
    found = ours._train_batch_size
    assert 1 < found < 64
    plain = make_trainer(Trainer, llama(), tmp_path, per_device_train_batch_size=found, **options)
    plain.train()
    logs = [[entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (plain, ours)]
    assert logs[0] == pytest.approx(logs[1], abs=1e-5)
    assert_same_weights(plain.model, ours.model)


@pytest.mark.parametrize("make", [llama, adapted], ids=["full", "adapters"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_trl_makes_few_traces(make: Any, accumulation: int, tmp_path: Path) -> None:
    """Batches have other lengths at each step; the optimizer is SGD, since others let tiny gradients count."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")

    class InRotation(RoundPipeTrainerMixin, trl.SFTTrainer):  # type: ignore[misc]
        """The same in rotation."""

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(number): number for number in range(48)}, "0"))
    names = {"unk_token": "0", "pad_token": "1", "eos_token": "2"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names)
    rows = [{"input_ids": [3 + (row * 7 + i) % 40 for i in range(3 + row * 5 % 11)]} for row in range(48)]
    trained = []
    for kind in (trl.SFTTrainer, InRotation):
        arguments = trl.SFTConfig(
            str(tmp_path),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=accumulation,
            num_train_epochs=1,
            learning_rate=0.1,
            optim="sgd",
            logging_steps=1,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
        )
        rotation = {"roundpipe": RoundPipeArguments(devices=["cpu"] * 2)} if kind is InRotation else {}
        data = datasets.Dataset.from_list(rows)
        trainer = kind(model=make(), args=arguments, train_dataset=data, processing_class=tokenizer, **rotation)
        trainer.train()
        trained.append(trainer)
    plain, ours = trained
    assert_same_log(plain, ours)
    assert_same_weights(plain.model, ours.model)
    assert ours.pipe.trace_count <= 4
    counts = [[entry["num_tokens"] for entry in each.state.log_history if "num_tokens" in entry] for each in trained]
    assert counts[0] == counts[1]


def test_a_mixin_that_would_change_nothing_is_refused() -> None:
    with pytest.raises(roundpipe.ConfigError, match="put it in front, as in class Behind"):

        class Behind(Trainer, RoundPipeTrainerMixin):
            """Trainer's own methods win."""


def test_batches_without_labels_are_named(tmp_path: Path) -> None:
    rows = [{"input_ids": torch.randint(3, 20, (5,))} for _ in range(4)]
    collate = transformers.default_data_collator
    trainer = make_trainer(
        RoundPipeTrainer, llama(num_hidden_layers=1), tmp_path, train_dataset=rows, data_collator=collate
    )
    with pytest.raises(roundpipe.LossError, match="returned no loss, only logits.*: its batches need labels"):
        trainer.train()
