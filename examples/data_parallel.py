r"""Train a small Llama over several processes, each on its own part of every batch.

Every process is a rank of ``torch.distributed``, usually one per host. It holds the whole model in host memory and
rotates it through its own devices; the ranks average their gradients at each step.

    torchrun --nproc-per-node 2 examples/data_parallel.py
    torchrun --nproc-per-node 2 examples/data_parallel.py --check --steps 5
    torchrun --nproc-per-node 2 examples/data_parallel.py --shard --check --steps 5
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 \
        torchrun --nproc-per-node 2 --max-restarts 3 examples/data_parallel.py --checkpoint trained

GPUs of a host are dealt out to the ranks on it; without, each rank has two workers on the CPU.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from pathlib import Path

import command_line
import torch
import torch.distributed as dist
from command_line import parse_devices
from language import batches, byte_tokenizer, load_tokens, next_token_loss
from ranks import compare, llama, options_of

import roundpipe

SAVE_EVERY = 10


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The options, checked."""
    parser = options_of(__doc__, batch=15)
    parser.add_argument(
        "--shard", action="store_true", help="each rank keeps and updates a part of the optimizer's side"
    )
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help=f"go on from it; saved every {SAVE_EVERY} steps")
    options = parser.parse_args(argv)
    parser.require_positive(options, "steps", "batch", "seq", "microbatches")
    if options.timeline is not None:
        parser.error("--timeline is for examples in one process")
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node 2 examples/data_parallel.py")
    if options.batch < int(os.environ["WORLD_SIZE"]):
        parser.error(f"--batch {options.batch} is less than one sequence for each rank")
    if options.check and options.checkpoint is not None:
        parser.error("--check trains from the start; leave --checkpoint out")
    return options


def devices_of_this_rank(options: argparse.Namespace) -> list[roundpipe.Device]:
    """Those given, or this rank's part of the host's GPUs."""
    if options.devices is None and torch.cuda.is_available():
        local_rank, num_local = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        own = range(local_rank, torch.cuda.device_count(), num_local)
        return [roundpipe.Device(f"cuda:{index}") for index in own or [local_rank % torch.cuda.device_count()]]
    return parse_devices(options.devices or "cpu,cpu") or []


def train(options: argparse.Namespace, tokens: torch.Tensor, model: torch.nn.Module) -> list[float]:
    """Train the model on this rank's part of every batch; losses of the whole batches."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    config = roundpipe.RoundPipeRunConfig(num_microbatch=options.microbatches)
    with roundpipe.compile(
        model,
        devices=devices_of_this_rank(options),
        model_run_config=config,
        process_group="world",
        shard_optimizer=options.shard,
    ) as pipe:
        optimizer = torch.optim.AdamW(pipe.optim_parameters(), lr=options.lr)
        first, losses = 0, []
        if options.checkpoint is not None and options.checkpoint.exists():
            first = pipe.load_checkpoint(options.checkpoint, optimizer).step or 0

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        data = batches(tokens, options.batch, options.seq, options.seed)
        for step, (inputs, labels) in zip(range(options.steps), data, strict=False):
            if step < first:
                continue
            ids, own = (whole.tensor_split(num_ranks)[rank] for whole in (inputs["input_ids"], labels))
            loss = pipe.forward_backward(
                input_kwargs={**inputs, "input_ids": ids}, label=own, loss_fn=next_token_loss, loss_reduction="mean"
            )
            pipe.step(update, is_async=not options.check)
            losses.append(float(loss) * len(own) / len(labels))
            if rank == 0 and (step % 10 == 0 or step == options.steps - 1):
                print(f"step {step:4d}  loss of rank 0 {float(loss):.4f}", flush=True)
            if options.checkpoint is not None and (step + 1) % SAVE_EVERY == 0:
                pipe.save_checkpoint(options.checkpoint, optimizer, step=step + 1)
        pipe.synchronize()
    of_all = torch.tensor(losses)
    dist.all_reduce(of_all)
    return of_all.tolist()


def run(argv: list[str] | None) -> int:
    """Trains on this rank."""
    options = parse_arguments(argv)
    tokens = load_tokens(options.data, byte_tokenizer(), options.seq)
    dist.init_process_group("gloo")
    try:
        torch.manual_seed(options.seed)
        model = llama()
        plain = copy.deepcopy(model) if options.check and dist.get_rank() == 0 else None
        losses = train(options, tokens, model)
        if plain is not None:
            compare(options, tokens, plain, losses)
    finally:
        dist.destroy_process_group()
    return 0


def main(argv: list[str] | None = None) -> int:
    """The exit code."""
    return command_line.main("data_parallel.py", run, argv)


if __name__ == "__main__":
    sys.exit(main())
