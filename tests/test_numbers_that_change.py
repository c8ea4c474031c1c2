"""A number of Python's that is another one at each step is an input of the graph, and needs no new trace."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable
from math import cos as cosine
from math import exp
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import roundpipe
from roundpipe import RoundPipeRunConfig
from tests.runtime.models import gradients

NUM_SAMPLES, WIDTH, NUM_CLASSES, NUM_STEPS = 9, 6, 3, 5
Rule = Callable[[torch.Tensor, Any], torch.Tensor]


class _ReversedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return -ctx.scale * gradient, None


def _annealed(h: torch.Tensor, number: Any) -> torch.Tensor:
    return h * min(1.0, number / 3) if number < 100 else h


def _kept_whole(h: torch.Tensor, number: Any) -> torch.Tensor:
    return h * math.frexp(number)[0]


OPEN: dict[str, Rule] = {
    "a factor": lambda h, number: h * number,
    "a factor in front": lambda h, number: number * h,
    "a divisor": lambda h, number: h / (1 + number),
    "a power": lambda h, number: h.abs() ** number,
    "a number of an operator": lambda h, number: torch.add(h, h, alpha=number),
    "a limit": lambda h, number: h.clamp(max=number),
    "a slope": lambda h, number: F.leaky_relu(h, 0.1 * number),
    "a temperature": lambda h, number: (h / (0.1 + number)).softmax(-1),
    "computed with": lambda h, number: h * (2 * number**2 - 1) / 3 + abs(-number),
    "in a tensor": lambda h, number: h * torch.tensor(1 / (1 + number)),
    "all of a tensor": lambda h, number: h + torch.full_like(h, number),
    "in a function of its own": lambda h, number: _ReversedGradient.apply(h, number),
    "a decision that stays": _annealed,
    "a bound": lambda h, number: h * max(number, 0),
    "not at all": lambda h, number: h,
    "whether there is any": lambda h, number: h * number if number and not not number else h,
    "an exponential": lambda h, number: h * math.exp(-number),
    "a sigmoid": lambda h, number: h / (1 + math.exp(-10 * (number - 0.5))),
    "a cosine": lambda h, number: h * (0.5 * (1 + math.cos(math.pi * number))),
    "roots and logarithms": lambda h, number: h * (math.sqrt(number) + math.log(1 + number) - math.tanh(number)),
    "a decision by a root": lambda h, number: h * (number if math.sqrt(number) < 100 else 1.0),
    "asked for its type": lambda h, number: h * number if isinstance(number, (int, float)) else h,
}
OPEN_INTEGERS: dict[str, Rule] = {
    "a size": lambda h, number: h + h.new_ones(3, number + 1).mean(1).sum(),
    "a bound of a slice": lambda h, number: h[:, : number + 1].sum(1, keepdim=True) + h,
    "a part": lambda h, number: h + h[:, number, None],
}
KEPT: dict[str, Rule] = {
    "only a number will do": _kept_whole,
    "a text": lambda h, number: h * float(f"{number}"),
    "a key": lambda h, number: h * {number: 2.0}.get(number, 1.0),
    "a decision that changes": lambda h, number: h * number if number > 0.5 else h,
}


class Ruled(nn.Module):
    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.rule, self.number = rule, 1.0

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.rule(h, self.number)


class OfAttribute(nn.Module):
    """The number is in an attribute, of the module itself or of one inside."""

    def __init__(self, rule: Rule, is_inside: bool) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(5, WIDTH), nn.Linear(WIDTH, NUM_CLASSES)
        self.ruled = Ruled(rule)
        self.rule, self.number, self.is_inside = rule, 1.0, is_inside

    def set(self, number: Any) -> dict[str, Any]:
        (self.ruled if self.is_inside else self).number = number
        return {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x).tanh()
        logits: torch.Tensor = self.outer(self.ruled(h) if self.is_inside else self.rule(h, self.number))
        return logits


class OfArgument(nn.Module):
    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.inner, self.outer, self.rule = nn.Linear(5, WIDTH), nn.Linear(WIDTH, NUM_CLASSES), rule

    def set(self, number: Any) -> dict[str, Any]:
        return {"number": number}

    def forward(self, x: torch.Tensor, number: Any) -> torch.Tensor:
        logits: torch.Tensor = self.outer(self.rule(self.inner(x).tanh(), number))
        return logits


def _trained(model: Any, numbers: list[Any], num_microbatch: int = 3) -> int:
    """Trains a model and a copy in eager mode, compares them, and gives how often it was traced."""
    eager = copy.deepcopy(model)
    config = RoundPipeRunConfig(num_microbatch=num_microbatch)
    with roundpipe.compile(model, devices=["cpu"] * 2, model_run_config=config) as pipe:
        for step, number in enumerate(numbers):
            torch.manual_seed(step)
            x, label = torch.randn(NUM_SAMPLES, 5), torch.randint(NUM_CLASSES, (NUM_SAMPLES,))
            pipe.zero_grad()
            eager.zero_grad()
            pipe.forward_backward((x,), model.set(number), label=label, loss_fn=F.cross_entropy, loss_reduction="mean")
            loss = F.cross_entropy(eager(x, **eager.set(number)), label)
            loss.backward()
            assert_close(gradients(model), gradients(eager))
            with torch.no_grad():
                assert_close(pipe(x, **model.set(number)), eager(x, **eager.set(number)))
        return pipe.trace_count


def _trained_in_many_traces(model: Any, numbers: list[Any]) -> None:
    """The same where a warning of many traces is due."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _trained(model, numbers)


