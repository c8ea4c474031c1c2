"""What the tests of tails share: a small language model, its losses, and eager's loop."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe
from roundpipe import RoundPipeRunConfig
from roundpipe.fx.passes.tail import JoinedTail
from roundpipe.fx.passes.tiles import TiledProgram
from tests.equality import assert_same_gradients, difference

VOCABULARY, WIDTH, BATCH, LENGTH, NUM_MICROBATCHES = 37, 16, 5, 7, 2
TILED = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCHES, tiles=3)
Loss = Callable[[Any, Any], Any]


class Output(dict):
    """A dict whose items are attributes, as those of libraries are."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Language(nn.Module):
    """Embeds tokens, and gives their logits with the hidden states that these are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        hidden = self.norm(hidden)
        return {"logits": self.head(hidden), "hidden": hidden}


def language(dtype: torch.dtype = torch.float64) -> Language:
    torch.manual_seed(0)
    return Language().to(dtype)


def tokens(length: int = LENGTH, batch: int = BATCH, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def cross_entropy(outputs: Any, label: Any) -> torch.Tensor:
    return F.cross_entropy(outputs["logits"].view(-1, VOCABULARY), label.view(-1))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often tails have run, and their programs in tiles."""
    counter: Counter[str] = Counter()
    original = JoinedTail.__call__
    in_tail = threading.local()

    def call(self: JoinedTail, *args: Any) -> Any:
        counter["tail"] += 1
        in_tail.is_running = True
        try:
            return original(self, *args)
        finally:
            in_tail.is_running = False

    def run(self: TiledProgram, *args: Any) -> Any:
        if getattr(in_tail, "is_running", False):
            counter["tiled in tail"] += 1
        return whole(self, *args)

    whole = TiledProgram.__call__
    monkeypatch.setattr(JoinedTail, "__call__", call)
    monkeypatch.setattr(TiledProgram, "__call__", run)
    return counter


def eager(model: nn.Module, batches: Sequence[tuple[torch.Tensor, Any]], loss_fn: Loss) -> list[torch.Tensor]:
    """Sums of the losses over microbatches, one by position; gradients add up in ``.grad``."""
    sums: list[torch.Tensor] = []
    for ids, label in batches:
        loss = loss_fn(model(ids), label)
        losses = [loss] if isinstance(loss, torch.Tensor) else list(loss)
        torch.autograd.backward(losses)
        plain = [each.detach() for each in losses]
        sums = [a + b for a, b in zip(sums, plain, strict=True)] if sums else plain
    return sums


def pieces(value: Any, number: int = NUM_MICROBATCHES) -> list[Any]:
    """A tensor, or a dict of them, in microbatches."""
    if isinstance(value, dict):
        parts = {name: torch.tensor_split(item, number) for name, item in value.items()}
        return [{name: part[index] for name, part in parts.items()} for index in range(number)]
    return list(torch.tensor_split(value, number))


class Pair:
    """A model under roundpipe, and a copy in eager, which make the same steps."""

    def __init__(self, model: nn.Module, config: RoundPipeRunConfig = TILED) -> None:
        self.reference = copy.deepcopy(model)
        self.model = model
        self.config = config
        self.pipe = roundpipe.compile(model, devices=["cpu"])

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *args: object) -> None:
        self.pipe.close()

    @property
    def trace_count(self) -> int:
        """Traces of loss functions."""
        return self.pipe._runner.tails.trace_count  # no public count: traces of losses are not the model's

    def step(self, loss_fn: Loss, ids: torch.Tensor, label: Any, tolerance: float, expected: Loss | None = None) -> Any:
        """Both run a batch; losses and all gradients so far agree."""
        found = self.pipe.forward_backward((ids,), label=label, loss_fn=loss_fn, run_config=self.config)
        number = self.config.num_microbatch
        assert isinstance(number, int)
        batches = list(zip(pieces(ids, number), pieces(label, number), strict=True))
        sums = eager(self.reference, batches, expected or loss_fn)
        for one, other in zip([found] if isinstance(found, torch.Tensor) else found, sums, strict=True):
            assert difference(one, other) <= tolerance
        assert_same_gradients(self.model, self.reference, tolerance)
        return found
