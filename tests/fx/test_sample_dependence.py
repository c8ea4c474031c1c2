"""Which models mix the samples of a batch, as their graphs and the code of their modules show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from roundpipe.fx.passes.sample_dependence import dependence_of_samples
from roundpipe.fx.trace.tracer import trace

NUMBER, WIDTH = 8, 6


class Model(nn.Module):
    """Some layers, and a forward that a test gives."""

    def __init__(self, run: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.ones(1))
        self.experts = nn.Parameter(torch.randn(2, WIDTH, WIDTH))
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.table = nn.Embedding(NUMBER, WIDTH)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.softmax = nn.Softmax(dim=0)
        self.run = run

    def core(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x)


class Block(nn.Module):
    """A layer that is a leaf of the graph."""

    def __init__(self, run: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.inside = Model(run)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inside(x)


class Outer(nn.Module):
    """Blocks that are small enough to be leaves."""

    def __init__(self, run: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(run), *(Block(lambda model, x: model.core(x)) for _ in range(7))])
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(3, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        made = self.blocks[0](self.before(x))
        for block in self.blocks[1:] if made.ndim > 1 else ():
            made = block(self.after(made))
        return made


def routed(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Tokens sorted by expert, as by a router, and back."""
    tokens = model.first(x).reshape(-1, WIDTH)
    expert = (tokens.sum(-1) > 0).long()
    by_expert, order = expert.sort()
    sorted_tokens = tokens[order]
    made = torch.where((by_expert == 0)[:, None], sorted_tokens @ model.experts[0], sorted_tokens @ model.experts[1])
    return model.last(made[order.argsort()])


