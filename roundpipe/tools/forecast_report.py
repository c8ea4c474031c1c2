"""A forecast for people, as text, and for machines, as a value for JSON.

Invariant: both say the same, and which figures they rest on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from roundpipe.core.errors import OUT_OF_MEMORY_TEXT
from roundpipe.core.tiling import UNTILED
from roundpipe.reports.memory import DeviceMemory
from roundpipe.reports.partition_table import partition_table
from roundpipe.reports.tables import (
    counted,
    dtype_name,
    format_bytes,
    format_flops,
    format_rate,
    format_seconds,
    format_share,
    summary_table,
    tiles_in_words,
)
from roundpipe.tools.forecast import Forecast
from roundpipe.tools.problem import Machine

BASIS = "FLOPs and bytes counted on fake tensors; nothing was measured"

_CAUSES = {
    "weights": "weights",
    "activations": "activations",
    "optimizer": "the optimizer",
    "no_work": "the stage before",
    "gradients": "gradients on their way home",
}
_LIMITS = {"compute": "compute", "link": "links", "host": "host memory"}


def title_of(result: Forecast) -> str:
    """The model and its devices, in words."""
    return f"{result.layers.target.name} on {result.machine.num_devices} x {result.machine.device.name}"


def forecast_text(result: Forecast) -> str:
    """The partition table, what a step takes, memory, the verdict, and what it rests on."""
    training, machine, step = result.training, result.machine, result.simulation
    rows = {"step": step_text(result)}
    if result.tiles != UNTILED:
        rows["tiles"] = tiles_in_words(result.tiles)
    if step is not None:
        idle = step.mean_idle
        shares = {name: getattr(idle, cause) for cause, name in _CAUSES.items()}
        waits = ", ".join(f"{name} {format_share(share)}" for name, share in shares.items() if share >= 0.0005)
        rows["devices idle"] = format_share(idle.total) + (f", waiting for {waits}" if waits else "")
        least_s = result.least_s()
        rows["least time for"] = ", ".join(f"{name} {format_seconds(least_s[key])}" for key, name in _LIMITS.items())
        rows["moved"] = (
            f"{format_bytes(step.uploaded_bytes)} up, {format_bytes(step.downloaded_bytes)} down, "
            f"{format_bytes(step.optimizer_bytes)} by the optimizer, per step"
        )
    need = "" if result.device is None else f"{format_bytes(result.device.total)}: {result.device}; "
    usable = (
        f"{format_bytes(machine.budget_bytes)} usable of {format_bytes(machine.device.memory_bytes)}; the rest is for "
        "torch's context, libraries and fragmentation"
    )
    rows["device memory"] = need + usable
    host = result.host
    rows["host memory"] = f"{format_bytes(host.total)}: {host}; {format_bytes(host.pinned)} pinned"
    if result.streamed_host is not None:
        rows["lives there"] = lives_there_text(result)
        first = result.streamed_host
        rows["at first"] = f"everything is at home: the host needs {format_bytes(first.total)}: {first}"
    rows["verdict"] = verdict(result)
    rows |= _rows("to change", result.changes)
    rows["rests on"] = BASIS
    rows["device"] = _figures(machine)
    rows["assumes"] = (
        f"{training.optimizer} in {dtype_name(training.optim_dtype)}, host memory at "
        f"{format_rate(machine.host_bytes_per_s)}, recomputation by {training.recompute_grain}"
    )
    rows |= _rows("note", result.layers.notes)
    dtypes = [training.optim_dtype] if any(p.requires_grad for p in result.layers.chain.parameters()) else []
    layers = partition_table(
        result.layers.chain,
        result.plan,
        title=title_of(result),
        costs=result.costs,
        memory=result.stages,
        optim_dtypes=dtypes,
        resident_bytes=result.residency.bytes_of(result.costs),
        stays_bytes=result.residency.weight_bytes(result.costs),
    )
    return "\n\n".join((layers, summary_table(rows)))


def verdict(result: Forecast, short: bool = False) -> str:
    """Whether it fits, and what the host must have for it; ``short``: without the reason that it doesn't."""
    if result.fits and result.machine.host_memory_bytes is not None:
        return "fits"
    if result.fits:
        return f"fits if the host has {format_bytes(result.host_bytes)}"
    if short:
        return "doesn't fit"
    reasons = "; and ".join(result.reasons).replace(f"The device is{OUT_OF_MEMORY_TEXT} ", "")
    return f"doesn't fit, because {_LARGE_BYTES.sub(_rounded, reasons)}"


_LARGE_BYTES = re.compile(r"\d{1,3}(?:,\d{3}){2,}(?: bytes)?")


