"""Buffers that losses are made of, and that code writes: looking at a model and at a loss function writes none."""

import copy

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipeRunConfig

cross_entropy = nn.functional.cross_entropy


def batch(seed):
    torch.manual_seed(seed)
    return torch.randn(12, 8), torch.randint(4, (12,))


def body():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


class Annealed(nn.Module):
    """A loss that its own counter scales."""

    def __init__(self):
        super().__init__()
        self.body = body()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, y):
        self.calls += 1
        return {"loss": cross_entropy(self.body(x), y) * torch.clamp(self.calls / 4, max=1.0)}


class Criterion(nn.Module):
    """A counter as above, a mean of losses, and statistics over samples of torch's own."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("level", torch.ones(()))

    def forward(self, out, y):
        self.calls += 1
        loss = cross_entropy(self.norm(out), y) * torch.clamp(self.calls / 4, max=1.0)
        with torch.no_grad():
            self.level.mul_(0.9).add_(0.1 * loss)
        return loss / self.level


@pytest.fixture
def net():
    return Annealed()


def test_tracing_and_explaining_write_nothing(net):
    with roundpipe.compile(net, devices=["cpu"] * 2, example_args=batch(0)):
        assert net.calls == 0
    roundpipe.explain(net, batch(0))
    assert net.calls == 0


def test_a_model_counts_its_calls(net):
    reference, losses = copy.deepcopy(net), []
    with roundpipe.compile(net, devices=["cpu"] * 2) as model:
        for seed, num_samples in enumerate((12, 12, 9, 12)):
            args = tuple(tensor[:num_samples] for tensor in batch(seed))
            loss = model.forward_backward(
                args,
                loss_fn=lambda out, _: out["loss"],
                loss_reduction="mean",
                run_config=RoundPipeRunConfig(num_microbatch=1),
            )
            losses.append((loss, reference(*args)["loss"].detach()))
            assert net.calls == reference.calls == seed + 1
    for found, expected in losses:
        torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:loss_reduction='mean' averaged")
@pytest.mark.parametrize("num_microbatch", [1, 3])
@pytest.mark.parametrize("is_changed", [False, True])
def test_a_loss_function_is_as_often_called_as_there_are_microbatches(num_microbatch, is_changed):
    criterion, net = Criterion(), body()
    own, reference = copy.deepcopy(criterion), copy.deepcopy(net)
    with roundpipe.compile(net, devices=["cpu"] * 2) as model:
        for seed in range(3):
            x, y = batch(seed)
            loss_fn = (lambda out, label, number=seed: criterion(out, label) + 0 * number) if is_changed else criterion
            model.forward_backward(
                (x,),
                label=y,
                loss_fn=loss_fn,
                loss_reduction="mean",
                run_config=RoundPipeRunConfig(num_microbatch=num_microbatch),
            )
            for piece, label in zip(x.chunk(num_microbatch), y.chunk(num_microbatch), strict=True):
                own(reference(piece), label)
            for name, buffer in own.named_buffers():
                torch.testing.assert_close(criterion.get_buffer(name), buffer)
