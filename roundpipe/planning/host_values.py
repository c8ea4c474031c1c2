"""Values and gradients that wait on the host between stages: which job puts them there, which reads them last."""

from __future__ import annotations

from dataclasses import dataclass

from roundpipe.core.schedule import Phase, Schedule
from roundpipe.planning.stage_costs import StageCosts


@dataclass(slots=True)
class HostValues:
    """What each microbatch of a job puts on the host for others, and what nobody reads after it."""

    born_bytes: int = 0
    freed_bytes: int = 0
    kept_bytes: int = 0
    """Inputs of backward stages between the job's own cuts: they go down too."""


def values_on_host(schedule: Schedule, costs: StageCosts) -> list[HostValues]:
    """Per job, the values and gradients that it puts on the host and that it is the last to read."""
    jobs = schedule.jobs
    carry_bytes = [0, *(layer.carry_bytes for layer in costs.layers)]  # in front of each layer, and behind the last
    values = [HostValues() for _ in jobs]
    starts = {job.start for job in jobs if job.phase is Phase.BACKWARD}
    saved = starts if costs.grain == "stage" else set(range(schedule.num_layers))
    inner = [[cut for cut in range(job.start + 1, job.stop) if cut in saved] for job in jobs]
    first = [position for position, job in enumerate(jobs) if job.replica == 0]
    last_reader: dict[int, int] = {}
    for position in first:
        reads = [jobs[position].start, *(inner[position] if jobs[position].phase is Phase.BACKWARD else [])]
        last_reader.update((cut, position) for cut in reads if cut)
    written: set[int] = set()
    for position in first:
        job, own = jobs[position], values[position]
        if job.phase is Phase.FORWARD:
            own.kept_bytes = sum(carry_bytes[cut] for cut in inner[position])
            cuts = [cut for cut in (*inner[position], job.stop) if cut in last_reader]
            written.update(cuts)
            own.born_bytes = sum(carry_bytes[cut] for cut in cuts)
            continue
        own.born_bytes = carry_bytes[job.start]  # the gradient
        if job.phase is Phase.BACKWARD and job.stop < schedule.num_layers:
            own.freed_bytes = carry_bytes[job.stop]
    for cut, position in last_reader.items():
        if cut in written:
            values[position].freed_bytes += carry_bytes[cut]
    return [values[position - jobs[position].replica] for position in range(len(jobs))]
