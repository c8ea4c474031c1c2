"""Masks and rotary tables are made once per stage visit, not once per layer and microbatch, with the same numbers."""

import copy
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe
from roundpipe.core.layers import Glue, LayerSpec
from roundpipe.core.tiling import Tiles, in_tiles
from roundpipe.fx.passes.codegen import Layer
from roundpipe.fx.passes.glue import GlueCode
from roundpipe.fx.passes.memory import measure_memory
from roundpipe.fx.passes.tiles import add_tiles
from roundpipe.runtime.device.backend import Device
from roundpipe.runtime.engine.shared_glue import SharedGlue
from tests.runtime.cases_engine import grains
from tests.runtime.models import assert_equal_bits, assert_same, config, gradients, pieces

WIDTH, HEADS, DEPTH, LENGTH, NUM = 16, 2, 5, 8, 3
PLAN = roundpipe.ExecutePlan([(0, 3)], (3, 5), [(0, 3)])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask, rotary):
        cos, sin = rotary
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        q, k = (each * cos + each.roll(1, -1) * sin for each in (q, k))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.register_buffer("frequencies", torch.linspace(0.1, 1, WIDTH // HEADS))
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, ids, mask, bias=None):
        positions = torch.arange(ids.shape[1], device=ids.device)
        angles = positions[:, None] * self.frequencies
        rotary = angles.cos(), angles.sin()
        causal = positions[None, :] <= positions[:, None]
        mask = causal[None, None] & mask[:, None, None, :].bool()
        if bias is not None:
            mask = torch.where(mask, bias * 2, -1e9)
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, mask, rotary)
        return self.head(x)


def decoder():
    torch.manual_seed(0)
    return Decoder().double()


def arguments(size=6):
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(size, LENGTH, dtype=torch.int64)
    mask[::2, 6:] = 0
    return {"ids": torch.randint(11, (size, LENGTH), generator=generator), "mask": mask}


def total(output, label):
    return output.square().sum()


def chain_of(model, **kwargs):
    """The layers that a model is cut into."""
    with roundpipe.compile(model, devices=["cpu"], example_kwargs=kwargs) as piped:
        return piped._runner.source.chain_for((), kwargs)  # layers and specs are no part of what is public


@pytest.fixture
def made(monkeypatch):
    """How often each value of glue was made."""
    counts = Counter()
    make = GlueCode.make

    def counted(self, layer, name, carry):
        counts[name] += 1
        return make(self, layer, name, carry)

    monkeypatch.setattr(GlueCode, "make", counted)
    return counts


def train(model, kwargs, num_workers=1, grain="stage", num=NUM, plan=PLAN, outputs=True, **device):
    with roundpipe.compile(model, devices=[Device("cpu", **device)] * num_workers) as piped:
        found = piped.forward_backward(
            input_kwargs=kwargs, loss_fn=total, return_outputs=outputs, run_config=config(num, grain, plan)
        )
        piped.synchronize()
        loss, outputs = found if outputs else (found, None)
        return loss, outputs, gradients(model), piped.peak_device_bytes()


def eager(model, kwargs, num=NUM):
    model = copy.deepcopy(model)
    losses = []
    for piece in pieces(kwargs, num):
        loss = total(model(**piece), None)
        loss.backward()
        losses.append(loss.detach())
    return sum(losses), gradients(model)


def test_layers_say_what_glue_they_read():
    chain = chain_of(decoder(), **arguments())
    blocks = [spec.glue for spec in chain.specs[1:-1]]
    assert len(blocks) == DEPTH - 2 and len(set(blocks)) == 1
    by_kind = Counter((glue.reads, glue.sizes_of) for glue in blocks[0])
    assert by_kind == {(("ids",), frozenset({"ids"})): 2, (("ids", "mask"), frozenset({"ids"})): 1}


def test_a_layer_runs_with_glue_given_or_without():
    chain, kwargs = chain_of(decoder(), **arguments()), arguments()
    carry = chain.entry((), kwargs)
    for layer, spec in zip(chain, chain.specs, strict=True):
        assert isinstance(layer, Layer)
        reads = {name: carry[name] for name in spec.reads}
        given = reads | {glue.name: layer.make_glue(glue.name, reads) for glue in spec.glue}
        alone, found = layer(dict(reads)), layer(dict(given))
        assert all(torch.equal(alone[name], found[name]) for name in spec.makes)
        if spec.glue:  # what is given is what it uses
            wrong = given | {spec.glue[0].name: torch.zeros_like(given[spec.glue[0].name])}
            assert not torch.equal(layer(wrong)[spec.makes[0]], alone[spec.makes[0]])
        carry.update(found)


