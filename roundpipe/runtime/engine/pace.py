"""How far an accelerator may be behind its worker, and what lives until it has caught up.

Work is given to a device long before it runs, and what copies still read or have brought must live until they are done.
The further behind the device is, the more memory that takes, so a worker waits for it: after a few microbatches, after
one where values are large (`roundpipe.planning.carried.num_ahead`), and between the parts of one run.

Invariant: a microbatch's values live for as many microbatches as the device may be behind, however fast it is, so that
a visit always takes the same memory, which is what plans count with. A CPU worker is not behind, but a link of its
own is: what goes down by it lives through the next run, and gradients of weights as long as everywhere.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe.core import trees
from roundpipe.core.contexts import contextmanager
from roundpipe.core.storages import bytes_of
from roundpipe.planning import carried
from roundpipe.planning.carried import LARGE_BYTES
from roundpipe.runtime.device.backend import Backend, Event, Lane


def num_ahead(run_bytes: int, num_microbatches: int) -> int:
    """Microbatches given to an accelerator before the first of them is done, from the bytes of one that come and go."""
    is_alone = num_microbatches == 1 and run_bytes > carried.SMALL_BYTES
    return 0 if is_alone else carried.num_ahead(run_bytes)


class InFlight:
    """Device tensors that must live until an event: that of their last copy or reader."""

    def __init__(self) -> None:
        self._entries: deque[tuple[Event, Any, int]] = deque()
        self._lock = threading.RLock()
        """Held while another thread lets go of tensors: memory that it has yet to free is in no plan."""
        self.num_runs = 0
        """Microbatches of stages that were begun: the present one has this number."""
        self.held_runs = 0
        """So many of them each one lives through, done or not."""

    def add(self, event: Event, tensors: Any) -> None:
        self._entries.append((event, tensors, self.num_runs))

    def release(self) -> None:
        """Let go of the oldest ones that are no longer held, as far as they are done; waits for nothing."""
        self._release(self.num_runs - self.held_runs)

    def wait_for(self, last_run: int) -> None:
        """Let go of those of a run and of all before it, each when it is done."""
        while self._entries and self._entries[0][2] <= last_run:
            self._entries[0][0].synchronize()
            self._entries.popleft()

    def release_done(self) -> None:
        """Let go of the oldest ones, as far as they are done: the worker has waited for the device."""
        self._release(self.num_runs)

    def _release(self, last_run: int) -> None:
        while self._entries and self._entries[0][2] <= last_run and self._entries[0][0].is_done():
            self._entries.popleft()

    def wait(self) -> None:
        """Let go of all, each when it is done."""
        with contextlib.suppress(IndexError):  # another thread has let go of all at once
            while self._entries:
                self._entries[0][0].synchronize()
                with self._lock:
                    self._entries.popleft()

    def take(self) -> InFlight:
        """All of them, for another thread to wait for; none is left here."""
        rest = InFlight()
        rest._entries, self._entries = self._entries, rest._entries
        return rest

    def take_back(self, rest: InFlight) -> None:
        """Hold again what another thread has not let go of; the rest is gone."""
        with rest._lock:
            entries, rest._entries = rest._entries, deque()
        self._entries.extendleft(reversed(entries))

    def clear(self) -> None:
        """Let go of all at once; the device must be done."""
        with self._lock:
            self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)


class _Uploads(list[torch.Tensor]):
    """Tensors that came up for a part of a run, held by what is in flight."""


@dataclass(slots=True)
class _CameUp:
    """A tensor that came up for a run, which nothing else has; it lives on for as long as plans count with it."""

    run: int
    num_bytes: int
    tensor: weakref.ref[torch.Tensor]
    uploads: weakref.ref[_Uploads] | None = None
    """By which it is held; None: by nothing, since the device is past it."""
    issued: Event | None = None
    """After its last reader."""


class Pace:
    """Keeps a worker from giving its device too much at once; on the CPU, what is given is done, but for copies."""

    def __init__(self, backend: Backend, in_flight: InFlight, leaving: InFlight) -> None:
        self._backend = backend
        self._in_flight = in_flight
        self._leaving = leaving
        """Gradients of weights. Their runs are halves of visits: the first two microbatches of one, and its others."""
        self._left: list[tuple[InFlight, InFlight]] = []
        """What another thread lets go of, as the worker had no next step, and where it was taken from."""
        self._num_runs = 0
        """Of the present visit, those that were begun."""
        self._ahead = 0
        self._issued: deque[tuple[Event, int]] = deque()
        """After each of the latest runs, and bytes of what came up and went down for it."""
        self._part_bytes = 0
        """What came up for the parts of the present run that are given to the device, since it was last waited for."""
        self._run_bytes = 0
        """What has come up for the present run, where that is known, and gone down."""
        self._copies: deque[tuple[Event, int]] = deque()
        """After what went down behind the latest layers of the present run, and its bytes."""
        self._uploads: list[torch.Tensor] = []
        """What came up for the present part so far, where others may be given to the link since."""
        self._uploads_ahead: list[torch.Tensor] = []
        """What came up for the next run."""
        self._came_up_now: list[_CameUp] = []
        """For the present part."""
        self._came_up: deque[_CameUp] = deque()
        """For the runs before that plans count with, and earlier parts of this one."""
        self._went_down: deque[tuple[int, int]] = deque()
        """For these runs, and how much."""
        self._up_bytes = self._down_bytes = 0
        """For the present run."""
        self._last_run_bytes: int | None = None
        """Of the visit's run before, what it alone had that came up or went down; None: there was none."""
        self._was_large = True
        """Whether a run of the visit may wait between its parts, as far as is known."""
        self._is_alone = False
        self.drop_ahead: Callable[[], None] = lambda: None
        """Lets go of what came up for the next run."""

    def begin_step(self) -> None:
        """What another thread was to let go of is held as if the worker had not been idle: that thread may be late."""
        for held, rest in self._left:
            held.take_back(rest)
        self._left.clear()

    def begin_visit(self) -> None:
        """The next run is the first one of a visit."""
        self._num_runs = 0
        self._last_run_bytes, self._was_large = None, True

    def begin_run(self, num_microbatches: int) -> None:
        """Wait until the device is not further behind than it should be, and let go of what is done.

        Plans count gradients of the visit before beside those of this one, which are there from its second run on.
        """
        ahead = num_ahead(max((num_bytes for _, num_bytes in self._issued), default=0), num_microbatches)
        self._ahead = ahead
        while len(self._issued) > ahead:
            self._issued.popleft()[0].synchronize()
        self._copies.clear()
        self._in_flight.num_runs += 1
        self._leaving.held_runs = 2
        if self.has_lanes or self._backend.downloads_lag:
            self._in_flight.held_runs = ahead + 1 if self.has_lanes else 2  # plans count those of one run at least
            # copies are late where others have the link: what piled up behind them would be in no plan
            self._in_flight.wait_for(self._in_flight.num_runs - max(self._in_flight.held_runs, 2))
        self._in_flight.release()
        self._leaving.num_runs += self._num_runs in (0, 2)
        self._num_runs += 1
        self._leaving.release()
        self._is_alone = num_microbatches == 1
        self._uploads, self._uploads_ahead = self._uploads_ahead, []
        first_held = self._in_flight.num_runs - self._num_held
        while self._came_up and self._came_up[0].run < first_held:
            self._came_up.popleft()
        while self._went_down and self._went_down[0][0] < first_held:
            self._went_down.popleft()

    def came_up(self, tensors: Iterable[torch.Tensor], num_bytes: int) -> None:
        """These are on the device for the present run alone, and so many bytes with what it shares with others."""
        run = self._in_flight.num_runs
        self._came_up_now += [_CameUp(run, bytes_of(tensor), weakref.ref(tensor)) for tensor in tensors]
        self._up_bytes += num_bytes

    # For the next run

    def may_give_ahead(self, *, has_parts: bool) -> bool:
        """Whether the next run's values may take the place of earlier runs', which plans count with all the time.

        A run of many parts with large values waits between them, and plans count with nothing of others from then on.
        """
        is_late = self.has_lanes or self._backend.uploads_lag
        return is_late and not self._is_alone and not (has_parts and self._was_large)

    def make_room_ahead(self, num_bytes: int, *, is_same_visit: bool) -> bool:
        """Let what is given to UPLOAD take the place of values of earlier runs, the oldest first; False: it has none.

        Plans count with all that earlier runs have on the device, and at least with as much as several runs of this
        visit have. Values are let go of at once: UPLOAD waits until the device is past them.
        """
        up_bytes = sum(each.num_bytes for each in self._came_up)
        held_bytes = up_bytes + sum(each for _, each in self._went_down)
        own_bytes = num_bytes * is_same_visit
        if self._last_run_bytes is not None:
            own_bytes = min(self._num_held, carried.num_ahead(self._last_run_bytes)) * self._last_run_bytes
        surplus_bytes = held_bytes + num_bytes - max(held_bytes, own_bytes)
        if not num_bytes or surplus_bytes > up_bytes:
            return False
        issued: Event | None = None
        while surplus_bytes > 0:
            gone = self._came_up.popleft()
            surplus_bytes -= gone.num_bytes
            issued = gone.issued or issued
            if gone.uploads is not None and (uploads := gone.uploads()) is not None:
                tensor = gone.tensor()
                uploads[:] = [each for each in uploads if each is not tensor]
        if issued is not None:
            self._backend.wait(Lane.UPLOAD, issued)
        return True

    @contextmanager
    def giving_ahead(self) -> Iterator[None]:
        """What comes up inside is for the next run, and lives until the device is past that."""
        self._uploads += self._backend.take_uploads()
        yield
        self._uploads_ahead += self._backend.take_uploads()

    def keep_downloads(self, copied: Event, sources: Any) -> None:
        """What goes down for the present run lives until its copy is done."""
        self._in_flight.add(copied, sources)
        num_bytes = sum(map(bytes_of, trees.tensors(sources)))
        self._run_bytes += num_bytes
        self._down_bytes += num_bytes

    def end_run(self) -> None:
        """A run is given to the device: what came up for it lives until the device is past it."""
        if self.has_lanes:
            issued, _ = self._keep_uploads()
            self._issued.append((issued, self._run_bytes))
        else:
            self._note_came_up()
        run, down_bytes = self._in_flight.num_runs, self._down_bytes
        self._went_down.append((run, down_bytes))
        self._was_large = self._up_bytes + down_bytes > LARGE_BYTES
        self._last_run_bytes = down_bytes + sum(each.num_bytes for each in self._came_up if each.run == run)
        self._part_bytes = self._run_bytes = self._up_bytes = self._down_bytes = 0

    def begin_part(self) -> None:
        """Before a further part of a run, which needs nothing of what came up for the parts before.

        That is let go of once the device is past it. If it is much, this waits for it: a stage of many layers that are
        recomputed one by one would have the values of all of them on the device.
        """
        if not self.has_lanes:
            return
        issued, num_bytes = self._keep_uploads()
        self._part_bytes += num_bytes
        if self._part_bytes > LARGE_BYTES:
            issued.synchronize()
            self._part_bytes = 0
            self._in_flight.release_done()
            self._came_up.clear()

    def end_layer(self, copied: Event, num_bytes: int) -> None:
        """Behind a layer of a forward run, whose values go down: if they are many, wait for those of the layer before.

        A stage of many layers would have the values of all of them on the device.
        """
        if not self.has_lanes:
            return
        self._copies.append((copied, num_bytes))
        if len(self._copies) > 1 and sum(each for _, each in self._copies) > LARGE_BYTES:
            while len(self._copies) > 1:
                self._copies.popleft()[0].synchronize()
            self._in_flight.release_done()
            self._came_up.clear()

    def leave(self) -> list[InFlight]:
        """What the steps so far have left on the device, for another thread to wait for."""
        taken = [(held, held.take()) for held in (self._in_flight, self._leaving) if held]
        self._left += taken
        return [rest for _, rest in taken]

    @property
    def has_left(self) -> bool:
        """Whether steps have left anything on the device that is still there."""
        return any((self._in_flight, self._leaving, *(rest for _, rest in self._left)))

    def let_go(self) -> None:
        """Let go of all that steps have left; the device must be done."""
        for rest in (self._in_flight, self._leaving, *(rest for _, rest in self._left)):
            rest.clear()

    def abandon(self) -> None:
        """Forget what was given to the device, which is done with it, and let go of it."""
        self.drop_ahead()
        self._uploads, self._uploads_ahead, self._last_run_bytes, self._was_large = [], [], None, True
        self._came_up.clear()
        self._came_up_now.clear()
        self._went_down.clear()
        self._in_flight.clear()
        self._leaving.clear()
        self._issued.clear()
        self._copies.clear()
        self._backend.take_uploads()
        self._part_bytes = self._run_bytes = self._up_bytes = self._down_bytes = 0

    @property
    def has_rest(self) -> bool:
        """Whether what earlier visits left is held."""
        return bool(self._in_flight or self._leaving)

    @property
    def is_filled(self) -> bool:
        """Whether the present visit has given the device as many runs as may be ahead, and so one at least."""
        return self._num_runs >= self._ahead

    @property
    def _num_held(self) -> int:
        """Runs before the present one whose values plans count with, for all that is known."""
        return self._ahead if self.has_lanes else 1

    @property
    def has_lanes(self) -> bool:
        """Whether the device runs beside its worker."""
        return self._backend.device.type != "cpu"

    def _keep_uploads(self) -> tuple[Event, int]:
        """After what was given to the device, and bytes of what came up since the last time: it lives until then."""
        issued, uploads = self._backend.record(Lane.COMPUTE), _Uploads([*self._uploads, *self._backend.take_uploads()])
        self._uploads.clear()
        self._in_flight.add(issued, uploads)
        self._note_came_up(weakref.ref(uploads), issued)
        num_bytes = sum(upload.nbytes for upload in uploads)
        self._run_bytes += num_bytes
        return issued, num_bytes

    def _note_came_up(self, uploads: weakref.ref[_Uploads] | None = None, issued: Event | None = None) -> None:
        for each in self._came_up_now:
            each.uploads, each.issued = uploads, issued
        self._came_up += self._came_up_now
        self._came_up_now = []
