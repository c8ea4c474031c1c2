"""Measures one row of `benchmarks/rows.py` in this process: plain PyTorch and roundpipe on the same model and batch.

Times are of steps that follow one another without a wait in between: from the loss of one to the loss of a later one.
There are as many samples of them as `--steps` says, and the median counts. Ours begin once plans have settled: a plan
that changes while samples are taken is written down, with what the library said.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import math
import os
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from handover import read
from memory import capped, card
from row_cases import PLAIN_WAYS, Own, Row, built, train, vocabulary_of
from row_gains import way_and_item

import roundpipe

LEAST_S = 2.0
"""What all samples together take at least: each has as many steps as that needs."""
MOST_IN_SAMPLE = 8
"""Steps."""
QUIET, QUIETER = 4, 8
"""Warm steps since the library last said that it changed a plan, if their times are alike, and if they are not."""
ALIKE = 0.05
"""Share by which the latest three may differ."""
WARM_PLAIN, WARM_PLAIN_S = 3, 2.0
"""Steps that come first, and seconds after which no more of them do."""
NUM_RECORDED = 4
"""Steps of a timeline; the first of them is left out."""
TRACEBACK_LINES = 40
"""The last ones of what is written down of an error."""


class Log(logging.Handler):
    """Keeps what the library says: what it chose, and what the parts of the first step took."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def measure_row(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Every way of a row, several times in turns; written to the file after each."""
    if options.small:
        torch.set_num_threads(1)
    device = device_of(options.device, 0)
    found: dict[str, Any] = {
        "card": card(device),
        "tokens": row.sized(options.small).tokens,
        "compiled": options.compiled,
        "ways": {},
    }
    ways = [*(way for way in row.plain if way in options.ways), *options.residency]
    runs: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for _ in range(options.runs):
        for way in ways:
            begun_s, before = time.perf_counter(), list(runs[way])

            def keep(run: dict[str, Any], way: str = way, begun_s: float = begun_s, before: Any = before) -> None:
                runs[way] = [*before, run | {"way_s": time.perf_counter() - begun_s}]
                found["ways"] = {each: _median(of_way) for each, of_way in runs.items()}
                _write(options.json, found)

            keep(_attempt(row, way, options, keep))
            _free()
    return found


