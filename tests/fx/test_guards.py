"""A trace is used only for calls that would record it again; a refusal says what varied."""

from __future__ import annotations

import array
import dataclasses
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe
from roundpipe.core import trees
from roundpipe.fx.guards.guards import Failure, Guards
from roundpipe.fx.trace.tracer import trace
from tests.fx.models import CASES, MaskDecides, ResNet, causal_inputs, linears, llama, vectors
from tests.fx.replay import eager_difference


def guards_of(model: nn.Module, inputs: dict[str, Any]) -> Guards:
    guards = trace(model, (), inputs).guards
    assert isinstance(guards, Guards)
    return guards


def failure_of(guards: Guards, inputs: dict[str, Any]) -> Failure:
    failure = guards.check((), inputs)
    assert isinstance(failure, Failure)
    return failure


class ScaledLinears(nn.Module):
    """Linear layers with a number and a flag among the arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()

    def forward(self, x: torch.Tensor, scale: float = 1.0, extra: Any = None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * scale
        return x if extra is None else x + extra


def test_plain_values_and_structure() -> None:
    guards = guards_of(ScaledLinears(), {"x": torch.randn(4, 16), "scale": 0.5})
    assert guards.check((torch.randn(2, 16), 0.5), {}) is None
    assert "scale is 0.25, traced with 0.5" in str(failure_of(guards, {"x": torch.randn(4, 16), "scale": 0.25}))
    assert "extra" in str(failure_of(guards, {"x": torch.randn(4, 16), "scale": 0.5, "extra": torch.ones(1)}))
    assert "float64" in str(failure_of(guards, {"x": torch.randn(4, 16).double(), "scale": 0.5}))
    assert "3 dimensions" in str(failure_of(guards, {"x": torch.randn(4, 4, 16), "scale": 0.5}))


@dataclasses.dataclass
class Options:
    """An argument with a tensor."""

    bias: torch.Tensor


class Further(Options):
    """The same of another class."""


class LooksAtContainers(nn.Module):
    """Decides by the classes of its arguments, and by what is an empty container."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()

    def forward(self, x: torch.Tensor, extra: Any = None, options: Any = None) -> torch.Tensor:
        x = self.layers[0](x) * (2 if extra is not None else 1)
        for kind, factor in ((tuple, 3), (dict, 5), (Further, 7)):
            x = x * (factor if isinstance(extra, kind) or isinstance(options, kind) else 1)
        if isinstance(options, dict):
            x = x * (11 if options.get("more") is not None else 1)
            x = x * (13 if isinstance(options.get("more"), tuple) else 1)
        return self.layers[1](x)


def test_containers_of_arguments() -> None:
    bias = torch.ones(16)
    variants: list[tuple[dict[str, Any], str]] = [
        ({}, "extra"),
        ({"extra": []}, "extra is empty list, traced with not given"),
        ({"extra": ()}, "extra is empty tuple"),
        ({"extra": {}}, "extra is empty dict"),
        ({"extra": [bias]}, "extra[0]"),
        ({"extra": (bias,)}, "extra"),
        ({"options": Options(bias)}, "options"),
        ({"options": Further(bias)}, "options"),
        ({"options": {"bias": bias}}, "options"),
        ({"options": {"bias": bias, "more": []}}, "options"),
        ({"options": {"bias": bias, "more": ()}}, "options"),
    ]
    model = LooksAtContainers()
    first = guards_of(model, vectors(4, 0))
    with roundpipe.compile(model, devices=["cpu"]) as pipe, torch.no_grad():
        for inputs in (vectors(4, 0), vectors(6, 1)):
            for extra, words in variants:
                expected = model(**inputs, **extra)  # another branch is another factor
                torch.testing.assert_close(pipe(**inputs, **extra), expected, rtol=1e-4, atol=1e-3)
                if extra:
                    assert words in str(failure_of(first, {**inputs, **extra}))
        assert pipe.trace_count == len(variants)  # each once


