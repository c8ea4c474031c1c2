"""A thread with an inbox: order, end, and no reference to what it worked for."""

import gc
import threading
import time
import weakref

import pytest

from roundpipe.core.errors import ClosedError
from roundpipe.runtime.threads import TaskThread


def test_work_runs_in_order_in_one_thread():
    thread = TaskThread("roundpipe test order")
    seen = []
    for i in range(20):
        thread.submit(lambda i=i: seen.append((i, threading.current_thread().name)))
    thread.close()
    assert seen == [(i, "roundpipe test order") for i in range(20)]


def test_the_thread_starts_with_the_first_work():
    before = threading.active_count()
    thread = TaskThread("roundpipe test lazy")
    assert threading.active_count() == before
    thread.submit(lambda: None)
    assert threading.active_count() == before + 1
    thread.close()
    assert threading.active_count() == before


def test_a_thread_can_start_before_there_is_work():
    begun = []
    thread = TaskThread("roundpipe test ahead", begin=lambda: begun.append(threading.current_thread().name))
    assert not thread.has_begun
    thread.start()
    thread.start()
    thread.submit(lambda: None)
    thread.close()
    assert thread.has_begun
    assert begun == ["roundpipe test ahead"]


def test_a_beginning_that_fails_is_over():
    told = []

    class Owner:
        def note(self, error):
            told.append(str(error))

    def fail():
        raise ValueError("begin")

    owner = Owner()
    thread = TaskThread("roundpipe test fails", owner.note, begin=fail)
    thread.start()
    thread.close()
    assert thread.has_begun
    assert told == ["begin"]


def test_closing_waits_for_what_was_given():
    thread = TaskThread("roundpipe test close")
    done = []
    thread.submit(lambda: (time.sleep(0.05), done.append(1)))
    thread.close()
    thread.close()
    assert done == [1]
    with pytest.raises(ClosedError, match="roundpipe test close is closed"):
        thread.submit(lambda: None)


def test_closing_an_idle_thread():
    TaskThread("roundpipe test idle").close()


def test_a_thread_may_close_itself():
    thread = TaskThread("roundpipe test itself")
    done = threading.Event()
    thread.submit(lambda: (thread.close(), done.set()))
    assert done.wait(5)


def test_a_collected_owner_ends_its_thread():
    owner = TaskThread("roundpipe test collected")
    owner.submit(lambda: None)
    thread = owner._thread  # the thread itself, to see it end
    del owner
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_what_the_end_of_a_collected_owner_submits_is_run():
    """Python has told the thread to end by then."""
    seen = []

    class Owner:
        def __init__(self):
            self.thread = TaskThread("roundpipe test end")
            self.itself = self

        def __del__(self):
            self.thread.submit(seen.append, "last")
            self.thread.close()

    owner = Owner()
    owner.thread.submit(seen.append, "first")
    del owner
    gc.collect()
    assert seen == ["first", "last"]


def test_the_thread_keeps_nothing_between_two_works():
    class Owner:
        pass

    owner = Owner()
    seen = weakref.ref(owner)
    thread = TaskThread("roundpipe test forgets")
    done = threading.Event()
    thread.submit(lambda owner=owner: None)
    thread.submit(done.set)
    assert done.wait(5)
    del owner
    deadline = time.monotonic() + 5
    while seen() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert seen() is None
    thread.close()


class Told:
    """Somebody who is told of errors."""

    def __init__(self):
        self.errors = []

    def note(self, error):
        self.errors.append(error)
        if len(self.errors) > 1:
            raise KeyError("in the handler too")


def test_what_a_callable_raises_is_told_and_ends_nothing(caplog):
    told, seen = Told(), []
    thread = TaskThread("roundpipe test raising", told.note)
    for i in range(3):
        thread.submit(lambda: 1 / 0)
        thread.submit(lambda i=i: seen.append(i))
    thread.submit(lambda: exit(3))
    thread.submit(lambda: seen.append("last"))
    thread.close()
    assert seen == [0, 1, 2, "last"]
    assert [type(one) for one in told.errors] == [ZeroDivisionError] * 3 + [SystemExit]
    assert [record.exc_info[1] for record in caplog.records] == told.errors[1:]


def test_errors_that_nobody_can_be_told_of_are_logged(caplog):
    told = Told()
    threads = TaskThread("roundpipe test nobody"), TaskThread("roundpipe test gone", told.note)
    del told
    gc.collect()
    for thread in threads:
        thread.submit(lambda: 1 / 0)
        thread.close()
    assert [record.exc_info[0] for record in caplog.records] == [ZeroDivisionError] * 2
    assert "roundpipe test nobody" in caplog.text and "roundpipe test gone" in caplog.text
