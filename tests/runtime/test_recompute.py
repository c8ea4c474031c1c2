"""What a recomputation needs to repeat a forward: seeds, marks, and the buffers that the forward saw."""

import copy
import threading
import time

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.layers import LayerSpec
from roundpipe.runtime.engine.recompute import (
    ForwardRecord,
    LayerScope,
    base_seed,
    doing_recompute,
    layer_seed,
)
from tests.runtime.models import DTYPE, Noted, assert_round_is_eager, assert_same, batch, buffers, config, square_loss

PLAN = roundpipe.ExecutePlan([(0, 2), (2, 4)], (4, 5), [(2, 4), (0, 2)])
grains = pytest.mark.parametrize("grain", ["stage", "layer"])
workers = pytest.mark.parametrize("workers", [1, 2, 3])


def test_seeds_of_layers_and_microbatches_differ():
    seeds = {layer_seed(base, layer, m) for base in (0, 1, 7) for layer in range(50) for m in range(20)}
    assert len(seeds) == 3 * 50 * 20
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert layer_seed(5, 2, 3) == layer_seed(5, 2, 3)


def test_the_base_seed_comes_from_torchs_generator():
    torch.manual_seed(3)
    draws, weights = [LayerSpec("")], [None]
    first, second = (base_seed([0], draws, weights) for _ in range(2))
    torch.manual_seed(3)
    assert base_seed([0], draws, weights) == first != second
    assert base_seed([], draws, weights) == 0


def test_the_mark_is_of_the_thread_and_nests():
    seen = []
    assert not doing_recompute()

    def recomputing():
        return LayerScope(ForwardRecord({}), (0, 0), None, is_recomputation=True)

    with recomputing():
        with recomputing():
            pass
        assert doing_recompute()
        thread = threading.Thread(target=lambda: seen.append(doing_recompute()))
        thread.start()
        thread.join(5)
    assert not doing_recompute() and seen == [False]


def noted_model():
    return nn.Sequential(
        nn.Linear(6, 6), Noted(), nn.Sequential(nn.Linear(6, 6), Noted()), nn.BatchNorm1d(6), nn.Linear(6, 6)
    ).to(DTYPE)


@grains
@workers
def test_recomputation_sees_the_buffers_of_the_forward(workers, grain):
    """`Noted`'s output depends on its buffers, so a gradient tells which ones the recomputation saw."""
    assert_round_is_eager(noted_model(), (batch(8),), num=4, workers=workers, grain=grain, plan=PLAN, calls=3)


@workers
def test_the_mode_may_change_between_calls(workers):
    model = noted_model()
    for training in (True, False, True):
        model.train(training)
        model.zero_grad()
        assert_round_is_eager(model, (batch(8),), num=4, workers=workers, plan=PLAN)


def test_a_layer_that_starts_to_write_is_noticed():
    class Late(nn.Module):
        """Writes its buffer only once it is told to."""

        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.writes = False

        def forward(self, value):
            if self.writes:
                self.count += 1
            return value * 2

    model = nn.Sequential(nn.Linear(6, 6), Late(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).to(DTYPE)
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        for writes, expected in ((False, 0), (True, 4), (True, 8)):
            model[1].writes = writes
            piped.forward_backward((batch(8),), loss_fn=square_loss, run_config=config(4, plan=PLAN))
            assert model[1].count == expected


@grains
def test_each_layer_runs_once_more_and_the_fused_tail_does_not(grain):
    model = noted_model()
    calls = []
    for index, layer in enumerate(model):
        layer.register_forward_hook(lambda *_, index=index: calls.append((index, doing_recompute())))
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        piped.forward_backward((batch(6),), loss_fn=square_loss, run_config=config(3, grain, PLAN))
    for index in range(5):
        assert calls.count((index, False)) == 3
        assert calls.count((index, True)) == (3 if index < 4 else 0)


@pytest.mark.parametrize("workers", [3, 5])
def test_recomputation_does_not_overtake_the_forward(workers):
    """The forward of the second stage is slow; its backward stage is on a worker that has nothing else to do."""

    class Slow(Noted):
        def forward(self, value):
            if not doing_recompute():
                time.sleep(0.02)
            return super().forward(value)

    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), Slow(), nn.Linear(6, 6)).to(DTYPE)
    assert_round_is_eager(model, (batch(8),), num=4, workers=workers, plan=PLAN, calls=2)


