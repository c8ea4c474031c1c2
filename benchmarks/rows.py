"""Training beside plain PyTorch, row by row: one call measures what a machine can, in steady state.

A row is a model, the memory that roundpipe may use of each card (`all`, or a cap of 24 GB as the process's share),
microbatches x sequences x tokens, and cards. Weights are bfloat16, with float32 copies for a fused AdamW in every way:

    plain, checkpointed    everything on one card with all of its memory, gradients accumulated over the microbatches
    off, auto, full        roundpipe with this `residency`; behind it /double: with `pin_model="double"`, and /alone:
                           with `replicas="off"`, which shows what those bring

Each row has a process of its own, and ends with an error if it does not fit. Steps are the median of three samples, all
of which are shown, with a "!" if the library changed a plan meanwhile. The file is written after each row; what
it has of other rows stays, so that several calls, and predictions made before, come together in one file, with the
machine and the date of the latest measurement.

    python benchmarks/rows.py --predict H200 --json rows.json
    python benchmarks/rows.py --json rows.json
    python benchmarks/rows.py --rows '2.0b-*,qwen3-8b-lora-*' --residency off,full --runs 3 --json rows.json
    python benchmarks/rows.py --residency off,auto,auto/double,auto/alone --json rows.json
    python benchmarks/rows.py --compiled --json rows-compiled.json
    python benchmarks/rows.py --show --json rows.json
    python benchmarks/rows.py --device cpu --small --json /tmp/rows.json

`exposed` is the share of the time in which no card computes between two steps, by the timeline; with `wait`, what
cards wait for the optimizer's thread within them. `error` is how much longer than the measured step the predicted one
is. `to 1 card` compares with the row of one card that has as many tokens for it. Below, what residency, second memory
and replicas have brought, by seconds per step, beside what `report()` predicts, where a row has both ways.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from environment import environment, report
from row_cases import PLAIN_WAYS, ROWS, Row
from row_gains import gains, way_and_item
from row_predictions import predict
from row_run import measure_row
from tabulate import tabulate

COLUMNS = (
    *("row", "way", "tokens/s", "of plain", "of checkp.", "to 1 card", "step s", "samples", "error", "ahead"),
    *("exposed", "wait", "limit", "stages", "stays GB", "up GB", "peak GB", "first s"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, predicts or shows; 1 if a row has an error."""
    options = _parser().parse_args(arguments)
    if options.here is not None:
        measure_row(next(row for row in ROWS if row.name == options.here), options)
        return 0
    for way in options.residency:
        way_and_item(way)
    patterns = options.rows.split(",")
    chosen = [row for row in ROWS if any(fnmatch(row.name, pattern) for pattern in patterns)]
    if not chosen:
        raise SystemExit(f"--rows {options.rows}: no such row; there are {', '.join(row.name for row in ROWS)}")
    document: dict[str, Any] = {"results": {"rows": {}}}
    if options.json is not None and options.json.exists():
        document = json.loads(options.json.read_text())
    if options.predict is None and not options.show:
        today = datetime.datetime.now(tz=datetime.UTC).date()
        document |= {"environment": environment(), "measured_on": today.isoformat()}
    results, failed = document["results"], False
    for row in [] if options.show else chosen:
        begun_s, before = time.monotonic(), results["rows"].get(row.name, {})
        if options.predict is not None:
            found = before | {"predicted": _predicted(row, options)}
            failed |= "error" in found["predicted"]
        elif row.cards > (here := _num_cards(options.device)):
            print(f"{row.name}: left out, there is no more than {here} of {options.device}", flush=True)
            continue
        else:
            found = {name: before[name] for name in ("predicted",) if name in before} | _measured(row, options)
            failed |= "error" in found or any("error" in one for one in found.get("ways", {}).values())
        found["process_s"] = time.monotonic() - begun_s
        results["rows"][row.name] = found
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(document, indent=1) + "\n")
        print(f"{row.name}: {_said(found)}, {found['process_s']:.0f} s in all", flush=True)
    print(table(results["rows"]))
    if found_gains := gains(results["rows"]):
        print(found_gains)
    if not options.show:
        report(None, results)
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="*", help="names or patterns, with commas between; default: all")
    parser.add_argument(
        "--residency", default=["auto"], type=lambda text: text.split(","), help="such as off,auto/double"
    )
    parser.add_argument("--ways", default=PLAIN_WAYS, type=lambda text: text.split(","), help="of plain PyTorch, or no")
    parser.add_argument("--replicas", default="auto", choices=("auto", "off"), help="of stages on several cards")
    parser.add_argument(
        "--compiled", nargs="?", const="inductor", metavar="BACKEND", help="blocks by torch.compile, in all ways"
    )
    parser.add_argument("--pin-model", default="alloc", choices=("alloc", "double", "register", "off"))
    parser.add_argument("--steps", type=int, default=3, help="samples of them, whose median counts")
    parser.add_argument("--runs", type=int, default=1, help="of each way in turns; the median counts")
    parser.add_argument(
        "--warm-up-seconds", type=float, default=20, help="after which steps are measured, once plans have settled"
    )
    parser.add_argument("--device", default="cuda", help="a kind, such as cuda or cpu")
    parser.add_argument("--row-seconds", type=float, default=240, help="after which a row is ended with an error")
    parser.add_argument("--small", action="store_true", help="small models and caps of some MB, to try the script")
    parser.add_argument("--timelines", type=Path, help="a folder for a timeline of each row and residency")
    parser.add_argument("--predict", metavar="CARD", help="only write down what is predicted for a card, such as H200")
    parser.add_argument("--host-bandwidth", type=float, default=200, help="of the host that is predicted for, in GB/s")
    parser.add_argument("--update-rate", type=float, default=115, help="that its updates reach of it, in GB/s")
    parser.add_argument(
        "--conversion-rate", type=float, help="that weights and gradients reach between dtypes; default: as updates"
    )
    parser.add_argument("--visit", type=float, default=0, help="what beginning a visit takes there, in microseconds")
    parser.add_argument("--show", action="store_true", help="only show what is in the file")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    return parser


