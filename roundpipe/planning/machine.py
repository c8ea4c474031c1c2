"""A machine for the simulator: what it can do (`HardwareProfile`), and discrete events on it (`EventQueue`).

A worker runs its ops one at a time, in the order in which they were added. A link has one transfer at a time, the
lowest priority number first; a later one with a lower number interrupts. Past what the host's memory can move, all
links slow down alike.

Invariant: equal calls give equal times; nothing starts before what it waits for is over.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from roundpipe.core.errors import ConfigError

_BANDWIDTHS = (
    *("upload_bytes_per_s", "download_bytes_per_s", "host_bytes_per_s"),
    *("optimizer_bytes_per_s", "conversion_bytes_per_s"),
)


class ChainSeconds(NamedTuple):
    """What the optimizer's side takes of each round, one behind the other."""

    update_s: float
    """``step_fn``, and what is made ready in second memory behind it."""
    hand_over_s: float
    """Until weights are in the model, from when the step is made."""
    gradients_s: float
    """Until gradients that have come home are the optimizer's."""


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """What a machine's links and memory can do; the default takes no time."""

    upload_bytes_per_s: float = inf
    """Host to device, per device."""
    download_bytes_per_s: float = inf
    """Device to host, per device."""
    host_bytes_per_s: float = inf
    """What all transfers and the optimizer together may take of host memory."""
    optimizer_bytes_per_s: float = inf
    """Host memory traffic of the optimizer alone."""
    optimizer_bytes_per_parameter: float = 0
    """Traffic of one update per trained parameter: 44 for copy, gradient and Adam in three passes, 28 in one; 0 = no
    optimizer."""
    hand_over_bytes_per_parameter: float = 0
    """Of that, what weights take on their way into the model, if they go there only when the next step is made; 0:
    they are made ready in second memory as part of the update (``pin_model="double"``)."""
    gradients_bytes_per_parameter: float = 0
    """Of that, what gradients take that have come home, until the optimizer's copies have them."""
    conversion_bytes_per_s: float = inf
    """Of both, if less than the optimizer has."""
    device_bytes_per_s: float = inf
    """What a device's own memory gives to updates of what lives there; inf: they are left out."""
    visit_s: float = 0.0
    """What a worker takes to begin a visit of a stage, beside what layers take and what it waits for."""
    has_peers: bool = True
    """Whether devices read each other's memory; gradients of a stage's replicas are then added up there."""
    prefetch_across_steps: bool = True
    """Whether steps overlap: a worker's first weights of a step come up while it still runs the step before, and what
    that leaves is there beside them."""

    def __post_init__(self) -> None:
        for name in _BANDWIDTHS:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; a bandwidth must be above 0 (inf: no limit)")

    def with_optimizer(self, num_parameters: int, chain: ChainSeconds) -> HardwareProfile:
        """With an optimizer that takes so many seconds of a step for so many parameters; its bytes are not known."""
        return replace(
            self,
            optimizer_bytes_per_s=1.0,
            optimizer_bytes_per_parameter=sum(chain) / num_parameters,
            hand_over_bytes_per_parameter=chain.hand_over_s / num_parameters,
            gradients_bytes_per_parameter=chain.gradients_s / num_parameters,
        )

    @property
    def update_bytes_per_parameter(self) -> float:
        """Of one update, what ``step_fn`` itself takes."""
        conversions = self.hand_over_bytes_per_parameter + self.gradients_bytes_per_parameter
        return self.optimizer_bytes_per_parameter - conversions

    def chain(self, num_parameters: int) -> ChainSeconds:
        """What the optimizer's side takes of a round for so many parameters, with nothing beside it."""
        rate = min(self.conversion_bytes_per_s, self.optimizer_bytes_per_s)
        return ChainSeconds(
            num_parameters * self.update_bytes_per_parameter / self.optimizer_bytes_per_s,
            num_parameters * self.hand_over_bytes_per_parameter / rate,
            num_parameters * self.gradients_bytes_per_parameter / rate,
        )

    def optimizer_s(self, num_parameters: int) -> float:
        """Seconds of an update of so many parameters, conversions included, with nothing beside it."""
        return sum(self.chain(num_parameters))


class Node:
    """Something that takes time once all it waits for is over: an op, a transfer, or neither (a join)."""

    __slots__ = ("_followers", "_num_missing", "over_s", "started_s", "then")

    def __init__(self, then: Callable[[], None] | None = None) -> None:
        self.over_s: float | None = None
        """When it was over; None: not yet."""
        self.started_s = 0.0
        """When all that it waits for was over; for an op, when the worker began it."""
        self.then = then
        """Called when it is over."""
        self._followers: list[Node] = []
        self._num_missing = 0

    @property
    def is_ready(self) -> bool:
        return self._num_missing == 0

    def begin(self, queue: EventQueue) -> None:
        queue.finish(self)


class Op(Node):
    """Compute on a worker."""

    __slots__ = ("seconds", "worker")

    def __init__(self, worker: int, seconds: float) -> None:
        super().__init__()
        self.worker = worker
        self.seconds = seconds

    def begin(self, queue: EventQueue) -> None:
        queue.start_next(self.worker)


