"""What of the exchange between model and optimizer shows: the share of a step in which no worker computes.

Trains with asynchronous updates, once per way to keep weights, in turns:

    alloc     weights are converted into the model when the next step is made
    double    they are converted behind the update, into second memory, and change places when the step is made

A row is the run with the median time per step: from timelines, the time between rounds in which no worker computes
(`exposed`), and of it what the workers wait for the optimizer's thread (`optimizer`); that thread's seconds per step.

    python benchmarks/handover.py --json benchmarks/results/handover.json
    python benchmarks/handover.py --devices cuda:0 --width 2048 --blocks 24 --tokens 2048 --microbatches 8 --threads 0
"""

from __future__ import annotations

import argparse
from bisect import bisect_right
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from environment import report
from torch import nn

import roundpipe
from roundpipe.reports.timeline import OPTIMIZER, Span, Timeline

WAYS = ("alloc", "double")


class Block(nn.Module):
    """A residual block of 8 x width^2 weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


@dataclass(frozen=True)
class Run:
    """Seconds per step, and where they go."""

    step_s: float
    exposed: float
    """Share of the time in which no worker computes, between the rounds."""
    optimizer: float
    """Share of the workers' time in which they wait for the optimizer's thread to give weights back."""
    update_s: float
    hand_over_s: float
    """Of the optimizer's thread per step, as is `update_s`."""
    predicted_s: float | None


def measure(way: str, options: argparse.Namespace) -> Run:
    """Trains a model and looks at its last steps."""
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    names = options.devices.split(",")
    speed = options.link * 1e9
    limits = [{"upload_bytes_per_s": speed, "download_bytes_per_s": speed} if n == "cpu" else {} for n in names]
    devices = [roundpipe.Device(name, **given) for name, given in zip(names, limits, strict=True)]
    net = nn.Sequential(*(Block(options.width) for _ in range(options.blocks))).to(dtype)
    whole = roundpipe.ExecutePlan([], (0, options.blocks), []) if options.one_stage else None
    config = roundpipe.RoundPipeRunConfig(
        num_microbatch=options.microbatches,
        execute_plan=whole,
        preserve_rng_state=False,  # blocks draw nothing; a module wrapped by hand may, and calls wait for its last run
    )
    inputs = torch.randn(options.microbatches, options.tokens, options.width).to(dtype)
    with roundpipe.RoundPipe(net, torch.float32, "net", config, way, devices=devices) as model:
        optimizer = torch.optim.AdamW(model.optim_parameters(), lr=1e-4, fused=True)

        def train(num_steps: int) -> None:
            for _ in range(num_steps):
                model.forward_backward((inputs,), loss_fn=lambda output, _: output.float().square().mean())
                model.step(lambda: (optimizer.step(), optimizer.zero_grad()))

        train(options.warm_up)
        model.report()
        with model.record_timeline() as timeline:
            train(options.steps)
        predicted = model.report().predicted
    return read(timeline, len(names), None if predicted is None else predicted.round_s)


def read(timeline: Timeline, num_workers: int, predicted_s: float | None) -> Run:
    """What a timeline of some steps shows; the first is left out.

    Seconds are those between the beginnings of rounds, so that there are as many updates and exchanges as steps.
    """
    rounds = rounds_of(timeline)[1:]
    starts, ends = zip(*rounds, strict=True)
    num_steps, total_s = len(rounds) - 1, starts[-1] - starts[0]
    exposed_s = sum(max(start - end, 0.0) for start, end in zip(starts[1:], ends, strict=False))
    exposed_s += sum(_idle_within(timeline, start, end) for start, end in rounds[:-1])
    waits_s = 0.0
    optimizer_s: defaultdict[str, float] = defaultdict(float)
    for span in timeline.spans:
        seconds = max(min(span.end_s, starts[-1]) - max(span.start_s, starts[0]), 0.0)
        if span.device == OPTIMIZER:
            optimizer_s[span.lane] += seconds / num_steps
        elif span.args.get("cause") == "optimizer":
            waits_s += seconds
    return Run(
        step_s=total_s / num_steps,
        exposed=exposed_s / total_s,
        optimizer=waits_s / total_s / num_workers,
        update_s=optimizer_s["update"],
        hand_over_s=optimizer_s["hand-over"],
        predicted_s=predicted_s,
    )


def _idle_within(timeline: Timeline, start_s: float, end_s: float) -> float:
    """Seconds of a round in which no device computes and one waits for the optimizer, or for weights behind it."""
    waits = [span for span in timeline.spans if span.args.get("cause") in ("optimizer", "weights")]
    computed = sorted((span.start_s, span.end_s) for span in timeline.spans if span.lane == "compute")
    idle_s, since_s = 0.0, start_s
    for begin_s, stop_s in (*((a, b) for a, b in computed if b > start_s and a < end_s), (end_s, end_s)):
        pieces = [(max(wait.start_s, since_s), min(wait.end_s, begin_s)) for wait in waits]
        for first_s, last_s in sorted(piece for piece in pieces if piece[0] < piece[1]):
            idle_s += max(last_s - max(first_s, since_s), 0.0)
            since_s = max(since_s, last_s)
        since_s = max(since_s, stop_s)
    return idle_s


def rounds_of(timeline: Timeline) -> list[tuple[float, float]]:
    """When each round's first computation began and its last one ended, for those that began while it was recorded.

    Jobs count over rounds, and the first job of one runs the first layer forward with the first microbatch. Plans may
    be others from round to round.
    """
    spans = [span for span in timeline.spans if span.lane == "compute"]
    first_jobs = sorted({span.args["job"] for span in spans if _begins_round(span)})
    rounds: defaultdict[int, list[Span]] = defaultdict(list)
    for span in spans:
        rounds[bisect_right(first_jobs, span.args["job"])].append(span)
    rounds.pop(0, None)  # it was under way before
    return [
        (min(span.start_s for span in each), max(span.end_s for span in each)) for _, each in sorted(rounds.items())
    ]


def _begins_round(span: Span) -> bool:
    args = span.args
    return args["layers"][0] == 0 and args["microbatch"] == 0 and args["part"] in ("forward", "fused")


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and writes; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cpu", help="such as cpu,cpu or cuda:0")
    parser.add_argument("--link", type=float, default=2.0, help="GB/s of each CPU worker's link, in each direction")
    parser.add_argument("--dtype", default="bfloat16", help="of the weights; the optimizer's copies are float32")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="per microbatch")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--planned", dest="one_stage", action="store_false", help="stages as planned, not all in one")
    parser.add_argument("--steps", type=int, default=12, help="that are recorded")
    parser.add_argument("--warm-up", type=int, default=6, help="steps before those")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--threads", type=int, default=1, help="per operator; 0: as torch chooses")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    ways = options.ways.split(",")
    runs = [[measure(way, options) for way in ways] for _ in range(options.runs)]
    medians = {
        way: sorted(side, key=lambda run: run.step_s)[len(side) // 2]
        for way, side in zip(ways, zip(*runs, strict=True), strict=True)
    }
    for way, run in medians.items():
        print(
            f"{way:7} {run.step_s * 1e3:8.1f} ms a step, {run.exposed:6.1%} exposed, {run.optimizer:6.1%} wait for the "
            f"optimizer; update {run.update_s * 1e3:.1f} ms, hand-over {run.hand_over_s * 1e3:.1f} ms"
            + ("" if run.predicted_s is None else f"; predicted {run.predicted_s * 1e3:.1f} ms a step")
        )
    report(options.json, {way: asdict(run) for way, run in medians.items()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
