"""Device memory of training, predicted against measured at each visit of a stage to the device.

Thirteen models are trained for some rounds under hard caps. The first round goes by what was computed beforehand on
fakes; what it measured corrects the prediction of the later ones. Both are shown by the visit that is furthest off:

    low    by how much of the measured peak the prediction was too low
    high   by how much too high

    python benchmarks/memory.py --json benchmarks/results/memory.json --markdown benchmarks/results/memory.md
    python benchmarks/memory.py --device cpu --small

On an accelerator a cap is the process's share of the card, as the allocator holds it; a CPU worker has a ledger, and
its caps are for the small models.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import logging
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from environment import report
from memory_cases import CASES, FULL, SMALL, Case, Size
from torch import nn

import roundpipe
from roundpipe.runtime.engine import cost_model
from roundpipe.runtime.engine.visit_peaks import MeasuredVisit, VisitPeaks

TARGET_LOW, TARGET_HIGH = 0.02, 0.05
SMALL_CAPS = {"12": 3_000_000, "24": 6_000_000}
"""Bytes for the small models that stand for caps in GB."""
COLUMNS = ("model", "cap", "stages", "peak GB", "first: low", "high", "then: low", "high", "recoveries", "seconds")


class Recoveries(logging.Handler):
    """Counts steps that ran out of memory and were run again."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.number = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.number += "ran out of device memory" in record.getMessage()


@contextmanager
def noted_rounds() -> Iterator[list[list[MeasuredVisit]]]:
    """The visits of each round that is over, all of them measured, as predicted before the round."""
    rounds: list[list[MeasuredVisit]] = []
    correct, measured = VisitPeaks.correct, cost_model.MEASURED_PEAKS

    def noted(peaks: VisitPeaks) -> None:
        rounds.append(peaks.compared())
        correct(peaks)

    VisitPeaks.correct, cost_model.MEASURED_PEAKS = noted, 1_000_000  # type: ignore[method-assign]
    try:
        yield rounds
    finally:
        VisitPeaks.correct, cost_model.MEASURED_PEAKS = correct, measured  # type: ignore[method-assign]


def build(name: str, size: Size, dtype: torch.dtype) -> Case:
    """A case with random weights in a dtype, on the host; drawn at once, without each layer's own way."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _uninitialized():
            case = CASES[name](size)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for parameter in case.model.parameters():
            if parameter.ndim > 1:
                parameter.uniform_(-0.02, 0.02)
    return case


@contextmanager
def _uninitialized() -> Iterator[None]:
    """Layers leave their weights as they come."""
    kinds = (nn.Linear, nn.Embedding, nn.Conv2d)
    before = [kind.reset_parameters for kind in kinds]
    for kind in kinds:
        kind.reset_parameters = lambda self: None  # type: ignore[method-assign, assignment, union-attr]
    try:
        yield
    finally:
        for kind, method in zip(kinds, before, strict=True):
            kind.reset_parameters = method  # type: ignore[method-assign, union-attr]


def capped(device: str, cap: str, small: bool) -> roundpipe.Device:
    """A device that holds no more than a cap, which the system keeps."""
    if torch.device(device).type == "cpu":
        caps = SMALL_CAPS if small else {}
        return roundpipe.Device(device, memory_bytes=caps.get(cap, 10**12 if cap == "all" else int(float(cap) * 1e9)))
    module = torch.get_device_module(torch.device(device))
    total_bytes = module.mem_get_info(device)[1]
    share = 1.0 if cap == "all" else min(float(cap) * 1e9 / total_bytes, 1.0)
    module.set_per_process_memory_fraction(share, device)
    return roundpipe.Device(device)


def train(case: Case, device: roundpipe.Device, num_rounds: int, num_microbatches: int) -> dict[str, Any]:
    """What some rounds took, by visit."""
    config = roundpipe.RoundPipeRunConfig(num_microbatch=num_microbatches)
    recoveries = Recoveries()
    logging.getLogger("roundpipe").addHandler(recoveries)
    begun_s = time.perf_counter()
    try:
        with (
            noted_rounds() as rounds,
            roundpipe.compile(case.model, devices=[device], model_run_config=config, name="case") as pipe,
        ):
            pipe.peak_device_bytes(reset=True)  # the case before this one may have taken more
            for _ in range(num_rounds):
                pipe.forward_backward(case.args, label=case.label, loss_fn=case.loss_fn)
                pipe.synchronize()
            pipe.report()
            peak_bytes = pipe.peak_device_bytes()
    except roundpipe.DeviceMemoryError as error:
        return {"error": str(error).partition(". ")[0]}
    finally:
        logging.getLogger("roundpipe").removeHandler(recoveries)
        case.model.zero_grad()
    later = [visit for visits in rounds[1:] for visit in visits]
    return {
        "stages": [f"{visit.phase} {visit.layers.start}-{visit.layers.stop - 1}" for visit in rounds[-1]],
        "peak_bytes": peak_bytes,
        "first": off(rounds[0]),
        "then": off(later),
        "rounds": [[visit[2:] for visit in visits] for visits in rounds],
        "recoveries": recoveries.number,
        "seconds": time.perf_counter() - begun_s,
    }


def off(visits: Sequence[MeasuredVisit]) -> dict[str, float]:
    """By how much predictions are too low and too high at most, as shares of what was measured."""
    shares = [visit.missing_bytes / visit.measured_bytes for visit in visits]
    return {"low": max(0.0, *shares), "high": max(0.0, *(-share for share in shares))}


def row(name: str, cap: str, found: dict[str, Any]) -> list[str]:
    """A row of the table."""
    if "error" in found:
        return [name, cap, "-", found["error"], *[""] * (len(COLUMNS) - 4)]
    shares = [f"{100 * found[which][side]:.1f}%" for which in ("first", "then") for side in ("low", "high")]
    peak, seconds = f"{found['peak_bytes'] / 1e9:.2f}", f"{found['seconds']:.0f}"
    return [name, cap, str(len(found["stages"])), peak, *shares, str(found["recoveries"]), seconds]


def markdown(rows: Sequence[Sequence[str]], head: str) -> str:
    """The table, with what it was measured on above it."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "\n".join([head, "", *("| " + " | ".join(line) + " |" for line in lines)]) + "\n"


