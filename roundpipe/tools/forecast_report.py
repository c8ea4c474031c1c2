"""A forecast for people, as text, and for machines, as a value for JSON.

Invariant: both say the same, and which figures they rest on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from roundpipe.reports.partition_table import partition_table
from roundpipe.reports.quantities import format_bytes, format_count, format_seconds
from roundpipe.reports.tables import summary_table
from roundpipe.tools.forecast import Forecast, HostNeed, Machine

BASIS = "FLOPs and bytes counted on fake tensors; nothing was measured"

_HOST_PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer copies": "optimizer_copies",
    "optimizer gradients": "optimizer_gradients",
    "optimizer states": "optimizer_states",
    "carried values": "carried",
}


def forecast_text(result: Forecast) -> str:
    """The partition table, what a step takes, memory, the verdict, and what it rests on."""
    training, machine = result.training, result.machine
    title = f"{result.target.name} on {machine.num_devices} x {machine.device.name}"
    rows = {"step": _step(result)}
    if result.speed is not None:
        speed, idle = result.speed, result.speed.idle
        causes = {
            "weights": idle.weights,
            "activations": idle.activations,
            "the optimizer": idle.optimizer,
            "the stage before": idle.no_work,
        }
        waits = ", ".join(f"{cause} {share:.1%}" for cause, share in causes.items() if share >= 0.0005)
        rows["devices idle"] = f"{idle.total:.1%}" + (f", waiting for {waits}" if waits else "")
        rows["least time for"] = ", ".join(
            f"{what} {format_seconds(seconds)}"
            for what, seconds in (
                ("compute", speed.compute_s),
                ("links", speed.link_s),
                ("host memory", speed.host_s),
            )
        )
        rows["moved"] = (
            f"{format_bytes(speed.uploaded_bytes)} up, {format_bytes(speed.downloaded_bytes)} down, "
            f"{format_bytes(speed.optimizer_bytes)} by the optimizer, per step"
        )
    rows["device memory"] = _device_memory(result)
    rows |= _listed("by stage", _by_stage(result))
    rows["host memory"] = (
        f"{format_bytes(result.host.total)}: {_host_parts(result.host)}; {format_bytes(result.host.pinned)} pinned"
    )
    rows["verdict"] = "fits" if result.fits else f"doesn't fit, because {'; and '.join(result.reasons)}"
    rows |= _listed("to change", result.changes)
    rows["rests on"] = BASIS
    rows["device"] = _figures(machine)
    rows["assumes"] = (
        f"{training.optimizer} in {_dtype(result)}, host memory at {_rate(machine.host_bytes_per_s)}, "
        f"recomputation by {training.recompute_grain}"
    )
    rows |= _listed("note", result.notes)
    return "\n\n".join((partition_table(result.chain, result.plan, title=title), summary_table(rows)))


def _listed(label: str, lines: Sequence[str]) -> dict[str, str]:
    """Rows of which only the first shows the label."""
    return {label if not number else " " * number: line for number, line in enumerate(lines)}


def _step(result: Forecast) -> str:
    training, tokens = result.training, result.target.tokens_per_sample
    size = _counted(training.batch, "sample")
    if tokens is not None:
        size += f" of {_counted(tokens, 'token')}"
    size += f" in {_counted(training.num_microbatches, 'microbatch', 'microbatches')}"
    if result.speed is None:
        return size
    rate, unit = result.samples_per_s(), "samples"
    if tokens is not None:
        rate, unit = rate * tokens, "tokens"
    per_s = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
    return f"{format_seconds(result.speed.seconds_per_step)}, {per_s} {unit}/s: {size}"


def _counted(number: int, one: str, several: str = "") -> str:
    """A number of things."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def _device_memory(result: Forecast) -> str:
    machine, need = result.machine, result.device
    usable = f"{format_bytes(machine.budget_bytes)} usable of {format_bytes(machine.device.memory_bytes)}"
    if need is None:
        return usable
    return (
        f"{format_bytes(need.total)}: weights {format_bytes(need.weights)}, gradients {format_bytes(need.gradients)}, "
        f"activations {format_bytes(need.activations)}; {usable}"
    )


def _stage_names(result: Forecast) -> list[str]:
    """F0, .., U, B1, .. of the plan."""
    if result.plan is None:
        return []
    backward = (f"B{index}" for index in range(1, len(result.plan.backward) + 1))
    return [*(f"F{index}" for index in range(len(result.plan.forward))), "U", *backward]


