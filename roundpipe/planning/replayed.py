"""What a replay consists of (`roundpipe.planning.replay`): its steps, and what goes on in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

from roundpipe.core.schedule import Job, Schedule
from roundpipe.planning.machine import EventQueue, Link, LinkTransfer, Node

_SAME = 5e-4
"""Share of a step within which all ends of two steps must agree for the replay to be steady."""
_NUM_ALIKE, _SAME_LENGTH = 12, 1e-7
"""So many steps in a row whose lengths differ by this share are taken as steady, too."""

Cause = Literal["weights", "activations", "optimizer", "no_work", "gradients"]
CAUSES: tuple[Cause, ...] = get_args(Cause)

Activity = Literal[
    "recompute",
    "compute",
    "upload",
    "download",
    "kept",
    "weights",
    "gradients",
    "added",
    "update",
    "hand-over",
    "update there",
    "home",
]


class ReplayedActivity(NamedTuple):
    """Something that a replay consists of; the node knows when it began and ended."""

    node: Node
    activity: Activity
    job: Job | None
    """None: an update, or weights that go home behind one."""
    microbatch: int | None
    num_bytes: float | None
    worker: int | None = None
    """Of an update on a worker's device."""


class ReplayedWait(NamedTuple):
    """A time in which a worker computed nothing."""

    worker: int
    cause: Cause
    start_s: float
    end_s: float


class EarlierJob(NamedTuple):
    """A job as the later jobs on its worker see it."""

    job: Job
    last_op: Node
    gradients: Node | None
    settled: Node
    """When its gradients are the optimizer's, and those of the jobs before it."""
    released: Node
    """When the worker goes on behind it: the gradients of the job before it are home."""


class JobWaits(NamedTuple):
    """What the ops of a job wait for, and the seconds that they lost to it."""

    layers: range
    """Whose weights it is about: all of the job's, or some of which its first microbatch runs while others come."""
    losses: Node | None
    start: Node
    weights: Node
    gate: Node | None
    """When their new weights are in the model."""
    before: EarlierJob | None
    lost_s: dict[Cause, float]


Outputs = dict[int, tuple[Node, Node | None]]
"""By microbatch, what a stage gives: when it is on the host, and when it is computed."""


@dataclass(slots=True)
class ReplayedStep:
    """One step of the replay."""

    schedule: Schedule
    start: Node = field(default_factory=Node)
    losses: Node = field(default_factory=Node)
    """When the microbatches of the stage that has them are done."""
    forwards: Node = field(default_factory=Node)
    """When the losses are known, and their backwards are not done: the step is made, and so is the hand-over."""
    ends: list[Node] = field(default_factory=list)
    """Of each job's compute, then of everything else that must be as before in a steady step."""
    uploads: dict[int, list[Node]] = field(default_factory=dict)
    """Per layer, those of its weights."""
    handed_over: dict[int, Node] = field(default_factory=dict)
    """Per layer that is trained, when its new weights are in the model."""
    exchanged: Node = field(default_factory=Node)
    """When the weights of the update before are in the model, so that this step's update may begin."""
    lost_s: list[dict[Cause, float]] = field(default_factory=list)
    """Per job, what its ops waited."""
    moved_bytes: tuple[float, ...] = ()
    """Up, down and by the optimizer, until its end."""
    relative_ends_s: list[float] = field(default_factory=list)
    """All ends, from the last job's on, once it is over."""

    @property
    def end_s(self) -> float:
        end_s = self.ends[len(self.schedule.jobs) - 1].over_s
        assert end_s is not None
        return end_s


class Transfers:
    """Adds transfers to the queue of a replay; they are among its ``activities``, if these are recorded."""

    def __init__(self, queue: EventQueue, activities: list[ReplayedActivity] | None) -> None:
        self._queue, self._activities = queue, activities

    def add(
        self,
        activity: Activity,
        link: Link,
        num_bytes: float,
        job: Job | None,
        microbatch: int | None,
        priority: int,
        *after: Node,
        at: int | None = None,
    ) -> LinkTransfer:
        """One on a link, behind some nodes."""
        transfer = LinkTransfer(link, num_bytes, priority)
        if self._activities is not None:
            self._activities.append(ReplayedActivity(transfer, activity, job, microbatch, num_bytes, at))
        self._queue.add(transfer, *after)
        return transfer


class FinishedSteps:
    """The steps of a replay that are over; ``num_in_a_row`` of them must be like earlier ones for it to be steady."""

    def __init__(self, num_in_a_row: int) -> None:
        self._num_in_a_row = num_in_a_row
        self.steps: list[ReplayedStep] = []
        self.age = 0
        """How many steps before the last ones there were ones like them; 0: not steady yet."""
        self._num_alike: dict[int, int] = {}
        """Per age, how many of the last steps in a row were like those so many steps before them."""

    def add(self, step: ReplayedStep) -> None:
        """Holds a step that is over against those before it."""
        self.steps.append(step)
        step.uploads.clear()
        step.handed_over.clear()
        end_s = step.end_s
        ends_s = [(node.over_s or 0.0) - end_s for node in (*step.ends, step.start, step.losses)]
        step.relative_ends_s = ends_s
        if self.age:
            return
        for age in range(1, len(self.steps)):
            old = self.steps[-1 - age]
            within_s = _SAME * (end_s - old.end_s) / age
            is_like = all(abs(now - then) <= within_s for now, then in zip(ends_s, old.relative_ends_s, strict=True))
            self._num_alike[age] = self._num_alike.get(age, 0) + 1 if is_like else 0
            if self._num_alike[age] >= self._num_in_a_row:
                self.age = age
                return
        num_alike = max(_NUM_ALIKE, 2 * self._num_in_a_row)
        past = [earlier.end_s for earlier in self.steps[::-1][: num_alike + 1]]
        if len(past) > num_alike:  # some ends may drift where nothing depends on them
            gains = [now - then for now, then in pairwise(past)]
            if max(gains) - min(gains) <= _SAME_LENGTH * max(gains):
                self.age = 1
