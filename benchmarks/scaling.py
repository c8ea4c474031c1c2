"""The rotation on 1, 2, 4 and 8 cards, and cards that share stages, beside what was predicted before.

Qwen3's shapes with random weights: 1.7 B and 8 B whole, 32 B with LoRA, each with a cap of 24 GB and with all of each
card. A step is 16 microbatches of 2,048 tokens a sequence, whatever the number of cards. First write the predictions
of `python -m roundpipe plan`, which needs no card; then measure; then print both:

    python benchmarks/scaling.py predict --card H100 --json benchmarks/results/scaling_h100.json
    python benchmarks/scaling.py measure --json benchmarks/results/scaling_h100.json --minutes 10
    python benchmarks/scaling.py show --json benchmarks/results/scaling_h100.json
    python benchmarks/scaling.py measure --json /tmp/dry.json --device cpu --numbers 1,2 --models tiny,tiny-lora

What is in the file already is not done again, so that several short runs make a whole one. Each row has a process of
its own, and ends with an error in the file if it does not fit. `benchmarks/sharded.py` trains the same by FSDP2.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from decoders import DECODERS, fill
from environment import environment
from memory import capped
from tabulate import tabulate

import roundpipe
from roundpipe.tools.command_line import main as command_line

MICROBATCHES, LENGTH = 16, 2048
SAMPLES = {"1.7b": 4, "8b": 2, "8b-lora": 2, "32b-lora": 1, "tiny": 1, "tiny-lora": 1}
"""Sequences of a microbatch."""
MODELS = "1.7b,8b,32b-lora"
WAYS = ("rotation", "fsdp2")
NUM_WARM, NUM_STEPS = 6, 3
"""The optimizer is a step behind, plans are made anew from measured times, and each new one takes memory first."""
SECONDS_PER_ROW = 150
"""More than a row takes; a run does not begin one that it could not end."""
COLUMNS = ("model", "cap", "cards", "predicted", "tokens/s", "to 1 card", "error", "idle by cause", "GB up", "peak GB")


@dataclass(frozen=True)
class Row:
    """One model under one cap on a number of cards."""

    model: str
    cap: str
    """In GB, or all."""
    number: int
    replicas: str = "off"
    """As in `RoundPipeRunConfig`: auto, if cards may share a stage."""

    @property
    def key(self) -> str:
        return f"{self.model} {self.cap} x{self.number}" + (" shared" if self.replicas == "auto" else "")


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """The most cards first, then one: a run that is cut short has what matters most."""
    numbers = sorted((int(number) for number in options.numbers.split(",")), reverse=True)
    for number in dict.fromkeys([numbers[0], numbers[-1], *numbers]):
        for cap in options.caps.split(","):
            for model, replicas in itertools.product(options.models.split(","), options.replicas.split(",")):
                if replicas == "off" or number > 1:
                    yield Row(model, cap, number, replicas)


def sizes_of(model: str) -> tuple[int, int]:
    """Sequences in a step, and their tokens."""
    return MICROBATCHES * SAMPLES[model], 64 if model.startswith("tiny") else LENGTH


def predict(row: Row, card: str, host_bandwidth: str, folder: Path) -> dict[str, Any]:
    """What `python -m roundpipe plan` says of a row."""
    decoder, (batch, length) = DECODERS[row.model], sizes_of(row.model)
    decoder.config().save_pretrained(folder)
    arguments = ["plan", str(folder), "--device-profile", card, "--devices", row.number, "--microbatches", MICROBATCHES]
    arguments += ["--batch", batch, "--seq", length, "--host-bandwidth", host_bandwidth, "--json"]
    arguments += ["--replicas", row.replicas]
    arguments += [] if row.cap == "all" else ["--memory", f"{row.cap}GB"]
    arguments += [] if decoder.lora_rank is None else ["--lora", decoder.lora_rank]
    with contextlib.redirect_stdout(io.StringIO()) as text:
        command_line([str(argument) for argument in arguments])
    found = json.loads(text.getvalue())
    if not found["fits"]:
        return {"error": "; ".join(found["reasons"])}
    names = ("seconds", "tokens_per_s", "idle", "uploaded_bytes", "downloaded_bytes")
    return {name: found["step"][name] for name in names} | {
        "peak_bytes": found["device_memory"]["needed_bytes"],
        "host_bytes": found["host_memory"]["needed_bytes"],
        "plan": found["plan"],
    }


def train(row: Row, device: str, timeline: Path | None) -> dict[str, Any]:
    """Trains a row for some steps, in a process of its own."""
    torch.manual_seed(0)
    model = DECODERS[row.model].build().to_empty(device="cpu")
    fill(model)
    batch, length = sizes_of(row.model)
    ids = torch.randint(0, 1000, (batch, length))
    kind = torch.device(device).type
    names = [f"{kind}:{index}" for index in range(row.number)] if kind != "cpu" else ["cpu"] * row.number
    devices = [capped(name, row.cap, small=False) for name in names]
    config = roundpipe.RoundPipeRunConfig(num_microbatch=MICROBATCHES, replicas=row.replicas)
    begun_s = time.perf_counter()
    with roundpipe.compile(model, devices=devices, model_run_config=config, name=row.key) as pipe:
        optimizer = torch.optim.AdamW(pipe.optim_parameters(), lr=1e-5, fused=True)

        def steps(number: int) -> float:
            since_s = time.perf_counter()
            for _ in range(number):
                pipe.forward_backward(
                    input_kwargs={"input_ids": ids, "labels": ids},
                    loss_fn=lambda outputs, _: outputs.loss,
                    loss_reduction="mean",
                )
                pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()))
            pipe.synchronize()
            return time.perf_counter() - since_s

        steps(1)
        first_s = time.perf_counter() - begun_s
        steps(NUM_WARM - 1)
        pipe.report()
        pipe.peak_device_bytes(reset=True)
        seconds = steps(NUM_STEPS) / NUM_STEPS
        report = pipe.report()
        if timeline is not None:
            with pipe.record_timeline() as recorded:
                steps(2)
            timeline.parent.mkdir(parents=True, exist_ok=True)
            recorded.save(timeline)
        causes = {cause for worker in report.workers for cause in worker.idle}
        return {
            "seconds": seconds,
            "tokens_per_s": ids.numel() / seconds,
            "first_step_s": first_s,
            "predicted_s": None if report.predicted is None else report.predicted.round_s,
            "idle": {cause: sum(one.idle[cause] for one in report.workers) / row.number for cause in sorted(causes)},
            "moved_bytes": {
                lane: sum(one.moved_bytes[lane] for one in report.workers) / NUM_STEPS
                for lane in report.workers[0].moved_bytes
            },
            "peak_bytes": max(one.peak_bytes for one in report.workers),
            "stages": ", ".join(report.stages),
            "limit": None if report.limit is None else str(report.limit),
        }


def measure(options: argparse.Namespace, document: dict[str, Any]) -> None:
    """Runs what is not in the file yet, while there is time."""
    until_s = time.monotonic() + 60 * options.minutes
    here = torch.accelerator.device_count() if options.device != "cpu" else max(os.cpu_count() or 1, 8)
    for row in rows(options):
        for way in options.ways.split(","):
            measured = document.setdefault(way, {})
            left_s = until_s - time.monotonic()
            if row.key in measured or row.number > here:
                continue
            if way == "fsdp2" and (row.cap != "all" or row.replicas != "off"):
                continue
            if left_s < SECONDS_PER_ROW and len(measured):
                print(f"{row.key}: no time is left for it; run the same command again")
                continue
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "row.json")
                command = _command(row, way, path, options)
                begun_s = time.monotonic()
                try:
                    done = subprocess.run(command, timeout=max(left_s, SECONDS_PER_ROW), capture_output=True, text=True)
                    said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
                except subprocess.TimeoutExpired as error:
                    said = f"not done after {error.timeout:.0f} s"
                measured[row.key] = json.loads(path.read_text()) if path.exists() else {"error": said[:500]}
                measured[row.key]["process_s"] = time.monotonic() - begun_s
            document["environment"] = environment()
            document["measured_on"] = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
            options.json.write_text(json.dumps(document, indent=2) + "\n")
            print(
                way, row.key, {k: v for k, v in measured[row.key].items() if k in ("tokens_per_s", "error")}, flush=True
            )


def _command(row: Row, way: str, path: Path, options: argparse.Namespace) -> list[str]:
    here = Path(__file__).resolve()
    common = [row.model, "--number", str(row.number), "--device", options.device, "--json", str(path)]
    if way == "rotation":
        name = row.key.replace(" ", "_") + ".json"
        drawn = ["--timeline", str(options.timelines / name)] if options.timelines else []
        return [sys.executable, str(here), "row", *common, "--cap", row.cap, "--replicas", row.replicas, *drawn]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(row.number)]
    return [sys.executable, *launcher, str(here.with_name("sharded.py")), *common]


def show(document: dict[str, Any]) -> str:
    """All rows, predicted and measured, as a table."""
    predicted, measured, sharded = (document.get(name, {}) for name in ("predicted", *WAYS))
    table = []
    for key in {**predicted, **measured}:
        model, cap, cards, *shared = key.split()
        before, found, peer = predicted.get(key, {}), measured.get(key, {}), sharded.get(key, {})
        one = measured.get(f"{model} {cap} x1", {}).get("tokens_per_s")
        speed, said = found.get("tokens_per_s"), before.get("tokens_per_s")
        latest = found or before
        idle = {cause: share for cause, share in latest.get("idle", {}).items() if cause != "total" and share >= 0.005}
        up = latest.get("uploaded_bytes") or sum(latest.get("moved_bytes", {}).get(n, 0) for n in ("upload", "weights"))
        table.append(
            [
                *(model, cap, " ".join([cards[1:], *shared]), said and f"{said:,.0f}"),
                speed and f"{speed:,.0f}" or found.get("error", "")[:60],
                speed and one and f"{speed / one:.2f}",
                speed and said and f"{said / speed - 1:+.1%}",
                ", ".join(f"{cause} {share:.1%}" for cause, share in sorted(idle.items(), key=lambda item: -item[1])),
                f"{up / 1e9:.1f}",
                f"{latest.get('peak_bytes', 0) / 1e9:.1f}",
                *(
                    [f"{peer['tokens_per_s']:,.0f}" if "tokens_per_s" in peer else peer.get("error", "")[:40]]
                    if sharded
                    else []
                ),
            ]
        )
    return tabulate(table, [*COLUMNS, *(["FSDP2"] if sharded else [])], tablefmt="github", disable_numparse=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Predicts, measures or shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("predict", "measure", "show", "row"):
        command = commands.add_parser(name)
        command.add_argument("--json", type=Path, required=True)
        command.add_argument("--device", default="cuda")
        if name == "row":
            command.add_argument("model", choices=DECODERS)
            command.add_argument("--cap", default="all")
            command.add_argument("--number", type=int, default=1)
            command.add_argument("--replicas", default="off")
            command.add_argument("--timeline", type=Path)
            continue
        command.add_argument("--card", default="H100", help="a profile that plan knows")
        command.add_argument("--host-bandwidth", default="400GB/s", help="sustained, of the host that is predicted for")
        command.add_argument("--numbers", default="1,2,4,8", help="of cards")
        command.add_argument("--models", default=MODELS)
        command.add_argument("--caps", default="all,24", help="GB of each card, or all")
        command.add_argument("--replicas", default="off,auto", help="auto: cards may share a stage")
        command.add_argument("--ways", default=",".join(WAYS))
        command.add_argument("--minutes", type=float, default=10, help="that the run may take")
        command.add_argument("--timelines", type=Path, help="a folder for one timeline of each row")
    options = parser.parse_args(arguments)
    if options.command == "row":
        found = train(
            Row(options.model, options.cap, options.number, options.replicas), options.device, options.timeline
        )
        options.json.write_text(json.dumps(found))
        return 0
    document = json.loads(options.json.read_text()) if options.json.exists() else {}
    if options.command == "predict":
        document |= {"card": options.card, "host_bandwidth": options.host_bandwidth}
        for row in rows(options):
            if row.key in document.get("predicted", {}):
                continue
            with tempfile.TemporaryDirectory() as folder:
                document.setdefault("predicted", {})[row.key] = predict(
                    row, options.card, options.host_bandwidth, Path(folder)
                )
            print(row.key, document["predicted"][row.key].get("tokens_per_s", "does not fit"), flush=True)
            options.json.write_text(json.dumps(document, indent=2) + "\n")
    elif options.command == "measure":
        measure(options, document)
    print(show(document))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
