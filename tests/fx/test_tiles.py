"""Traced models in tiles, beside the same layers run whole."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from roundpipe.core import trees
from roundpipe.core.allocations import Allocations
from roundpipe.core.tiling import Tiles, in_tiles
from roundpipe.fx.passes.lower import lower
from roundpipe.fx.passes.tiles import add_tiles
from roundpipe.fx.trace.tracer import trace
from tests.repeats import repeats

VOCABULARY, WIDTH = 32, 8


def chain_of(model, *args, **kwargs):
    """A model's layers, ready to run in tiles."""
    chain = lower(trace(model, args, kwargs)).chain
    add_tiles(chain, args, kwargs, Tiles(2, 2))
    return chain


def regions_of(chain):
    """The names of the modules inside each region."""
    programs = [program for layer in chain for program in layer.programs.by_sizes.values() if program]
    return [region.parameters.targets for program in programs for region in program.regions]


def train(chain, model, number, *args, **kwargs):
    """What a training step in tiles gives: outputs, loss, gradients."""
    model.zero_grad()
    args, kwargs = trees.map_tensors(
        (args, kwargs), lambda t: t.detach().requires_grad_() if t.is_floating_point() else t
    )
    torch.manual_seed(0)
    with in_tiles(number):
        out = chain.run(*args, **kwargs)
    found = [tensor for tensor in trees.tensors(out) if tensor.requires_grad]
    loss = out if isinstance(out, torch.Tensor) and out.dim() == 0 else sum(tensor.mean() for tensor in found)
    loss.backward()
    gradients = [tensor.grad for tensor in (*trees.tensors((args, kwargs)), *model.parameters())]
    return [*trees.tensors(out), *gradients]


def assert_tiles_change_nothing(model, *args, tolerance=1e-12, **kwargs):
    chain = chain_of(model, *args, **kwargs)
    whole = train(chain, model, 1, *args, **kwargs)
    for number in (2, 3, 7):
        for index, (a, b) in enumerate(zip(train(chain, model, number, *args, **kwargs), whole, strict=True)):
            assert (a is None) == (b is None), index
            if a is not None:
                assert a.shape == b.shape and a.dtype == b.dtype, index
                scale = b.abs().max().clamp(min=1e-3)
                assert (a - b).abs().max() <= tolerance * scale, (number, index, a, b)
    return regions_of(chain)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm, self.mlp = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), MLP()

    def forward(self, x, turn=1.0):
        x = x * turn
        x = x + self.attention(F.scaled_dot_product_attention(x, x, x, is_causal=True))
        return x + self.mlp(self.norm(x))


class Decoder(nn.Module):
    """Embedding, blocks of attention and MLP, a head with its loss inside."""

    def __init__(self, loss, blocks=3):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.loss = loss

    def forward(self, ids, labels):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.loss(self.head(x), labels)


def tokens():
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (3, 7))
    labels = ids.clone()
    labels[0, :4] = -100
    return ids, labels


def mean_of_tokens(logits, labels):
    return F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))


def soft_capped(logits, labels):
    return F.cross_entropy((30 * torch.tanh(logits / 30)).flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def sum_by_number(logits, labels):
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="sum") / (labels >= 0).sum()


def with_z_loss(logits, labels):
    return mean_of_tokens(logits, labels) + 1e-2 * logits.logsumexp(-1).square().mean()


def masked(logits, labels):
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    mask = labels > 5
    return (losses * mask).sum() / mask.sum()


def old_shift(logits, labels):
    shifted = logits.float().double()[..., :-1, :].contiguous()
    return F.cross_entropy(shifted.view(-1, VOCABULARY), labels[..., 1:].contiguous().view(-1))


LOSSES = [old_shift, mean_of_tokens, soft_capped, sum_by_number, with_z_loss, masked]


@pytest.mark.parametrize("name", repeats([loss.__name__ for loss in LOSSES], ["soft_capped", "with_z_loss", "masked"]))
def test_losses_of_a_decoder(name):
    (loss,) = (loss for loss in LOSSES if loss.__name__ == name)
    regions = assert_tiles_change_nothing(Decoder(loss).double(), *tokens())
    assert sum(any("up" in target for target in region) for region in regions) == 3
    assert any("head" in region for region in regions)
    assert not any("embed" in region for region in regions)


