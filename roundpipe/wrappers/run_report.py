"""What training took since the last look: speed, where workers' time went, bytes, memory, against what was predicted.

    RunLog       what calls bring: see `roundpipe.wrappers.session`
    Meter        what workers do: see `roundpipe.runtime.profiling.meter`
    make_report  both, with the simulator's and the planner's predictions for the latest step

Invariant: nothing here waits for what is running, and nothing is read from a device but what it has finished.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from roundpipe.core.storages import bytes_of
from roundpipe.core.tiling import UNTILED
from roundpipe.core.watched import unseen
from roundpipe.reports.limits import ADVICE, OF_OPTIMIZER, SHARING, TURNS, Limit, limit_of
from roundpipe.reports.memory import HostMemory
from roundpipe.reports.tables import (
    counted,
    format_bytes,
    format_count,
    format_seconds,
    format_share,
    summary_table,
    table,
    tiles_in_words,
)
from roundpipe.reports.timeline import WAIT_CAUSES
from roundpipe.runtime.device.backend import Lane, UnplannedMemory
from roundpipe.runtime.profiling.meter import MeterReading
from roundpipe.wrappers.run_log import RunLog
from roundpipe.wrappers.run_prediction import Prediction, predict
from roundpipe.wrappers.session import Session

_UP, _DOWN = (Lane.UPLOAD, Lane.WEIGHTS), (Lane.DOWNLOAD, Lane.GRADIENTS)


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One worker."""

    device: str
    """As torch names it."""
    busy: float
    """Share of the measured time in which it computed; NaN: nothing was measured."""
    idle: Mapping[str, float]
    """Shares of the measured time in which it did not, by cause, such as ``weights`` or ``no_work``."""
    measured_s: float
    """Seconds that the shares are of; on accelerators, those of one round of several."""
    moved_bytes: Mapping[str, int]
    """By lane: ``upload`` and ``download`` carry values between stages, ``weights`` and ``gradients`` whole stages."""
    peak_bytes: int
    """Most that was in use at once on the device since the model was made, or since it was reset."""
    resident_bytes: int
    """Of weights that stay on the device between rounds, now."""
    context_bytes: int = 0
    """In use on the device beyond torch's allocator, now: the context, libraries and other processes."""
    fragmentation_bytes: int = 0
    """The most that the allocator held, but could not give, when an allocation failed."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """What happened since the report before, or since the model was made; ``str`` shows it as a table."""

    name: str
    """Of the model, as given to `roundpipe.compile`."""
    num_calls: int
    """Calls of the model: ``forward``, ``forward_backward``, ``forward_loss``."""
    num_rounds: int
    """A call runs one round, or several where its microbatches need several traces; so does a backward of its own."""
    num_steps: int
    """Updates that were asked for."""
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
    """One entry per worker, in the order of the rotation."""
    optimizer_s: Mapping[str, float]
    """Seconds of the optimizer's side: ``home`` (gradients that came from devices are added and converted),
    ``begin`` (from ``step``, or the update before, to its hand-over), ``hand-over`` (weights, gradients), ``update``
    (``step_fn``), ``waits``; with ranks also ``averaging`` (gradients between them, and new weights of shards) and
    ``other ranks`` (waits for them)."""
    host_memory: HostMemory
    """Bytes in host memory, by what they are for."""
    predicted: Prediction | None
    """None before the first training round."""
    stages: tuple[str, ...]
    """Of the latest training round, in order; U x2: two workers share the microbatches of U. Empty before it."""
    start_s: Mapping[str, float]
    """Seconds by part (``trace``, ``pin weights``, ``first round``) of what came before the second training round."""
    limit: Limit | None
    """What decided how long the measured steps took, such as ``compute``, ``up`` or ``update``; None: not measured."""
    num_allocator_retries: int = 0
    """How often devices stood still because their allocators were at the limit and gave back what they kept."""
    num_layers_there: int = 0
    """Of the latest training round, layers whose trained weights live on the device, with all that is theirs."""

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

    def _repr_pretty_(self, printer: object, cycle: bool) -> None:
        """What a notebook shows."""
        printer.text(str(self))  # type: ignore[attr-defined]

    def __str__(self) -> str:
        predicted = self.predicted
        counts = f"{self.num_calls}, {counted(self.num_rounds, 'round')}, {counted(self.num_steps, 'step')}"
        seconds = "no training round" if self.round_s is None else format_seconds(self.round_s)
        memory = f"peak {format_bytes(self.peak_device_bytes)}"
        if predicted is not None and predicted.round_s is not None:
            seconds += f", predicted {format_seconds(predicted.round_s)}"
        if predicted is not None and (planned := predicted.device_memory) is not None:
            memory += f", planned for {format_bytes(planned.total)}: {planned}"
        if resident_bytes := max(worker.resident_bytes for worker in self.workers):
            memory += f"; {format_bytes(resident_bytes)} of weights stay"
            if self.num_layers_there:
                memory += f", of {counted(self.num_layers_there, 'layer')} with gradients and the optimizer's side"
        if self.num_allocator_retries:
            memory += f"; allocator retries {self.num_allocator_retries / max(self.num_rounds, 1):.2g} a round"
        times = ", ".join(f"{what} {format_seconds(spent_s)}" for what, spent_s in self.optimizer_s.items())
        rows = {
            "calls": f"{counts} in {format_seconds(self.wall_s)}",
            "speed": self._speed(),
            "round": seconds,
            **({} if predicted is None else {"predicted from": predicted.rests_on}),
            **({"stages": ", ".join(self.stages)} if self.stages else {}),
            "device memory": memory,
            **({} if predicted is None or predicted.tiles == UNTILED else {"tiles": tiles_in_words(predicted.tiles)}),
            "host memory": str(self.host_memory),
            "moved": f"{format_bytes(self.uploaded_bytes)} up, {format_bytes(self.downloaded_bytes)} down",
            "optimizer": times or "no step",
            **({} if self.limit is None else {"limit": self._limit(self.limit)}),
        }
        if self.start_s:
            parts = ", ".join(f"{part} {format_seconds(spent_s)}" for part, spent_s in self.start_s.items())
            rows["to the first step"] = f"{format_seconds(sum(self.start_s.values()))}: {parts}"
        return f"{self.name}\n\n{summary_table(rows)}\n\n{self._workers()}"

    def _limit(self, limit: Limit) -> str:
        """With what the optimizer's chain takes of a step, where that is it, and what helps."""
        are_apart = len(self.workers) > 1 and not any(" x" in stage for stage in self.stages)
        chain = {what: self.optimizer_s[what] for what in OF_OPTIMIZER if what in self.optimizer_s}
        taken = ""
        if limit in chain and self.num_steps:
            spent = (f"{what} {format_seconds(spent_s / self.num_steps)}" for what, spent_s in chain.items())
            taken = f" (of each step {', '.join(spent)}, one behind the other)"
        more = ""
        if limit == "compute" and are_apart:
            more = f", and so may {SHARING}"
        elif limit == "overhead" and len(self.workers) > 1:
            more = f", {TURNS}"
        return f"{limit}{taken}: {ADVICE[limit]}{more}"

    def _speed(self) -> str:
        parts = []
        if self.samples_per_s is not None:
            parts.append(f"{format_count(self.samples_per_s)} samples/s")
        if self.tokens_per_s is not None:
            parts.append(f"{format_count(self.tokens_per_s)} tokens/s (elements of {self.tokens_of})")
        return ", ".join(parts) or "-"

    def _workers(self) -> str:
        causes = [cause for cause in WAIT_CAUSES if any(worker.idle.get(cause, 0.0) >= 5e-4 for worker in self.workers)]
        lanes = [str(lane) for lane in Lane if lane is not Lane.COMPUTE]
        headers = ["worker", "busy", *(cause.replace("_", " ") for cause in causes), *lanes, "peak"]
        expected = None if self.predicted is None else self.predicted.device_bytes
        if expected is not None:
            headers.append("predicted")
        beside = any(worker.context_bytes or worker.fragmentation_bytes for worker in self.workers)
        if beside:
            headers += ["context", "fragmentation"]
        body = [
            [
                worker.device,
                format_share(worker.busy),
                *(format_share(worker.idle.get(cause, 0.0)) for cause in causes),
                *(format_bytes(worker.moved_bytes[lane]) for lane in lanes),
                format_bytes(worker.peak_bytes),
                *([] if expected is None else [format_bytes(expected[index])]),
                *map(format_bytes, (worker.context_bytes, worker.fragmentation_bytes) if beside else ()),
            ]
            for index, worker in enumerate(self.workers)
        ]
        return table(headers, body)