def _by_stage(result: Forecast) -> list[str]:
    """What runs of stages of one phase need: each phase's smallest and largest, as totals on a device."""
    found: dict[str, list[int]] = {}
    for name, need in zip(_stage_names(result), result.stages, strict=True):
        found.setdefault(name[0], []).append(need.total)
    spans = []
    for phase, totals in found.items():
        span = format_bytes(min(totals))
        if max(totals) > min(totals):
            span += f" to {format_bytes(max(totals))}"
        spans.append(f"{phase} {span}")
    return [", ".join(spans)] if spans else []


def _host_parts(host: HostNeed) -> str:
    sizes = {name: getattr(host, attribute) for name, attribute in _HOST_PARTS.items()}
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size)


def _figures(machine: Machine) -> str:
    device, share = machine.device, machine.efficiency
    return (
        f"{device.name} at {share.compute:.0%} of {format_count(device.flops_per_s / 1e12)} TFLOP/s, "
        f"{share.bandwidth:.0%} of {_rate(device.bytes_per_s)}, and {share.link:.0%} of a link of "
        f"{_rate(device.link_bytes_per_s)} ({device.source.partition(', http')[0]})"
    )


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:,.4g} GB/s"


def _dtype(result: Forecast) -> str:
    return str(result.training.optim_dtype).removeprefix("torch.")


def forecast_json(result: Forecast) -> dict[str, Any]:
    """The same as plain values; bytes, seconds and shares without rounding."""
    training, machine, plan, speed, need = (
        result.training,
        result.machine,
        result.plan,
        result.speed,
        result.device,
    )
    tokens = result.target.tokens_per_sample
    return {
        "model": result.target.name,
        "fits": result.fits,
        "reasons": result.reasons,
        "changes": result.changes,
        "num_devices": machine.num_devices,
        "batch": training.batch,
        "microbatches": training.num_microbatches,
        "tokens_per_sample": tokens,
        "layers": [
            {
                "name": spec.name,
                "forward_s": cost.forward_s,
                "backward_s": cost.backward_s,
                "forward_flops": cost.forward_flops,
                "backward_flops": cost.backward_flops,
                "num_parameters": cost.num_parameters,
                "weight_bytes": cost.weight_bytes,
                "gradient_bytes": cost.gradient_bytes,
                "activation_bytes": cost.activation_bytes,
                "workspace_bytes": cost.workspace_bytes,
                "carry_bytes": cost.carry_bytes,
            }
            for spec, cost in zip(result.chain.specs, result.costs, strict=True)
        ],
        "plan": None
        if plan is None
        else {
            "forward": [list(one) for one in plan.forward],
            "fused": None if plan.fused is None else list(plan.fused),
            "backward": [list(one) for one in plan.backward],
        },
        "step": None
        if speed is None
        else {
            "seconds": speed.seconds_per_step,
            "samples_per_s": result.samples_per_s(),
            "tokens_per_s": None if tokens is None else result.samples_per_s() * tokens,
            "idle": {
                "total": speed.idle.total,
                "weights": speed.idle.weights,
                "activations": speed.idle.activations,
                "optimizer": speed.idle.optimizer,
                "no_work": speed.idle.no_work,
            },
            "compute_s": speed.compute_s,
            "link_s": speed.link_s,
            "host_s": speed.host_s,
            "uploaded_bytes": speed.uploaded_bytes,
            "downloaded_bytes": speed.downloaded_bytes,
            "optimizer_bytes": speed.optimizer_bytes,
        },
        "device_memory": {
            "usable_bytes": machine.budget_bytes,
            "needed_bytes": None if need is None else need.total,
            "weights": None if need is None else need.weights,
            "gradients": None if need is None else need.gradients,
            "activations": None if need is None else need.activations,
            "stages": [
                {"name": name, "weights": one.weights, "gradients": one.gradients, "activations": one.activations}
                for name, one in zip(_stage_names(result), result.stages, strict=True)
            ],
        },
        "host_memory": {
            "needed_bytes": result.host.total,
            **{attribute: getattr(result.host, attribute) for attribute in _HOST_PARTS.values()},
            "pinned": result.host.pinned,
        },
        "basis": f"{BASIS}; {_figures(machine)}",
        "notes": result.notes,
    }
