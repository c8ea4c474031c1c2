"""What once differed from eager without a word, with every kind of wrapper: equal now, or refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig
from tests.equality import assert_same_gradients, assert_same_state, difference

DTYPE, SIZE, LR, NUM_MICROBATCHES = torch.float64, 6, 0.1, 2
DEVICES = ["cpu"] * 2


class Model(nn.Module):
    """Two linear layers; what a test is about stands between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.between(self.first(x)))

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)


class Untraceable(Model):
    """Its own forward needs data."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return super().between(x) * (2.0 if x.sum().item() > 1e9 else 1.0)


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, SIZE, dtype=DTYPE, generator=torch.Generator().manual_seed(seed))


def compiled(model: nn.Module, *args: Any) -> RoundPipe:
    return roundpipe.compile(model, example_args=args or (batch(),), devices=DEVICES, model_run_config=CONFIG)


def by_hand(model: nn.Module, *args: Any) -> RoundPipe:
    return RoundPipe(model, devices=DEVICES, model_run_config=CONFIG)


def in_parts(model: nn.Module, *args: Any) -> RoundPipe:
    options: dict[str, Any] = {"use_sequential_preset": False, "lower_threshold": 1, "devices": DEVICES}
    return roundpipe.wrap_model_to_roundpipe(model, model_run_config=CONFIG, **options)


def fallen_back(model: nn.Module, *args: Any) -> RoundPipe:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return roundpipe.compile(
            model, example_args=args or (batch(),), devices=DEVICES, model_run_config=CONFIG, lower_threshold=1
        )


CONFIG = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCHES)
WRAPPERS: dict[str, tuple[type[nn.Module], Callable[..., RoundPipe]]] = {
    "compiled": (Model, compiled),
    "by hand": (Model, by_hand),
    "in parts": (Model, in_parts),
    "fallen back": (Untraceable, fallen_back),
}
STEPS = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
KINDS = pytest.mark.parametrize("kind", WRAPPERS)


def pair(kind: str) -> tuple[RoundPipe, nn.Module]:
    """A wrapper, and the same model for eager."""
    make, wrap = WRAPPERS[kind]
    torch.manual_seed(0)
    model = make().to(DTYPE)
    reference = copy.deepcopy(model)
    return wrap(model), reference


def square(outputs: torch.Tensor, label: Any) -> torch.Tensor:
    return outputs.square().sum() if label is None else ((outputs - label) ** 2).sum()


def eager_round(model: nn.Module, x: torch.Tensor, label: torch.Tensor | None = None) -> torch.Tensor:
    labels = [None] * NUM_MICROBATCHES if label is None else label.chunk(NUM_MICROBATCHES)
    total = torch.zeros((), dtype=DTYPE)
    for piece, target in zip(x.chunk(NUM_MICROBATCHES), labels, strict=True):
        loss = square(model(piece), target)
        loss.backward(retain_graph=label is not None)  # a teacher's graph serves all
        total += loss.detach()
    return total


@KINDS
def test_gradients_flow_to_labels(kind: str) -> None:
    pipe, reference = pair(kind)
    with pipe:
        teachers = nn.Linear(SIZE, SIZE).to(DTYPE), nn.Linear(SIZE, SIZE).to(DTYPE)
        teachers[1].load_state_dict(teachers[0].state_dict())
        for seed in range(3):
            found = pipe.forward_backward((batch(),), label=teachers[0](batch(seed)), loss_fn=square)
            assert difference(found, eager_round(reference, batch(), teachers[1](batch(seed)))) <= 1e-12
        pipe.synchronize()
        assert_same_gradients(pipe.model, reference, 1e-12)
        assert_same_gradients(*teachers, 1e-12)


@KINDS
@STEPS
def test_a_parameter_frozen_between_backward_and_step(kind: str, is_async: bool) -> None:
    """As in eager, the optimizer takes the gradient that is there, and later rounds add none."""
    pipe, reference = pair(kind)
    with pipe:
        ours = torch.optim.SGD(pipe.optim_parameters(), LR)
        theirs = torch.optim.SGD(reference.parameters(), LR)
        pipe.forward_backward((batch(),), loss_fn=square)
        eager_round(reference, batch())
        for model in (pipe.model, reference):
            model.second.weight.requires_grad_(False)
        pipe.step(lambda: (ours.step(), ours.zero_grad()), is_async=is_async)
        theirs.step()
        theirs.zero_grad()
        pipe.synchronize()
        assert_same_state(pipe.model, reference, 1e-12)
        for model in (pipe.model, reference):
            model.first.bias.requires_grad_(False)
        assert difference(pipe.forward_backward((batch(1),), loss_fn=square), eager_round(reference, batch(1))) <= 1e-12
        for model in (pipe.model, reference):
            model.second.weight.requires_grad_(True)
        pipe.step(lambda: (ours.step(), ours.zero_grad()), is_async=is_async)
        theirs.step()
        theirs.zero_grad()
        pipe.synchronize()
        assert_same_state(pipe.model, reference, 1e-12)


class Scaled(Model):
    """Takes a buffer into account, once it is there."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        scale = getattr(self, "scale", None)
        return x if scale is None else x * scale


