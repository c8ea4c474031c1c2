"""The loss curve of a long run, against plain PyTorch: the same to float32's rounding, step after step.

A byte-level Llama learns the standard library's source, twice on either side, from the same weights and batches:

    sync     every step sees the update before it; plain PyTorch is an ordinary loop
    async    step k trains on weights one update old; plain PyTorch is a loop that does so by hand
    tied     as sync, with the embedding tied to the head. Its gradient is summed in another order (the head's over
             all microbatches, then the embedding's), and AdamW makes the rounding grow from step to step: no
             target, but as a yardstick plain PyTorch against itself with the microbatches in reverse order

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


def byte_llama(tied: bool) -> nn.Module:
    """A small Llama over bytes, with random weights."""
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


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


def plain_sync(model: nn.Module, batches: list[torch.Tensor], reverse: bool = False) -> list[float]:
    """An ordinary training loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for ids in batches:
        losses.append(plain_backward(model, ids, reverse))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def plain_async(model: nn.Module, batches: list[torch.Tensor]) -> list[float]:
    """A loop in which gradients are those of the weights one update ago."""
    latest = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(latest, lr=LEARNING_RATE)
    losses = []
    for ids in batches:
        losses.append(plain_backward(model, ids))
        with torch.no_grad():
            for parameter, newest in zip(model.parameters(), latest, strict=True):
                newest.grad, parameter.grad = parameter.grad, None
                parameter.copy_(newest)
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


def compare(mode: str, batches: list[torch.Tensor], num_workers: int) -> Curves:
    """Both sides from the same weights."""
    net = byte_llama(tied=mode == "tied")
    reference = copy.deepcopy(net)
    plain = plain_async if mode == "async" else plain_sync
    of_plain, plain_s = timed(lambda: plain(reference, batches))
    of_ours, ours_s = timed(lambda: ours(net, batches, mode == "async", num_workers))
    return Curves(of_ours, of_plain, ours_s, plain_s)


def yardstick(batches: list[torch.Tensor]) -> float:
    """How far plain PyTorch's own curve goes from another order of summation, with tied weights."""
    net = byte_llama(tied=True)
    reference = copy.deepcopy(net)
    return Curves(plain_sync(net, batches, reverse=True), plain_sync(reference, batches), 0.0, 0.0).difference


def main(argv: list[str] | None = None) -> int:
    """Runs both modes; 1 if a loss differs by more than the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=6)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    batches = make_batches(options.steps, options.batch, options.length)
    results: dict[str, Any] = {"steps": options.steps, "workers": options.workers, "target": MAX_DIFFERENCE}
    failed = False
    for mode in ("sync", "async", "tied"):
        curves = compare(mode, batches, options.workers)
        ratio = curves.ours_s / curves.plain_s
        results[mode] = asdict(curves) | {"difference": curves.difference, "ratio": ratio}
        target = "no target" if mode == "tied" else f"at most {MAX_DIFFERENCE:.0e}"
        failed = failed or (mode != "tied" and not curves.difference <= MAX_DIFFERENCE)
        print(
            f"{mode:6} loss {curves.ours[0]:.4f} -> {curves.ours[-1]:.4f}, largest relative difference "
            f"{curves.difference:.2e} ({target}), {curves.ours_s:.1f} s, plain PyTorch {curves.plain_s:.1f} s: "
            f"ratio {ratio:.2f}",
            flush=True,
        )
    results["tied_yardstick"] = yardstick(batches)
    print(f"tied   plain PyTorch against itself in another order of summation: {results['tied_yardstick']:.2e}")
    report(options.json, results)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
