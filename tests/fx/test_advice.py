"""What the error of an untraceable model tells its user to change: the change is named, and it helps."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from roundpipe.core.errors import TraceCause, TraceError, TraceFacts
from roundpipe.fx.locations import source_at
from roundpipe.fx.passes.codegen import generate
from roundpipe.fx.passes.cost import measure
from roundpipe.fx.passes.partition import partition
from roundpipe.fx.trace.advice import advice, set_at, where_set
from roundpipe.fx.trace.tracer import trace

Code = Callable[["Root", torch.Tensor], torch.Tensor]


class Root(nn.Module):
    """A model the own code of which is a function; it has state to misuse."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.inner, self.code = nn.Linear(4, 4), code
        self.num_calls, self.previous = 0, None
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("last", torch.zeros(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.code(self, self.inner(x))


# What can't be traced, and the same as the advice says.


def branch(root: Root, x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x
    return x * 2


def branch_changed(root: Root, x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.sum() > 0, x, x * 2)


def conditional(root: Root, x: torch.Tensor) -> torch.Tensor:
    factor = 1 if x.sum().item() > 0 else 2
    return x * factor


def conditional_changed(root: Root, x: torch.Tensor) -> torch.Tensor:
    return x * torch.where(x.sum() > 0, 1, 2)


def rounded(root: Root, x: torch.Tensor) -> torch.Tensor:
    return x[:, : int(x.argmax() % 2) + 1]


def rounded_changed(root: Root, x: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(4) < x.argmax() % 2 + 1, x, 0)


def candidates(root: Root, x: torch.Tensor) -> torch.Tensor:
    return [x, x * 2][x.argmax() % 2]


def candidates_changed(root: Root, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, x * 2]).index_select(0, (x.argmax() % 2)[None])[0]


def with_numpy(root: Root, x: torch.Tensor) -> torch.Tensor:
    return x + torch.from_numpy(np.tanh(x.detach().numpy()))


def with_numpy_changed(root: Root, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(x.detach())


def selected(root: Root, x: torch.Tensor) -> torch.Tensor:
    return x * [0.5, 2.0][len(x[x > 0]) % 2]


def selected_changed(root: Root, x: torch.Tensor) -> torch.Tensor:
    return x * torch.where((x > 0).sum() % 2 == 1, 2.0, 0.5)


def looping(root: Root, x: torch.Tensor) -> torch.Tensor:
    while x.abs().max() > 1:
        x = x / 2
    return x


def looping_changed(root: Root, x: torch.Tensor) -> torch.Tensor:
    for _ in range(8):
        x = torch.where(x.abs().max() > 1, x / 2, x)
    return x


def values(root: Root, x: torch.Tensor) -> torch.Tensor:
    for position in (x > 0).nonzero():
        x = x + position.sum()
    return x


def values_changed(root: Root, x: torch.Tensor) -> torch.Tensor:
    return x + (torch.arange(4)[:, None] + torch.arange(4))[None].mul(x > 0).sum()


def asserting(root: Root, x: torch.Tensor) -> torch.Tensor:
    assert x.isfinite().all()
    return x


def asserting_changed(root: Root, x: torch.Tensor) -> torch.Tensor:
    return x


def drawing(root: Root, x: torch.Tensor) -> torch.Tensor:
    return x if random.random() < 1.0 else x * 2


def drawing_changed(root: Root, x: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.rand(()) < 1.0, x, x * 2)


class Counting(Root):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return self.inner(x) * self.num_calls


class CountingChanged(Root):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        return self.inner(x) * self.steps


class Remembering(Root):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        now = self.inner(x)
        out = now if self.previous is None else now + self.previous
        self.previous = now.detach()
        return out


class RememberingChanged(Root):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        now = self.inner(x)
        out = now + self.last
        self.last.copy_(now.detach())
        return out


CASES = {
    "if": (branch, branch_changed, "if x.sum() > 0:", "torch.where(condition, a, b), in place of the if"),
    "item": (conditional, conditional_changed, ".item() > 0", "Drop .item(), int() and float(), and choose with torch"),
    "int": (rounded, rounded_changed, "int(x.argmax() % 2)", "Drop .item(), int() and float(): a tensor"),
    "index": (candidates, candidates_changed, "[x, x * 2][", "torch.index_select"),
    "numpy": (with_numpy, with_numpy_changed, "np.tanh", "torch's function in place of NumPy's"),
    "selection": (selected, selected_changed, "len(x[x > 0])", "a count is mask.sum()"),
    "while": (looping, looping_changed, "while x.abs().max() > 1:", "a fixed number of rounds"),
    "values": (values, values_changed, "for position in", "in place of looping over its values"),
    "assert": (asserting, asserting_changed, "assert x.isfinite()", "Take the assertion out of forward"),
    "random": (drawing, drawing_changed, "random.random()", "torch.where(torch.rand(()) < p, a, b)"),
    "counter": (Counting, CountingChanged, "self.num_calls += 1", "self.register_buffer('steps', torch.zeros(()))"),
    "memory": (Remembering, RememberingChanged, "self.previous = now.detach()", "self.previous.copy_(value.detach())"),
}


def model_of(code: Code | type[Root]) -> Root:
    torch.manual_seed(0)
    return code(branch) if isinstance(code, type) else Root(code)


@pytest.mark.parametrize("case", list(CASES))
def test_the_error_names_the_line_and_a_change(case: str) -> None:
    code, _, line, change = CASES[case]
    with pytest.raises(TraceError) as caught:
        trace(model_of(code), (torch.randn(4, 4),))
    text = str(caught.value)
    assert "test_advice.py:" in text and line in text and change in text, text
    assert "ove this code into a submodule" in text


@pytest.mark.parametrize("case", list(CASES))
def test_the_change_helps(case: str) -> None:
    before, after, _, _ = CASES[case]
    model, changed = model_of(before), model_of(after)
    reference = copy.deepcopy(changed)
    traced = trace(changed, (torch.randn(4, 4),))
    costs = measure(traced)
    chain = generate(traced, partition(traced, costs), costs)
    for _ in range(3):
        x = torch.randn(4, 4)
        with torch.no_grad():
            expected = model(x)
            torch.testing.assert_close(reference(x).sum(), expected.sum(), msg="the change changes the model")
            torch.testing.assert_close(chain.run(x).sum(), expected.sum())


def test_moving_the_code_into_a_submodule_helps() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Root(branch), nn.Linear(4, 4))
    assert list(trace(model, (torch.randn(4, 4),)).opaque) == ["1"]


def test_without_a_rule_the_advice_is_general() -> None:
    assert advice(TraceCause.OTHER, TraceFacts()).startswith("Move this code into a submodule")


def test_where_an_attribute_is_set() -> None:
    assert source_at(where_set(nn.Sequential(Counting(branch)), "0.num_calls")) == "self.num_calls += 1"
    assert "def forward" in source_at(where_set(Counting(branch), "nonsense"))
    assert set_at(int, "real") == ""