class UntraceableScaled(Scaled):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return super().between(x) * (2.0 if x.sum().item() > 1e9 else 1.0)


@KINDS
@pytest.mark.parametrize("through", ["the model", "the wrapper", "a part"])
def test_a_buffer_registered_later(kind: str, through: str) -> None:
    wrap = WRAPPERS[kind][1]
    model = (UntraceableScaled if kind == "fallen back" else Scaled)().to(DTYPE)
    if through == "a part":
        _scale_outputs(model.first)
    reference = copy.deepcopy(model)
    with wrap(model) as pipe:
        _compare(pipe, reference)
        value = torch.full((SIZE,), 3.0, dtype=DTYPE)
        target = {"the model": model, "the wrapper": pipe, "a part": model.first}[through]
        target.register_buffer("scale", value.clone())
        (reference.first if through == "a part" else reference).register_buffer("scale", value.clone())
        _compare(pipe, reference)
        assert list(pipe.state_dict()) == list(reference.state_dict())
        for each in (model, reference):
            (each.first if through == "a part" else each).scale.mul_(2)
        _compare(pipe, reference)


class _Scaling(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = getattr(self, "scale", None)
        return super().forward(x) if scale is None else super().forward(x) * scale


def _scale_outputs(linear: nn.Module) -> None:
    linear.__class__ = _Scaling


def _compare(pipe: RoundPipe, reference: nn.Module) -> None:
    pipe.zero_grad()
    reference.zero_grad()
    with torch.no_grad():
        assert difference(pipe(batch()), reference(batch())) <= 1e-12
    assert difference(pipe.forward_backward((batch(),), loss_fn=square), eager_round(reference, batch())) <= 1e-12
    pipe.synchronize()
    assert_same_gradients(pipe.model, reference, 1e-12)


class Attends(nn.Module):
    """Takes queries, and keys that may be the same object, and maybe writes the queries."""

    def __init__(self, writes: bool = False, depth: int = 0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.writes, self.depth = writes, depth

    def forward(self, query: torch.Tensor, key: Any) -> torch.Tensor:
        key = key[0] if self.depth else key
        if self.writes:
            query.mul_(2.0)
        return self.second(torch.tanh(self.first(query))) + key


@pytest.mark.parametrize("kind", ["compiled", "by hand", "in parts"])
@pytest.mark.parametrize("alias", ["itself", "in a list", "a view"])
@pytest.mark.parametrize("writes", [False, True], ids=["reads", "writes"])
def test_arguments_that_are_one_memory(kind: str, alias: str, writes: bool) -> None:
    """Splitting must not part what the forward writes from what it then reads; or the call is refused."""
    model = Attends(writes, depth=1 if alias == "in a list" else 0).to(DTYPE)
    reference = copy.deepcopy(model)

    def arguments() -> tuple[Any, Any]:
        x = batch()
        return x, {"itself": x, "in a list": [x], "a view": x[:]}[alias]

    expected = _eager(reference, *arguments())
    example = (batch(1), [batch(2)] if alias == "in a list" else batch(2))
    with WRAPPERS[kind][1](model, *example) as pipe:
        try:
            found = pipe(*arguments())
        except roundpipe.ConfigError as error:
            assert writes and "two arguments share memory" in str(error)
            with pytest.raises(roundpipe.ConfigError, match="two arguments share memory"):
                pipe(*arguments())
            found = pipe(batch(), [batch()] if alias == "in a list" else batch())  # what is refused can be given apart
            expected = _eager(reference, batch(), [batch()] if alias == "in a list" else batch())
        assert difference(found, expected) <= 1e-12


def _eager(model: nn.Module, x: Any, other: Any) -> torch.Tensor:
    return torch.cat([model(*_piece((x, other), index)) for index in range(NUM_MICROBATCHES)])


def _piece(arguments: tuple[Any, Any], index: int) -> tuple[Any, Any]:
    x, other = arguments
    rows = slice(index * 2, index * 2 + 2)
    return x[rows], [other[0][rows]] if isinstance(other, list) else other[rows]


class Counts(nn.Linear):
    """A part that keeps what its calls leave: a number, a list, a tensor."""

    def __init__(self, size: int, other: int) -> None:
        super().__init__(size, other)
        self.calls, self.seen = 0, []
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(len(x))
        self.last = x.detach().sum()
        return super().forward(x) * self.calls


@pytest.mark.parametrize("kind", ["compiled", "in parts", "fallen back"])
def test_state_that_a_part_writes(kind: str) -> None:
    """From its first call on, each forward counts once, as in eager."""
    make, wrap = WRAPPERS[kind]
    torch.manual_seed(0)
    model = make()
    model.first = Counts(SIZE, SIZE)
    model.to(DTYPE)
    reference = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with wrap(model) as pipe:
            for seed in range(3):
                found = pipe.forward_backward((batch(seed),), loss_fn=square)
                assert difference(found, eager_round(reference, batch(seed))) <= 1e-12
            pipe.synchronize()
            assert_same_gradients(pipe.model, reference, 1e-12)
            assert (model.first.calls, model.first.seen) == (reference.first.calls, reference.first.seen)
            assert difference(model.first.last, reference.first.last) <= 1e-12


class AsksForGradients(nn.Linear):
    """What it computes depends on the mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2.0 if torch.is_grad_enabled() else 1.0)


class AsksItsArgument(nn.Linear):
    """Likewise, by what it is given: in eager, the outputs of something that is trained."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2.0 if x.requires_grad else 1.0) + (1.0 if x.grad_fn is None else 0.0)


@pytest.mark.parametrize("asking", [AsksForGradients, AsksItsArgument])
@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_a_layer_by_hand_that_asks_for_the_mode(asking: type[nn.Linear], grain: Any, frozen: bool) -> None:
    """In a forward stage, whose values a recomputation repeats, it gets the answer that the caller's mode gives."""
    layers = [nn.Linear(SIZE, SIZE), asking(SIZE, SIZE), nn.Linear(SIZE, SIZE), asking(SIZE, SIZE)]
    model = nn.Sequential(*layers).to(DTYPE)
    model[1].requires_grad_(not frozen)
    reference = copy.deepcopy(model)
    plan = roundpipe.ExecutePlan(forward=[(0, 2), (2, 3)], fused=(3, 4), backward=[(2, 3), (0, 2)])
    apart = roundpipe.ExecutePlan(forward=[(0, 2), (2, 4)], backward=[(2, 4), (0, 2)])
    config = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCHES, recompute_grain=grain, execute_plan=plan)
    with RoundPipe(model, devices=DEVICES, model_run_config=config) as pipe:
        for _ in range(2):
            _compare(pipe, reference)
        x = batch().requires_grad_()
        pipe.zero_grad()
        reference.zero_grad()
        found = pipe(x, roundpipe_run_config=RoundPipeRunConfig(execute_plan=apart))
        expected = reference(x)
        assert difference(found, expected) <= 1e-12
        found.square().sum().backward()
        ours, x.grad = x.grad, None
        expected.square().sum().backward()
        assert difference(ours, x.grad) <= 1e-12
        pipe.synchronize()
        assert_same_gradients(model, reference, 1e-12)