class ScaledByHeld(nn.Module):
    """Takes a number from something that can be written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()

    def forward(self, x: torch.Tensor, held: Any) -> torch.Tensor:
        return self.layers[1](self.layers[0](x) * float(max(held)))


@pytest.mark.parametrize(
    ("held", "write"),
    [
        (np.ones(2), lambda held: held.fill(3.0)),
        (array.array("d", [1.0]), lambda held: held.__setitem__(0, 3.0)),
        ({1.0}, lambda held: held.add(3.0)),
        (deque([1.0]), lambda held: held.append(3.0)),
    ],
)
def test_arguments_that_are_written_in_place(held: Any, write: Callable[[Any], object]) -> None:
    model, inputs = ScaledByHeld(), vectors(4, 0)
    guards = guards_of(model, {**inputs, "held": held})
    with roundpipe.compile(model, devices=["cpu"]) as pipe, torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(pipe(**inputs, held=held), model(**inputs, held=held), rtol=1e-4, atol=1e-5)
            assert pipe.trace_count == 1
        assert guards.check((), {**inputs, "held": held}) is None
        write(held)
        torch.testing.assert_close(pipe(**inputs, held=held), model(**inputs, held=held), rtol=1e-4, atol=1e-5)
    assert "held was written in place" in str(failure_of(guards, {**inputs, "held": held}))


def test_sizes_that_are_plain_numbers_are_named() -> None:
    guards = guards_of(ResNet(), {"x": torch.randn(2, 3, 8, 8)})
    failure = failure_of(guards, {"x": torch.randn(2, 3, 12, 8)})
    assert "dimension 2 of x is 12, traced with 8" in failure.message
    assert [dim for _, dim in failure.dimensions] == [2]
    traced = trace(ResNet(), (), {"x": torch.randn(2, 3, 8, 8)}, dynamic=failure.dimensions)
    assert traced.guards is not None
    assert traced.guards.check((), {"x": torch.randn(3, 3, 12, 8)}) is None
    assert eager_difference(traced, {"x": torch.randn(3, 3, 12, 8)}, lambda out: out.pow(2).sum())[0] < 1e-5


def test_an_empty_batch_is_refused() -> None:
    assert "empty" in str(failure_of(guards_of(ScaledLinears(), vectors(4, 0)), vectors(0, 0)))


def test_flags() -> None:
    model = ScaledLinears()
    guards = guards_of(model, vectors(4, 0))
    model.eval()
    assert "eval mode" in str(failure_of(guards, vectors(4, 0)))
    model.train()
    model.layers[1].weight.requires_grad_(False)
    assert "layers.1.weight" in str(failure_of(guards, vectors(4, 0)))
    model.layers[1].weight.requires_grad_(True)
    with torch.no_grad():
        assert guards.check((), vectors(4, 0)) is None  # none of its code asked
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "autocast on cpu" in str(failure_of(guards, vectors(4, 0)))
    assert guards.check((), vectors(4, 0)) is None


def test_data_that_decided() -> None:
    model = MaskDecides()
    traced = trace(model, (), {"x": torch.randn(4, 16), "mask": torch.ones(4, 16)})
    assert isinstance(traced.guards, Guards)
    assert traced.guards.check((), {"x": torch.randn(2, 16), "mask": torch.ones(2, 16)}) is None
    failure = failure_of(traced.guards, {"x": torch.randn(4, 16), "mask": torch.zeros(4, 16)})
    assert "data of mask" in failure.message and "models.py" in failure.message
    other = trace(model, (), {"x": torch.randn(4, 16), "mask": torch.zeros(4, 16)})
    assert len(other.body) > len(traced.body)


class AsksForOne(nn.Module):
    """Takes another path for a single sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        both = self.layers[0](x) + self.layers[1](y)  # an operator assumes that neither size is 1
        if x.shape[0] == 1:
            both = both * 2
        return both


def test_what_glue_asked_must_hold_even_if_an_operator_asked_first() -> None:
    model = AsksForOne()
    traced = trace(model, (), {"x": torch.randn(4, 16), "y": torch.randn(4, 16)})
    assert isinstance(traced.guards, Guards)
    assert traced.guards.check((), {"x": torch.randn(3, 16), "y": torch.randn(3, 16)}) is None
    failure = failure_of(traced.guards, {"x": torch.randn(1, 16), "y": torch.randn(1, 16)})
    assert "test_guards.py" in failure.message and "size(0) is 1" in failure.message


