"""RoundPipeTrainer against Trainer: logs, metrics, checkpoints and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import Trainer

import roundpipe
from roundpipe.integrations.transformers import RoundPipeTrainer, RoundPipeTrainerMixin
from roundpipe.wrappers.streamed import StreamedModel
from tests.integrations.trainers import (
    VOCAB,
    adapted,
    assert_same_log,
    assert_same_weights,
    bert,
    classified,
    llama,
    make_trainer,
    padded,
    texts,
    train_both,
)


def accuracy(predicted: Any) -> dict[str, float]:
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


def test_a_decoder_with_padding_is_equal(tmp_path: Path) -> None:
    """Accumulation of 3, the last uneven; three workers; evaluation; a checkpoint in the middle."""
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

    names = [
        {path.name for path in (tmp_path / kind / "checkpoint-2").iterdir()} for kind in ("RoundPipeTrainer", "Trainer")
    ]
    assert names[0] == names[1]


@pytest.mark.long
def test_each_trainer_resumes_from_the_others_checkpoint(tmp_path: Path) -> None:
    options = {"devices": 3, "gradient_accumulation_steps": 3, "num_train_epochs": 2, "save_strategy": "epoch"}
    train_both(llama, tmp_path, **options)
    saved = tmp_path / "RoundPipeTrainer" / "checkpoint-2"
    exchanged = make_trainer(Trainer, llama(), tmp_path / "exchanged", **options)
    exchanged.train(resume_from_checkpoint=str(saved))
    resumed = make_trainer(RoundPipeTrainer, llama(), tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "Trainer" / "checkpoint-2"))
    assert_same_log(exchanged, resumed)
    assert_same_weights(exchanged.model, resumed.model)


@pytest.mark.parametrize("step", [2, pytest.param(1, marks=pytest.mark.long)])
def test_a_resumed_run_is_bit_equal(step: int, tmp_path: Path) -> None:
    """With dropout, between two epochs and in the middle of the first; the checkpoint is the rotation's own.

    In the middle of a later one, transformers 4.57 goes on with other batches, with its own trainer as well.
    """
    options = {"devices": 2, "gradient_accumulation_steps": 3, "num_train_epochs": 2}
    options |= {"save_strategy": "steps", "save_steps": step}
    whole = make_trainer(
        RoundPipeTrainer, llama(attention_dropout=0.1, num_hidden_layers=1), tmp_path / "whole", **options
    )
    whole.train()
    resumed = make_trainer(
        RoundPipeTrainer, llama(attention_dropout=0.1, num_hidden_layers=1), tmp_path / "resumed", **options
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
    assert_same_weights(whole.model, resumed.model, within=0)
    steps = [trainer.state.log_history[:-1] for trainer in (whole, resumed)]  # the last is of each run as a whole
    logs = [[(entry["loss"], entry["grad_norm"]) for entry in each] for each in steps]
    assert logs[0] == logs[1]


class TwoCalls(Trainer):
    """Its loss is made of two calls of the model."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **given: Any) -> Any:
        outputs, again = model(**inputs), model(input_ids=inputs["input_ids"])
        loss = outputs.loss + 0.1 * (outputs.logits - again.logits).square().mean()
        return (loss, outputs) if return_outputs else loss


class TwoCallsInRotation(RoundPipeTrainerMixin, TwoCalls):
    """The same in rotation."""


class SumInTraining(Trainer):
    """Its loss is a sum in training, and a mean in evaluation."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **given: Any) -> Any:
        outputs = model(inputs["input_ids"], attention_mask=inputs["attention_mask"])
        reduction = "sum" if model.training and self.model.training else "mean"
        loss = torch.nn.functional.cross_entropy(outputs.logits, inputs["labels"], reduction=reduction)
        return (loss, outputs) if return_outputs else loss


class SumInTrainingInRotation(RoundPipeTrainerMixin, SumInTraining):
    """The same in rotation."""


def test_loss_code_that_asks_for_the_mode_is_measured_as_it_trains(tmp_path: Path) -> None:
    options = {"devices": 2, "data_collator": classified, "eval_strategy": "epoch"}
    train_both(bert, tmp_path, (SumInTraining, SumInTrainingInRotation), **options)


class Inside(Trainer):
    """Its loss is made of what modules of the model give."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **given: Any) -> Any:
        hidden = model.model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state
        logits = model.lm_head(hidden)
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), inputs["labels"])
        return (loss, {"logits": logits}) if return_outputs else loss


class InsideInRotation(RoundPipeTrainerMixin, Inside):
    """The same in rotation."""