def over_capacity(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Tokens that come first are taken."""
    tokens = model.first(x)
    chosen = F.one_hot((tokens.sum(-1) > 0).long(), 2)
    is_in = (chosen.cumsum(0) * chosen).sum(-1) <= 4
    return model.last(tokens * is_in[:, None])


def of_pairs(model: Any, x: torch.Tensor) -> torch.Tensor:
    one, other = model.first(x).chunk(2)
    return model.last(torch.cat([one * other, one - other]))


def marked(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Of each sample, what is up to a place of its own."""
    marks = torch.zeros_like(x)
    marks[torch.arange(len(x)), x.argmax(-1)] = 1
    return model.core(x * marks.flip(-1).cumsum(-1).flip(-1))


def scaled_if_large(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Decides by a number of the whole batch."""
    made = model.first(x)
    largest = made.abs().max().item()
    return model.last(made / largest if largest > 1 else made)


def summed_into_first(model: Any, x: torch.Tensor) -> torch.Tensor:
    made = torch.zeros_like(x) + x
    made[0] = x.sum(0)
    return model.core(made)


def in_turn(model: Any, samples: Any) -> torch.Tensor:
    """Carries something from each sample to the next."""
    state, made = torch.zeros(WIDTH), []
    for sample in samples:
        state = torch.tanh(model.second(sample) + state)
        made.append(state)
    return torch.stack(made)


MIXED: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "flip": lambda model, x: model.core(0.7 * x + 0.3 * x.flip(0)),
    "roll": lambda model, x: model.core(x + x.roll(1, 0)),
    "mean": lambda model, x: model.core(x - x.mean(0)),
    "max": lambda model, x: model.core(x / x.abs().max()),
    "std": lambda model, x: model.core(x) + model.first(x).std(0).mean(),
    "softmax": lambda model, x: model.core(x) * torch.softmax(model.first(x)[:, :1], 0),
    "softmax of a module": lambda model, x: model.core(model.softmax(x)),
    "cumsum": lambda model, x: model.core(x.cumsum(0)),
    "attention": lambda model, x: model.last((model.first(x) @ model.second(x).T).softmax(-1) @ x),
    "fused attention": lambda model, x: model.last(F.scaled_dot_product_attention(*[model.first(x)[None]] * 3)[0]),
    "attention of a module": lambda model, x: model.last(model.attention(*[x[None]] * 3)[0][0]),
    "convolution": lambda model, x: model.last(model.conv(x.T[None])[0].T),
    "number": lambda model, x: model.core(x) / x.shape[0],
    "root of the number": lambda model, x: model.core(x) * x.shape[0] ** -0.5,
    "place": lambda model, x: model.core(x + torch.arange(len(x))[:, None] * 0.1),
    "embedded place": lambda model, x: model.core(x + model.table(torch.arange(len(x)))),
    "shuffle": lambda model, x: model.core(x + x[torch.randperm(len(x))]),
    "pairs": of_pairs,
    "neighbours": lambda model, x: model.core(torch.cat([x[:1], x[1:] - x[:-1]])),
    "distances": lambda model, x: model.core(x * torch.cdist(x, x).mean(-1, keepdim=True)),
    "differences": lambda model, x: model.core((x[:, None] - x[None]).abs().amax(1)),
    "capacity": over_capacity,
    "scaled loss": lambda model, x: model.core(x - x.mean(0)).square().mean(),
    "layer norm": lambda model, x: model.core(F.layer_norm(x.T, (len(x),)).T),
    "neighbours by distance": lambda model, x: model.core(x + x[torch.cdist(x, x).topk(3, largest=False)[1]].mean(1)),
    "spectrum": lambda model, x: model.core(torch.fft.fft(x, dim=0).real),
    "groups": lambda model, x: model.core((x.view(2, -1, WIDTH) - x.view(2, -1, WIDTH).mean(0)).flatten(0, 1)),
    "other rows": lambda model, x: model.core(x.T.reshape(-1, WIDTH)),
    "differences in turn": lambda model, x: model.last(torch.diff(h := model.first(x), dim=0, prepend=h[:1])),
    "one hot place": lambda model, x: model.core(x + torch.eye(len(x), WIDTH)),
    "written into one": summed_into_first,
    "a sequence": lambda model, x: model.core(model.recurrent(x[None])[0][0]),
    "a loop": lambda model, x: model.last(in_turn(model, x)),
    "a loop over rows": lambda model, x: model.last(in_turn(model, list(model.first(x)))),
}


def written_in_turn(model: Any, x: torch.Tensor) -> torch.Tensor:
    made = x.new_zeros(len(x), 3)
    for index in range(len(x)):
        made[index] = model.core(x[index])
    return made


def expanded(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Learned tokens in front of each sample, of which one has those of all."""
    tokens = torch.arange(3)[None].expand(len(x), -1)
    return model.core(torch.cat([model.table(tokens[:1]).repeat(len(x), 1, 1).mean(1), x], dim=1)[:, -WIDTH:])


APART: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "nothing": lambda model, x: model.core(x),
    "a loss": lambda model, x: model.core(x).square().mean(),
    "a sum over their number": lambda model, x: (model.core(x).square() / x.shape[0]).sum(),
    "a scaled loss": lambda model, x: model.core(x).square().mean() * model.scale.exp(),
    "two in one batch": lambda model, x: torch.mul(*model.core(torch.cat([x, x + 1])).chunk(2)),
    "one after the other": lambda model, x: torch.stack([model.core(sample) for sample in x]),
    "written in turn": written_in_turn,
    "what all have": lambda model, x: model.core(
        (h := model.first(x) + x.new_ones(len(x), WIDTH)[0]) + model.second(h)
    ),
    "one out of each": lambda model, x: model.core(x)[torch.arange(len(x)), x.argmax(-1) % 3],
    "a mark in each": marked,
    "tokens in front": expanded,
    "filled from its own": lambda model, x: model.core(model.first(x).masked_scatter(x > 0, model.second(x))),
    "a router": routed,
    "norms": lambda model, x: model.core(F.layer_norm(x, (WIDTH,)) + F.group_norm(x, 2) + x / x.norm(dim=-1)[:, None]),
    "attention in each": lambda model, x: model.last(model.attention(*[x[:, None].repeat(1, 5, 1)] * 3)[0]).mean(1),
    "windows": lambda model, x: model.core(x.view(-1, 2, 3).softmax(1).transpose(1, 2).reshape(-1, WIDTH)),
    "what is not read": lambda model, x: (model.core(x), x.mean(0))[0],
    "noise": lambda model, x: model.core(x + torch.randn(len(x), 1) * 0.1),
    "convolution of each": lambda model, x: model.last(model.conv(x[..., None].repeat(1, 1, 5)).mean(-1)),
}


def where(model: nn.Module, number: int = NUMBER) -> str:
    return dependence_of_samples(trace(model, (torch.randn(number, WIDTH),), {})).where


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_samples_is_found(name: str) -> None:
    assert where(Model(MIXED[name]))
    assert where(Outer(MIXED[name]))


@pytest.mark.parametrize("name", APART)
def test_what_keeps_samples_apart_is_left_alone(name: str) -> None:
    assert where(Model(APART[name])) == ""
    assert where(Outer(APART[name])) == ""
    assert where(Model(APART[name]), number=1) == ""


def test_outputs_of_each_sample_with_each_are_found() -> None:
    for run in (
        lambda model, x: model.first(x) @ model.second(x).T,
        lambda model, x: torch.cdist(model.first(x), model.second(x)),
        lambda model, x: torch.einsum("id,jd->ij", model.first(x), model.second(x)),
    ):
        assert where(Model(run)) and where(Block(run))


def sent_to_experts(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Each expert's own samples, in a loop."""
    chosen = model.first(x).argmax(-1) % 2
    made = torch.zeros_like(x)
    for expert, weight in enumerate(model.experts):
        mine = torch.where(chosen == expert)[0]
        if mine.numel() and (chosen == expert).any():
            made = made.index_add(0, mine, x[chosen == expert] @ weight)
    return model.last(made)


def checked(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Refuses what is no number."""
    made = model.first(x)
    assert not made.max().isnan().sum() and made.min() != float("inf")
    return model.last(made)


def test_decisions_of_leaves_by_activations_are_found() -> None:
    assert "decision" in where(Outer(scaled_if_large))
    assert where(Outer(sent_to_experts)) == ""
    assert where(Outer(checked)) == ""


BLOCKS: dict[str, tuple[Callable[[Any, torch.Tensor], Any], tuple[int, ...]]] = {
    "two views": (lambda model, x: model.core(torch.cat([x, x + 1])), (1, 1)),
    "three, and three again": (lambda model, x: torch.cat([model.core(torch.cat([x] * 3))] * 2), (1,) * 6),
    "repeated": (lambda model, x: model.core(x.repeat(3, 1)), (1, 1, 1)),
    "stacked": (lambda model, x: model.core(torch.stack([x, x + 1]).flatten(0, 1)), (1, 1)),
    "of other sizes": (lambda model, x: model.core(torch.cat([x, x.repeat_interleave(2, 0)])), (1, 2)),
    "merged behind samples": (
        lambda model, x: model.core(torch.stack([x, x + 1])[:, :, None].expand(2, len(x), 3, WIDTH).reshape(-1, WIDTH)),
        (3, 3),
    ),
    "side by side": (lambda model, x: model.core(x.repeat_interleave(3, 0)), ()),
    "pairs": (lambda model, x: model.core(torch.stack([x, x + 1], 1).flatten(0, 1)), ()),
    "time first": (
        lambda model, x: model.core(x[:, None].repeat(1, 5, 1).transpose(0, 1).reshape(-1, WIDTH)),
        (1,) * 5,
    ),
    "apart again": (lambda model, x: torch.add(*model.core(torch.cat([x, x + 1])).chunk(2)), ()),
    "two features": (lambda model, x: torch.cat([model.core(x), model.core(x + 1)], 1), ()),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_order_of_samples_in_outputs_is_found(name: str) -> None:
    run, expected = BLOCKS[name]
    for model in (Model(run), Block(run)):
        found = dependence_of_samples(trace(model, (torch.randn(NUMBER, WIDTH),), {}))
        assert not found.where
        assert list(found.blocks.values()) == ([expected] if expected else [])


def test_the_line_is_named_where_a_module_has_it() -> None:
    graph = where(Model(MIXED["mean"]))
    assert graph == "mean in the forward of Model"
    line = where(Outer(MIXED["mean"]))
    assert line.startswith("mean in ") and "test_sample_dependence.py:" in line and "x - x.mean(0)" in line


class Filled(nn.Module):
    """Has places for features, which are filled one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).masked_scatter(x > 0, self.first(features)))


@pytest.mark.parametrize(("number", "is_mixed"), [(NUMBER, False), (NUMBER - 1, True), (NUMBER + 3, True)])
def test_places_that_are_filled_one_after_the_other_are_found(number: int, is_mixed: bool) -> None:
    """Where there are as many features as samples, which a batch is cut by, the model may check the number itself."""
    traced = trace(Filled(), (torch.randn(NUMBER, WIDTH), torch.randn(number, WIDTH)), {})
    assert ("masked_scatter" in dependence_of_samples(traced).where) == is_mixed


def balanced(model: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    shares = model.core(x).softmax(-1)
    chosen = F.one_hot(shares.argmax(-1), 3).float()
    product = (chosen.mean(0) * shares.mean(0)).sum()
    weighed = (shares * x[:, :3]).sum() / x[:, :3].sum()
    return {
        "balance": 0.1 * product,
        "both": shares.square().mean() + product,
        "root": shares.square().mean().sqrt(),
        "quotient": shares[:, 0].sum() / shares[:, 1].sum(),
        "mean": shares.square().mean(),
        "weighed": weighed,
        "learned": shares.square().mean() * model.scale.squeeze() + model.scale.square().squeeze(),
        "centre": (shares[:, 0] - shares[:, 1]).abs().mean(),
    }


def test_functions_of_sums_that_weights_have_made_are_found() -> None:
    for model in (Model(balanced), Block(balanced)):
        traced = trace(model, (torch.randn(NUMBER, WIDTH),), {})
        bent = {node.name for node in dependence_of_samples(traced).bent}
        found = {name for name, leaf in traced.output.items() if leaf.name in bent}
        assert found == {"balance", "both", "root", "quotient"}
