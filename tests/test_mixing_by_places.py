"""Samples that meet at places which data tell, or are picked by where they are among others; and those that do not."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig

WIDTH, NUMBER, GROUPS = 12, 9, 4
Form = Callable[["PlaceUser", torch.Tensor], torch.Tensor]


class PlainNorm(nn.Module):
    """A batch norm that is made by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(h, self.mean, self.var, self.weight, training=self.training)


class PlaceUser(nn.Module):
    """Two layers around code that has experts and tables."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.first, self.last, self.form = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5), form
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(GROUPS))
        self.norm = PlainNorm()
        self.register_buffer("codes", torch.randn(GROUPS, WIDTH))
        self.register_buffer("places", torch.randn(1, 20, WIDTH))
        self.register_buffer("causal", torch.ones(20, 20).tril())
        self.register_buffer("cache", torch.zeros(10, 10, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.form(self, self.first(x).tanh()))


def group(h: torch.Tensor) -> torch.Tensor:
    return h[..., :GROUPS].argmax(-1)


def found(h: torch.Tensor) -> torch.Tensor:
    return torch.nonzero(h[:, 0] > h[:, 1])[:, 0]


def zeros() -> torch.Tensor:
    return torch.zeros(GROUPS, WIDTH)


def emptied(h: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    h = h.clone()
    h[places] = 0
    return h


def accumulated(model: PlaceUser, h: torch.Tensor) -> torch.Tensor:
    k, z = group(h), zeros()
    z.index_put_((k,), h, accumulate=True)
    return h - z[k]


def remembered(model: PlaceUser, h: torch.Tensor) -> torch.Tensor:
    k, z = group(h), zeros()
    z[k] = h
    return h - z[k]


def scattered(model: PlaceUser, h: torch.Tensor) -> torch.Tensor:
    k = group(h)
    return h - zeros().scatter(0, k[:, None].expand(-1, WIDTH), h)[k]


def index_copied(model: PlaceUser, h: torch.Tensor) -> torch.Tensor:
    k = group(h)
    return h - zeros().index_copy(0, k, h)[k]


def seen(model: PlaceUser, h: torch.Tensor) -> torch.Tensor:
    hits = torch.zeros(GROUPS)
    hits[group(h)] = 1
    return h * hits.sum()


def seen_as_bool(model: PlaceUser, h: torch.Tensor) -> torch.Tensor:
    hits = torch.zeros(GROUPS, dtype=torch.bool)
    hits[group(h)] = True
    return h * hits.sum()


def seen_by_filling(model: PlaceUser, h: torch.Tensor) -> torch.Tensor:
    return h * torch.zeros(GROUPS).index_fill(0, group(h), 1.0).sum()


def seen_by_scattering(model: PlaceUser, h: torch.Tensor) -> torch.Tensor:
    return h * torch.zeros(GROUPS).scatter(0, group(h), 1.0).sum()


def normed(model: PlaceUser, h: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(h, None, None, training=True)


def normed_by_hand(model: PlaceUser, h: torch.Tensor) -> torch.Tensor:
    return model.norm(h)


def first_found(model: PlaceUser, h: torch.Tensor) -> torch.Tensor:
    return emptied(h, found(h)[:2])


def last_found(model: PlaceUser, h: torch.Tensor) -> torch.Tensor:
    return emptied(h, found(h)[-1:])


def every_second_found(model: PlaceUser, h: torch.Tensor) -> torch.Tensor:
    return emptied(h, torch.where(h[:, 0] > -2)[0][1::2])


def first_half_found(model: PlaceUser, h: torch.Tensor) -> torch.Tensor:
    places = found(h)
    return emptied(h, places[: len(places) // 2])


def numbered_found(model: PlaceUser, h: torch.Tensor) -> torch.Tensor:
    return emptied(h, torch.arange(len(h))[h[:, 0] > h[:, 1]][:2])


def filled_found(model: PlaceUser, h: torch.Tensor) -> torch.Tensor:
    return h.index_fill(0, (h[:, 0] > h[:, 1]).nonzero()[:2, 0], 0.0)


def masked_found(model: PlaceUser, h: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(len(h))
    mask[found(h)[:2]] = 0
    return h * mask[:, None]


def with_capacity(capacity: Callable[[torch.Tensor], int], model: PlaceUser, h: torch.Tensor) -> torch.Tensor:
    k, out = group(h), torch.zeros_like(h)
    for index, expert in enumerate(model.experts):
        tokens = torch.where(k == index)[0][: capacity(h)]
        out = out.index_add(0, tokens, expert(h[tokens]))
    return out


MIXED: dict[str, Form] = {
    **{form.__name__: form for form in (accumulated, remembered, scattered, index_copied)},
    **{form.__name__: form for form in (seen, seen_as_bool, seen_by_filling, seen_by_scattering)},
    **{form.__name__: form for form in (normed, normed_by_hand)},
    **{form.__name__: form for form in (first_found, last_found, every_second_found, first_half_found)},
    **{form.__name__: form for form in (numbered_found, filled_found, masked_found)},
    "with_a_capacity": partial(with_capacity, lambda h: 2),
    "with_a_capacity_by_size": partial(with_capacity, lambda h: len(h) // 8),
}


def called(form: Form, x: torch.Tensor, number: int | None) -> tuple[bool, list[str]]:
    """Whether outputs and gradients are those of plain PyTorch, and what is said of mixed samples."""
    torch.manual_seed(0)
    model = PlaceUser(form)
    plain, config = copy.deepcopy(model), RoundPipeRunConfig(num_microbatch=number)
    with (
        roundpipe.compile(model, devices=["cpu"] * 2, model_run_config=config) as piped,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        expected, made = plain(x), piped(x)
        expected.square().mean().backward()
        made.square().mean().backward()
        piped.synchronize()
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    grads = [(one.grad, other.grad) for one, other in pairs if one.grad is not None and other.grad is not None]
    is_same = torch.allclose(made, expected, atol=1e-5) and all(torch.allclose(*each, atol=1e-5) for each in grads)
    return is_same, [str(each.message) for each in caught if "mixes the samples" in str(each.message)]


def batch(*shape: int) -> torch.Tensor:
    return torch.randn(NUMBER, *shape, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MIXED)
def test_a_batch_whose_samples_meet_at_places_is_not_cut(name: str) -> None:
    is_same, told = called(MIXED[name], batch(), None)
    assert is_same and len(told) == 1 and "the batch is not cut but runs as one microbatch" in told[0]


@pytest.mark.parametrize("name", MIXED)
def test_a_number_cuts_them_and_is_warned_of(name: str) -> None:
    is_same, told = called(MIXED[name], batch(), 3)
    assert not is_same and len(told) == 1 and "Each of the 3 microbatches has only its own samples" in told[0]


def test_a_bound_above_the_samples_that_are_tried_and_below_those_given() -> None:
    x = torch.randn(400, WIDTH, generator=torch.Generator().manual_seed(1))
    is_same, told = called(lambda model, h: emptied(h, torch.where(h[:, 0] > -2)[0][:300]), x, None)
    assert is_same and len(told) == 1


Put = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def put_by_item(out: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    out[places] += values
    return out


PUTS: list[Put] = [
    put_by_item,
    lambda out, places, values: out.index_add_(0, places, values),
    lambda out, places, values: out.index_put_((places,), values, accumulate=True),
    lambda out, places, values: out.index_copy(0, places, values),
    lambda out, places, values: out.scatter(0, places[:, None].expand(-1, WIDTH), values),
]


def by_experts(put: Put, model: PlaceUser, h: torch.Tensor) -> torch.Tensor:
    """Each has all of its tokens."""
    flat = h.reshape(-1, WIDTH)
    k, out = group(flat), torch.zeros_like(flat)
    for index, expert in enumerate(model.experts):
        tokens = torch.where(k == index)[0]
        out = put(out, tokens, expert(flat[tokens]))
    return out.view(h.shape)


def by_two_experts(model: PlaceUser, h: torch.Tensor) -> torch.Tensor:
    weights, k = h[:, :GROUPS].softmax(-1).topk(2, -1)
    out = torch.zeros_like(h)
    for index, expert in enumerate(model.experts):
        tokens, slots = torch.where(k == index)
        out.index_add_(0, tokens, expert(h[tokens]) * weights[tokens, slots, None])
    return out


class OnlySeenExperts(nn.Module):
    """Runs those experts that some token has, which a trace leaves whole."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        k, out, hits = group(h), torch.zeros_like(h), torch.zeros(GROUPS)
        hits[k] = 1
        for index in range(GROUPS):
            if hits[index] > 0:
                out[k == index] = h[k == index] * index
        return out


