"""Memory of layers that is computed on fakes, beside what the same layers allocate when they run."""

import itertools
import types
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from roundpipe.core import trees
from roundpipe.core.allocations import Allocations, uncounted
from roundpipe.core.backward import backward_from
from roundpipe.core.layers import CarriedValue, LayerChain
from roundpipe.core.tiling import Tiles
from roundpipe.fx.passes.lower import lower
from roundpipe.fx.passes.memory import Loss, measure_memory
from roundpipe.fx.trace.tracer import trace
from roundpipe.wrappers.module_layers import layers_of


class Block(nn.Module):
    def __init__(self, width=32, heads=4):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.heads = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), heads

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))
        return x + self.down(F.dropout(F.gelu(self.up(x)), 0.1, self.training))


def decoder(vocabulary=512):
    return nn.Sequential(nn.Embedding(vocabulary, 32), Block(), Block(), Block(), nn.Linear(32, vocabulary, bias=False))


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 10))


def packed():
    """Frozen maps in int8, which are unpacked for each product."""
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Embedding(512, 128), *[nn.Linear(128, 128) for _ in range(3)], nn.Linear(128, 512))
    model[1:].requires_grad_(False)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def cross_entropy(outputs, label):
    return F.cross_entropy(outputs.float().flatten(0, -2), label.flatten())


TOKENS = torch.randint(0, 512, (4, 64))
CASES = {
    "decoder": (decoder, TOKENS, TOKENS),
    "half precision": (lambda: decoder().bfloat16(), TOKENS, TOKENS),
    "frozen": (lambda: decoder().requires_grad_(False), TOKENS, TOKENS),
    "convolutions": (convolutions, torch.randn(4, 3, 16, 16), torch.randint(0, 10, (4,))),
}


def chain_of(model, example):
    return layers_of(model)


def traced(model, example):
    return lower(trace(model, (example,), {})).chain


def run_for_real(chain: LayerChain, example, label, is_first=False):
    """Kept and peak bytes of each layer, of real tensors; the last one with the loss, as a fused stage runs them.

    If the run ``is_first``, weights have no gradients before it.
    """
    carry = chain.entry((example,), {})
    result = []
    for parameter in chain.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad and not is_first else None
    for layer, spec in zip(chain, chain.specs, strict=True):
        leaves = {name: trees.map_tensors(carry[name], _leaf) for name in spec.reads}
        made = partial(_made, layer, leaves, spec.makes)
        is_last = spec is chain.specs[-1]
        carry.update(_run(partial(_loss, chain, carry, made, label) if is_last else made, result))
    return result


def _loss(chain, carry, made, label):
    rest = {name: carry[name] for name in chain.exit.reads if name in carry}
    return {"loss": cross_entropy(chain.exit({**rest, **made()}), label)}


def _made(layer, leaves, names):
    made = layer(leaves)
    return {name: made[name] for name in names}


def _leaf(tensor):
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _run(function, result):
    memory = Allocations()  # with what attention's backward works in, as a worker's ledger has it
    with memory:
        made = function()
        kept = memory.live_bytes
        roots = [tensor for tensor in trees.tensors(made) if tensor.requires_grad]
        with uncounted():  # values on their way to the host
            results = trees.map_tensors(made, lambda tensor: _leaf(tensor.clone()))
        del made
        if roots:
            backward_from(roots, [torch.ones_like(root) for root in roots])
    result.append((kept, memory.peak_bytes))
    return results


@pytest.mark.parametrize("make_chain", [chain_of, traced])
@pytest.mark.parametrize("case", CASES)
def test_it_is_what_a_run_allocates(case, make_chain):
    build, example, label = CASES[case]
    model = build()
    chain = make_chain(model, example)
    costs = measure_memory(chain, (example,), {}, Loss(cross_entropy, label))
    predicted = [(cost.activation_bytes, cost.activation_bytes + cost.temporary_bytes) for cost in costs]
    for name, ours, real in zip(
        [s.name for s in chain.specs], predicted, run_for_real(chain, example, label), strict=True
    ):
        assert ours == pytest.approx(real, rel=0.01, abs=8192), name


def test_what_is_unpacked_is_kept_for_the_backward():
    chain = layers_of(packed())
    costs = measure_memory(chain, (TOKENS,), {}, Loss(cross_entropy, TOKENS))
    for cost, (kept_bytes, _) in zip(costs, run_for_real(chain, TOKENS, TOKENS), strict=True):
        assert cost.activation_bytes == pytest.approx(kept_bytes, rel=0.01, abs=8192)


