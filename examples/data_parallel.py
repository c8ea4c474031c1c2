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
from command_line import Parser, Refused, parse_devices
from distributed_pipeline import llama, next_token_loss
from finetune_llm import batches, byte_tokenizer, load_tokens

import roundpipe

CHECK_TOLERANCE = 1e-4
SAVE_EVERY = 10


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The options, checked."""
    parser = Parser(__doc__)
    parser.add_argument("--data", type=Path, metavar="FILE", help="UTF-8 text to train on")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=15, help="sequences per step, of all ranks together")
    parser.add_argument("--seq", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument(
        "--shard", action="store_true", help="each rank keeps and updates a part of the optimizer's side"
    )
    parser.add_argument("--check", action="store_true", help="compare losses with one process; steps then wait")
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
        for step, batch in zip(range(options.steps), data, strict=False):
            if step < first:
                continue
            part = batch.tensor_split(num_ranks)[rank]
            loss = pipe.forward_backward(
                input_kwargs={"input_ids": part[:, :-1]},
                label=part[:, 1:],
                loss_fn=lambda outputs, labels: next_token_loss(outputs.logits, labels),
                loss_reduction="mean",
            )
            pipe.step(update, is_async=not options.check)
            losses.append(float(loss) * len(part) / len(batch))
            if rank == 0 and (step % 10 == 0 or step == options.steps - 1):
                print(f"step {step:4d}  loss of rank 0 {float(loss):.4f}", flush=True)
            if options.checkpoint is not None and (step + 1) % SAVE_EVERY == 0:
                pipe.save_checkpoint(options.checkpoint, optimizer, step=step + 1)
        pipe.synchronize()
    of_all = torch.tensor(losses)
    dist.all_reduce(of_all)
    return of_all.tolist()


def train_in_one_process(options: argparse.Namespace, tokens: torch.Tensor, model: torch.nn.Module) -> list[float]:
    """Losses of the same steps, in plain PyTorch."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=options.lr)
    losses = []
    for _, batch in zip(range(options.steps), batches(tokens, options.batch, options.seq, options.seed), strict=False):
        loss = next_token_loss(model(input_ids=batch[:, :-1]).logits, batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def run(argv: list[str] | None) -> int:
    """Trains on this rank."""
    options = parse_arguments(argv)
    tokenizer = byte_tokenizer()
    tokens = load_tokens(options.data, tokenizer, options.seq)
    dist.init_process_group("gloo")
    try:
        torch.manual_seed(options.seed)
        model = llama(len(tokenizer))
        plain = copy.deepcopy(model) if options.check and dist.get_rank() == 0 else None
        losses = train(options, tokens, model)
        if plain is not None:
            expected = train_in_one_process(options, tokens, plain)
            worst = max(abs(loss - other) for loss, other in zip(losses, expected, strict=True))
            print(f"losses differ from one process by at most {worst:.1e}")
            if not worst <= CHECK_TOLERANCE:
                raise Refused(f"the check failed: the tolerance is {CHECK_TOLERANCE:.0e}")
    finally:
        dist.destroy_process_group()
    return 0


def main(argv: list[str] | None = None) -> int:
    """The exit code."""
    return command_line.main("data_parallel.py", run, argv)


if __name__ == "__main__":
    sys.exit(main())
