"""Models whose samples depend on each other: a batch of them stays in one piece, or it is said what differs."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig

DTYPE = torch.float64
DEVICES = ["cpu", "cpu"]
NUMBER, WIDTH = 7, 6
NOISE = torch.randn(2 * NUMBER, WIDTH, dtype=DTYPE, generator=torch.Generator().manual_seed(0))


class Centred(nn.Module):
    """Subtracts the mean of a batch in front of its layers, or inside of one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(0)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(NUMBER, WIDTH, dtype=DTYPE), torch.randint(WIDTH, (NUMBER,))


def train(piped: Any, *options: RoundPipeRunConfig) -> tuple[torch.Tensor, list[str]]:
    x, label = batch()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            piped.zero_grad()
            given = {"run_config": options[0]} if options else {}
            loss = piped.forward_backward((x,), label=label, loss_fn=F.cross_entropy, loss_reduction="mean", **given)
            piped.synchronize()
    return loss, [str(each.message) for each in caught if "mixes the samples" in str(each.message)]


@pytest.mark.parametrize("number", [None, "auto", 3])
def test_a_batch_is_cut_only_if_somebody_says_so(number: Any) -> None:
    torch.manual_seed(0)
    model = Centred().to(DTYPE)
    x, label = batch()
    reference = copy.deepcopy(model)
    expected = F.cross_entropy(reference(x), label)
    expected.backward()
    options = () if number is None else (RoundPipeRunConfig(num_microbatch=number),)
    with roundpipe.compile(model, devices=DEVICES) as piped:
        loss, told = train(piped, *options)
        assert len(told) == 1 and "mean in the forward of Centred" in told[0]
        is_same = torch.allclose(loss, expected, rtol=1e-12)
        assert is_same is (number != 3)
        assert ("Each of the 3 microbatches has only its own samples" if number == 3 else "not cut") in told[0]
        if is_same:
            for one, other in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad)
            piped.eval()
            with torch.no_grad():
                torch.testing.assert_close(piped(x), reference(x))


def shifted(h: torch.Tensor) -> torch.Tensor:
    return F.pad(h, (0, 0, 1, 0))[:-1] + h


def pooled(h: torch.Tensor) -> torch.Tensor:
    return F.avg_pool1d(h.T[None], 3, 1, 1)[0].T


def normed(h: torch.Tensor) -> torch.Tensor:
    return F.instance_norm(h.T[None])[0].T


def whitened(h: torch.Tensor) -> torch.Tensor:
    return h * torch.linalg.svd(h, full_matrices=False)[0][:, :1].abs()


def reversed_order(h: torch.Tensor) -> torch.Tensor:
    return 0.7 * h + 0.3 * h[torch.arange(len(h) - 1, -1, -1)]


def spread(h: torch.Tensor) -> torch.Tensor:
    return h * torch.linspace(0, 1, len(h))[:, None]


def stored(h: torch.Tensor) -> torch.Tensor:
    return h + NOISE[: len(h)]


def scaled(h: torch.Tensor) -> torch.Tensor:
    return h / h.detach().std().item()


def reversed_loop(h: torch.Tensor) -> torch.Tensor:
    return torch.stack([sample * 0.5 for sample in h.unbind()][::-1])


