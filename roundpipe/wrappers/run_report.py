"""`RunReport`: what training took since the last look, as values and as a table; made by `run_log`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from roundpipe.reports.memory import HostMemory
from roundpipe.reports.quantities import counted, format_bytes, format_count, format_seconds, format_share
from roundpipe.reports.tables import summary_table, table
from roundpipe.reports.timeline import WAIT_CAUSES
from roundpipe.runtime.device.backend import Lane

_UP, _DOWN = (Lane.UPLOAD, Lane.WEIGHTS), (Lane.DOWNLOAD, Lane.GRADIENTS)


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One worker."""

    device: str
    busy: float
    """Share of the measured time in which it computed; NaN: nothing was measured."""
    idle: Mapping[str, float]
    """Shares of the measured time in which it did not, by cause; see `roundpipe.runtime.profiling.meter`."""
    measured_s: float
    """Seconds that the shares are of; on accelerators, those of one round of several."""
    moved_bytes: Mapping[str, int]
    """By lane: ``upload`` and ``download`` carry values between stages, ``weights`` and ``gradients`` whole stages."""
    peak_bytes: int
    """Most that was in use at once on the device since the model was made, or since `peak_device_bytes` was reset."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the planner and the simulator say about the latest training round."""

    round_s: float | None
    """Seconds per round in steady state; None before layers were measured."""
    idle: float | None
    """Mean share of the devices' time without compute."""
    uploaded_bytes: float | None
    """Per round, all devices."""
    downloaded_bytes: float | None
    """Per round, all devices."""
    peak_device_bytes: int | None
    """What the plan counts with on any device; None: nothing is known of what layers keep for backward, as of a model
    that was not traced."""
    device_bytes: tuple[int, ...] | None
    """Per worker, the most that is in use at once."""
    rests_on: str
    """Where the costs of layers come from."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """What happened since the report before, or since the model was made; ``str`` shows it as a table."""

    name: str
    num_calls: int
    num_rounds: int
    """A call runs one round, or several where its microbatches need several traces; so does a backward of its own."""
    num_steps: int
    wall_s: float
    """From the first call to the end of the latest work, or until now if something is running."""
    num_samples: int | None
    """In the batches of all calls; None: a batch's samples are not known."""
    num_tokens: int | None
    """Elements of ``tokens_of`` in all calls; None: there is no such argument."""
    tokens_of: str | None
    """The argument that is counted: the first of integers with two dimensions."""
    round_s: float | None
    """Measured seconds of a training round: the median, from the end of the round before or from the call."""
    workers: tuple[WorkerReport, ...]
    optimizer_s: Mapping[str, float]
    """Seconds of the optimizer's side: ``update`` (``step_fn``), ``hand-over`` (weights, gradients), ``waits``."""
    host_memory: HostMemory
    predicted: Prediction | None
    """None before the first training round."""

    @property
    def samples_per_s(self) -> float | None:
        """Samples of all calls over ``wall_s``."""
        return _rate(self.num_samples, self.wall_s)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all calls over ``wall_s``."""
        return _rate(self.num_tokens, self.wall_s)

    @property
    def busy(self) -> float:
        """Mean share of the measured time in which a worker computed."""
        return sum(worker.busy for worker in self.workers) / len(self.workers)

    @property
    def uploaded_bytes(self) -> int:
        """By all workers."""
        return sum(worker.moved_bytes[str(lane)] for worker in self.workers for lane in _UP)

    @property
    def downloaded_bytes(self) -> int:
        """By all workers."""
        return sum(worker.moved_bytes[str(lane)] for worker in self.workers for lane in _DOWN)

    @property
    def peak_device_bytes(self) -> int:
        """The largest of the workers' peaks."""
        return max(worker.peak_bytes for worker in self.workers)

    def __str__(self) -> str:
        predicted = self.predicted
        rows = {
            "calls": f"{self.num_calls}, {counted(self.num_rounds, 'round')}, {counted(self.num_steps, 'step')} "
            f"in {format_seconds(self.wall_s)}",
            "speed": self._speed(),
            "round": self._round(),
        }
        if predicted is not None:
            rows["predicted from"] = predicted.rests_on
        rows["device memory"] = f"peak {format_bytes(self.peak_device_bytes)}" + (
            f", planned for {format_bytes(predicted.peak_device_bytes)}"
            if predicted is not None and predicted.peak_device_bytes is not None
            else ""
        )
        rows["host memory"] = str(self.host_memory)
        rows["moved"] = f"{format_bytes(self.uploaded_bytes)} up, {format_bytes(self.downloaded_bytes)} down"
        times = ", ".join(f"{what} {format_seconds(seconds)}" for what, seconds in self.optimizer_s.items())
        rows["optimizer"] = times or "no step"
        return f"{self.name}\n\n{summary_table(rows)}\n\n{self._workers()}"

    def _speed(self) -> str:
        parts = []
        if self.samples_per_s is not None:
            parts.append(f"{format_count(self.samples_per_s)} samples/s")
        if self.tokens_per_s is not None:
            parts.append(f"{format_count(self.tokens_per_s)} tokens/s (elements of {self.tokens_of})")
        return ", ".join(parts) or "-"

    def _round(self) -> str:
        measured = "no training round" if self.round_s is None else format_seconds(self.round_s)
        if self.predicted is None or self.predicted.round_s is None:
            return measured
        return f"{measured}, predicted {format_seconds(self.predicted.round_s)}"

    def _workers(self) -> str:
        causes = [cause for cause in WAIT_CAUSES if any(worker.idle.get(cause, 0.0) >= 5e-4 for worker in self.workers)]
        lanes = [str(lane) for lane in Lane if lane is not Lane.COMPUTE]
        headers = ["worker", "busy", *(cause.replace("_", " ") for cause in causes), *lanes, "peak"]
        expected = None if self.predicted is None else self.predicted.device_bytes
        if expected is not None:
            headers.append("predicted")
        body = [
            [
                worker.device,
                format_share(worker.busy),
                *(format_share(worker.idle.get(cause, 0.0)) for cause in causes),
                *(format_bytes(worker.moved_bytes[lane]) for lane in lanes),
                format_bytes(worker.peak_bytes),
                *([] if expected is None else [format_bytes(expected[index])]),
            ]
            for index, worker in enumerate(self.workers)
        ]
        return table(headers, body)


def _rate(count: int | None, seconds: float) -> float | None:
    return None if count is None or not seconds else count / seconds
