"""Whether a model trains within a hard cap of device memory: peak, seconds and tokens per second of each step alone.

Qwen3's shapes with random weights and its vocabulary of 151,936, in bfloat16, with AdamW in float32:

    plain-1.7b, plain-3.6b    blocks in a Sequential; cross-entropy of the logits in float32, in ``loss_fn``
    qwen3-1.7b                transformers' model, which computes its loss itself
    qwen3-8b-lora             the same of 8 B with LoRA 16 on every linear layer

    python benchmarks/fits.py plain-3.6b --cap 24 --batch 32 --microbatches 8
    python benchmarks/fits.py qwen3-8b-lora --cap 24 --length 131072 --grain layer --json benchmarks/results/fits.json
    python benchmarks/fits.py qwen3-8b-lora --cap all --length longest --grain layer --steps 1 --seconds 900
    python benchmarks/fits.py plain-1.7b --device cpu --small --length 64

A cap is the process's share of an accelerator, as torch's allocator holds it; a CPU worker has a ledger. The longest
sequence is that of ``python -m roundpipe plan --max-length`` for the device and the host as they are. While it runs,
lines say what it has of both; with ``--seconds`` it ends by then and writes what it has, with exit code 3.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from decoders import NOISE, VOCABULARY, fill
from environment import report
from fits_longest import LengthPlan, host_bytes, told
from fits_watch import Watch
from memory import capped, card
from torch import nn

import roundpipe
from roundpipe.tools.problem import Training


@dataclass(frozen=True)
class Shape:
    """Of a decoder."""

    width: int
    inner: int
    heads: int
    depth: int


SHAPES = {"1.7b": Shape(2048, 6144, 16, 28), "3.6b": Shape(2560, 9728, 20, 36), "8b": Shape(4096, 12288, 32, 36)}
SMALL = Shape(64, 96, 2, 2)
CASES = ("plain-1.7b", "plain-3.6b", "qwen3-1.7b", "qwen3-8b-lora")


class Block(nn.Module):
    """Pre-norm attention and a gated MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, inner = shape.width, shape.inner
        self.heads = shape.heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](value)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        value = value + self.out(mixed.transpose(1, 2).flatten(2))
        normal = self.norms[1](value)
        return value + self.down(F.silu(self.gate(normal)) * self.up(normal))


def build(case: str, shape: Shape, vocabulary: int) -> nn.Module:
    """A model with random weights in bfloat16, on the host."""
    with torch.device("meta"):
        if case.startswith("plain"):
            blocks = [Block(shape) for _ in range(shape.depth)]
            head = nn.Linear(shape.width, vocabulary, bias=False)
            model: nn.Module = nn.Sequential(
                nn.Embedding(vocabulary, shape.width), *blocks, nn.RMSNorm(shape.width), head
            )
        else:
            model = qwen3(shape, vocabulary, lora=case.endswith("lora"))
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    fill(model, NOISE if vocabulary == VOCABULARY else 1009)
    return model


def qwen3(shape: Shape, vocabulary: int, *, lora: bool) -> nn.Module:
    """Transformers' model on the device that is set."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.depth,
        num_attention_heads=shape.heads,
        num_key_value_heads=max(shape.heads // 4, 1),
        head_dim=128,
        max_position_embeddings=1 << 20,
        tie_word_embeddings=not lora,
        use_cache=False,
    )
    model = Qwen3ForCausalLM(config)
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))


def train(pipe: roundpipe.RoundPipe, case: str, ids: torch.Tensor) -> float:
    """One call; the loss."""
    if case.startswith("plain"):
        found = pipe.forward_backward(
            (ids,),
            label=ids,
            loss_fn=lambda logits, label: F.cross_entropy(logits.float().flatten(0, 1), label.flatten()),
        )
    else:
        found = pipe.forward_backward(
            input_kwargs={"input_ids": ids, "labels": ids}, loss_fn=lambda outputs, _: outputs.loss
        )
    return float(found)


def retries(device: str) -> int:
    """How often the allocator had to give memory back and ask anew, which stops the device each time."""
    return 0 if device == "cpu" else torch.accelerator.memory_stats(device).get("num_alloc_retries", 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains the case for some steps; 1 if it does not fit."""
    options = _parser().parse_args(arguments)
    torch.manual_seed(0)
    results: dict[str, Any] = {"steps": []}

    def write() -> None:
        report(options.json, {**results, **watch.results()})

    with Watch(options.device, options.every, options.seconds, write) as watch:
        _run(options, results, watch)
    write()
    return int("error" in results)


