"""Steps of a schedule, one after the other, as ops, transfers and what they wait for.

Every step is the same `Schedule` that the engine walks. The next one begins when the losses are known and, if there is
an optimizer, when the update before the one between them is done. Each worker computes its ops in the order of its
tasks and has one link up and one down; values that stages hand on go before weights, which go before gradients. What a
run takes may come up from when the worker's run before begins. All links and the optimizer share the host's memory
bandwidth. What lives on a device is updated there behind the step's jobs.

The optimizer's chain, of which a step takes as long as it needs where it is the limit: gradients come home, behind
which the worker's next job is released, and are converted into the optimizer's; the update begins when all are and its
thread has written the weights of the update before into the model, which it does when the step is made, behind
the last uploads, the layers that the next step needs first before the others; the next step brings up what is written,
and runs its first layers while the others are on their way.

Invariant: the replay ends when steps in a row are like those before them, or after a bounded number of steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from roundpipe.core.errors import ConfigError
from roundpipe.core.schedule import MAX_RESIDENT_JOBS, Job, Phase, Schedule
from roundpipe.planning.host_values import values_on_host
from roundpipe.planning.machine import EventQueue, HardwareProfile, Link, Node, Op
from roundpipe.planning.replayed import (
    CAUSES,
    Activity,
    Cause,
    FinishedSteps,
    JobWaits,
    Outputs,
    ReplayedActivity,
    ReplayedStep,
    ReplayedWait,
    Transfers,
)
from roundpipe.planning.replayed_releases import Releases
from roundpipe.planning.residency import STREAMED, Residency, Share
from roundpipe.planning.stage_costs import StageCosts, num_trained

_MAX_STEPS, _MAX_TURNS = 32, 4
"""Steps after which a replay that is not steady is averaged: as many, and as many as the workers need for so many
times the visits that each of them may have under way."""
_MIN_STEPS, _NUM_OPS = 6, 30_000
"""Fewer if they have many ops, since then the rotation's start counts less; but never as few as that."""
_NUM_PIECES = 4
"""In which the weights of a step's first jobs come up; it is layer by layer, of which these show the most."""


