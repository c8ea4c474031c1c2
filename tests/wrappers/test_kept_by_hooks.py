"""Forward hooks that keep tensors: what is left is the last microbatch's, and that is said where it matters."""

from __future__ import annotations

import copy
import gc
import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig
from roundpipe.wrappers.hook_warnings import MOST_LOOKS

NUMBER, WIDTH = 9, 6
X, Y = torch.randn(NUMBER, WIDTH, generator=torch.Generator().manual_seed(1)), torch.arange(NUMBER) % 4
Hook = Callable[..., None]
FEATURES: dict[str, Any] = {}


def model(hook: Hook) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    net[3].register_forward_hook(hook)
    return net


class Collector:
    """Keeps in an attribute."""

    latest: Any = None

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.latest = output.detach()


class Extractor(nn.Module):
    """Keeps in a dict of a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[str, torch.Tensor] = {}

    def keep(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.features["x"] = output.detach()


def in_dict() -> Hook:
    kept: dict[str, Any] = {"x": torch.zeros(NUMBER, 16)}  # of an earlier call of the model itself
    return lambda module, args, output: kept.__setitem__("x", output.detach())


def in_global() -> Hook:
    return lambda module, args, output: FEATURES.update(x=output.detach())


def in_variable() -> Hook:
    latest = None

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        nonlocal latest
        latest = [output.detach()]

    return hook


def in_nested_dict() -> Hook:
    kept: dict[str, dict[str, Any]] = {"net": {}}
    return lambda module, args, output: kept["net"].update(x=output.detach())


KEEPING: list[Callable[[], Hook]] = [
    in_dict,
    in_global,
    in_variable,
    in_nested_dict,
    Collector,
    lambda: Extractor().keep,
]


def appends() -> Hook:
    kept: list[Any] = []
    return lambda module, args, output: kept.append(output.detach())


def appends_by_name() -> Hook:
    kept: dict[str, list[Any]] = defaultdict(list)
    return lambda module, args, output: kept["x"].append(output.detach())


def sums() -> Hook:
    kept: dict[str, Any] = {"sum": torch.zeros(16), "number": 0}

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        kept["sum"] = kept["sum"] + output.detach().sum(0)
        kept["number"] += len(output)

    return hook


def times() -> Hook:
    kept: dict[str, float] = {}
    return lambda module, args, output: kept.update(at=time.perf_counter())


def shapes() -> Hook:
    kept: dict[str, Any] = {}
    return lambda module, args, output: kept.update(shape=output.shape)


def scales() -> Hook:
    return lambda module, args, output: output * 2


OTHERS: list[Callable[[], Hook]] = [appends, appends_by_name, sums, times, shapes, scales]


def evaluate(piped: Any, *options: RoundPipeRunConfig) -> None:
    piped.eval()
    with torch.no_grad():
        piped(X, roundpipe_run_config=options[0] if options else None)


def loop(piped: Any, *options: RoundPipeRunConfig) -> None:
    piped(X, roundpipe_run_config=options[0] if options else None).sum().backward()


def train(piped: Any, *options: RoundPipeRunConfig, loss_fn: Any = F.cross_entropy) -> None:
    piped.forward_backward(
        (X,), label=Y, loss_fn=loss_fn, loss_reduction="mean", run_config=options[0] if options else None
    )


MODES = [evaluate, loop, train]


def told(net: nn.Module, run: Callable[..., None], *options: RoundPipeRunConfig) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with roundpipe.compile(net, devices=["cpu", "cpu"]) as piped:
            run(piped, *options)
            run(piped, *options)
    texts = [str(each.message) for each in caught]
    return [text for text in texts if "a forward hook left" in text or "loss_fn left" in text]


@pytest.mark.parametrize("make", KEEPING)
@pytest.mark.parametrize("run", MODES)
def test_what_is_of_the_last_microbatch_is_told_once(make: Callable[[], Hook], run: Callable[..., None]) -> None:
    (text,) = told(model(make()), run)
    assert "tensors of the last of 3 microbatches there" in text


@pytest.mark.parametrize("make", OTHERS)
@pytest.mark.parametrize("run", MODES)
def test_other_hooks_are_not_told_of(make: Callable[[], Hook], run: Callable[..., None]) -> None:
    assert not told(model(make()), run)


@pytest.mark.parametrize("run", MODES)
def test_one_microbatch_has_all(run: Callable[..., None]) -> None:
    collector = Collector()
    assert not told(model(collector), run, RoundPipeRunConfig(num_microbatch=1))
    assert len(collector.latest) == NUMBER


def test_a_loss_takes_each_microbatchs_own() -> None:
    collector = Collector()
    loss_fn = lambda outputs, label: F.cross_entropy(outputs, label) + collector.latest.mean()  # noqa: E731
    assert not told(model(collector), lambda piped: train(piped, loss_fn=loss_fn))


class Reads(nn.Module):
    """Its forward takes what a hook has left."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {}
        self.net = model(lambda module, args, output: self.kept.update(x=output.detach()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.kept["x"].mean(-1, keepdim=True)


@pytest.mark.parametrize("run", MODES)
def test_a_forward_takes_each_microbatchs_own(run: Callable[..., None]) -> None:
    assert not told(Reads(), run)


@pytest.mark.parametrize("number", [None, 3])
def test_a_loop_with_a_loss_of_features(number: int | None) -> None:
    kept: dict[str, torch.Tensor] = {}
    net = model(lambda module, args, output: kept.update(x=output))
    reference = copy.deepcopy(net)
    expected = F.cross_entropy(reference(X), Y) + kept["x"].square().mean()
    expected.backward()
    with roundpipe.compile(net, devices=["cpu", "cpu"]) as piped:
        options = None if number is None else RoundPipeRunConfig(num_microbatch=number)
        with pytest.warns(UserWarning, match="a forward hook keeps an activation") as caught:
            outputs = piped(X, roundpipe_run_config=options)
        loss = F.cross_entropy(outputs, Y) + kept["x"].square().mean()
        loss.backward()
        piped.synchronize()
    is_same = number is None
    text = "what it keeps is that of the batch" if is_same else "is that of the last microbatch alone"
    assert any(text in str(each.message) for each in caught)
    assert torch.allclose(loss, expected) is is_same
    if is_same:
        for one, other in zip(net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


def test_hooks_that_each_step_makes_anew_are_not_kept() -> None:
    """But for those that were looked at, which are no more than of a hook that stays."""
    net, gone = model(lambda module, args, output: None), []
    with roundpipe.compile(net, devices=["cpu", "cpu"]) as piped, torch.no_grad():
        for _ in range(12):
            kept: dict[str, torch.Tensor] = {}
            hook = lambda module, args, output, kept=kept: kept.update(x=output.detach())  # noqa: E731
            gone.append(weakref.ref(hook))
            handle = net[0].register_forward_hook(hook)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                piped(X)
            handle.remove()
        del hook, kept
        piped(X)
        gc.collect()
        assert sum(reference() is not None for reference in gone) <= MOST_LOOKS  # those that were told of
