"""Train a small Llama over several processes, with torch's own pipeline schedule.

Every process is a rank of ``torch.distributed``, and holds one stage of the model. The model is built from its config
on each rank, without memory for its weights; rank 0 writes random ones to a file, of which each rank reads its own.

    torchrun --nproc-per-node 4 examples/distributed_pipeline.py
    torchrun --nproc-per-node 4 examples/distributed_pipeline.py --check --steps 5
    torchrun --nproc-per-node 4 examples/distributed_pipeline.py --data notes.txt --save trained

With as many GPUs as processes on each host, each rank takes one and NCCL connects them; otherwise gloo on the CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import command_line
import torch
import torch.distributed as dist
import transformers
from language import batches, byte_tokenizer, load_tokens, next_token_loss
from ranks import compare, llama, options_of
from torch.distributed.pipelining import Schedule1F1B

import roundpipe


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The options, checked."""
    parser = options_of(__doc__, batch=16)
    parser.add_argument("--save", type=Path, metavar="DIR", help="write the weights of all ranks there")
    options = parser.parse_args(argv)
    parser.require_positive(options, "steps", "batch", "seq", "microbatches")
    options.microbatches = options.microbatches or 2 * int(os.environ.get("WORLD_SIZE", "1"))
    if options.batch % options.microbatches:
        parser.error(f"--batch {options.batch} is not a multiple of --microbatches {options.microbatches}")
    if options.devices is not None or options.timeline is not None:
        parser.error("--devices and --timeline are for examples in one process")
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node 4 examples/distributed_pipeline.py")
    return options


@contextmanager
def process_group() -> Iterator[torch.device]:
    """The ranks that torchrun started, connected; this rank's device."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    has_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= num_local
    device = torch.device("cuda", local_rank) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpus else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def first_weights(seed: int) -> Path:
    """A folder with the weights that training begins with, made by rank 0."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    if dist.get_rank() == 0:
        torch.manual_seed(seed)
        llama().save_pretrained(folder[0])
    dist.broadcast_object_list(folder)
    return Path(folder[0])


def train(options: argparse.Namespace, tokens: torch.Tensor, weights: Path, device: torch.device) -> list[float]:
    """Losses of all steps, on the rank of the last stage; empty elsewhere."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    with roundpipe.distributed.parameters_on_meta():
        model = llama()
    example = torch.zeros(options.batch // options.microbatches, options.seq, dtype=torch.long)
    stage = roundpipe.distributed.pipeline_stage(
        model, rank, num_ranks, device, example_kwargs={"input_ids": example}, weights=weights
    )
    schedule = Schedule1F1B(
        stage,
        options.microbatches,
        loss_fn=lambda tensors, labels: next_token_loss(roundpipe.distributed.model_outputs(stage, tensors), labels),
    )
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=options.lr)
    history = []
    data = batches(tokens, options.batch, options.seq, options.seed)
    for step, (given, following) in zip(range(options.steps), data, strict=False):
        inputs = {"input_ids": given["input_ids"].to(device)} if stage.is_first else {}
        labels = following.to(device) if stage.is_last else None
        losses: list[torch.Tensor] = []
        schedule.step(**inputs, target=labels, losses=losses, return_outputs=False)
        roundpipe.distributed.sum_tied_gradients(stage)
        optimizer.step()
        optimizer.zero_grad()
        if stage.is_last:
            history.append(float(torch.stack(losses).detach().mean()))
            if step % 10 == 0 or step == options.steps - 1:
                print(f"step {step:4d}  loss {history[-1]:.4f}", flush=True)
    if options.save is not None:
        roundpipe.distributed.save_stages(stage, options.save)
    return history


def run(argv: list[str] | None) -> int:
    """Trains on this rank."""
    options = parse_arguments(argv)
    tokens = load_tokens(options.data, byte_tokenizer(), options.seq)
    with process_group() as device:
        weights = first_weights(options.seed)
        history = train(options, tokens, weights, device)
        if options.check and history:
            compare(options, tokens, transformers.LlamaForCausalLM.from_pretrained(weights), history)
    return 0


def main(argv: list[str] | None = None) -> int:
    """The exit code."""
    return command_line.main("distributed_pipeline.py", run, argv)


if __name__ == "__main__":
    sys.exit(main())
