"""A compiled model on devices that hold a quarter of what training it takes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import roundpipe
from roundpipe import Device, DeviceMemoryError, RoundPipeRunConfig
from tests.equality import assert_same_gradients, difference, eager_forward_backward

BATCH = NUM_MICROBATCHES = 8


def language_loss(outputs: Any, label: Any) -> torch.Tensor:
    return outputs.loss


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def weight_bytes(model: Any) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def compiled(model: Any, budget_bytes: int, num_workers: int = 1, grain: Any = "stage") -> Any:
    config = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCHES, recompute_grain=grain)
    devices = [Device("cpu", memory_bytes=budget_bytes)] * num_workers
    return roundpipe.compile(model, devices=devices, model_run_config=config)


@pytest.mark.parametrize(("num_workers", "grain"), [(1, "stage"), (1, "layer"), (2, "stage"), (3, "layer")])
def test_a_quarter_of_weights_and_gradients_is_enough(model: Any, num_workers: int, grain: str) -> None:
    model.zero_grad()
    reference = copy.deepcopy(model)
    budget_bytes = 2 * weight_bytes(model) // 4
    ids = torch.randint(0, 256, (BATCH, 48))
    inputs = {"input_ids": ids, "labels": ids}
    with compiled(model, budget_bytes, num_workers, grain) as pipe:
        for _ in range(2):
            loss = pipe.forward_backward(input_kwargs=inputs, loss_fn=language_loss)
            expected = eager_forward_backward(reference, inputs, language_loss, NUM_MICROBATCHES)
        assert 0.4 * budget_bytes < pipe.peak_device_bytes() <= budget_bytes
    assert difference(loss, expected) <= 1e-5
    assert_same_gradients(model, reference, 1e-5)


def test_below_the_largest_layer_it_is_named_with_its_bytes(model: Any) -> None:
    budget_bytes = weight_bytes(model) // 20
    ids = torch.randint(0, 256, (BATCH, 48))
    head_bytes = sum(p.nbytes for p in [*model.model.layers[11].parameters(), *model.lm_head.parameters()])
    with compiled(model, budget_bytes) as pipe, pytest.raises(DeviceMemoryError) as caught:
        pipe.forward_backward(input_kwargs={"input_ids": ids, "labels": ids}, loss_fn=language_loss)
    message = str(caught.value)
    assert "layer 11 (model.layers.11 .. lm_head)" in message
    assert f"budget of {budget_bytes:,} bytes" in message
    assert f"gradients {head_bytes + model.model.norm.weight.nbytes:,}" in message
