"""Losses that keep something for later, such as metrics and logs.

What a loss only leaves behind is that of the whole batch, as its graph gives it. What it reads again, such as a sum of
all losses so far, is what the microbatches make of it one by one. Before a round, a loss is traced on fakes, or called
with drawn outputs; none of that may be seen afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe

NUMBER, CLASSES = 12, 5


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, CLASSES))


torch.manual_seed(5)
X, Y = torch.randn(NUMBER, 16), torch.randint(CLASSES, (NUMBER,))


class Keeper(nn.Module):
    """Has a place for each way."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("buffer", torch.zeros(()))
        self.number, self.count = torch.zeros(()), 0
        self.names: dict[str, Any] = {}
        self.values: list[torch.Tensor] = []
        self.latest: Any = None


class PlainKeeper:
    def __init__(self) -> None:
        self.buffer, self.number, self.count = torch.zeros(()), torch.zeros(()), 0
        self.names: dict[str, Any] = {}
        self.values: list[torch.Tensor] = []
        self.latest: Any = None


def new_attribute(keeper: Any, loss: torch.Tensor) -> None:
    keeper.added = loss


def new_key(keeper: Any, loss: torch.Tensor) -> None:
    keeper.names["loss"] = loss


def attribute(keeper: Any, loss: torch.Tensor) -> None:
    keeper.latest = loss


def number(keeper: Any, loss: torch.Tensor) -> None:
    keeper.latest = loss.item()


def counted(keeper: Any, loss: torch.Tensor) -> None:
    keeper.count += 1


def appended(keeper: Any, loss: torch.Tensor) -> None:
    keeper.values.append(loss)


def other_buffer(keeper: Any, loss: torch.Tensor) -> None:
    keeper.buffer = keeper.buffer + loss


def written_buffer(keeper: Any, loss: torch.Tensor) -> None:
    keeper.buffer += loss


def written_after_a_decision(keeper: Any, loss: torch.Tensor) -> None:
    if loss > 0:  # so that it can't be traced, but is called
        keeper.number.add_(loss)


def replaced_after_a_decision(keeper: Any, loss: torch.Tensor) -> None:
    if loss > 0:
        keeper.number = keeper.number + loss
        keeper.buffer = keeper.buffer + loss


def nested(keeper: Any, loss: torch.Tensor) -> None:
    keeper.latest = {"loss": loss, "percent": [100 * loss, loss.item()]}


def number_after_a_decision(keeper: Any, loss: torch.Tensor) -> None:
    keeper.latest = round(loss.item(), 4)


LEFT = [new_attribute, new_key, attribute, number, appended, nested]
READ = [
    counted,
    other_buffer,
    written_buffer,
    written_after_a_decision,
    replaced_after_a_decision,
    number_after_a_decision,
]


