"""Small models of every shape that the compiler and the runtime must serve, built from their configs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 96


@dataclass(frozen=True)
class Case:
    """A model, inputs for it and a loss."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], dict[str, Any]]
    """``(batch, length) -> keyword arguments``."""
    loss: Callable[[Any, Any], torch.Tensor] = lambda outputs, label: outputs.loss
    has_length: bool = True
    dtype: torch.dtype = torch.float64
    min_layers: int = 3

    def __str__(self) -> str:
        return self.name

    def make(self) -> nn.Module:
        """The model, the same at every call, with no dropout in the way of comparing with eager."""
        torch.manual_seed(0)
        model = self.build().to(self.dtype)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.02)
        return model.train()


def token_ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length))


def text(batch: int, length: int) -> dict[str, Any]:
    ids = token_ids(batch, length)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def padded_text(batch: int, length: int) -> dict[str, Any]:
    inputs = text(batch, length)
    inputs["attention_mask"][:, :2] = 0
    return inputs


def _transformer(config: str, model: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**options))

    return build


_DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
    "attention_dropout": 0.0,
}


def images(batch: int, length: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(batch, 3, 16, 16), "labels": torch.randint(0, 5, (batch,))}


def pictures(batch: int, length: int) -> dict[str, Any]:
    return {"x": torch.randn(batch, 3, 16, 16)}


def squared(outputs: Any, label: Any) -> torch.Tensor:
    return outputs.float().pow(2).mean() if outputs.dtype is torch.float32 else outputs.pow(2).mean()


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.first_norm(self.first(x)))
        out = self.second_norm(self.second(out))
        out += x
        return self.relu(out)


class ResNet(nn.Module):
    """Residual blocks with batch normalisation and in-place activations."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(*(ResidualBlock(8) for _ in range(4)))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class UNet(nn.Module):
    """Skips from every level down to the same level up."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1) for i in range(depth))
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ModuleList(nn.Conv2d(16, 8, 3, padding=1) for _ in range(depth))
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for conv in self.down:
            x = torch.tanh(conv(x))
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = torch.tanh(self.middle(x))
        for conv in self.up:
            skip = skips.pop()
            x = F.interpolate(x, size=skip.shape[-2:], mode="nearest")
            x = torch.tanh(conv(torch.cat([x, skip], dim=1)))
        return self.out(x)


class SharedTwice(nn.Module):
    """One block called at two depths, and one weight used by two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.block = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.between = nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        x = x + self.block(x)
        x = torch.tanh(self.between(x))
        x = x + self.block(x)
        return self.head(x)


class ManyOutputs(nn.Module):
    """A dict of outputs with auxiliary losses from inside, a tuple and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.gates = nn.ModuleList(nn.Linear(16, 3) for _ in range(4))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        auxiliary = []
        hidden = []
        for layer, gate in zip(self.layers, self.gates, strict=True):
            weights = gate(x).softmax(-1)
            auxiliary.append((weights.mean(0) ** 2).sum())
            x = x + torch.tanh(layer(x)) * weights[:, :1]
            hidden.append(x)
        return {
            "logits": self.head(x),
            "hidden": tuple(hidden),
            "auxiliary": sum(auxiliary),
            "unused": None,
            "depth": len(self.layers),
        }


def many_loss(outputs: Any, label: Any) -> torch.Tensor:
    return outputs["logits"].pow(2).mean() + 0.1 * outputs["auxiliary"] + outputs["hidden"][1].abs().mean()


CASES = [
    Case("llama", _transformer("LlamaConfig", "LlamaForCausalLM", **_DECODER), text),
    Case("qwen3", _transformer("Qwen3Config", "Qwen3ForCausalLM", **_DECODER, head_dim=8), text),
    Case(
        "gpt2",
        _transformer(
            "GPT2Config",
            "GPT2LMHeadModel",
            vocab_size=VOCAB,
            n_embd=32,
            n_layer=4,
            n_head=4,
            n_positions=64,
            use_cache=False,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        ),
        text,
    ),
    Case(
        "bert",
        _transformer(
            "BertConfig",
            "BertForMaskedLM",
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        padded_text,
    ),
    Case(
        "t5",
        _transformer(
            "T5Config",
            "T5ForConditionalGeneration",
            vocab_size=VOCAB,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=3,
            num_heads=4,
            dropout_rate=0.0,
            use_cache=False,
            decoder_start_token_id=0,
            pad_token_id=0,
        ),
        text,
        dtype=torch.float64,
    ),
    Case(
        "vit",
        _transformer(
            "ViTConfig",
            "ViTForImageClassification",
            image_size=16,
            patch_size=4,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_labels=5,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        images,
        has_length=False,
    ),
    Case(
        "qwen3_moe",
        _transformer(
            "Qwen3MoeConfig",
            "Qwen3MoeForCausalLM",
            **_DECODER,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            output_router_logits=True,
        ),
        text,
        dtype=torch.float32,
    ),
    Case("resnet", ResNet, pictures, squared, has_length=False),
    Case("unet", UNet, pictures, squared, has_length=False),
    Case("shared_twice", SharedTwice, lambda b, s: {"input_ids": token_ids(b, s)}, squared),
    Case("many_outputs", ManyOutputs, lambda b, s: {"x": torch.randn(b, 16)}, many_loss, has_length=False),
]
"""The models that must equal eager in everything."""


def in_dtype(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Inputs with floating-point tensors in a dtype."""
    return {
        name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
