"""The private parts of torch that the fake world stands on; a failure here says which one changed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from roundpipe.fx.counting import Tally
from roundpipe.fx.fakes import code_on_fakes, is_fake, is_of_no_world, real_world
from roundpipe.fx.sizes import expression_of, flat_tensors
from roundpipe.fx.world import FakeWorld


class Tied(nn.Module):
    """Two layers with one weight, a buffer, and a module kept in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(4))
        self.kept = [self.first]
        self.log: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.scale


def world_of(model: nn.Module, x: torch.Tensor) -> FakeWorld:
    return FakeWorld(model, ((), {"x": x}))


def test_the_twin_has_fakes_and_the_model_has_not() -> None:
    model = Tied()
    world = world_of(model, torch.randn(3, 4))
    twin = world.twin
    assert isinstance(twin, Tied) and twin is not model
    assert is_fake(twin.first.weight) and isinstance(twin.first.weight, nn.Parameter)
    assert twin.first.weight is twin.second.weight and twin.first.weight.requires_grad
    assert twin.kept[0] is twin.first and twin.log is not model.log
    assert not is_fake(model.first.weight)
    assert world.name_of[twin.second.weight] == "first.weight" == world.name_of[model.first.weight]


def test_sizes_are_symbols_that_assume_nothing() -> None:
    world = world_of(Tied(), torch.randn(1, 4))
    (x,) = [world.arguments[1]["x"]]
    assert isinstance(x.shape[0], torch.SymInt) and x.shape[1] == 4
    world.shapes.in_glue = lambda: True
    assert not world.shapes.glue_guards
    assert x.shape[0] == 1
    assert [str(guard) for guard in world.shapes.glue_guards] == [f"Eq({world.inputs[0].sizes[0]}, 1)"]


def test_integer_inputs_are_dynamic_throughout() -> None:
    world = world_of(Tied(), torch.ones(2, 3, dtype=torch.long))
    assert all(isinstance(size, torch.SymInt) for size in world.arguments[1]["x"].shape)


def test_equal_numbers_are_different_sizes() -> None:
    world = FakeWorld(Tied(), ((torch.ones(5, 3), torch.ones(5, 3)), {}))
    first, second = world.arguments[0]
    assert expression_of(first.shape[0]) != expression_of(second.shape[0])


def test_an_operators_question_is_not_glue() -> None:
    world = FakeWorld(Tied(), ((torch.ones(5, 3), torch.ones(5, 3)), {}))
    with world.entered():
        first, second = world.arguments[0]
        assert (first + second).shape[1] == 3
    assert world.shapes.size_assumptions() and not world.shapes.glue_guards


def test_the_forward_runs_on_fakes_and_reality_is_near() -> None:
    world = world_of(Tied(), torch.randn(3, 4))
    with world.entered():
        out = world.twin(world.arguments[1]["x"])
        assert is_fake(out)
        with real_world():
            assert not is_fake(torch.ones(2))
    assert expression_of(out.shape[0]) == world.inputs[0].sizes[0]


def test_a_model_anywhere_is_on_the_cpu_here() -> None:
    with torch.device("meta"):
        model = Tied()
    world = world_of(model, torch.randn(3, 4))
    assert world.twin.first.weight.device.type == "cpu" and model.first.weight.is_meta


RECURRENT: dict[str, Callable[..., nn.Module]] = {
    "tanh": nn.RNN,
    "relu": partial(nn.RNN, nonlinearity="relu"),
    "gru": nn.GRU,
    "gru both ways": partial(nn.GRU, bidirectional=True, dropout=0.1),
    "lstm": nn.LSTM,
    "lstm both ways without biases": partial(nn.LSTM, bidirectional=True, bias=False),
    "lstm with projections": partial(nn.LSTM, proj_size=3, bidirectional=True),
}


@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("build", RECURRENT.values(), ids=RECURRENT)
def test_recurrent_layers_make_shapes_and_gradients_as_on_real_tensors(
    build: Callable[..., nn.Module], is_trained: bool
) -> None:
    for form, batch_first in (((5, 3, 4), False), ((3, 5, 4), True), ((5, 4), False)):
        layer, real = build(4, 6, num_layers=2, batch_first=batch_first), torch.randn(form, requires_grad=is_trained)
        world = FakeWorld(layer, ((real,), {}))
        with world.entered(), torch.set_grad_enabled(is_trained):
            found = world.twin(*world.arguments[0])
            outputs = flat_tensors(found)
            if is_trained:
                sum(each.sum() for each in outputs).backward()
        with torch.set_grad_enabled(is_trained):
            expected = flat_tensors(layer(real))
        assert [(each.shape, each.requires_grad) for each in outputs] == [
            (each.shape, each.requires_grad) for each in expected
        ]
        assert all((weight.grad is not None) is is_trained for weight in world.twin.parameters())