def _rounded(match: re.Match[str]) -> str:
    """Exact bytes of an error, as a table has them."""
    return format_bytes(int(match[0].removesuffix(" bytes").replace(",", "")))


def lives_there_text(result: Forecast) -> str:
    """Which layers' trained weights live on the device, and what they take there; for a forecast that has some."""
    residency, chain = result.residency, result.layers.chain
    num_all, layers = len(chain.specs), sorted(residency.trained)
    runs = [[layers[0], layers[0]]]
    for index in layers[1:]:
        if index > runs[-1][1] + 1:
            runs.append([index, index])
        runs[-1][1] = index
    shown = ", ".join(str(first) if first == last else f"{first} .. {last}" for first, last in runs)
    which = f"all {num_all} layers" if len(layers) == num_all else f"{len(layers)} of {num_all} layers ({shown})"
    num_bytes, optimizer_bytes, _ = map(format_bytes, residency.most)
    return f"{which}: {num_bytes} of the device, {optimizer_bytes} of it the optimizer's side, which is updated there"


def _rows(label: str, lines: Sequence[str]) -> dict[str, str]:
    """Rows of which only the first shows the label."""
    return {label if not number else " " * number: line for number, line in enumerate(lines)}


def step_text(result: Forecast) -> str:
    """What a step takes, and what it is a step of."""
    training, tokens = result.training, result.layers.target.tokens_per_sample
    size = counted(training.batch, "sample")
    if tokens is not None:
        size += f" of {counted(tokens, 'token')}"
    size += f" in {counted(training.num_microbatches, 'microbatch', 'microbatches')}"
    if result.simulation is None:
        return size
    rate, unit = result.samples_per_s(), "samples"
    if tokens is not None:
        rate, unit = rate * tokens, "tokens"
    per_s = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
    return f"{format_seconds(result.simulation.seconds_per_step)}, {per_s} {unit}/s: {size}"


def _figures(machine: Machine) -> str:
    device, share = machine.device, machine.efficiency
    return (
        f"{device.name} at {share.compute:.0%} of {format_flops(device.flops_per_s)}/s, "
        f"{share.bandwidth:.0%} of {format_rate(device.bytes_per_s)}, and {share.link:.0%} of a link of "
        f"{format_rate(device.link_bytes_per_s)} ({device.source.partition(', http')[0]})"
    )


def forecast_json(result: Forecast) -> dict[str, Any]:
    """The same as plain values; bytes, seconds and shares without rounding."""
    training, machine, plan, step = result.training, result.machine, result.plan, result.simulation
    tokens, need = result.layers.target.tokens_per_sample, result.device
    layers = []
    resident, residency = result.residency.bytes_of(result.costs), result.residency
    for index, (spec, cost) in enumerate(zip(result.layers.chain.specs, result.costs, strict=True)):
        layers.append({"name": spec.name, **cost.figures(), "resident_bytes": resident.get(index, 0)})
        del layers[-1]["temporary_bytes"]
    return {
        "model": result.layers.target.name,
        "fits": result.fits,
        "reasons": result.reasons,
        "changes": result.changes,
        "num_devices": machine.num_devices,
        "batch": training.batch,
        "microbatches": training.num_microbatches,
        "tokens_per_sample": tokens,
        "layers": layers,
        "plan": None if plan is None else asdict(plan),
        "tiles": asdict(result.tiles),
        "step": None
        if step is None
        else {
            "seconds": step.seconds_per_step,
            "samples_per_s": result.samples_per_s(),
            "tokens_per_s": None if tokens is None else result.samples_per_s() * tokens,
            "idle": {"total": step.mean_idle.total, **asdict(step.mean_idle)},
            **{f"{limit}_s": seconds for limit, seconds in result.least_s().items()},
            "uploaded_bytes": step.uploaded_bytes,
            "downloaded_bytes": step.downloaded_bytes,
            "optimizer_bytes": step.optimizer_bytes,
        },
        "device_memory": {
            "usable_bytes": machine.budget_bytes,
            "needed_bytes": None if need is None else need.total,
            **(dict.fromkeys(DeviceMemory._fields) if need is None else need._asdict()),
            "stages": [{"name": name, **memory._asdict()} for name, memory in result.stages.items()],
        },
        "residency": {
            "trained_layers": sorted(residency.trained),
            "bytes": residency.num_bytes,
            "optimizer_bytes": residency.most.optimizer_bytes,
        },
        "host_memory": {
            "needed_bytes": result.host_bytes,
            "steady_bytes": result.host.total,
            **asdict(result.host),
            "pinned": result.host.pinned,
        },
        "basis": f"{BASIS}; {_figures(machine)}",
        "notes": list(result.layers.notes),
    }
