"""Loss scaling against torch's scaler, and across asynchronous steps."""

import threading
import warnings

import pytest
import torch
from torch import nn

from roundpipe.core.errors import ConfigError
from roundpipe.runtime.optimizer.grad_scaler import GradScaler
from roundpipe.runtime.optimizer.optimizer import OptimizerSide
from roundpipe.runtime.weights.gate import Gates

OPTIONS = {"init_scale": 8.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 2}


class Loop:
    """A one-weight model trained with a scaler; gradients are 1, or infinite in the rounds named."""

    def __init__(self, scaler, overflow=(), is_async=False, update="inside"):
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        self.gates = Gates(deadline_s=20)
        self.side = OptimizerSide(self.model.named_parameters, torch.float64, gates=self.gates, deadline_s=20)
        self.optimizer = torch.optim.SGD(self.side.optim_parameters(), lr=1.0)
        self.scaler, self.overflow, self.is_async, self.update = scaler, overflow, is_async, update
        self.scales, self.gradients = [], []

    def step_fn(self):
        self.scaler.unscale_(self.optimizer)
        self.gradients.append(self.optimizer.param_groups[0]["params"][0].grad.item())
        self.scaler.step(self.optimizer)
        if self.update == "inside":
            self.scaler.update()
        self.optimizer.zero_grad()

    def step(self):
        """A step, up to where the next round may use the parameters."""
        self.side.step(self.step_fn, self.is_async)
        for gate in (self.gates.weights, self.gates.gradients):
            gate.wait(self.model.parameters(), "the next round")

    def run(self, count):
        for index in range(count):
            batch = torch.full((1, 1), float("inf") if index in self.overflow else 1.0)
            loss = self.scaler.scale(self.model(batch).sum())
            self.scales.append(self.scaler.scale(torch.ones(())).item())
            loss.backward()
            self.step()
            if self.update == "outside":
                self.scaler.update()
        self.side.wait()
        self.side.synchronize()
        return self


