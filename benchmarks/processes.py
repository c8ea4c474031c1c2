"""Tokens per second of one process that rotates over all cards, and of one process per card, on the same batches.

    rotation        one process, all cards
    data-parallel   each process rotates over its own card, with a part of every batch; gradients are averaged
    sharded         the same, and each process keeps and updates a part of the optimizer's side
    stages          each process has one stage of torch.distributed.pipelining, with Schedule1F1B; AdamW on the card

Qwen3's shapes with random weights, in bfloat16. All but stages have float32 copies on the host and update
asynchronously; stages keep bfloat16 weights and states on the card, and recompute nothing. Each way has processes of
its own, which divide the host's threads among them. Without cards they run on the CPU, connected by gloo.

A way takes as many steps as fit into its time. At its limit its processes are killed: its row says how far they were,
and the JSON has their stacks. Table and JSON are written after each way.

    python benchmarks/processes.py --json benchmarks/results/processes.json
    python benchmarks/processes.py --device cpu --model tiny --microbatches 4 --ways data-parallel,sharded
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from decoders import DECODERS, fill
from environment import environment, write
from tabulate import tabulate
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

import roundpipe

WAYS = ("rotation", "data-parallel", "sharded", "stages")
STACKS_S, ALONE_S, KILL_S = 4.0, 5.0, 5.0
"""How long before the limit stacks are written; how long others may go on when one has failed; until a kill is done."""
USED_SHARE = 0.8
"""Of the time that is left, what steps are planned to take."""
COLUMNS = ("way", "tokens/s", "of rotation", "step", "steps", "limit", "optimizer's side", "error")


def say(what: str) -> None:
    """How far this process is; the last line is in the row of a way that does not end."""
    print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)


def build(options: argparse.Namespace) -> nn.Module:
    """The model on the host, the same in all processes."""
    torch.manual_seed(0)
    model = DECODERS[options.model].build().to_empty(device="cpu")
    fill(model)
    say("the model is built")
    return model


def loss_of(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """The mean over all tokens but the first."""
    return F.cross_entropy(outputs.logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())


def agreed(number: int, options: argparse.Namespace) -> int:
    """The least of all processes."""
    if not dist.is_initialized():
        return number
    least = torch.tensor(number, device=options.device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least)


def timed(step: Callable[[], Any], finish: Callable[[], Any], options: argparse.Namespace) -> dict[str, Any]:
    """Mean seconds of a step, after some to warm up; fewer of both where there is no time for all."""

    def seconds_of(count: int) -> float:
        begun_s = time.perf_counter()
        for _ in range(count):
            step()
        finish()
        return (time.perf_counter() - begun_s) / count

    def number(most: int, seconds: float) -> int:
        return agreed(min(most, int(USED_SHARE * (options.until - time.time()) / seconds)), options)

    say("first step")
    seconds = seconds_of(1)
    say(f"the first step took {seconds:.2f} s")
    if (count := number(options.warm_up - 1, 2 * seconds)) > 0:  # as many are to follow
        seconds = seconds_of(count)
    count = max(number(options.steps, seconds), 1)
    say(f"{count} steps of about {seconds:.2f} s")
    return {"seconds": seconds_of(count), "steps": count}


def rotate(way: str, devices: list[roundpipe.Device], ids: torch.Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of `roundpipe.compile`, in one process or as a rank."""
    number = options.microbatches // (options.processes if way != "rotation" else 1)
    config = roundpipe.RoundPipeRunConfig(num_microbatch=number, loss_reduction="mean")
    group = {} if way == "rotation" else {"process_group": "world", "shard_optimizer": way == "sharded"}
    with roundpipe.compile(build(options), devices=devices, model_run_config=config, name=way, **group) as pipe:
        optimizer = torch.optim.AdamW(pipe.optim_parameters(), lr=1e-5, fused=True)
        reports: list[roundpipe.RunReport] = []

        def step() -> None:
            pipe.forward_backward(input_kwargs={"input_ids": ids}, label=ids, loss_fn=loss_of)
            pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()))

        def finish() -> None:
            pipe.synchronize()
            reports.append(pipe.report())

        found, last = timed(step, finish, options), reports[-1]
        side = {name: seconds / found["steps"] for name, seconds in last.optimizer_s.items()}
        return {**found, "limit": last.limit, "optimizer_s": side, "idle": [dict(each.idle) for each in last.workers]}