@grains
def test_glue_is_made_once_per_visit_or_microbatch(grain, made):
    model, kwargs = decoder(), arguments()
    expected, expected_gradients = eager(model, kwargs)
    results = []
    for num_workers in (1, 2, 3):
        made.clear()
        model.zero_grad()
        loss, outputs, found, _ = train(model, kwargs, num_workers, grain)
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
        assert_same(found, expected_gradients)
        visits = 3
        assert sorted(made.values()) == [visits, visits, visits * NUM]
        results.append({"loss": loss, "outputs": outputs, **found})
    for other in results[1:]:
        assert_equal_bits(other, results[0])
    made.clear()
    model.zero_grad()
    assert torch.equal(train(model, kwargs, 2, grain, outputs=False)[0], loss)  # the last layer and the loss are one
    assert_same(gradients(model), expected_gradients)
    assert sorted(made.values()) == [visits, visits, visits * NUM]


def test_a_mask_that_is_not_split_is_converted_once_per_visit(made):
    model, kwargs = decoder(), arguments()
    kwargs["mask"] = kwargs["mask"][:1].expand(6, LENGTH)
    expected, expected_gradients = eager(model, kwargs)
    loss, _, found, _ = train(model, kwargs, 2)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
    assert_same(found, expected_gradients)
    assert sorted(made.values()) == [3, 3, 3]


class InEachLayer(Decoder):
    """Decides anew for each layer what it is given, as decoders do that add a dimension to rotary tables."""

    def forward(self, ids, mask):
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * self.frequencies
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            rotary = angles.cos()[None], angles.sin()[None]
            scaled = mask[:, None, None, :] * (0.0 if number % 2 else -0.0)
            x = block(x, torch.copysign(mask[:, None, None, :].double(), scaled), rotary)
        return self.head(x)


@grains
def test_equal_glue_of_several_layers_is_made_once(grain, made):
    torch.manual_seed(0)
    model, kwargs = InEachLayer().double(), arguments()
    expected, expected_gradients = eager(model, kwargs)
    for num_workers in (1, 2):
        made.clear()
        model.zero_grad()
        loss, _, found, _ = train(model, kwargs, num_workers, grain)
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
        assert_same(found, expected_gradients)
        visits = 3
        assert sorted(made.values())[:2] == [visits, visits]  # rotary tables
        assert len(made) == 4  # and masks of two kinds, since 0.0 is not -0.0


