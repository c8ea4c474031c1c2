"""What more hosts bring over a network: data parallel, with and without a sharded optimizer, and torch's schedules.

Every host has the devices and the host memory of the forecast, and all ways train on the same samples per step: the
batch of each host, times their number.

    one host             rotation, with the microbatches of all
    data parallel        rotation on each host; gradients are averaged in the copies' dtype
    sharded              gradients go to the rank that has the part, new weights come back, both in the model's dtype
    GPipe, 1F1B, ...     torch's schedules over all devices, each with a part of the model; in GPipe and 1F1B a device
                         computes nothing while it receives

With asynchronous steps the network works beside the round. But what it brings is there before the update, and the next
exchange waits for that, so no step is shorter than the network and the update together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from roundpipe.planning.machine import HardwareProfile
from roundpipe.planning.simulator import Simulation
from roundpipe.planning.stage_costs import num_trained
from roundpipe.planning.static_schedules import HostNetwork
from roundpipe.reports.memory import HostMemory
from roundpipe.reports.tables import format_bytes, format_rate, format_seconds, table
from roundpipe.tools.comparison import ComparedSchedule, compare_static
from roundpipe.tools.forecast import Forecast, forecast_at


@dataclass(frozen=True, slots=True)
class Network:
    """Hosts, one rank each, and what a host sends and receives at once per second."""

    num_hosts: int
    bytes_per_s: float

    def averaging_bytes(self, gradient_bytes: int) -> float:
        """What a host sends so that all have the mean of whole gradients."""
        return 2 * gradient_bytes * (self.num_hosts - 1) / self.num_hosts

    def sharding_bytes(self, gradient_bytes: int, weight_bytes: int) -> float:
        """What a host sends so that each has its part of the mean, and all have the new weights."""
        return (gradient_bytes + weight_bytes) * (self.num_hosts - 1) / self.num_hosts

    def step_s(self, round_s: float, update_s: float, sent_bytes: float) -> float:
        """An asynchronous step, from what a round and an update take on each host."""
        return max(round_s, sent_bytes / self.bytes_per_s + update_s)


@dataclass(frozen=True, slots=True)
class ScaleOut:
    """One way to train on the samples of all hosts; figures are None where it can't be."""

    name: str
    seconds_per_step: float | None = None
    network_s: float = 0.0
    """What the network adds to a step."""
    sent_bytes: float = 0.0
    """By each host, per step."""
    host_bytes: int | None = None
    """Memory of each host; None: little beside the devices'."""
    fits: bool = False
    remark: str = ""


def ways_of(result: Forecast, network: Network) -> list[ScaleOut]:
    """All ways, from the forecast for one host."""
    of_each = result
    if result.residency.trained:  # which is of one process alone
        of_each = forecast_at(result.layers, result.machine, result.training, is_alone=False)
    return [_one_host(result, network), *_data_parallel(of_each, network), *_static_schedules(of_each, network)]


def fastest(ways: Sequence[ScaleOut]) -> ScaleOut | None:
    """Of those that fit."""
    fitting = [way for way in ways if way.fits and way.seconds_per_step is not None]
    return min(fitting, key=lambda way: way.seconds_per_step or 0.0, default=None)


def _one_host(result: Forecast, network: Network) -> ScaleOut:
    number = network.num_hosts
    training = replace(
        result.training,
        batch=result.training.batch * number,
        num_microbatches=result.training.num_microbatches * number,
    )
    found = forecast_at(result.layers, result.machine, training)
    if found.simulation is None:
        return ScaleOut("one host", remark="no plan fits on the devices")
    return ScaleOut("one host", found.simulation.seconds_per_step, 0.0, 0.0, found.host_bytes, found.fits)


