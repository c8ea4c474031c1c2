"""Models with random weights whose device memory is measured: small in depth, and as wide as real ones are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Size:
    """How large the models are."""

    hidden: int
    inner: int
    heads: int
    head_size: int
    depth: int
    tokens: int
    """Of a sequence."""
    image: int
    channels: int
    divide_vocabulary_by: int = 1

    def vocabulary(self, full: int) -> int:
        return full // self.divide_vocabulary_by


FULL = Size(2048, 6144, 16, 128, 12, 2048, 224, 192)
SMALL = Size(32, 96, 2, 16, 4, 32, 32, 8, 64)


@dataclass(frozen=True)
class Case:
    """A model, one call's arguments and what is trained on."""

    model: nn.Module
    args: tuple[Any, ...]
    label: Any
    loss_fn: Callable[[Any, Any], torch.Tensor]


class Norm(nn.Module):
    """Root mean square norm, in float32 inside."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        wide = value.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(value.dtype)


class Attention(nn.Module):
    """Of a sequence to itself, or to another one; half as many heads for keys and values."""

    def __init__(self, size: Size, causal: bool, linear: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.size, self.causal, self.kv_heads = size, causal, max(size.heads // 2, 1)
        inside, kv = size.heads * size.head_size, self.kv_heads * size.head_size
        self.q, self.k, self.v = linear(size.hidden, inside), linear(size.hidden, kv), linear(size.hidden, kv)
        self.o = linear(inside, size.hidden)

    def forward(self, value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        def split(part: torch.Tensor, heads: int) -> torch.Tensor:
            return part.unflatten(-1, (heads, self.size.head_size)).transpose(1, 2)

        q = split(self.q(value), self.size.heads)
        k, v = (split(linear(other), self.kv_heads) for linear in (self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    """As in decoders."""

    def __init__(self, size: Size, linear: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.gate, self.up = linear(size.hidden, size.inner), linear(size.hidden, size.inner)
        self.down = linear(size.inner, size.hidden)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(value)) * self.up(value))


class Experts(nn.Module):
    """Each expert takes the tokens that it is chosen for most: their number is known."""

    def __init__(self, size: Size, num_experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(size.hidden, num_experts, bias=False)
        self.experts = nn.ModuleList(GatedMLP(size, plain_linear) for _ in range(num_experts))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        rows = value.flatten(0, 1)
        scores = self.router(rows).float().softmax(-1)
        number = rows.shape[0] // len(self.experts) * 2
        result = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            weights, chosen = scores[:, index].topk(number)
            made = expert(rows[chosen]) * weights[:, None].to(rows.dtype)
            result = result.index_add(0, chosen, made)
        return result.view_as(value)


class Block(nn.Module):
    """Pre-norm attention and MLP; with ``crosses`` also attention to another sequence."""

    def __init__(
        self,
        size: Size,
        mlp: nn.Module,
        causal: bool = True,
        crosses: bool = False,
        linear: Callable[[int, int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        linear = linear or plain_linear
        self.norms = nn.ModuleList(Norm(size.hidden) for _ in range(3 if crosses else 2))
        self.attention = Attention(size, causal, linear)
        self.cross = Attention(size, False, linear) if crosses else None
        self.mlp = mlp

    def forward(self, value: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        normal = self.norms[0](value)
        value = value + self.attention(normal, normal)
        if self.cross is not None:
            value = value + self.cross(self.norms[2](value), other)
        return value + self.mlp(self.norms[1](value))


def plain_linear(inputs: int, outputs: int) -> nn.Module:
    """A linear layer without bias."""
    return nn.Linear(inputs, outputs, bias=False)


class LoRA(nn.Module):
    """A frozen linear layer with two thin ones beside it that are trained."""

    def __init__(self, inputs: int, outputs: int, rank: int = 16) -> None:
        super().__init__()
        self.base = plain_linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = plain_linear(inputs, rank), plain_linear(rank, outputs)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.base(value) + self.up(self.down(value))


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """In float32, as training scripts have it."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def is_loss(outputs: Any, label: Any) -> torch.Tensor:
    """Of a model that returns its loss."""
    return outputs


