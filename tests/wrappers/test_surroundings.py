"""What a forward asks of its surroundings: identities, modes, context variables, globals, global hooks."""

import contextvars
import copy
import types
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import ConfigError
from tests.equality import difference

DTYPE = torch.float64
KINDS = ("compiled", "by hand", "in parts")
FACTOR = contextvars.ContextVar("factor", default=1.0)


def activation(x):
    return torch.tanh(x)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.between(self.first(x)))


class ReadsContext(Two):
    def between(self, x):
        return x * FACTOR.get()


class CallsGlobal(Two):
    def between(self, x):
        return activation(x)


class AsksMode(Two):
    def between(self, x):
        return x * 3 if torch.is_inference_mode_enabled() else x


class Attends(Two):
    def forward(self, query, key=None):
        return self.second(self.first(query) if key is query else self.first(query) * self.second(key))


def wrap(kind, model, *example):
    if kind == "compiled":
        return roundpipe.compile(model, example_args=example, devices=["cpu"] * 2)
    if kind == "by hand":
        return roundpipe.RoundPipe(model, devices=["cpu"] * 2)
    return roundpipe.wrap_model_to_roundpipe(model, use_sequential_preset=False, lower_threshold=1, devices=["cpu"] * 2)


def assert_calls_are_eagers(pipe, reference, *args):
    assert difference(pipe(*args), reference(*args)) <= 1e-12
    pipe.zero_grad()
    reference.zero_grad()
    pipe.forward_backward(args, loss_fn=lambda outputs, label: outputs.square().sum())
    reference(*args).square().sum().backward()
    pipe.synchronize()
    for ours, theirs in zip(pipe.model.parameters(), reference.parameters(), strict=True):
        assert difference(ours.grad, theirs.grad) <= 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_a_context_variable_may_be_set_between_calls(kind):
    model, x = ReadsContext().to(DTYPE), torch.randn(4, 4, dtype=DTYPE)
    reference = copy.deepcopy(model)
    with wrap(kind, model, x) as pipe:
        assert_calls_are_eagers(pipe, reference, x)
        token = FACTOR.set(3.0)
        assert_calls_are_eagers(pipe, reference, x)
        FACTOR.reset(token)
        assert_calls_are_eagers(pipe, reference, x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", [torch.sigmoid, lambda x: x * 2], ids=["builtin", "function"])
def test_a_global_function_may_be_replaced_between_calls(kind, other, monkeypatch):
    model, x = CallsGlobal().to(DTYPE), torch.randn(4, 4, dtype=DTYPE)
    reference = copy.deepcopy(model)
    with wrap(kind, model, x) as pipe:
        assert_calls_are_eagers(pipe, reference, x)
        monkeypatch.setitem(globals(), "activation", other)
        assert_calls_are_eagers(pipe, reference, x)


@pytest.mark.parametrize("kind", KINDS)
def test_code_that_asks_for_the_inference_mode_is_refused_in_it(kind):
    model, x = AsksMode().to(DTYPE), torch.randn(4, 4, dtype=DTYPE)
    with wrap(kind, model, x) as pipe:
        with torch.inference_mode(), pytest.raises(ConfigError, match="AsksMode asks whether torch.inference_mode"):
            pipe(x)
        with torch.no_grad():
            assert difference(pipe(x), model(x)) <= 1e-12


def test_modules_that_were_put_in_later_are_asked_too():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(DTYPE), torch.randn(4, 4, dtype=DTYPE)
    with roundpipe.RoundPipe(model, devices=["cpu"]) as pipe, torch.no_grad():
        pipe(x)
        model[1] = AsksMode().to(DTYPE)
        with torch.inference_mode(), pytest.raises(ConfigError, match="AsksMode asks whether torch.inference_mode"):
            pipe(x)


@pytest.mark.parametrize("kind", KINDS)
def test_code_that_compares_its_arguments_is_refused_the_same_tensor_twice(kind):
    model = Attends().to(DTYPE)
    x, y = torch.randn(2, 4, 4, dtype=DTYPE)
    with wrap(kind, model, x, y) as pipe:
        assert_calls_are_eagers(pipe, copy.deepcopy(model), x, y)
        for call in (lambda: pipe(x, x), lambda: pipe.forward_backward((x, x), loss_fn=lambda out, _: out.sum())):
            with pytest.raises(ConfigError, match="Attends asks whether two of its arguments are one object"):
                call()


def test_other_code_may_be_given_the_same_tensor_twice():
    class Adds(Two):
        def forward(self, x, other=None):
            return self.first(x) if other is None else self.first(x) + self.second(other)

    model, x = Adds().to(DTYPE), torch.randn(4, 4, dtype=DTYPE)
    with roundpipe.RoundPipe(model, devices=["cpu"]) as pipe:
        assert_calls_are_eagers(pipe, copy.deepcopy(model), x, x)


def test_global_hooks_are_warned_of_once():
    model, x = Two(), torch.randn(4, 4)
    model.between = types.MethodType(lambda self, x: x, model)
    with (
        roundpipe.RoundPipe(model, devices=["cpu"]) as pipe,
        pytest.warns(UserWarning, match="global module hooks") as w,
    ):
        handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
        try:
            pipe(x)
            pipe(x)
        finally:
            handle.remove()
    assert sum("global module hooks" in str(one.message) for one in w) == 1


def test_torchs_search_for_anomalies_finds_none_in_what_fakes_fail_at():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x, label = torch.randn(12, 8), torch.randint(4, (12,))
    with roundpipe.compile(model, devices=["cpu"]) as piped, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.autograd.detect_anomaly():
            loss = piped.forward_backward((x,), label=label, loss_fn=F.cross_entropy, loss_reduction="mean")
            torch.testing.assert_close(loss, F.cross_entropy(model(x), label).detach())
            assert torch.is_anomaly_enabled()
    assert not any("Error detected" in str(each.message) for each in caught)