def each_rounded(logits, labels):
    """A loss per token, whose gradients are rounded to single precision on their way to the logits."""
    return F.cross_entropy(logits.float().double().flatten(0, 1), labels.flatten(), reduction="none")


SCALED = {
    "a count": lambda each, labels: (each * (labels > 5).flatten()).sum() / (labels > 5).sum(),
    "a number": lambda each, labels: each.sum() * 0.3,
    "in front": lambda each, labels: torch.mul(0.3, each.mean()),
    "a method, and twice": lambda each, labels: 0.7 * each.sum().div(labels.numel()),
}


@pytest.mark.parametrize("name", SCALED)
def test_scaled_sums_round_gradients_as_the_whole_does(name):
    loss = Decoder(lambda logits, labels: SCALED[name](each_rounded(logits, labels), labels), blocks=1)
    assert any("head" in region for region in assert_tiles_change_nothing(loss.double(), *tokens()))


def by_its_own_rows(each):
    return each.sum() / each.detach().square().sum()


def by_a_trained_sum(each):
    return each.sum() * each.square().sum()


def by_itself(each):
    total = each.sum()
    return total * total


def inverse(each):
    return 3.0 / each.sum()


def read_twice(each):
    total = each.sum()
    return total / 7 + total.square()


@pytest.mark.parametrize("scale", [by_its_own_rows, by_a_trained_sum, by_itself, inverse, read_twice])
def test_sums_that_no_known_number_scales(scale):
    def loss(logits, labels):
        return scale(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none"))

    assert any("head" in region for region in assert_tiles_change_nothing(Decoder(loss, 1).double(), *tokens()))


def leaves_of(chain):
    """The paths of modules in tiles, inside each leaf."""
    programs = [program for layer in chain for program in layer.programs.by_sizes.values() if program]
    return [tuple(leaf.forwards) for program in programs for leaf in program.leaves]


class WithPositions(Decoder):
    """Each block's layer makes factors that have rows of their own: positions, without samples."""

    def forward(self, ids, labels):
        x, positions = self.embed(ids), torch.arange(ids.shape[1]).double().view(1, -1, 1)
        turn = (positions * torch.linspace(0.1, 1, WIDTH)).double().cos().mul(1.0)
        for block in self.blocks:
            x = block(x, turn)
        return self.loss(self.head(x), labels)


@pytest.mark.parametrize("kind", [Decoder, WithPositions])
def test_mlps_of_blocks_that_are_leaves(kind):
    model = kind(mean_of_tokens, blocks=8).double()
    assert_tiles_change_nothing(model, *tokens())
    chain = chain_of(model, *tokens())
    assert leaves_of(chain) == [("mlp",)] * 8
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_hook_on_a_module_sees_all_rows():
    model, sizes = Decoder(mean_of_tokens).double(), []
    model.blocks[1].mlp.down.register_forward_hook(lambda module, args, out: sizes.append(out.shape))
    model.blocks[2].mlp.register_full_backward_hook(lambda module, *gradients: sizes.append(gradients[0][0].shape))
    assert_tiles_change_nothing(model, *tokens())
    assert set(sizes) == {(3, 7, WIDTH)}


def test_other_sizes_run_whole():
    model = Decoder(mean_of_tokens).double()
    chain = chain_of(model, *tokens())
    ids, labels = (tensor[:2] for tensor in tokens())
    want = train(chain, model, 1, ids, labels)
    for a, b in zip(train(chain, model, 5, ids, labels), want, strict=True):
        assert a is b or torch.equal(a, b)
    add_tiles(chain, (ids, labels), {}, Tiles(2, 2))
    assert len(chain[-1].programs.by_sizes) == 2


def test_memory_of_a_head_is_that_of_a_tile():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.head = nn.Linear(8, 4096, bias=False)

        def forward(self, x, labels):
            return F.cross_entropy(self.head(self.first(x)).flatten(0, 1).float(), labels.flatten())

    model, x, labels = Head(), torch.randn(2, 64, 8), torch.randint(0, 4096, (2, 64))
    chain = chain_of(model, x, labels)
    peaks = []
    for number in (1, 4, 16):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        known = [x, labels, *model.parameters(), *(p.grad for p in model.parameters())]
        with Allocations(known) as memory, in_tiles(number):
            chain.run(x, labels).backward()
        peaks.append(memory.peak_bytes - model.head.weight.nbytes)
    assert peaks[1] < 1.1 * peaks[0] / 4 and peaks[2] < 1.2 * peaks[0] / 16