def _rate(count: int | None, seconds: float) -> float | None:
    return None if count is None or not seconds else count / seconds


def make_report(session: Session) -> RunReport:
    """Everything since the last report; counts begin anew."""
    log, engine, optimizer = session.log, session.engine, session.optimizer
    steps, readings = engine.steps, engine.read_meters()
    meters: Sequence[MeterReading] = readings
    if log.meters_before:
        meters = [now.since(then) for now, then in zip(readings, log.meters_before, strict=True)]
    seconds = dict(optimizer.log.seconds) | {"home": engine.home_s()}
    spent = _since(log.optimizer_before, dict(sorted(seconds.items())))
    start_s = dict(engine.start.seconds)
    num_steps = optimizer.num_steps - log.num_steps_before
    end_s = time.perf_counter() if engine.running() else max(steps.last_over_s, optimizer.log.last_s)
    wall_s = max(end_s - steps.first_begun_s, 0.0) if steps.first_begun_s else 0.0
    memory, num_retries = (engine.peak_bytes(), engine.resident_bytes(), engine.unplanned()), engine.retries.read()
    workers = tuple(map(_worker_report, engine.devices, meters, *memory))
    report = RunReport(
        name=session.name,
        num_calls=log.num_calls,
        num_rounds=steps.num_begun,
        num_steps=num_steps,
        wall_s=wall_s,
        num_samples=log.num_samples,
        num_tokens=log.num_tokens if log.tokens_of is not None else None,
        tokens_of=log.tokens_of,
        round_s=steps.seconds_per_step("train"),
        workers=workers,
        optimizer_s=spent,
        host_memory=_host_memory(session),
        predicted=predict(log.latest, session, readings),
        stages=() if log.latest is None else log.latest.schedule.stage_titles(),
        start_s=_since(log.start_before, start_s),
        limit=_limit(workers, spent, wall_s),
        num_allocator_retries=num_retries - log.retries_before,
        num_layers_there=0 if log.latest is None else len(log.latest.residency.trained),
    )
    steps.reset()
    engine.measure_next()
    session.log = RunLog(optimizer.num_steps, seconds, start_s, readings, num_retries, log.latest)
    return report


