"""Texts that a forward completes once and for good, as `problem_type` of a configuration, stay with the model."""

from __future__ import annotations

import logging
import types
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe


class Completes(nn.Module):
    """Its forward sets a field of its configuration."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
        self.config = types.SimpleNamespace(task=None, number=None, loss="mean")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        config: Any = self.config
        if self.kind == "once" and config.task is None:
            config.task = "regression" if x.is_floating_point() else "classification"
        if self.kind == "each time":
            config.task = "of this call"
        if self.kind == "a number" and config.number is None:
            config.number = 1234
        if self.kind == "another" and config.loss == "mean":
            config.loss = "a sum"
        y = self.layers(x)
        return y if config.task != "regression" else 2 * y


def _calls(kind: str) -> tuple[Completes, list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    model = Completes(kind)
    x = torch.randn(6, 4).double()
    expected = model(x).detach()
    model.config.task = model.config.number = None
    model.config.loss = "mean"
    with roundpipe.compile(model, devices=["cpu"]) as pipe, torch.no_grad():
        return model, [pipe(x) for _ in range(3)], expected


def test_what_the_first_call_completes_stays_and_needs_no_other_trace(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "roundpipe"):
        model, outputs, expected = _calls("once")
    assert model.config.task == "regression"
    assert all(torch.allclose(output, expected, rtol=0, atol=1e-12) for output in outputs)
    assert sum("traced Completes" in record.getMessage() for record in caplog.records) == 1
    assert "as if it had not" not in caplog.text


@pytest.mark.parametrize("kind", ["each time", "a number", "another"])
def test_what_may_be_of_one_call_is_told_of(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model, outputs, expected = _calls(kind)
    assert (model.config.task, model.config.number, model.config.loss) == (None, None, "mean")
    assert all(torch.allclose(output, expected, rtol=0, atol=1e-12) for output in outputs)
    assert "its forward sets Completes.config; the compiled model runs as if it had not" in caplog.text


def test_a_classifier_saves_what_its_labels_are(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=32, num_labels=3, **sizes))
    batch = {"input_ids": torch.randint(0, 32, (4, 6)), "labels": torch.randint(0, 3, (4,))}
    with roundpipe.compile(model, devices=["cpu"]) as pipe:
        pipe.forward_backward((), batch, loss_fn=lambda outputs, _: outputs.loss)
        model.save_pretrained(tmp_path)
    saved = transformers.AutoConfig.from_pretrained(tmp_path)
    assert saved.problem_type == "single_label_classification"
