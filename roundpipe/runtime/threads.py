"""The threads of one model: each runs what it is handed (`TaskThread`), and they wait for each other (`Board`).

Invariants: whatever threads wait for is changed with `Board.lock` held, and followed by `Board.notify`, which wakes
those whose condition holds now and nobody else. Nothing polls. Device events are not on the board, since nobody tells
when one is done: a thread waits for the event itself, once the board has told it that the event exists. So a wait can
only end if some thread of the board's has work and does not wait: whoever calls the model looks after that while he
waits, and raises a `DeadlockError` if it is not so.

Between two jobs a thread holds no reference to what it works for, so that the owner can be garbage collected; its
finalizer then closes the inbox and the thread ends. Nothing else ends it: others may wait for what is in the inbox.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from roundpipe.core.errors import ClosedError, DeadlockError, ForkError, add_note

logger = logging.getLogger(__name__)

DEADLINE_S = 1800.0
"""How long the longest waits take before they are given up: for parameters, and for an update."""
CHECK_INTERVAL_S = 5.0
"""How often a waiting caller looks whether anybody can still go on."""


@dataclass(slots=True, eq=False)
class _Load:
    """What one thread was given and has not done; changed with the board's lock held."""

    num_tasks: int = 0
    thread: threading.Thread | None = None
    has_begun: bool = False

    @property
    def can_go_on(self) -> bool:
        """Whether the thread has work and is there to do it."""
        return self.num_tasks > 0 and (self.thread is None or self.thread.is_alive())


_CURRENT = threading.local()
"""The `_Load` of the calling thread, if it is one of a board's."""


@dataclass(slots=True, eq=False)
class _Wait:
    who: str
    what: str
    condition: Callable[[], bool]
    wake: threading.Condition
    load: _Load | None = field(default_factory=lambda: getattr(_CURRENT, "load", None))
    thread_id: int = field(default_factory=threading.get_ident)


class Board:
    """The waits of one model's threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held to change what others may wait for; never held while anything else is waited for."""
        self._waits: list[_Wait] = []
        self._loads: list[_Load] = []
        self.is_here = True
        """Whether the threads are this process's; False in one that was forked from theirs, which has none of them."""
        _BOARDS.add(self)

    def check_here(self) -> None:
        if not self.is_here:
            raise ForkError(
                "this process was forked from the one that made the wrapper, and has none of the threads that run its "
                "calls. Start processes with multiprocessing's 'spawn' (multiprocessing_context= of a DataLoader), "
                "or wrap the model in this one; the wrapped module itself may be called"
            )

    def notify(self) -> None:
        """Wake whoever can go on; called with the lock held."""
        for wait in self._waits:
            if wait.condition():
                wait.wake.notify()

    def wait(self, condition: Callable[[], bool], who: str, what: str, timeout_s: float | None = None) -> bool:
        """Return once a condition holds, or False after ``timeout_s``.

        The condition must be cheap and never wait: it is called with the lock held, in any thread.

        Raises:
            DeadlockError: nobody can go on; only in a thread that is not the board's own.
        """
        with self.lock:
            if condition():
                return True
            self.check_here()
            wait = _Wait(who, what, condition, threading.Condition(self.lock))
            self._waits.append(wait)
            try:
                ends_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
                while not wait.wake.wait_for(condition, min(CHECK_INTERVAL_S, max(ends_s - time.monotonic(), 0.0))):
                    if time.monotonic() >= ends_s:
                        return False
                    if wait.load is None and self._is_stuck():
                        raise self._deadlock()
                return True
            finally:
                self._waits.remove(wait)

    def add_thread(self) -> _Load:
        """One more thread that changes what others wait for."""
        self._loads.append(load := _Load())
        return load

    def _is_stuck(self) -> bool:
        waiting = {wait.load for wait in self._waits}
        can_go_on = any(load.can_go_on and load not in waiting for load in self._loads)
        return not can_go_on and not any(wait.condition() for wait in self._waits)

    def _deadlock(self) -> DeadlockError:
        waits = "; ".join(f"{each.who} waits for {each.what}" for each in self._waits)
        error = DeadlockError(f"nobody can go on: {waits}. This is a bug in roundpipe, please report it")
        frames = sys._current_frames()
        for each in self._waits:
            stack = "".join(traceback.format_stack(frames.get(each.thread_id)))
            add_note(error, f"roundpipe: the stack of {each.who}:\n{stack}")
        return error


