"""Qwen3 decoders with random weights, in bfloat16, for benchmarks that train them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

VOCABULARY = 151_936
NOISE = 50_000_017
"""Random numbers that weights are filled with, over and over: to draw billions takes a minute."""


@dataclass(frozen=True)
class Decoder:
    """A size, and whether it trains whole or by adapters."""

    width: int
    inner: int
    heads: int
    depth: int
    is_tied: bool = False
    lora_rank: int | None = None

    def config(self) -> Any:
        """Of transformers."""
        from transformers import Qwen3Config

        return Qwen3Config(
            architectures=["Qwen3ForCausalLM"],
            vocab_size=VOCABULARY if self.width > 1000 else 1000,
            hidden_size=self.width,
            intermediate_size=self.inner,
            num_hidden_layers=self.depth,
            num_attention_heads=self.heads,
            num_key_value_heads=min(self.heads, 8),
            head_dim=128 if self.width > 1000 else 16,
            max_position_embeddings=40_960,
            tie_word_embeddings=self.is_tied,
            use_cache=False,
        )

    def build(self) -> nn.Module:
        """The model on ``meta``; trained parameters require grad."""
        from transformers import Qwen3ForCausalLM

        with torch.device("meta"):
            model: nn.Module = Qwen3ForCausalLM(self.config())
            if self.lora_rank is not None:
                from peft import LoraConfig, get_peft_model

                model = get_peft_model(model, LoraConfig(r=self.lora_rank, target_modules="all-linear"))  # type: ignore[arg-type, assignment]
        return model.to(torch.bfloat16)


DECODERS = {
    "1.7b": Decoder(2048, 6144, 16, 28, is_tied=True),
    "8b": Decoder(4096, 12288, 32, 36),
    "8b-lora": Decoder(4096, 12288, 32, 36, lora_rank=16),
    "32b-lora": Decoder(5120, 25600, 64, 64, lora_rank=16),
    "tiny": Decoder(64, 96, 4, 6, is_tied=True),
    "tiny-lora": Decoder(64, 96, 4, 6, lora_rank=4),
}


@torch.no_grad()
def fill(model: nn.Module, num_random: int = NOISE) -> None:
    """Random matrices, ones in vectors, and the frequencies of rotary embeddings."""
    noise = torch.empty(num_random, dtype=torch.bfloat16).uniform_(-0.02, 0.02)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
            continue
        for piece in parameter.view(-1).split(noise.numel()):
            piece.copy_(noise[: piece.numel()])
    for name, buffer in model.named_buffers():
        assert name.endswith("inv_freq"), f"nobody has said what {name} holds"
        buffer.copy_(1e6 ** -(torch.arange(buffer.numel()) / buffer.numel()))
