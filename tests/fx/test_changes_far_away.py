"""Settings that a forward or a loss finds outside of the model, changed between two calls: eager's numbers follow."""

from __future__ import annotations

import copy
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe
from roundpipe.core.errors import TraceError
from roundpipe.fx.guards.guards import Guards
from roundpipe.fx.trace.tracer import trace
from tests.equality import assert_same_gradients
from tests.fx import cases_far_state
from tests.fx.against_eager import vectors
from tests.fx.cases_far_state import (
    AttributeDict,
    Below,
    DotDict,
    FromGlobal,
    Kind,
    Numbered,
    OfKind,
    Once,
    Pairs,
    Passing,
    Settings,
    Slotted,
)
from tests.fx.test_shapes import Layers

OF_SETTINGS, OF_BELOW, SLOTTED, PAIRS, CALLED = Settings(), Below(), Slotted(), Pairs(1, 2), FromGlobal()
ATTRIBUTES, DOTS, PASSING = AttributeDict(scale=1.0), DotDict(scale=1.0), Passing(scale=1.0)
REBOUND: Any = types.SimpleNamespace(scale=1.0)
LIST, TABLE, OTHERS = [1.0], {"scale": 1.0}, {"scale": 1.0}
READS, CHANGES = 0, 1


def by_default(table: Any = TABLE) -> Any:
    return table["scale"]


def by_keyword(*, items: Any = LIST) -> Any:
    return items[0]


def by_number(scale: float = 1.0) -> float:
    return scale


def by_attribute() -> Any:
    return by_attribute.scale  # type: ignore[attr-defined]


by_attribute.scale = 1.0  # type: ignore[attr-defined]


def _rebind() -> None:
    global REBOUND
    REBOUND = types.SimpleNamespace(scale=3.0)