def by_seen_experts(model: PlaceUser, h: torch.Tensor) -> torch.Tensor:
    return OnlySeenExperts()(h)


def masked(model: PlaceUser, h: torch.Tensor) -> torch.Tensor:
    mask, out = h[..., 0] > 0, torch.zeros_like(h)
    out[mask] = model.experts[0](h[mask])
    return out


def sorted_and_back(model: PlaceUser, h: torch.Tensor) -> torch.Tensor:
    order = group(h).argsort(stable=True)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return (h[order] * 2)[back]


def one_hot(model: PlaceUser, h: torch.Tensor) -> torch.Tensor:
    return h + torch.zeros(len(h), WIDTH).scatter_(1, group(h)[:, None], 1)


def gated(model: PlaceUser, h: torch.Tensor) -> torch.Tensor:
    values, places = h.topk(2, -1)
    return h * torch.zeros_like(h).scatter(-1, places, values.softmax(-1))


def coded(model: PlaceUser, h: torch.Tensor) -> torch.Tensor:
    return h + model.codes[torch.cdist(h, model.codes).argmin(1)]


def normed_weights(model: PlaceUser, h: torch.Tensor) -> torch.Tensor:
    weight = F.batch_norm(model.first.weight.reshape(1, WIDTH, -1), None, None, training=True)
    return h @ weight.view(WIDTH, WIDTH)