def _attempt(row: Row, way: str, options: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """A way's figures, or its error and where it was raised; those of ours are kept before all is taken down."""
    try:
        if way in PLAIN_WAYS:
            return measure_plain(row.sized(options.small), way, options)
        return measure_ours(row.sized(options.small), way, options, keep)
    except Exception as error:  # whatever it is, the other ways go on
        said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return {"error": said[:300], "traceback": traceback.format_exc().splitlines()[-TRACEBACK_LINES:]}


def _median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run with the median time, and all times."""
    done = sorted((run for run in runs if "seconds" in run), key=lambda run: run["seconds"])
    if not done:
        return runs[-1]
    return done[len(done) // 2] | {"all_seconds": [run.get("seconds") for run in runs]}


def _write(path: Path, found: dict[str, Any]) -> None:
    """At once, so that what is measured stays if this process is ended."""
    path.with_suffix(".part").write_text(json.dumps(found))
    os.replace(path.with_suffix(".part"), path)


def _free() -> None:
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def device_of(kind: str, index: int) -> str:
    """The name of one of the cards; CPU workers have no number."""
    return kind if kind == "cpu" else f"{kind}:{index}"


def ids_of(row: Row, options: argparse.Namespace) -> torch.Tensor:
    """The tokens of a step, the same for every way."""
    generator = torch.Generator().manual_seed(1)
    shape = row.num_microbatches * row.samples, row.length
    return torch.randint(vocabulary_of(row.source(options.small)), shape, generator=generator)


def in_sample(step_s: float, options: argparse.Namespace) -> int:
    """How many steps a sample has if one takes so long."""
    least_s = 0.0 if options.small else LEAST_S
    return max(1, min(MOST_IN_SAMPLE, math.ceil(least_s / max(options.steps * step_s, 1e-9))))


def measure_plain(row: Row, way: str, options: argparse.Namespace) -> dict[str, Any]:
    """A plain loop on the first card, with all of its memory."""
    name = device_of(options.device, 0)
    capped(name, "all", options.small)
    device, ids = torch.device(name), ids_of(row, options).to(name)
    own = Own(row.source(options.small), device, row.num_microbatches, way, options.compiled)

    def wait() -> float:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter()

    def steps(number: int) -> tuple[float, torch.Tensor]:
        begun_s = wait()
        losses = [own.step(ids) for _ in range(number)]
        return (wait() - begun_s) / number, losses[-1]

    begun_s, step_s = wait(), 0.0
    for _ in range(WARM_PLAIN):
        step_s, _ = steps(1)
        if time.perf_counter() - begun_s > WARM_PLAIN_S:
            break
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
    each_s, losses = zip(*(steps(in_sample(step_s, options)) for _ in range(options.steps)), strict=True)
    seconds = median(each_s)
    peak_bytes = 0 if device.type == "cpu" else torch.accelerator.max_memory_allocated(device)
    return {
        "seconds": seconds,
        "tokens_per_s": row.tokens / seconds,
        "each_s": each_s,
        "loss": float(losses[-1]),
        "peak_bytes": peak_bytes,
    }


def measure_ours(
    row: Row, way: str, options: argparse.Namespace, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Roundpipe with asynchronous updates."""
    log, logger = Log(), logging.getLogger("roundpipe")
    level = logger.level
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    try:
        return _measure_ours(row, way, options, log, keep)
    finally:
        logger.removeHandler(log)
        logger.setLevel(level)


class Parts:
    """Seconds of a way's parts, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        begun_s = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - begun_s


def _measure_ours(
    row: Row, way: str, options: argparse.Namespace, log: Log, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    parts = Parts()
    residency, item = way_and_item(way)
    pin_model = "double" if item == "double" else options.pin_model
    replicas = "off" if item == "alone" else options.replicas
    source, ids = row.source(options.small), ids_of(row, options)
    with parts.part("build"):
        model = built(source, "cpu", options.compiled)
    devices = [capped(device_of(options.device, index), row.cap, options.small) for index in range(row.cards)]
    config = roundpipe.RoundPipeRunConfig(
        num_microbatch=row.num_microbatches,
        residency=residency,  # type: ignore[arg-type]
        replicas=replicas,  # type: ignore[arg-type]
    )
    begun_s = time.perf_counter()
    pipe = roundpipe.compile(
        model, devices=devices, model_run_config=config, pin_model=pin_model, name=f"{row.name}, {way}"
    )
    with pipe:
        optimizer = torch.optim.AdamW(pipe.optim_parameters(), lr=1e-5, fused=True)

        def step() -> tuple[float, Any]:
            """When the step's loss is known, and the loss."""
            loss = train(pipe, source, ids)
            known_s = time.perf_counter()
            pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()))
            return known_s, loss

        with parts.part("first step"):
            step()
            pipe.synchronize()
        first_s = time.perf_counter() - begun_s
        with parts.part("warm-up"):
            least = 10 if residency == "auto" else 6
            warm_s = _warm(lambda: step()[0], lambda: len(log.lines), least, options.warm_up_seconds)
        with parts.part("samples"):
            begin_s, _ = step()
            start_s, said = pipe.report().start_s, len(log.lines)
            pipe.peak_device_bytes(reset=True)
            number = in_sample(min(warm_s[-3:]), options)
            times, losses = zip(*(step() for _ in range(options.steps * number)), strict=True)
            ends_s = (begin_s, *times[number - 1 :: number])
            each_s = [(after - before) / number for before, after in itertools.pairwise(ends_s)]
            seconds = median(each_s)
            report, said_while_measured = pipe.report(), log.lines[said:]
        with parts.part("timeline"):
            with pipe.record_timeline() as timeline:
                for _ in range(NUM_RECORDED):
                    step()
            shown = read(timeline, len(devices), None)
            if options.timelines is not None:
                options.timelines.mkdir(parents=True, exist_ok=True)
                timeline.save(options.timelines / f"{row.name}-{way.replace('/', '-')}.json")
            table = pipe.partition_table()
        workers, causes = report.workers, {cause for worker in report.workers for cause in worker.idle}
        found = {
            "seconds": seconds,
            "tokens_per_s": row.tokens / seconds,
            "each_s": each_s,
            "steps_in_sample": number,
            "warm_s": warm_s,
            "said_while_measured": said_while_measured,
            "loss": float(losses[-1]),
            "predicted_s": None if report.predicted is None else report.predicted.round_s,
            "round_s": report.round_s,
            "exposed": shown.exposed,
            "waits_for_optimizer": shown.optimizer,
            "recorded_step_s": shown.step_s,
            "update_s": shown.update_s,
            "hand_over_s": shown.hand_over_s,
            "idle": {cause: sum(worker.idle.get(cause, 0.0) for worker in workers) / len(workers) for cause in causes},
            "busy": report.busy,
            "limit": report.limit,
            "stages": list(report.stages),
            "resident_bytes": max(worker.resident_bytes for worker in workers),
            "moved_bytes": {
                lane: sum(worker.moved_bytes[lane] for worker in workers) / len(times)
                for lane in workers[0].moved_bytes
            },
            "peak_bytes": report.peak_device_bytes,
            "num_allocator_retries": report.num_allocator_retries,
            "first_step_s": first_s,
            "start_s": dict(start_s),
            "partition": table,
            "log": log.lines,
            "parts_s": parts.seconds,
        }
        keep(found)
        with parts.part("end"):
            pipe.synchronize()
            optimizer.state.clear()  # or states come to the host, which nobody asks for here
            pipe.close()
    return found


def _warm(step: Callable[[], float], num_said: Callable[[], int], least: int, most_s: float) -> list[float]:
    """Steps until plans have settled, or the time is over and the latest plan has run a few; seconds of each."""
    begun_s = before_s = time.perf_counter()
    each_s: list[float] = []
    said, quiet = num_said(), 0
    while True:
        now_s = step()
        each_s.append(now_s - before_s)
        quiet = 0 if num_said() != said else quiet + 1
        before_s, said, passed_s = now_s, num_said(), now_s - begun_s
        are_alike = max(each_s[-3:]) <= (1 + ALIKE) * min(each_s[-3:])
        if len(each_s) >= least and (quiet >= QUIETER or (quiet >= QUIET and are_alike)):
            return each_s
        if passed_s > 2 * most_s or (passed_s > most_s and quiet >= QUIET):
            return each_s
