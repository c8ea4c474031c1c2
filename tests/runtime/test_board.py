"""Threads that wait for each other: who is woken, and who is told that nobody can go on."""

import threading
import time

import pytest

from roundpipe.core.errors import DeadlockError
from roundpipe.runtime import threads
from roundpipe.runtime.threads import Board, TaskThread


class Counter:
    """A number on a board, and how often conditions looked at it."""

    def __init__(self):
        self.board = Board()
        self.value = 0

    def add(self):
        with self.board.lock:
            self.value += 1
            self.board.notify()

    def wait(self, value, timeout_s=5.0):
        return self.board.wait(lambda: self.value >= value, f"waiter for {value}", f"number {value}", timeout_s)


def test_a_condition_that_holds_is_not_waited_for():
    counter = Counter()
    assert counter.wait(0)


def test_each_waiter_is_woken_when_its_condition_holds():
    counter, order = Counter(), []
    waiters = [
        threading.Thread(target=lambda value=value: (counter.wait(value), order.append(value))) for value in (3, 1, 2)
    ]
    for thread in waiters:
        thread.start()
    for value in (1, 2, 3):
        counter.add()
        deadline = time.monotonic() + 5
        while len(order) < value and time.monotonic() < deadline:
            time.sleep(0.001)
        assert order == list(range(1, value + 1))
    for thread in waiters:
        thread.join(5)


def test_a_wait_ends_at_its_deadline():
    counter = Counter()
    assert not counter.wait(1, timeout_s=0.02)


@pytest.fixture
def short_interval(monkeypatch):
    monkeypatch.setattr(threads, "CHECK_INTERVAL_S", 0.02)


@pytest.mark.usefixtures("short_interval")
def test_where_nobody_can_go_on_all_who_wait_are_named():
    counter = Counter()
    thread = TaskThread("roundpipe test waits", board=counter.board)
    thread.submit(counter.wait, 1)
    with pytest.raises(DeadlockError, match=r"waiter for 2 waits for number 2.*") as caught:
        counter.wait(2)
    assert "waiter for 1 waits for number 1" in str(caught.value)
    stacks = "\n".join(caught.value.__notes__)
    assert "the stack of waiter for 1" in stacks and "in _serve" in stacks
    counter.add()
    thread.close()


@pytest.mark.usefixtures("short_interval")
def test_a_thread_that_works_is_waited_for():
    counter = Counter()
    thread = TaskThread("roundpipe test works", board=counter.board)
    thread.submit(lambda: (time.sleep(0.2), counter.add()))
    assert counter.wait(1)
    thread.close()


def test_an_interrupted_wait_leaves_nothing_behind():
    counter, asked = Counter(), []

    def interrupted():
        asked.append(1)
        if len(asked) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        counter.board.wait(interrupted, "waiter", "nothing")
    counter.add()
    assert counter.wait(1)


def test_a_close_that_waits_for_a_stuck_thread_is_told_so(short_interval):
    counter = Counter()
    thread = TaskThread("worker", board=counter.board)
    thread.submit(counter.wait, 1, None)
    with pytest.raises(DeadlockError, match=r"close\(\) waits for the end of worker"):
        thread.close()
    counter.add()
    thread.close()


@pytest.mark.usefixtures("short_interval")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_has_ended_with_work_left_can_not_go_on(monkeypatch):
    def fails(*given):
        raise MemoryError

    monkeypatch.setattr(threads, "_tell", fails)  # private, since nothing public ends a thread
    counter = Counter()
    thread = TaskThread("roundpipe test ends", board=counter.board)
    thread.submit(fails)
    thread.submit(counter.add)
    with pytest.raises(DeadlockError, match="the caller waits for the number"):
        counter.board.wait(lambda: counter.value, "the caller", "the number")


def test_a_thread_goes_on_if_its_error_can_not_be_logged(monkeypatch):
    def fails(*given, **options):
        raise ValueError("no log")

    monkeypatch.setattr(threads.logger, "error", fails)
    counter = Counter()
    thread = TaskThread("roundpipe test goes on", board=counter.board)
    thread.submit(fails)
    thread.submit(counter.add)
    assert counter.wait(1)
    thread.close()
