"""What training took since the last look: speed, where workers' time went, bytes, memory, against what was predicted.

    RunLog       what calls bring: samples, tokens
    Meter        what workers do: see `roundpipe.runtime.profiling.meter`
    make_report  both, with the simulator's and the planner's predictions for the latest step

Invariant: nothing here waits for what is running, and nothing is read from a device but what it has finished.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from roundpipe.core import trees
from roundpipe.core.layers import LayerChain
from roundpipe.core.schedule import Schedule
from roundpipe.planning.machine import HardwareProfile
from roundpipe.planning.simulator import simulate, simulate_timeline, step_alone_s
from roundpipe.planning.stage_costs import num_trained, plan_peak_bytes
from roundpipe.reports.memory import HostMemory
from roundpipe.runtime.config import RecomputeGrain
from roundpipe.runtime.device.backend import Lane
from roundpipe.runtime.engine.engine import Engine
from roundpipe.runtime.engine.plan_choice import PlanChooser
from roundpipe.runtime.optimizer.optimizer import OptimizerSide
from roundpipe.runtime.profiling.meter import MeterReading, link_speeds
from roundpipe.runtime.weights.master_weights import ParameterPair
from roundpipe.wrappers.run_report import Prediction, RunReport, WorkerReport


@dataclass(slots=True)
class RunLog:
    """What calls brought since the last report."""

    num_calls: int = 0
    num_samples: int | None = 0
    num_tokens: int = 0
    tokens_of: str | None = None
    num_steps_before: int = 0
    """Steps that were made when the last report was."""
    optimizer_before: Mapping[str, float] = field(default_factory=dict)
    meters_before: Sequence[MeterReading] = ()
    latest: LatestStep | None = None
    """The latest training step."""

    def note(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], num_samples: int | None) -> None:
        self.num_calls += 1
        if num_samples is None or self.num_samples is None:
            self.num_samples = None
        else:
            self.num_samples += num_samples
        for name, value in (*((f"argument {index}", value) for index, value in enumerate(args)), *kwargs.items()):
            for tensor in trees.tensors(value):
                if tensor.ndim == 2 and tensor.dtype in _INTEGERS:
                    self.num_tokens += tensor.numel()
                    self.tokens_of = name
                    return


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


@dataclass(frozen=True, slots=True)
class LatestStep:
    """What the predictions are about."""

    schedule: Schedule
    chain: weakref.ref[LayerChain]
    elements: int
    """Of the tensor arguments of its largest microbatch."""
    recompute_grain: RecomputeGrain
    overlaps: bool
    """Whether the next step begins beside it."""
    plans: PlanChooser
    """Know what its layers take."""


def make_report(
    name: str, log: RunLog, engine: Engine, optimizer: OptimizerSide, model: torch.nn.Module, now_s: float
) -> RunReport:
    """Everything since the last report (``now_s`` is by ``time.perf_counter``); counts begin anew."""
    steps, readings = engine.steps, engine.read_meters()
    meters: Sequence[MeterReading] = readings
    if log.meters_before:
        meters = [now.since(then) for now, then in zip(readings, log.meters_before, strict=True)]
    seconds = dict(optimizer.log.seconds)
    spent = {what: total - log.optimizer_before.get(what, 0.0) for what, total in sorted(seconds.items())}
    num_steps = optimizer.num_steps - log.num_steps_before
    end_s = now_s if engine.running() else max(steps.last_over_s, optimizer.log.last_s)
    report = RunReport(
        name=name,
        num_calls=log.num_calls,
        num_rounds=steps.num_begun,
        num_steps=num_steps,
        wall_s=max(end_s - steps.first_begun_s, 0.0) if steps.first_begun_s else 0.0,
        num_samples=log.num_samples,
        num_tokens=log.num_tokens if log.tokens_of is not None else None,
        tokens_of=log.tokens_of,
        round_s=steps.seconds_per_step("train"),
        workers=tuple(map(_worker_report, engine.devices, meters, engine.peak_bytes())),
        optimizer_s={what: seconds for what, seconds in spent.items() if seconds > 0},
        host_memory=_host_memory(model, optimizer.parameter_pairs()),
        predicted=_predict(log.latest, engine, readings, spent.get("update", 0.0), num_steps),
    )
    steps.reset()
    log.num_calls, log.num_samples, log.num_tokens, log.tokens_of = 0, 0, 0, None
    log.num_steps_before, log.optimizer_before, log.meters_before = optimizer.num_steps, seconds, readings
    return report


def _worker_report(device: str, meter: MeterReading, peak: int) -> WorkerReport:
    measured_s = meter.busy_s + sum(meter.idle_s.values())
    return WorkerReport(
        device=device,
        busy=meter.busy_s / measured_s if measured_s else float("nan"),
        idle={cause: seconds / measured_s for cause, seconds in meter.idle_s.items()} if measured_s else {},
        measured_s=measured_s,
        moved_bytes={str(lane): meter.moved_bytes[lane] for lane in Lane if lane is not Lane.COMPUTE},
        peak_bytes=peak,
    )


def _host_memory(model: torch.nn.Module, pairs: Sequence[ParameterPair]) -> HostMemory:
    gradients, copies, of_copies = 0, 0, 0
    for pair in pairs:
        shown = pair.parameter.grad
        of_copy = None if pair.copy is None else pair.copy.grad
        copies += 0 if pair.copy is None else pair.copy.nbytes
        of_copies += 0 if of_copy is None else of_copy.nbytes
        # after `synchronize` the model shows the optimizer's gradients
        is_view = shown is not None and of_copy is not None and _address(shown) == _address(of_copy)
        gradients += 0 if shown is None or is_view else shown.nbytes
    tensors = {id(tensor): tensor for tensor in (*(pair.parameter for pair in pairs), *model.buffers())}
    return HostMemory(sum(tensor.nbytes for tensor in tensors.values()), gradients, copies, of_copies)


def _address(tensor: torch.Tensor) -> int | None:
    return tensor.data_ptr() if tensor.layout is torch.strided else None


def _predict(
    latest: LatestStep | None, engine: Engine, meters: Sequence[MeterReading], update_s: float, num_steps: int
) -> Prediction | None:
    """The simulator's figures for steps like the latest, with links and an optimizer as fast as they were measured."""
    chain = None if latest is None else latest.chain()
    if latest is None or chain is None:
        return None
    plans, schedule, grain = latest.plans, latest.schedule, latest.recompute_grain
    costs = plans.costs(chain, latest.elements)
    knows_memory = any(cost.activation_bytes for cost in costs)
    profile = HardwareProfile.of_devices(engine.has_accelerators, prefetch_across_steps=latest.overlaps)
    plan_peak = None
    if knows_memory:
        plan_peak = plan_peak_bytes(schedule.plan, costs, num_workers=schedule.num_workers, recompute_grain=grain)
    if not plans.is_measured(chain):
        device_bytes = simulate(schedule, costs, profile, recompute_grain=grain).peak_bytes if knows_memory else None
        rests_on = "bytes of layers; their seconds are not measured yet"
        return Prediction(None, None, None, None, plan_peak, device_bytes, rests_on)
    up, down = link_speeds(meters)
    trained = sum(num_trained(cost) for cost in costs)
    profile = replace(profile, upload_bytes_per_s=up, download_bytes_per_s=down)
    if update_s and num_steps and trained:
        rate = trained * num_steps / update_s
        profile = replace(profile, optimizer_bytes_per_parameter=1, optimizer_bytes_per_s=rate)
    if latest.overlaps:
        simulation = simulate(schedule, costs, profile, recompute_grain=grain)
        round_s, idle = simulation.seconds_per_step, simulation.mean_idle.total
    else:
        simulation, timeline = simulate_timeline(schedule, costs, profile, recompute_grain=grain)
        round_s = step_alone_s(timeline, schedule)
        computed_s = sum(
            span.seconds for span in timeline.spans if span.lane == "compute" and span.args["job"] < schedule.next_job
        )
        idle = 1.0 - computed_s / (round_s * schedule.num_workers)
    return Prediction(
        round_s,
        idle,
        simulation.uploaded_bytes,
        simulation.downloaded_bytes,
        plan_peak,
        simulation.peak_bytes if knows_memory else None,
        "measured times of layers, links and the optimizer",
    )
