"""What it brings that weights stay on the devices, beside plain PyTorch in the same run.

Decoder blocks with an embedding and an output layer, in bfloat16, in two cases:

    lora    blocks of an 8 B model; trained is what LoRA adds to every linear layer
    full    0.8 B; everything is trained

Each is trained with ``residency="off"``, ``"auto"`` and ``"full"``, and by a plain loop on the first device, which
accumulates over the same microbatches; several times in turns, the run with the median time counts. The ratio is that
of plain PyTorch's time to ours.

    python benchmarks/residency.py --json benchmarks/results/residency.json
    python benchmarks/residency.py --memory 24GiB --blocks 32 --cases lora
    python benchmarks/residency.py --device cpu --memory 1GiB --small
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from environment import report
from torch import nn

import roundpipe


@dataclass(frozen=True)
class Shape:
    """Of a decoder."""

    width: int
    hidden: int
    heads: int
    blocks: int
    vocabulary: int
    rank: int
    """Of LoRA; 0: everything is trained."""


SHAPES = {"lora": Shape(4096, 14336, 32, 8, 32000, 16), "full": Shape(1536, 6144, 12, 20, 32000, 0)}
SMALL = {"lora": Shape(64, 192, 2, 4, 256, 4), "full": Shape(64, 192, 2, 4, 256, 0)}
WAYS = ("off", "auto", "full", "plain")


class Linear(nn.Linear):
    """A linear layer, frozen with a trained product of two thin ones beside it if there is a rank."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.rank = rank
        if rank:
            self.weight.requires_grad_(False)
            self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        result = super().forward(value)
        return result + self.up(self.down(value)) if self.rank else result


