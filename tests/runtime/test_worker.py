"""A worker's one thread: order, end, and no reference to what it worked for."""

import gc
import threading
import time
import weakref

import pytest

from roundpipe.core.errors import ClosedError
from roundpipe.runtime.worker import Worker


def test_work_runs_in_order_in_one_thread():
    worker = Worker("roundpipe test order")
    seen = []
    for i in range(20):
        worker.submit(lambda i=i: seen.append((i, threading.current_thread().name)))
    worker.close()
    assert seen == [(i, "roundpipe test order") for i in range(20)]


def test_the_thread_starts_with_the_first_work():
    before = threading.active_count()
    worker = Worker("roundpipe test lazy")
    assert threading.active_count() == before
    worker.submit(lambda: None)
    assert threading.active_count() == before + 1
    worker.close()
    assert threading.active_count() == before


def test_closing_waits_for_what_was_given():
    worker = Worker("roundpipe test close")
    done = []
    worker.submit(lambda: (time.sleep(0.05), done.append(1)))
    worker.close()
    worker.close()
    assert done == [1]
    with pytest.raises(ClosedError, match="roundpipe test close is closed"):
        worker.submit(lambda: None)


def test_closing_an_idle_worker():
    Worker("roundpipe test idle").close()


def test_a_worker_may_close_itself():
    worker = Worker("roundpipe test itself")
    done = threading.Event()
    worker.submit(lambda: (worker.close(), done.set()))
    assert done.wait(5)


def test_a_collected_worker_ends_its_thread():
    worker = Worker("roundpipe test collected")
    worker.submit(lambda: None)
    thread = worker._thread
    del worker
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_the_thread_keeps_nothing_between_two_works():
    class Owner:
        pass

    owner = Owner()
    seen = weakref.ref(owner)
    worker = Worker("roundpipe test forgets")
    done = threading.Event()
    worker.submit(lambda owner=owner: None)
    worker.submit(done.set)
    assert done.wait(5)
    del owner
    deadline = time.monotonic() + 5
    while seen() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert seen() is None
    worker.close()


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
    worker = Worker("roundpipe test raising", told.note)
    for i in range(3):
        worker.submit(lambda: 1 / 0)
        worker.submit(lambda i=i: seen.append(i))
    worker.submit(lambda: exit(3))
    worker.submit(lambda: seen.append("last"))
    worker.close()
    assert seen == [0, 1, 2, "last"]
    assert [type(one) for one in told.errors] == [ZeroDivisionError] * 3 + [SystemExit]
    assert [record.exc_info[1] for record in caplog.records] == told.errors[1:]


def test_errors_that_nobody_can_be_told_of_are_logged(caplog):
    told = Told()
    workers = Worker("roundpipe test nobody"), Worker("roundpipe test gone", told.note)
    del told
    gc.collect()
    for worker in workers:
        worker.submit(lambda: 1 / 0)
        worker.close()
    assert [record.exc_info[0] for record in caplog.records] == [ZeroDivisionError] * 2
    assert "roundpipe test nobody" in caplog.text and "roundpipe test gone" in caplog.text