class DecaysSometimes(nn.Module):
    """Writes a buffer without a change of its version, for some microbatches only."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("average", torch.ones(6))

    def forward(self, x):
        if float(x.detach().sum()) > 0:
            if self.how == "data":
                self.average.data.mul_(0.5)
            else:
                x = self.norm(x)
        return self.linear(x) * self.average


@grains
@pytest.mark.parametrize("how", ["data", "norm"])
def test_buffers_that_only_a_later_microbatch_writes(how, grain):
    torch.manual_seed(0)
    model = nn.Sequential(*(DecaysSometimes(how) for _ in range(3))).to(DTYPE)
    given = torch.cat([-torch.rand(3, 6), torch.rand(6, 6)]).to(DTYPE)
    model[0].linear.weight.data.copy_(torch.eye(6))
    model[1].linear.weight.data.copy_(torch.eye(6))
    plan = roundpipe.ExecutePlan([(0, 1), (1, 2)], (2, 3), [(1, 2), (0, 1)])
    assert_round_is_eager(model, (given,), workers=2, grain=grain, plan=plan)


class CountsPositive(nn.Module):
    """Writes its buffer for inputs of one sign only."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("seen", torch.ones(6))

    def forward(self, x):
        if float(x.detach().sum()) > 0:
            self.seen.add_(1)
        return self.linear(x) * self.seen


@grains
def test_the_first_forward_that_writes_a_buffer_is_recomputed_on_what_it_saw(grain):
    torch.manual_seed(0)
    model = nn.Sequential(*(CountsPositive() for _ in range(3))).to(DTYPE)
    with torch.no_grad():
        for layer in model:
            layer.linear.weight.copy_(torch.eye(6))
            layer.linear.bias.zero_()
    plan = roundpipe.ExecutePlan([(0, 1), (1, 2)], (2, 3), [(1, 2), (0, 1)])
    for number_of_positive in (0, 1, 3):
        given = -torch.rand(6, 6, dtype=DTYPE) - 0.1
        given[2 * (3 - number_of_positive) :] *= -1
        model.zero_grad()
        assert_round_is_eager(model, (given,), workers=2, grain=grain, plan=plan)


class Two(nn.Module):
    """Statistics of two modules, each in a mode of its own, of inputs that are positive."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(6), nn.BatchNorm1d(6)

    def forward(self, x):
        return self.second(self.first(x)) if float(x.detach().sum()) > 0 else x * 2


@workers
@pytest.mark.parametrize("others", [None, "first", "all"])
def test_statistics_are_written_without_gradients_whatever_calls_there_were_before(workers, others):
    """batch_norm writes them without a change of version; ``others``: what was in evaluation before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Two(), nn.Linear(6, 6)).to(DTYPE)
    model[0].weight.data.copy_(torch.eye(6))
    reference = copy.deepcopy(model)
    in_one = config(1, plan=roundpipe.ExecutePlan([(0, 1)], (1, 3), [(0, 1)]))
    with roundpipe.RoundPipe(model, devices=["cpu"] * workers, model_run_config=in_one) as piped:
        for module in (model, reference):
            module[1].first.train(others is None)
            module[1].second.train(others != "all")
        negative = -torch.rand(8, 6, dtype=DTYPE) - 1
        for _ in range(2):
            piped.forward_backward((negative,), loss_fn=square_loss)
        piped.synchronize()
        for module in (piped, reference):
            module.train()
            with torch.no_grad():
                module(negative + 3)
        assert model[1].first.running_mean.abs().sum() > 0
        assert_same(buffers(model), buffers(reference), 1e-12)
