"""What code changes behind a trace's back: a user's between two calls, the model's own where no graph shows it."""

from __future__ import annotations

import collections
import contextlib
import copy
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import is_grad_enabled, nn
from torch import is_grad_enabled as records_gradients
from torch.utils.checkpoint import checkpoint

import roundpipe
from roundpipe.core.errors import ConfigError
from roundpipe.fx.guards.guards import Guards
from roundpipe.fx.passes.codegen import generate
from roundpipe.fx.passes.cost import measure
from roundpipe.fx.passes.partition import partition
from roundpipe.fx.trace.tracer import trace
from tests.equality import assert_same_gradients
from tests.fx.against_eager import check, vectors
from tests.fx.test_shapes import Layers

GAIN = 1.0
TABLE = {"gain": 1.0}


def doubled(module: Any, inputs: Any, output: Any) -> Any:
    return output * 2


def gain_of(module: Any) -> float:
    return float(module.gain)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.gain = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Reads(Layers):
    """Reads all kinds of places in its forward."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.gain = 1.0
        self.config = types.SimpleNamespace(gain=1.0)
        self.settings = collections.namedtuple("Settings", "gain")(1.0)
        self.options: dict[str, Any] = {"gain": 1.0, "table": torch.ones(8).double()}
        self.scales = [1.0, 1.0]
        self.offset = torch.ones(8).double()
        self.inner = Inner()
        self.norm = nn.LayerNorm(8)
        self.pair = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(self.layers[0](x)) * self.config.gain * self.settings.gain * self.options["gain"]
        x = x * self.scales[1] + self.offset * self.options["table"]
        x = x * GAIN * TABLE["gain"] * self.factor * gain_of(self) * getattr(self, "extra", 1.0)
        return self.layers[1](self.pair(F.layer_norm(x * self.inner.gain, (8,), eps=self.norm.eps)))


def _set_gain(model: Any) -> None:
    globals()["GAIN"] = 2.0


CHANGES: dict[str, Callable[[Any], object]] = {
    "an attribute": lambda m: setattr(m, "gain", 2.0),
    "an attribute of another type": lambda m: setattr(m, "gain", 1),
    "an object": lambda m: setattr(m.config, "gain", 2.0),
    "another object": lambda m: setattr(m, "config", types.SimpleNamespace(gain=2.0)),
    "a named tuple": lambda m: setattr(m, "settings", m.settings._replace(gain=2.0)),
    "a dict": lambda m: m.options.update(gain=2.0),
    "a tensor in a dict": lambda m: m.options.update(table=torch.zeros(8).double()),
    "a list": lambda m: m.scales.insert(0, 2.0) or m.scales.reverse(),
    "a tensor": lambda m: setattr(m, "offset", torch.zeros(8).double()),
    "a leaf's attribute that another reads": lambda m: setattr(m.inner, "gain", 2.0),
    "an attribute of torch's own module": lambda m: setattr(m.norm, "eps", 0.5),
    "an attribute that was not there": lambda m: setattr(m, "extra", 2.0),
    "a class attribute": lambda m: setattr(type(m), "factor", 2.0),
    "a global": _set_gain,
    "a global dict": lambda m: TABLE.update(gain=2.0),
    "a hook of the root": lambda m: m.register_forward_hook(doubled),
    "a hook of what was looked into": lambda m: m.pair.register_forward_hook(doubled),
    "a backward hook": lambda m: m.pair.register_full_backward_pre_hook(lambda module, gradients: gradients),
    "a forward of its own": lambda m: setattr(m.pair, "forward", lambda x: x),
}


@pytest.fixture
def kept() -> Iterator[None]:
    """Puts back what the changes leave outside of the model."""
    yield
    globals()["GAIN"], TABLE["gain"], Reads.factor = 1.0, 1.0, 1.0


@pytest.mark.parametrize("what", CHANGES)
def test_what_changes_between_calls_is_found(what: str, kept: None) -> None:
    model = Reads().double()
    guards = trace(model, (), vectors(4, 6)).guards
    assert isinstance(guards, Guards) and guards.check((), vectors(3, 6)) is None
    model(**vectors(3, 6))
    assert guards.check((), vectors(3, 6)) is None
    CHANGES[what](model)
    assert guards.check((), vectors(3, 6)) is not None


class MayScale(nn.Module):
    """Uses a parameter if it is there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_parameter("scale", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if self.scale is None else self.linear(x) * self.scale


def test_parameters_that_come_and_go_are_found() -> None:
    model = nn.Sequential(MayScale(), nn.Linear(8, 8), MayScale()).double()
    x = torch.randn(4, 8, dtype=torch.float64)
    with roundpipe.compile(model, devices=["cpu"]) as pipe, torch.no_grad():
        for scale in (None, nn.Parameter(torch.full((8,), 2.0).double()), None):
            model[0].scale = scale
            torch.testing.assert_close(pipe(x), model(x))
        assert pipe.trace_count == 2  # the first is kept
        model[2].linear.bias = None
        torch.testing.assert_close(pipe(x), model(x))


class LooksAtWeights(Layers):
    """Decides by what is there, and by what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x * 2 if self.layers[0].weight.requires_grad else x)
        x = x if self.mask is None else x * self.mask
        return self.layers[1](x * 3 if self.layers[0].bias is None else x)


def _replace(model: Any) -> None:
    model.layers[0].weight = nn.Parameter(torch.eye(8).double(), requires_grad=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: setattr(m, "mask", torch.full((8,), 2.0).double()), "mask, which was None, is a tensor now"),
        (lambda m: setattr(m.layers[0], "bias", None), "layers.0.bias is None now"),
        (_replace, "layers.0.weight has requires_grad False now, traced with requires_grad True"),
    ],
)
def test_weights_that_appear_go_or_are_replaced(change: Callable[[Any], object], words: str) -> None:
    model = LooksAtWeights().double()
    guards = trace(model, (), vectors(4, 6)).guards
    assert isinstance(guards, Guards)
    eager = copy.deepcopy(model)
    with roundpipe.compile(model, devices=["cpu"]) as pipe:
        for _ in range(2):
            pipe.zero_grad()
            eager.zero_grad()
            inputs = vectors(4, 6)
            loss = pipe.forward_backward(input_kwargs=inputs, loss_fn=lambda out, label: out.pow(2).sum())
            expected = eager(**inputs).pow(2).sum()
            expected.backward()
            pipe.synchronize()
            torch.testing.assert_close(loss, expected.detach())
            assert_same_gradients(model, eager, 1e-10)
            if pipe.trace_count == 1:
                change(model)
                change(eager)
        assert pipe.trace_count == 2
    assert words in str(guards.check((), vectors(4, 6)))


class AsksTorch(Layers):
    """Decides by settings of torch's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x) * (2 if torch.get_default_dtype() == torch.float64 else 1)
        return self.layers[1](x * 3 if torch.are_deterministic_algorithms_enabled() else x)


@pytest.mark.parametrize(
    ("setting", "value"), [(torch.set_default_dtype, torch.float64), (torch.use_deterministic_algorithms, True)]
)
def test_settings_of_torch_that_change(setting: Callable[[Any], object], value: Any) -> None:
    model, inputs = AsksTorch().double(), vectors(4, 6)
    before = {
        torch.set_default_dtype: torch.get_default_dtype(),
        torch.use_deterministic_algorithms: torch.are_deterministic_algorithms_enabled(),
    }
    try:
        with roundpipe.compile(model, devices=["cpu"]) as pipe, torch.no_grad():
            for now in (before[setting], value, before[setting], value):
                setting(now)
                torch.testing.assert_close(pipe(**inputs), model(**inputs))
            assert pipe.trace_count == 2
    finally:
        setting(before[setting])


class TakesOver(nn.Module):
    """Has the dtype and the shape of a weight burned in."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = self.linear(x + torch.sin(torch.arange(8).to(x.dtype) / 3))
        return x / self.linear.weight.shape[0]


def _other_rows(model: TakesOver) -> None:
    torch.manual_seed(1)
    model.linear.weight.data, model.linear.bias.data = torch.randn(12, 8), torch.randn(12)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.double(), "embed.weight has dtype torch.float64 now, traced with dtype torch.float32"),
        (lambda m: m.bfloat16(), "embed.weight has dtype torch.bfloat16 now"),
        (_other_rows, "linear.weight has shape (12, 8) now, traced with shape (8, 8)"),
        (lambda m: setattr(m, "scale", torch.ones(1)), "scale has shape (1,) now, traced with shape (8,)"),
    ],
)
def test_weights_that_get_another_dtype_or_shape(change: Callable[[Any], object], words: str) -> None:
    model, ids = TakesOver(), torch.randint(0, 9, (4, 3))
    guards = trace(model, (), {"ids": ids}).guards
    assert isinstance(guards, Guards) and guards.check((), {"ids": ids}) is None
    with roundpipe.compile(model, devices=["cpu"]) as pipe, torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(pipe(ids), model(ids))
            change(model)
        torch.testing.assert_close(pipe(ids), model(ids))
        assert pipe.trace_count == 2
    assert words in str(guards.check((), {"ids": ids}))


class Grows(nn.Module):
    """Keeps a table that it makes longer where a batch needs that."""

    def __init__(self, registers: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.registers = registers
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("second", None, persistent=False)

    def grow(self, length: int) -> None:
        if self.registers:
            self.register_buffer("table", torch.arange(float(length)), persistent=False)
        else:
            self.table = torch.arange(float(length))
        self.second = self.table.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if int(x.detach()[:, 0].max()) > self.table.shape[0]:
            self.grow(int(x.detach()[:, 0].max()))
        return self.linear(x) + self.table[:1] + 1


@pytest.mark.parametrize("registers", [False, True])
def test_tables_that_a_forward_grows_do_not_trace_again(registers: bool) -> None:
    model = nn.Sequential(Grows(registers), nn.Linear(8, 8), Grows(registers), nn.Linear(8, 8))
    with roundpipe.compile(model, devices=["cpu"]) as pipe, torch.no_grad():
        for length in (2, 6, 9, 12):
            x = torch.full((4, 8), float(length))
            eager = copy.deepcopy(model)
            torch.testing.assert_close(pipe(x), eager(x))
            assert len(model[0].table) == len(eager[0].table)
        assert pipe.trace_count == 1


def test_what_nobody_reads_may_change() -> None:
    model = Reads().double()
    guards = trace(model, (), vectors(4, 6)).guards
    assert isinstance(guards, Guards)
    model.number_of_steps = 3
    model.layers[0].register_forward_hook(doubled)  # of a leaf: it runs with it
    model.offset.mul_(2)  # the graph holds this very tensor
    assert guards.check((), vectors(3, 6)) is None


def test_the_forwards_own_changes_do_not_trace_again() -> None:
    """A graph that is the same before and after them serves a model that ran in eager mode in between, too."""

    class Model(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.config = types.SimpleNamespace(kind=None)
            self.installed = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.installed:
                self.layers[2].register_forward_hook(lambda module, inputs, output: None)
                self.installed = True
            self.config.kind = self.config.kind or "regression"
            return self.layers[2](self.layers[1](self.layers[0](x)))

    model = Model().double()
    guards = trace(model, (), vectors(4, 6)).guards
    assert isinstance(guards, Guards)
    model(**vectors(4, 6))
    assert guards.check((), vectors(3, 6)) is None


class Inside(Layers):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.inner(self.layers[0](x)))


def test_replaced_modules_are_refused() -> None:
    model = Reads().double()
    with roundpipe.compile(model, example_kwargs=vectors(4, 6), devices="cpu", name="replaced") as pipe:
        model.layers[1] = nn.Linear(8, 8).double()
        with pytest.raises(ConfigError, match="compile it again"):
            pipe.forward_backward(input_kwargs=vectors(4, 6), loss_fn=lambda out, _: out.sum())


# ---------------------------------------------------------------------------------- grad mode


class Asks(Layers):
    """Says whether gradients are recorded, by another factor."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        asked = torch.is_grad_enabled() if self.how == "mode" else x.requires_grad
        return self.layers[1](x * 2 if asked else x)


@pytest.mark.parametrize("how", ["mode", "tensor"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_code_that_asks_for_gradients_gets_the_callers_answer(how: str, context: Any) -> None:
    model = Inside(Asks(how)).double()
    x = vectors(4, 6)["x"]
    with roundpipe.compile(model, example_kwargs={"x": x}, devices="cpu", name="asks") as pipe:
        for around in (context, contextlib.nullcontext, context):
            with around():
                torch.testing.assert_close(pipe(x).detach(), model(x).detach())
        assert pipe.trace_count == 2


def _function_that_asks() -> bool:
    return is_grad_enabled()


class AsksAtHand(Layers):
    """Asks for the grad mode by what is no attribute of torch; on data it can only run by itself."""

    def __init__(self, of_data: bool) -> None:
        super().__init__()
        self.of_data = of_data

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        if self.of_data and x.abs().max() > 1e9:
            x = x / 2
        return self.layers[1](x)


class AsksByName(AsksAtHand):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.scaled(self.layers[0](x))
        return x * 2 if is_grad_enabled() else x


class AsksByAnother(AsksAtHand):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.scaled(self.layers[0](x))
        return x * 2 if records_gradients() else x


class AsksAFunction(AsksAtHand):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.scaled(self.layers[0](x))
        return x * 2 if _function_that_asks() else x


class AsksOfATensor(AsksAtHand):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.scaled(self.layers[0](x))
        return x * 2 if _is_trained(x) else x


def _is_trained(x: torch.Tensor) -> bool:
    return x.requires_grad


def asking_in_a_closure(of_data: bool) -> nn.Module:
    asks = torch.is_grad_enabled

    class AsksInAClosure(AsksAtHand):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.scaled(self.layers[0](x))
            return x * 2 if asks() else x

    return AsksInAClosure(of_data)


ASKING = [AsksByName, AsksByAnother, AsksAFunction, AsksOfATensor, asking_in_a_closure]


@pytest.mark.parametrize("of_data", [False, True])
@pytest.mark.parametrize("make", ASKING)
def test_the_question_for_gradients_is_noticed_wherever_code_has_it_from(
    make: Callable[[bool], nn.Module], of_data: bool
) -> None:
    model = Inside(make(of_data)).double()
    x = vectors(4, 6)["x"]
    copied = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for make_pipe in (roundpipe.compile, roundpipe.wrap_model_to_roundpipe):  # what a trace found out is kept
            options = {} if make_pipe is roundpipe.compile else {"use_sequential_preset": False}
            with make_pipe(copy.deepcopy(copied), devices="cpu", name="asks at hand", **options) as pipe:
                for around in (contextlib.nullcontext, torch.no_grad):
                    with around():
                        torch.testing.assert_close(pipe(x).detach(), model(x).detach())
    assert records_gradients is is_grad_enabled is torch.is_grad_enabled


def test_a_mode_set_before_the_backward_is_the_next_calls() -> None:
    class Model(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](self.norm(self.layers[0](x).transpose(1, 2)).transpose(1, 2))

    gradients = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Model().double()
        x = torch.linspace(-1, 1, 4 * 6 * 8).double().view(4, 6, 8).sin()
        with roundpipe.compile(model, example_kwargs={"x": x}, devices="cpu", name="m") as pipe:
            one = roundpipe.RoundPipeRunConfig(num_microbatch=1)
            out = pipe(x, roundpipe_run_config=one) if compiled else model(x)
            model.eval()
            out.pow(2).sum().backward()
            pipe.synchronize()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for was, now in zip(*gradients, strict=True):
        torch.testing.assert_close(now, was)


# ---------------------------------------------------------------------------------- what leaves do


class Gate(nn.Module):
    """Hands its argument back, at some sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.shape[0] > 2 else self.linear(x)


class Normalises(nn.Module):
    """Keeps running statistics through a function, or a buffer through ``.data``: no version counter sees it."""

    def __init__(self, by_function: bool) -> None:
        super().__init__()
        self.linear, self.by_function = nn.Linear(8, 8), by_function
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.by_function:
            self.mean.data.add_(0.25)
            return self.linear(x) + self.mean
        return F.batch_norm(self.linear(x).transpose(1, 2), self.mean, self.var, training=True).transpose(1, 2)


class Shrinks(nn.Module):
    """Writes its weight in the forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(8, 8), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.linear.weight
        if self.how == "in place":
            with torch.no_grad():
                weight[0].mul_(0.5)
        elif self.how == "data":
            weight.data.mul_(0.9)
        else:
            weight.data = weight.data * 0.9
        return self.linear(x)


class Twice(nn.Linear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(super().__call__(x)) * 2


class Between(Layers):
    """A few modules of one kind, each beside what goes into it."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(make() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        for part in self.parts:
            x = torch.tanh(x) + part(x)
        return self.layers[1](x)


def test_a_result_is_not_mistaken_for_the_argument() -> None:
    assert not check(lambda: Between(Gate), sizes=[(8, 6), (3, 6), (2, 6), (8, 5)]).fell_back


@pytest.mark.parametrize("by_function", [True, False])
@pytest.mark.parametrize("in_glue", [True, False])
def test_buffers_that_are_written_unseen(by_function: bool, in_glue: bool) -> None:
    inner = Inside(Normalises(by_function)) if in_glue else None
    seen = check(lambda: Between(lambda: Normalises(by_function)) if inner is None else Inside(Normalises(by_function)))
    assert not seen.fell_back


@pytest.mark.parametrize("how", ["in place", "data", "other data"])
def test_a_leaf_that_writes_its_weight_falls_back(how: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        models = [Between(lambda: Shrinks(how)).double() for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        x = vectors(4, 6)["x"]
        with roundpipe.compile(models[0], example_kwargs={"x": x}, devices="cpu", name="shrinks") as pipe:
            for _ in range(2):
                one = roundpipe.RoundPipeRunConfig(num_microbatch=1)
                loss = pipe.forward_backward((x,), loss_fn=lambda out, _: out.pow(2).sum(), run_config=one)
                pipe.synchronize()
                torch.testing.assert_close(loss, models[1](x).pow(2).sum().detach())
            for parameter, expected in zip(models[0].parameters(), models[1].parameters(), strict=True):
                torch.testing.assert_close(parameter, expected)


def test_what_is_around_a_call_is_done_once() -> None:
    assert not check(lambda: Between(lambda: Twice(8, 8))).fell_back


# ---------------------------------------------------------------------------------- what is done to modules for a while


class Borrows(Layers):
    """Calls a module with other weights, and one in another mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = {"weight": self.layers[1].weight * 2, "bias": x.mean((0, 1))}
        x = torch.func.functional_call(self.layers[0], weights, (self.layers[1](x),))
        x = self.norm(x.transpose(1, 2))
        self.norm.eval()
        x = self.norm(x).transpose(1, 2)
        self.norm.train(self.training)
        return self.layers[2](x)


def test_weights_and_modes_set_around_a_call_are_seen() -> None:
    assert not check(Borrows).fell_back


class LeavesAnotherMode(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.layers[0](x).transpose(1, 2)).transpose(1, 2)
        self.norm.eval()
        return self.layers[1](x)


def test_a_forward_that_leaves_another_mode_falls_back() -> None:
    assert check(LeavesAnotherMode, num_microbatches=1).fell_back


@pytest.mark.parametrize("before", [True, False])
def test_backward_hooks_of_what_would_be_looked_into(before: bool) -> None:
    def build() -> nn.Module:
        stack = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3)))
        if before:
            stack.register_full_backward_pre_hook(lambda module, gradients: tuple(g * 3 for g in gradients))
        else:
            stack.register_full_backward_hook(lambda module, gradients, _: tuple(g * 3 for g in gradients))
        return Inside(stack)

    assert not check(build).fell_back


class PassesOn(Layers):
    """One of its modules returns its input, past which those behind it may read."""

    def __init__(self, passing: nn.Module) -> None:
        super().__init__()
        self.passing = passing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.passing(self.layers[0](x)))


