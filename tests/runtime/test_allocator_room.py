"""Plans leave devices' allocators more where steps have retries and get faster by it, and what they had otherwise."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import Device, ExecutePlan
from roundpipe.core.tiling import UNTILED
from roundpipe.runtime.device.cpu import CpuBackend
from roundpipe.runtime.engine.allocator_room import (
    LONGEST_PAUSE,
    LOOKED_AT,
    NOT_STEADY,
    SHARES,
    AllocatorRoom,
    RetryCounter,
    RunsBy,
    StepRetries,
)
from roundpipe.runtime.engine.cost_model import CostModel
from tests.runtime.models import config, square_loss

PLAN = ExecutePlan([(0, 2)], (2, 4), [(0, 2)])
MOST_STEPS = (len(SHARES) + 1) * (NOT_STEADY + LOOKED_AT)


class FakeDevices:
    """Devices whose steps take as long, and whose allocators retry as often, as a share says."""

    def __init__(self, seconds: Callable[[float], float], retries: Callable[[float], int]) -> None:
        self.seconds, self.retries, self.count = seconds, retries, 7
        backend = SimpleNamespace(device="cuda:0", num_retries=lambda: self.count)
        self.counter = RetryCounter([backend, backend])  # two workers of one device count once
        self.room, self.present = AllocatorRoom(), RunsBy(PLAN, UNTILED, 0.0)
        self.asked: list[float] = []
        self.fits = 1.0

    def choose(self, share: float) -> RunsBy | None:
        self.asked.append(share)
        return RunsBy(PLAN, UNTILED, share) if share <= self.fits else None

    def step(self, *, failed: bool = False) -> None:
        record = self.room.begin(self.present, self.counter)
        self.count += self.retries(self.present.share)
        if record is not None:
            record.end(self.seconds(self.present.share), failed=failed)
        if (following := self.room.following(self.present, self.choose)) is not None:
            self.present = following
            self.room.share = following.share

    def run(self, num_steps: int = 10 * MOST_STEPS) -> list[float]:
        """The shares of steps."""
        shares = []
        for _ in range(num_steps):
            shares.append(self.present.share)
            self.step()
        return shares


def test_steps_without_retries_change_nothing() -> None:
    devices = FakeDevices(lambda share: 1.0, lambda share: 0)
    assert set(devices.run()) == {0.0}
    assert not devices.asked and not devices.room.is_settled
    devices.retries = lambda share: 3 * (share == 0)  # they may begin at any time
    devices.seconds = lambda share: 1.0 - (share > 0) / 2
    devices.run()
    assert devices.present.share == SHARES[0]


@pytest.mark.parametrize(
    ("seconds", "retries", "kept"),
    [
        ([2.0, 1.0, 9.0, 9.0], [5, 0, 0, 0], 1),  # enough at once
        ([2.0, 1.5, 1.0, 9.0], [5, 5, 0, 0], 2),
        ([2.0, 1.5, 1.3, 1.0], [5, 5, 5, 5], 3),  # all is tried
        ([2.0, 2.0, 1.0, 9.0], [5, 5, 0, 0], 2),  # the first share alone brings nothing
        ([2.0, 1.99, 9.0, 9.0], [5, 0, 0, 0], 0),  # noise
        ([2.0, 2.5, 2.6, 2.7], [5, 5, 5, 5], 0),
        ([2.0, 1.0, 1.5, 1.5], [5, 1, 1, 1], 1),  # more costs more than it brings
    ],
)
def test_the_fastest_share_is_kept_for_good(seconds: list[float], retries: list[int], kept: int) -> None:
    all_shares = (0.0, *SHARES)
    devices = FakeDevices(
        lambda share: seconds[all_shares.index(share)], lambda share: retries[all_shares.index(share)]
    )
    shares = devices.run()
    assert set(shares[MOST_STEPS:]) == {all_shares[kept]}
    assert sum(before != after for before, after in zip(shares, shares[1:], strict=False)) <= len(SHARES) + 1
    assert len(devices.asked) == len(set(devices.asked))


def test_the_longer_there_are_no_retries_the_fewer_steps_are_looked_at() -> None:
    devices = FakeDevices(lambda share: 1.0, lambda share: 0)
    looked_at = []
    for _ in range(12 * LONGEST_PAUSE):
        looked_at.append(devices.room.begin(devices.present, devices.counter))
        if (record := looked_at[-1]) is not None:
            record.end(1.0, failed=False)
        assert devices.room.following(devices.present, devices.choose) is None
    assert None not in looked_at[: NOT_STEADY + LOOKED_AT]
    late = looked_at[-(LONGEST_PAUSE + LOOKED_AT) :]
    assert late.count(None) == LONGEST_PAUSE
    other = RunsBy(ExecutePlan([], (0, 4), []), UNTILED, 0.0)
    assert devices.room.begin(other, devices.counter) is not None


def test_single_retries_are_not_steady() -> None:
    devices = FakeDevices(lambda share: 1.0, lambda share: 0)
    for number in range(8 * LOOKED_AT):
        devices.retries = lambda share, number=number: 9 * (number % (2 * LOOKED_AT) == 0)
        devices.step()
    assert not devices.asked


def test_what_does_not_fit_ends_it() -> None:
    devices = FakeDevices(lambda share: 2.0 - share, lambda share: 5)
    devices.fits = SHARES[0]
    devices.run()
    assert devices.asked == list(SHARES[:1]) + list(SHARES[1:2])
    assert devices.present.share == 0.0, "3% of the room made steps less than 3% faster"
    assert devices.room.is_settled


def test_failed_steps_and_other_plans_are_left_out() -> None:
    devices = FakeDevices(lambda share: 2.0 - (share > 0), lambda share: 5)
    for _ in range(MOST_STEPS):
        devices.step(failed=True)
    for number in range(MOST_STEPS):
        devices.present = RunsBy(PLAN if number % 3 else ExecutePlan([], (0, 4), []), UNTILED, 0.0)
        devices.step()
    assert not devices.asked
    devices.run()
    assert devices.present.share > 0


def test_overlapping_steps_count_each_retry_once() -> None:
    backend = SimpleNamespace(device="cuda:0", num_retries=lambda: counts[0])
    counts = [5]
    counter = RetryCounter([backend])
    room, present = AllocatorRoom(), RunsBy(PLAN, UNTILED, 0.0)
    first = room.begin(present, counter)
    counts[0] += 2
    second = room.begin(present, counter)  # beside the end of the first
    counts[0] += 3
    assert first is not None and second is not None
    first.end(1.0, failed=False)
    counts[0] += 4
    second.end(1.0, failed=False)
    assert (first.number, second.number, counter.read()) == (5, 4, 9)


@pytest.fixture
def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)])


@pytest.fixture
def stalls(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Allocators that retry twice in each step without a share; steps take as long as is asked."""
    state = SimpleNamespace(count=0, seconds=lambda share: 2.0 - (share > 0), shares=[])
    end = StepRetries.end

    def ended(step: StepRetries, seconds: float, *, failed: bool) -> None:
        state.shares.append(step.setting.share)
        state.count += 2 * (step.setting.share == 0)
        end(step, state.seconds(step.setting.share), failed=failed)

    monkeypatch.setattr(StepRetries, "end", ended)
    monkeypatch.setattr(CostModel, "times_of", lambda model, call: None)  # measured times change plans, too
    monkeypatch.setattr(CpuBackend, "num_retries", lambda backend: state.count)
    yield state