class Decoder(nn.Module):
    """A language model; given labels it returns its loss."""

    def __init__(
        self, size: Size, vocabulary: int, tied: bool, cap: float | None = None, lora: bool = False, moe: bool = False
    ) -> None:
        super().__init__()
        linear = LoRA if lora else plain_linear
        self.cap = cap
        self.embed = nn.Embedding(vocabulary, size.hidden)
        self.blocks = nn.ModuleList(
            Block(size, Experts(size) if moe else GatedMLP(size, linear), linear=linear) for _ in range(size.depth)
        )
        self.norm, self.head = Norm(size.hidden), plain_linear(size.hidden, vocabulary)
        if tied:
            self.head.weight = self.embed.weight
        if lora:
            for module in (self.embed, self.norm, self.head, *(block.norms for block in self.blocks)):
                module.requires_grad_(False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        value = self.embed(ids)
        for block in self.blocks:
            value = block(value)
        logits = self.head(self.norm(value))
        if self.cap is not None:
            logits = torch.tanh(logits / self.cap) * self.cap
        return logits if labels is None else cross_entropy(logits, labels)


class EncoderDecoder(nn.Module):
    """Every block of the decoder reads what the encoder made."""

    def __init__(self, size: Size, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, size.hidden)
        half = size.depth // 2
        self.encoder = nn.ModuleList(Block(size, GatedMLP(size, plain_linear), causal=False) for _ in range(half))
        self.decoder = nn.ModuleList(Block(size, GatedMLP(size, plain_linear), crosses=True) for _ in range(half))
        self.norm, self.head = Norm(size.hidden), plain_linear(size.hidden, vocabulary)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        other = self.embed(ids)
        for block in self.encoder:
            other = block(other)
        value = self.embed(labels)
        for block in self.decoder:
            value = block(value, other)
        return cross_entropy(self.head(self.norm(value)), labels)


class ViT(nn.Module):
    """Patches of 16 x 16, blocks with layer norm and GELU."""

    def __init__(self, size: Size, classes: int = 1000) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, size.hidden, 16, stride=16)
        self.positions = nn.Parameter(torch.zeros((size.image // 16) ** 2, size.hidden))
        self.blocks = nn.ModuleList(
            Block(
                size,
                nn.Sequential(nn.Linear(size.hidden, size.inner), nn.GELU(), nn.Linear(size.inner, size.hidden)),
                causal=False,
            )
            for _ in range(size.depth)
        )
        self.norm, self.head = nn.LayerNorm(size.hidden), nn.Linear(size.hidden, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        value = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            value = block(value)
        return self.head(self.norm(value).mean(1))


class UNet(nn.Module):
    """Each level down is kept for the level up at the other end of the model."""

    def __init__(self, size: Size, levels: int = 4) -> None:
        super().__init__()
        widths = [size.channels * min(2**level, 4) for level in range(levels)]
        self.begin = nn.Conv2d(3, widths[0], 3, padding=1)
        self.down = nn.ModuleList(
            self.block(inputs, outputs) for inputs, outputs in zip([widths[0], *widths], widths, strict=False)
        )
        turned = [*widths[::-1][1:], widths[0]]
        self.up = nn.ModuleList(
            self.block(2 * inputs, outputs) for inputs, outputs in zip(widths[::-1], turned, strict=True)
        )
        self.end = nn.Conv2d(widths[0], 3, 3, padding=1)

    def block(self, inputs: int, outputs: int) -> nn.Module:
        def half(inputs: int) -> list[nn.Module]:
            return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU()]

        return nn.Sequential(*half(inputs), *half(outputs))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        value, kept = self.begin(images), []
        for block in self.down:
            value = block(value)
            kept.append(value)
            value = F.avg_pool2d(value, 2)
        for block in self.up:
            value = F.interpolate(value, scale_factor=2.0)
            value = block(torch.cat([value, kept.pop()], 1))
        return self.end(value)


def language(size: Size, vocabulary: int, sequences: int, inside: bool, tied: bool = False, **options: Any) -> Case:
    """A decoder, its loss in the forward or in ``loss_fn``."""
    words = size.vocabulary(vocabulary)
    ids = torch.randint(0, words, (sequences, size.tokens))
    model = Decoder(size, words, tied, **options)
    return Case(model, (ids, ids), None, is_loss) if inside else Case(model, (ids,), ids, cross_entropy)


def translation(size: Size) -> Case:
    """An encoder and a decoder."""
    words = size.vocabulary(32_128)
    ids = torch.randint(0, words, (16, size.tokens))
    return Case(EncoderDecoder(size, words), (ids, ids), None, is_loss)


def images(size: Size) -> Case:
    """Classes of images."""
    values = torch.randn(128, 3, size.image, size.image)
    return Case(ViT(size), (values,), torch.arange(128) % 1000, F.cross_entropy)


def denoising(size: Size) -> Case:
    """Images from images."""
    values = torch.randn(16, 3, size.image, size.image)
    return Case(UNet(size), (values,), values, F.mse_loss)


CASES: dict[str, Callable[[Size], Case]] = {
    "decoder 32,000": lambda size: language(size, 32_000, 16, False),
    "decoder 32,000, LoRA, loss inside": lambda size: language(size, 32_000, 16, True, lora=True),
    "decoder 128,256": lambda size: language(size, 128_256, 8, False),
    "decoder 128,256, loss inside": lambda size: language(size, 128_256, 8, True),
    "decoder 151,936, tied": lambda size: language(size, 151_936, 8, False, tied=True),
    "decoder 151,936, tied, loss inside": lambda size: language(size, 151_936, 8, True, tied=True),
    "decoder 151,936, LoRA": lambda size: language(size, 151_936, 8, False, lora=True),
    "decoder 262,144, soft-capped": lambda size: language(size, 262_144, 4, False, cap=30.0),
    "decoder 262,144, tied, soft-capped, loss inside": lambda size: language(
        size, 262_144, 4, True, tied=True, cap=30.0
    ),
    "mixture of experts": lambda size: language(size, 32_000, 8, True, moe=True),
    "encoder and decoder": translation,
    "ViT": images,
    "U-Net": denoising,
}