@pytest.mark.parametrize("case", CASES)
def test_a_first_run_has_no_gradients_of_weights_before_it(case):
    build, example, label = CASES[case]
    chain = traced(build(), example)
    costs = measure_memory(chain, (example,), {}, Loss(cross_entropy, label))
    real = run_for_real(chain, example, label, is_first=True)
    for spec, cost, (_, peak_bytes) in zip(chain.specs, costs, real, strict=True):
        first_bytes = cost.training_bytes + cost.gradient_bytes - cost.unmade_bytes
        assert first_bytes == pytest.approx(peak_bytes, rel=0.01, abs=8192), spec.name


def measured(loss_fn):
    example = torch.randn(4, 8)
    return measure_memory(layers_of(nn.Sequential(nn.Linear(8, 8))), (example,), {}, Loss(loss_fn, example))


def test_what_a_loss_function_changes_is_put_back():
    seen, scaler = [], torch.amp.GradScaler("cpu", enabled=True)
    metric = types.SimpleNamespace(calls=0, last=None)

    def loss_fn(outputs, label):
        seen.append(outputs)
        metric.calls += 1
        metric.last = outputs
        return scaler.scale(F.mse_loss(outputs, label))

    before = dict(vars(scaler))
    assert measured(loss_fn)[-1].activation_bytes > 0
    assert seen == [] and (metric.calls, metric.last) == (0, None)
    assert vars(scaler) == before


def test_weights_that_a_loss_function_reads_get_no_gradient():
    model = nn.Sequential(nn.Linear(4, 4))
    scale = torch.ones((), requires_grad=True)
    loss = Loss(lambda outputs, label: scale * (outputs.sum() + model[0].weight.square().sum()), None)
    assert measure_memory(layers_of(model), (torch.randn(2, 4),), {}, loss) is not None
    assert model[0].weight.grad is None
    assert scale.grad is None


def test_a_loss_that_needs_data_is_guessed():
    """As bytes that go with the outputs; the layers are measured all the same."""
    (without,) = measure_memory(layers_of(nn.Sequential(nn.Linear(8, 8))), (torch.randn(4, 8),), {})
    (last,) = measured(lambda outputs, label: outputs.sum() * float(outputs.max()))
    assert last.activation_bytes > without.activation_bytes
    assert last.workspace_bytes == without.workspace_bytes


def test_random_state_stays():
    chain, example = layers_of(nn.Sequential(nn.Linear(8, 8), nn.Dropout())), torch.randn(4, 8)
    state = torch.get_rng_state()
    measure_memory(chain, (example,), {}, Loss(lambda outputs, label: F.dropout(outputs).sum(), None))
    assert torch.equal(torch.get_rng_state(), state)


def test_equal_layers_run_once():
    calls = itertools.count()  # what a snapshot can't put back

    class Counted(Block):
        def forward(self, x):
            next(calls)
            return super().forward(x)

    model = nn.Sequential(*[Counted() for _ in range(40)])
    chain, example = layers_of(model), torch.randn(2, 16, 32)
    costs = measure_memory(chain, (example,), {})
    assert next(calls) == 4  # twice each: the first, whose input needs no gradient, and another
    assert len({cost.activation_bytes for cost in costs}) == 1
    assert measure_memory(chain, (example,), {}, tiles=Tiles(1, 2)) == costs
    before = next(calls)
    assert measure_memory(chain, (example,), {}, tiles=Tiles(1, 2, at_once=False)) == costs
    assert next(calls) == before + 3, "only the last layer runs again: how losses run in tiles is nothing to others"


class Masked(nn.Module):
    """Each block reads a mask that is made of sizes alone, and adds to a value, of which it saves nothing."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        mask = torch.arange(x.shape[1]).cos()[None, :, None]
        for block in self.blocks:
            x = x + block(x * mask) * mask
        return x


def test_results_that_nothing_is_saved_of_are_known():
    example = torch.randn(4, 16, 8)
    costs = measure_memory(traced(Masked(), example), (example,), {})
    assert costs is not None, "also beside glue"
    made = [[value for value in cost.values if value.maker == index] for index, cost in enumerate(costs)]
    assert all(any(value.own_bytes == example.nbytes and not value.savers for value in values) for values in made)
    inputs = [value for value in costs[0].values if value.maker < 0]
    assert sum(value.num_bytes for value in inputs) == example.nbytes and not any(v.gradient_bytes for v in inputs)
    saving = measure_memory(layers_of(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))), (example,), {})
    sizes = example.nbytes, example.nbytes, example.nbytes
    first, last = CarriedValue(0, (1,), *sizes, savers=(1,)), CarriedValue(1, (2,), *sizes)
    assert [cost.values[-1] for cost in saving] == [first, last], "a linear layer saves what it reads"