class Criterion(nn.Module):
    """A loss that keeps values in itself, or in a part of it."""

    def __init__(self, keeper: Any, keep: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__()
        self.keeper, self.keep = keeper, keep

    def forward(self, outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(outputs, label)
        self.keep(self.keeper, loss.detach())
        return loss


def held(keeper: Any) -> dict[str, Any]:
    names = "added", "latest", "number", "buffer", "count", "names", "values"
    return {name: getattr(keeper, name, None) for name in names}


def loss_of_kind(loss_kind: str, keeper: Any, keep: Callable[[Any, torch.Tensor], None]) -> Any:
    criterion = Criterion(keeper, keep)
    if loss_kind == "module":
        return criterion
    if loss_kind == "function of a module":
        return lambda outputs, label: criterion(outputs, label)

    def loss_fn(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(outputs, label)
        keep(keeper, loss.detach())
        return loss

    return loss_fn


KINDS = pytest.mark.parametrize("kind", [Keeper, PlainKeeper])
LOSS_KINDS = pytest.mark.parametrize("loss_kind", ["function", "module", "function of a module"])


@pytest.mark.parametrize("keep", LEFT)
@KINDS
@LOSS_KINDS
def test_what_is_left_is_that_of_the_batch(
    keep: Callable[[Any, torch.Tensor], None], kind: type[Any], loss_kind: str
) -> None:
    net, found, expected = model(), kind(), kind()
    reference, loss_fn = loss_of_kind(loss_kind, expected, keep), loss_of_kind(loss_kind, found, keep)
    padded = Y.where(torch.arange(NUMBER) != 2, -100).where(torch.arange(NUMBER) < 9, -100)
    with roundpipe.compile(net, devices=["cpu", "cpu"]) as piped:
        for number in (3, 2, 1):
            loss = reference(net(X), padded)
            config = roundpipe.RoundPipeRunConfig(num_microbatch=number)
            given = piped.forward_backward(
                (X,), label=padded, loss_fn=loss_fn, loss_reduction="mean", run_config=config
            )
            torch.testing.assert_close(given, loss.detach())
            torch.testing.assert_close(held(found), held(expected))


@pytest.mark.parametrize("keep", READ)
@KINDS
@LOSS_KINDS
def test_what_is_read_again_is_that_of_the_microbatches(
    keep: Callable[[Any, torch.Tensor], None], kind: type[Any], loss_kind: str
) -> None:
    net, found, expected = model(), kind(), kind()
    reference, loss_fn = loss_of_kind(loss_kind, expected, keep), loss_of_kind(loss_kind, found, keep)
    for x, y in zip(X.chunk(3), Y.chunk(3), strict=True):
        reference(net(x), y)
    with roundpipe.compile(net, devices=["cpu", "cpu"]) as piped:
        piped.forward_backward((X,), label=Y, loss_fn=loss_fn, loss_reduction="mean")
    torch.testing.assert_close(held(found), held(expected))


class Metric(nn.Module):
    """Says that it is equal by what it holds, as metrics of torchmetrics do."""

    def __init__(self) -> None:
        super().__init__()
        self.states = {"total": torch.zeros(()), "weight": torch.zeros(())}
        self.total, self.weight = self.states.values()

    def __hash__(self) -> int:
        return hash((type(self).__name__, *(getattr(self, name) for name in self.states)))

    def update(self, outputs: torch.Tensor, label: torch.Tensor) -> None:
        self.total = self.total + (outputs.argmax(-1) == label).sum()
        self.weight = self.weight + len(label)

    def compute(self) -> torch.Tensor:
        return self.total / self.weight


class Measured(nn.Module):
    """Has a metric, and maybe uses it."""

    def __init__(self, *, uses: bool) -> None:
        super().__init__()
        self.net, self.metric, self.uses = model(), Metric(), uses

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        outputs = self.net(x)
        if self.uses:
            self.metric.update(outputs.detach(), label)
        return F.cross_entropy(outputs, label)


@pytest.mark.parametrize("uses", [False, True])
def test_a_model_may_have_a_metric(uses: bool) -> None:
    net, reference = Measured(uses=uses), Measured(uses=uses)
    expected = reference(X, Y)
    with roundpipe.compile(net, devices=["cpu", "cpu"]) as piped:
        loss = piped.forward_backward((X, Y), loss_fn=lambda loss, _: loss, loss_reduction="mean")
    torch.testing.assert_close(loss, expected.detach())
    assert float(net.metric.weight) == (NUMBER if uses else 0)
    torch.testing.assert_close(net.metric.compute(), reference.metric.compute(), equal_nan=True)


def test_a_metric_beside_the_loss() -> None:
    metric, reference, net = Metric(), Metric(), model()

    def loss_fn(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        metric.update(outputs.detach(), label)
        return F.cross_entropy(outputs, label)

    reference.update(net(X).detach(), Y)
    with roundpipe.compile(net, devices=["cpu", "cpu"]) as piped:
        piped.forward_backward((X,), label=Y, loss_fn=loss_fn, loss_reduction="mean")
    torch.testing.assert_close(metric.compute(), reference.compute())
    assert float(metric.weight) == NUMBER