def run_stage(device: torch.device, ids: torch.Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of this rank's stage."""
    model, rank = build(options), dist.get_rank()
    example = {"input_ids": ids[: len(ids) // options.microbatches]}
    stage = roundpipe.distributed.pipeline_stage(model, rank, options.processes, device, example_kwargs=example)
    schedule = Schedule1F1B(
        stage,
        options.microbatches,
        loss_fn=lambda tensors, label: loss_of(roundpipe.distributed.model_outputs(stage, tensors), label),
    )
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=1e-5, fused=True)
    inputs = {"input_ids": ids.to(device)} if stage.is_first else {}
    labels = ids.to(device) if stage.is_last else None

    def step() -> None:
        schedule.step(**inputs, target=labels, return_outputs=False)
        roundpipe.distributed.sum_tied_gradients(stage)
        optimizer.step()
        optimizer.zero_grad()

    def finish() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        dist.barrier()

    return timed(step, finish, options)


def run(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """One process of a way, which ends by itself even if nobody is there to end it."""
    left_s = options.until - time.time()
    faulthandler.dump_traceback_later(max(left_s - STACKS_S, 1.0))
    signal.alarm(max(int(left_s + KILL_S), 1))
    torch.manual_seed(0)
    on_cpu, rank = options.device == "cpu", options.rank
    length = 64 if options.model.startswith("tiny") else options.length
    ids = torch.randint(0, 1000, (options.microbatches * options.batch, length))
    if way == "rotation":
        cards = 1 if options.share_card else options.processes
        names = ["cpu"] * options.processes if on_cpu else [f"{options.device}:{index}" for index in range(cards)]
        found = rotate(way, [roundpipe.Device(name) for name in names], ids, options)
        return {**found, "tokens_per_s": ids.numel() / found["seconds"]}
    device = torch.device("cpu") if on_cpu else torch.device(options.device, 0 if options.share_card else rank)
    if not on_cpu:
        torch.accelerator.set_device_index(device)
    store = f"file://{options.folder / 'store'}"
    backend = "gloo" if on_cpu or options.share_card else "nccl"  # NCCL takes a card once
    dist.init_process_group(backend, store, rank=rank, world_size=options.processes)
    say("ranks are connected")
    try:
        if way == "stages":
            found = run_stage(device, ids, options)
        else:
            found = rotate(way, [roundpipe.Device(str(device))], ids.chunk(options.processes)[rank], options)
        return {**found, "tokens_per_s": ids.numel() / found["seconds"]}
    finally:
        dist.destroy_process_group()


def measure(way: str, options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """A way in processes of its own: its figures, or what ended it."""
    count = 1 if way == "rotation" else options.processes
    environ = {**os.environ, "OMP_NUM_THREADS": str(max(torch.get_num_threads() // count, 1))}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as files:
        folder, processes = Path(name), []
        until = time.time() + options.limit
        own = ["--way", way, "--folder", name, "--until", str(until)]
        command = [sys.executable, str(Path(__file__).resolve()), *arguments, *own, "--rank"]
        for rank in range(count):
            said, failed = (
                files.enter_context((folder / f"{stream}{rank}").open("w")) for stream in ("said", "failed")
            )
            started = subprocess.Popen([*command, str(rank)], stdout=said, stderr=failed, env=environ)
            processes.append(started)
        try:
            reason = wait_for(processes, until)
        finally:
            for process in processes:
                process.kill()
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may keep it
                process.wait(KILL_S)
        path = folder / "found"
        if not reason and path.exists():
            return dict(json.loads(path.read_text()))
        ends = [(folder / f"said{rank}").read_text().splitlines()[-1:] for rank in range(count)]
        far = "; ".join(f"rank {rank}: {' '.join(end) or 'started'}" for rank, end in enumerate(ends))
        stacks = {f"rank {rank}": (folder / f"failed{rank}").read_text().splitlines()[-80:] for rank in range(count)}
        return {"error": f"{reason or 'no figures'} ({far})", "stderr": stacks}


def wait_for(processes: Sequence[subprocess.Popen[bytes]], until: float) -> str:
    """Empty when all have ended well; else why that will not be."""
    failed_s = None
    while time.time() < until:
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes):
            return ""
        if any(codes):
            failed_s = failed_s or time.time()
            if None not in codes or time.time() > failed_s + ALONE_S:
                return f"exit codes {codes}"
        time.sleep(0.1)
    return "not done in time"


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A row per way that was tried."""
    base = results.get("rotation", {}).get("tokens_per_s")
    rows = []
    for way, found in results.items():
        if "error" in found:
            rows.append([way, *[""] * (len(COLUMNS) - 2), found["error"]])
            continue
        side = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in found.get("optimizer_s", {}).items())
        speed = f"{found['tokens_per_s']:,.0f}", f"{found['tokens_per_s'] / base:.2f}" if base else ""
        rows.append([way, *speed, f"{found['seconds']:.2f} s", found["steps"], found.get("limit", ""), side, ""])
    return tabulate(rows, COLUMNS, disable_numparse=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the ways one after the other; 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=DECODERS, default="1.7b")
    parser.add_argument("--device", default="cuda", help="a kind of accelerator, or cpu")
    parser.add_argument("--processes", type=int, default=2, help="as many as cards")
    parser.add_argument("--microbatches", type=int, default=16, help="of a step, over all processes")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a microbatch")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before those that count, at most")
    parser.add_argument("--steps", type=int, default=4, help="that count, at most")
    parser.add_argument("--limit", type=float, default=50.0, help="seconds of a way, from its start to its end")
    parser.add_argument("--share-card", action="store_true", help="try all but stages on one card, connected by gloo")
    parser.add_argument("--ways", default=",".join(WAYS), help="some of them, separated by commas")
    parser.add_argument("--json", type=Path)
    of_process = [parser.add_argument(f"--{name}", help=argparse.SUPPRESS) for name in ("way", "folder")]
    of_process += [parser.add_argument("--until", type=float, help=argparse.SUPPRESS)]
    of_process += [parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)]
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    if options.way is not None:
        options.folder = Path(options.folder)
        found = run(options.way, options)
        if options.rank == 0:
            (options.folder / "found").write_text(json.dumps(found))
        return 0
    ways = options.ways.split(",")
    if unknown := [way for way in ways if way not in WAYS]:
        parser.error(f"--ways: there is no {', '.join(unknown)}; there are {', '.join(WAYS)}")
    inner = {"json", *(argument.dest for argument in of_process)}
    results: dict[str, Any] = {"options": {key: value for key, value in vars(options).items() if key not in inner}}
    found_here = environment()
    for way in ways:
        say(f"{way}: up to {options.limit:.0f} s")
        results[way] = measure(way, options, given)
        print(table({way: results[way] for way in ways if way in results}), flush=True)
        if options.json is not None:
            write(options.json, found_here, results)
    return int(any("error" in results[way] for way in ways))


if __name__ == "__main__":
    raise SystemExit(main())