def _data_parallel(result: Forecast, network: Network) -> list[ScaleOut]:
    if result.plan is None or result.simulation is None:
        return [ScaleOut(name, remark="no plan fits on the devices") for name in ("data parallel", "sharded optimizer")]
    number, host, setting = network.num_hosts, result.host, result.setting
    profile = setting.profile
    part = replace(
        profile,
        optimizer_bytes_per_parameter=profile.optimizer_bytes_per_parameter / number,
        hand_over_bytes_per_parameter=profile.hand_over_bytes_per_parameter / number,
        gradients_bytes_per_parameter=profile.gradients_bytes_per_parameter / number,
    )
    shared = replace(setting, profile=part).simulate(result.plan)
    optimizer = ("optimizer_copies", "optimizer_gradients", "optimizer_states")
    sharded_host = replace(host, **{name: getattr(host, name) // number for name in optimizer})
    averaging = network.averaging_bytes(host.optimizer_gradients)
    sharding = network.sharding_bytes(host.gradients, host.gradients)  # trained weights are as large
    return [
        _ranks("data parallel", result, network, result.simulation, profile, averaging, host),
        _ranks("sharded optimizer", result, network, shared, part, sharding, sharded_host),
    ]


def _ranks(
    name: str,
    result: Forecast,
    network: Network,
    step: Simulation,
    profile: HardwareProfile,
    sent_bytes: float,
    host: HostMemory,
) -> ScaleOut:
    update_s = profile.optimizer_s(sum(map(num_trained, result.residency.streamed(result.costs))))
    seconds = network.step_s(step.seconds_per_step, update_s, sent_bytes)
    added = seconds - step.seconds_per_step
    return ScaleOut(name, seconds, added, sent_bytes, host.total, _fits(result, host))


def _fits(result: Forecast, host: HostMemory) -> bool:
    return result.fits_devices and host.fits(result.machine.host_memory_bytes)


def _static_schedules(result: Forecast, network: Network) -> list[ScaleOut]:
    setting, number = result.setting, network.num_hosts
    over_all = replace(
        setting,
        num_workers=setting.num_workers * number,
        num_microbatches=setting.num_microbatches * number,
    )
    connected = HostNetwork(network.bytes_per_s, devices_per_host=setting.num_workers)
    free, cut = compare_static(over_all, replace(connected, bytes_per_s=inf)), compare_static(over_all, connected)
    return [_static(one, other) for one, other in zip(free, cut, strict=True)]


def _static(free: ComparedSchedule, cut: ComparedSchedule) -> ScaleOut:
    if cut.seconds_per_step is None or free.seconds_per_step is None or cut.peak_bytes is None:
        return ScaleOut(cut.name, remark=cut.remark)
    remark = cut.remark if cut.fits else f"a device needs {format_bytes(cut.peak_bytes)}"
    added = cut.seconds_per_step - free.seconds_per_step
    return ScaleOut(cut.name, cut.seconds_per_step, added, fits=cut.fits, remark=remark)


def hosts_text(ways: Sequence[ScaleOut], network: Network, per_step: int, unit: str) -> str:
    """The ways as a table; ``per_step``: how many of a unit all hosts train on in a step."""
    cells = []
    for way in ways:
        figures = ["-"] * 5
        if way.seconds_per_step is not None:
            figures = [
                format_seconds(way.seconds_per_step),
                f"{per_step / way.seconds_per_step:,.0f}",
                format_seconds(way.network_s),
                format_bytes(int(way.sent_bytes)) if way.sent_bytes else "-",
                "-" if way.host_bytes is None else format_bytes(way.host_bytes),
            ]
        cells.append([way.name, *figures, "yes" if way.fits else "no", way.remark])
    headers = ["way", "step", f"{unit}/s", "network adds", "sent by a host", "host memory", "fits", "with"]
    best = fastest(ways)
    verdict = "none fits" if best is None else f"the fastest that fits: {best.name}"
    title = f"{network.num_hosts} hosts, each with this batch, over {format_rate(network.bytes_per_s)}: {verdict}"
    return f"{title}\n\n{table(headers, cells)}"


def hosts_json(ways: Sequence[ScaleOut], network: Network, per_step: int) -> dict[str, Any]:
    """The same as plain values."""
    best = fastest(ways)
    rows = [
        {
            "name": way.name,
            "seconds": way.seconds_per_step,
            "per_s": None if way.seconds_per_step is None else per_step / way.seconds_per_step,
            "network_s": way.network_s,
            "sent_bytes": way.sent_bytes,
            "host_bytes": way.host_bytes,
            "fits": way.fits,
            "remark": way.remark,
        }
        for way in ways
    ]
    return {
        "num_hosts": network.num_hosts,
        "network_bytes_per_s": network.bytes_per_s,
        "ways": rows,
        "fastest": None if best is None else best.name,
    }
