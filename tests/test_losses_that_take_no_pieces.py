"""Loss functions that fail on a piece of a batch and run the whole, since their labels can't be cut by dimension 0."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig
from tests.runtime.models import assert_same, gradients, pair

WIDTH, CLASSES, TIMES = 8, 6, 10


class InParts(nn.Module):
    """Can't be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        random.random()
        return self.body(x)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, CLASSES))


def ctc(outputs: torch.Tensor, label: Any) -> torch.Tensor:
    targets, times, lengths = label
    return F.ctc_loss(outputs.log_softmax(-1).transpose(0, 1), targets, times, lengths)


def of_ctc(number: int) -> tuple[torch.Tensor, Any]:
    lengths = torch.tensor([1 + index * 2 % 5 for index in range(number)])
    targets = 1 + torch.arange(int(lengths.sum())) % (CLASSES - 1)
    return torch.randn(number, TIMES, WIDTH), (targets, torch.full((number,), TIMES), lengths)


def weighed(outputs: torch.Tensor, label: Any) -> torch.Tensor:
    return F.cross_entropy(outputs, label["y"], weight=label["weights"])


def of_classes(number: int) -> tuple[torch.Tensor, Any]:
    weights = 1 + torch.arange(float(CLASSES))
    return torch.randn(number, WIDTH), {"y": torch.randint(CLASSES, (number,)), "weights": weights}


def flat(outputs: torch.Tensor, label: Any) -> torch.Tensor:
    return F.cross_entropy(outputs, torch.tensor(label["classes"]))


def of_lists(number: int) -> tuple[torch.Tensor, Any]:
    return torch.randn(number, WIDTH), {"classes": tuple(index % CLASSES for index in range(number))}


CASES = [
    (ctc, of_ctc, (6, 7, 12), [1, 1, 1], "loss_fn can't run a piece of a batch by itself (Expected"),
    (weighed, of_classes, (CLASSES, 12), [1, 1], "loss_fn can't run a piece of a batch by itself (weight tensor"),
    (flat, of_lists, (6, 9), [1, 1], "loss_fn can't run a piece of a batch by itself (Expected input batch_size"),
]


@pytest.mark.parametrize("way", ["training", "evaluation"])
@pytest.mark.parametrize("make", [net, InParts])
@pytest.mark.parametrize(("loss", "samples", "sizes", "numbers", "said"), CASES)
def test_by_default_the_batch_runs_whole_from_then_on(
    loss: Any, samples: Any, sizes: Any, numbers: list[int], said: str, make: Any, way: str
) -> None:
    cut: list[int] = []

    def loss_fn(outputs: torch.Tensor, label: Any) -> torch.Tensor:
        cut.append(roundpipe.num_microbatches())
        return loss(outputs, label)

    with pair(make) as (piped, model, reference), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for each in (*model.parameters(), *reference.parameters()):
            each.grad = torch.ones_like(each)  # of an earlier call
        found = []
        for size in sizes:
            x, label = samples(size)
            expected = loss(reference(x), label)
            random.seed(1)
            if way == "training":
                expected.backward()
                value = piped.forward_backward((x,), label=label, loss_fn=loss_fn, loss_reduction="mean")
                piped.synchronize()
            else:
                value = piped.forward_loss((x,), label=label, loss_fn=loss_fn, loss_reduction="mean")
            torch.testing.assert_close(value, expected.detach())
            assert_same(gradients(model), gradients(reference))
            assert_same(dict(model.named_buffers()), dict(reference.named_buffers()))
            found.append(cut[-1])
    assert found == numbers
    told = [str(each.message) for each in caught if "can't run a piece" in str(each.message)]
    assert len(told) == 1 and said in told[0] and "not cut from now on" in told[0], told


def test_a_batch_as_long_as_class_weights_runs_whole_and_others_are_cut() -> None:
    cut: list[int] = []

    def loss_fn(outputs: torch.Tensor, label: Any) -> torch.Tensor:
        cut.append(roundpipe.num_microbatches())
        return F.cross_entropy(outputs, label["y"], weight=label["weights"], reduction="sum")

    with pair(net) as (piped, _, _), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        piped.forward_backward((torch.randn(12, WIDTH),), label=of_classes(12)[1], loss_fn=loss_fn)
        assert cut[-1] == 3
        for size in (CLASSES, 12):  # it is known by now that the weights are not the samples'
            x, label = of_classes(size)
            piped.forward_backward((x,), label=label, loss_fn=loss_fn)
            assert cut[-1] == 3


@pytest.mark.parametrize("make", [net, InParts])
def test_a_number_that_is_given_stays_and_the_error_is_raised(make: Any) -> None:
    x, label = of_ctc(6)
    with pair(make) as (piped, model, _), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match="Expected tensor to have size") as caught:
            config = RoundPipeRunConfig(num_microbatch=3, loss_reduction="mean")
            piped.forward_backward((x,), label=label, loss_fn=ctc, run_config=config)
        assert any("phase loss_fn" in note for note in caught.value.__notes__)
        assert all(each.grad is None for each in model.parameters())


class Counting(nn.Module):
    """Counts its calls, draws, keeps a mean and trains a factor."""

    def __init__(self, fails_for: Callable[[int], bool]) -> None:
        super().__init__()
        self.factor, self.calls, self.seen, self.drawn = nn.Parameter(torch.ones(())), 0, [], []
        self.register_buffer("mean", torch.zeros(()))
        self.fails_for = fails_for

    def forward(self, outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(len(label))
        self.drawn.append(random.random() + float(torch.rand(())))
        with torch.no_grad():
            self.mean += outputs.mean()
        if self.fails_for(len(label)):
            raise ValueError(f"no {len(label)}")
        return F.cross_entropy(outputs, label) * self.factor


@pytest.mark.parametrize("make", [net, InParts])
@pytest.mark.parametrize("number", [6, 7], ids=["the first piece", "the second piece"])
def test_what_a_loss_left_of_its_pieces_is_as_if_none_had_run(number: int, make: Any) -> None:
    first = Counting(lambda size: size == 2)
    second = copy.deepcopy(first)
    x, label = torch.randn(number, WIDTH), torch.arange(number) % CLASSES
    with pair(make) as (piped, model, reference), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(3)
        random.seed(3)
        expected = second(reference(x), label)
        expected.backward()
        drawn = random.random()
        torch.manual_seed(3)
        random.seed(3)
        loss = piped.forward_backward((x,), label=label, loss_fn=first, loss_reduction="mean")
        piped.synchronize()
        assert random.random() == drawn
        torch.testing.assert_close(loss, expected.detach())
        assert_same(gradients(model), gradients(reference))
        assert (first.calls, first.seen) == (second.calls, second.seen) == (1, [number])
        torch.testing.assert_close(first.mean, second.mean)
        torch.testing.assert_close(first.factor.grad, second.factor.grad)


@pytest.mark.parametrize("make", [net, InParts])
def test_what_a_loss_raises_for_the_whole_batch_too_is_raised_as_for_the_piece(make: Any) -> None:
    x, label = torch.randn(6, WIDTH), torch.arange(6) % CLASSES
    with pair(make) as (piped, model, _), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match="no 2"):
            piped.forward_backward((x,), label=label, loss_fn=Counting(lambda size: True), loss_reduction="mean")
        assert all(each.grad is None for each in model.parameters())
        loss = piped.forward_backward((x,), label=label, loss_fn=F.cross_entropy, loss_reduction="mean")
        torch.testing.assert_close(loss, F.cross_entropy(model(x), label).detach())
    assert not any("can't run a piece" in str(each.message) for each in caught)
