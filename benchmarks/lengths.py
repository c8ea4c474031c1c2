"""Seconds per step where each batch has a length of its own, padded to its longest sample, beside plain PyTorch.

A decoder with LoRA adapters is trained on ``--new`` batches of random lengths, and then on one length again and again:
what a length costs that was never seen before is the difference. Plain PyTorch meets new lengths as well, since kernels
are chosen by sizes. The ways:

    plain    the model on the device, with a fused AdamW
    default  compiled, with the built-in number of microbatches
    auto     compiled, ``num_microbatch="auto"``

    python benchmarks/lengths.py --device cuda:0 --json benchmarks/results/lengths_h200.json
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from generation import add_sizes, decoder
from training_steps import Step, compiled_step, measure_ways, plain_step

import roundpipe

WAYS = ("plain", "default", "auto")
AGAIN = 12
"""Steps with one length, of which the first two are left out."""


def batches(options: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """Random tokens, padded at the end of all samples but the first."""
    draws = random.Random(options.seed)
    lengths = [draws.randint(options.shortest, options.longest) for _ in range(options.new)]
    found = []
    for length in (*lengths, *[options.longest] * AGAIN):
        generator = torch.Generator().manual_seed(length)
        ids = torch.randint(3, options.vocabulary, (options.batch, length), generator=generator)
        mask = torch.ones_like(ids)
        for row in range(1, options.batch):
            mask[row, length - min(row, length // 2) :] = 0
        found.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return found


def trainer(way: str, options: argparse.Namespace) -> tuple[Step, Callable[[], None]]:
    """What makes one step, and what ends it all."""
    import peft

    model = decoder(options, options.device if way == "plain" else "cpu").train()
    model.config.use_cache = False
    model = peft.get_peft_model(model, peft.LoraConfig(r=options.lora, target_modules="all-linear"))
    if way == "plain":
        return plain_step(model, options.device), lambda: None
    config = roundpipe.RoundPipeRunConfig(loss_reduction="mean", num_microbatch="auto" if way == "auto" else None)
    piped = roundpipe.compile(model, devices=[options.device], model_run_config=config)
    return compiled_step(piped), piped.close


def measure(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the first step, of thirds of the others with new lengths, and of a length that was seen."""
    step, end = trainer(way, options)
    seconds, losses = [], []
    for batch in batches(options):
        start = time.perf_counter()
        losses.append(float(step(batch)))
        seconds.append(time.perf_counter() - start)
    end()
    del step, end
    gc.collect()
    new, third = seconds[1 : options.new], max((options.new - 1) // 3, 1)
    parts = [new[first : first + third] for first in range(0, third * 3, third)]
    return {
        "first_s": round(seconds[0], 2),
        "new_lengths_mean_s": [round(statistics.fmean(part), 3) for part in parts if part],
        "new_lengths_median_s": [round(statistics.median(part), 3) for part in parts if part],
        "seen_length_s": round(statistics.median(seconds[-AGAIN + 2 :]), 3),
        "first_loss": losses[0],
    }


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sizes(parser, layers=28)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--shortest", type=int, default=100)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--new", type=int, default=61, help="batches of random lengths")
    parser.add_argument("--lora", type=int, default=16, help="rank of the adapters")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    return measure_ways(options, measure)


if __name__ == "__main__":
    raise SystemExit(main())
