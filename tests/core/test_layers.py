"""Modules as layers, layers as a chain, and what is known of them."""

import copy

import pytest
import torch
from torch import nn

from roundpipe import ConfigError, RoundPipe
from roundpipe.core.layers import FixedChain, LayerChain, LayerCost, LayerSpec, is_differentiable
from roundpipe.core.module_tree import weight_bytes_of
from roundpipe.wrappers.module_layers import chain_of_modules, may_draw_random


def test_a_chain_of_modules_is_the_modules_in_turn():
    modules = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)]
    chain = chain_of_modules([(str(i), module) for i, module in enumerate(modules)])
    given = torch.randn(5, 3)
    assert torch.equal(chain.run(given), nn.Sequential(*modules)(given))
    assert isinstance(chain, nn.Sequential) and len(chain) == 3
    assert [(spec.name, spec.reads, spec.makes) for spec in chain.specs] == [
        ("0", ("value_0",), ("value_1",)),
        ("1", ("value_1",), ("value_2",)),
        ("2", ("value_2",), ("value_3",)),
    ]
    assert chain.exit.reads == ("value_3",)
    assert [id(p) for p in chain.parameters()] == [id(p) for module in modules for p in module.parameters()]


def test_the_first_module_gets_all_arguments():
    class Add(nn.Module):
        def forward(self, one, other, *, factor=1):
            return one + other * factor

    chain = chain_of_modules([("add", Add()), ("abs", nn.Identity())])
    assert chain.run(torch.ones(1), torch.ones(1), factor=3) == 4


def test_submodules_keep_their_qualified_names():
    inner = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    (layer,) = chain_of_modules([("blocks.0", inner)])
    names = ["blocks.0", "blocks.0.0", "blocks.0.1", "blocks.0.1.0"]
    assert [name for name, _ in layer.named_modules() if name] == names
    (whole,) = chain_of_modules([("", inner)])
    assert [name for name, _ in whole.named_modules() if name] == ["0", "1", "1.0"]
    assert chain_of_modules([("", inner)]).specs[0].name == "Sequential"


def test_a_module_may_write_into_its_input():
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3))
    given = torch.randn(2, 3, requires_grad=True)
    reference = given.detach().clone().requires_grad_()
    with RoundPipe(model, devices=["cpu"]) as piped:
        piped(given).sum().backward()
    assert given.grad is not None
    model(reference * 1).sum().backward()
    assert torch.equal(given.grad, reference.grad)


def test_costs_of_a_chain_of_modules():
    shared = nn.Linear(10, 10, bias=False)
    frozen = nn.Linear(10, 10).requires_grad_(False)
    twice = nn.Sequential(shared, shared, nn.BatchNorm1d(10, affine=False))
    chain = chain_of_modules([("a", twice), ("b", frozen), ("c", nn.ReLU())])
    buffers = 10 * 4 * 2 + 8
    assert [cost.weight_bytes for cost in chain.costs] == [400 + buffers, 440, 0]
    assert [cost.gradient_bytes for cost in chain.costs] == [400, 0, 0]
    assert [cost.num_parameters for cost in chain.costs] == [100, 110, 0]
    assert all(cost.forward_s > 0 for cost in chain.costs)
    assert weight_bytes_of(twice) == 400 + buffers


def test_a_cost_scales_without_its_weights():
    cost = LayerCost(1.0, 2.0, 10, 20, 5, 400, 300, 100, 50, 8).scaled(2.5)
    assert cost == LayerCost(2.5, 5.0, 25, 50, 5, 400, 300, 250, 125, 20)


@pytest.mark.parametrize(
    "module, expected",
    [
        (nn.Linear(2, 2), False),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.GELU()), False),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), True),
        (nn.AlphaDropout(), True),
        (nn.RReLU(), True),
        (nn.LSTM(2, 2), True),
        (nn.TransformerEncoderLayer(4, 2), True),
    ],
)
def test_which_modules_may_draw(module, expected):
    assert may_draw_random(module) is expected


def test_other_peoples_modules_may_draw():
    class Own(nn.Module):
        pass

    assert may_draw_random(nn.Sequential(Own()))


def test_a_chain_needs_one_spec_and_cost_per_layer():
    with pytest.raises(AssertionError, match="1 layers, 2 specs, 1 costs"):
        LayerChain([nn.Identity()], [LayerSpec("0"), LayerSpec("1")], [LayerCost()], lambda a, k: {}, lambda c: c)


def test_a_chain_can_be_copied():
    chain = chain_of_modules([("0", nn.Linear(2, 2)), ("1", nn.Tanh())])
    twin = copy.deepcopy(chain)
    given = torch.ones(1, 2)
    assert torch.equal(twin.run(given), chain.run(given))
    assert next(twin.parameters()) is not next(chain.parameters())


def test_a_fixed_chain_is_for_all_arguments():
    chain = chain_of_modules([("0", nn.Identity())])
    source = FixedChain(chain)
    assert source.chain_for((1,), {}) is source.chain_for((), {"a": 2}) is chain and source.trace_count == 0


def test_which_tensors_are_differentiable():
    assert is_differentiable(torch.ones(1)) and is_differentiable(torch.ones(1, dtype=torch.complex64))
    assert not is_differentiable(torch.ones(1, dtype=torch.int64)) and not is_differentiable(torch.ones(1) > 0)


def test_a_layer_that_writes_its_weights_is_refused():
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=0.1), nn.Linear(3, 2))
    with RoundPipe(model, devices=["cpu"]) as pipe:
        with pytest.raises(ConfigError, match="layer 0 writes its parameter weight"):
            pipe(torch.tensor([1, 2]))


def test_a_layer_that_replaces_a_weight_is_refused():
    class Replaces(nn.Linear):
        def forward(self, x):
            self.weight = nn.Parameter(self.weight * 2)
            return super().forward(x)

    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(Replaces(3, 2)))
    with RoundPipe(model, devices=["cpu"]) as pipe:
        with pytest.raises(ConfigError, match=r"layer 1 writes its parameter 0\.weight"):
            pipe(torch.ones(2, 3))