def _num_cards(kind: str) -> int:
    """Of a kind; without setting up the devices, whose memory is the rows'."""
    return 8 if kind == "cpu" else torch.accelerator.device_count()


def _predicted(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    try:
        host, update, conversion = options.host_bandwidth, options.update_rate, options.conversion_rate
        rates = host * 1e9, update * 1e9, (conversion or update) * 1e9, options.visit / 1e6
        return predict(row.sized(options.small), options.predict, options.small, *rates)
    except Exception as error:  # the other rows go on
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def _measured(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Runs a row in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "row.json")
        command = [sys.executable, str(Path(__file__).resolve()), "--here", row.name, "--json", str(path)]
        command += ["--residency", ",".join(options.residency), "--ways", ",".join(options.ways)]
        command += ["--device", options.device, "--replicas", options.replicas, "--pin-model", options.pin_model]
        command += ["--steps", str(options.steps), "--runs", str(options.runs)]
        command += ["--warm-up-seconds", str(options.warm_up_seconds), *(["--small"] if options.small else [])]
        command += ["--compiled", options.compiled] if options.compiled else []
        command += ["--timelines", str(options.timelines.resolve())] if options.timelines else []
        ended: dict[str, Any] = {}
        try:
            done = subprocess.run(command, timeout=options.row_seconds, capture_output=True, text=True)
            if done.returncode:
                ended["error"] = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:300]
            if "Traceback" in done.stderr:
                ended["stderr"] = done.stderr[-4000:]
        except subprocess.TimeoutExpired:
            ended["error"] = f"not done after {options.row_seconds:g} s"
        return (json.loads(path.read_text()) if path.exists() else {}) | ended


