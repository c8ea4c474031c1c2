"""What a forward changes where no attribute shows it, and what it leaves for others: found, or the model falls back."""

from __future__ import annotations

import array
import collections
import dataclasses
import functools
import itertools
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.errors import TraceError
from roundpipe.effects.run_once import must_run_once
from roundpipe.fx.guards.guards import Guards
from roundpipe.fx.trace.tracer import trace
from tests.equality import assert_same_gradients
from tests.fx.against_eager import check, vectors
from tests.fx.cases_hidden_state import TWO
from tests.fx.test_shapes import Layers
from tests.fx.test_traps import Holds


class SlotCounter:
    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0

    def __next__(self) -> int:
        self.number += 1
        return self.number


class ListWithCount(list[int]):
    def count_up(self) -> int:
        self.number = getattr(self, "number", 0) + 1
        return self.number


def _added(held: Any, key: Any) -> int:
    held[key] += 1
    return int(held[key])


def _deepest(held: Any) -> int:
    while isinstance(held[0], list):
        held = held[0]
    return _added(held, 0)


def _first(held: Any) -> int:
    held["calls"] = held.get("calls", 0) + 1
    return int(held["calls"])


def _longer(held: Any) -> int:
    held.append(1)
    return len(held)


def _more(held: set[int]) -> int:
    held.add(len(held))
    return len(held)


STATES: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "NumPy's generator": (lambda: numpy.random.default_rng(0), lambda held: float(held.random())),
    "NumPy's old generator": (lambda: numpy.random.RandomState(0), lambda held: float(held.rand())),
    "Python's generator": (lambda: random.Random(0), lambda held: held.random()),
    "a method of a generator": (lambda: numpy.random.default_rng(0).random, lambda held: float(held())),
    "a partial with a generator": (lambda: functools.partial(random.Random(0).uniform, 1.0, 2.0), lambda held: held()),
    "a partial with a dict": (lambda: functools.partial(_added, {"calls": 0}, "calls"), lambda held: held()),
    "an iterator": (lambda: itertools.count(1), next),
    "an iterator in a list": (lambda: [itertools.cycle([1, 2, 3])], lambda held: next(held[0])),
    "a generator function's": (lambda: iter([*range(1, 99)]), next),
    "slots": (SlotCounter, next),
    "bytes": (lambda: bytearray(4), lambda held: _added(held, 0)),
    "an array": (lambda: array.array("d", [0.0]), lambda held: _added(held, 0)),
    "NumPy's array": (lambda: numpy.zeros(3), lambda held: _added(held, 1)),
    "a long list": (lambda: [0] * 300, lambda held: _added(held, 0)),
    "a deep list": (lambda: [[[[[[[0]]]]]]], _deepest),
    "a default": (lambda: collections.defaultdict(int), lambda held: _added(held, "calls")),
    "a counter": (collections.Counter, lambda held: _added(held, "calls")),
    "a deque": (collections.deque, _longer),
    "a set": (set, _more),
    "a user's dict": (collections.UserDict, _first),
    "a list of a class": (ListWithCount, lambda held: held.count_up()),
}


class Uses(nn.Module):
    """Scales by what an object gives, another number in every call."""

    def __init__(self, what: str) -> None:
        super().__init__()
        make, self.step = STATES[what]
        self.linear, self.held = nn.Linear(8, 8), make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.step(self.held)


@pytest.mark.parametrize("what", STATES)
def test_state_of_any_kind_is_never_burned_in(what: str) -> None:
    assert check(lambda: Holds(Uses(what)), sizes=TWO).fell_back


@pytest.mark.parametrize("what", ["NumPy's generator", "NumPy's old generator", "Python's generator", "an iterator"])
def test_a_trace_takes_nothing_from_what_a_user_holds(what: str) -> None:
    model = Holds(Uses(what)).double()
    with pytest.raises(TraceError, match=r"Uses\.held"):
        trace(model, (), vectors(4, 6))
    assert STATES[what][1](model.inner.held) == STATES[what][1](STATES[what][0]())


def test_a_hook_that_draws_is_never_burned_in() -> None:
    def build() -> nn.Module:
        model, generator = Holds(nn.Sequential(nn.Linear(8, 8), nn.Tanh())), numpy.random.default_rng(0)
        model.inner.register_forward_hook(lambda module, inputs, output: output * generator.random())
        return model

    assert check(build, sizes=TWO).fell_back


@pytest.mark.parametrize("what", [one for one in STATES if one not in ("a user's dict", "a list of a class")])
def test_what_keeps_state_of_any_kind_runs_once(what: str) -> None:
    class Directly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = STATES[what][0]()

    Directly.forward = _DIRECTLY.get(what, _next)  # type: ignore[assignment]
    assert must_run_once(Directly())
    assert not must_run_once(nn.Linear(2, 2))


