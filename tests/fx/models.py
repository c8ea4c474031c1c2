"""The models that the compiler is tested with, by name: small ones of transformers, and those written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from tests.fx.inputs import VOCABULARY, Case, causal_inputs, image_inputs, padded_inputs, sequence_inputs
from tests.fx.modules import HANDWRITTEN

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _transformers(config: str, model: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**options))

    return build


def llama(num_layers: int = 4, **options: Any) -> nn.Module:
    """A small Llama."""
    settings = {**_TEXT, "num_key_value_heads": 2, "use_cache": False, "num_hidden_layers": num_layers}
    return _transformers("LlamaConfig", "LlamaForCausalLM", **{**settings, **options})()


_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 64,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 3,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "use_cache": False,
}
_VIT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
_MOE = {
    **_TEXT,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "output_router_logits": True,
    "use_cache": False,
}

TRANSFORMERS: dict[str, Case] = {
    "llama": Case(llama, causal_inputs),
    "llama_padded": Case(llama, padded_inputs),
    "llama_with_cache": Case(lambda: llama(use_cache=True), causal_inputs),
    "qwen3": Case(
        _transformers("Qwen3Config", "Qwen3ForCausalLM", **_TEXT, num_key_value_heads=2, head_dim=8, use_cache=False),
        causal_inputs,
    ),
    "gpt2_tied": Case(_transformers("GPT2Config", "GPT2LMHeadModel", **_GPT2), causal_inputs),
    "bert": Case(_transformers("BertConfig", "BertForMaskedLM", **_TEXT), padded_inputs),
    "t5": Case(_transformers("T5Config", "T5ForConditionalGeneration", **_T5), sequence_inputs),
    "vit": Case(_transformers("ViTConfig", "ViTForImageClassification", **_VIT), image_inputs, lengths=(16,)),
    "qwen3_moe": Case(_transformers("Qwen3MoeConfig", "Qwen3MoeForCausalLM", **_MOE), causal_inputs),
}

CASES: dict[str, Case] = {**TRANSFORMERS, **HANDWRITTEN}
