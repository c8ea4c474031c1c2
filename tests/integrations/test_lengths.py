"""Batches of other lengths at each step, through a fused head as fine-tuning libraries put on a model."""

from __future__ import annotations

import functools
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer
from transformers.modeling_outputs import CausalLMOutput

import roundpipe
from roundpipe.fx.trace.verify import ShapeVerifier
from roundpipe.integrations.transformers import RoundPipeTrainerMixin
from roundpipe.runtime.microbatch.pieces import BatchPieces
from tests.fx import modules
from tests.fx.modules import LogProbs
from tests.integrations.trainers import adapted, bert, classified, llama, padded, texts, train_both

NUM_STEPS = 8


def with_fused_head(model: Any) -> Any:
    """The model; asked for log probabilities it makes no logits, but some at once in an autograd function."""
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    forward = causal.forward

    @functools.wraps(type(causal).forward)
    def fused(self: Any, *args: Any, fused_head: bool = False, labels: Any = None, **kwargs: Any) -> Any:
        if not fused_head:
            return forward(*args, labels=labels, **kwargs)
        hidden = self.model(*args, **kwargs).last_hidden_state[:, :-1]
        targets, weight = labels[:, 1:], self.get_output_embeddings().weight
        found = LogProbs.apply(hidden.reshape(-1, hidden.size(-1)), weight, targets.clamp(min=0).reshape(-1))
        log_probs, is_best = (each.view(targets.shape).masked_fill(targets == -100, 0) for each in found[:2])
        return CausalLMOutput(loss=-log_probs.sum() / (targets != -100).sum(), logits=log_probs, attentions=(is_best,))

    causal.forward = types.MethodType(fused, causal)
    return model


class Fused(Trainer):
    """Its loss is made of log probabilities; it measures how many targets are best."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **given: Any) -> Any:
        inputs["use_cache"] = False
        outputs = model(**inputs, fused_head=True)
        assert 0 <= float(outputs.attentions[0].sum()) <= inputs["labels"].numel()
        loss = -outputs.logits.sum() / given["num_items_in_batch"]
        return (loss, outputs) if return_outputs else loss


class FusedInRotation(RoundPipeTrainerMixin, Fused):
    """The same in rotation."""


def close_fitting(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Batches as long as their longest text; some have no padding at all."""
    return padded(samples, min_padding=0)


def classes_of_close_fitting(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {**classified(samples), **{name: close_fitting(samples)[name] for name in ("input_ids", "attention_mask")}}


def more(make: Any, name: str, num_microbatches: int) -> Any:
    return pytest.param(make, num_microbatches, id=name, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("make", "num_microbatches"),
    [pytest.param(llama, 1, id="full"), more(llama, "full, batches cut", 2), more(adapted, "adapters, batches cut", 2)],
)
def test_lengths_that_vary_make_few_traces(
    make: Any, num_microbatches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One trace to train, and one to measure the loss if batches are cut, with padding and without any."""
    monkeypatch.setattr(modules, "ROWS_AT_ONCE", 20)  # of up to 70
    runs: list[Any] = []
    verify = ShapeVerifier.__call__
    monkeypatch.setattr(ShapeVerifier, "__call__", lambda self, arguments: runs.append(self) or verify(self, arguments))
    _, ours = train_both(
        lambda: with_fused_head(make(num_hidden_layers=1)),
        tmp_path,
        (Fused, FusedInRotation),
        train_dataset=texts(3 * NUM_STEPS),
        data_collator=close_fitting,
        per_device_train_batch_size=3,
        rotation={"run_config": {"num_microbatch": num_microbatches}},
    )
    assert ours.state.global_step == NUM_STEPS
    assert ours.pipe.trace_count <= (2 if num_microbatches == 1 else 4)
    assert len(runs) <= (0 if num_microbatches == 1 else ours.pipe.trace_count)


@pytest.mark.parametrize(
    ("make", "collate"),
    [pytest.param(llama, close_fitting, id="decoder"), pytest.param(bert, classes_of_close_fitting, id="classifier")],
)
def test_a_run_with_evaluation_makes_two_traces(
    make: Any, collate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pieces that have no padding, and last batches that are short.

    The graphs tell what the model's own loss is, so that nothing is measured.
    """
    evaluated: list[bool] = []
    forward_loss = roundpipe.RoundPipe.forward_loss
    monkeypatch.setattr(
        roundpipe.RoundPipe,
        "forward_loss",
        lambda self, *args, **kwargs: evaluated.append(self.training) or forward_loss(self, *args, **kwargs),
    )
    options = {"devices": 2, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    options |= {"data_collator": collate, "eval_strategy": "steps", "eval_steps": 2}
    # the last batches have 3 samples and 2
    _, ours = train_both(make, tmp_path, train_dataset=texts(11), eval_dataset=texts(6, 2), **options)
    assert ours.pipe.trace_count == 2
    num_evaluations = sum("eval_loss" in entry for entry in ours.state.log_history)  # transformers 5 ends with one
    assert num_evaluations and evaluated == [False] * 2 * num_evaluations  # of two batches each


def test_a_batch_decides_for_its_pieces() -> None:
    """A piece goes the way of its whole batch, with its numbers; where that can't be known it goes its own."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            hidden = self.linear(x)
            return hidden if mask.all() else hidden * mask * mask.sum().item()

    torch.manual_seed(0)
    model, x, mask = Masked(), torch.randn(4, 4), torch.ones(4, 4)
    mask[0, 0] = 0
    kwargs = [{"x": x[rows], "mask": mask[rows]} for rows in (slice(0, 1), slice(1, 4))]
    batch = (), {"x": x, "mask": mask}
    one = {"x": x[:1], "mask": mask[:1, :3]}  # no graph takes both
    expected = [(model.linear(each["x"]) * each["mask"] * mask.sum()).sum() for each in kwargs]
    with roundpipe.compile(model, devices=["cpu"]) as pipe:
        for batches in ([batch, batch], [batch, ((), one)]):
            losses: list[float] = []
            pipe.forward_backward(
                input_kwargs=BatchPieces(kwargs, batches),
                loss_fn=lambda outputs, label, losses=losses: (
                    losses.append(float(outputs.detach().sum())) or outputs.sum()
                ),
            )
            torch.testing.assert_close(sorted(losses), sorted(map(float, expected)))
            expected[1] = model.linear(x[1:]).sum()