class Block(nn.Module):
    """Causal attention and a gated feed-forward part; `[B, T, width]` to the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, hidden, rank = shape.width, shape.hidden, shape.rank
        self.heads = shape.heads
        self.attention_norm = nn.RMSNorm(width, elementwise_affine=not rank)
        self.query, self.key, self.value, self.output = (Linear(width, width, rank) for _ in range(4))
        self.feed_norm = nn.RMSNorm(width, elementwise_affine=not rank)
        self.gate, self.up = Linear(width, hidden, rank), Linear(width, hidden, rank)
        self.down = Linear(hidden, width, rank)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(states)
        query, key, value = (
            part(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        states = states + self.output(mixed.transpose(1, 2).flatten(-2))
        normed = self.feed_norm(states)
        return states + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


def decoder(shape: Shape) -> nn.Sequential:
    """An embedding, blocks and an output layer, with the same weights each time."""
    torch.manual_seed(0)
    embedding = nn.Embedding(shape.vocabulary, shape.width).requires_grad_(not shape.rank)
    head = nn.Linear(shape.width, shape.vocabulary, bias=False).requires_grad_(not shape.rank)
    return nn.Sequential(embedding, *(Block(shape) for _ in range(shape.blocks)), head).to(torch.bfloat16)


def loss_function(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the tokens' cross entropy."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


@dataclass(frozen=True)
class Run:
    """Seconds per step, and what moves."""

    step_s: float
    tokens_per_s: float
    uploaded_bytes: float
    """Per step, of weights."""
    resident_bytes: int
    peak_bytes: int
    predicted_s: float | None


def measure(shape: Shape, residency: str, options: argparse.Namespace) -> Run:
    """Trains with roundpipe and asynchronous updates."""
    names = options.device.split(",")
    devices = [roundpipe.Device(name, memory_bytes=options.memory) for name in names]
    config = roundpipe.RoundPipeRunConfig(num_microbatch=options.microbatches, residency=residency)
    ids = torch.randint(shape.vocabulary, (options.microbatches * options.batch, options.tokens))
    with roundpipe.compile(decoder(shape), devices=devices, model_run_config=config) as model:
        optimizer = torch.optim.AdamW(model.optim_parameters(), lr=1e-5, fused=True)

        def train(num_steps: int) -> float:
            began_s = time.perf_counter()
            for _ in range(num_steps):
                model.forward_backward((ids,), label=ids, loss_fn=loss_function)
                model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
            model.synchronize()
            return (time.perf_counter() - began_s) / num_steps

        train(options.warm_up)
        model.report()
        step_s = train(options.steps)
        found = model.report()
    predicted = None if found.predicted is None else found.predicted.round_s
    return Run(
        step_s=step_s,
        tokens_per_s=ids.numel() / step_s,
        uploaded_bytes=sum(worker.moved_bytes["weights"] for worker in found.workers) / options.steps,
        resident_bytes=max(worker.resident_bytes for worker in found.workers),
        peak_bytes=found.peak_device_bytes,
        predicted_s=predicted,
    )


def measure_plain(shape: Shape, options: argparse.Namespace) -> Run | None:
    """Trains by a plain loop on the first device, which keeps everything; None if it runs out of memory."""
    device = torch.device(options.device.partition(",")[0])
    try:
        model = decoder(shape).to(device)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
        ids = torch.randint(shape.vocabulary, (options.microbatches * options.batch, options.tokens), device=device)

        def train(num_steps: int) -> float:
            began_s = time.perf_counter()
            for _ in range(num_steps):
                for microbatch in ids.chunk(options.microbatches):
                    loss_function(model(microbatch), microbatch).backward()
                optimizer.step()
                optimizer.zero_grad()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            return (time.perf_counter() - began_s) / num_steps

        train(options.warm_up)
        step_s = train(options.steps)
        peak_bytes = 0 if device.type == "cpu" else torch.accelerator.max_memory_allocated(device)
    except torch.OutOfMemoryError:
        return None
    return Run(step_s, ids.numel() / step_s, 0.0, 0, peak_bytes, None)


def main(arguments: list[str] | None = None) -> int:
    """Measures the cases in turns, and prints a line per way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0", help="one or several, with commas between")
    parser.add_argument("--memory", help="of each device, such as 24GiB; default: what is free")
    parser.add_argument("--cases", default="lora,full")
    parser.add_argument("--blocks", type=int, help="of the decoders; default: 8 and 20")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1, help="samples of a microbatch")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--warm-up", type=int, default=10, help='with "auto" weights may move in the first eight')
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="sizes that measure nothing, to try the script")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.small:
        options.tokens, options.warm_up, options.steps, options.repeats = 32, 2, 2, 1
    results: dict[str, dict[str, object]] = {}
    for case in options.cases.split(","):
        shape = (SMALL if options.small else SHAPES)[case]
        if options.blocks is not None:
            shape = Shape(**{**asdict(shape), "blocks": options.blocks})
        runs: defaultdict[str, list[Run]] = defaultdict(list)
        for _ in range(options.repeats):
            for way in WAYS:
                run = measure_plain(shape, options) if way == "plain" else measure(shape, way, options)
                if run is not None:
                    runs[way].append(run)
                if options.device.startswith("cuda"):
                    torch.cuda.empty_cache()
        medians = {way: sorted(each, key=lambda run: run.step_s)[len(each) // 2] for way, each in runs.items()}
        results[case] = {"shape": asdict(shape), "ways": {way: asdict(run) for way, run in medians.items()}}
        for way, run in medians.items():
            ratio = medians["plain"].step_s / run.step_s if "plain" in medians else float("nan")
            predicted = "-" if run.predicted_s is None else f"{run.predicted_s * 1e3:.1f}"
            print(
                f"{case:5} {way:6} {run.step_s * 1e3:9.1f} ms a step (predicted {predicted}), "
                f"{1 / run.step_s:7.2f} steps/s, {run.tokens_per_s:9.0f} tokens/s, {ratio:5.2f} of plain, "
                f"up {run.uploaded_bytes / 1e9:7.3f} GB a step, stays {run.resident_bytes / 1e9:7.3f} GB, "
                f"peak {run.peak_bytes / 1e9:7.3f} GB"
            )
    report(options.json, results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
