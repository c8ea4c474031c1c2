"""The loss curve of a long run, against plain PyTorch: the same to float32's rounding, step after step.

A byte-level Llama learns the standard library's source, twice on either side, from the same weights and batches:

    sync         every step sees the update before it; plain PyTorch is an ordinary loop
    async        step k trains on weights one update old; plain PyTorch is a loop that does so by hand
    tied         as sync, with the embedding tied to the head; in float32 and in float64
    tied_async   as async, likewise

The gradient of a tied embedding is a sum of two, and roundpipe adds up the head's over all microbatches, then the
embedding's, then both: another order than autograd's, which is rounding that AdamW makes grow from step to step. Plain
PyTorch does likewise here, with the head as a parameter of its own whose gradient it adds to the embedding's. Beside
it, without a target, the difference to plain PyTorch in its own order, and, as a yardstick, of that to itself with the
microbatches in reverse order.

Both sides split a batch into the same microbatches. Dropout is off, since draws are not eager's.

    python benchmarks/long_run.py --json benchmarks/results/long_run.json
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from environment import report
from torch import nn

import roundpipe

MAX_DIFFERENCE = 1e-4
MAX_DIFFERENCE_FLOAT64 = 1e-9
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
LEARNING_RATE = 1e-3
NUM_MICROBATCHES = 3
SOURCES = ("argparse.py", "ast.py", "datetime.py", "difflib.py", "inspect.py", "pathlib.py", "pickle.py", "typing.py")


@dataclass
class Curves:
    """Losses of both sides, step by step, and the seconds they took."""

    ours: list[float]
    plain: list[float]
    ours_s: float
    plain_s: float

    @property
    def difference(self) -> float:
        """The largest difference of a step's losses, relative to plain PyTorch's."""
        return max(abs(ours - plain) / abs(plain) for ours, plain in zip(self.ours, self.plain, strict=True))


def standard_library() -> torch.Tensor:
    """Bytes of some of the standard library's modules, `[N]`."""
    folder = Path(os.__file__).parent
    texts = [path.read_bytes() for path in (folder / name for name in SOURCES) if path.is_file()]
    return torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8).long()


def make_batches(num_steps: int, batch: int, length: int) -> list[torch.Tensor]:
    """Random windows of the text, one `[B, S]` per step."""
    text = standard_library()
    starts = torch.randint(len(text) - length, (num_steps, batch, 1))
    return [text[start + torch.arange(length)] for start in starts]


@dataclass(frozen=True)
class Mode:
    """What is compared."""

    is_async: bool
    tied: bool
    dtype: torch.dtype
    target: float
    """Largest relative difference of a step's losses that is allowed."""


MODES = {
    "sync": Mode(False, False, torch.float32, MAX_DIFFERENCE),
    "async": Mode(True, False, torch.float32, MAX_DIFFERENCE),
    "tied": Mode(False, True, torch.float32, MAX_DIFFERENCE),
    "tied_async": Mode(True, True, torch.float32, MAX_DIFFERENCE),
    "tied_float64": Mode(False, True, torch.float64, MAX_DIFFERENCE_FLOAT64),
    "tied_async_float64": Mode(True, True, torch.float64, MAX_DIFFERENCE_FLOAT64),
}


def byte_llama(mode: Mode) -> nn.Module:
    """A small Llama over bytes, with random weights."""
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=mode.tied,
    )
    return transformers.LlamaForCausalLM(config).to(mode.dtype)


