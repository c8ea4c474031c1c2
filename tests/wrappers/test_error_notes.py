"""Where an exception was raised, in models that run in parts or in several traces; losses that are none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import AutoRoundPipe, LossError, RoundPipe, RoundPipeRunConfig, compile
from roundpipe.core.errors import GRADIENTS_ADDED
from roundpipe.wrappers.auto import PartsProgram
from tests.faults.models import WIDTH as FAULTS_WIDTH
from tests.faults.models import Layer
from tests.faults.points import POINTS
from tests.wrappers.cases_parts import WIDTH, auto

pytestmark = pytest.mark.filterwarnings("ignore:forward_backward of an AutoRoundPipe")


class Mine(Exception):
    """Somebody's own."""


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, owner: Fragile) -> torch.Tensor:
        ctx.owner = owner
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.owner.visit("backward")
        return gradient, None


VISITS: Counter[str] = Counter()


class Fragile(nn.Module):
    """Fails in one visit of a phase."""

    def __init__(self, phase: str = "", visit: int = 0, error: type[BaseException] = Mine) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.due = phase, visit
        self.error = error
        VISITS.clear()

    def visit(self, phase: str) -> None:
        visit = VISITS[phase]
        VISITS[phase] += 1
        if (phase, visit) == self.due:
            raise self.error()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.visit("forward")
        return FailsInBackward.apply(self.linear(x), self)


