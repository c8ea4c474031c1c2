"""Arguments that a forward fills, weights of other modules, features handed to a loss."""

from __future__ import annotations

import collections
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.errors import TraceError
from roundpipe.fx.trace.tracer import trace
from tests.equality import assert_same_gradients
from tests.fx.against_eager import check, vectors
from tests.fx.cases_hidden_state import TWO, HandsOut
from tests.fx.test_shapes import Layers


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
