"""Parts that keep state, and what goes back to the host: errors, configs, first calls, hooks."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from roundpipe import (
    AutoRoundPipe,
    ConfigError,
    RoundPipeRunConfig,
    doing_recompute,
)
from roundpipe.effects.run_once import FirstCall, first_to_run_once
from roundpipe.wrappers.auto import Parts, PartsProgram
from roundpipe.wrappers.part import IN_ONE_PIECE, overlaid
from tests.equality import assert_same_gradients, assert_same_state
from tests.wrappers.cases_parts import WIDTH, Caller, auto


def test_errors_of_a_part_keep_their_type_and_the_next_call_works() -> None:
    model = Caller()
    with auto(model) as pipe:
        with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
            pipe(torch.randn(4, WIDTH + 1))
        assert any("linear" in note for note in caught.value.__notes__)
        assert pipe(torch.randn(4, WIDTH)).shape == (4, WIDTH)


class TakesApart(nn.Module):
    """Calls a stack as a whole, and its children one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stack(self.stack[0](x))
        for module in self.stack:
            x = module(x)
        return self.stack[-2:](x) * len(self.stack)


def test_children_of_a_sequential_part_can_be_taken() -> None:
    model = TakesApart()
    eager = copy.deepcopy(model)
    x = torch.randn(4, WIDTH)
    eager(x).square().mean().backward()
    with auto(model) as pipe:
        pipe.forward_backward((x,), loss_fn=lambda outputs, _: outputs.square().mean(), run_config=IN_ONE_PIECE)
        pipe.synchronize()
        assert_same_gradients(model, eager, 1e-6)


def test_code_around_a_part_finds_an_object_of_its_class() -> None:
    class Asks(Caller):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found.append((type(self.linear), isinstance(self.linear, nn.Linear), self.linear.weight is weight))
            return super().forward(x)

    found: list[Any] = []
    model = Asks()
    weight = model.linear.weight
    with auto(model) as pipe:
        pipe(torch.randn(4, WIDTH))
        assert pipe._runner.tree.parts[0].why_on_host is None  # no public name tells
    assert found == [(nn.Linear, True, True)]


def test_a_part_whose_class_changes_what_a_call_is() -> None:
    class Doubled(nn.Linear):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs) * 2

    model = Caller()
    model.linear = Doubled(WIDTH, WIDTH)
    reference, x = copy.deepcopy(model), torch.randn(4, WIDTH)
    with auto(model) as pipe:
        torch.testing.assert_close(pipe(x), reference(x))


def test_the_first_config_that_gives_a_field_wins() -> None:
    both = overlaid(IN_ONE_PIECE, RoundPipeRunConfig(num_microbatch=4, recompute_grain="layer"))
    assert both == RoundPipeRunConfig(num_microbatch=1, recompute_grain="layer")


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


class Equalized:
    """Makes the weight from a parameter before each call."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        module.weight = module.weight_orig * 0.5  # type: ignore[assignment]

    @staticmethod
    def apply(module: nn.Linear) -> nn.Linear:
        weight = module.weight
        del module._parameters["weight"]
        module.register_parameter("weight_orig", nn.Parameter(weight.data))
        module.weight = weight.data  # type: ignore[assignment]
        module.register_forward_pre_hook(Equalized())
        return module


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("kind", ["spectral_norm", "weight_norm", "pruned", "equalized"])
@pytest.mark.parametrize("holder", ["alone", "Sequential"])
def test_weights_that_hooks_make(kind: str, holder: str) -> None:
    make = {
        "spectral_norm": nn.utils.spectral_norm,
        "weight_norm": nn.utils.weight_norm,
        "pruned": lambda module: prune.l1_unstructured(module, "weight", 0.3),
        "equalized": Equalized.apply,
    }[kind]

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            normed = make(nn.Linear(WIDTH, WIDTH))
            self.first = normed if holder == "alone" else nn.Sequential(normed, nn.Tanh())
            self.last = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.tanh(self.first(x)))

    torch.manual_seed(0)
    model = Normed().double()
    torch.manual_seed(0)
    reference = Normed().double()
    parts = dict.fromkeys(model.children(), IN_ONE_PIECE)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    options: dict[str, Any] = {"devices": ["cpu"] * 2, "model_run_config": IN_ONE_PIECE}
    with AutoRoundPipe(PartsProgram(model, Parts(parts, splits_inside=False)), **options) as pipe:
        own = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
        for step in range(3):
            x = torch.randn(4, WIDTH, dtype=torch.float64)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = pipe.forward_backward((x,), loss_fn=lambda outputs, _: outputs.square().sum())
            expected = reference(x).square().sum()
            expected.backward()
            pipe.synchronize()
            torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=0, msg=f"step {step}")
            assert_same_gradients(model, reference, 1e-9)
            optimizer.step()
            optimizer.zero_grad()
            pipe.step(lambda: (own.step(), own.zero_grad()), is_async=False)
        pipe.synchronize()
        assert_same_state(model, reference, 1e-9)


def test_nested_tensors_are_for_the_host() -> None:
    """Torch's encoder gives them to its layers in eval mode; in training these run on the devices."""

    class Encodes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)

        def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
            return self.encoder(x, src_key_padding_mask=padding)

    model = Encodes()
    reference = copy.deepcopy(model)
    x, padding = torch.randn(4, 5, 8), torch.zeros(4, 5, dtype=torch.bool)
    padding[1:, 3:] = True
    parts = dict.fromkeys(model.encoder.layers, IN_ONE_PIECE)
    with AutoRoundPipe(PartsProgram(model, Parts(parts)), devices=["cpu"]) as pipe, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*nested tensors")
        warnings.filterwarnings("error", message=".*runs on the CPU")
        for is_training in (True, False, True):
            pipe.train(is_training)
            reference.train(is_training)
            with torch.set_grad_enabled(is_training):
                torch.testing.assert_close(pipe(x, padding), reference(x, padding), rtol=1e-5, atol=1e-6)
