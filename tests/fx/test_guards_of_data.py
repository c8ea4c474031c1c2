"""A trace whose path sizes, data or a buffer decided is used again only where they decide the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from roundpipe.fx.guards.guards import Guards
from roundpipe.fx.trace.tracer import trace
from tests.fx.cases_guards import failure_of, guards_of
from tests.fx.inputs import causal_inputs, vectors
from tests.fx.models import llama
from tests.fx.modules import MaskDecides, linears
from tests.fx.replay import eager_difference, replay


def test_data_that_decided() -> None:
    model = MaskDecides()
    traced = trace(model, (), {"x": torch.randn(4, 16), "mask": torch.ones(4, 16)})
    assert isinstance(traced.guards, Guards)
    assert traced.guards.check((), {"x": torch.randn(2, 16), "mask": torch.ones(2, 16)}) is None
    failure = failure_of(traced.guards, {"x": torch.randn(4, 16), "mask": torch.zeros(4, 16)})
    assert "data of mask" in failure.message and "modules.py" in failure.message
    other = trace(model, (), {"x": torch.randn(4, 16), "mask": torch.zeros(4, 16)})
    assert len(other.body) > len(traced.body)


def test_a_batch_decides_for_its_pieces() -> None:
    model, x, mask = MaskDecides(), torch.randn(4, 16), torch.ones(4, 16)
    mask[0] = 0
    batch, wide = ((), {"x": x, "mask": mask}), ((), {"x": x[:, :8], "mask": mask})
    piece = {"x": x[2:], "mask": mask[2:]}
    by_itself, by_batch = (trace(model, (), piece, batch=each) for each in (None, batch))
    assert isinstance(by_itself.guards, Guards) and isinstance(by_batch.guards, Guards)
    assert len(by_batch.body) > len(by_itself.body)
    assert by_batch.guards.check((), piece, batch=batch) is None
    assert "data of mask" in failure_of(by_batch.guards, piece).message
    assert by_itself.guards.check((), piece) is None
    assert by_itself.guards.check((), piece, batch=batch) is not None
    assert by_itself.guards.check((), piece, batch=wide) is None  # a graph that does not serve it can't follow it


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
    assert "test_guards_of_data.py" in failure.message and "size(0) is 1" in failure.message


class Broadcasts(nn.Module):
    """Broadcasting decides a shape: right for equal sizes, another shape if one of them is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)[:, None] * F.one_hot(ids, 16)


def test_operators_assumptions_are_verified_and_remembered() -> None:
    guards = guards_of(llama(), causal_inputs(4, 16))
    assert len(guards._operators) == 1  # what is remembered shows only in the time that a check takes
    assert guards.check((), causal_inputs(1, 16)) is None
    assert len(guards._operators) == 2  # this one is new
    assert guards.check((), causal_inputs(1, 23)) is None
    assert len(guards._operators) == 2  # this one is not
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


ASKS: dict[str, Callable[[nn.Module], bool]] = {
    "hasattr": lambda module: hasattr(module, "offset"),
    "getattr": lambda module: getattr(module, "offset", None) is not None,
    "in": lambda module: "offset" in module._buffers,
}


@pytest.mark.parametrize("asks", ASKS.values(), ids=ASKS)
def test_a_buffer_that_comes_later_is_seen(asks: Callable[[nn.Module], bool]) -> None:
    class Shifts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = linears()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x)
            return x + self.offset if asks(self) else x

    model = nn.Sequential(Shifts(), Shifts())
    guards = trace(model, (vectors(4, 0)["x"],), {}).guards
    assert guards is not None and guards.check((vectors(3, 0)["x"],), {}) is None
    model[1].register_buffer("offset", torch.ones(16))
    assert "1.offset, a buffer, is new" in str(guards.check((vectors(3, 0)["x"],), {}))


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


class Cropped(nn.Module):
    """Cuts each sample to a size that a tensor has, without a word about it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        parts = [sample[: size[0] // 2, : size[1]] for sample, size in zip(self.layers(x), sizes, strict=True)]
        return torch.stack([part.mean() for part in parts])


def test_tensors_of_arguments_are_bounds_of_slices() -> None:
    model = Cropped()
    x, sizes = torch.randn(2, 6, 8), torch.tensor([[4, 8], [12, 3]])
    graph = trace(model, (x, sizes))
    assert not graph.opaque
    torch.testing.assert_close(replay(graph, x, sizes), model(x, sizes))
    assert failure_of(graph.guards, {"x": x, "sizes": sizes + 2}) is not None
    assert graph.guards.check((x, sizes), {}) is None
