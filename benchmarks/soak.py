"""Thousands of calls with random shapes and options: what a process holds must not grow.

Two models train side by side, a Sequential of small blocks and a compiled byte-level Llama. Each call draws its
model, batch, length, number of microbatches and grain; some calls are a forward without grad, some a forward and a
backward apart, some raise in the loss function; some compile the Sequential's module again. After a warm-up the
resident memory, the memory that Python and torch objects hold, threads and open files are sampled:

    resident    medians of the first and the last fifth of the samples, at most 2 % apart
    tensors     bytes of the live tensors, likewise; nothing but the models, their gradients and moments may stay
    threads     of the process, never more than at the first sample; likewise open files

    python benchmarks/soak.py --calls 2000 --json benchmarks/results/soak.json
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from environment import report
from torch import nn

import roundpipe

MAX_GROWTH = 0.02
WARM_UP = 0.25
SAMPLES = 20
WIDTH = 48


class Stopped(Exception):
    """What the failing calls raise."""


@dataclass
class Sample:
    """What the process held after some calls."""

    calls: int
    resident_bytes: int
    tensor_bytes: int
    threads: int
    open_files: int


def resident_bytes() -> int:
    """Memory of this process in use, after free memory went back to the system."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        pass
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def tensor_bytes() -> int:
    """Bytes of the storages of all live tensors."""
    storages = {}
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor) and type(one) in (torch.Tensor, nn.Parameter):
            storage = one.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def sample(calls: int) -> Sample:
    """What is held now."""
    gc.collect()
    threads, files = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd"))
    return Sample(calls, resident_bytes(), tensor_bytes(), threads, files)