_BOARDS: weakref.WeakSet[Board] = weakref.WeakSet()


def _leave_behind() -> None:
    """In a child process: no thread is there, and no lock may stay held by one that isn't."""
    for board in _BOARDS:
        board.lock, board._waits, board._loads, board.is_here = threading.Lock(), [], [], False


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_leave_behind)


_Inbox = queue.SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]] | None]
_OnError = weakref.WeakMethod[Callable[[BaseException], None]] | None


class TaskThread:
    """One thread that runs callables in the order given; it starts at the first one.

    Callables must not raise; whoever hands one in catches inside it. If one does, ``on_error``, a method held weakly,
    is told in the thread, or it is logged; the thread goes on with the next. ``board`` is where others wait for what
    the thread does. ``begin`` is called in the thread before the first, and whatever it raises is told likewise.
    """

    def __init__(
        self,
        name: str,
        on_error: Callable[[BaseException], None] | None = None,
        board: Board | None = None,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self._board = board or Board()
        self._load = self._board.add_thread()
        self._on_error = None if on_error is None else weakref.WeakMethod(on_error)
        self._begin = begin
        self._thread: threading.Thread | None = None
        self._closed = False
        self._new_inbox()

    def _new_inbox(self) -> None:
        self._inbox: _Inbox = queue.SimpleQueue()
        self._end = threading.Event()
        self._finalizer = weakref.finalize(self, self._inbox.put, None)
        self._finalizer.atexit = False

    @property
    def is_current(self) -> bool:
        """Whether the calling code runs in this thread."""
        return self._thread is threading.current_thread()

    @property
    def has_begun(self) -> bool:
        """Whether ``begin`` is over."""
        return self._load.has_begun

    def start(self) -> None:
        """Start the thread, if it has not, and with it ``begin``, before there is anything else to do."""
        if self._thread is None:
            self.submit(bool)

    def submit(self, work: Callable[..., object], *args: Any) -> None:
        """Run ``work(*args)`` in the thread after all that was submitted before."""
        if self._closed:
            raise ClosedError(f"worker {self.name} is closed")
        if (
            not self._finalizer.alive
        ):  # Python told the thread to end, and then had the end of its owner run, which needs one
            if self._thread is not None:
                self._board.wait(self._end.is_set, self.name, "what was submitted before")
            self._thread = None
            self._new_inbox()
        if self._thread is None:
            given = self._inbox, self._on_error, self._end, self._board, self._load, self._begin
            thread = threading.Thread(target=_serve, args=given, name=self.name, daemon=True)
            self._thread = thread
            try:
                thread.start()
            except BaseException:
                if not thread.is_alive():  # the system has no more of them; after an interrupt it may run
                    self._thread = None
                raise
        with self._board.lock:
            self._load.thread = self._thread
            self._load.num_tasks += 1
        self._inbox.put((work, args))

    def close(self) -> None:
        """End the thread once it has run all that was submitted; safe to call twice, also if interrupted.

        Raises:
            DeadlockError: what was submitted waits for what will never come.
        """
        self._closed = True
        with self._board.lock:
            if self._thread is not None and not self._end.is_set():
                self._load.num_tasks += 1
        self._inbox.put(None)
        if self._thread is not None and not self.is_current:
            # a join that Ctrl-C interrupts takes the thread for ended
            self._board.wait(self._end.is_set, "close()", f"the end of {self.name}")
            self._thread.join()
            self._thread = None


def _serve(
    inbox: _Inbox, on_error: _OnError, end: threading.Event, board: Board, load: _Load, begin: Callable[[], None]
) -> None:
    _CURRENT.load = load
    try:
        begin()
    except BaseException as error:
        _tell(error, on_error)
    with board.lock:
        load.has_begun = True
        board.notify()
    while True:
        try:
            if (item := inbox.get()) is None:
                with board.lock:
                    load.num_tasks = 0
                    end.set()
                    board.notify()
                return
            item[0](*item[1])
        except BaseException as error:
            _tell(error, on_error)
        finally:
            item = None
        with board.lock:
            load.num_tasks -= 1


def _tell(error: BaseException, on_error: _OnError) -> None:
    handler = None if on_error is None else on_error()
    if handler is not None:
        with contextlib.suppress(BaseException):
            return handler(error)
    with contextlib.suppress(BaseException):  # a handler of the log may fail, too; the thread goes on
        logger.error("%s: an error that nobody was told of", threading.current_thread().name, exc_info=error)