def train(pipe: roundpipe.RoundPipe, num_steps: int) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
    for step in range(num_steps):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        pipe.forward_backward((x,), loss_fn=square_loss)
        pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        pipe.synchronize()  # the step is over
    return [parameter.detach().clone() for parameter in pipe.parameters()]


@pytest.mark.parametrize("is_faster", [True, False])
def test_a_run_leaves_allocators_room(
    deep: nn.Module, stalls: SimpleNamespace, caplog: pytest.LogCaptureFixture, is_faster: bool
) -> None:
    """The plan of a budget that is just enough for it gets smaller, or comes back; the numbers stay."""
    budget_bytes, reference = 150_000, copy.deepcopy(deep)
    if not is_faster:
        stalls.seconds = lambda share: 2.0
    example, devices = (torch.randn(8, 64),), [Device("cpu", budget_bytes)]
    with roundpipe.compile(
        deep, example_args=example, devices=devices, model_run_config=config(4), name="deep"
    ) as pipe:
        num_steps = NOT_STEADY + LOOKED_AT + 1
        with caplog.at_level(logging.INFO, "roundpipe"):
            train(pipe, num_steps)
            assert stalls.shares == [0.0] * (num_steps - 1) + [SHARES[0]]
            assert "allocators stopped the devices 2.0 times a step" in caplog.text
            table, report = pipe.partition_table(), pipe.report()
            assert "allocator" in table
            assert f"allocator retries {2 * (num_steps - 1) / num_steps:.2g} a round" in str(report)
            assert report.predicted.device_memory.allocator == int(SHARES[0] * budget_bytes)
            assert report.predicted.peak_device_bytes <= budget_bytes
            trained = train(pipe, 2 * num_steps)
        assert ("that stays" in caplog.text) is is_faster
        assert ("all is as it was" in caplog.text) is not is_faster
        assert ("allocator" in pipe.partition_table()) is is_faster
        assert stalls.shares == [0.0] * (num_steps - 1) + [SHARES[0]] * (num_steps - 1), "then nobody asks"
    with roundpipe.compile(reference, example_args=example, devices=["cpu"], model_run_config=config(4)) as free:
        train(free, num_steps)
        for one, other in zip(trained, train(free, 2 * num_steps), strict=True):
            torch.testing.assert_close(one, other)
