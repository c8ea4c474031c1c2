"""State that data decide about, and modules that are no submodules."""

from __future__ import annotations

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
from tests.fx.test_traps import Holds
from tests.repeats import repeats


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


@pytest.mark.parametrize(
    "how, inside",
    repeats([(how, inside) for how in HOW for inside in (False, True)], [f"{how}-{how == 'list'}" for how in HOW]),
)
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