class Broadcasts(nn.Module):
    """Broadcasting decides a shape: right for equal sizes, another shape if one of them is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)[:, None] * F.one_hot(ids, 16)


def test_operators_assumptions_are_verified_and_remembered() -> None:
    guards = guards_of(llama(), causal_inputs(4, 16))
    assert guards.num_variants == 1
    assert guards.check((), causal_inputs(1, 16)) is None
    assert guards.num_variants == 2
    assert guards.check((), causal_inputs(1, 23)) is None
    assert guards.num_variants == 2
    traced = trace(Broadcasts(), (), {"x": torch.randn(4, 16), "ids": torch.randint(0, 16, (4, 5))})
    assert isinstance(traced.guards, Guards)
    assert traced.guards.check((), {"x": torch.randn(1, 16), "ids": torch.randint(0, 16, (1, 5))}) is None
    unequal = {"x": torch.randn(4, 16), "ids": torch.randint(0, 16, (1, 5))}
    assert "size(0)" in str(failure_of(traced.guards, unequal))


def test_python_results_of_operators_must_hold() -> None:
    class AsksContiguous(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = linears()

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = F.one_hot(ids, 16).float().transpose(0, 1)
            if not x.is_contiguous():
                x = x * 2
            return self.layers[0](x)

    traced = trace(AsksContiguous(), (), {"ids": torch.randint(0, 16, (4, 5))})
    assert traced.guards is not None
    inputs = {"ids": torch.randint(0, 16, (1, 5))}
    if traced.guards.check((), inputs) is None:
        assert eager_difference(traced, inputs, lambda out: out.sum())[0] < 1e-5


def test_a_loop_over_a_size_fixes_it() -> None:
    class Loops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = linears()

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = F.one_hot(ids, 16).float()
            return sum(self.layers[0](x[:, index]) for index in range(ids.shape[1]))

    guards = guards_of(Loops(), {"ids": torch.randint(0, 16, (4, 5))})
    assert guards.check((), {"ids": torch.randint(0, 16, (3, 5))}) is None
    assert "ids.size(1) is 6" in str(failure_of(guards, {"ids": torch.randint(0, 16, (4, 6))}))


def test_a_small_module_that_loops_over_a_size_stays_whole() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(16, 16)
            self.out = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = torch.zeros_like(x[:, 0])
            for index in range(x.shape[1]):
                state = torch.tanh(self.cell(state) + x[:, index])
            return self.out(state)[:, None] + x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Recurrent() for _ in range(3))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = F.one_hot(ids, 16).float()
            for layer in self.layers:
                x = layer(x)
            return x

    traced = trace(Model(), (), {"ids": torch.randint(0, 16, (4, 5))})
    assert traced.guards is not None
    inputs = {"ids": torch.randint(0, 16, (3, 9))}
    assert traced.guards.check((), inputs) is None
    assert eager_difference(traced, inputs, lambda out: out.pow(2).sum())[0] < 1e-5


def test_a_buffer_that_decides_and_changes_is_refused() -> None:
    class Warms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = linears()
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x) if self.steps < 2 else self.layers[1](x)
            self.steps += 1
            return x

    with pytest.raises(RuntimeError, match="steps"):
        trace(Warms(), (), vectors(4, 0))


def test_a_buffer_that_decides_is_read_again() -> None:
    class Switches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = linears()
            self.register_buffer("left", torch.tensor(True))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0](x) if self.left else self.layers[1](x)

    model = Switches()
    guards = guards_of(model, vectors(4, 0))
    assert guards.check((), vectors(3, 0)) is None
    model.left.fill_(False)
    assert "data of a buffer" in str(failure_of(guards, vectors(3, 0)))


def test_a_known_shape_is_checked_fast() -> None:
    model = llama(12)
    inputs = causal_inputs(4, 16)
    del inputs["attention_mask"]
    guards = guards_of(model, inputs)
    guards.check((), inputs)
    times = []
    for _ in range(200):
        start = time.perf_counter()
        guards.check((), inputs)
        times.append(time.perf_counter() - start)
    assert min(times) < 1e-3, f"{min(times) * 1e6:.0f} us"


def test_every_assumption_is_described() -> None:
    words = "\n".join(guards_of(llama(), causal_inputs(4, 16)).describe())
    assert "__bool__ of data gives True" in words


def test_inputs_keep_their_paths() -> None:
    case = CASES["many_outputs"]
    traced = trace(case.build(), (), case.inputs(4, 0))
    arguments = ((), case.inputs(2, 0))
    assert [trees.get(arguments, path).shape[0] for path in traced.input_paths.values()] == [2, 2]


def test_reads_see_earlier_writes_in_place_and_not_later_ones() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = linears()

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            mask = mask.clone()
            first = bool(mask.all())
            mask[:, 0] = 1
            second = bool(mask.all())
            x = self.layers[0](x) if first else self.layers[1](x)
            x = self.layers[2](x) if second else self.layers[3](x)
            mask[:, 1:] = x[:, 1:]  # an activation: nobody can read the mask from here on
            return x * mask

    def inputs(*zeros: tuple[int, int]) -> dict[str, torch.Tensor]:
        mask = torch.ones(4, 16)
        for index in zeros:
            mask[index] = 0
        return {"x": torch.randn(4, 16), "mask": mask}

    traced = trace(Writes(), (), inputs((1, 0)))
    assert [n.target for n in traced.body if n.op == "call_module"] == ["layers.1", "layers.2"]
    assert traced.guards is not None
    assert traced.guards.check((), inputs((2, 0))) is None
    assert traced.guards.check((), inputs()) is not None
    assert traced.guards.check((), inputs((2, 3))) is not None
    assert eager_difference(traced, inputs((3, 0)), lambda out: out.sum())[0] < 1e-5


def test_a_scripted_module_with_weights_is_a_leaf_whose_weights_are_watched() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()))
    model = nn.Sequential(nn.Linear(8, 8), scripted, nn.Linear(8, 8))
    traced = trace(model, (torch.randn(4, 8),), {})
    assert list(traced.opaque) == ["1"] and traced.guards is not None
    assert traced.guards.check((torch.randn(6, 8),), {}) is None
    scripted.double()
    failure = traced.guards.check((torch.randn(6, 8),), {})
    assert "1.0.weight has dtype torch.float64 now, traced with dtype torch.float32" in str(failure)
    scripted.float()
    model.get_submodule("1.1").running_mean = torch.zeros(8, dtype=torch.float64)
    assert "1.1.running_mean has dtype torch.float64 now" in str(traced.guards.check((torch.randn(6, 8),), {}))
