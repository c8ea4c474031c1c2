"""Parts that keep state, and what goes back to the host for it."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import (
    ConfigError,
    RoundPipeRunConfig,
    doing_recompute,
)
from roundpipe.effects.run_once import FirstCall, first_to_run_once
from tests.equality import assert_same_gradients, assert_same_state
from tests.wrappers.cases_parts import WIDTH, auto


@dataclasses.dataclass
class Tally:
    """An object that modules share."""

    number: int = 0
    loss: Any = 0


class Remembers(nn.Module):
    """A factor that each call of its forward changes; what it keeps is the subclass's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.tally = Tally()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x)
        return out * self.factor(out)

    def factor(self, out: torch.Tensor) -> Any:
        raise NotImplementedError


class Counts(Remembers):
    number = 0

    def factor(self, out: torch.Tensor) -> Any:
        self.number += 1
        return self.number


class ReplacesTuple(Remembers):
    def __init__(self) -> None:
        super().__init__()
        self.seen = (0,)

    def factor(self, out: torch.Tensor) -> Any:
        self.seen = (self.seen[0] + 1, *self.seen)
        return self.seen[0]


class ReplacesList(Remembers):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def factor(self, out: torch.Tensor) -> Any:
        self.seen = [*self.seen, len(out)]
        return len(self.seen)


class ChangesContainers(Remembers):
    def __init__(self) -> None:
        super().__init__()
        self.kinds = (set[int](), collections.deque[int](), collections.Counter[str]())
        self.nested = {"of": [0]}

    def factor(self, out: torch.Tensor) -> Any:
        some, queue, counter = self.kinds
        some.add(len(some))
        queue.append(1)
        counter["calls"] += 1
        self.nested["of"][0] += 1
        return len(some) + len(queue) * counter["calls"] + self.nested["of"][0]


class ChangesObject(Remembers):
    def factor(self, out: torch.Tensor) -> Any:
        self.tally.number += 1
        return self.tally.number


class CountsOnce(Remembers):
    """Names of attributes that are made up are read by no code that can be looked at."""

    def factor(self, out: torch.Tensor) -> Any:
        vars(self)["number"] = vars(self).get("number", 0) + 1
        return vars(self)["number"]


class Draws(Remembers):
    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(3)

    def factor(self, out: torch.Tensor) -> Any:
        return self.random.random()


class Advances(Remembers):
    def __init__(self) -> None:
        super().__init__()
        self.factors = iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])

    def factor(self, out: torch.Tensor) -> Any:
        return next(self.factors)


class AddsToTheLoss(Remembers):
    """An activation reaches the root through an object."""

    def factor(self, out: torch.Tensor) -> Any:
        self.tally.loss = self.tally.loss + out.square().mean()
        return 1


class WritesWeight(nn.Module):
    """By a function that code which only looks at names does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nn.init.constant_(self.linear.bias, 0.25)
        return self.linear(x)


class ReplacesWeight(Remembers):
    def factor(self, out: torch.Tensor) -> Any:
        self.linear._parameters["bias"] = nn.Parameter(self.linear.bias.detach() * 0.5)
        return 1


class Around(nn.Module):
    def __init__(self, odd: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.odd = odd

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tally = getattr(self.odd, "tally", Tally())
        tally.loss = 0
        out = self.odd(self.first(x))
        return out + tally.loss


REMEMBERING = [
    *(Counts, ReplacesTuple, ReplacesList, ChangesContainers, ChangesObject, CountsOnce, Draws, Advances),
    *(AddsToTheLoss, WritesWeight, ReplacesWeight),
]


@pytest.mark.parametrize("make", REMEMBERING)
@pytest.mark.filterwarnings("ignore:forward_backward of an AutoRoundPipe")
def test_what_must_run_once_runs_on_the_host(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = Around(make()).double()
    reference = copy.deepcopy(model)
    with auto(model, model_run_config=RoundPipeRunConfig(num_microbatch=2)) as pipe:
        for step in range(2):
            x = torch.randn(6, WIDTH, dtype=torch.float64)
            with pytest.warns(UserWarning) if step == 0 else contextlib.nullcontext() as caught:
                found = pipe.forward_backward((x,), loss_fn=lambda outputs, _: outputs.square().sum())
            expected = torch.zeros((), dtype=torch.float64)
            for piece in x.tensor_split(2):
                loss = reference(piece).square().sum()
                loss.backward()
                expected += loss.detach()
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            pipe.synchronize()
            if make is not ReplacesWeight:
                assert_same_gradients(model, reference, 1e-10)
            if step == 0:
                assert any("odd runs on the CPU from now on" in str(one.message) for one in caught)
        for name, value in vars(reference.odd).items():
            if isinstance(value, (int, tuple, list, dict)) and not name.startswith("_"):
                assert vars(model.odd)[name] == value, name
        assert_same_state(model, reference, 1e-12)


def test_what_the_first_call_changed_is_put_back() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)
            self.names: list[Any] = []
            self.number = 1

    odd = Odd()
    assert first_to_run_once(odd) is None
    state = copy.deepcopy(odd.state_dict())
    before = FirstCall(odd)
    assert before.diff() is None
    odd.norm(torch.randn(4, WIDTH))
    odd.number, odd.more = 2, 3
    assert before.diff() is None  # buffers and attributes are looked at elsewhere
    odd.names.append("a")
    assert before.diff() == "Odd.names"
    before.restore()
    assert odd.number == 1 and odd.names == [] and "more" not in vars(odd)
    torch.testing.assert_close(dict(odd.state_dict()), dict(state))


def test_what_only_a_recomputation_does_is_an_error() -> None:
    class Odd(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if doing_recompute():
                self.seen = x
            return super().forward(x)

    model = Around(Odd(WIDTH, WIDTH))
    with auto(model) as pipe:
        out = pipe(torch.randn(4, WIDTH))
        with pytest.raises(ConfigError, match=r"an? Odd, run again for the backward.*attribute 'seen'.*skip_modules"):
            out.sum().backward()


def test_a_part_without_state_stays_on_the_devices() -> None:
    """Neither tables of its own, nor what a hook writes down for the user, keep it from there."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.sizes = {"a": 1}

        @functools.cached_property
        def scale(self) -> float:
            return 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.length = len(x)
            return self.linear(x) * self.scale * self.sizes["a"]

    model = Around(Plain())
    noted: list[int] = []
    model.odd.linear.register_forward_hook(lambda module, args, output: noted.append(len(output)))
    with auto(model) as pipe:
        pipe(torch.randn(4, WIDTH)).sum().backward()
        (part,) = (part for part in pipe._runner.tree.parts if part.module is model.odd)  # no public name tells
        assert part.why_on_host is None and noted
        assert model.odd.length == 2


def test_hooks_around_what_goes_back_to_the_host_run_once() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = self.linear(x)
            return self.seen * 2

    model = Around(Odd())
    reference = copy.deepcopy(model)
    calls: list[str] = []
    model.odd.register_forward_pre_hook(lambda module, args: calls.append("before"))
    model.odd.register_forward_hook(lambda module, args, output: calls.append("behind") or output + 1)
    x = torch.randn(4, WIDTH)
    with auto(model) as pipe:
        with pytest.warns(UserWarning, match="odd runs on the CPU"):
            torch.testing.assert_close(pipe(x), reference(x) + 1)
        torch.testing.assert_close(pipe(x), reference(x) + 1)
    assert calls == ["before", "behind"] * 2
    assert isinstance(model.odd.seen, torch.Tensor)