PLACES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "a class": (lambda: Settings.scale, lambda: setattr(Settings, "scale", 3.0)),
    "a dict of a class": (lambda: Settings.table["scale"], lambda: Settings.table.update(scale=3.0)),
    "another dict of a class": (lambda: Settings.table["scale"], lambda: setattr(Settings, "table", {"scale": 3.0})),
    "a branch": (lambda: 3.0 if Settings.is_on else 1.0, lambda: setattr(Settings, "is_on", True)),
    "a class method": (Settings.of_class, lambda: setattr(Settings, "scale", 3.0)),
    "a static method": (lambda: Settings.fixed(), lambda: setattr(Settings, "fixed", staticmethod(lambda: 3.0))),
    "an object's class": (lambda: OF_SETTINGS.scale, lambda: setattr(Settings, "scale", 3.0)),
    "a class below": (lambda: OF_BELOW.scale, lambda: setattr(Below, "scale", 3.0)),
    "a property": (lambda: OF_BELOW.first, lambda: Settings.table.update(scale=3.0)),
    "slots": (lambda: SLOTTED.scale, lambda: setattr(Slotted, "scale", 3.0)),
    "a named tuple": (lambda: PAIRS.scale, lambda: setattr(Pairs, "scale", 3.0)),
    "the only one": (lambda: Once.get().scale, lambda: setattr(Once, "scale", 3.0)),
    "a metaclass": (lambda: OfKind.scale, lambda: setattr(Kind, "level", 3.0)),
    "a global of a method": (CALLED, lambda: setattr(cases_far_state, "SCALE", 3.0)),
    "an imported file": (lambda: cases_far_state.SCALE, lambda: setattr(cases_far_state, "SCALE", 3.0)),
    "another object in a global": (lambda: REBOUND.scale, _rebind),
    "a default": (by_default, lambda: TABLE.update(scale=3.0)),
    "a keyword's default": (by_keyword, lambda: LIST.__setitem__(0, 3.0)),
    "other defaults": (by_number, lambda: setattr(by_number, "__defaults__", (3.0,))),
    "a function": (by_attribute, lambda: setattr(by_attribute, "scale", 3.0)),
    "a dict with attributes": (lambda: ATTRIBUTES.scale, lambda: setattr(ATTRIBUTES, "scale", 3.0)),
    "a dict with any attribute": (lambda: DOTS.scale, lambda: setattr(DOTS, "scale", 3.0)),
    "an object that asks a dict": (lambda: PASSING.scale, lambda: PASSING.items.update(scale=3.0)),
    "the environment": (lambda: float(os.environ["SCALE"]), lambda: os.environ.update(SCALE="3")),
    "the environment, by a function": (lambda: float(os.getenv("SCALE", "1")), lambda: os.environ.update(SCALE="3")),
}


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts back what the changes leave."""
    for owner in (Settings, Slotted, Pairs, Once):
        monkeypatch.setattr(owner, "scale", 1.0)
    monkeypatch.setattr(Settings, "table", {"scale": 1.0})
    monkeypatch.setattr(Settings, "is_on", False)
    monkeypatch.setattr(Settings, "fixed", staticmethod(Settings.fixed))
    monkeypatch.setattr(Kind, "level", 1.0)
    monkeypatch.setattr(Once, "instance", Once())
    monkeypatch.setattr(cases_far_state, "SCALE", 1.0)
    monkeypatch.setitem(globals(), "REBOUND", types.SimpleNamespace(scale=1.0))
    monkeypatch.setattr(by_number, "__defaults__", (1.0,))
    monkeypatch.setattr(by_attribute, "scale", 1.0)
    monkeypatch.setenv("SCALE", "1")
    yield
    if "scale" in vars(Below):
        del Below.scale  # type: ignore[misc]
    for table in (TABLE, OTHERS, ATTRIBUTES, DOTS, PASSING.items):
        table["scale"] = 1.0
    LIST[0] = 1.0


class Scaled(Layers):
    def __init__(self, scale: Callable[[], Any]) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x) * self.scale())


def mean_square(outputs: torch.Tensor, label: Any) -> torch.Tensor:
    return F.mse_loss(outputs, label)


def assert_followed(model: nn.Module, loss_fn: Callable[[Any, Any], Any], change: Callable[[], Any]) -> None:
    """Losses and gradients are eager's before and after a change, which matters, and nothing is traced needlessly."""
    model = model.double()
    shared = {id(settings): settings for settings in (ATTRIBUTES, DOTS, PASSING)}
    eager, inputs, found = copy.deepcopy(model, shared), vectors(4, 6), []
    label = torch.randn_like(inputs["x"])
    with roundpipe.compile(model, devices=["cpu"]) as pipe:
        for index in range(4):
            if index == 2:
                change()
            loss = pipe.forward_backward(input_kwargs=inputs, label=label, loss_fn=loss_fn, loss_reduction="mean")
            expected = loss_fn(eager(**inputs), label)
            expected.backward()
            pipe.synchronize()
            torch.testing.assert_close(loss, expected.detach())
            assert_same_gradients(model, eager, 1e-10)
            found.append(float(expected.detach()))
        assert found[0] == found[1] != found[2] == found[3]
        assert pipe.trace_count <= 2


@pytest.mark.parametrize("place", PLACES)
def test_a_forward_follows(place: str) -> None:
    assert_followed(Scaled(PLACES[place][READS]), mean_square, PLACES[place][CHANGES])


@pytest.mark.parametrize("place", PLACES)
def test_a_loss_follows(place: str) -> None:
    scale = PLACES[place][READS]
    model = Scaled(lambda: 1.0)
    assert_followed(model, lambda out, label: mean_square(out, label) * scale(), PLACES[place][CHANGES])


class HoldsClass(Layers):
    """Has settings of all kinds as attributes and as defaults."""

    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.settings = settings

    def extra(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor, table: Any = OTHERS) -> torch.Tensor:
        return self.layers[1](self.extra(self.layers[0](x)) * self.settings.scale * table["scale"])


def _patch_method() -> None:
    HoldsClass.extra = lambda self, x: x * 3  # type: ignore[method-assign]