class Trainee:
    """A model with its optimizer, and a way to draw arguments for it."""

    def __init__(self, model: Any, draw: Callable[[random.Random], dict[str, Any]]) -> None:
        self.model = model
        self.draw = draw
        self.optimizer = torch.optim.AdamW(model.optim_parameters(), lr=1e-4)

    def update(self) -> None:
        """One step of the optimizer."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def tensor_of(outputs: Any) -> torch.Tensor:
    """The tensor that the loss is made of."""
    return outputs if isinstance(outputs, torch.Tensor) else outputs.logits


def loss_function(outputs: Any, label: Any) -> torch.Tensor:
    """Any loss will do."""
    return tensor_of(outputs).square().mean()


def failing_loss(outputs: Any, label: Any) -> torch.Tensor:
    """Fails in the middle of a round."""
    raise Stopped


def call(trainee: Trainee, chance: random.Random) -> str:
    """One random call; returns its kind."""
    model = trainee.model
    config = roundpipe.RoundPipeRunConfig(
        num_microbatch=chance.randint(1, 5), recompute_grain=chance.choice(["stage", "layer"])
    )
    arguments = trainee.draw(chance)
    kind = chance.choices(["train", "forward", "apart", "fail"], [12, 2, 2, 1])[0]
    if kind == "train":
        model.forward_backward(input_kwargs=arguments, loss_fn=loss_function, run_config=config)
        model.step(trainee.update, is_async=chance.random() < 0.7)
    elif kind == "forward":
        with torch.no_grad():
            model(**arguments, roundpipe_run_config=config)
    elif kind == "apart":
        loss_function(model(**arguments, roundpipe_run_config=config), None).backward()
        model.step(trainee.update)
    else:
        try:
            model.forward_backward(input_kwargs=arguments, loss_fn=failing_loss, run_config=config)
        except Stopped:
            model.zero_grad()
    return kind


def sequential() -> nn.Sequential:
    """A stack of small blocks, each with dropout and a normalisation that keeps statistics."""
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(5)]
    )


def wrapped() -> Trainee:
    """The Sequential, one layer per child."""
    model = roundpipe.RoundPipe(sequential(), devices=["cpu"] * 2, name="blocks")
    return Trainee(model, lambda chance: {"input": torch.randn(chance.randint(5, 24) * 2, WIDTH)})


def compiled() -> Trainee:
    """A byte-level Llama; its length varies, and sometimes an option that needs a trace of its own."""
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )

    def draw(chance: random.Random) -> dict[str, Any]:
        ids = torch.randint(256, (chance.randint(1, 6), chance.randint(2, 24)))
        arguments = {"input_ids": ids, "use_cache": False}
        if chance.random() < 0.3:
            arguments["attention_mask"] = torch.ones_like(ids)
        if chance.random() < 0.1:
            arguments["output_hidden_states"] = True
        return arguments

    model = roundpipe.compile(transformers.LlamaForCausalLM(config), devices=["cpu"] * 2, name="llama")
    return Trainee(model, draw)


def soak(num_calls: int, seed: int) -> tuple[list[Sample], dict[str, int]]:
    """Makes the calls.

    Returns:
        samples after the warm-up, and how many calls of each kind there were.
    """
    chance = random.Random(seed)
    trainees = [wrapped(), compiled()]
    kinds: dict[str, int] = {}
    samples = []
    first = int(num_calls * WARM_UP)
    every = max(1, (num_calls - first) // SAMPLES)
    for index in range(1, num_calls + 1):
        kind = call(chance.choices(trainees, [2, 1])[0], chance)
        kinds[kind] = kinds.get(kind, 0) + 1
        if index % 100 == 0:
            again = trainees[0]
            net = again.model.model
            again.model.close()
            trainees[0] = Trainee(roundpipe.RoundPipe(net, devices=["cpu"] * 2, name="blocks"), again.draw)
            del again
        if index >= first and (index - first) % every == 0:
            for trainee in trainees:  # all threads run and all moments are there, so that samples can be compared
                trainee.model.forward_backward(input_kwargs=trainee.draw(chance), loss_fn=loss_function)
                trainee.model.step(trainee.update)
                trainee.model.synchronize()
                trainee.model.zero_grad()
            samples.append(sample(index))
    kinds["traces"] = trainees[1].model.trace_count
    for trainee in trainees:
        trainee.model.close()
    return samples, kinds


def growth(values: list[int]) -> float:
    """How much more the last fifth of the samples holds than the first, by medians."""
    part = max(1, len(values) // 5)
    return statistics.median(values[-part:]) / statistics.median(values[:part]) - 1.0


def main(argv: list[str] | None = None) -> int:
    """Runs the calls; 1 if something grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    torch.manual_seed(options.seed)
    warnings.filterwarnings("ignore", message="the batch has")
    started_s = time.perf_counter()
    samples, kinds = soak(options.calls, options.seed)
    results: dict[str, Any] = {
        "calls": options.calls,
        "kinds": kinds,
        "seconds": time.perf_counter() - started_s,
        "target": MAX_GROWTH,
        "resident_growth": growth([one.resident_bytes for one in samples]),
        "tensor_growth": growth([one.tensor_bytes for one in samples]),
        "thread_growth": max(one.threads for one in samples) - samples[0].threads,
        "open_file_growth": max(one.open_files for one in samples) - samples[0].open_files,
        "samples": [asdict(one) for one in samples],
    }
    grown = [name for name in ("resident_growth", "tensor_growth") if results[name] > MAX_GROWTH]
    grown += [name for name in ("thread_growth", "open_file_growth") if results[name] > 0]
    print(", ".join(f"{number} {kind}" for kind, number in kinds.items()) + f", {results['seconds']:.0f} s")
    print(
        f"resident {samples[0].resident_bytes / 2**20:.1f} -> {samples[-1].resident_bytes / 2**20:.1f} MiB "
        f"({results['resident_growth']:+.2%}), tensors {samples[0].tensor_bytes / 2**20:.2f} -> "
        f"{samples[-1].tensor_bytes / 2**20:.2f} MiB ({results['tensor_growth']:+.2%}), threads "
        f"{samples[0].threads} -> {samples[-1].threads}, open files {samples[0].open_files} -> {samples[-1].open_files}"
    )
    print("grew: " + ", ".join(grown) if grown else "nothing grew")
    report(options.json, results)
    return int(bool(grown))


if __name__ == "__main__":
    raise SystemExit(main())
