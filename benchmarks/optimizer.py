"""What the optimizer's side costs: hidden behind compute, and beside the update itself.

    hidden     a training step of one CPU worker with an asynchronous update, against the same step without update;
               the update runs in a thread of its own, so a core must be free for it: on a single core no target
    float32    gradients out of the model, fused AdamW, weights back into the model, against fused AdamW alone
    bfloat16   the same for bfloat16 weights and gradients with float32 copies, which converts on both ways
    default    the same for AdamW that is not fused, which is made in pieces, and for large layers
    one pass   what it would take to convert gradients, update by fused AdamW and convert weights piece by piece, which
               goes over memory once, against one after the other, as it is done

Both sides of each are measured in the same run, in turns, by the median of the ratios of neighbours.

    python benchmarks/optimizer.py --json benchmarks/results/optimizer.json
    python benchmarks/optimizer.py --cases "default,one pass" --json benchmarks/results/optimizer_pieces.json
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from environment import environment, report
from torch import nn
from torch.optim.adam import adam

import roundpipe

MAX_HIDDEN = 1.03
MAX_BESIDE = 1.7
STEPS_PER_SAMPLE = 4
LARGE_WIDTH = 4096
PIECE_ELEMENTS = 2**18


@dataclass
class Comparison:
    """Medians in seconds of either side, and the median of their ratios."""

    ours_s: float
    plain_s: float
    ratio: float
    num_samples: int


def in_turns(ours: Callable[[], float], plain: Callable[[], float], num_samples: int) -> Comparison:
    """Both sides alternately after one warm-up of each; a side returns the seconds that count."""
    ours(), plain()
    pairs = [(ours(), plain()) for _ in range(num_samples)]
    first, second = (statistics.median(side) for side in zip(*pairs, strict=True))
    return Comparison(first, second, statistics.median(a / b for a, b in pairs), num_samples)


def loss_function(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Mean squared error."""
    return nn.functional.mse_loss(output, label)


def hidden(width: int, num_tokens: int, num_samples: int) -> Comparison:
    """Steps with an asynchronous update against steps that throw the gradients away.

    Gradients are thrown away where the other side hands them over, between two calls. A sample is several steps;
    what is left of the last update is waited for outside of the time.
    """
    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(6)])
    inputs = torch.randn(num_tokens, width)
    config = roundpipe.RoundPipeRunConfig(num_microbatch=2)
    stepping, idle = (
        roundpipe.RoundPipe(copy.deepcopy(blocks), devices=["cpu"], model_run_config=config) for _ in range(2)
    )
    optimizer = torch.optim.AdamW(stepping.optim_parameters(), lr=1e-6, fused=True)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def steps(model: Any, finish: Callable[[], None]) -> float:
        started_s = time.perf_counter()
        for _ in range(STEPS_PER_SAMPLE):
            model.forward_backward(input_args=(inputs,), label=inputs, loss_fn=loss_function)
            finish()
        elapsed_s = time.perf_counter() - started_s
        model.synchronize()
        return elapsed_s

    with stepping, idle:
        return in_turns(
            lambda: steps(stepping, lambda: stepping.step(update)), lambda: steps(idle, idle.zero_grad), num_samples
        )