def card(device: str) -> str:
    """Card, driver, torch's version and the date."""
    name = "CPU workers"
    if torch.device(device).type == "cuda":
        name = torch.cuda.get_device_name(device)
        if shutil.which("nvidia-smi"):
            asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            name += ", driver " + subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split()[0]
    today = datetime.datetime.now(tz=datetime.UTC).date()
    return f"{name}, torch {torch.__version__}, {today}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains the cases under their caps; 1 if a corrected prediction misses the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--small", action="store_true", help="small models, in float32, with caps of some MB")
    parser.add_argument("--caps", default="24,12,all", help="in GB, or all of the card")
    parser.add_argument("--cases", default="", help="only cases with one of these words in their names: ViT,LoRA")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--seconds", type=float, help="begin no more cases after so long")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    words, begun_s = options.cases.split(","), time.perf_counter()
    names = [name for name in CASES if any(word in name for word in words)]
    results: dict[str, Any] = {"card": card(options.device), "cases": {}}
    rows = []
    print(*COLUMNS, sep=" | ")
    for cap in options.caps.split(","):
        for name in names:
            if options.seconds is not None and time.perf_counter() - begun_s > options.seconds:
                continue
            size, dtype = (SMALL, torch.float32) if options.small else (FULL, torch.bfloat16)
            case = build(name, size, dtype)
            device = capped(options.device, cap, options.small)
            found = train(case, device, options.rounds, options.microbatches)
            results["cases"][f"{name}, {cap}"] = found
            rows.append(row(name, cap, found))
            print(*rows[-1], sep=" | ", flush=True)
            del case
            gc.collect()
            if torch.accelerator.is_available():
                torch.accelerator.empty_cache()
    then = [found["then"] for found in results["cases"].values() if "then" in found]
    misses = sum(off["low"] > TARGET_LOW or off["high"] > TARGET_HIGH for off in then)
    results["misses"] = misses
    print(f"{len(then)} measured, {misses} further off than {TARGET_LOW:.0%} too low or {TARGET_HIGH:.0%} too high")
    if options.markdown is not None:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text(markdown(rows, results["card"]))
    report(options.json, results)
    return int(bool(misses))


if __name__ == "__main__":
    raise SystemExit(main())