@pytest.mark.parametrize("rule", OPEN.values(), ids=OPEN)
@pytest.mark.parametrize(
    "kind", [OfArgument, lambda rule: OfAttribute(rule, False), lambda rule: OfAttribute(rule, True)]
)
def test_a_number_is_traced_as_a_number_once(rule: Rule, kind: Any) -> None:
    torch.manual_seed(0)
    assert _trained(kind(rule), [0.9 / (step + 1) for step in range(NUM_STEPS)]) == 2


NUMPY_S: dict[str, Rule] = {
    "a factor": lambda h, number: h * number,
    "a factor in front": lambda h, number: (1 - number) * h,
    "of a number": lambda h, number: h * math.exp(-number) + number**2,
    "asked for its type": lambda h, number: h * number if isinstance(number, float) else h,
    "in a tensor": lambda h, number: h * torch.tensor(number).float(),
}
KINDS_OF_NUMPY: dict[str, Rule] = {
    "a class of numpy's": lambda h, number: h * 100 if isinstance(number, np.floating) else h * number,
    "this class": lambda h, number: h * 100 if isinstance(number, np.float64) else h * number,
    "a method": lambda h, number: h * number.item(),
    "a function": lambda h, number: h * np.exp(number),
}


@pytest.mark.parametrize("rule", NUMPY_S.values(), ids=NUMPY_S)
@pytest.mark.parametrize("kind", [OfArgument, lambda rule: OfAttribute(rule, True)])
def test_so_is_a_number_of_numpy_s(rule: Rule, kind: Any) -> None:
    """Schedules are made with ``np.linspace``; such a number is a float."""
    torch.manual_seed(0)
    assert _trained(kind(rule), list(np.linspace(0.1, 0.9, NUM_STEPS))) == 2


@pytest.mark.parametrize("rule", KINDS_OF_NUMPY.values(), ids=KINDS_OF_NUMPY)
@pytest.mark.parametrize("numbers", [np.linspace(0.1, 0.9, 4), [0.5, 0.4, np.float64(0.3), 0.2, np.float64(0.1)]])
def test_code_that_needs_numpy_s_number_has_it(rule: Rule, numbers: Any) -> None:
    if rule is KINDS_OF_NUMPY["a method"]:
        numbers = list(map(np.float64, numbers))
    _trained_in_many_traces(OfArgument(rule), list(numbers))


def test_functions_of_math_are_known_under_any_name() -> None:
    rule = lambda h, number: h * (exp(-number) + cosine(number))  # noqa: E731
    assert _trained(OfArgument(rule), [0.9 / (step + 1) for step in range(NUM_STEPS)]) == 2
    assert exp is math.exp and cosine is math.cos


@pytest.mark.parametrize("rule", [*OPEN.values(), *OPEN_INTEGERS.values()], ids=[*OPEN, *OPEN_INTEGERS])
@pytest.mark.parametrize("kind", [OfArgument, lambda rule: OfAttribute(rule, True)])
def test_so_is_an_integer(rule: Rule, kind: Any) -> None:
    torch.manual_seed(0)
    assert _trained(kind(rule), list(range(1, NUM_STEPS))) <= 3


