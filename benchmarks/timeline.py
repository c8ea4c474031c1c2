"""Records some training steps of a small language model on CPU workers with modelled links: timeline and report.

python benchmarks/timeline.py --link 0.05 --save docs/timeline.png
python benchmarks/timeline.py --devices cuda:0 --width 2048 --save run.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from environment import report
from torch import nn
from torch.nn import functional

import roundpipe
from roundpipe.reports.timeline import check_path

VOCABULARY = 512


class Block(nn.Module):
    """A gated residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(self.norm(hidden)).chunk(2, -1)
        return hidden + self.down(functional.silu(gate) * value)


class Model(nn.Module):
    """Tokens `[B, S]` to logits `[B, S, V]`."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def main(argv: list[str] | None = None) -> int:
    """Trains, records, prints the report; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cpu,cpu,cpu,cpu", help="such as cpu,cpu or cuda:0")
    parser.add_argument("--link", type=float, default=0.4, help="GB/s of each CPU worker's link, in each direction")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256, help="per sequence; there is one sequence per microbatch")
    parser.add_argument("--microbatches", type=int, help="default: devices + 1")
    parser.add_argument("--steps", type=int, default=3, help="that are recorded")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before those")
    parser.add_argument("--save", type=Path, required=True, metavar="FILE", help="timeline, as .json or .png")
    options = parser.parse_args(argv)
    names = options.devices.split(",")
    speed = options.link * 1e9
    limits = [{"upload_bytes_per_s": speed, "download_bytes_per_s": speed} if n == "cpu" else {} for n in names]
    devices = [roundpipe.Device(name, **given) for name, given in zip(names, limits, strict=True)]
    num_microbatches = options.microbatches or len(names) + 1

    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokens = torch.randint(VOCABULARY, (num_microbatches, options.tokens + 1))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    config = roundpipe.RoundPipeRunConfig(num_microbatch=num_microbatches)
    net = Model(options.width, options.blocks)
    name = f"a language model of {options.blocks} blocks, {len(names)} workers"
    with roundpipe.compile(net, example_args=(inputs,), devices=devices, model_run_config=config, name=name) as model:
        optimizer = torch.optim.AdamW(model.optim_parameters(), lr=1e-3)

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        def train(num_steps: int) -> None:
            for _ in range(num_steps):
                model.forward_backward(
                    input_kwargs={"input_ids": inputs},
                    label=labels,
                    loss_fn=lambda logits, wanted: (
                        functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
                        / labels.numel()
                    ),
                )
                model.step(update)

        check_path(options.save)  # imports what writing takes
        train(options.warm_up)
        with model.record_timeline(options.save) as timeline:
            model.report()
            train(options.steps)
        print(model.partition_table(), model.report(), timeline, sep="\n\n", end="\n\n")
    report(None, {})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
