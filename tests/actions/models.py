"""Random small models, and the wrappers that they are put in."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import roundpipe

WIDTH = 6
NUM_IDS = 7
KINDS = ("compile", "compile later", "fallback", "parts", "module by module", "by hand", "one layer")
"""`compile` with an example and without, and of what can't be traced; one part; many; `RoundPipe` of both sorts."""


class Stem(nn.Module):
    """Rows of features, or ids, to features; a mask takes rows out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_IDS, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x * self.scale if x.is_floating_point() else self.embed(x)
        return x if mask is None else x * mask[..., None].to(x.dtype)


class Block(nn.Module):
    """A residual step with what users change: a gain, an activation, modes, a buffer that may be added later."""

    gain: float

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.activation: nn.Module = nn.Tanh()
        self.gain = 1.0
        self.config = SimpleNamespace(slope=1.0)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.activation(self.inner(x)) * (self.gain * self.config.slope)
        offset = getattr(self, "offset", None)
        return x + y if offset is None else x + y + offset


class NormBlock(Block):
    """With statistics of the batch, which are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2)


class MixBlock(Block):
    """Rows see each other, in training otherwise than in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        scores = (self.linear(x) @ x.transpose(1, 2)).softmax(-1)
        return self.out(scores @ x) * (1.0 if self.training else 0.5)


class MeanBlock(Block):
    """With a running mean in a buffer, which the forward reads and writes."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            self.mean.mul_(0.5).add_(x.detach().mean((0, 1)), alpha=0.5)
        return self.linear(x - self.mean)


BLOCKS = (Block, Block, NormBlock, MixBlock, MeanBlock)


class Head(nn.Module):
    """One row of features per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.mean(1))


class Net(nn.Module):
    """A stem, blocks and a head."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.stem = Stem()
        self.blocks = nn.ModuleList(blocks)
        self.head = Head()

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.stem(x, mask)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def generate(self, x: torch.Tensor, number: int) -> torch.Tensor:
        """Some rows more, each from a call of the whole model."""
        for _ in range(number):
            x = torch.cat([x, self(x)[:, None]], 1)
        return x


class Decides(Net):
    """With a branch on data, which can't be traced."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = super().forward(x, mask)
        return x if x.sum() < 1e9 else -x


@dataclass(frozen=True)
class Setup:
    """What a case begins with."""

    seed: int
    kind: str
    blocks: tuple[type[nn.Module], ...]
    is_tied: bool
    dtype: torch.dtype
    num_workers: int
    memory_bytes: int | None
    lives_there: bool = False
    """Whether its weights are to live on the worker, as far as it can be."""
    is_exact: bool = False
    """Whether all that would be float32 is float64."""

    @classmethod
    def draw(cls, seed: int) -> Setup:
        choose = random.Random(f"setup {seed}")
        setup = cls(
            seed=seed,
            kind=choose.choice(KINDS),
            blocks=tuple(choose.choice(BLOCKS) for _ in range(choose.randint(2, 4))),
            is_tied=choose.random() < 0.2,
            dtype=torch.float32 if choose.random() < 0.2 else torch.float64,
            num_workers=choose.randint(1, 3),
            memory_bytes=choose.choice([2**13, 2**14, 2**20, 2**22]) if choose.random() < 0.2 else None,
        )
        if choose.random() < 0.15:
            memory_bytes = choose.choice([2**22, 2**22, 2**14, 2**13])  # of which the latter are for some layers
            setup = replace(setup, num_workers=1, memory_bytes=memory_bytes, lives_there=True)
        return setup

    def exact(self) -> Setup:
        """The same without float32, and with as much memory per number."""
        factor = 2 if self.dtype is torch.float32 else 1
        memory_bytes = None if self.memory_bytes is None else factor * self.memory_bytes
        return replace(self, dtype=torch.float64, memory_bytes=memory_bytes, is_exact=True)

    def __str__(self) -> str:
        blocks = ", ".join(block.__name__ for block in self.blocks)
        tied = ", tied" if self.is_tied else ""
        memory = "" if self.memory_bytes is None else f" of {self.memory_bytes} bytes"
        where = ", weights on the worker" if self.lives_there else ""
        return f"{self.kind}: {blocks}{tied}, {self.dtype}, {self.num_workers} workers{memory}{where}"

    def make_model(self) -> nn.Module:
        """The model, the same at every call."""
        torch.manual_seed(self.seed)
        blocks = [block() for block in self.blocks]
        for block in blocks[1:]:
            block.config = blocks[0].config
        if self.kind == "by hand":
            model: nn.Module = nn.Sequential(Stem(), *blocks, Head())
        else:
            model = (Decides if self.kind == "fallback" else Net)(blocks)
        if self.is_tied:
            blocks[-1].linear.weight = blocks[0].linear.weight  # type: ignore[union-attr]
        return model.to(self.dtype)


def wrap(kind: str, model: nn.Module, setup: Setup) -> Any:
    """A model in one of the wrappers."""
    options: dict[str, Any] = {
        "devices": [roundpipe.Device("cpu", memory_bytes=setup.memory_bytes)] * setup.num_workers,
        "name": kind,
        "model_run_config": roundpipe.RoundPipeRunConfig(residency="full" if setup.lives_there else None),
    }
    if kind in ("by hand", "one layer"):
        return roundpipe.RoundPipe(model, **options)
    if kind == "parts":
        return roundpipe.AutoRoundPipe(model, **options)
    if kind == "module by module":
        return roundpipe.wrap_model_to_roundpipe(model, use_sequential_preset=False, lower_threshold=1, **options)
    example = {} if kind == "compile later" else {"example_args": (torch.randn(3, 4, WIDTH, dtype=setup.dtype),)}
    return roundpipe.compile(model, **options, **example)


def stem_of(model: nn.Module) -> nn.Module:
    """The first module of a model, sequential or not."""
    return model[0] if isinstance(model, nn.Sequential) else model.stem  # type: ignore[return-value]


def blocks_of(model: nn.Module) -> list[Any]:
    """Likewise the blocks, one after the other."""
    return list(model)[1:-1] if isinstance(model, nn.Sequential) else list(model.blocks)  # type: ignore[arg-type]


def loss_of(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """A loss that sums over samples."""
    return F.mse_loss(outputs, label, reduction="sum") / 8
