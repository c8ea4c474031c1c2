"""Device memory that plans are made by, beside what workers with a budget count when they run them."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe
from roundpipe import Device, ExecutePlan, RoundPipeRunConfig
from tests.fx.test_memory import Block, cross_entropy
from tests.repeats import repeats

NUM_MICROBATCHES = 4


def decoder():
    return nn.Sequential(nn.Embedding(2048, 32), *[Block() for _ in range(6)], nn.Linear(32, 2048, bias=False))


class Tied(nn.Module):
    """The output's weight is the embedding's."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(1024, 32), nn.Linear(32, 1024, bias=False)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head.weight = self.embed.weight

    def forward(self, ids):
        value = self.embed(ids)
        for block in self.blocks:
            value = block(value)
        return self.head(value)


class Convolutions(nn.Module):
    """Wide inside its blocks, and narrow between them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self.block(3 if i == 0 else 2) for i in range(6)])
        self.head = nn.Linear(2 * 16 * 16, 10)

    def block(self, channels):
        inside = [nn.Conv2d(channels, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU()]
        return nn.Sequential(
            *inside, nn.Conv2d(24, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 2, 1)
        )

    def forward(self, value):
        for block in self.blocks:
            value = block(value)
        return self.head(F.relu(value).flatten(1))


def ids(vocabulary):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, (8, 64), generator=generator)


IMAGES = torch.randn(16, 3, 16, 16), torch.arange(16) % 10
CASES = {
    "decoder": (decoder, ids(2048), ids(2048)),
    "tied weights": (Tied, ids(1024), ids(1024)),
    "convolutions": (Convolutions, *IMAGES),
}


@pytest.mark.parametrize(
    "num_stages, grain, num_workers",
    repeats(itertools.product((1, 2, 3), ("stage", "layer"), (1, 2)), ("2-layer-2", "3-stage-2")),
)
@pytest.mark.parametrize("case", CASES)
def test_what_is_predicted_is_what_is_counted(case, num_stages, grain, num_workers):
    build, value, label = CASES[case]
    example = value[: len(value) // NUM_MICROBATCHES]
    devices = [Device("cpu", memory_bytes=10**9)] * num_workers
    with roundpipe.compile(build(), example_args=(example,), devices=devices) as piped:
        num_layers = len(piped._runner.source.latest)  # a plan needs the number
        cuts = [round(i * num_layers / num_stages) for i in range(num_stages + 1)]
        ranges = list(zip(cuts, cuts[1:], strict=False))
        plan = ExecutePlan(ranges[:-1], ranges[-1], ranges[-2::-1] if ranges[:-1] else [])
        run = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCHES, recompute_grain=grain, execute_plan=plan)
        for _ in range(2):
            piped.forward_backward((value,), {}, label, cross_entropy, run_config=run)
        piped.synchronize()
        predicted, measured = piped.report().predicted, piped.peak_device_bytes()
    # the first is for any device: accelerators hold the gradients of the visit before, too, until they are down
    assert measured <= max(predicted.device_bytes) <= predicted.peak_device_bytes
    assert max(predicted.device_bytes) <= 1.1 * measured


class OnFakes(nn.Module):
    """Counts its forwards on tensors without data, which no snapshot puts back; refuses them if asked to."""

    def __init__(self, refuses=False):
        super().__init__()
        self.linear, self.runs, self.refuses = nn.Linear(6, 6), itertools.count(), refuses

    def forward(self, x):
        if type(x) is not torch.Tensor:
            next(self.runs)
            if self.refuses:
                raise NotImplementedError
        return self.linear(x)


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("kind", ["one", "two in turn", "new objects"])
def test_memory_is_computed_once_per_loss_and_size(kind, refuses):
    layer = OnFakes(refuses)
    losses = {
        "one": lambda step: nn.functional.mse_loss,
        "two in turn": lambda step: (nn.functional.mse_loss, nn.functional.l1_loss)[step % 2],
        "new objects": lambda step: nn.MSELoss(),
    }
    device = roundpipe.Device("cpu", memory_bytes=10**6)
    x, runs = torch.randn(4, 6), []
    with roundpipe.RoundPipe(nn.Sequential(layer, nn.Linear(6, 6)), devices=[device]) as piped:
        for step in range(6):
            piped.forward_backward((x,), label=x, loss_fn=losses[kind](step))
            runs.append(next(layer.runs))
    assert runs[0] > 0
    assert [later - earlier for earlier, later in itertools.pairwise(runs[1:])] == [1] * 4  # the test's own