def attended(model: PlaceUser, h: torch.Tensor) -> torch.Tensor:
    h = h + model.places[:, : h.shape[1]] + model.cache[0, : h.shape[1]]
    scores = (h @ h.transpose(1, 2)).masked_fill(model.causal[: h.shape[1], : h.shape[1]] == 0, -1e9)
    return scores.softmax(-1) @ h


def found_in_each(model: PlaceUser, h: torch.Tensor) -> torch.Tensor:
    places = [torch.where(sample[:, 0] > 0)[0][:2] for sample in h]
    return torch.stack([sample.index_fill(0, each, 0.0) for sample, each in zip(h, places, strict=True)])


def summed_in_each(model: PlaceUser, h: torch.Tensor) -> torch.Tensor:
    places = group(h)[..., None].expand(-1, -1, WIDTH)
    return h - h.new_zeros(len(h), GROUPS, WIDTH).scatter_add(1, places, h).gather(1, places)


def found_by_both(model: PlaceUser, h: torch.Tensor) -> torch.Tensor:
    places, out = (h[..., 0] > 0).nonzero(), h.clone()
    out[places[:, 0], places[:, 1]] = 0
    return out


ALONE: list[tuple[str, Form, tuple[int, ...]]] = [
    *(
        (f"experts {at} {shape}", partial(by_experts, put), shape)
        for at, put in enumerate(PUTS)
        for shape in ((), (8,))
    ),
    *((form.__name__, form, ()) for form in (by_two_experts, by_seen_experts, masked, sorted_and_back, one_hot)),
    *((form.__name__, form, ()) for form in (gated, coded, normed_weights)),
    *((form.__name__, form, (8,)) for form in (masked, attended, found_in_each, summed_in_each, found_by_both)),
]


@pytest.mark.parametrize(("form", "shape"), [each[1:] for each in ALONE], ids=[each[0] for each in ALONE])
def test_nothing_is_said_of_samples_that_meet_none(form: Form, shape: tuple[int, ...]) -> None:
    assert called(form, batch(*shape), None) == (True, [])