def loss_function(outputs: Any, ids: torch.Tensor) -> torch.Tensor:
    """Next-byte cross entropy, a microbatch's share of the batch's mean."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, ids[:, 1:].flatten()) / NUM_MICROBATCHES


def plain_backward(model: nn.Module, ids: torch.Tensor, reverse: bool = False) -> float:
    """Forward and backward of every microbatch in turn; the sum of their losses."""
    total = torch.zeros(())
    pieces = torch.tensor_split(ids, NUM_MICROBATCHES)
    for piece in reversed(pieces) if reverse else pieces:
        loss = loss_function(model(input_ids=piece, use_cache=False), piece)
        loss.backward()
        total = total + loss.detach()
    return float(total)


class Plain:
    """A model and the parameters to train; ``in_our_order``: tied ones are two whose gradients are added."""

    def __init__(self, model: nn.Module, in_our_order: bool) -> None:
        parameters = dict(model.named_parameters())
        self.model = model
        self.parameters = list(parameters.values())
        self.embedding = parameters[EMBEDDING]
        self.head: nn.Parameter | None = None
        if in_our_order and HEAD not in parameters:
            self.head = nn.Parameter(self.embedding.detach().clone())
            model.get_submodule(HEAD.rpartition(".")[0]).weight = self.head

    def backward(self, ids: torch.Tensor, reverse: bool) -> float:
        """Forward and backward of every microbatch in turn; the sum of their losses."""
        loss = plain_backward(self.model, ids, reverse)
        if self.head is not None:
            assert self.head.grad is not None and self.embedding.grad is not None
            self.embedding.grad = self.head.grad + self.embedding.grad
            self.head.grad = None
        return loss

    @torch.no_grad()
    def tie(self) -> None:
        """To be called when the weights have changed."""
        if self.head is not None:
            self.head.copy_(self.embedding)


def plain_sync(plain: Plain, batches: list[torch.Tensor], reverse: bool = False) -> list[float]:
    """An ordinary training loop."""
    optimizer = torch.optim.AdamW(plain.parameters, lr=LEARNING_RATE)
    losses = []
    for ids in batches:
        losses.append(plain.backward(ids, reverse))
        optimizer.step()
        optimizer.zero_grad()
        plain.tie()
    return losses


def plain_async(plain: Plain, batches: list[torch.Tensor], reverse: bool = False) -> list[float]:
    """A loop in which gradients are those of the weights one update ago."""
    latest = [nn.Parameter(parameter.detach().clone()) for parameter in plain.parameters]
    optimizer = torch.optim.AdamW(latest, lr=LEARNING_RATE)
    losses = []
    for ids in batches:
        losses.append(plain.backward(ids, reverse))
        with torch.no_grad():
            for parameter, newest in zip(plain.parameters, latest, strict=True):
                newest.grad, parameter.grad = parameter.grad, None
                parameter.copy_(newest)
        plain.tie()
        optimizer.step()
    return losses


def ours(net: nn.Module, batches: list[torch.Tensor], is_async: bool, num_workers: int) -> list[float]:
    """The same batches through roundpipe."""
    config = roundpipe.RoundPipeRunConfig(num_microbatch=NUM_MICROBATCHES)
    with roundpipe.compile(net, devices=["cpu"] * num_workers, name="llama", model_run_config=config) as model:
        optimizer = torch.optim.AdamW(model.optim_parameters(), lr=LEARNING_RATE)

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        losses = []
        for ids in batches:
            arguments = {"input_ids": ids, "use_cache": False}
            loss = model.forward_backward(input_kwargs=arguments, label=ids, loss_fn=loss_function)
            model.step(update, is_async=is_async)
            losses.append(float(loss))
        model.synchronize()
    return losses


def timed(run: Callable[[], list[float]]) -> tuple[list[float], float]:
    """Losses, and the seconds they took."""
    started_s = time.perf_counter()
    return run(), time.perf_counter() - started_s


def compare(mode: Mode, batches: list[torch.Tensor], num_workers: int) -> tuple[Curves, dict[str, float]]:
    """Both sides from the same weights; with tied weights, also what other orders of summation do."""
    net = byte_llama(mode)
    references = [copy.deepcopy(net) for _ in range(3)]
    run = plain_async if mode.is_async else plain_sync
    of_plain, plain_s = timed(lambda: run(Plain(references[0], in_our_order=True), batches))
    of_ours, ours_s = timed(lambda: ours(net, batches, mode.is_async, num_workers))
    curves = Curves(of_ours, of_plain, ours_s, plain_s)
    if not mode.tied:
        return curves, {}
    own, backwards = (
        run(Plain(one, in_our_order=False), batches, reverse)
        for one, reverse in zip(references[1:], (False, True), strict=True)
    )
    return curves, {
        "difference_to_own_order": Curves(of_ours, own, 0.0, 0.0).difference,
        "yardstick": Curves(backwards, own, 0.0, 0.0).difference,
    }


def main(argv: list[str] | None = None) -> int:
    """Runs the modes; 1 if a loss differs by more than its target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=6)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    results: dict[str, Any] = {"steps": options.steps, "workers": options.workers}
    failed = False
    for name in options.modes:
        mode = MODES[name]
        torch.manual_seed(0)
        batches = make_batches(options.steps, options.batch, options.length)
        curves, others = compare(mode, batches, options.workers)
        ratio = curves.ours_s / curves.plain_s
        results[name] = (
            asdict(curves) | others | {"difference": curves.difference, "ratio": ratio, "target": mode.target}
        )
        failed = failed or not curves.difference <= mode.target
        print(
            f"{name:18} loss {curves.ours[0]:.4f} -> {curves.ours[-1]:.4f}, largest relative difference "
            f"{curves.difference:.2e} (at most {mode.target:.0e}), {curves.ours_s:.1f} s, plain PyTorch "
            f"{curves.plain_s:.1f} s: ratio {ratio:.2f}",
            flush=True,
        )
        if others:
            print(
                f"{name:18} to plain PyTorch in its own order {others['difference_to_own_order']:.2e}, of that to "
                f"itself with microbatches reversed {others['yardstick']:.2e}",
                flush=True,
            )
    report(options.json, results)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