class Weighted(Trainer):
    """Its loss is a mean by the weights of classes."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **given: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weight = torch.tensor([0.2, 1.0, 3.0], device=outputs.logits.device)
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels, weight=weight)
        return (loss, outputs) if return_outputs else loss


class WeightedInRotation(RoundPipeTrainerMixin, Weighted):
    """The same in rotation."""


@pytest.mark.filterwarnings("ignore:the loss is neither")
def test_class_weights_are_equal_where_the_first_samples_are_of_one_class(tmp_path: Path) -> None:
    """They looked like a mean over samples then, and later batches were cut as one."""

    def rare(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        labels = [max(0, len(sample["input_ids"]) - 7) for sample in samples]  # 0 for most, 1 or 2
        return {**padded(samples), "labels": torch.tensor(labels)}

    options = {"devices": 2, "data_collator": rare, "per_device_train_batch_size": 3, "num_train_epochs": 2}
    train_both(bert, tmp_path, (Weighted, WeightedInRotation), **options)


def summed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss that is given as `compute_loss_func`."""
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


def of_halves(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Compares one half of a batch with the other, as losses of preferences do; a single sample has no halves."""
    chosen, rejected = outputs.logits.mean((1, 2)).chunk(2)
    return torch.nn.functional.softplus(rejected - chosen).mean()


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_loss_of_halves_is_not_cut(accumulation: int, tmp_path: Path) -> None:
    """Nor where the accumulation at the end has fewer batches, which would be cut."""
    options = {"devices": 2, "compute_loss_func": of_halves, "gradient_accumulation_steps": accumulation}
    with pytest.warns(UserWarning, match="can't be computed for single samples"):
        train_both(llama, tmp_path, per_device_train_batch_size=2, num_train_epochs=2, **options)


class Centred(transformers.LlamaForCausalLM):
    """Subtracts the mean over a batch."""

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        embedded = self.model.embed_tokens(input_ids)
        return super().forward(inputs_embeds=embedded - 0.5 * embedded.mean(0), **kwargs)


def centred() -> Any:
    torch.manual_seed(0)
    return Centred(llama().config)


@pytest.mark.filterwarnings("ignore:the loss is neither", "ignore:.*mixes the samples")
def test_a_model_that_mixes_samples_is_not_cut(tmp_path: Path) -> None:
    """Though the graph of its own loss tells that it is a mean over tokens."""
    train_both(centred, tmp_path, devices=2, per_device_train_batch_size=4, num_train_epochs=2, eval_strategy="epoch")


def t5() -> Any:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    config = transformers.T5Config(vocab_size=VOCAB, decoder_start_token_id=0, **sizes)
    return transformers.T5ForConditionalGeneration(config)


UNCUT, FASTEST = {"num_microbatch": 1}, {"num_microbatch": "auto"}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "encoder classifier, cut by samples": (bert, {"devices": 3, "data_collator": classified, "eval_strategy": "epoch"}),
    "seq2seq, cut by tokens": (t5, {"devices": 3, "eval_strategy": "epoch"}),
    "adapters": (adapted, {"devices": 3, "gradient_accumulation_steps": 4}),
    "decoder, accumulated": (llama, {"gradient_accumulation_steps": 4, "eval_strategy": "epoch"}),
    "encoder classifier, accumulated": (
        bert,
        {"devices": 2, "data_collator": classified, "gradient_accumulation_steps": 4, "eval_strategy": "epoch"},
    ),
    "seq2seq, accumulated": (t5, {"devices": 3, "gradient_accumulation_steps": 4, "eval_strategy": "epoch"}),
    "adapters, cut": (adapted, {"devices": 2}),
    "as many microbatches as are fastest": (
        adapted,
        {"per_device_train_batch_size": 4, "eval_strategy": "epoch", "rotation": {"run_config": FASTEST}},
    ),
    "label smoothing": (llama, {"devices": 2, "label_smoothing_factor": 0.1, "eval_strategy": "epoch"}),
    "compute_loss_func": (llama, {"compute_loss_func": summed, "gradient_accumulation_steps": 2}),
    "bf16, no batch cut": (
        llama,
        {
            "bf16": True,
            "gradient_accumulation_steps": 3,
            "rotation": {"run_config": {"num_microbatch": 1}},
            "within": 0,
        },
    ),
    "gradient checkpointing": (llama, {"gradient_checkpointing": True, "gradient_accumulation_steps": 3}),
    "no clipping": (llama, {"max_grad_norm": 0.0, "gradient_accumulation_steps": 2}),
    "modules of the model": (llama, {"kinds": (Inside, InsideInRotation), "devices": 2, "eval_strategy": "epoch"}),
    "two calls": (llama, {"kinds": (TwoCalls, TwoCallsInRotation), "devices": 2}),
}
IN_PARTS = "modules of the model"
LONG = [pytest.param(*CASES[name], id=name, marks=() if name == IN_PARTS else pytest.mark.long) for name in CASES]


@pytest.mark.filterwarnings("ignore:.*does not call the model exactly once")
@pytest.mark.parametrize(("make", "options"), LONG)
def test_more_models_and_losses_are_equal(make: Any, options: dict[str, Any], tmp_path: Path) -> None:
    train_both(make, tmp_path, **options)


@pytest.mark.long
def test_updates_that_run_beside_the_next_step(tmp_path: Path) -> None:
    """The third step trains on the weights after the first: an update later than plain training, and logged so."""
    options = {"devices": 2, "gradient_accumulation_steps": 2, "rotation": {"is_async": True}}
    late = make_trainer(RoundPipeTrainer, llama(), tmp_path / "late", save_strategy="epoch", **options)
    late.train()
    assert late.pipe._session.optimizer.is_async  # private: no update was waited for as a plain one
    plain = make_trainer(Trainer, llama(), tmp_path / "plain", gradient_accumulation_steps=2)
    plain.train()
    logs = [[entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (late, plain)]
    assert logs[0][0] == pytest.approx(logs[1][0], rel=1e-5)
    assert logs[0][1:] != logs[1][1:]
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "late" / f"checkpoint-{late.state.global_step}")
    assert_same_weights(late.model, again, within=0)


@pytest.mark.long
def test_half_precision_has_float32_copies(tmp_path: Path) -> None:
    trainer = make_trainer(RoundPipeTrainer, llama().bfloat16(), tmp_path, gradient_accumulation_steps=3)
    trainer.train()
    copies = dict(trainer.pipe.optim_named_parameters())
    assert {copy.dtype for copy in copies.values()} == {torch.float32}
    for name, weight in trainer.model.named_parameters():
        assert torch.equal(weight, copies[name].bfloat16()), name


def unlabelled(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch = padded(samples)
    del batch["labels"]
    return batch


class Seq2SeqInRotation(RoundPipeTrainerMixin, transformers.Seq2SeqTrainer):
    """The same in rotation."""


def test_predictions_are_generated_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    call = StreamedModel.call
    monkeypatch.setattr(StreamedModel, "call", lambda self, name, *args: names.append(name) or call(self, name, *args))
    predictions = []
    for kind in (transformers.Seq2SeqTrainer, Seq2SeqInRotation):
        options = {"predict_with_generate": True, "generation_max_length": 6, "data_collator": unlabelled}
        trainer = make_trainer(kind, t5(), tmp_path, **options)
        predictions.append(torch.tensor(trainer.predict(texts(4, 3)).predictions))
        assert "generate" not in vars(trainer.model)
    assert torch.equal(*predictions) and names == ["generate"]


@pytest.mark.long
def test_evaluations_measure_what_is_generated_beside_the_loss(tmp_path: Path) -> None:
    """During training, and once more with a beam; the best checkpoint is loaded at the end."""

    def first_tokens(predicted: Any) -> dict[str, float]:
        return {"accuracy": float(predicted.predictions[:, 1:3].mean())}

    options = {
        "devices": 2,
        "gradient_accumulation_steps": 3,
        "learning_rate": 0.1,
        "adam_epsilon": 1e-5,  # else a gradient that is little but rounding makes full steps
        "predict_with_generate": True,
        "generation_max_length": 7,
        "compute_metrics": first_tokens,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
    }
    trainers = train_both(t5, tmp_path, (transformers.Seq2SeqTrainer, Seq2SeqInRotation), **options)
    plain, ours = (trainer.predict(texts(5, 7), num_beams=2) for trainer in trainers)
    assert (plain.predictions == ours.predictions).all() and (plain.label_ids == ours.label_ids).all()
    assert plain.metrics["test_loss"] == pytest.approx(ours.metrics["test_loss"], abs=1e-5)


class Asking(RoundPipeTrainer):
    """Its loss code asks both the model that it is given and the trainer's for what they have."""

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        self.found = [
            (hasattr(each, "generate"), isinstance(each, type(self.pipe.model))) for each in (model, self.model)
        ]
        return super().compute_loss(model, *args, **kwargs)


@pytest.mark.parametrize(("make", "collate"), [(bert, classified), (llama, padded)])
def test_in_evaluation_loss_code_sees_what_the_model_has(make: Any, collate: Any, tmp_path: Path) -> None:
    trainer = make_trainer(Asking, make(), tmp_path, data_collator=collate)
    model, names = trainer.model, set(vars(trainer.model))
    trainer.evaluate()
    assert trainer.found == [(hasattr(model, "generate"), True)] * 2
    assert trainer.model is model and set(vars(model)) == names
