"""Train a causal language model that may be larger than the device, all of its weights.

Without arguments: a byte-level Llama of 5 M parameters, built from its config, learns to write Python
from the standard library's own source. With ``--model DIR``: any Hugging Face causal language model on disk.

    python examples/finetune_llm.py
    python examples/finetune_llm.py --model ~/models/Qwen3-1.7B --data notes.txt --save trained
    python examples/finetune_llm.py --check --steps 5

The part about roundpipe is `train`: an ordinary loop for one device.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import command_line
import torch
from against_plain import agrees, eager_bytes
from command_line import Parser, folder_path, parse_devices, recorded
from language import DTYPES, batches, byte_llama, load_checkpoint, load_tokens, next_token_loss, sample
from tqdm import tqdm

import roundpipe
from roundpipe.reports.tables import format_bytes, format_count, summary_table


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The options, checked as far as that is possible without loading anything."""
    parser = Parser(__doc__)
    parser.add_argument("--model", type=Path, metavar="DIR", help="checkpoint with its tokenizer")
    parser.add_text_options(300, 8, None, "default: 1e-3 from scratch, else 1e-5")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="default: that of the checkpoint, or float32")
    parser.add_argument("--recompute", choices=["stage", "layer"], help="layer: less memory, more transfers")
    parser.add_argument("--save", type=folder_path, metavar="DIR", help="write the trained model here")
    parser.add_argument("--sample", type=int, default=120, metavar="N", help="tokens to generate at the end")
    options = parser.parse_args(argv)
    if options.lr is None:
        options.lr = 1e-3 if options.model is None else 1e-5
    parser.require_positive(options, "steps", "batch", "seq", "microbatches")
    return options


def train(
    model: Any, data: Iterator[tuple[dict[str, Any], torch.Tensor]], options: argparse.Namespace
) -> tuple[list[float], float]:
    """The training loop; the losses and the tokens per second without the first step."""
    optimizer = torch.optim.AdamW(model.optim_parameters(), lr=options.lr, betas=(0.9, 0.95))
    warmup = max(1, options.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / options.steps)),
    )

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.optim_parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    losses: list[float] = []
    num_tokens = options.batch * options.seq
    started = time.perf_counter()
    bar = tqdm(range(options.steps), desc="training", unit="step", dynamic_ncols=True)
    for step in recorded(bar, model, options.timeline, options.steps):
        inputs, labels = next(data)
        loss = model.forward_backward(input_kwargs=inputs, label=labels, loss_fn=next_token_loss, loss_reduction="mean")
        model.step(update)  # runs in the background, while the next step is computed
        losses.append(float(loss))
        if step == 0:
            bar.write(model.partition_table() + "\n")
            started = time.perf_counter()
        tokens_per_s = step * num_tokens / max(time.perf_counter() - started, 1e-9)
        bar.set_postfix(loss=f"{losses[-1]:.3f}", tokens_per_s=f"{tokens_per_s:.0f}")
    model.synchronize()
    return losses, max(options.steps - 1, 0) * num_tokens / (time.perf_counter() - started)


def run(argv: list[str] | None) -> int:
    """Everything from the arguments to the sample; the exit code."""
    options = parse_arguments(argv)
    torch.manual_seed(options.seed)
    devices = parse_devices(options.devices)
    llm, tokenizer = byte_llama() if options.model is None else load_checkpoint(options.model)
    tokens = load_tokens(options.data, tokenizer, options.seq)
    llm.to(DTYPES.get(options.dtype, llm.dtype))
    plain_bytes = eager_bytes(llm, options.batch, options.seq)
    data = batches(tokens, options.batch, options.seq, options.seed)

    model = roundpipe.compile(
        llm.train(),
        example_kwargs=next(data)[0],
        devices=devices,
        model_run_config=roundpipe.RoundPipeRunConfig(
            num_microbatch=options.microbatches, recompute_grain=options.recompute
        ),
    )
    with model:
        if options.check and not agrees(model, llm, data, next_token_loss, options.lr):
            return 1
        losses, tokens_per_s = train(model, data, options)
        peak_bytes = model.peak_device_bytes()
        if options.save is not None:
            model.save_pretrained(options.save)
            tokenizer.save_pretrained(options.save)
        text = sample(model, tokenizer, tokens[:16], options.sample) if options.sample > 0 else None
    summary = {
        "first loss": f"{losses[0]:.3f}",
        "last loss": f"{sum(losses[-5:]) / len(losses[-5:]):.3f} (mean of the last {len(losses[-5:])})",
        "tokens per second": format_count(tokens_per_s),
        "peak device memory": format_bytes(peak_bytes),
        "plain PyTorch needs": f"{format_bytes(plain_bytes)} (weights, gradients, AdamW, activations)",
        "saved to": options.save,
        "timeline": options.timeline,
    }
    print(summary_table({name: str(value) for name, value in summary.items() if value is not None}))
    if text is not None:
        print("\n--- sample ---", text, sep="\n")
    return 0


def main(argv: list[str] | None = None) -> int:
    """The program; returns its exit code."""
    return command_line.main("finetune_llm.py", run, argv)


if __name__ == "__main__":
    raise SystemExit(main())
