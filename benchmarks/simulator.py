"""Step time and device memory: predicted by the simulator, and measured on CPU workers with set link speeds.

    python benchmarks/simulator.py [--json benchmarks/results/simulator.json] [--strict]

Layers sleep in forward and backward for a set time, so that several workers compute at once on any number of cores.
Their times are measured on this machine first; the simulator gets those, the sizes, the link speeds and the
optimizer's time, and nothing else of the runs. Three cases: the compute, the upload of weights, or the optimizer is
the limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from environment import report
from torch import nn

import roundpipe
from roundpipe.core.allocations import Allocations
from roundpipe.core.layers import LayerCost
from roundpipe.core.schedule import make_schedule
from roundpipe.planning.machine import HardwareProfile
from roundpipe.planning.planner import plan
from roundpipe.planning.simulator import Simulation, simulate

TARGET = 0.10
FLOATS_PER_SAMPLE = 256
NUM_WARM = 3
"""Steps before the clock starts: the optimizer is a step behind, and the rotation must fill."""


@dataclasses.dataclass(frozen=True)
class Case:
    """What limits a run."""

    weight_bytes: int
    """Of each layer."""
    link_bytes_per_s: float
    optimizer_s: float
    """What a step of the optimizer takes beside the update itself."""
    kept_bytes: int
    """Activations of each layer."""


CASES = {
    "compute": Case(1 << 20, 2e9, 0.0, 2 << 20),
    "upload": Case(4 << 20, 16e6, 0.0, 2 << 20),
    "optimizer": Case(1 << 20, 2e9, 2.0, 2 << 20),
}


class _Work(torch.autograd.Function):
    """Sleeps, and keeps some bytes for backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: torch.Tensor, layer: SleepingLayer) -> torch.Tensor:
        time.sleep(layer.forward_s)
        ctx.layer = layer
        ctx.save_for_backward(torch.empty(layer.kept_bytes, dtype=torch.uint8))
        ctx.shape = weight.shape
        return value + weight[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _ = ctx.saved_tensors
        time.sleep(ctx.layer.backward_s)
        return gradients[0], torch.ones(ctx.shape), None


class SleepingLayer(nn.Module):
    """A layer that takes a set time and memory."""

    def __init__(self, weight_bytes: int, kept_bytes: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(weight_bytes // 4))
        self.kept_bytes, self.forward_s, self.backward_s = kept_bytes, forward_s, backward_s

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = _Work.apply(value, self.weight, self)
        return made


def measure(layer: nn.Module, value: torch.Tensor, samples: int) -> LayerCost:
    """A layer's times (the median of some calls) and sizes, for one microbatch."""
    forward_s, backward_s = [], []
    weights = list(layer.parameters())
    for weight in weights:
        weight.grad = torch.zeros_like(weight)  # as from the second microbatch on
    for _ in range(samples):
        given = value.detach().requires_grad_()
        memory = Allocations([given, *weights])
        with memory:
            since = time.perf_counter()
            made = layer(given)
            forward_s.append(time.perf_counter() - since)
            kept = memory.live_bytes
            since = time.perf_counter()
            made.backward(torch.ones_like(made))
            backward_s.append(time.perf_counter() - since)
    layer.zero_grad(set_to_none=True)
    weight_bytes = sum(one.nbytes for one in weights)
    return LayerCost(
        forward_s=sorted(forward_s)[samples // 2],
        backward_s=sorted(backward_s)[samples // 2],
        num_parameters=sum(one.numel() for one in weights),
        weight_bytes=weight_bytes,
        gradient_bytes=weight_bytes,
        activation_bytes=kept,
        temporary_bytes=memory.peak_bytes - kept,
        workspace_bytes=made.nbytes,
        carry_bytes=made.nbytes,
    )


def run_case(case: Case, num_workers: int, num_microbatches: int, sizes: argparse.Namespace) -> dict[str, Any]:
    """Measures the layers, predicts, runs, compares."""
    forward_s, backward_s = sizes.milliseconds / 1000, 2 * sizes.milliseconds / 1000
    layers = [SleepingLayer(case.weight_bytes, case.kept_bytes, forward_s, backward_s) for _ in range(sizes.layers)]
    value = torch.zeros(1, FLOATS_PER_SAMPLE)
    costs = [measure(layer, value, 3) for layer in layers]
    machine = {"num_workers": num_workers, "num_microbatches": num_microbatches}
    budget_bytes = 5 * case.weight_bytes * 2 + 3 * case.kept_bytes
    chosen = plan(costs, **machine, memory_budget_bytes=budget_bytes)
    optimizer_s = case.optimizer_s * sizes.milliseconds / 20
    measured_s, step_s, peaks = train(layers, chosen, case, optimizer_s, machine, sizes.steps)
    predicted = predict(costs, chosen, case, step_s, machine)
    peak_bytes = max(peaks)
    return {
        "stages": chosen.num_stages,
        "predicted_s": round(predicted.seconds_per_step, 4),
        "measured_s": round(measured_s, 4),
        "time_error": round(predicted.seconds_per_step / measured_s - 1, 4),
        "predicted_peak_bytes": max(predicted.peak_bytes),
        "measured_peak_bytes": peak_bytes,
        "peak_error": round(max(predicted.peak_bytes) / peak_bytes - 1, 4),
        "idle": {name: round(share, 4) for name, share in dataclasses.asdict(predicted.mean_idle).items()},
        "optimizer_s": round(step_s, 4),
    }


def predict(
    costs: Sequence[LayerCost], chosen: roundpipe.ExecutePlan, case: Case, step_s: float, machine: dict[str, int]
) -> Simulation:
    """The simulator's answer; the optimizer's speed is that of its measured step."""
    per_parameter = 44
    traffic = sum(cost.num_parameters for cost in costs) * per_parameter
    profile = HardwareProfile(
        upload_bytes_per_s=case.link_bytes_per_s,
        download_bytes_per_s=case.link_bytes_per_s,
        optimizer_bytes_per_s=traffic / step_s,
        optimizer_bytes_per_parameter=per_parameter,
    )
    return simulate(make_schedule(chosen, **machine), costs, profile)


def train(
    layers: Sequence[nn.Module],
    chosen: roundpipe.ExecutePlan,
    case: Case,
    optimizer_s: float,
    machine: dict[str, int],
    num_steps: int,
) -> tuple[float, float, list[int]]:
    """Seconds per step, seconds of an update, and peak bytes per worker, of a real run."""
    link = case.link_bytes_per_s
    # A limit that is never reached: with one, memory is counted.
    device = roundpipe.Device("cpu", memory_bytes=1 << 40, upload_bytes_per_s=link, download_bytes_per_s=link)
    number = machine["num_microbatches"]
    # No random draws, so no turns at the generator that CPU workers share.
    config = roundpipe.RoundPipeRunConfig(num_microbatch=number, execute_plan=chosen, preserve_rng_state=False)
    devices = [device] * machine["num_workers"]
    with roundpipe.RoundPipe(nn.Sequential(*layers), devices=devices, model_run_config=config) as model:
        optimizer = torch.optim.SGD(model.optim_parameters(), lr=1e-3)
        update_s: list[float] = []

        def update() -> None:
            since = time.perf_counter()
            time.sleep(optimizer_s)
            optimizer.step()
            optimizer.zero_grad()
            update_s.append(time.perf_counter() - since)

        data = torch.zeros(number, FLOATS_PER_SAMPLE)
        began_s: list[float] = []
        for _ in range(NUM_WARM + num_steps):
            began_s.append(time.perf_counter())
            model.forward_backward(input_args=(data,), loss_fn=lambda outputs, label: outputs.sum())
            model.step(update)
        began_s.append(time.perf_counter())
        model.synchronize()
        peaks = model.peak_device_bytes()
        peaks_bytes = [peaks] if isinstance(peaks, int) else list(peaks)
    return (began_s[-1] - began_s[NUM_WARM]) / num_steps, sorted(update_s)[len(update_s) // 2], peaks_bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the cases and prints them; exit code 1: --strict, and an error above the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=3)
    parser.add_argument("--milliseconds", type=float, default=20.0, help="forward of a layer; its backward takes two")
    parser.add_argument("--steps", type=int, default=8, help="steps that are measured")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--strict", action="store_true", help=f"fail if an error is above {TARGET:.0%}%")
    sizes = parser.parse_args(argv)
    torch.set_num_threads(1)
    results: dict[str, Any] = {"target": TARGET, "cases": {}}
    for name, case in CASES.items():
        row = results["cases"][name] = run_case(case, sizes.workers, sizes.microbatches, sizes)
        print(
            f"{name:10} step {row['predicted_s']:.3f} s predicted, {row['measured_s']:.3f} s measured "
            f"({row['time_error']:+.1%}); peak {row['predicted_peak_bytes']:,} B predicted, "
            f"{row['measured_peak_bytes']:,} B measured ({row['peak_error']:+.1%}); target {TARGET:.0%}"
        )
    report(sizes.json, results)
    errors = [abs(row[key]) for row in results["cases"].values() for key in ("time_error", "peak_error")]
    return 1 if sizes.strict and max(errors) > TARGET else 0


if __name__ == "__main__":
    sys.exit(main())