def test_equal_glue_of_one_layer_has_names_of_its_own():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.outside = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()

        def forward(self, x, scale):
            x = self.inside(x) * scale.exp()[None]
            return self.outside(x * scale.exp()[None])

    torch.manual_seed(0)
    model, x, scale = Twice(), torch.randn(6, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    chain = chain_of(model, x=x, scale=scale)
    names = [glue.name for spec in chain.specs for glue in spec.glue]
    assert len(names) > 1 and all(len({g.name for g in spec.glue}) == len(spec.glue) for spec in chain.specs)
    expected, expected_gradients = eager(model, {"x": x, "scale": scale}, num=1)
    loss, _, found, _ = train(model, {"x": x, "scale": scale}, num=1, plan=None)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
    assert_same(found, expected_gradients)


@grains
def test_gradients_flow_through_glue(grain):
    """Of an argument that a mask is made of: each layer makes its own then."""
    model, kwargs = decoder(), arguments()
    torch.manual_seed(2)
    bias = torch.randn(6, 1, LENGTH, LENGTH, dtype=torch.float64)
    first, second = (bias.clone().requires_grad_() for _ in range(2))
    expected, expected_gradients = torch.zeros((), dtype=torch.float64), None
    reference = copy.deepcopy(model)
    for piece in pieces({**kwargs, "bias": first}, NUM):
        loss = total(reference(**piece), None)
        loss.backward()
        expected = expected + loss.detach()
    expected_gradients = gradients(reference)
    loss, _, found, _ = train(model, {**kwargs, "bias": second}, 2, grain)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
    assert_same(found, expected_gradients)
    torch.testing.assert_close(second.grad, first.grad, rtol=0, atol=1e-10)


def test_padded_and_other_microbatches_in_one_round(made):
    """Each has a trace of its own, and glue of its own."""

    class Choosing(Decoder):
        def forward(self, ids, mask):
            return super().forward(ids, torch.ones_like(mask) if bool(mask.all()) else mask)

    torch.manual_seed(0)
    model, kwargs = Choosing().double(), arguments()
    kwargs["mask"][2:4] = 1  # of the second microbatch of three
    expected, expected_gradients = eager(model, kwargs)
    for num_workers in (1, 2):
        made.clear()
        model.zero_grad()
        loss, _, found, _ = train(model, kwargs, num_workers)
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
        assert_same(found, expected_gradients)
        assert 0 < sum(made.values()) <= 3 * (2 + 2 + 3)  # not once per layer: at most per visit and trace


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_the_peak_is_within_the_budget(grain):
    model, kwargs = decoder(), arguments()
    expected, expected_gradients = eager(model, kwargs)
    *_, peak = train(model, kwargs, 1, grain, plan=None, memory_bytes=10**8)
    for share in (1.0, 0.6):
        model.zero_grad()
        loss, _, found, new_peak = train(model, kwargs, 1, grain, plan=None, memory_bytes=int(peak * share))
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
        assert_same(found, expected_gradients)
        assert new_peak <= peak * share


def test_layers_keep_no_mask_of_their_own():
    """What the layers of a stage keep until its backward grows by no mask per layer."""
    model = decoder().float()
    chain, kwargs = chain_of(model, **arguments()), arguments()
    costs = measure_memory(chain, (), kwargs)
    mask_bytes = 6 * LENGTH * LENGTH
    without = copy.copy(chain)
    without.specs = tuple(LayerSpec(**{**fields_of(spec), "glue": ()}) for spec in chain.specs)
    own = measure_memory(without, (), kwargs)
    for cost, alone in list(zip(costs, own, strict=True))[1:-1]:
        assert cost.activation_bytes <= alone.activation_bytes - mask_bytes
        assert cost.workspace_bytes >= cost.carry_bytes


def fields_of(spec):
    return {name: getattr(spec, name) for name in LayerSpec.__dataclass_fields__}


def test_in_tiles_glue_is_given_too():
    model, kwargs = decoder(), arguments()
    chain, tiles = chain_of(model, **kwargs), Tiles(4, 4)
    add_tiles(chain, (), kwargs, tiles)
    carry = chain.entry((), kwargs)
    for layer, spec in zip(chain, chain.specs, strict=True):
        reads = {name: carry[name] for name in spec.reads}
        given = reads | {glue.name: layer.make_glue(glue.name, reads) for glue in spec.glue}
        whole = layer(dict(reads))
        with in_tiles(4):
            for values in (reads, given):
                found = layer(dict(values))
                for name in spec.makes:
                    torch.testing.assert_close(found[name], whole[name], rtol=0, atol=1e-12)
        carry.update(whole)


# ---------------------------------------------------------------------------------- what is shared


class Making(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_made = 0

    def make_glue(self, name, carry):
        self.num_made += 1
        return carry["x"].detach() * 2


def given(glue, layer, spec, x):
    return glue.given(layer, spec, {"x": x})["glue"]


def test_glue_is_of_the_sizes_or_values_that_it_is_made_of():
    layer, x, other = Making(), torch.ones(2), torch.ones(2)
    by_value = LayerSpec("a", glue=(Glue("glue", ("x",)),))
    by_size = LayerSpec("a", glue=(Glue("glue", ("x",), frozenset({"x"})),))
    glue = SharedGlue(lambda tensor: tensor is other)
    assert given(glue, layer, by_value, x) is given(glue, layer, by_value, x)
    glue.end_microbatch()
    given(glue, layer, by_value, x)
    assert layer.num_made == 2  # x is of one microbatch
    first = given(glue, layer, by_value, other)
    glue.end_microbatch()
    assert given(glue, layer, by_value, other) is first and layer.num_made == 3
    glue = SharedGlue(lambda tensor: False)
    first = given(glue, layer, by_size, x)
    glue.end_microbatch()
    assert given(glue, layer, by_size, other) is first
    assert given(glue, layer, by_size, torch.ones(3)) is not first


def test_glue_that_a_layer_has_written_is_made_again():
    layer, x = Making(), torch.ones(2)
    spec, glue = LayerSpec("a", glue=(Glue("glue", ("x",)),)), SharedGlue(lambda tensor: True)
    given(glue, layer, spec, x).zero_()
    assert given(glue, layer, spec, x).tolist() == [2, 2]


def test_views_of_arguments_are_no_glue(monkeypatch):
    """A loop over time steps takes one of each: to be given them, each would have all of them made."""
    made = []
    make = GlueCode.make
    monkeypatch.setattr(
        GlueCode, "make", lambda self, layer, name, carry: made.append(name) or make(self, layer, name, carry)
    )

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.LSTMCell(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            state = x.new_zeros(len(x), 4), x.new_zeros(len(x), 4)
            outputs = []
            for step in x.unbind(1):
                state = self.cell(step, state)
                outputs.append(self.head(state[0]))
            return torch.stack(outputs, 1)

    model, x = Recurrent(), torch.randn(6, 40, 3)
    with roundpipe.compile(model, devices=["cpu"]) as pipe, torch.no_grad():
        torch.testing.assert_close(pipe(x), model(x))
        assert len(pipe._runner.last_chain) > 3  # private: only the table says it otherwise
        assert len(set(made)) <= 2