class LinkTransfer(Node):
    """Bytes over a link."""

    __slots__ = ("bytes_left", "link", "number", "priority", "sent_s")

    def __init__(self, link: Link, num_bytes: float, priority: int = 0) -> None:
        super().__init__()
        self.link = link
        self.bytes_left = num_bytes
        self.priority = priority
        self.number = 0
        self.sent_s: float | None = None
        """When its first byte was sent; None: it took no time, or its turn has not come."""

    def begin(self, queue: EventQueue) -> None:
        self.started_s = queue.now_s
        queue.send(self)

    def __lt__(self, other: LinkTransfer) -> bool:
        return (self.priority, self.number) < (other.priority, other.number)


class Link:
    """A link, or anything else that moves bytes through host memory."""

    __slots__ = ("bytes_per_s", "moved_bytes", "queue", "sent_since", "version")

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.moved_bytes = 0.0
        """Given to it so far."""
        self.queue: list[LinkTransfer] = []
        self.sent_since = 0.0
        """Of the transfer at the head: since when, on the clock that runs slower where the host is the limit."""
        self.version = 0
        """Counts heads, so that the planned end of one that was interrupted is known to be out of date."""


class EventQueue:
    """Time, and all that goes on in it; all links together move up to ``host_bytes_per_s``."""

    def __init__(self, num_workers: int, host_bytes_per_s: float = inf) -> None:
        self.now_s = 0.0
        self._host_bytes_per_s = host_bytes_per_s
        self._ops: list[deque[Op]] = [deque() for _ in range(num_workers)]
        self._running: list[Op | None] = [None] * num_workers
        self._ends: list[tuple[float, int, Op]] = []
        self._number = 0
        # Links all slow down by the same share, so their ends are planned on a clock of their own.
        self._link_now = 0.0
        self._link_ends: list[tuple[float, int, Link, int]] = []
        self._active_rate = 0.0
        self._over: deque[Node] = deque()
        self._is_settling = False

    def add(self, node: Node, *after: Node) -> None:
        """Adds a node that waits for others; an op joins its worker's queue now."""
        for other in after:
            if other.over_s is None:
                other._followers.append(node)
                node._num_missing += 1
        if isinstance(node, Op):
            self._ops[node.worker].append(node)
        if node.is_ready:
            node.begin(self)

    def finish(self, node: Node) -> None:
        node.over_s = self.now_s
        self._over.append(node)
        if self._is_settling:
            return
        self._is_settling = True
        while self._over:
            done = self._over.popleft()
            then, done.then = done.then, None  # or it and the node keep each other alive
            if then is not None:
                then()
            followers, done._followers = done._followers, []
            for follower in followers:
                follower._num_missing -= 1
                if follower._num_missing == 0:
                    follower.begin(self)
        self._is_settling = False

    def start_next(self, worker: int) -> None:
        queue = self._ops[worker]
        if self._running[worker] is not None or not queue or not queue[0].is_ready:
            return
        op = queue.popleft()
        op.started_s = self.now_s
        self._running[worker] = op
        self._number += 1
        heapq.heappush(self._ends, (self.now_s + op.seconds, self._number, op))

    def send(self, transfer: LinkTransfer) -> None:
        """Queues a transfer whose turn on the link comes by priority; one that takes no time is over at once."""
        link = transfer.link
        link.moved_bytes += transfer.bytes_left
        if not transfer.bytes_left or link.bytes_per_s == self._host_bytes_per_s == inf:
            self.finish(transfer)
            return
        self._number += 1
        transfer.number = self._number
        head = link.queue[0] if link.queue else None
        heapq.heappush(link.queue, transfer)
        if head is None:
            self._active_rate += self._rate(link)
        elif link.queue[0] is head:
            return
        else:
            head.bytes_left -= self._rate(link) * (self._link_now - link.sent_since)
        self._begin_head(link)

    def advance(self) -> bool:
        """Moves on to the next end of an op or a transfer; False: there is none."""
        is_slowed = self._active_rate > self._host_bytes_per_s
        share = self._host_bytes_per_s / self._active_rate if is_slowed else 1.0
        while self._link_ends and self._link_ends[0][3] != self._link_ends[0][2].version:
            heapq.heappop(self._link_ends)
        transfer_s = self.now_s + max(self._link_ends[0][0] - self._link_now, 0.0) / share if self._link_ends else inf
        op_s = self._ends[0][0] if self._ends else inf
        if op_s == transfer_s == inf:
            return False
        moment = min(op_s, transfer_s)
        self._link_now += (moment - self.now_s) * share
        self.now_s = moment
        if op_s <= transfer_s:
            _, _, op = heapq.heappop(self._ends)
            self._running[op.worker] = None
            self.finish(op)
            self.start_next(op.worker)
        else:
            _, _, link, _ = heapq.heappop(self._link_ends)
            transfer = heapq.heappop(link.queue)
            if link.queue:
                self._begin_head(link)
            else:
                link.version += 1
                self._active_rate = max(self._active_rate - self._rate(link), 0.0)
            self.finish(transfer)
        return True

    def _rate(self, link: Link) -> float:
        return min(link.bytes_per_s, self._host_bytes_per_s)

    def _begin_head(self, link: Link) -> None:
        head = link.queue[0]
        link.version += 1
        link.sent_since = self._link_now
        if head.sent_s is None:
            head.sent_s = self.now_s
        self._number += 1
        seconds = max(head.bytes_left, 0.0) / self._rate(link)
        heapq.heappush(self._link_ends, (self._link_now + seconds, self._number, link, link.version))
