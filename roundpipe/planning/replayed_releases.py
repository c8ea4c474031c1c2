"""How the jobs of replayed steps end: gradients come home, and become the optimizer's; see `replay`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from roundpipe.core.layers import LayerCost
from roundpipe.core.schedule import Job
from roundpipe.planning.machine import EventQueue, HardwareProfile, Link, Node
from roundpipe.planning.replayed import EarlierJob, Transfers
from roundpipe.planning.stage_costs import StageCost, num_trained


class Releases:
    """The ends of jobs, in the order of a schedule's steps; ``down`` are the workers' links to the host."""

    def __init__(
        self,
        queue: EventQueue,
        transfers: Transfers,
        profile: HardwareProfile,
        down: Sequence[Link],
        layers: Sequence[LayerCost],
        stages: Sequence[StageCost],
    ) -> None:
        self._queue, self._transfers, self._profile = queue, transfers, profile
        self._down, self._layers, self._stages = down, layers, stages
        conversion_bytes_per_s = min(profile.conversion_bytes_per_s, profile.optimizer_bytes_per_s)
        self.added = [Link(conversion_bytes_per_s) for _ in down]
        """What converts the gradients of each worker."""
        self.earlier: list[deque[EarlierJob]] = [deque(maxlen=2) for _ in down]
        """The latest jobs of each worker."""

    def add(self, jobs: Sequence[Job], position: int, ends: Sequence[Node]) -> list[Node]:
        """The jobs that share the stage of the one at a position, the last of them; what the update waits for.

        Where devices are peers, their gradients are added up there, and each brings home its share.
        """
        number = jobs[position].num_replicas
        adds_up = number > 1 and self._profile.has_peers
        share = 1 / number if adds_up else 1
        positions, others = range(position + 1 - number, position + 1), list[Node]()
        for at in positions:
            job, num_bytes = jobs[at], self._stages[at].gradient_bytes
            gradients = None
            if num_bytes:
                after = [ends[other] for other in (positions if adds_up else [at])]
                link = self._down[job.worker]
                gradients = self._transfers.add("gradients", link, num_bytes * share, job, None, 2, *after)
            earlier = self._add_one(job, ends[at], gradients, share)
            self.earlier[job.worker].append(earlier)
            others += [] if gradients is None else [gradients, earlier.settled]
        return others

    def _add_one(self, job: Job, last: Node, gradients: Node | None, share: float) -> EarlierJob:
        """A job's end: the ``share`` of its gradients that comes home becomes the optimizer's behind earlier ones.

        The worker goes on when those of the job before it are home.
        """
        earlier = self.earlier[job.worker]
        settled, released = earlier[-1].settled if earlier else Node(), Node()
        if not earlier:
            self._queue.add(settled)
        home = earlier[-1].gradients if earlier else None
        self._queue.add(released, last, *([] if home is None else [home]))
        if gradients is not None:
            num_trained_there = sum(num_trained(self._layers[layer]) for layer in job.layers) * share
            num_bytes = self._profile.gradients_bytes_per_parameter * num_trained_there
            after = gradients, settled
            settled = Node()
            if num_bytes:
                settled = self._transfers.add("added", self.added[job.worker], num_bytes, job, None, 0, *after)
            else:
                self._queue.add(settled, *after)
        return EarlierJob(job, last, gradients, settled, released)
