"""What a forward changes where no attribute shows it, and what it leaves for others: found, or the model falls back."""

from __future__ import annotations

import array
import collections
import dataclasses
import functools
import itertools
import random
import types
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
from tests.fx.test_shapes import Layers
from tests.fx.test_traps import Holds

TWO = [(4, 6), (3, 6)]


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


# ---------------------------------------------------------------------------------- parameters that are replaced


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


# ---------------------------------------------------------------------------------- what is left for a loss function


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


class Fills(Layers):
    """Does something with an argument beside computing."""

    def __init__(self, fill: Callable[[Any, torch.Tensor], Any], in_leaf: bool = False) -> None:
        super().__init__()
        self.fill = fill
        self.inner = Filler(fill) if in_leaf else None

    def forward(self, x: torch.Tensor, given: Any) -> Any:
        x = self.layers[0](x)
        x = self.fill(given, x) if self.inner is None else self.inner(x, given)
        return self.layers[1](x)


class Filler(nn.Module):
    def __init__(self, fill: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.fill = nn.Linear(8, 8), fill

    def forward(self, x: torch.Tensor, given: Any) -> torch.Tensor:
        x = self.linear(x)
        self.fill(given, x)
        return x


def _append(given: Any, x: torch.Tensor) -> torch.Tensor:
    given.append(x.pow(2).sum())
    return x


def _set_key(given: Any, x: torch.Tensor) -> torch.Tensor:
    given["aux"] = x.pow(2).sum()
    return x


def _set_attribute(given: Any, x: torch.Tensor) -> torch.Tensor:
    given.aux = x.pow(2).sum()
    return x


def _set_number(given: Any, x: torch.Tensor) -> torch.Tensor:
    given[0] = 5
    return x


@pytest.mark.parametrize("in_leaf", [True, False])
@pytest.mark.parametrize(
    ("given", "fill"),
    [([], _append), ({}, _set_key), (collections.deque(), _append), ([1], _set_number), ({"a": [[]]}, None)],
)
def test_an_argument_that_a_forward_fills_is_refused(given: Any, fill: Any, in_leaf: bool) -> None:
    fill = fill or (lambda held, x: _append(held["a"][0], x))
    with pytest.raises(TraceError, match="puts something into its argument given"):
        trace(Fills(fill, in_leaf).double(), (), {**vectors(4, 6), "given": given})
    assert given in ([], {}, collections.deque(), [1], {"a": [[]]})


@pytest.mark.parametrize("has_example", [True, False])
@pytest.mark.parametrize(("make", "fill"), [(list, _append), (dict, _set_key), (types.SimpleNamespace, _set_attribute)])
def test_an_argument_that_a_forward_fills_is_filled(make: Any, fill: Any, has_example: bool) -> None:
    models = [Fills(fill, in_leaf=True).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x = vectors(4, 6)["x"]
    example = (x, make()) if has_example else ()
    config = roundpipe.RoundPipeRunConfig(num_microbatch=1)
    with pytest.warns(UserWarning, match="puts something into its argument given|which it may change"):
        with roundpipe.compile(
            models[0], example_args=example, devices="cpu", name="fills", model_run_config=config
        ) as pipe:
            for model in (pipe, models[1]):
                given = make()
                out = model(x, given)
                (aux,) = given if make is list else (given if make is dict else vars(given)).values()
                (out.sum() + aux).backward()
            pipe.synchronize()
            assert_same_gradients(models[0], models[1], 1e-12)


def test_what_several_microbatches_put_into_an_argument_is_said_to_be_lost() -> None:
    model = Fills(_append).double()
    with pytest.warns(UserWarning, match="each microbatch has a copy"):
        config = roundpipe.RoundPipeRunConfig(num_microbatch=2)
        with roundpipe.compile(model, devices="cpu", name="fills", model_run_config=config) as pipe:
            pipe(vectors(4, 6)["x"], [])


def test_what_is_only_taken_out_or_returned_is_no_obstacle() -> None:
    """A cache that is returned is looked at there; labels that are popped are nobody's any more."""

    class Model(Layers):
        def forward(self, x: torch.Tensor, batch: dict[str, Any], cache: Any) -> Any:
            cache.last = self.layers[0](x)
            return self.layers[1](cache.last) * batch.pop("gain"), cache

    batch = {"gain": torch.ones(()).double()}
    given = {**vectors(4, 6), "batch": batch, "cache": types.SimpleNamespace(last=torch.zeros(2).double())}
    trace(Model().double(), (), given)
    assert list(batch) == ["gain"]


# ---------------------------------------------------------------------------------- weights of other modules


class Adapted(nn.Module):
    """A hook of one of its modules adds what another gives, or multiplies by a parameter."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.adapter = nn.Linear(8, 8), nn.Linear(8, 8)
        self.gain = nn.Parameter(torch.full((8,), 1.5))
        self.register_buffer("shift", torch.ones(8))
        hooks: dict[str, Any] = {
            "a module": lambda module, inputs, output: output + self.adapter(inputs[0]),
            "a parameter": lambda module, inputs, output: output * self.gain,
            "a buffer": lambda module, inputs, output: output + self.shift,
        }
        self.linear.register_forward_hook(hooks[how])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Borrows(nn.Module):
    """Computes with a weight of a module that is not among its children."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.linear, self.others = nn.Linear(8, 8), [other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) @ self.others[0].weight


class NamesX(nn.Sequential):
    """Takes its input by name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class LooksAtOthers(Borrows):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.to(self.others[0].weight.dtype)) * self.others[0].weight.shape[0]


@pytest.mark.parametrize("how", ["a module", "a parameter", "a buffer"])
def test_weights_that_a_hook_uses_are_in_a_layer(how: str) -> None:
    assert not check(lambda: NamesX(Adapted(how), nn.Linear(8, 8), Adapted(how)), sizes=TWO).fell_back


class Between(Layers):
    def __init__(self, kind: type[Borrows]) -> None:
        super().__init__()
        self.inner = kind(self.layers[0])
        self.unused = nn.Linear(100, 100)  # a small part of a model is one leaf

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.inner(self.layers[0](x)))


def test_weights_of_other_modules_are_in_a_layer() -> None:
    assert not check(lambda: Between(Borrows), sizes=TWO).fell_back
    traced = trace(Between(Borrows).double(), (), vectors(4, 6))
    assert "layers.0.weight" in [node.target for node in traced.graph.nodes if node.op == "get_attr"]


def test_what_is_asked_of_the_form_of_others_weights_is_no_obstacle() -> None:
    traced = trace(Between(LooksAtOthers).double(), (), vectors(4, 6))
    assert "inner" in [node.target for node in traced.graph.nodes if node.op == "call_module"]


class HandsOut(nn.Module):
    """Blocks whose features a hook hands to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("place", ["dict", "list", "attribute"])
def test_a_feature_that_a_hook_hands_to_the_loss_has_its_gradient(place: str, number: int, is_late: bool) -> None:
    features: Any = {"dict": {}, "list": [None], "attribute": types.SimpleNamespace()}[place]

    def keep(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if place == "attribute":
            features.kept = output
        else:
            features["kept" if place == "dict" else 0] = output

    def loss_fn(output: torch.Tensor, label: Any) -> torch.Tensor:
        kept = features.kept if place == "attribute" else features["kept" if place == "dict" else 0]
        return output.square().sum() + kept.square().sum()

    model = HandsOut().double()
    reference = HandsOut().double()
    reference.load_state_dict(model.state_dict())
    reference.layers[1][0].register_forward_hook(keep)
    x = torch.randn(4, 8, dtype=torch.float64)
    for piece in x.tensor_split(number):
        loss_fn(reference(piece), None).backward()
    options = roundpipe.RoundPipeRunConfig(num_microbatch=number)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if not is_late:
            model.layers[1][0].register_forward_hook(keep)
        with roundpipe.compile(model, example_args=(x,), devices=["cpu"] * 2, model_run_config=options) as pipe:
            if is_late:
                model.layers[1][0].register_forward_hook(keep)
            pipe.forward_backward((x,), loss_fn=loss_fn)
            pipe.synchronize()
    assert any("a forward hook keeps an activation" in str(one.message) for one in caught)
    assert_same_gradients(model, reference, 1e-9)


def test_a_hook_that_only_looks_does_not_stand_in_the_way() -> None:
    seen: list[torch.Tensor] = []
    model = HandsOut()
    model.layers[1][0].register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with roundpipe.compile(model, example_args=(torch.randn(4, 8),), devices=["cpu"]) as pipe:
            model.layers[2][0].register_forward_hook(lambda module, args, output: seen.append(output.detach()))
            pipe.forward_backward((torch.randn(4, 8),), loss_fn=lambda output, _: output.sum())
    assert isinstance(pipe, roundpipe.RoundPipe) and not isinstance(pipe, roundpipe.AutoRoundPipe)
    assert seen and not any(tensor.requires_grad for tensor in seen)


class GrowsWithData(nn.Module):
    """As rotary embeddings with dynamic scaling: what it keeps depends on the longest positions so far."""

    def __init__(self) -> None:
        super().__init__()
        self.longest: Any = 8
        self.register_buffer("frequency", torch.ones((), dtype=torch.float64), persistent=False)

    @torch.no_grad()
    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        length = positions.max() + 1
        if length > self.longest:
            self.register_buffer("frequency", 1.0 / length.double(), persistent=False)
            self.longest = length
        return positions * self.frequency


class Scaled(HandsOut):
    def __init__(self) -> None:
        super().__init__()
        self.scaling = GrowsWithData()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scaling(torch.arange(x.shape[1]))[:, None])


def test_state_that_data_decide_about_is_not_forgotten_when_a_module_is_kept_whole() -> None:
    model = Scaled().double()
    reference = Scaled().double()
    reference.load_state_dict(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with roundpipe.compile(model, devices=["cpu"] * 2) as pipe:
            for length in (6, 20, 14, 26, 10):
                x = torch.randn(4, length, 8, dtype=torch.float64)
                found = pipe.forward_backward((x,), loss_fn=lambda output, _: output.square().sum())
                expected = reference(x).square().sum()
                expected.backward()
                pipe.synchronize()
                torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=0)
                assert_same_gradients(model, reference, 1e-9)
                assert model.scaling.frequency == reference.scaling.frequency
                assert model.scaling.longest == reference.scaling.longest


class Recurrent(nn.Module):
    """Has a state for one token at a time, which its holder resets when whole sequences come."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x[:, 0]) if self.state is None else self.state
        outputs = []
        for one in x.unbind(1):
            state = torch.tanh(self.linear(one) + state)
            outputs.append(state)
        self.state = state
        return torch.stack(outputs, 1)


class HoldsRecurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Recurrent()
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inner.state = None
        return x + self.out(self.inner(x))


class RecurrentBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(HoldsRecurrent() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_state_that_each_forward_resets_does_not_stand_in_the_way() -> None:
    assert not check(RecurrentBlocks, sizes=TWO).fell_back


class Switched(nn.Module):
    """Another factor in each mode, and another attribute another one."""

    gain = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain if self.training else x * 2 * self.gain


class Teacher(nn.Module):
    """Takes its momentum's share of another module's weight at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.mul_(0.5)
        return x * 2


class Hides(nn.Module):
    """Has a module where no submodule is found."""

    def __init__(self, hidden: nn.Module, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        if how == "list":
            self.held: Any = [hidden]
        elif how == "dict in an object":
            self.held = types.SimpleNamespace(modules={"one": hidden})
        else:
            self.held = lambda: hidden

    @property
    def hidden(self) -> nn.Module:
        held = self.held
        if isinstance(held, list):
            return held[0]
        return held.modules["one"] if isinstance(held, types.SimpleNamespace) else held()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hidden(self.linear(x))


HOW = ["list", "dict in an object", "closure"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("inside", [False, True])
def test_what_a_hidden_module_reads_is_looked_at_before_every_call(how: str, inside: bool) -> None:
    switched = Switched()
    hides = Hides(nn.Sequential(nn.Tanh(), switched) if inside else switched, how)
    model = Holds(hides).double()
    x = vectors(4, 6)["x"]
    with roundpipe.compile(model, example_kwargs={"x": x}, devices="cpu", name="hides") as pipe:

        def compare() -> None:
            torch.testing.assert_close(pipe(x).detach(), model(x).detach())

        compare()
        compare()
        assert pipe.trace_count == 1
        switched.eval()
        compare()
        switched.gain = 5.0
        compare()
        switched.register_forward_hook(lambda module, inputs, output: output * 3)
        compare()
        assert pipe.trace_count == 4
        compare()
        assert pipe.trace_count == 4


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("make", [lambda: nn.Sequential(nn.BatchNorm1d(6)), lambda: nn.BatchNorm1d(6), Teacher])
def test_a_trace_leaves_hidden_modules_as_they_were(how: str, make: Callable[[], nn.Module]) -> None:
    model = Holds(Hides(make().double(), how)).double()
    hidden = model.inner.hidden
    before = {name: tensor.clone() for name, tensor in hidden.state_dict().items()}
    with pytest.raises(TraceError):
        trace(model, (), vectors(4, 6))
    for name, tensor in hidden.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("make_pipe", [roundpipe.compile, roundpipe.wrap_model_to_roundpipe])
@pytest.mark.filterwarnings("ignore")
def test_hidden_running_statistics_count_each_call_once(how: str, make_pipe: Callable[..., Any]) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Holds(Hides(nn.BatchNorm1d(6).double(), how)).double())
    expected, model = models
    x, config = vectors(4, 6)["x"], roundpipe.RoundPipeRunConfig(num_microbatch=1)
    with make_pipe(model, devices=["cpu", "cpu"], model_run_config=config) as pipe:
        for _ in range(2):
            pipe.forward_backward(input_kwargs={"x": x}, loss_fn=lambda y, _: y.square().sum())
            expected(x).square().sum().backward()
            pipe.synchronize()
    assert_same_gradients(model, expected, 1e-9)
    for name, tensor in expected.inner.hidden.state_dict().items():
        torch.testing.assert_close(model.inner.hidden.state_dict()[name], tensor)


class CountsOutside(nn.Module):
    """Has a module that only its training loop uses, which holds another number after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.metrics = nn.Linear(8, 8), [Switched()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def count(self) -> None:
        self.metrics[0].gain += 1


def test_hidden_modules_that_no_forward_reads_may_change() -> None:
    model = Holds(CountsOutside()).double()
    x = vectors(4, 6)["x"]
    with roundpipe.compile(model, example_kwargs={"x": x}, devices="cpu", name="metrics") as pipe:
        model.inner.compiled = [pipe]
        for _ in range(3):
            torch.testing.assert_close(pipe(x).detach(), model(x).detach())
            model.inner.count()
        assert pipe.trace_count == 1