@pytest.mark.parametrize("rule", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("kind", [OfArgument, lambda rule: OfAttribute(rule, True)])
def test_code_that_needs_the_number_itself_is_right(rule: Rule, kind: Any) -> None:
    _trained_in_many_traces(kind(rule), [0.9 / (step + 1) for step in range(NUM_STEPS)])


SHAPED: dict[str, Rule] = {
    "parts of a size": lambda h, number: (
        sum(part.sum(1, keepdim=True) * i for i, part in enumerate(h.split(number, 1))) + h
    ),
    "a number of parts": lambda h, number: (
        sum(p.sum(1, keepdim=True) * i for i, p in enumerate(h.chunk(number, 1))) + h
    ),
    "the last part": lambda h, number: h * h.chunk(number, 1)[-1].mean(1, keepdim=True),
    "how many parts": lambda h, number: h * len(h.split(number, 1)),
    "a length behind a bound": lambda h, number: h * h[:, :number].shape[1],
    "a dimension": lambda h, number: h * h[:, None].expand(-1, 4, -1).sum(1 + number % 2).shape[1],
    "a pooled length": lambda h, number: h * F.adaptive_avg_pool1d(h[None], number).shape[2],
    "heads": lambda h, number: (
        h + sum(head.sum(1, keepdim=True) * i for i, head in enumerate(h.view(len(h), number % 2 + 1, -1).unbind(1)))
    ),
}


@pytest.mark.parametrize("rule", SHAPED.values(), ids=SHAPED)
@pytest.mark.parametrize("kind", [OfArgument, lambda rule: OfAttribute(rule, True)])
def test_what_an_operator_makes_of_an_integer_may_be_of_another_form(rule: Rule, kind: Any) -> None:
    _trained_in_many_traces(kind(rule), [4, 3, 2, 1, 8, 12, 5])


LIKE_PYTHON: dict[str, Rule] = {
    "the type": lambda h, number: h * number if type(number) in (int, float) else h * 100,
    "a floored fraction": lambda h, number: h * (1.0 // number),
    "over a fraction": lambda h, number: h * (number // 0.1),
    "rounded to tens": lambda h, number: h * round(int(number * 100), -1),
}


@pytest.mark.parametrize("rule", LIKE_PYTHON.values(), ids=LIKE_PYTHON)
def test_python_computes_with_a_number_as_ever(rule: Rule) -> None:
    _trained_in_many_traces(OfArgument(rule), [0.5, 0.1, 0.2, 0.3, 1.0])


def test_a_function_that_does_not_take_a_number_raises_as_ever() -> None:
    model = OfArgument(lambda h, number: h * 2 if math.log(number) > -1 else h)
    with roundpipe.compile(model, devices=["cpu"]) as pipe, torch.no_grad():
        for number in (0.5, 0.6, 0.7):
            x = torch.randn(4, 5)
            assert_close(pipe(x, number), model(x, number))
        with pytest.raises(ValueError) as own:
            math.log(-1.0)
        with pytest.raises(ValueError, match=re.escape(str(own.value))) as raised:
            pipe(x, -1.0)
        assert "the forward of OfArgument raises ValueError" in raised.value.__notes__[0]  # and no guard of a trace
        assert_close(pipe(x, 0.8), model(x, 0.8))


def test_an_integer_is_rounded_to_tens() -> None:
    _trained(OfArgument(lambda h, number: h * round(number, -1)), [14, 15, 25, 35])


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scaling = nn.Linear(6, 6), {"default": 1.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scaling["default"]


def test_numbers_of_many_containers_are_opened_at_once() -> None:
    model = nn.Sequential(*[Scaling() for _ in range(6)])
    with roundpipe.compile(model, devices=["cpu"]) as pipe, torch.no_grad():
        for step in range(4):
            for layer in model:
                layer.scaling["default"] = 1.0 + step / 7
            x = torch.randn(4, 6)
            assert_close(pipe(x), model(x))
        assert pipe.trace_count == 2


def test_a_number_that_is_none_at_times_takes_a_trace_more() -> None:
    model = OfArgument(lambda h, number: h if number is None else h * number)
    with roundpipe.compile(model, devices=["cpu"]) as pipe, torch.no_grad():
        for number in (0.1, None, 0.2, None, 0.3, None, 0.4):
            x = torch.randn(4, 5)
            assert_close(pipe(x, number), model(x, number))
        assert pipe.trace_count == 3


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["a factor", "a power", "a number of an operator", "a limit", "in a tensor"])
def test_a_device_computes_with_the_number_as_pytorch_does(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = OfAttribute(OPEN[name], True).to(dtype)
    eager = copy.deepcopy(model).cuda()
    with roundpipe.compile(model, devices=["cuda"]) as pipe, torch.no_grad():
        for step in range(NUM_STEPS):
            x = torch.randn(NUM_SAMPLES, 5, dtype=dtype)
            model.set(0.9 / (step + 1))
            eager.set(0.9 / (step + 1))
            assert_close(pipe(x).cpu(), eager(x.cuda()).cpu())
        assert pipe.trace_count == 2