def run_torch(count, overflow):
    scaler, weight = (
        torch.amp.GradScaler("cpu", **OPTIONS),
        nn.Parameter(torch.zeros(1, 1, dtype=torch.float64)),
    )
    optimizer, scales = torch.optim.SGD([weight], lr=1.0), []
    for index in range(count):
        scales.append(scaler.scale(torch.ones(())).item())
        scaler.scale((weight * (float("inf") if index in overflow else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return scales, weight.item(), scaler.state_dict()


@pytest.mark.parametrize("is_async", [False, True])
def test_torchs_own_is_warned_of_once(is_async):
    """It reads its scale before this has come from a device."""
    for scaler, number in ((torch.amp.GradScaler("cpu", **OPTIONS), 1), (GradScaler(**OPTIONS), 0)):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            loop = Loop(scaler, is_async=is_async)
            for _ in range(3):
                loop.run(1)  # waits for the update: torch's scaler writes its scale while a graph may need it
        assert sum("Use roundpipe.GradScaler" in str(each.message) for each in warned) == number


@pytest.mark.parametrize("overflow", [(), (1,), (0, 3, 4), (5,)])
def test_sync_steps_are_torchs(overflow):
    loop = Loop(GradScaler(**OPTIONS), overflow).run(8)
    scales, weight, state = run_torch(8, overflow)
    assert loop.scales == scales
    assert loop.model.weight.item() == weight == -(8 - len(overflow))
    assert loop.scaler.state_dict() == state


@pytest.mark.parametrize("update", ["inside", "outside"])
def test_async_gradients_are_divided_by_their_own_scale(update):
    """The scale lags by one step; no gradient is ever off, whatever the scale does meanwhile."""
    overflow = (3, 9)
    loop = Loop(GradScaler(**OPTIONS), overflow, is_async=True, update=update).run(14)
    finite = [gradient for index, gradient in enumerate(loop.gradients) if index not in overflow]
    assert finite == [1.0] * 12
    assert not any(torch.isfinite(torch.tensor(loop.gradients[index])) for index in overflow)
    assert loop.model.weight.item() == -12
    # Round k is scaled by what update k-2 left: growth after updates 2, 6, ..., backoff from the scale used.
    assert loop.scales == [8, 8, 8, 32, 32, 8, 8, 32, 32, 128, 128, 32, 32, 128]


def test_a_stale_overflow_backs_off_once():
    loop = Loop(GradScaler(**OPTIONS | {"growth_interval": 100}), (2, 3), is_async=True).run(7)
    assert loop.scales == [8, 8, 8, 8, 2, 2, 2]


def test_update_in_the_training_loop_waits_for_the_running_step():
    loop = Loop(GradScaler(**OPTIONS | {"growth_interval": 1}), is_async=True, update="outside")
    release = threading.Event()
    inner = loop.step_fn
    loop.step_fn = lambda: (release.wait(10), inner())
    loss = loop.scaler.scale(loop.model(torch.ones(1, 1)).sum())
    loss.backward()
    loop.side.step(loop.step_fn)
    loop.scaler.update()
    assert loop.scaler.state_dict()["scale"] == 8.0
    release.set()
    loop.side.wait()
    assert loop.scaler.state_dict()["scale"] == 32.0
    assert loop.scaler.get_scale() == 8.0
    loop.side.synchronize()
    assert loop.scaler.get_scale() == 32.0


def test_update_in_the_training_loop_does_not_cut_into_the_running_step():
    loop = Loop(GradScaler(**OPTIONS | {"growth_interval": 1}), is_async=True)
    unscaled, updated = threading.Event(), threading.Event()

    def step_fn():
        loop.scaler.unscale_(loop.optimizer)
        unscaled.set()
        assert updated.wait(10)
        loop.scaler.step(loop.optimizer)

    loop.scaler.scale(loop.model(torch.ones(1, 1)).sum()).backward()
    loop.side.step(step_fn)
    assert unscaled.wait(10)
    loop.scaler.update()
    updated.set()
    loop.side.synchronize()
    assert loop.model.weight.item() == -1.0
    assert loop.scaler.get_scale() == 32.0


def test_sparse_gradients_are_unscaled():
    table = nn.Embedding(4, 1, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    scaler = GradScaler(**OPTIONS)
    scaler.scale(table(torch.tensor([1, 1, 2])).sum()).backward()
    scaler.unscale_(optimizer)
    assert table.weight.grad.to_dense().flatten().tolist() == [0, 2, 1, 0]


def test_synchronize_keeps_the_scale_of_gradients_that_are_due():
    loop = Loop(GradScaler(**OPTIONS | {"growth_interval": 1}), is_async=True).run(1)
    scaler, side = loop.scaler, loop.side
    assert scaler.get_scale() == 32.0
    scaler.scale(loop.model(torch.ones(1, 1)).sum()).backward()
    loop.step()
    scaler.scale(loop.model(torch.ones(1, 1)).sum()).backward()
    for _ in range(3):
        side.synchronize()
        assert scaler.get_scale() == 32.0
    side.step(loop.step_fn, is_async=False)
    assert loop.gradients == [1.0, 1.0, 1.0]


def test_plain_use_without_a_model():
    scaler, weight = GradScaler(**OPTIONS), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for _ in range(2):
        scaler.scale([weight.sum()])[0].backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 32.0
    assert weight.item() == -2.0
    scaler.update(3.0)
    assert scaler.get_scale() == 3.0


def test_step_without_update_keeps_the_scale():
    loop = Loop(GradScaler(**OPTIONS), is_async=True, update="never").run(4)
    assert loop.gradients == [1.0] * 4
    assert loop.scales == [8] * 4


def test_disabled_scaler_does_nothing():
    loop = Loop(GradScaler(enabled=False), is_async=True).run(3)
    assert loop.scaler.get_scale() == 1.0 and not loop.scaler.is_enabled()
    assert loop.model.weight.item() == -3
    assert loop.scaler.state_dict() == {}


def test_low_precision_losses_are_promoted_as_by_torch():
    loss = GradScaler().scale(torch.ones((), dtype=torch.float16))
    assert loss.dtype == torch.float32 and loss.item() == 2.0**16


def test_state_is_interchangeable_with_torchs():
    ours, theirs = GradScaler(**OPTIONS), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=7)
    ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict() == theirs.state_dict()
    assert ours.scale(torch.ones(())).item() == ours.get_scale() == 4.0
    theirs.load_state_dict(GradScaler(**OPTIONS).state_dict())
    assert theirs.state_dict() == GradScaler(**OPTIONS).state_dict()


def test_misuse_is_refused():
    with pytest.raises(ConfigError, match=r"growth_factor=1\.0"):
        GradScaler(growth_factor=1.0)
    scaler = GradScaler()
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float16))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with pytest.raises(ConfigError, match="optim_dtype=torch.float32"):
        scaler.step(optimizer)
    with pytest.raises(ConfigError, match="takes no closure"):
        scaler.step(optimizer, lambda: 0)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scaler.step(optimizer)
    with pytest.raises(ConfigError, match="called twice"):
        scaler.step(optimizer)
    with pytest.raises(ConfigError, match="called twice"):
        scaler.unscale_(optimizer)
    with pytest.raises(ConfigError, match="got a str"):
        scaler.scale("loss")
    with pytest.raises(ConfigError, match="empty state"):
        scaler.load_state_dict({})
