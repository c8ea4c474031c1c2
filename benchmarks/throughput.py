"""Tokens per second of a language model on an accelerator, against plain PyTorch on the same device.

Four ways to train the same model on the same batches, one after the other in one process:

    plain          weights, gradients and AdamW on the device, gradients accumulated over microbatches
    checkpointed   the same with activation checkpointing in every block
    roundpipe      weights, gradients and AdamW on the host, all of the device's memory for stages
    budget         the same within ``--budget`` GB, as on a smaller card

Plain trains bfloat16 weights with bfloat16 AdamW states; roundpipe keeps float32 copies on the host, one step behind.
With several numbers of devices the last two ways run on each of them, on the same batches; plain stays on one. One
more way, ``alone``, is ``roundpipe`` without stages that several devices share, to see what those gain.

    python benchmarks/throughput.py --json benchmarks/results/throughput.json
    python benchmarks/throughput.py --num-devices 1,2,4 --ways plain,roundpipe
    python benchmarks/throughput.py --num-devices 1,2 --ways plain,roundpipe,alone --microbatches 16
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from environment import report
from torch import nn

import roundpipe

SIZES = {
    "0.1b": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 8},
    "1b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_attention_heads": 16},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
}


def build(size: str) -> nn.Module:
    """A Llama with random weights in bfloat16, on the host."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000, num_key_value_heads=8, max_position_embeddings=8192, use_cache=False, **SIZES[size]
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def timed(step: Callable[[], Any], finish: Callable[[], Any], num_warmups: int, num_steps: int) -> float:
    """Mean seconds of a step, after some to warm up."""
    for _ in range(num_warmups):
        step()
    finish()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    finish()
    return (time.perf_counter() - start) / num_steps


def plain(model: nn.Module, ids: torch.Tensor, options: argparse.Namespace, checkpointed: bool) -> dict[str, Any]:
    """Gradient accumulation on one device."""
    model = model.to(options.device)
    if checkpointed:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    torch.accelerator.reset_peak_memory_stats()
    losses: list[torch.Tensor] = []

    def step() -> None:
        for piece in ids.to(options.device).chunk(options.microbatches):
            loss = model(input_ids=piece, labels=piece).loss / options.microbatches
            loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()

    seconds = timed(step, torch.accelerator.synchronize, options.warmups, options.steps)
    peak_bytes = torch.accelerator.max_memory_allocated()
    return {"seconds": seconds, "tokens_per_s": ids.numel() / seconds, "peak_device_bytes": peak_bytes}


def rotated(
    model: nn.Module, ids: torch.Tensor, options: argparse.Namespace, way: str, num_devices: int
) -> dict[str, Any]:
    """Stages in rotation, the optimizer on the host."""
    budget = int(options.budget * 1e9) if way == "budget" else None
    kind = torch.device(options.device).type
    names = [options.device] if num_devices == 1 else [f"{kind}:{index}" for index in range(num_devices)]
    devices = [roundpipe.Device(name, memory_bytes=budget) for name in names]
    replicas: Any = "off" if way == "alone" else "auto"
    config = roundpipe.RoundPipeRunConfig(num_microbatch=options.microbatches, replicas=replicas)
    start = time.perf_counter()
    with roundpipe.compile(
        model, devices=devices, model_run_config=config, optim_dtype=torch.float32, name="llama"
    ) as pipe:
        optimizer = torch.optim.AdamW(pipe.optim_parameters(), lr=1e-5, fused=True)
        update_s: list[float] = []

        def update() -> None:
            begin = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            update_s.append(time.perf_counter() - begin)

        def step() -> None:
            pipe.forward_backward(
                input_kwargs={"input_ids": ids, "labels": ids},
                loss_fn=lambda outputs, _: outputs.loss / options.microbatches,
            )
            pipe.step(update)

        step()
        first_s = time.perf_counter() - start
        step()  # what layers leave behind is known by now, so that devices may share stages
        pipe.peak_device_bytes(reset=True)
        seconds = timed(step, pipe.synchronize, options.warmups, options.steps)
        print(pipe.partition_table())
        found = pipe.report()
        return {
            "seconds": seconds,
            "stages": ", ".join(found.stages),
            "predicted": None if found.predicted is None else found.predicted.round_s,
            "tokens_per_s": ids.numel() / seconds,
            "peak_device_bytes": pipe.peak_device_bytes(),
            "update_s": sum(update_s) / len(update_s),
            "first_step_s": first_s,
        }


def main() -> None:
    """Runs the four ways and writes their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=64, help="sequences per step")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--warmups", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--budget", type=float, default=24, help="GB of the smaller card")
    parser.add_argument("--num-devices", default="1", help="numbers of devices, such as 1,2,4")
    parser.add_argument("--ways", default="plain,checkpointed,roundpipe,budget")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    ids = torch.randint(0, 32000, (options.batch, options.seq))
    results: dict[str, Any] = {"options": {k: v for k, v in vars(options).items() if k != "json"}}
    numbers = [int(number) for number in options.num_devices.split(",")]
    runs = [
        (way, way if number == 1 else f"{way}_x{number}", number)
        for way in options.ways.split(",")
        for number in ([1] if way in ("plain", "checkpointed") else numbers)
    ]
    for way, name, number in runs:
        model = build(options.size)
        results["num_parameters"] = sum(parameter.numel() for parameter in model.parameters())
        if way in ("plain", "checkpointed"):
            found = plain(model, ids, options, checkpointed=way == "checkpointed")
        else:
            found = rotated(model, ids, options, way, number)
        results[name] = found
        print(
            f"{name:13} {found['tokens_per_s']:,.0f} tokens/s, {found['seconds']:.2f} s per step, "
            f"peak {found['peak_device_bytes'] / 1e9:.1f} GB on the device",
            {key: round(value, 2) for key, value in found.items() if key.endswith("_s") and key != "tokens_per_s"},
            flush=True,
        )
        del model
        gc.collect()
        torch.accelerator.empty_cache()
    for way, name, number in runs:
        for base in ("plain", "checkpointed"):
            if way not in ("plain", "checkpointed") and base in results:
                ratio = results[name]["tokens_per_s"] / (number * results[base]["tokens_per_s"])
                results[f"{name}_to_{base}"] = ratio
                print(f"{name}, per device, to {base}: {ratio:.3f}")
    report(options.json, results)


if __name__ == "__main__":
    main()
