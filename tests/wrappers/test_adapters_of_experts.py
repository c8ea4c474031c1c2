"""Adapters of weights that experts hold in one parameter: PEFT's forward puts other weights in their place."""

from __future__ import annotations

import copy

import pytest
import torch

import roundpipe
from tests.equality import difference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_of_experts_train_in_layers(dtype: torch.dtype) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        use_cache=False,
    )
    experts = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=experts, init_lora_weights=False)
    plain = peft.get_peft_model(transformers.Qwen3MoeForCausalLM(config).to(dtype), lora)
    reference = copy.deepcopy(plain)
    tokens = torch.randint(64, (4, 12))
    batch = {"input_ids": tokens, "labels": tokens}
    with roundpipe.compile(plain, devices=["cpu", "cpu"], example_kwargs=batch, fallback=False) as model:
        assert "mlp.experts" in model.partition_table()
        loss = model.forward_backward(
            input_kwargs=batch, loss_fn=lambda outputs, _: outputs.loss, loss_reduction="mean", return_outputs=False
        )
        gradients = {}
        model.step(
            lambda: gradients.update({name: each.grad for name, each in model.optim_named_parameters()}), is_async=False
        )
    expected = reference(**batch).loss
    expected.backward()
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    assert difference(loss, expected) <= tolerance
    trained = {name: parameter.grad for name, parameter in reference.named_parameters() if parameter.requires_grad}
    assert gradients.keys() == trained.keys() and any("experts" in name for name in trained)
    for name, gradient in trained.items():
        assert difference(gradients[name], gradient) <= 5 * tolerance, name