@pytest.mark.parametrize("passing", [nn.Identity(), nn.Dropout(0.0), nn.Sequential(nn.Identity())])
@pytest.mark.parametrize("inside", [False, True])
def test_hooks_put_onto_what_only_passes_values_on(passing: nn.Module, inside: bool) -> None:
    models = [PassesOn(copy.deepcopy(passing)).double()]
    models.append(copy.deepcopy(models[0]))
    inputs = vectors(4, 3)
    with roundpipe.compile(models[0], example_kwargs=inputs, devices=["cpu"]) as pipe:
        for _ in range(2):
            pipe.forward_backward(input_kwargs=inputs, loss_fn=lambda outputs, _: outputs.square().sum())
            models[1](**inputs).square().sum().backward()
            pipe.synchronize()
            assert_same_gradients(models[0], models[1], 1e-12)
            for model in models:
                hooked = list(model.passing.modules())[-1 if inside else 0]
                hooked.register_full_backward_hook(lambda module, gradients, _: tuple(g * 3 for g in gradients))


# ---------------------------------------------------------------------------------- attributes that others read


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.aux: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        self.aux = x.pow(2).mean()
        return x


class AddsUp(Layers):
    """Takes from its modules what they keep, after they are called or also before."""

    def __init__(self, before: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Keeps() for _ in range(3))
        self.before = before

    def forward(self, x: torch.Tensor) -> Any:
        x = self.layers[0](x)
        if self.before:
            return self.layers[1](x * (1 if self.parts[0].aux is None else 2)), self.parts[0](x.detach()).mean()
        for part in self.parts:
            x = x + part(x)
        return self.layers[1](x), sum(part.aux for part in self.parts)


