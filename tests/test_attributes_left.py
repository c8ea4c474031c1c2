"""Losses that a forward leaves in attributes, and a script adds behind a plain call: they are of the whole batch."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import roundpipe
from roundpipe import RoundPipeRunConfig
from tests.runtime.models import assert_same, gradients

DTYPE = torch.float64


class Regularised(nn.Module):
    """Leaves a loss in an attribute of the root."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 4)
        self.loss = None

    def forward(self, x):
        hidden = self.body(x)
        self.loss = hidden.square().mean()
        return self.head(hidden)

    def left(self):
        return self.loss


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.loss = 0.0

    def forward(self, x):
        hidden = torch.tanh(self.linear(x))
        self.loss = hidden.abs().mean()
        return x + hidden


class Blocks(nn.Module):
    """Each block has a loss, which the model adds up if it is asked for one."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 4)

    def forward(self, x, with_loss=False):
        for block in self.blocks:
            x = block(x)
        out = self.head(x)
        return (out, self.left()) if with_loss else out

    def left(self):
        return sum(block.loss for block in self.blocks)


def batch():
    torch.manual_seed(1)
    return torch.randn(9, 6, dtype=DTYPE), torch.randint(4, (9,))


def step(piped, model, num_microbatch=None):
    """One plain call of a script's, with a loss behind it; and what is told of it."""
    x, label = batch()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.zero_grad()
            options = {} if num_microbatch is None else {"roundpipe_run_config": RoundPipeRunConfig(num_microbatch)}
            loss = F.cross_entropy(piped(x, **options), label) + model.left()
            loss.backward()
    return loss.detach(), [text for each in caught if "leaves an activation" in (text := str(each.message))]


@pytest.mark.filterwarnings("ignore:.*module by module", "ignore:.*runs on the CPU", "ignore:gradients came")
@pytest.mark.parametrize("make", [Regularised, Blocks])
def test_a_loss_behind_a_plain_call_is_that_of_the_batch(make):
    torch.manual_seed(0)
    model = make().to(DTYPE)
    reference, (x, label) = copy.deepcopy(model), batch()
    expected = F.cross_entropy(reference(x), label) + reference.left()
    expected.backward()
    with roundpipe.compile(model, devices=["cpu"] * 2) as piped:
        loss, texts = step(piped, model)
        torch.testing.assert_close(loss, expected.detach())
        assert_same(gradients(model), gradients(reference), 1e-10)
        assert len(texts) == 1 and "that of the batch, which is not cut in such calls" in texts[0]
        model.zero_grad()
        loss = piped.forward_backward(
            (x,),
            label=label,
            loss_fn=lambda out, target: F.cross_entropy(out, target) + model.left(),
            loss_reduction="mean",
            run_config=RoundPipeRunConfig(3),
        )
        piped.synchronize()
        torch.testing.assert_close(loss, expected.detach())
        assert_same(gradients(model), gradients(reference), 1e-10)


@pytest.mark.filterwarnings("ignore:.*module by module", "ignore:.*runs on the CPU", "ignore:gradients came")
def test_a_number_that_is_given_stays_and_is_told_of():
    torch.manual_seed(0)
    model = Regularised().to(DTYPE)
    with roundpipe.compile(model, devices=["cpu"] * 2) as piped:
        _, texts = step(piped, model, num_microbatch=3)
    assert len(texts) == 1 and "the attribute has that of the last microbatch alone" in texts[0]
    with roundpipe.compile(model, devices=["cpu"] * 2) as piped:
        _, texts = step(piped, model, num_microbatch=1)
    assert texts == []


@pytest.mark.filterwarnings("ignore:.*module by module", "ignore:.*runs on the CPU")
def test_without_gradients_a_batch_is_cut_and_that_is_told():
    torch.manual_seed(0)
    model, (x, _) = Regularised().to(DTYPE), batch()
    with roundpipe.compile(model, devices=["cpu"] * 2) as piped, torch.no_grad():
        with pytest.warns(UserWarning, match="the attribute has that of the last microbatch alone"):
            piped(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            piped(x)  # once
            piped(x, roundpipe_run_config=RoundPipeRunConfig(1))
            torch.testing.assert_close(model.loss, model.body(x).square().mean())


class Flags(nn.Module):
    """Sets a flag of its own, and one that anybody may ask for."""

    def __init__(self, name):
        super().__init__()
        self.layers, self.name = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), name

    def forward(self, x):
        setattr(self, self.name, True)
        return self.layers(x)


@pytest.mark.parametrize("name", ["_was_called", "was_called"])
def test_only_what_others_may_read_is_said_to_stay(name, caplog):
    model = Flags(name)
    with roundpipe.compile(model, devices=["cpu"]) as piped, torch.no_grad():
        piped(torch.randn(4, 6))
    assert any("runs as if it had not" in record.message for record in caplog.records) == (name[0] != "_")


@pytest.mark.parametrize(
    "hook",
    [
        lambda module: prune.l1_unstructured(module, "weight", 0.5),
        lambda module: nn.utils.spectral_norm(module),
    ],
    ids=["pruned", "normed"],
)
def test_weights_that_hooks_compute_are_told_of_once(hook):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    hook(model[0])
    with roundpipe.compile(model, devices=["cpu"]) as pipe, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            pipe.forward_backward((torch.randn(6, 4),), loss_fn=lambda out, _: out.sum(), loss_reduction="sum")
    said = [str(warning.message) for warning in caught]
    assert len(said) == 1 and said[0].startswith("Sequential: its forward sets Linear.weight to tensors")