def _next(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * next(self.held)


def _in_list(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * next(self.held[0])


def _random(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * self.held.random()


def _called(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * self.held()


def _item(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.held[0] += 1
    return x * self.held[0]


def _grown(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.held.add(len(self.held)) if isinstance(self.held, set) else self.held.append(1)
    return x * len(self.held)


_DIRECTLY: dict[str, Any] = {
    "NumPy's generator": _random,
    "NumPy's old generator": _random,
    "Python's generator": _random,
    "a method of a generator": _called,
    "a partial with a generator": _called,
    "a partial with a dict": _called,
    "an iterator in a list": _in_list,
    **dict.fromkeys(
        ["bytes", "an array", "NumPy's array", "a long list", "a deep list", "a default", "a counter"], _item
    ),
    "a deque": _grown,
    "a set": _grown,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    gain: float = 2.0
    nothing: None = None


class Empty:
    __slots__ = ()


class OnlyReads(Layers):
    """Holds objects of all kinds, and changes none."""

    def __init__(self) -> None:
        super().__init__()
        self.settings, self.empty, self.table = Settings(), Empty(), numpy.arange(4.0)
        self.batches = itertools.count()  # of the training loop
        self.names = {str(index): index for index in range(1000)}

    def next_batch(self) -> int:
        return next(self.batches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x) * self.settings.gain * float(self.table[2])
        return self.layers[1](x) * (1 if self.empty is None else self.names["3"])


def test_objects_that_no_forward_changes_are_no_obstacle() -> None:
    assert not check(OnlyReads, sizes=TWO).fell_back


@pytest.mark.parametrize("change", [lambda m: m.table.fill(3.0), lambda m: m.counter.__next__()])
def test_what_a_user_changes_in_objects_is_found(change: Callable[[Any], Any]) -> None:
    class Model(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.counter = numpy.ones(4), SlotCounter()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](self.layers[0](x) * float(self.table[2]) * (self.counter.number + 1))

    model = Model().double()
    guards = trace(model, (), vectors(4, 6)).guards
    assert isinstance(guards, Guards) and guards.check((), vectors(3, 6)) is None
    change(model)
    assert "holds something else now" in str(guards.check((), vectors(3, 6)))


class Codebook(nn.Module):
    """Replaces its parameter by a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.codes = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.codes = nn.Parameter(self.codes.detach() * 0.9 + 0.1 * x.detach().mean((0, 1)))
        return self.linear(x) * self.codes.detach()


class SetsAnothers(Layers):
    """Replaces a parameter of a module of its."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[1](self.layers[0](x))
        self.layers[0].bias = nn.Parameter(self.layers[0].bias.detach() + 1)
        return x


@pytest.mark.parametrize("build", [lambda: Holds(Codebook()), Codebook, SetsAnothers])
def test_a_parameter_that_a_forward_replaces_is_the_next_calls(build: Callable[[], nn.Module]) -> None:
    models = [build().double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x = vectors(4, 6)["x"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = roundpipe.RoundPipeRunConfig(num_microbatch=2)
        pipe = roundpipe.compile(models[0], example_args=(x,), devices="cpu", name="codes", model_run_config=config)
        with pipe:
            for _ in range(2):
                loss = pipe.forward_backward((x,), loss_fn=lambda out, _: out.pow(2).sum())
                pipe.synchronize()
                expected = sum(models[1](part).pow(2).sum() for part in x.tensor_split(2))
                torch.testing.assert_close(loss, expected.detach())
    for found, wanted in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(found, wanted)


class LeavesAux(nn.Module):
    """Leaves a loss of its own in an attribute."""

    def __init__(self, detaches: bool) -> None:
        super().__init__()
        self.linear, self.detaches, self.aux = nn.Linear(8, 8), detaches, torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        self.aux = x.detach().pow(2).sum() if self.detaches else x.pow(2).sum()
        return x


def test_an_activation_in_an_attribute_reaches_the_loss() -> None:
    models = [Holds(LeavesAux(False)).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x = vectors(4, 6)["x"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = roundpipe.RoundPipeRunConfig(num_microbatch=2)
        pipe = roundpipe.compile(models[0], example_args=(x,), devices="cpu", name="aux", model_run_config=config)
        with pipe:
            loss = pipe.forward_backward((x,), loss_fn=lambda out, _: out.sum() + models[0].inner.aux)
            pipe.synchronize()
            expected = sum(models[1](part).sum() + models[1].inner.aux for part in x.tensor_split(2))
            expected.backward()
            torch.testing.assert_close(loss, expected.detach())
            assert_same_gradients(models[0], models[1], 1e-12)


def test_what_is_kept_without_gradients_is_no_obstacle() -> None:
    assert not check(lambda: Holds(LeavesAux(True)), sizes=TWO).fell_back