class OnHost(nn.Module):
    """Its first layer is a part, the second runs on the host, as code of the model does."""

    def __init__(self, inner: Fragile) -> None:
        super().__init__()
        self.part = nn.Linear(WIDTH, WIDTH)
        self.block = nn.Sequential(inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block[0](self.part(x))


def note_of(error: BaseException) -> str:
    """The one note on where it was raised."""
    (note,) = (note for note in error.__notes__ if "raised in" in note)
    return note


def square(outputs: torch.Tensor, label: Any) -> torch.Tensor:
    return outputs.square().sum()


def on_host(inner: Fragile) -> Any:
    model = OnHost(inner)
    return AutoRoundPipe(PartsProgram(model, {model.part: RoundPipeRunConfig()}), name="whole", devices=["cpu"])


THREE = RoundPipeRunConfig(num_microbatch=3)


@pytest.mark.parametrize("error", [Mine, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize(
    "phase, visit, expected",
    [
        ("forward", 0, "module block.0 on the host, microbatch 0, phase forward"),
        ("forward", 2, "module block.0 on the host, microbatch 2, phase forward"),
        ("backward", 1, "module block.0 on the host, microbatch 1, phase backward"),
    ],
)
def test_code_on_the_host(error: type[BaseException], phase: str, visit: int, expected: str) -> None:
    with on_host(Fragile(phase, visit, error)) as pipe:
        with pytest.raises(error) as caught:
            pipe.forward_backward((torch.randn(6, WIDTH),), loss_fn=square, run_config=THREE)
        assert note_of(caught.value) == f"roundpipe: raised in {expected}"
        assert (GRADIENTS_ADDED in caught.value.__notes__) == (phase == "backward" or visit > 0)


def test_the_loss_function_on_the_host() -> None:
    losses: list[int] = []

    def loss_fn(outputs: torch.Tensor, label: Any) -> torch.Tensor:
        losses.append(1)
        if len(losses) == 2:
            raise Mine
        return outputs.sum()

    with on_host(Fragile()) as pipe, pytest.raises(Mine) as caught:
        pipe.forward_backward((torch.randn(6, WIDTH),), loss_fn=loss_fn, run_config=THREE)
    assert note_of(caught.value) == "roundpipe: raised in code on the host, microbatch 1, phase loss_fn"
    assert GRADIENTS_ADDED in caught.value.__notes__


def test_a_forward_of_the_whole_batch_on_the_host() -> None:
    with on_host(Fragile("forward")) as pipe, pytest.raises(Mine) as caught:
        pipe(torch.randn(6, WIDTH))
    assert note_of(caught.value) == "roundpipe: raised in module block.0 on the host, the whole batch, phase forward"


class InPart(nn.Module):
    """Calls a part whose faults are raised by an operator, which is no side effect."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Layer(0).float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.parametrize("visit", [0, 2])
@pytest.mark.parametrize("phase, stage", [("forward", "F0[0:1]"), ("backward", "B1[0:1]")])
def test_a_part_counts_microbatches_of_the_whole_call(phase: str, stage: str, visit: int) -> None:
    with auto(InPart()) as pipe, POINTS.armed(f"{phase} of layer 0", visit * (2 if phase == "forward" else 1), Mine()):
        with pytest.raises(Mine) as caught:
            pipe.forward_backward((torch.randn(6, FAULTS_WIDTH),), loss_fn=square, run_config=THREE)
        note = note_of(caught.value)
        assert "layer 0 (inner)" in note and note.endswith(f"stage {stage}, microbatch {visit}, phase {phase}")


def test_a_backward_that_the_caller_runs() -> None:
    """Parts behind the one that fails have added theirs."""
    with auto(InPart()) as pipe, POINTS.armed("backward of layer 0", 0, Mine()):
        outputs = pipe(torch.randn(6, FAULTS_WIDTH))
        with pytest.raises(Mine) as caught:
            outputs.sum().backward()
        assert "microbatch 0, phase backward" in note_of(caught.value)
        assert GRADIENTS_ADDED in caught.value.__notes__


class Fails(nn.Module):
    """Fails in the microbatch whose first value is negative, with a trace for each length."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * 2 if x.shape[1] == 3 else x)


def test_microbatches_of_several_traces_are_counted_in_the_call() -> None:
    lengths = (3, 3, 5, 5, 3)
    seen: list[int] = []

    def loss_fn(outputs: torch.Tensor, label: Any) -> torch.Tensor:
        seen.append(1)
        if len(seen) == 4:
            raise Mine
        return outputs.sum()

    def split_input(args: Any, kwargs: Any, number: int) -> Any:
        return [(torch.randn(2, length, WIDTH),) for length in lengths], [{}] * number

    options = RoundPipeRunConfig(num_microbatch=len(lengths), split_input=split_input)
    x = torch.randn(2, 3, WIDTH)
    with compile(Fails(), example_args=(x,), devices=["cpu"]) as pipe:
        with pytest.raises(Mine) as caught:
            pipe.forward_backward((x,), loss_fn=loss_fn, run_config=options)
        assert pipe.trace_count > 1
        assert "microbatch 3, phase loss_fn" in note_of(caught.value)
        assert GRADIENTS_ADDED not in caught.value.__notes__  # they are one round


class Before(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise Mine


@pytest.mark.parametrize("wrap", [RoundPipe, auto])
def test_code_in_front_of_the_model(wrap: Callable[..., Any]) -> None:
    x = Before.apply(torch.randn(4, WIDTH, requires_grad=True))
    options = {"devices": ["cpu"]} if wrap is RoundPipe else {}
    with wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH)), **options) as pipe, pytest.raises(Mine) as caught:
        pipe.forward_backward((x,), loss_fn=square)
    assert note_of(caught.value) == "roundpipe: raised in code in front of the model, phase backward"
    assert GRADIENTS_ADDED in caught.value.__notes__


def fails(*_: Any) -> Any:
    raise Mine


@pytest.mark.parametrize("name", ["split_input", "split_label", "merge_output"])
def test_functions_that_split_and_merge(name: str) -> None:
    options = RoundPipeRunConfig(**{name: fails})
    with RoundPipe(nn.Linear(WIDTH, WIDTH), devices=["cpu"]) as pipe, pytest.raises(Mine) as caught:
        x = torch.randn(4, WIDTH)
        pipe.forward_backward((x,), label=x, loss_fn=square, return_outputs=True, run_config=options)
    assert note_of(caught.value) == f"roundpipe: raised in code on the host, phase {name}"
    assert (GRADIENTS_ADDED in caught.value.__notes__) == (name == "merge_output")


@pytest.mark.parametrize(
    "wrong, message",
    [
        (None, "returned NoneType; it must return a tensor"),
        (3.0, "returned float"),
        ([], "returned list"),
        ({}, "returned dict"),
        ((), "returned tuple"),
        ("", "returned str"),
        ([1.0], "non-empty sequence of tensors"),
        (torch.zeros(2, requires_grad=True), "shape \\[2\\]"),
        (torch.zeros(()), "does not depend on anything that requires grad"),
    ],
)
def test_a_loss_that_is_none_is_refused_by_the_fallback(wrong: Any, message: str) -> None:
    with auto(nn.Sequential(nn.Linear(WIDTH, WIDTH))) as pipe:
        with pytest.raises(LossError, match=message) as caught:
            pipe.forward_backward((torch.randn(6, WIDTH),), loss_fn=lambda outputs, label: wrong)
        assert "microbatch 0, phase loss_fn" in note_of(caught.value)


def test_no_run_config_is_the_models_own() -> None:
    x = torch.randn(6, WIDTH)
    for wrap in (lambda model: RoundPipe(model, devices=["cpu"]), auto):
        with wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH))) as pipe:
            pipe.forward_backward((x,), loss_fn=square, run_config=None)
            expected = pipe(x)
            torch.testing.assert_close(pipe(x, roundpipe_run_config=None), expected)


def test_no_run_config_where_the_fallback_takes_the_call() -> None:
    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return y if y.sum() < 1e9 else x

    x = torch.randn(6, WIDTH)
    options = RoundPipeRunConfig(num_microbatch=2, split_input=lambda args, kwargs, number: ([args] * 2, [kwargs] * 2))
    with compile(Decides(), devices=["cpu"], model_run_config=options) as pipe, pytest.warns(UserWarning):
        pipe.forward_backward((x,), loss_fn=square, run_config=None)
