"""How far a device may be behind its worker, and what lives on it meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roundpipe.planning.carried import AHEAD_BYTES, LARGE_BYTES, RUNS_AHEAD, SMALL_BYTES
from roundpipe.runtime.engine.pace import InFlight, Pace


class SlowDevice:
    """Runs what it is given only when somebody waits for it; or at once, if it is not slow."""

    def __init__(self, is_slow: bool = True) -> None:
        self.device = torch.device("cuda", 0)
        self.is_slow = is_slow
        self.num_issued = self.num_done = 0
        self.uploads: list[Any] = []

    def upload(self, num_bytes: int) -> None:
        self.uploads.append(SimpleNamespace(nbytes=num_bytes))

    def take_uploads(self) -> list[Any]:
        taken, self.uploads = self.uploads, []
        return taken

    def record(self, lane: object) -> Any:
        self.num_issued += 1
        return SimpleNamespace(is_done=self._is_done(self.num_issued), synchronize=self._synchronize(self.num_issued))

    def _is_done(self, number: int) -> Callable[[], bool]:
        return lambda: not self.is_slow or self.num_done >= number

    def _synchronize(self, number: int) -> Callable[[], None]:
        def synchronize() -> None:
            self.num_done = max(self.num_done, number)

        return synchronize


class Run:
    """Runs of parts, with bytes that come up for each part."""

    def __init__(self) -> None:
        self.device, self.in_flight = SlowDevice(), InFlight()
        self.pace = Pace(self.device, self.in_flight, InFlight())  # type: ignore[arg-type]
        self.most_bytes = 0

    def run(self, num_parts: int, num_bytes: int, num_microbatches: int) -> None:
        self.pace.begin_run(num_microbatches)
        for part in range(num_parts):
            if part:
                self.pace.begin_part()
            self.device.upload(num_bytes)
            entries = self.in_flight._entries  # what is kept alive is nobody else's business
            alive = [upload for _, uploads, _ in entries for upload in uploads]
            self.most_bytes = max(self.most_bytes, sum(each.nbytes for each in (*alive, *self.device.uploads)))
        self.pace.end_run()


@pytest.mark.parametrize(("num_bytes", "most"), [(LARGE_BYTES, 2), (1000, 10)])
def test_a_forward_of_many_layers_waits_for_large_values_on_their_way_down(num_bytes: int, most: int) -> None:
    runs, alive = Run(), 0
    runs.pace.begin_run(1)
    for _ in range(10):
        copied = runs.device.record(None)
        runs.in_flight.add(copied, "values")
        alive = max(alive, len(runs.in_flight))
        runs.pace.end_layer(copied, num_bytes)
        runs.in_flight.release()
    assert alive == most


def test_a_stage_of_many_layers_has_the_large_values_of_one() -> None:
    runs, large = Run(), LARGE_BYTES + 1
    for _ in range(2):
        runs.run(num_parts=10, num_bytes=large, num_microbatches=1)
    assert runs.most_bytes == large


def test_of_several_microbatches_one_is_ahead() -> None:
    runs, large = Run(), LARGE_BYTES + 1
    for _ in range(4):
        runs.run(num_parts=10, num_bytes=large, num_microbatches=4)
    assert runs.most_bytes == 2 * large


def test_nothing_waits_between_parts_with_small_values() -> None:
    runs = Run()
    for number in range(RUNS_AHEAD):
        runs.run(num_parts=10, num_bytes=1000, num_microbatches=8)
        assert runs.device.num_done == 0, number
    runs.run(num_parts=10, num_bytes=1000, num_microbatches=8)
    assert runs.device.num_done == 0  # three are ahead of it
    runs.run(num_parts=10, num_bytes=1000, num_microbatches=8)
    assert runs.device.num_done == 10  # the first run's parts
    assert runs.most_bytes <= (RUNS_AHEAD + 2) * 10 * 1000


@pytest.mark.parametrize("is_slow", [True, False])
@pytest.mark.parametrize(
    ("up_bytes", "down_bytes", "num_microbatches", "most_held"),
    [
        (AHEAD_BYTES // RUNS_AHEAD - 10, 10, 4, RUNS_AHEAD),
        (AHEAD_BYTES // RUNS_AHEAD, 10, 4, RUNS_AHEAD - 1),
        (AHEAD_BYTES // 2, 10, 4, 1),
        (10, AHEAD_BYTES // 2, 2, 1),
        (SMALL_BYTES - 10, 10, 1, RUNS_AHEAD),
        (SMALL_BYTES, 10, 1, 0),
        (LARGE_BYTES, LARGE_BYTES, 1, 0),
    ],
)
def test_what_is_held_of_microbatches_before_is_the_same_on_every_device(
    is_slow: bool, up_bytes: int, down_bytes: int, num_microbatches: int, most_held: int
) -> None:
    device, in_flight = SlowDevice(is_slow), InFlight()
    pace = Pace(device, in_flight, InFlight())  # type: ignore[arg-type]
    held = []
    for _ in range(8):
        pace.begin_run(num_microbatches)
        held.append(len(in_flight) // 2)
        device.upload(up_bytes)
        pace.keep_downloads(device.record(None), torch.empty(down_bytes, dtype=torch.uint8, device="meta"))
        pace.end_run()
    assert held == [min(number, most_held) for number in range(8)]
    if is_slow:
        assert device.num_done == 2 * (7 - most_held), "waited for more than what must be gone"


@pytest.mark.parametrize("num_runs", [1, 2, 3, 5])
def test_gradients_of_weights_are_held_while_the_next_visit_gets_its_own(num_runs: int) -> None:
    """A device that has done all at once holds those of one visit, through two runs of the next one."""
    leaving = InFlight()
    device = SlowDevice(is_slow=False)
    pace = Pace(device, InFlight(), leaving)  # type: ignore[arg-type]
    for visit in range(4):
        pace.begin_visit()
        held = []
        for _ in range(num_runs):
            pace.begin_run(num_runs)
            held.append(len(leaving))
            pace.end_run()
        assert held == ([1, 1, 0, 0, 0] if visit else [0] * 5)[:num_runs]
        leaving.add(device.record(None), "gradients")


@pytest.mark.parametrize("num_runs", [1, 2, 3, 5])
def test_what_a_late_thread_was_to_let_go_of_is_held_as_without_it(num_runs: int) -> None:
    """A step after idleness has the gradients of one visit beside its own, as one that follows at once."""
    leaving, device = InFlight(), SlowDevice(is_slow=False)
    pace = Pace(device, InFlight(), leaving)  # type: ignore[arg-type]
    for _ in range(3):
        rest = pace.leave()  # which nobody waits for
        pace.begin_step()
        assert not any(rest)
        for _ in range(2):
            pace.begin_visit()
            for run in range(num_runs):
                pace.begin_run(num_runs)
                assert len(leaving) <= 1, run
            leaving.add(device.record(None), "gradients")
    pace.leave()
    assert pace.has_left
    pace.let_go()
    assert not pace.has_left


class Late:
    """Memory that takes long to free."""

    def __init__(self, is_being_freed: threading.Event, is_free: threading.Event) -> None:
        self.is_being_freed, self.is_free = is_being_freed, is_free

    def __del__(self) -> None:
        self.is_being_freed.set()
        self.is_free.wait(0.2)
        self.is_free.set()


@pytest.mark.parametrize("goes_on", [Pace.begin_step, Pace.let_go])
def test_what_a_thread_is_letting_go_of_is_gone_before_the_worker_goes_on(goes_on: Callable[[Pace], None]) -> None:
    """Else it would be beside what the next step makes, in no plan."""
    leaving, device = InFlight(), SlowDevice()
    pace = Pace(device, InFlight(), leaving)  # type: ignore[arg-type]
    is_being_freed, is_free = threading.Event(), threading.Event()
    leaving.add(device.record(None), Late(is_being_freed, is_free))
    leaving.add(device.record(None), "others")
    (rest,) = pace.leave()
    thread = threading.Thread(target=rest.wait)
    thread.start()
    assert is_being_freed.wait(20)
    goes_on(pace)
    assert is_free.is_set()
    thread.join(20)
    assert not rest and not thread.is_alive()


def test_an_abandoned_run_leaves_nothing() -> None:
    runs = Run()
    runs.run(num_parts=3, num_bytes=LARGE_BYTES, num_microbatches=1)
    runs.device.upload(1000)
    runs.pace.abandon()
    runs.device.num_done = runs.device.num_issued
    runs.run(num_parts=1, num_bytes=1000, num_microbatches=1)
    assert runs.device.num_done == runs.device.num_issued - 1
    assert len(runs.in_flight) == 1
