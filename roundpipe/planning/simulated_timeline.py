"""A simulated run as the same spans that a recorded one has.

Invariant: spans begin and end when the simulator says; work that takes no time is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from roundpipe.core.layers import LayerCost
from roundpipe.core.schedule import Job, Phase, Schedule
from roundpipe.planning.events import Node, Transfer
from roundpipe.planning.simulator import Cause, HardwareProfile, Simulation, Work, simulate
from roundpipe.planning.stage_costs import RecomputeGrain
from roundpipe.reports.timeline import OPTIMIZER, WAIT_NAMES, Span, Timeline

SHOWN_ROUNDS = 3
"""The last ones of the replay, which are steady."""

_LANES: dict[Work, str] = {
    "recompute": "compute",
    "compute": "compute",
    "upload": "upload",
    "download": "download",
    "kept": "kept",
    "weights": "weights",
    "gradients": "gradients",
    "update": "update",
}
_WORDS: dict[Work, str] = {
    "upload": "values for ",
    "download": "values of ",
    "kept": "kept values of ",
    "weights": "weights of ",
    "gradients": "gradients of ",
}


class _Watcher:
    """Keeps all work of a replay, by name."""

    def __init__(self) -> None:
        self._works: list[tuple[Node, Work, Job | None, int | None]] = []
        self._bytes: dict[Node, float] = {}
        self._waits: list[Span] = []

    def add(self, node: Node, work: Work, job: Job | None, microbatch: int | None) -> None:
        self._works.append((node, work, job, microbatch))
        if isinstance(node, Transfer):
            self._bytes[node] = node.bytes_left

    def wait(self, worker: int, cause: Cause, start_s: float, end_s: float) -> None:
        self._waits.append(Span(_device(worker), "waits", WAIT_NAMES[cause], start_s, end_s, {"cause": cause}))

    def spans(self) -> Iterator[Span]:
        """Everything that took time and is over."""
        yield from self._waits
        num_updates = 0
        for node, work, job, microbatch in self._works:
            start_s = node.sent_s if isinstance(node, Transfer) else node.started_s
            if node.over_s is None or start_s is None or node.over_s <= start_s:
                continue
            if job is None:
                num_updates += 1
                yield Span(OPTIMIZER, _LANES[work], f"optimizer step {num_updates}", start_s, node.over_s)
                continue
            args: dict[str, object] = {"layers": [job.start, job.stop], "job": job.index}
            name = f"{_WORDS.get(work, '')}{job}"
            if microbatch is not None:
                name += f" m{microbatch}"
                args["microbatch"] = microbatch
            if node in self._bytes:
                args["bytes"] = round(self._bytes[node])
            else:
                args["part"] = work if work == "recompute" else _PARTS[job.phase]
            name += " recompute" if work == "recompute" else ""
            yield Span(_device(job.worker), _LANES[work], name, start_s, node.over_s, args)


_PARTS = {Phase.FORWARD: "forward", Phase.FUSED: "fused", Phase.BACKWARD: "backward"}


def _device(worker: int) -> str:
    return f"worker {worker}"


def simulate_timeline(
    schedule: Schedule,
    costs: Sequence[LayerCost],
    profile: HardwareProfile | None = None,
    *,
    recompute_grain: RecomputeGrain = "stage",
) -> tuple[Simulation, Timeline]:
    """`simulate`, and what it played from the first round on; arguments and errors are the same."""
    watcher = _Watcher()
    found = simulate(schedule, costs, profile, recompute_grain=recompute_grain, watcher=watcher)
    return found, Timeline(watcher.spans())


def steady(timeline: Timeline, schedule: Schedule, num_rounds: int = SHOWN_ROUNDS) -> Timeline:
    """The last rounds of a simulated run that are whole, on a clock that begins with the first of them.

    Args:
        timeline: from `simulate_timeline`.
        schedule: of the first round.
        num_rounds: how many, if there are as many.
    """
    first, length = schedule.first_job, len(schedule.jobs)
    begun: dict[int, float] = {}
    runs: dict[int, int] = {}
    for span in timeline.spans:
        if span.lane == "compute":
            number = (span.args["job"] - first) // length
            begun.setdefault(number, span.start_s)
            runs[number] = runs.get(number, 0) + 1
    whole = [number for number, count in runs.items() if count == runs[0]]
    chosen = sorted(whole)[-num_rounds:]
    end_s = max(
        span.end_s
        for span in timeline.spans
        if span.lane == "compute" and (span.args["job"] - first) // length == chosen[-1]
    )
    return timeline.between(begun[chosen[0]], end_s)


def round_alone_s(timeline: Timeline, schedule: Schedule) -> float:
    """Seconds of a round beside which no other runs, until its gradients are home: the first of a simulated run."""
    return max(
        span.end_s
        for span in timeline.spans
        if span.lane in ("compute", "gradients") and span.args["job"] < schedule.next_job
    )