def _run(options: argparse.Namespace, results: dict[str, Any], watch: Watch) -> None:
    """What ``main`` does beneath the watch; ``results`` always are what is known so far."""
    shape, vocabulary = SHAPES[options.case.split("-")[1]], VOCABULARY
    if options.small:
        shape, vocabulary = SMALL, 1000
    model, device = build(options.case, shape, vocabulary), capped(options.device, options.cap, options.small)
    if options.budget is not None:
        device = replace(device, memory_bytes=int(options.budget * 1e9))
    results["card"] = card(options.device)
    print(f"{watch.sample()}, with the model", flush=True)
    if options.length == "longest" or options.needs:
        given = int(options.host * 1e9) if options.host is not None else host_bytes(model)
        plan = LengthPlan(model, device, Training(1, 1, recompute_grain=options.grain), given)
        results["needs"] = [plan.needs(length) for length in options.needs]
        print(*map(told, results["needs"]), sep="\n", flush=True)
        if options.length == "longest":
            found = plan.longest()
            options.length = results["longest"] = found.size
            results["limit"] = found.limit
            results["needs"].append(plan.needs(found.size))
            print(f"the longest: {found}", told(results["needs"][-1]), sep="\n", flush=True)
    ids = torch.randint(0, vocabulary, (options.batch, int(options.length)))
    config = roundpipe.RoundPipeRunConfig(num_microbatch=options.microbatches, recompute_grain=options.grain)
    with roundpipe.compile(model, devices=[device], model_run_config=config, name=options.case) as pipe:
        optimizer = torch.optim.AdamW(pipe.optim_parameters(), lr=1e-5, fused=True)
        for _ in range(options.steps):
            begun_s = time.perf_counter()
            try:
                loss = train(pipe, options.case, ids)
            except (roundpipe.DeviceMemoryError, roundpipe.HostMemoryError) as error:
                results["error"] = str(error)
                print(error)
                break
            pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()))
            pipe.synchronize()  # a call returns with its loss, and a backward goes on
            seconds = time.perf_counter() - begun_s
            peak_bytes, num_retries = pipe.peak_device_bytes(reset=True), retries(options.device)
            results["steps"].append(
                {"loss": loss, "seconds": seconds, "peak_bytes": peak_bytes, "num_retries": num_retries}
            )
            watch.sample()
            speed = f"{seconds:8.2f} s, {ids.numel() / seconds:10,.0f} tokens/s"
            print(
                f"loss {loss:10.4f}, {speed}, peak {peak_bytes / 1e9:7.3f} GB, {num_retries} retries so far", flush=True
            )
        results["tables"] = [str(pipe.partition_table()), str(pipe.report())]
        print(*results["tables"], sep="\n\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--cap", default="24", help="in GB, or all")
    parser.add_argument("--budget", type=float, help="GB of the device that plans may use; default: all that is there")
    parser.add_argument("--length", type=_length, default=2048, help="tokens of a sequence, or: longest")
    parser.add_argument("--needs", type=int, nargs="*", default=[], help="lengths of which to say what they need")
    parser.add_argument("--host", type=float, help="GB of the host to plan with; default: what it has left")
    parser.add_argument("--batch", type=int, default=1, help="sequences in a step")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--grain", choices=("stage", "layer"), default="stage", help="of recomputation")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, help="after which it ends and writes what it has; default: no limit")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between lines of progress")
    parser.add_argument("--small", action="store_true", help="a small model, to try the script")
    parser.add_argument("--json", type=Path)
    return parser


def _length(text: str) -> int | str:
    return text if text == "longest" else int(text)


if __name__ == "__main__":
    raise SystemExit(main())