def _since(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    seconds = {what: total - before.get(what, 0.0) for what, total in now.items()}
    return {what: spent_s for what, spent_s in seconds.items() if spent_s > 0}


def _limit(workers: Sequence[WorkerReport], optimizer_s: Mapping[str, float], wall_s: float) -> Limit | None:
    measured = [worker for worker in workers if worker.measured_s]
    if not measured:
        return None
    idle = {cause: sum(worker.idle.get(cause, 0.0) for worker in measured) / len(measured) for cause in WAIT_CAUSES}
    return limit_of(idle, optimizer_s, wall_s)


def _worker_report(
    device: str, meter: MeterReading, peak_bytes: int, resident_bytes: int, unplanned: UnplannedMemory
) -> WorkerReport:
    measured_s = meter.busy_s + sum(meter.idle_s.values())
    return WorkerReport(
        device=device,
        busy=meter.busy_s / measured_s if measured_s else float("nan"),
        idle={cause: seconds / measured_s for cause, seconds in meter.idle_s.items()} if measured_s else {},
        measured_s=measured_s,
        moved_bytes={str(lane): meter.moved_bytes[lane] for lane in Lane if lane is not Lane.COMPUTE},
        peak_bytes=peak_bytes,
        resident_bytes=resident_bytes,
        context_bytes=unplanned.context,
        fragmentation_bytes=unplanned.fragmentation,
    )


def _host_memory(session: Session) -> HostMemory:
    """What is there, or, while steps or an update run, what those take; ``.grad`` is not read while threads set it.

    What lives on a device is not the host's.
    """
    model, optimizer = session.shown, session.optimizer
    pairs = optimizer.parameter_pairs()
    weights = {id(tensor): tensor for tensor in (*(pair.parameter for pair in pairs), *model.buffers())}.values()
    copies = [pair.copy for pair in pairs if pair.copy is not None and not pair.is_away]
    if session.engine.running() or not optimizer.is_idle:
        trained = [pair for pair in pairs if pair.parameter.requires_grad]
        own: list[torch.Tensor] = [pair.parameter for pair in trained if pair.twin is None]
        taken = [(pair, copy) for pair in trained if (copy := pair.copy) is not None and not pair.is_away]
        of_copies: list[torch.Tensor] = [pair.parameter if pair.may_be_late else copy for pair, copy in taken]
    else:
        with unseen():  # what looks is not the loop
            of_copies = [copy.grad for copy in copies if copy.grad is not None]
        known = set(map(_address, of_copies))  # after `synchronize` the model shows the optimizer's gradients
        gradients = [pair.parameter.grad for pair in pairs if pair.parameter.grad is not None]
        own = [gradient for gradient in gradients if _address(gradient) not in known]
    return HostMemory(*(sum(map(bytes_of, kind)) for kind in (weights, own, copies, of_copies)))


def _address(tensor: torch.Tensor) -> int | None:
    return tensor.data_ptr() if tensor.layout is torch.strided else None
