"""The rows of `benchmarks/rows.py`: a model, cards, the memory of each, and the tokens of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from decoders import DECODERS, Decoder, fill
from fits import Block, Shape
from torch import nn
from torch.utils.checkpoint import checkpoint

PLAIN_WAYS = ("plain", "checkpointed")


@dataclass(frozen=True)
class Stack:
    """Decoder blocks in a Sequential, of which all is trained or the head alone."""

    shape: Shape
    vocabulary: int = 32_000
    trains_head: bool = False
    """Only the output layer is trained."""

    def build(self) -> nn.Module:
        """The model on ``meta``; trained parameters require grad."""
        width = self.shape.width
        with torch.device("meta"):
            blocks = [Block(self.shape) for _ in range(self.shape.depth)]
            head = nn.Linear(width, self.vocabulary, bias=False)
            model = nn.Sequential(nn.Embedding(self.vocabulary, width), *blocks, nn.RMSNorm(width), head)
        if self.trains_head:
            model[:-1].requires_grad_(False)
        return model.to(torch.bfloat16)


MODELS: dict[str, Stack | Decoder] = {
    "1.5b": Stack(Shape(2048, 6144, 16, 25)),
    "2.0b": Stack(Shape(2048, 6144, 16, 34)),
    "7.2b-head": Stack(Shape(4096, 12288, 32, 32), trains_head=True),
    "8.0b": Stack(Shape(4096, 14336, 32, 32)),
    "qwen3-1.7b": DECODERS["1.7b"],
    "qwen3-8b-lora": DECODERS["8b-lora"],
}
_STACK = Stack(Shape(64, 96, 2, 4), vocabulary=500)
SMALL: dict[str, Stack | Decoder] = {
    "1.5b": _STACK,
    "2.0b": _STACK,
    "7.2b-head": replace(_STACK, trains_head=True),
    "8.0b": _STACK,
    "qwen3-1.7b": DECODERS["tiny"],
    "qwen3-8b-lora": DECODERS["tiny-lora"],
}
SMALL_LENGTH = 16


@dataclass(frozen=True)
class Row:
    """One measurement."""

    model: str
    cap: str
    """Of each card's memory for roundpipe, in GB, or all."""
    num_microbatches: int
    samples: int
    """Sequences of a microbatch."""
    length: int
    plain: tuple[str, ...] = ()
    """Ways of plain PyTorch to measure beside it, with all of a card's memory."""
    cards: int = 1

    @property
    def name(self) -> str:
        cards = "" if self.cards == 1 else f"-x{self.cards}"
        return f"{self.model}-{self.cap}-{self.num_microbatches}x{self.samples}x{self.length}{cards}"

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.num_microbatches * self.samples * self.length

    @property
    def on_one_card(self) -> Row:
        """The row of one card with as many tokens for it."""
        return replace(self, cards=1, num_microbatches=self.num_microbatches // self.cards)

    def source(self, small: bool) -> Stack | Decoder:
        """Of the model."""
        return (SMALL if small else MODELS)[self.model]

    def sized(self, small: bool) -> Row:
        """With short sequences if it is a dry run."""
        return replace(self, length=SMALL_LENGTH) if small else self


ROWS = (
    Row("2.0b", "all", 8, 4, 2048, PLAIN_WAYS),
    Row("2.0b", "all", 4, 1, 2048, PLAIN_WAYS),
    Row("1.5b", "24", 8, 4, 2048),
    Row("2.0b", "24", 4, 1, 2048),
    Row("7.2b-head", "24", 8, 1, 2048),
    Row("qwen3-1.7b", "all", 8, 4, 2048, PLAIN_WAYS),
    Row("qwen3-1.7b", "24", 8, 4, 2048),
    Row("qwen3-8b-lora", "24", 4, 1, 4096, ("checkpointed",)),
    Row("qwen3-8b-lora", "all", 4, 1, 4096, ("checkpointed",)),
    Row("2.0b", "all", 16, 4, 2048, cards=2),
    Row("2.0b", "all", 8, 1, 2048, cards=2),
    Row("1.5b", "24", 16, 4, 2048, cards=2),
    Row("2.0b", "24", 8, 1, 2048, cards=2),
    Row("7.2b-head", "24", 16, 1, 2048, cards=2),
    Row("8.0b", "all", 8, 4, 2048, cards=2),
)


def built(source: Stack | Decoder, device: str | torch.device, backend: str | None = None) -> nn.Module:
    """The model with quickly made random weights; a ``backend`` of `torch.compile` compiles its blocks."""
    torch.manual_seed(0)
    model = source.build().to_empty(device=device)
    fill(model, 1009 if source in SMALL.values() else 50_000_017)
    if backend is not None:
        for block in model.modules():
            if isinstance(block, Block) or type(block).__name__ == "Qwen3DecoderLayer":
                block.compile(backend=backend)
    return model


def vocabulary_of(source: Stack | Decoder) -> int:
    """Of which ids are drawn."""
    return source.vocabulary if isinstance(source, Stack) else 1000


def loss_of_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy, in float32."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def train(pipe: Any, source: Stack | Decoder, ids: torch.Tensor) -> Any:
    """One call of roundpipe's; the mean loss."""
    if isinstance(source, Stack):
        return pipe.forward_backward((ids,), label=ids, loss_fn=loss_of_logits, loss_reduction="mean")
    kwargs = {"input_ids": ids, "labels": ids}
    return pipe.forward_backward(input_kwargs=kwargs, loss_fn=lambda outputs, _: outputs.loss, loss_reduction="mean")


class Own:
    """Plain PyTorch: all on one device, float32 copies for AdamW, gradients accumulated over microbatches."""

    def __init__(
        self, source: Stack | Decoder, device: torch.device, num_microbatches: int, way: str, backend: str | None
    ) -> None:
        self._source, self._num_microbatches, self._is_checkpointed = source, num_microbatches, way == "checkpointed"
        self.model = built(source, device, backend).train()
        if self._is_checkpointed and not isinstance(source, Stack):
            self.model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._copies = [parameter.detach().float() for parameter in self._trained]
        self._optimizer = torch.optim.AdamW(self._copies, lr=1e-5, fused=True)

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """One step; the mean loss."""
        total = torch.zeros((), device=ids.device)
        for microbatch in ids.chunk(self._num_microbatches):
            loss = self._loss(microbatch) / self._num_microbatches
            loss.backward()
            total += loss.detach()
        with torch.no_grad():
            for parameter, copy in zip(self._trained, self._copies, strict=True):
                assert parameter.grad is not None
                copy.grad, parameter.grad = parameter.grad.float(), None
            self._optimizer.step()
            self._optimizer.zero_grad()
            for parameter, copy in zip(self._trained, self._copies, strict=True):
                parameter.copy_(copy)
        return total

    def _loss(self, ids: torch.Tensor) -> torch.Tensor:
        if not isinstance(self._source, Stack):
            return self.model(input_ids=ids, labels=ids).loss
        value = ids
        for layer in self.model.children():
            is_repeated = self._is_checkpointed and isinstance(layer, Block)
            value = checkpoint(layer, value, use_reentrant=False) if is_repeated else layer(value)
        return loss_of_logits(value, ids)
