"""State that calls change for later ones, and arguments that they write."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import roundpipe
from roundpipe.fx.guards.guards import Guards
from roundpipe.fx.passes.codegen import generate
from roundpipe.fx.passes.cost import measure
from roundpipe.fx.passes.partition import partition
from roundpipe.fx.trace.tracer import trace
from tests.equality import assert_same_gradients
from tests.fx.against_eager import check, vectors
from tests.fx.test_shapes import Layers


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
        assert pipe._runner.fallback is not None  # its table is of the latest trace
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
    assert "global OUTPUT_DTYPE is torch.float64, traced with torch.float32" in str(guards.check((), vectors(3, 6)))


step = 0


class HasAnAttributeNamedAsAGlobal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(x)


def test_a_global_of_the_same_name_as_an_attribute_is_not_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    guards = trace(HasAnAttributeNamedAsAGlobal(), (), vectors(3, 6)).guards
    assert isinstance(guards, Guards)
    monkeypatch.setitem(globals(), "step", 1)  # as a loop in the file of the model does
    assert guards.check((), vectors(3, 6)) is None