@pytest.mark.parametrize("before", [True, False])
def test_what_modules_keep_for_others(before: bool) -> None:
    assert check(lambda: AddsUp(before), sizes=[(4, 6), (3, 6)]).fell_back is before


class ScalesItsFirstCall(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.is_new = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[1](self.layers[0](x))
        if self.is_new:
            self.is_new = False
            x = x * 2
        return x


def test_a_first_call_that_differs_falls_back() -> None:
    assert check(ScalesItsFirstCall, sizes=[(4, 6), (3, 6)]).fell_back


# ---------------------------------------------------------------------------------- where the whole is not cut


class Store:
    def __init__(self) -> None:
        self.items: list[torch.Tensor] = []

    def add(self, x: torch.Tensor) -> torch.Tensor:
        self.items.append(x)
        return torch.stack(self.items).sum(0)


class Undecided(nn.Module):
    """What its data decides on fakes nobody knows; it changes an object that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, store: Store) -> torch.Tensor:
        x = store.add(self.linear(x))
        return x * 2 if x.sum() > 0 else x


class Uncut(Layers):
    """A root whose data decides, around modules of which one does something else beside computing."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.norm = nn.BatchNorm1d(8)
        self.pair = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.shrinks = Shrinks("data")
        if what == "a hook of a sequence":
            self.pair.register_forward_hook(doubled)
        if what == "a frozen weight":
            self.shrinks.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pair(self.layers[0](x))
        if self.what == "a frozen weight":
            x = self.shrinks(x)
        if self.what == "other weights":
            x = torch.func.functional_call(self.layers[1], {"bias": x.mean((0, 1))}, (x,))
        if self.what == "another mode":
            self.norm.eval()
            x = self.norm(x.transpose(1, 2))
            self.norm.train()
            x = self.norm(x).transpose(1, 2)
        return self.layers[2](x) * 2 if x.sum() > 1e9 else self.layers[2](x)


@pytest.mark.parametrize("what", ["a hook of a sequence", "a frozen weight", "other weights", "another mode"])
def test_what_parts_of_an_uncut_model_do(what: str) -> None:
    assert check(lambda: Uncut(what), sizes=[(4, 6), (3, 6)]).fell_back


def test_a_mode_set_on_the_users_module_is_its_parts() -> None:
    class Model(Uncut):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (2 if self.pair.training else 1)

    model = Model("").double()
    x = vectors(4, 6)["x"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with roundpipe.compile(model, example_kwargs={"x": x}, devices="cpu", name="uncut") as pipe, torch.no_grad():
            for mode in (True, False):
                model.pair.train(mode)
                torch.testing.assert_close(pipe(x), model(x))


def test_an_object_that_a_probed_leaf_changes() -> None:
    class Model(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(Undecided() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                x = x + part(self.layers[0](x), Store())
            return self.layers[1](x)

    check(Model, sizes=[(4, 6), (3, 6)])


def test_equal_calls_of_which_one_repeats_its_operand() -> None:
    class Model(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, y = self.layers[0](x), self.layers[1](x)
            return F.scaled_dot_product_attention(x, y, x * 2) + F.scaled_dot_product_attention(x, x, x)

    assert not check(Model, sizes=[(4, 6)]).fell_back


class CountsInOneMode(Layers):
    """Counts all calls, and takes a decision on that, and on its data, in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[1](self.layers[0](x))
        self.calls += 1
        return x if self.training else x * self.calls


@pytest.mark.parametrize("trains_first", [True, False])
def test_state_that_one_mode_needs_is_never_lost_in_the_other(trains_first: bool) -> None:
    models = [CountsInOneMode().double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x = vectors(4, 6)["x"]
    one = roundpipe.RoundPipeRunConfig(num_microbatch=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with roundpipe.compile(models[0], devices="cpu", name="counts", model_run_config=one) as pipe, torch.no_grad():
            for trains in (trains_first, not trains_first, trains_first):
                for model in models:
                    model.train(trains)
                if trains_first and not trains:
                    with pytest.raises(roundpipe.RoundPipeError, match="calls, which the compiled calls so far"):
                        pipe(x)
                    return
                torch.testing.assert_close(pipe(x), models[1](x))


class Clamps(Layers):
    """Keeps a weight in bounds, in its own code or in a module's."""

    def __init__(self, in_leaf: bool) -> None:
        super().__init__()
        self.clamped = nn.Linear(8, 8)
        self.inner = ClampsItself() if in_leaf else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inner is not None:
            return self.layers[1](self.inner(self.layers[0](x)))
        self.clamped.weight.data.clamp_(-5.0, 5.0)
        return self.layers[1](self.clamped(self.layers[0](x)))


class ClampsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.weight.data.clamp_(-5.0, 5.0)
        return self.linear(x)


@pytest.mark.parametrize("in_leaf", [True, False])
def test_a_write_that_changes_no_weight_is_looked_at_again(in_leaf: bool) -> None:
    assert not check(lambda: Clamps(in_leaf), sizes=[(4, 6)]).fell_back
    model = Clamps(in_leaf).double()
    guards = trace(model, (), vectors(4, 6)).guards
    assert isinstance(guards, Guards) and guards.check((), vectors(3, 6)) is None
    weight = model.clamped.weight if model.inner is None else model.inner.linear.weight
    with torch.no_grad():
        weight[0, 0] = 7.0
    assert "changes a weight" in str(guards.check((), vectors(3, 6)))
    assert weight[0, 0] == 7.0


class Remembers(Layers):
    """Uses what the call before left behind, for some sizes."""

    seen: bool | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gain = 1.0 if self.seen is None else 2.0
        self.seen = True
        x = self.layers[1](self.layers[0](x))
        return x * gain if x.shape[1] == 5 else x


def test_state_that_a_graph_did_not_keep_is_not_computed_with() -> None:
    with roundpipe.compile(Remembers().double(), devices=["cpu"]) as pipe, torch.no_grad():
        pipe(**vectors(4, 6))
        with pytest.raises(roundpipe.TraceError, match="changes seen, which the compiled calls so far"):
            pipe(**vectors(4, 5))


class WritesExpanded(nn.Module):
    """A write to one element of an expanded tensor is one to all that share its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        self.third = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.first(x).detach()[:, None].expand(-1, 4, -1)
        other = self.second(x)
        wide[:, 0] += 0.5
        return self.third(wide) + other[:, None]


def test_no_cut_between_expanding_a_tensor_and_writing_it() -> None:
    model = WritesExpanded().double()
    x = torch.randn(4, 8, dtype=torch.float64)
    traced = trace(model, (x,))
    chain = generate(traced, partition(traced, measure(traced)), measure(traced))
    assert len(chain) > 1
    with torch.no_grad():
        carry = chain.entry((x,), {})
        for layer in chain:
            apart = {name: value.clone(memory_format=torch.contiguous_format) for name, value in carry.items()}
            carry.update(layer(apart))  # as on another device
        torch.testing.assert_close(chain.exit(carry), model(x))


class ChecksBothModes(nn.Module):
    """A reentrant checkpoint whose inputs need no gradient gives its weights none, as eager's warning says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x) + checkpoint(self.first, x * 2, use_reentrant=True)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_a_trace_made_without_gradients_serves_no_call_with_them() -> None:
    torch.manual_seed(0)
    model, x = ChecksBothModes().double(), torch.randn(4, 6, dtype=torch.float64)
    copied, one = copy.deepcopy(model), roundpipe.RoundPipeRunConfig(num_microbatch=1)
    with roundpipe.compile(model, devices=["cpu"], name="modes") as pipe:
        with torch.no_grad():
            torch.testing.assert_close(pipe(x), copied(x))
        pipe.forward_backward((x,), loss_fn=lambda y, _: y.square().mean(), run_config=one)
        pipe.synchronize()
    copied(x).square().mean().backward()
    assert copied.first.weight.grad is None and model.first.weight.grad is None
    torch.testing.assert_close(model.second.weight.grad, copied.second.weight.grad)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_first_call_inside_a_checkpoint(reentrant: bool) -> None:
    """The checkpoint's hooks run the call again where a trace asks what autograd saved, and traces ask often."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))).double()
    copied = copy.deepcopy(model)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    with roundpipe.compile(model, devices=["cpu"], name="inner") as pipe:
        checkpoint(pipe, x, use_reentrant=reentrant).square().sum().backward()
        pipe.synchronize()
        assert pipe.trace_count == 1
    ours, x.grad = x.grad, None
    checkpoint(copied, x, use_reentrant=reentrant).square().sum().backward()
    torch.testing.assert_close(ours, x.grad)
    assert_same_gradients(model, copied, 1e-9)


class WritesItsArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        labels = labels.masked_fill_(labels > 0.5, 2.0)
        for layer in self.layers:
            x = layer(x).tanh()
        return (x - labels).square()


def test_a_write_into_an_argument_is_told() -> None:
    x = torch.ones(4, 6)
    with roundpipe.compile(WritesItsArgument(), devices=["cpu"]) as pipe, torch.no_grad():
        with pytest.warns(UserWarning, match="writes into its argument labels, .* stays as it was"):
            pipe(x, x.clone())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipe(x[:, :], torch.zeros(5, 6)[:4])


@pytest.mark.filterwarnings("ignore:.*AutoRoundPipe")
@pytest.mark.filterwarnings("ignore:.*writes into its argument")
@pytest.mark.parametrize("shares_at_first", [True, False])
@pytest.mark.parametrize("share", [lambda x: x, lambda x: x[:, :]], ids=["the same", "a view"])
def test_a_write_into_an_argument_that_another_one_shares(share: Callable[..., Any], shares_at_first: bool) -> None:
    models = [WritesItsArgument().double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    config = roundpipe.RoundPipeRunConfig(num_microbatch=2)
    with roundpipe.compile(models[0], devices=["cpu"], name="writes", model_run_config=config) as pipe:
        for shares in (shares_at_first, True):
            start = torch.randn(4, 6, dtype=torch.float64)
            ours, theirs = start.clone(), start.clone()
            loss = pipe.forward_backward((ours, share(ours) if shares else ours.clone()), loss_fn=lambda y, _: y.sum())
            pieces = zip(theirs.split(2), (share(theirs) if shares else theirs.clone()).split(2), strict=True)
            total = 0.0
            for piece in pieces:
                of_piece = models[1](*piece).sum()
                of_piece.backward()
                total += float(of_piece)
            assert float(loss) == pytest.approx(total, rel=1e-9)
        pipe.synchronize()
        assert pipe._runner.fallback is not None
    assert_same_gradients(models[0], models[1], 1e-9)


OUTPUT_DTYPE = torch.float32


class CastsToGlobalDtype(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).to(OUTPUT_DTYPE)


def test_a_global_dtype_is_compared_before_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    guards = trace(CastsToGlobalDtype(), (), vectors(3, 6)).guards
    assert isinstance(guards, Guards) and guards.check((), vectors(3, 6)) is None
    monkeypatch.setitem(globals(), "OUTPUT_DTYPE", torch.float64)
    assert "global OUTPUT_DTYPE holds something else now" in str(guards.check((), vectors(3, 6)))