def beside(
    dtype: torch.dtype, num_parameters: int, num_samples: int, *, width: int = 1024, fused: bool | None = True
) -> Comparison:
    """A whole synchronous step, from gradients in the model to new weights in it, against the update alone."""
    layers = [nn.Linear(width, width, bias=False) for _ in range(max(1, num_parameters // width**2))]
    net = nn.Sequential(*layers).to(dtype)
    gradients = [torch.randn_like(parameter) for parameter in net.parameters()]
    plain = [nn.Parameter(parameter.detach().float()) for parameter in net.parameters()]
    plain_gradients = [gradient.float() for gradient in gradients]
    plain_optimizer = torch.optim.AdamW(plain, lr=1e-6, fused=fused)

    with roundpipe.RoundPipe(net, optim_dtype=torch.float32, devices=["cpu"]) as model:
        optimizer = torch.optim.AdamW(model.optim_parameters(), lr=1e-6, fused=fused)

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        def ours() -> float:
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter.grad = gradient
            started_s = time.perf_counter()
            model.step(update, is_async=False)
            return time.perf_counter() - started_s

        def alone() -> float:
            for parameter, gradient in zip(plain, plain_gradients, strict=True):
                parameter.grad = gradient
            started_s = time.perf_counter()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
            return time.perf_counter() - started_s

        return in_turns(ours, alone, num_samples)


def one_pass(num_parameters: int, num_samples: int) -> Comparison:
    """The three passes of an update, piece by piece against one after the other."""
    weights, gradients = (torch.randn(num_parameters).bfloat16() for _ in range(2))
    copies, squares = torch.randn(num_parameters), torch.rand(num_parameters)
    averages, memory = torch.randn(num_parameters), torch.zeros(num_parameters)

    def update(piece_elements: int, converted: torch.Tensor) -> float:
        started_s = time.perf_counter()
        tensors = weights, gradients, copies, averages, squares
        for weight, gradient, values, average, square in zip(
            *(each.split(piece_elements) for each in tensors), strict=True
        ):
            own = converted[: values.numel()].copy_(gradient)
            options = {"beta1": 0.9, "beta2": 0.999, "lr": 1e-6, "weight_decay": 0.01, "eps": 1e-8}
            states: Any = [values], [own], [average], [square], [], [torch.tensor(1.0)]
            adam(*states, amsgrad=False, maximize=False, fused=True, decoupled_weight_decay=True, **options)
            weight.copy_(values)
        return time.perf_counter() - started_s

    in_pieces = torch.zeros(PIECE_ELEMENTS)
    return in_turns(lambda: update(PIECE_ELEMENTS, in_pieces), lambda: update(num_parameters, memory), num_samples)


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and writes; exit code 1 if a target is missed under --strict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=1024, help="per step")
    parser.add_argument("--parameters", type=int, default=32 * 1024**2, help="for the update by itself")
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="threads per operator")
    parser.add_argument("--cases", default="hidden,float32,bfloat16,default,one pass", help="those above, by name")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--strict", action="store_true", help="exit code 1 if a target is missed")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    number, num_samples = options.parameters, 2 * options.samples
    width = min(LARGE_WIDTH, math.isqrt(number))
    cases: dict[str, tuple[Callable[[], Comparison], float]] = {
        "hidden": (
            lambda: hidden(options.width, options.tokens, options.samples),
            MAX_HIDDEN if environment()["cores"] > 1 else math.inf,
        ),
        "float32": (lambda: beside(torch.float32, number, num_samples), MAX_BESIDE),
        "bfloat16": (lambda: beside(torch.bfloat16, number, num_samples), MAX_BESIDE),
        "default": (lambda: beside(torch.bfloat16, number, num_samples, width=width, fused=None), math.inf),
        "one pass": (lambda: one_pass(number, num_samples), math.inf),
    }
    measured = {name: (cases[name][0](), cases[name][1]) for name in options.cases.split(",")}
    missed = [name for name, (comparison, target) in measured.items() if comparison.ratio > target]
    for name, (comparison, target) in measured.items():
        verdict = "" if name in ("default", "one pass") else f", target {target}: {'MISSED' * (name in missed) or 'ok'}"
        print(
            f"{name:9} {comparison.ours_s * 1e3:.1f} ms, plain {comparison.plain_s * 1e3:.1f} ms, "
            f"ratio {comparison.ratio:.3f}{verdict}"
        )
    report(
        options.json,
        {
            **{name: asdict(comparison) for name, (comparison, _) in measured.items()},
            "targets": {"hidden": MAX_HIDDEN, "beside": MAX_BESIDE},
        },
    )
    return 1 if options.strict and missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
