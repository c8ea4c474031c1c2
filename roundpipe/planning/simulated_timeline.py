"""A simulated run as the same spans that a recorded one has.

Invariant: spans begin and end when the simulator says; work that takes no time is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from roundpipe.core.layers import LayerCost
from roundpipe.core.schedule import Phase, Schedule
from roundpipe.planning.discrete_events import LinkTransfer
from roundpipe.planning.hardware import HardwareProfile
from roundpipe.planning.replay import Activity, StepReplay
from roundpipe.planning.simulator import Simulation, replay, steady_state
from roundpipe.planning.stage_costs import RecomputeGrain
from roundpipe.reports.timeline import OPTIMIZER, WAIT_NAMES, Span, Timeline

SHOWN_STEPS = 3
"""The last ones of the replay, which are steady."""

_PREFIXES: dict[Activity, str] = {
    "upload": "values for ",
    "download": "values of ",
    "kept": "kept values of ",
    "weights": "weights of ",
    "gradients": "gradients of ",
}
_PARTS = {Phase.FORWARD: "forward", Phase.FUSED: "fused", Phase.BACKWARD: "backward"}


def simulate_timeline(
    schedule: Schedule,
    costs: Sequence[LayerCost],
    profile: HardwareProfile | None = None,
    *,
    recompute_grain: RecomputeGrain = "stage",
) -> tuple[Simulation, Timeline]:
    """`simulate`, and what it played from the first step on; arguments and errors are the same."""
    steps = replay(schedule, costs, profile, recompute_grain, record=True)
    return steady_state(steps), Timeline(_spans(steps))


def _spans(steps: StepReplay) -> Iterator[Span]:
    for wait in steps.waits:
        device, cause = f"worker {wait.worker}", wait.cause
        yield Span(device, "waits", WAIT_NAMES[cause], wait.start_s, wait.end_s, {"cause": cause})
    num_updates = 0
    for node, activity, job, microbatch, num_bytes in steps.activities:
        start_s = node.sent_s if isinstance(node, LinkTransfer) else node.started_s
        if node.over_s is None or start_s is None or node.over_s <= start_s:
            continue
        if job is None:
            num_updates += 1
            yield Span(OPTIMIZER, activity, f"optimizer step {num_updates}", start_s, node.over_s)
            continue
        args: dict[str, object] = {"layers": [job.start, job.stop], "job": job.index}
        name = f"{_PREFIXES.get(activity, '')}{job}"
        if microbatch is not None:
            name += f" m{microbatch}"
            args["microbatch"] = microbatch
        if num_bytes is not None:
            args["bytes"] = round(num_bytes)
        else:
            args["part"] = activity if activity == "recompute" else _PARTS[job.phase]
        lane: str = activity
        if activity == "recompute":
            name, lane = f"{name} recompute", "compute"
        yield Span(f"worker {job.worker}", lane, name, start_s, node.over_s, args)


def steady(timeline: Timeline, schedule: Schedule, num_steps: int = SHOWN_STEPS) -> Timeline:
    """The last whole steps of a simulated run, up to so many; ``schedule`` is that of the run's first step."""
    computed = [
        ((span.args["job"] - schedule.first_job) // len(schedule.jobs), span)
        for span in timeline.spans
        if span.lane == "compute"
    ]
    counts = Counter(number for number, _ in computed)
    shown = sorted(number for number, count in counts.items() if count == counts[0])[-num_steps:]
    start_s = next(span.start_s for number, span in computed if number == shown[0])
    return timeline.between(start_s, max(span.end_s for number, span in computed if number == shown[-1]))


def step_alone_s(timeline: Timeline, schedule: Schedule) -> float:
    """Seconds of a step beside which no other runs, until its gradients are home: the first of a simulated run."""
    return max(
        span.end_s
        for span in timeline.spans
        if span.lane in ("compute", "gradients") and span.args["job"] < schedule.next_job
    )
