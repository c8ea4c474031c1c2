"""Threads that wait for each other: who is woken, and who is told that nobody can go on."""

import threading
import time

import pytest

from roundpipe.core.errors import DeadlockError
from roundpipe.runtime.threads import Board


class Counter:
    """A number on a board, and how often conditions looked at it."""

    def __init__(self):
        self.board = Board()
        self.value = 0

    def add(self):
        with self.board.lock:
            self.value += 1
            self.board.notify()

    def wait(self, value, timeout_s=5.0, **options):
        return self.board.wait(
            lambda: self.value >= value, f"waiter for {value}", f"number {value}", timeout_s, **options
        )


def test_a_condition_that_holds_is_not_waited_for():
    counter = Counter()
    assert counter.wait(0)


def test_each_waiter_is_woken_when_its_condition_holds():
    counter, order = Counter(), []
    threads = [
        threading.Thread(target=lambda value=value: (counter.wait(value), order.append(value))) for value in (3, 1, 2)
    ]
    for thread in threads:
        thread.start()
    for value in (1, 2, 3):
        counter.add()
        deadline = time.monotonic() + 5
        while len(order) < value and time.monotonic() < deadline:
            time.sleep(0.001)
        assert order == list(range(1, value + 1))
    for thread in threads:
        thread.join(5)


def test_a_wait_ends_at_its_deadline():
    counter = Counter()
    assert not counter.wait(1, timeout_s=0.02)


def test_a_wait_that_is_stuck_names_all_who_wait():
    counter = Counter()
    other = threading.Thread(target=lambda: counter.wait(1))
    other.start()
    asked = []

    def is_stuck():
        asked.append(1)
        return len(asked) == 3

    with pytest.raises(DeadlockError, match=r"waiter for 1 waits for number 1; waiter for 2 waits for number 2"):
        counter.wait(2, timeout_s=0.02, is_stuck=is_stuck)
    counter.add()
    other.join(5)
    assert not other.is_alive()


def test_an_interrupted_wait_leaves_nothing_behind():
    counter = Counter()

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        counter.wait(1, timeout_s=0.01, is_stuck=interrupted)
    counter.add()
    assert counter.wait(1)