class StepReplay:
    """Steps of a schedule, until some in a row are like those before them.

    One alone says nothing where a step has fewer jobs than there are workers: the first ones find idle workers.
    Costs are of what is streamed beside a residency. With ``record``, ``activities`` and ``waits`` are kept.
    """

    def __init__(
        self,
        schedule: Schedule,
        costs: StageCosts,
        profile: HardwareProfile,
        residency: Residency = STREAMED,
        record: bool = False,
    ) -> None:
        if len(costs.layers) != schedule.num_layers:
            raise ConfigError(f"costs of {len(costs.layers)} layers for a schedule of {schedule.num_layers} layers")
        self.schedule = schedule
        self.record = record
        self.activities: list[ReplayedActivity] = []
        self.waits: list[ReplayedWait] = []
        self._costs = costs
        self._profile = profile
        num_workers, num_jobs = schedule.num_workers, len(schedule.jobs)
        self._queue = EventQueue(num_workers, profile.host_bytes_per_s)
        self._up = [Link(profile.upload_bytes_per_s) for _ in range(num_workers)]
        self._down = [Link(profile.download_bytes_per_s) for _ in range(num_workers)]
        self._optimizer = Link(profile.optimizer_bytes_per_s)
        conversion_bytes_per_s = min(profile.conversion_bytes_per_s, profile.optimizer_bytes_per_s)
        self._hand_over = Link(conversion_bytes_per_s)
        self._transfers = Transfers(self._queue, self.activities if record else None)
        self.stages = costs.of_jobs(schedule)
        self._releases = Releases(self._queue, self._transfers, profile, self._down, costs.layers, self.stages)
        self._on_host = values_on_host(schedule, costs)
        is_training = schedule.kind == "train"
        trained = sum(num_trained(cost) for cost in costs.layers) if is_training else 0
        self._update_bytes = trained * profile.update_bytes_per_parameter
        self._updates: list[Node] = []
        pairs = zip(schedule.rings, residency.on_rings(len(schedule.rings)), strict=True)
        self._shares = {ring.workers[0]: share for ring, share in pairs if share.optimizer_bytes and is_training}
        """By worker whose device updates what lives there."""
        self._home: dict[int, list[Node]] = {}
        """Of these workers, the new weights of the step before on their way to the host."""
        self._recent_runs: list[deque[Node]] = [deque(maxlen=2) for _ in range(num_workers)]
        """Of each worker, the last ops of its latest runs: of the one before the next, and of the one before that."""
        self._free_s = [0.0] * num_workers
        self._carried_bytes = self.peak_carried_bytes = 0
        self._num_steps = 0
        num_ops = sum(len(schedule.microbatches(job)) for job in schedule.jobs)
        self._num_in_a_row = -(-MAX_RESIDENT_JOBS * num_workers // num_jobs)
        """Steps with all the visits that workers may have under way; what follows depends on them."""
        most = max(_MAX_STEPS, _MAX_TURNS * self._num_in_a_row)
        self._max_steps = max(_MIN_STEPS, min(most, _NUM_OPS // num_ops))
        self._unfinished: deque[ReplayedStep] = deque()
        self.finished = FinishedSteps(self._num_in_a_row)
        self._add_step(None)
        while not self.finished.age and self._queue.advance():
            pass

    def _add_step(self, before: ReplayedStep | None) -> None:
        """Adds a step; when it begins, it adds the one behind it, whose first weights may come up meanwhile."""
        schedule = self.schedule if before is None else before.schedule.following()
        step = ReplayedStep(schedule)
        self._unfinished.append(step)
        self._num_steps += 1
        updated = self._updates[-2:-1]  # an update waits for the update before
        if self._num_steps < self._max_steps:
            step.start.then = lambda: self._add_step(step)
        else:
            self._queue.add(step.exchanged)
        outputs: Outputs = {}
        losses: list[Node] = []
        forwards: list[Node] = []
        others: list[Node] = []
        pieces = [self._pieces(position, job) for position, job in enumerate(schedule.jobs)]
        gates: list[list[Node | None]] = [[None] * len(each) for each in pieces]
        if before is not None and self._update_bytes:
            gates = [[self._add_gate(step, layers, before, updated) for layers in each] for each in pieces]
            self._queue.add(before.exchanged, *dict.fromkeys(step.handed_over.values()))
        for position, job in enumerate(schedule.jobs):
            if job.replica == 0:
                inputs, outputs = outputs, {}
            earlier = self._releases.earlier[job.worker]
            weights = self._add_weights(step, position, pieces[position], gates[position])
            losses_before = None if before is None else before.losses
            step.lost_s.append(dict.fromkeys(CAUSES, 0.0))
            job_before, lost_s = earlier[-1] if earlier else None, step.lost_s[-1]
            waits = [
                JobWaits(layers, losses_before, step.start, there, gate, job_before, lost_s)
                for layers, there, gate in zip(pieces[position], weights, gates[position], strict=True)
            ]
            last, forward = self._add_ops(step, position, waits, inputs, outputs)
            forwards += [] if forward is None else [forward]
            step.ends.append(last)
            if job.phase is Phase.FUSED or (schedule.kind != "train" and schedule.is_of_last_stage(job)):
                losses.append(last)
            if job.replica == job.num_replicas - 1:
                others += self._releases.add(schedule.jobs, position, step.ends)
        self._queue.add(step.losses, *losses)
        self._queue.add(step.forwards, *(forwards or losses))
        if self._update_bytes:
            after = (*others, step.exchanged, *self._updates[-1:])
            update = self._transfers.add("update", self._optimizer, self._update_bytes, None, None, 0, *after)
            self._updates.append(update)
            others.append(update)
        for worker, share in self._shares.items():
            others += self._add_update_there(worker, share)
        step.ends += others
        self._queue.add(Node(lambda: self._note_moved(step)), step.ends[len(schedule.jobs) - 1])
        self._queue.add(Node(self._finish), *step.ends)
        self._queue.add(step.start, *([] if before is None else [before.losses, *updated]))

    def update_there_s(self, worker: int) -> float:
        """Seconds of an update on a worker's device."""
        return self._shares.get(worker, Share()).update_s(self._profile.device_bytes_per_s)

    def _add_update_there(self, worker: int, share: Share) -> list[Node]:
        """The update on a device, and its new weights on their way home, which the next update waits for."""
        update = Op(worker, self.update_there_s(worker))

        def book() -> None:
            self._free_s[worker] = self._queue.now_s

        update.then = book
        if self.record:
            self.activities.append(ReplayedActivity(update, "update there", None, None, None, worker))
        self._queue.add(update, *self._home.get(worker, ()))
        if share.home_bytes:
            down = self._down[worker]
            self._home[worker] = [self._transfers.add("home", down, share.home_bytes, None, None, 2, update, at=worker)]
        return [update, *self._home.get(worker, ())]

    def _pieces(self, position: int, job: Job) -> list[range]:
        """Layers of a job whose weights come up one after the other, while those before them run: of a step's first."""
        is_split = self.schedule.is_first(position) and job.phase is not Phase.BACKWARD and self._update_bytes
        size = max(-(-len(job.layers) // _NUM_PIECES), 1) if is_split else len(job.layers)
        return [range(start, min(start + size, job.stop)) for start in range(job.start, job.stop, size)]

    def _add_gate(
        self, step: ReplayedStep, layers: Iterable[int], before: ReplayedStep, updated: Sequence[Node]
    ) -> Node | None:
        """When an update's weights are in the model: it is done, and the step before has read the old ones."""
        layers = [layer for layer in layers if self._costs.layers[layer].gradient_bytes]
        if not layers:
            return None
        new = [layer for layer in layers if layer not in step.handed_over]
        if new:
            after: list[Node] = [*updated, *(upload for layer in new for upload in before.uploads[layer])]
            per_parameter = self._profile.hand_over_bytes_per_parameter
            if per_parameter and updated:
                num_bytes = per_parameter * sum(num_trained(self._costs.layers[layer]) for layer in new)
                after = [
                    self._transfers.add("hand-over", self._hand_over, num_bytes, None, None, 0, before.forwards, *after)
                ]
            written = Node()
            self._queue.add(written, *after)
            step.handed_over.update(dict.fromkeys(new, written))
        gate = Node()
        self._queue.add(gate, *{step.handed_over[layer] for layer in layers})
        return gate

    def _add_weights(
        self, step: ReplayedStep, position: int, pieces: Sequence[range], gates: Sequence[Node | None]
    ) -> list[Node]:
        """The uploads of a job's weights, into the memory of the worker's visit before last.

        One of the worker's last two visits may have brought them: of the same layers, in the same step.
        """
        job = step.schedule.jobs[position]
        earlier = list(self._releases.earlier[job.worker])
        are_there = any(step.schedule.has_job(one.job.index) and one.job.layers == job.layers for one in earlier)
        waits: list[Node] = []
        is_first = step.schedule.is_first(position)
        if is_first:  # a step's weights are asked for when it is made, with the losses of the step before
            waits.append(step.start)
        if not is_first or self._profile.prefetch_across_steps:
            earlier = earlier[:-1] if len(earlier) == 2 else []
        for visit in earlier:
            waits += [visit.released, *([visit.gradients] if visit.gradients is not None else [])]
        uploads: list[Node] = []
        for layers, gate in zip(pieces, gates, strict=True):
            num_bytes = 0 if are_there else self._costs.weight_bytes(layers.start, layers.stop)
            after = waits if gate is None else [gate, *waits]
            uploads.append(self._transfers.add("weights", self._up[job.worker], num_bytes, job, None, 1, *after))
            for layer in layers:
                step.uploads.setdefault(layer, []).append(uploads[-1])
        return uploads

    def _add_ops(
        self, step: ReplayedStep, position: int, pieces: Sequence[JobWaits], inputs: Outputs, outputs: Outputs
    ) -> tuple[Op, Op | None]:
        """A job's microbatches: values come up, they run, outputs go down; the first one piece by piece.

        Returns the last op and, where a hand-over waits for it, the one that knows the last of the job's losses.
        """
        job, stage, layers = step.schedule.jobs[position], self.stages[position], self._costs.layers
        carry_in = layers[job.start - 1].carry_bytes if job.start else 0
        carry_out = layers[job.stop - 1].carry_bytes
        is_backward = job.phase is Phase.BACKWARD
        read_bytes, written_bytes = (carry_out, carry_in) if is_backward else (carry_in, carry_out)
        if job.phase is Phase.FUSED:
            written_bytes = carry_in
        kept_bytes = self._on_host[position].kept_bytes
        up, down, recent = self._up[job.worker], self._down[job.worker], self._recent_runs[job.worker]
        begin_s = [self._profile.visit_s]
        *front, whole = pieces
        blocks = [] if whole.before is None else [whole.before.released]

        def forward_s(layers: range) -> float:
            return self._costs.forward_s[layers.stop] - self._costs.forward_s[layers.start]

        def add(
            seconds: float,
            values: Node,
            producer: Node | None,
            is_last: bool,
            activity: Activity = "compute",
            waits: JobWaits = whole,
        ) -> Op:
            op = Op(job.worker, seconds + (begin_s.pop() if begin_s else 0.0))
            if self.record:
                self.activities.append(ReplayedActivity(op, activity, job, microbatch, None))
            waited = () if producer is waits.losses else (values,)
            op.then = lambda: self._book(op, position if is_last else -1, waits, producer, waited)
            self._queue.add(op, waits.weights, values, *blocks)
            blocks.clear()  # the ops behind it have their turn later
            return op

        def bring(num_bytes: int, *after: Node) -> Node:
            is_free = (recent[0],) if len(recent) == recent.maxlen else ()  # as the run before begins
            return self._transfers.add("upload", up, num_bytes, job, microbatch, 0, *after, *is_free)

        op: Op | None = None
        forward: Op | None = None
        microbatches = step.schedule.microbatches(job)
        knows_losses = job.phase is Phase.FUSED and self._profile.hand_over_bytes_per_parameter > 0
        for microbatch in microbatches:
            arrived, producer = inputs.get(microbatch, (whole.start, whole.losses))
            saved = bring(carry_in) if is_backward else None
            incoming = bring(read_bytes, arrived)
            if saved is not None:
                add(stage.early_s, saved, None, is_last=False, activity="recompute")
            late_s, rest = stage.seconds - stage.early_s, job.start
            for piece in front if microbatch == microbatches[0] else ():
                add(forward_s(piece.layers), incoming, producer, is_last=False, waits=piece)
                late_s, rest = late_s - forward_s(piece.layers), piece.layers.stop
            if knows_losses and microbatch == microbatches[-1]:
                forward = add(forward_s(range(rest, job.stop)), incoming, producer, is_last=False)
                late_s -= forward_s(range(rest, job.stop))
            op = add(late_s, incoming, producer, is_last=True)
            recent.append(op)
            on_host = self._transfers.add("download", down, written_bytes, job, microbatch, 0, op)
            outputs[microbatch] = on_host, op
            if kept_bytes:
                self._transfers.add("kept", down, kept_bytes, job, microbatch, 1, op)
        assert op is not None
        return op, forward

    def _book(self, op: Op, position: int, waits: JobWaits, producer: Node | None, inputs: tuple[Node, ...]) -> None:
        """Notes what an op that is over had waited for; at the end of a microbatch also values on the host."""
        since = self._free_s[op.worker]
        self._free_s[op.worker] = self._queue.now_s
        if op.started_s > since:
            gates = (waits.gate,) if inputs or producer is None else (waits.gate, waits.start)
            released = None if waits.before is None else waits.before.released
            marks: tuple[tuple[Cause, Sequence[Node | None]], ...] = (
                ("gradients", (released,)),
                ("no_work", (producer,)),
                ("activations", inputs),
                ("optimizer", gates),
                ("weights", (waits.weights,)),
            )
            for cause, nodes in marks:
                until = max((node.over_s or 0.0 for node in nodes if node is not None), default=0.0)
                if until > since:
                    waits.lost_s[cause] += until - since
                    if self.record:
                        self.waits.append(ReplayedWait(op.worker, cause, since, until))
                    since = until
        if position < 0:
            return
        values = self._on_host[position]
        self._carried_bytes += values.born_bytes
        self.peak_carried_bytes = max(self.peak_carried_bytes, self._carried_bytes)
        self._carried_bytes -= values.freed_bytes

    def _note_moved(self, step: ReplayedStep) -> None:
        links = (self._up, self._down, [self._optimizer, self._hand_over, *self._releases.added])
        step.moved_bytes = tuple(sum(link.moved_bytes for link in group) for group in links)

    def _finish(self) -> None:
        while self._unfinished and all(node.over_s is not None for node in self._unfinished[0].ends):
            self.finished.add(self._unfinished.popleft())
