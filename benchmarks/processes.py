"""Tokens per second of one process that rotates over all cards, and of one process per card, on the same batches.

    rotation        one process, all cards
    data-parallel   each process rotates over its own card, with a part of every batch; gradients are averaged
    sharded         the same, and each process keeps and updates a part of the optimizer's side
    stages          each process has one stage of torch.distributed.pipelining, with Schedule1F1B; AdamW on the card

Qwen3's shapes with random weights, in bfloat16. All but stages have float32 copies on the host and update
asynchronously; stages keep bfloat16 weights and states on the card, and recompute nothing. Each way has processes of
its own. Without cards they run on the CPU, connected by gloo.

    python benchmarks/processes.py --json benchmarks/results/processes.json
    python benchmarks/processes.py --device cpu --model tiny --microbatches 4
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from decoders import DECODERS, fill
from environment import report
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

import roundpipe

WAYS = ("rotation", "data-parallel", "sharded", "stages")


def build(options: argparse.Namespace) -> nn.Module:
    """The model on the host, the same in all processes."""
    torch.manual_seed(0)
    model = DECODERS[options.model].build().to_empty(device="cpu")
    fill(model)
    return model


def loss_of(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """The mean over all tokens but the first."""
    return F.cross_entropy(outputs.logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())


def timed(step: Callable[[], Any], finish: Callable[[], Any], options: argparse.Namespace) -> float:
    """Mean seconds of a step, after some to warm up."""
    for count in (options.warm_up, options.steps):
        begun_s = time.perf_counter()
        for _ in range(count):
            step()
        finish()
        seconds = (time.perf_counter() - begun_s) / count
    return seconds


def rotate(way: str, devices: list[roundpipe.Device], ids: torch.Tensor, options: argparse.Namespace) -> float:
    """Seconds per step with `roundpipe.compile`, in one process or as a rank."""
    number = options.microbatches // (options.processes if way != "rotation" else 1)
    config = roundpipe.RoundPipeRunConfig(num_microbatch=number, loss_reduction="mean")
    group = {} if way == "rotation" else {"process_group": "world", "shard_optimizer": way == "sharded"}
    with roundpipe.compile(build(options), devices=devices, model_run_config=config, name=way, **group) as pipe:
        optimizer = torch.optim.AdamW(pipe.optim_parameters(), lr=1e-5, fused=True)

        def step() -> None:
            pipe.forward_backward(input_kwargs={"input_ids": ids}, label=ids, loss_fn=loss_of)
            pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()))

        return timed(step, pipe.synchronize, options)


def run_stage(device: torch.device, ids: torch.Tensor, options: argparse.Namespace) -> float:
    """Seconds per step of this rank's stage."""
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


def run(way: str, options: argparse.Namespace) -> dict[str, float] | None:
    """One process of a way; what it measured, on the first."""
    torch.manual_seed(0)
    on_cpu = options.device == "cpu"
    length = 64 if options.model.startswith("tiny") else options.length
    ids = torch.randint(0, 1000, (options.microbatches * options.batch, length))
    if way == "rotation":
        names = ["cpu"] * options.processes if on_cpu else [f"{options.device}:{i}" for i in range(options.processes)]
        seconds = rotate(way, [roundpipe.Device(name) for name in names], ids, options)
        return {"seconds": seconds, "tokens_per_s": ids.numel() / seconds}
    device = torch.device("cpu") if on_cpu else torch.device(options.device, int(os.environ["LOCAL_RANK"]))
    if not on_cpu:
        torch.accelerator.set_device_index(device)
    dist.init_process_group("gloo" if on_cpu else "nccl")
    try:
        if way == "stages":
            seconds = run_stage(device, ids, options)
        else:
            own = ids.chunk(options.processes)[dist.get_rank()]
            seconds = rotate(way, [roundpipe.Device(str(device))], own, options)
        return {"seconds": seconds, "tokens_per_s": ids.numel() / seconds} if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def measure(way: str, options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """A way in processes of its own: its figures, or the error that ended it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.processes)]
        command = [*(launcher if way != "rotation" else []), str(Path(__file__).resolve()), *arguments]
        done = subprocess.run(
            [sys.executable, *command, "--way", way, "--found", str(path)], stderr=subprocess.PIPE, text=True
        )
        if path.exists():
            return json.loads(path.read_text())  # type: ignore[no-any-return]
        return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-20:]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures all ways one after the other; 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=DECODERS, default="1.7b")
    parser.add_argument("--device", default="cuda", help="a kind of accelerator, or cpu")
    parser.add_argument("--processes", type=int, default=2, help="as many as cards")
    parser.add_argument("--microbatches", type=int, default=16, help="of a step, over all processes")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a microbatch")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before those that count")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    if options.way is not None:
        found = run(options.way, options)
        if found is not None:
            options.found.write_text(json.dumps(found))
        return 0
    results: dict[str, Any] = {"options": {k: v for k, v in vars(options).items() if k not in ("json", "way", "found")}}
    for way in options.ways.split(","):
        results[way] = found = measure(way, options, given)
        line = "\n".join(found["error"]) if "error" in found else f"{found['tokens_per_s']:,.0f} tokens/s"
        base = results.get("rotation", {}).get("tokens_per_s")
        ratio = f", {found['tokens_per_s'] / base:.2f} of the rotation" if base and "error" not in found else ""
        print(f"{way:14} {line}{ratio}", flush=True)
    report(options.json, results)
    return int(any("error" in results[way] for way in options.ways.split(",")))


if __name__ == "__main__":
    raise SystemExit(main())