CHANGES_OF_ATTRIBUTES: dict[str, tuple[Any, Callable[[], Any]]] = {
    "a class": (Settings, lambda: setattr(Settings, "scale", 3.0)),
    "an object's class": (OF_SETTINGS, lambda: setattr(Settings, "scale", 3.0)),
    "a dict with attributes": (ATTRIBUTES, lambda: setattr(ATTRIBUTES, "scale", 3.0)),
    "a dict with any attribute": (DOTS, lambda: setattr(DOTS, "scale", 3.0)),
    "an object that asks a dict": (PASSING, lambda: PASSING.items.update(scale=3.0)),
    "a default of forward": (Settings, lambda: OTHERS.update(scale=3.0)),
    "a method of the model": (Settings, _patch_method),
}


@pytest.mark.parametrize("what", CHANGES_OF_ATTRIBUTES)
def test_what_a_model_holds_is_followed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HoldsClass, "extra", HoldsClass.extra)
    settings, change = CHANGES_OF_ATTRIBUTES[what]
    assert_followed(HoldsClass(settings), mean_square, change)


class AsksClass(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x) * Settings.scale


def test_other_attributes_of_a_class_do_not_count() -> None:
    guards = trace(AsksClass().double(), (), vectors(4, 6)).guards
    assert isinstance(guards, Guards)
    Settings.is_on = True
    Settings.table["scale"] = 3.0
    assert guards.check((), vectors(3, 6)) is None
    Settings.scale = 3.0
    assert "Settings.scale is 3.0, traced with 1.0" in str(guards.check((), vectors(3, 6)))


class TakesNumbers(Layers):
    """Takes a number of an iterator that a class has: in its forward, or elsewhere."""

    def __init__(self, in_forward: bool) -> None:
        super().__init__()
        self.number = self.next_number if in_forward else lambda: 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x) * self.number()

    @staticmethod
    def next_number() -> float:
        return float(next(Numbered.numbers))

    def summary(self) -> str:
        return f"model {next(Numbered.numbers)}"


def test_an_iterator_of_a_class_matters_where_a_forward_may_take_of_it() -> None:
    trace(TakesNumbers(in_forward=False).double(), (), vectors(4, 6))
    with pytest.raises(
        TraceError, match=r"Numbered\.numbers, of type count, and nothing tells how a call changes that"
    ):
        trace(TakesNumbers(in_forward=True).double(), (), vectors(4, 6))


class CountsInClass(Layers):
    """Counts its calls in an attribute of another class, and decides by that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Numbered.calls += 1
        return self.layers[0](x) * Numbered.calls


def test_what_a_forward_counts_in_a_class_is_no_part_of_a_graph() -> None:
    before = Numbered.calls
    with pytest.raises(TraceError, match=r"Numbered\.calls"):
        trace(CountsInClass().double(), (), vectors(4, 6))
    assert Numbered.calls == before


@pytest.mark.parametrize("kind", [AttributeDict, DotDict, Passing])
def test_what_has_any_attribute_may_be_held_unread(kind: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    model.settings = kind(scale=1.0)
    x, label = torch.randn(4, 8, dtype=torch.float64), torch.arange(4)
    expected = F.cross_entropy(model(x), label)
    assert "Linear" in str(roundpipe.explain(model, (x,)))
    with roundpipe.compile(model, devices=["cpu"]) as pipe:
        loss = pipe.forward_backward((x,), label=label, loss_fn=F.cross_entropy, loss_reduction="mean")
    torch.testing.assert_close(loss, expected.detach())


def test_a_setting_that_becomes_none_is_another() -> None:
    guards = trace(AsksClass().double(), (), vectors(4, 6)).guards
    assert isinstance(guards, Guards) and guards.check((), vectors(3, 6)) is None
    setattr(Settings, "scale", None)  # noqa: B010
    assert "Settings.scale is None, traced with 1.0" in str(guards.check((), vectors(3, 6)))


def test_a_variable_of_a_closure_that_is_gone_is_another() -> None:
    cell = types.CellType(1.0)
    scaled = types.FunctionType((lambda: cell).__code__, globals(), "scaled", None, (cell,))
    guards = trace(Scaled(scaled).double(), (), vectors(4, 6)).guards
    assert isinstance(guards, Guards) and guards.check((), vectors(3, 6)) is None
    del cell.cell_contents
    assert "is None, traced with 1.0" in str(guards.check((), vectors(3, 6)))
