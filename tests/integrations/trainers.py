"""A plain trainer and one in rotation, on the same data: what they log, measure and end with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import Trainer, TrainingArguments

from roundpipe.integrations.transformers import RoundPipeArguments, RoundPipeTrainer, RoundPipeTrainerMixin

VOCAB = 48
LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "train_loss", "epoch", "step")


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, **options}
    config = transformers.LlamaConfig(vocab_size=VOCAB, max_position_embeddings=32, **sizes)
    return transformers.LlamaForCausalLM(config)


def adapted(**options: Any) -> Any:
    """A model with adapters."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    return peft.get_peft_model(llama(**options), config)


def bert() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=VOCAB, num_labels=3, **sizes, **dropout)
    return transformers.BertForSequenceClassification(config)


def texts(number: int, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Token numbers, 3 to 9 of them; no two that follow each other are of one length."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [3 + index * 3 % 7 for index in range(number)]
    return [{"input_ids": torch.randint(3, VOCAB, (length,), generator=generator)} for length in lengths]


def padded(samples: list[dict[str, torch.Tensor]], *, min_padding: int = 1) -> dict[str, torch.Tensor]:
    """A batch, padded by one token at least, so that one graph serves all batches."""
    length = max(len(sample["input_ids"]) for sample in samples) + min_padding
    ids = torch.zeros(len(samples), length, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, sample in enumerate(samples):
        size = len(sample["input_ids"])
        ids[row, :size] = labels[row, :size] = sample["input_ids"]
        mask[row, :size] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def classified(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch = padded(samples)
    return {**batch, "labels": torch.tensor([int(sample["input_ids"].sum()) % 3 for sample in samples])}


def make_trainer(kind: type[Trainer], model: Any, folder: Path, *, devices: int = 1, **given: Any) -> Any:
    """A trainer; what it does not know by name is a training argument."""
    names = ["compute_metrics", "compute_loss_func", "callbacks", "optimizers", "data_collator", "train_dataset"]
    names += ["model_init", "eval_dataset"]
    options = {name: given.pop(name) for name in names if name in given}
    if issubclass(kind, RoundPipeTrainerMixin):
        rotation = given.pop("rotation", {})
        options["roundpipe"] = RoundPipeArguments(**{"devices": ["cpu"] * devices, **rotation})
    given.pop("rotation", None)
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "num_train_epochs": 1,
        "learning_rate": 5e-3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **given,
    }
    options = {"train_dataset": texts(10), "eval_dataset": texts(5, 2), "data_collator": padded, **options}
    arguments = transformers.Seq2SeqTrainingArguments if "predict_with_generate" in settings else TrainingArguments
    args = arguments(**settings)
    args._n_gpu = min(args.n_gpu, 1)  # the plain one would split batches over all cards; it asks when it is made
    return kind(model=model, args=args, **options)


def assert_same_log(plain: Trainer, ours: Trainer, *, within: float = 1e-5) -> None:
    for one, other in zip(plain.state.log_history, ours.state.log_history, strict=True):
        for name in LOGGED:
            assert (name in one) == (name in other), (one, other)
            if name in one:
                assert abs(one[name] - other[name]) <= within * max(1.0, abs(one[name])), (name, one, other)


def assert_same_weights(plain: Any, ours: Any, *, within: float = 1e-5) -> None:
    for (name, one), other in zip(plain.state_dict().items(), ours.state_dict().values(), strict=True):
        torch.testing.assert_close(other, one, rtol=within, atol=within, msg=lambda text, name=name: f"{name}: {text}")


def train_both(
    make: Any,
    folder: Path,
    kinds: tuple[type[Trainer], type[Trainer]] = (Trainer, RoundPipeTrainer),
    within: float = 1e-5,
    **options: Any,
) -> tuple[Any, Any]:
    """Both trainers, trained, compared and returned."""
    plain, ours = (make_trainer(kind, make(), folder / kind.__name__, **options) for kind in kinds)
    plain.train()
    ours.train()
    assert_same_log(plain, ours)
    assert_same_weights(plain.model, ours.model, within=within)
    return plain, ours