def _said(found: dict[str, Any]) -> str:
    """A row in a line."""
    parts = []
    for way, one in found.get("ways", {}).items():
        rate = f"{one['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in one else one["error"]
        spent = ", ".join(f"{name} {seconds:.0f}" for name, seconds in one.get("parts_s", {}).items() if seconds > 0.5)
        parts.append(f"{way} {rate} ({one['way_s']:.0f} s{': ' if spent else ''}{spent})")
        parts += [f"while it was measured: {line}" for line in one.get("said_while_measured", ())]
    if not parts and "predicted" in found:
        one = found["predicted"]
        parts.append(f"{one['tokens_per_s']:,.0f} tokens/s predicted" if "tokens_per_s" in one else one["error"])
    return "; ".join([*parts, *([found["error"]] if "error" in found else [])])


def _samples(one: dict[str, Any]) -> str:
    """Seconds per step of each sample; with a mark if plans changed meanwhile."""
    return " ".join(f"{seconds:.3f}" for seconds in one.get("each_s", ())) + "!" * bool(one.get("said_while_measured"))


def table(rows: dict[str, Any]) -> str:
    """All rows that there is something of."""
    lines: list[list[str]] = []
    for row in ROWS:
        found = rows.get(row.name, {})
        ahead, ways = found.get("predicted", {}), found.get("ways", {})
        lines += [_line(row, way, one, rows) for way, one in ways.items()]
        if ahead and not ways:
            said = f"{ahead['tokens_per_s']:,.0f}" if "tokens_per_s" in ahead else ahead["error"][:60]
            lines.append([row.name, "predicted", *[""] * (COLUMNS.index("ahead") - 2), said])
        if "error" in found:
            lines.append([row.name, "", found["error"][:60]])
    padded = [[*line, *[""] * (len(COLUMNS) - len(line))] for line in lines]
    return tabulate(padded, COLUMNS, tablefmt="github", disable_numparse=True)


def _line(row: Row, way: str, one: dict[str, Any], rows: dict[str, Any]) -> list[str]:
    """Of one way."""
    ways, ahead = rows[row.name]["ways"], rows[row.name].get("predicted", {}).get("tokens_per_s")
    if "tokens_per_s" not in one:
        return [row.name, way, one["error"][:60]]
    speed = one["tokens_per_s"]
    single = rows.get(row.on_one_card.name, {}).get("ways", {}).get(way, {}) if row.cards > 1 else {}

    def ratio(other: dict[str, Any]) -> str:
        return f"{speed / other['tokens_per_s']:.3f}" if "tokens_per_s" in other else ""

    cells = [row.name, way, f"{speed:,.0f}", ratio(ways.get("plain", {})), ratio(ways.get("checkpointed", {}))]
    cells += [ratio(single), f"{one['seconds']:.3f}", _samples(one)]
    if way.split(",")[0] in PLAIN_WAYS:
        blank = [""] * (COLUMNS.index("peak GB") - len(cells))
        return [*cells, *blank, f"{one['peak_bytes'] / 1e9:.1f}"]
    predicted_s, stages = one.get("predicted_s"), one.get("stages", ())
    cells.append("" if predicted_s is None else f"{predicted_s / one['seconds'] - 1:+.1%}")
    cells.append("" if ahead is None else f"{ahead:,.0f}")
    cells += [f"{one[name]:.1%}" if name in one else "" for name in ("exposed", "waits_for_optimizer")]
    cells.append(one.get("limit") or "-")
    replicas = ", ".join(stage for stage in stages if " x" in stage)
    cells.append(f"{len(stages)}" + (f" ({replicas})" if replicas else ""))
    moved_bytes = one.get("moved_bytes", {}).get("weights")
    sizes = (one.get("resident_bytes"), moved_bytes, one["peak_bytes"])
    cells += ["" if num_bytes is None else f"{num_bytes / 1e9:.1f}" for num_bytes in sizes]
    return [*cells, f"{one['first_step_s']:.1f}"]


if __name__ == "__main__":
    raise SystemExit(main())
