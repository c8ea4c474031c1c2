"""What the pipeline costs where it can gain nothing: one worker on the CPU, against a plain loop.

Four figures, each measured against plain PyTorch in the same run, in turns (A B A B ...), by medians:

    checkpointed   one block per stage, against torch.utils.checkpoint around all blocks but the last, with
                   the same recomputation: its early stop is off, since a block's end is recomputed here
    early stop     the same against checkpoint as it comes, which leaves out what follows a block's last saved
                   tensor (here half of the recomputation); no target, shown so that nothing is hidden
    fused          the whole model in one stage, against a loop without checkpointing
    task           empty blocks (one PReLU): seconds per (stage, microbatch), a visit's own cost included

    python benchmarks/overhead.py --json benchmarks/results/overhead.json
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from environment import report
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import roundpipe

MAX_RATIO = 1.05
MAX_TASK_S = 150e-6
MIN_BLOCK_S = 0.020


class Block(nn.Module):
    """A transformer's feed-forward part; `[T, width]` to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


@dataclass
class Comparison:
    """Medians in seconds of one call on either side, and what is made of them."""

    ours_s: float
    plain_s: float
    ratio: float
    num_samples: int


def loss_function(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Mean squared error."""
    return nn.functional.mse_loss(output, label)


def plain_loop(blocks: nn.Sequential, inputs: torch.Tensor, num_microbatches: int, recompute: bool) -> None:
    """Forward and backward of every microbatch in turn; the last block is never recomputed."""
    for microbatch in inputs.chunk(num_microbatches):
        hidden = microbatch
        for block in blocks[:-1]:
            hidden = checkpoint(block, hidden, use_reentrant=False) if recompute else block(hidden)
        loss_function(blocks[-1](hidden), microbatch).backward()


def one_block_per_stage(num_blocks: int) -> roundpipe.ExecutePlan:
    """Every block a stage of its own, the last one fused."""
    last = num_blocks - 1
    return roundpipe.ExecutePlan(
        forward=[(index, index + 1) for index in range(last)],
        fused=(last, num_blocks),
        backward=[(index, index + 1) for index in reversed(range(last))],
    )


def in_turns(ours: Callable[[], object], plain: Callable[[], object], num_samples: int) -> Comparison:
    """Times both sides alternately after one warm-up of each."""
    times: tuple[list[float], list[float]] = ([], [])
    for sample in range(-1, num_samples):
        for side, call in enumerate((ours, plain)):
            started = time.perf_counter()
            call()
            if sample >= 0:
                times[side].append(time.perf_counter() - started)
    medians = [statistics.median(side) for side in times]
    # Of neighbouring pairs, so that a machine that slows down weighs on both sides alike.
    ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
    return Comparison(medians[0], medians[1], ratio, num_samples)


def compare(
    blocks: nn.Sequential,
    inputs: torch.Tensor,
    plan: roundpipe.ExecutePlan,
    options: argparse.Namespace,
    *,
    recompute: bool,
    num_samples: int,
    early_stop: bool = False,
) -> Comparison:
    """One worker with ``plan`` against the plain loop over blocks of equal weights."""
    plain_blocks = copy.deepcopy(blocks)
    config = roundpipe.RoundPipeRunConfig(num_microbatch=options.microbatches, execute_plan=plan)
    with roundpipe.RoundPipe(blocks, model_run_config=config, devices=["cpu"]) as model:

        def ours() -> None:
            model.forward_backward(input_args=(inputs,), label=inputs, loss_fn=loss_function)

        def plain() -> None:
            with set_checkpoint_early_stop(early_stop):
                plain_loop(plain_blocks, inputs, options.microbatches, recompute)

        return in_turns(ours, plain, num_samples)


def verdict(value: float, target: float) -> str:
    """Whether a figure meets its target."""
    return "ok" if value <= target else "MISSED"


def main() -> int:
    """Measures, prints and writes; exit code 1 if a target is missed under --strict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512, help="per microbatch")
    parser.add_argument("--microbatches", type=int, default=3)
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--empty-blocks", type=int, default=24)
    parser.add_argument("--empty-microbatches", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1, help="threads per operator")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--strict", action="store_true", help="exit code 1 if a target is missed")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)

    inputs = torch.randn(options.microbatches * options.tokens, options.width)
    blocks = nn.Sequential(*[Block(options.width) for _ in range(options.blocks)])
    with torch.no_grad():
        alone = in_turns(lambda: blocks[0](inputs[: options.tokens]), lambda: None, 5)
    plan = one_block_per_stage(options.blocks)
    checkpointed, early_stop = (
        compare(
            copy.deepcopy(blocks),
            inputs,
            plan,
            options,
            recompute=True,
            num_samples=options.samples,
            early_stop=stops,
        )
        for stops in (False, True)
    )
    fused = compare(
        copy.deepcopy(blocks),
        inputs,
        roundpipe.ExecutePlan(fused=(0, options.blocks)),
        options,
        recompute=False,
        num_samples=options.samples,
    )
    empty = compare(
        nn.Sequential(*[nn.PReLU() for _ in range(options.empty_blocks)]),  # the least that has a gradient
        torch.randn(options.empty_microbatches, 8),
        one_block_per_stage(options.empty_blocks),
        argparse.Namespace(**{**vars(options), "microbatches": options.empty_microbatches}),
        recompute=True,
        num_samples=5 * options.samples,
    )
    num_tasks = (2 * options.empty_blocks - 1) * options.empty_microbatches
    task_s = empty.ours_s / num_tasks

    print(f"a block's forward takes {alone.ours_s * 1e3:.1f} ms (targets hold from {MIN_BLOCK_S * 1e3:.0f} ms)")
    for name, comparison in (("checkpointed", checkpointed), ("early stop", early_stop), ("fused", fused)):
        target = "" if name == "early stop" else f", target {MAX_RATIO}: {verdict(comparison.ratio, MAX_RATIO)}"
        print(
            f"{name:13} {comparison.ours_s:.3f} s, plain {comparison.plain_s:.3f} s, "
            f"ratio {comparison.ratio:.3f}{target}"
        )
    print(
        f"{'task':13} {task_s * 1e6:.0f} us of {num_tasks}, plain {empty.plain_s / num_tasks * 1e6:.0f} us, "
        f"target {MAX_TASK_S * 1e6:.0f} us: {verdict(task_s, MAX_TASK_S)}"
    )
    report(
        options.json,
        {
            "block_forward_s": alone.ours_s,
            "checkpointed": asdict(checkpointed),
            "early_stop": asdict(early_stop),
            "fused": asdict(fused),
            "task": {**asdict(empty), "num_tasks": num_tasks, "task_s": task_s},
            "targets": {"ratio": MAX_RATIO, "task_s": MAX_TASK_S},
        },
    )
    met = checkpointed.ratio <= MAX_RATIO and fused.ratio <= MAX_RATIO and task_s <= MAX_TASK_S
    return 1 if options.strict and not met else 0


if __name__ == "__main__":
    raise SystemExit(main())