class Mixed(nn.Module):
    """Mixes what its first layer gives."""

    def __init__(self, mix: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mix = mix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self.layers
        x = self.mix(torch.tanh(first(x)))
        for layer in others:
            x = torch.tanh(layer(x))
        return x


def minus_first(h: torch.Tensor) -> torch.Tensor:
    return h - h[0]


def minus_first_row(h: torch.Tensor) -> torch.Tensor:
    return h - h[:1]


@pytest.mark.parametrize(
    "mix",
    [
        *(minus_first, minus_first_row, shifted, pooled, normed, whitened, reversed_order),
        *(spread, stored, scaled, reversed_loop),
    ],
    ids=lambda mix: mix.__name__,
)
def test_samples_that_meet_others_are_seen(mix: Any) -> None:
    torch.manual_seed(0)
    model = Mixed(mix).to(DTYPE)
    x, label = batch()
    expected = F.cross_entropy(copy.deepcopy(model)(x), label)
    with roundpipe.compile(model, devices=DEVICES) as piped:
        loss, texts = train(piped)
    torch.testing.assert_close(loss, expected.detach())
    assert len(texts) == 1 and "runs as one microbatch" in texts[0]


def of_last_tokens(h: torch.Tensor) -> torch.Tensor:
    return h[torch.arange(len(h)), :] + h[:, :1]


def of_each(h: torch.Tensor) -> torch.Tensor:
    return F.avg_pool1d(F.pad(h[:, None], (1, 1)), 3, 1)[:, 0] + h.select(1, 0)[:, None]


@pytest.mark.parametrize("mix", [of_last_tokens, of_each], ids=lambda mix: mix.__name__)
def test_samples_that_meet_none_are_cut(mix: Any) -> None:
    torch.manual_seed(0)
    with roundpipe.compile(Mixed(mix).to(DTYPE), devices=DEVICES) as piped:
        assert train(piped)[1] == []


def test_gradients_by_frequency_are_of_a_whole_batch() -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(5, WIDTH, scale_grad_by_freq=True)
    model = nn.Sequential(embedding, nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(DTYPE)
    reference, (_, label) = copy.deepcopy(model), batch()
    ids = torch.tensor([0, 0, 1, 0, 2, 0, 0])
    F.cross_entropy(reference(ids), label).backward()
    with roundpipe.compile(model, devices=DEVICES) as piped, pytest.warns(UserWarning, match="mixes the samples"):
        piped.forward_backward((ids,), label=label, loss_fn=F.cross_entropy, loss_reduction="mean")
        piped.synchronize()
    torch.testing.assert_close(model[0].weight.grad, reference[0].weight.grad)


def test_a_number_given_to_the_model_stays_too() -> None:
    with roundpipe.compile(
        Centred().to(DTYPE), devices=DEVICES, model_run_config=RoundPipeRunConfig(num_microbatch=2)
    ) as piped:
        _, told = train(piped)
        assert len(told) == 1 and "Each of the 2 microbatches" in told[0]
        _, told = train(piped, RoundPipeRunConfig(num_microbatch=1))
        assert not told


def test_explain_says_where_samples_are_mixed() -> None:
    found = roundpipe.explain(Centred(), (torch.randn(NUMBER, WIDTH),))
    assert "Where the samples of a batch are mixed\n  mean in the forward of Centred" in str(found)
    assert found.as_json()["mixes_samples"] == "mean in the forward of Centred"


class Trimmed(nn.Module):
    """Cuts a batch to its longest sample, and averages over what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        ids = ids[:, : int(lengths.max())]
        return self.head(torch.relu(self.layer(self.table(ids))).mean(1))


def test_the_longest_sample_is_that_of_the_batch() -> None:
    torch.manual_seed(0)
    model = Trimmed().to(DTYPE)
    reference = copy.deepcopy(model)
    ids, label = torch.randint(20, (NUMBER, 9)), torch.randint(4, (NUMBER,))
    with roundpipe.compile(model, devices=DEVICES) as piped:
        for lengths in ([6, 2, 3, 1, 2, 4, 3], [2, 2, 3, 1, 2, 6, 3], [2, 5, 3, 1, 2, 4, 3]):
            lengths = torch.tensor(lengths)
            piped.zero_grad()
            reference.zero_grad()
            loss = piped.forward_backward((ids, lengths), label=label, loss_fn=F.cross_entropy, loss_reduction="mean")
            piped.synchronize()
            expected = F.cross_entropy(reference(ids, lengths), label)
            expected.backward()
            torch.testing.assert_close(loss, expected)
            for one, other in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad)
        assert piped.trace_count == 2  # for the lengths 6 and 5


class PartlyLabelled(nn.Module):
    """Adds what is asked of those samples that have it, if any has."""

    def __init__(self, asks: Any) -> None:
        super().__init__()
        self.first, self.second, self.asks = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4), asks

    def forward(self, x: torch.Tensor, has: torch.Tensor) -> torch.Tensor:
        y = self.second(torch.relu(self.first(x)))
        if self.asks(has):
            y = y + torch.zeros_like(y).masked_fill(has[:, None], 1) * y[has].mean(1).sum() / y[has].mean(1).sum()
        return y


@pytest.mark.parametrize("asks", [lambda has: has.any(), lambda has: has.sum() > 0, lambda has: bool(has.any())])
def test_a_piece_that_has_none_does_nothing_with_them(asks: Any) -> None:
    """A mean over none would be no number."""
    torch.manual_seed(0)
    model = PartlyLabelled(asks).to(DTYPE)
    x, has = torch.randn(NUMBER, WIDTH, dtype=DTYPE), torch.tensor([True, True] + [False] * (NUMBER - 2))
    with roundpipe.compile(model, devices=DEVICES) as piped, torch.no_grad():
        torch.testing.assert_close(piped(x, has), model(x, has))


class Balanced(nn.Module):
    """A classifier of tokens whose loss has a mean over those that count, and a product of means over all."""

    def __init__(self, weight: float, has_histogram: bool = False) -> None:
        super().__init__()
        self.table, self.router = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 3)
        self.has_histogram = has_histogram
        self.experts, self.head = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 20)
        self.weight = weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.table(ids).flatten(0, 1)
        shares = self.router(x).softmax(-1)
        chosen = F.one_hot(shares.argmax(-1), 3).to(shares.dtype)
        x = sum(expert(x) * (chosen * shares)[:, index, None] for index, expert in enumerate(self.experts))
        loss = F.cross_entropy(self.head(x), labels.flatten())
        counts = chosen.mean(0)
        if self.has_histogram:  # as the load balancing of transformers has
            counts = torch.histc(shares.argmax(-1).to(shares.dtype), bins=3, min=0, max=2) / len(x)
        return {"loss": loss + self.weight * 3 * (counts * shares.mean(0)).sum()}


@pytest.mark.parametrize("has_histogram", [False, True])
@pytest.mark.parametrize("weight", [1e-9, 0.5])
def test_products_of_means_count_by_samples_and_means_by_their_targets(weight: float, has_histogram: bool) -> None:
    torch.manual_seed(0)
    model = Balanced(weight, has_histogram).to(DTYPE)
    reference = copy.deepcopy(model)
    ids = torch.randint(20, (NUMBER, 9))
    labels = ids.clone()
    labels[0, 1:] = labels[3, 4:] = -100
    given = {"ids": ids, "labels": labels}
    expected = reference(**given)["loss"]
    expected.backward()
    pieces = zip(ids.split([3, 2, 2]), labels.split([3, 2, 2]), strict=True)
    with torch.no_grad():
        products = [
            (reference(*piece)["loss"] - F.cross_entropy(_scores(reference, piece[0]), piece[1].flatten()))
            * len(piece[0])
            for piece in pieces
        ]
        by_samples = sum(products) / NUMBER + F.cross_entropy(_scores(reference, ids), labels.flatten())
    with (
        roundpipe.compile(model, devices=DEVICES) as piped,
        pytest.warns(UserWarning, match="has products or other functions of means over the batch"),
    ):
        loss = piped.forward_backward(
            input_kwargs=given, loss_fn=lambda outputs, _: outputs["loss"], loss_reduction="mean"
        )
        piped.synchronize()
    torch.testing.assert_close(loss, by_samples)
    if weight < 1e-6:
        torch.testing.assert_close(loss, expected.detach())
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=1e-8)


def _scores(model: Balanced, ids: torch.Tensor) -> torch.Tensor:
    """What the head gives."""
    found: list[torch.Tensor] = []
    handle = model.head.register_forward_hook(lambda module, args, output: found.append(output))
    model(ids, ids)
    handle.remove()
    return found[0]


class Views(nn.Module):
    """Both views of each sample in one pass, as in self-supervised training; a table of scores, if it is asked for."""

    def __init__(self, *, scores: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.scores = scores

    def forward(self, x: torch.Tensor) -> Any:
        made = self.layers(torch.cat([x, 2 * x]))
        return made @ made.T if self.scores else {"views": made, "mean": made.chunk(2)[0]}


@pytest.mark.parametrize("number", [None, 3])
def test_outputs_with_rows_of_all_samples_twice_are_those_of_the_batch(number: int | None) -> None:
    torch.manual_seed(0)
    model = Views().to(DTYPE)
    x, _ = batch()
    expected = model(x)
    gradient = torch.randn_like(expected["views"])
    (expected["views"] * gradient).sum().backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    config = RoundPipeRunConfig(num_microbatch=number)
    with roundpipe.compile(model, devices=DEVICES, model_run_config=config) as piped:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            found = piped(x)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-15)  # a product rounds by how many rows it has
        (found["views"] * gradient).sum().backward()
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.0)
        grads: list[torch.Tensor] = []
        piped.step(lambda: (grads.extend(each.grad for each in piped.optim_parameters()), optimizer.step()))
        piped.synchronize()
        for each, one in zip(grads, wanted, strict=True):
            torch.testing.assert_close(each, one)
        _, returned = piped.forward_backward((x,), loss_fn=lambda out, _: out["views"].sum(), return_outputs=True)
        torch.testing.assert_close(returned, expected, rtol=0, atol=1e-15)


def test_scores_of_each_sample_with_each_are_those_of_the_batch() -> None:
    torch.manual_seed(0)
    model = Views(scores=True).to(DTYPE)
    x, _ = batch()
    label = torch.arange(2 * NUMBER)
    expected = F.cross_entropy(model(x), label)
    with roundpipe.compile(model, devices=DEVICES) as piped, pytest.warns(UserWarning, match="mixes the samples"):
        loss = piped.forward_backward((x,), label=label, loss_fn=F.cross_entropy, loss_reduction="mean")
    torch.testing.assert_close(loss, expected.detach())