@pytest.mark.parametrize("build", RECURRENT.values(), ids=RECURRENT)
def test_recurrent_layers_cost_what_their_steps_cost_at_once(build: Callable[..., nn.Module]) -> None:
    layer = build(4, 6, num_layers=2)
    tallies = []
    for num_steps in (2, 300):
        world = FakeWorld(layer, ((torch.randn(num_steps, 3, 4),), {}))
        with world.entered(), Tally(world.arguments[0]) as tally:
            world.twin(*world.arguments[0])
        tallies.append(tally)
    few, many = tallies
    assert few.num_kernels == many.num_kernels
    weights = [each.numel() for name, each in layer.named_parameters() if "weight" in name]
    assert few.flops >= 2 * 2 * 3 * sum(weights)
    assert many.flops >= 150 * 0.99 * few.flops


def test_packed_sequences_and_recurrent_layers_on_real_tensors_are_torchs() -> None:
    torch.manual_seed(0)
    gru = nn.GRU(4, 6)
    real = [torch.randn(3, 4), torch.randn(2, 4)]
    packed = nn.utils.rnn.pack_sequence(real)
    expected = gru(real[0])[0], gru(packed)[0].data
    with code_on_fakes():
        torch.testing.assert_close((gru(real[0])[0], gru(packed)[0].data), expected)


@pytest.mark.parametrize(("p", "train"), [(0.0, True), (0.5, False), (0.5, True)])
def test_dropout_shares_memory_where_it_does_on_real_tensors(p: float, train: bool) -> None:
    original = dict(torch.ops.aten.dropout.default.py_kernels)
    for real in (torch.randn(3, 4), torch.randn(3, 4, requires_grad=True)):
        world = world_of(Tied(), real)
        with world.entered():
            x = world.arguments[1]["x"]
            shares = torch.nn.functional.dropout(x, p, train).untyped_storage()._cdata == x.untyped_storage()._cdata
        dropped = torch.nn.functional.dropout(real, p, train)
        assert shares == (dropped.untyped_storage()._cdata == real.untyped_storage()._cdata)
    assert torch.ops.aten.dropout.default.py_kernels == original


def test_tensors_of_no_world_are_those_with_data_inside_of_one() -> None:
    outside, world = torch.zeros(2), world_of(Tied(), torch.randn(3, 4))
    assert not is_of_no_world(outside)
    with world.entered():
        assert is_of_no_world(outside)
        assert not is_of_no_world(world.twin.first.weight)
        assert not is_of_no_world(torch.empty(2, device="meta"))
        with real_world():
            assert not is_of_no_world(outside)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_grouped_products_run_on_fakes_in_all_types_that_data_may_have(dtype: torch.dtype) -> None:
    world = world_of(Tied(), torch.randn(3, 4))
    with world.entered():
        x = torch.ones(16, 32, dtype=dtype, requires_grad=True)
        weights = torch.ones(4, 32, 16, dtype=dtype, requires_grad=True)
        ends = torch.arange(4, 20, 4, dtype=torch.int32)
        out = torch._grouped_mm(x, weights, offs=ends)  # private: the public function is new in torch 2.10
        out.backward(torch.ones_like(out))
    assert is_fake(out) and out.dtype is dtype and out.shape == (16, 16)
    assert x.grad is not None and x.grad.dtype is dtype and weights.grad is not None
    assert weights.grad.shape == weights.shape


def test_losses_of_each_sample_have_its_shape() -> None:
    """Torch dispatches fakes on meta otherwise, where its Python for this one returns a mean."""
    scores, classes = torch.randn(5, 3), torch.randint(3, (5,))
    world = FakeWorld(Tied(), ((scores, classes), {}))
    with world.entered():
        losses = torch.nn.functional.cross_entropy(*world.arguments[0], reduction="none")
    assert losses.shape == (world.arguments[0][0].shape[0],)
