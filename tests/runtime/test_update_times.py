"""What updates have taken, part by part, and which of them count."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from roundpipe.planning.machine import ChainSeconds
from roundpipe.runtime.optimizer.update_times import KEPT, MOST_LOOKED_AT, UpdateTimes
from roundpipe.runtime.profiling.host_log import HostLog
from roundpipe.runtime.weights.gate import Steps


class Rounds(Steps):
    """Rounds that bring gradients home."""

    num_trained = 0
    gradients_s = 0.0

    def home_s(self):
        return self.gradients_s


class Clock:
    """Updates that take what they are told to."""

    def __init__(self):
        self.rounds, self.log = Rounds(), HostLog("optimizer")
        self.times = UpdateTimes(self.log, self.rounds)

    def update(self, update_s, *, begin_s=0.0, weights_s=0.0, ready_s=0.0, gradients_s=0.0, num_rounds=1, there=0.0):
        """One update, ``there`` being the share of the parameters that live on a device."""
        self.rounds.num_trained += num_rounds
        self.rounds.gradients_s += gradients_s
        self.times.asked()
        self.times.begin()
        self.log.seconds["begin"] += begin_s
        self.log.seconds["hand-over"] += weights_s
        self.times.exchanged()
        self.log.seconds["update"] += update_s
        self.log.seconds["hand-over"] += ready_s
        self.times.end([pair(0, there == 1.0), pair(1, there > 0.0)])


def pair(number, is_away):
    parameter = SimpleNamespace(numel=lambda: 100, requires_grad=True)
    return SimpleNamespace(copy=(number, "copy"), parameter=parameter, is_away=is_away)


def test_each_part_is_of_the_same_updates_and_per_round():
    clock = Clock()
    assert clock.times.per_round() is None
    for _ in range(3):
        clock.update(4.0, begin_s=0.5, weights_s=1.5, ready_s=2.0, gradients_s=1.0, num_rounds=2)
    assert clock.times.per_round() == ChainSeconds(update_s=3.0, hand_over_s=1.0, gradients_s=0.5)
    assert clock.times.all_on_host() == clock.times.per_round()


def test_the_first_update_counts_only_until_there_are_others():
    clock = Clock()
    clock.update(9.0)
    assert clock.times.per_round().update_s == 9.0
    clock.update(2.0)
    assert clock.times.per_round().update_s == 2.0 and clock.times.all_on_host() is None
    clock.update(2.0)
    assert clock.times.all_on_host().update_s == 2.0 and clock.times.on_host_s()[0] == 2.0


def test_long_steps_tell_once_they_are_steady_or_enough_of_them_were_seen(monkeypatch):
    clock, now = Clock(), [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    found = []
    for step_s in (9.0, 4.0, 3.5, 3.0, 2.95):
        clock.update(2.0)
        now[0] += step_s
        found.append(clock.times.on_host_s())
    clock.update(2.0)
    assert found == [None] * 5 and clock.times.on_host_s() == (2.0, pytest.approx(2.95))  # 3.0 and 2.95 are alike
    clock, now[0] = Clock(), 0.0
    for number in range(KEPT):
        clock.update(2.0)
        now[0] += 1.0 + number % 2
        assert clock.times.on_host_s() is None
    clock.update(2.0)
    assert clock.times.on_host_s()[1] == 1.0  # what makes some longer is not what a step takes


def test_updates_that_still_get_faster_tell_nothing_yet():
    clock = Clock()
    for update_s in (9.0, 6.0, 4.0):
        clock.update(update_s)
        assert not clock.times.are_warm and clock.times.on_host_s() is None
    clock.update(3.5)
    assert clock.times.are_warm


def test_updates_that_never_agree_are_taken_as_they_are():
    clock = Clock()
    for number in range(1 + MOST_LOOKED_AT):
        assert clock.times.on_host_s() is None
        clock.update(float(1 + number % 2))
    assert clock.times.on_host_s()[0] in (1.0, 2.0)


def test_what_lives_on_a_device_is_counted_as_if_it_were_on_the_host_too():
    clock = Clock()
    for _ in range(3):
        clock.update(4.0, there=0.5)
    assert clock.times.per_round().update_s == 4.0 and clock.times.all_on_host().update_s == 8.0


def test_behind_a_move_updates_are_measured_anew():
    clock = Clock()
    for _ in range(3):
        clock.update(4.0)
    clock.update(9.0, there=0.5)
    assert clock.times.per_round().update_s == 9.0 and clock.times.all_on_host().update_s == 4.0
    clock.update(1.0, there=0.5)
    clock.update(1.0, there=0.5)
    assert clock.times.per_round().update_s == 1.0 and clock.times.all_on_host().update_s == pytest.approx(2.0)
    clock.update(0.1, there=1.0)
    assert clock.times.all_on_host().update_s == pytest.approx(2.0)
