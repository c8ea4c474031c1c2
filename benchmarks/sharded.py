"""Tokens per second of one row of `benchmarks/scaling.py` by FSDP2: the peer, one process per card.

Float32 weights and AdamW states in shards, bfloat16 compute, activation checkpointing, each block a unit. Each rank
has its part of the step's microbatches.

    torchrun --standalone --nproc-per-node 2 benchmarks/sharded.py 1.7b --json /tmp/fsdp2.json
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from decoders import DECODERS
from scaling import MICROBATCHES, NUM_STEPS, NUM_WARM, sizes_of
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def shard(model: nn.Module, device: torch.device) -> nn.Module:
    """Divides a model on ``meta`` among the ranks, and makes its shards on the device."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    for module in list(model.modules()):
        if type(module).__name__.endswith("DecoderLayer"):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local()  # type: ignore[operator]
            local.fill_(1.0) if parameter.ndim == 1 else local.uniform_(-0.02, 0.02)
        for buffer in model.buffers():
            buffer.copy_(1e6 ** -(torch.arange(buffer.numel(), device=device) / buffer.numel()))
    return model


def train(name: str, device: torch.device) -> dict[str, Any]:
    """Some steps; the same on all ranks."""
    model: Any = shard(DECODERS[name].build().to(torch.float32), device)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    batch, length = sizes_of(name)
    number = MICROBATCHES // dist.get_world_size()
    pieces = torch.randint(0, 1000, (number, batch // MICROBATCHES, length), device=device)

    def steps(count: int) -> float:
        since_s = time.perf_counter()
        for _ in range(count):
            for piece in pieces:
                (model(input_ids=piece, labels=piece).loss / number).backward()
            optimizer.step()
            optimizer.zero_grad()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        dist.barrier()
        return time.perf_counter() - since_s

    steps(NUM_WARM)
    seconds = steps(NUM_STEPS) / NUM_STEPS
    peak_bytes = torch.accelerator.max_memory_allocated() if device.type != "cpu" else 0
    return {"seconds": seconds, "tokens_per_s": batch * length / seconds, "peak_bytes": peak_bytes}


def main(arguments: Sequence[str] | None = None) -> None:
    """One rank of a row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=DECODERS)
    parser.add_argument("--number", type=int, help="of ranks; torchrun's is what counts")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    device = torch.device("cpu")
    if options.device != "cpu":
        device = torch.device(options.device, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    found = train(options.model, device)
    if dist.get_rank() == 0:
        options.json.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
