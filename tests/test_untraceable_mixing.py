"""Models that can't be traced and mix samples: their code is tried out, and leaves nothing of that behind."""

from __future__ import annotations

import copy
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig

NUMBER, WIDTH = 9, 6
Mix = Callable[[torch.Tensor], torch.Tensor]


class Base(nn.Module):
    """Layers whose output is mixed; a subclass has what a trace refuses."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, 4))
        self.mix = mix


class Keeps(Base):
    last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layers[0](x)
        self.last = h.detach()
        return self.mix(self.layers(x))


class CachesTable(Base):
    def __init__(self, mix: Mix) -> None:
        super().__init__(mix)
        self.register_buffer("table", torch.zeros(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.table) != x.shape[1]:
            self.table = torch.arange(x.shape[1]).to(x)
        return self.mix(self.layers(x + self.table))


class Draws(Base):
    """Counts, collects and draws by Python's generators."""

    def __init__(self, mix: Mix) -> None:
        super().__init__(mix)
        self.generator, self.drawn, self.steps = random.Random(0), [0.0], 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.drawn.append(self.generator.random() + random.random())
        return self.mix(self.layers(x)) * self.drawn[-1]


class TakesNext(Base):
    """Uses up an iterator."""

    def __init__(self, mix: Mix) -> None:
        super().__init__(mix)
        self.scales = iter(range(1, 100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(self.layers(x)) * next(self.scales)


MIXES: dict[str, Mix] = {
    "mean": lambda h: h - h.mean(0),
    "attention": lambda h: torch.softmax(h @ h.T, -1) @ h,
    "flip": lambda h: h + h.flip(0),
    "number": lambda h: h / len(h),
}


@pytest.fixture(autouse=True)
def seeds() -> Iterator[None]:
    torch.manual_seed(0)
    random.seed(0)
    yield


def train(model: nn.Module, number: int | None = None) -> tuple[torch.Tensor, list[str]]:
    x, label = batch()
    options = {} if number is None else {"run_config": RoundPipeRunConfig(num_microbatch=number)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with roundpipe.compile(model, devices=["cpu", "cpu"]) as piped:
            loss = piped.forward_backward((x,), label=label, loss_fn=F.cross_entropy, loss_reduction="mean", **options)
    return loss, [str(each.message) for each in caught]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(NUMBER, WIDTH, generator=generator), torch.arange(NUMBER) % 4


@pytest.mark.parametrize("kind", [Keeps, CachesTable, Draws])
@pytest.mark.parametrize("mix", MIXES)
def test_the_batch_is_not_cut(kind: type[Base], mix: str) -> None:
    model = kind(MIXES[mix])
    reference, state = copy.deepcopy(model), random.getstate()
    x, label = batch()
    expected = F.cross_entropy(reference(x), label)
    expected.backward()
    random.setstate(state)
    loss, told = train(model)
    assert any("mixes the samples of a batch" in each and "not cut" in each for each in told), told
    torch.testing.assert_close(loss, expected.detach())
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    if isinstance(model, Draws) and isinstance(reference, Draws):  # trying it out has left nothing
        assert (model.drawn, model.steps) == (reference.drawn, reference.steps)
        assert model.generator.getstate() == reference.generator.getstate()


@pytest.mark.parametrize("kind", [Keeps, CachesTable, Draws])
def test_others_are_cut(kind: type[Base]) -> None:
    model = kind(lambda h: h * 2)
    _, told = train(model)
    assert not any("mixes the samples" in each for each in told), told
    if isinstance(model, Keeps):
        assert len(model.last) == NUMBER / 3


@pytest.mark.parametrize("number", [None, 3])
def test_code_that_uses_something_up_is_not_tried_out(number: int | None) -> None:
    model = TakesNext(MIXES["mean"])
    _, told = train(model, number)
    assert next(model.scales) == 4  # each microbatch took one, and nothing else did
    assert any("nothing tells whether its code mixes the samples" in each for each in told) is (number is None), told


class TimeFirst(nn.Module):
    """A language model with time in dimension 0, whose mask stays for the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head, self.mask = nn.Embedding(20, 8), nn.Linear(8, 20), None
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.mask is None or len(self.mask) != len(ids):
            self.mask = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1 + len(ids) // 2)
        out: torch.Tensor = self.head(self.encoder(self.embedding(ids), src_mask=self.mask))
        return out


class TimeFirstInTurn(TimeFirst):
    """Uses something up, so that it is not tried out."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = itertools.repeat(1.0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * next(self.scales)


@pytest.mark.parametrize("number", [None, 4])
@pytest.mark.parametrize("kind", [TimeFirst, TimeFirstInTurn])
def test_time_in_dimension_0(kind: type[TimeFirst], number: int | None) -> None:
    """Also where nothing tells that it is time, since the code is not tried out."""
    model, ids = kind(), torch.randint(20, (12, 6))
    expected = model(ids)
    model.mask = None
    config = RoundPipeRunConfig(num_microbatch=number)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with roundpipe.compile(model, devices=["cpu"] * 2, model_run_config=config) as pipe:
            out = pipe(ids)
    said = [str(warning.message) for warning in caught]
    (text,) = [text for text in said if "batch_first=False" in text or "mixes the samples of a batch" in text]
    if number is None:
        torch.testing.assert_close(out, expected)
        assert "runs as one microbatch" in text
    elif kind is TimeFirst:
        assert "mask is used, which an earlier call of the forward has left there" in said[0]
        assert "Each of the 4 microbatches has only its own samples there" in text
    else:
        assert "is cut along dimension 0 all the same" in text
