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
import torch.nn.functional as F
import transformers
from command_line import Parser, Refused
from finetune_llm import batches, byte_tokenizer, load_tokens
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

import roundpipe

CHECK_TOLERANCE = 1e-4


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The options, checked."""
    parser = Parser(__doc__)
    parser.add_argument("--data", type=Path, metavar="FILE", help="UTF-8 text to train on")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=16, help="sequences per step")
    parser.add_argument("--seq", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--check", action="store_true", help="compare losses with one process at the end")
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


def llama(vocabulary: int) -> nn.Module:
    """A small Llama with random weights."""
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=6,
        num_attention_heads=4,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of logits `[B, S, V]` and labels `[B, S]`."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def first_weights(vocabulary: int, seed: int) -> Path:
    """A folder with the weights that training begins with, made by rank 0."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    if dist.get_rank() == 0:
        torch.manual_seed(seed)
        llama(vocabulary).save_pretrained(folder[0])
    dist.broadcast_object_list(folder)
    return Path(folder[0])


def train(options: argparse.Namespace, tokens: torch.Tensor, weights: Path, device: torch.device) -> list[float]:
    """Losses of all steps, on the rank of the last stage; empty elsewhere."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    with roundpipe.distributed.parameters_on_meta():
        model = llama(len(byte_tokenizer()))
    example = torch.zeros(options.batch // options.microbatches, options.seq, dtype=torch.long)
    stage = roundpipe.distributed.pipeline_stage(
        model, rank, num_ranks, device, example_kwargs={"input_ids": example}, weights=weights
    )
    schedule = Schedule1F1B(
        stage,
        options.microbatches,
        loss_fn=lambda tensors, labels: next_token_loss(
            roundpipe.distributed.model_outputs(stage, tensors).logits, labels
        ),
    )
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=options.lr)
    history = []
    for step, batch in zip(
        range(options.steps), batches(tokens, options.batch, options.seq, options.seed), strict=False
    ):
        inputs = {"input_ids": batch[:, :-1].to(device)} if stage.is_first else {}
        labels = batch[:, 1:].to(device) if stage.is_last else None
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


def train_in_one_process(options: argparse.Namespace, tokens: torch.Tensor, weights: Path) -> list[float]:
    """Losses of the same steps, in plain PyTorch."""
    model = transformers.LlamaForCausalLM.from_pretrained(weights).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    history = []
    for _, batch in zip(range(options.steps), batches(tokens, options.batch, options.seq, options.seed), strict=False):
        loss = next_token_loss(model(input_ids=batch[:, :-1]).logits, batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(float(loss.detach()))
    return history


def run(argv: list[str] | None) -> int:
    """Trains on this rank."""
    options = parse_arguments(argv)
    tokenizer = byte_tokenizer()
    tokens = load_tokens(options.data, tokenizer, options.seq)
    with process_group() as device:
        weights = first_weights(len(tokenizer), options.seed)
        history = train(options, tokens, weights, device)
        if options.check and history:
            expected = train_in_one_process(options, tokens, weights)
            worst = max(abs(loss - other) for loss, other in zip(history, expected, strict=True))
            print(f"losses differ from one process by at most {worst:.1e}")
            if worst > CHECK_TOLERANCE:
                raise Refused(f"the check failed: the tolerance is {CHECK_TOLERANCE:.0e}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """The exit code."""
    return command_line.main("distributed_pipeline.py", run, argv)


if __name__ == "__main__":
    sys.exit(main())
