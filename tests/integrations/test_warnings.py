"""What a trainer in rotation says where all is as in the plain one: nothing, and nothing that a trainer can't do."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from roundpipe.integrations.transformers import RoundPipeTrainer
from tests.integrations.trainers import VOCAB, bert, classified, make_trainer, padded, texts, train_both

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def masked_model() -> Any:
    torch.manual_seed(0)
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=VOCAB, **SIZES, **dropout))


def mixture() -> Any:
    """Whose loss has a term that is no mean over samples."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        head_dim=8,
        num_key_value_heads=2,
        decoder_sparse_step=1,
        output_router_logits=True,
        **SIZES,
    )
    return transformers.Qwen3MoeForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "collate", "accumulated", "number"),
    [
        (masked_model, padded, 1, "auto"),
        (masked_model, padded, 2, 1),
        (bert, classified, 2, 1),
        (mixture, padded, 2, 1),
    ],
    ids=["masked, cut", "masked, accumulated", "classes, accumulated", "mixture, accumulated"],
)
def test_losses_that_are_weighed_as_in_the_plain_trainer(
    make: Any, collate: Any, accumulated: int, number: Any, tmp_path: Path
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_both(
            make,
            tmp_path,
            train_dataset=texts(8),
            data_collator=collate,
            gradient_accumulation_steps=accumulated,
            rotation={"run_config": {"num_microbatch": number}},
        )
    said = [str(warning.message) for warning in caught]
    assert not [text for text in said if "added up" in text or "microbatches" in text]


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.last(self.norm(self.first(x)))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_a_last_batch_with_too_few_samples_alone_is_not_cut(tmp_path: Path) -> None:
    samples = [{"x": torch.randn(5), "labels": index % 3} for index in range(18)]
    options = {"per_device_train_batch_size": 8, "num_train_epochs": 3, "remove_unused_columns": False}
    options |= {"train_dataset": samples, "data_collator": transformers.default_data_collator, "devices": 2}
    trainer = make_trainer(RoundPipeTrainer, Normed(), tmp_path, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    said = [str(warning.message) for warning in caught if "by itself" in str(warning.message)]
    assert len(said) == 1 and "a batch with such a piece is not cut" in said[0]
    assert int(trainer.model.norm.num_batches_tracked) == 3 * (3 + 3 + 1)
