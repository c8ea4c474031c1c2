"""Batches whose pieces the model can't run, while it runs the whole: pieces that are too small, or of any size."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig
from tests.runtime.models import assert_same, gradients
from tests.test_pieces_of_few_samples import WIDTH, double, pair


def summed(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs, label, reduction="sum")


def train(piped: Any, net: nn.Module, reference: nn.Module, sizes: Sequence[int]) -> list[int]:
    """Into how many microbatches batches of such sizes are cut; each has the numbers of plain PyTorch for these."""
    numbers: list[int] = []

    def loss_fn(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        numbers.append(roundpipe.num_microbatches())
        return summed(outputs, label)

    cut = []
    for size in sizes:
        x, state, label = double(size, 2, WIDTH), double(1, size, WIDTH), double(size, 2, WIDTH)
        loss = piped.forward_backward((x, state), label=label, loss_fn=loss_fn)
        piped.synchronize()
        cut.append(numbers[-1])
        tensors = [each.tensor_split(cut[-1], dim) for each, dim in ((x, 0), (state, 1), (label, 0))]
        losses = [summed(reference(*piece), of_piece) for *piece, of_piece in zip(*tensors, strict=True)]
        expected = torch.stack(losses).sum()
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        assert_same(gradients(net), gradients(reference))
        assert_same(dict(net.named_buffers()), dict(reference.named_buffers()))
    return cut


class Normalized(nn.Module):
    """Has a batch norm, which can't run one sample while it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, WIDTH)

    def forward(self, x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        return x + self.last(torch.relu(self.norm(self.first(x.mean(1)))))[:, None]


class ByFours(nn.Module):
    """Takes four samples at least."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        if len(x) < 4:
            raise ValueError("too few samples")
        return self.last(torch.tanh(self.first(x)))


class Decoder(nn.Module):
    """Takes a hidden state, whose samples are in dimension 1."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.last = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return self.last(self.gru(x, state)[0])


@pytest.mark.parametrize(
    ("kind", "sizes", "numbers", "said"),
    [
        (Normalized, [8, 4, 8, 3, 4, 64], [3, 1, 3, 1, 1, 3], "piece of 1 sample by itself (Expected more than 1"),
        (Normalized, [3, 8], [1, 3], "piece of 1 sample by itself (Expected more than 1"),
        (ByFours, [12, 9, 12, 10], [3, 1, 3, 1], "piece of 3 samples by itself (too few samples)"),
    ],
)
def test_a_batch_runs_whole_if_its_pieces_are_too_small(
    kind: type[nn.Module], sizes: list[int], numbers: list[int], said: str
) -> None:
    with pair(kind) as (piped, net, reference), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert train(piped, net, reference, sizes) == numbers
    told = [str(each.message) for each in caught if "can't run a piece" in str(each.message)]
    assert len(told) == 1 and said in told[0] and "from now on" not in told[0], told


class DrawingDecoder(Decoder):
    """Can't be traced; counts, collects and draws."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += len(x)
        self.drawn.append(random.random())
        if random.random() < 0.5:
            x = x.flip(1)
        return super().forward(x + torch.rand(()), state)


class DrawingNorm(Normalized):
    """Can't be traced; its first piece runs."""

    def forward(self, x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        return super().forward(x * random.random() + torch.rand(()), unused)


def seed() -> None:
    torch.manual_seed(1)
    random.seed(1)


@pytest.mark.parametrize("way", ["training", "forward", "evaluation"])
@pytest.mark.parametrize(("kind", "size"), [(DrawingDecoder, 9), (DrawingNorm, 4)])
def test_a_model_in_parts_runs_whole_as_if_no_piece_had_run(kind: type[nn.Module], size: int, way: str) -> None:
    x, state, label = double(size, 2, WIDTH), double(1, size, WIDTH), double(size, 2, WIDTH)
    log: list[float] = []

    def logged(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        log.append(summed(outputs, label).item())
        return summed(outputs, label)

    with pair(kind) as (piped, net, reference), torch.set_grad_enabled(way != "evaluation"):
        for each in (*net.parameters(), *reference.parameters()):
            each.grad = torch.ones_like(each)  # of an earlier call
        seed()
        expected = summed(reference(x, state), label)
        draw = random.random()
        if way != "evaluation":
            expected.backward()
        seed()
        with pytest.warns(UserWarning, match="can't run a piece") as caught:
            if way == "training":
                loss = piped.forward_backward((x, state), label=label, loss_fn=logged)
                assert log == [loss.item()]
            else:
                loss = summed(piped(x, state), label)
            if way == "forward":
                loss.backward()
            piped.synchronize()
        assert not any("cut all the same" in str(each.message) for each in caught)
        assert random.random() == draw
        if isinstance(net, DrawingDecoder) and isinstance(reference, DrawingDecoder):
            assert (net.calls, net.drawn) == (reference.calls, reference.drawn)
        torch.testing.assert_close(loss.detach(), expected.detach())
        assert_same(gradients(net), gradients(reference))
        assert_same(dict(net.named_buffers()), dict(reference.named_buffers()))


def test_a_model_in_parts_goes_on_with_batches_that_can_be_cut() -> None:
    class Noted(Normalized):
        def forward(self, x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
            return super().forward(x, unused) + 0.0 * random.random()

    with pair(Noted) as (piped, net, reference), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert train(piped, net, reference, [8, 4, 8, 4, 64]) == [3, 1, 3, 1, 3]
    assert sum("piece of 1 sample by itself" in str(each.message) for each in caught) == 1


class Graph(nn.Module):
    """Takes features of nodes, and which are neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, neighbours: torch.Tensor) -> torch.Tensor:
        return self.last(neighbours @ torch.relu(self.first(x)))


@pytest.mark.parametrize(
    ("kind", "arguments", "said"),
    [
        (Decoder, (double(8, 2, WIDTH), double(1, 8, WIDTH)), "Expected hidden size"),
        (DrawingDecoder, (double(8, 2, WIDTH), double(1, 8, WIDTH)), "Expected hidden size"),
        (Graph, (double(8, WIDTH), double(8, 8)), "mat1 and mat2 shapes cannot be multiplied"),
    ],
)
@pytest.mark.parametrize("way", ["training", "forward"])
def test_if_a_number_is_given_the_error_says_that_the_whole_batch_runs(
    kind: type[nn.Module], arguments: tuple[torch.Tensor, ...], said: str, way: str
) -> None:
    config = RoundPipeRunConfig(num_microbatch=4)
    with pair(kind) as (piped, net, reference), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match=said) as caught:
            if way == "training":
                piped.forward_backward(arguments, loss_fn=lambda outputs, _: outputs.sum(), run_config=config)
            else:
                piped(*arguments, roundpipe_run_config=config)
        notes = [note for note in caught.value.__notes__ if "can run the whole batch: use num_microbatch=1" in note]
        assert len(notes) == 1 and "one of the 4 microbatches" in notes[0], caught.value.__notes__
        assert not any("correct them, or the model" in note for note in caught.value.__notes__)
        whole = RoundPipeRunConfig(num_microbatch=1)
        seed()
        outputs = piped(*arguments, roundpipe_run_config=whole)
        seed()
        torch.testing.assert_close(outputs, reference(*arguments))
        assert all(each.grad is None for each in net.parameters())


def test_what_neither_a_piece_nor_the_whole_runs_raises_what_eager_does() -> None:
    class Refusing(Decoder):
        def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
            raise ValueError(f"no {len(x)}" if random.random() < 2 else "")

    with pair(Refusing) as (piped, _, _), pytest.raises(ValueError, match="no 9"):
        piped(double(9, 2, WIDTH), double(1, 9, WIDTH))


@pytest.mark.parametrize("sizes", [[8, 64, 12], [3, 64, 12]])
def test_a_model_that_takes_no_pieces_runs_whole_batches_of_any_size(sizes: list[int]) -> None:
    with pair(Decoder) as (piped, net, reference), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert train(piped, net, reference, sizes) == [1, 1, 1]
    told = [str(each.message) for each in caught if "from now on" in str(each.message)]
    assert len(told) == 1 and told[0].endswith("split_input can say how") and "images" not in told[0], told
