"""Tokens per second of ``generate``, against a loop over an earlier commit's wrapper, in turns.

Before there was `generate`, a user called the wrapper again for each token:

    tokens = torch.cat([tokens, wrapper(input_ids=tokens).logits[:, -1:].argmax(-1)], 1)

That loop runs on a checkout of the commit, in a process of its own; `generate`, and the plain model's, in another.
Both have the same Qwen3 of random weights and must make the same tokens. The loop makes ``--loop-tokens`` in the middle
of the new ones, where a token costs what it does on average; its trace and the first upload of `generate` are apart.

    git worktree add --detach ../before 9dca4e8
    python benchmarks/generation_before.py ../before --case 1 512 64 --case 8 256 64 --case 1 256 64 200000000

A case is a number of prompts, their tokens, new ones and, if the device has a limit, its bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from environment import report
from generation import qwen3

import roundpipe

Sample = dict[str, float]


def serve(options: argparse.Namespace) -> None:
    """Do what each line asks for, and answer with the seconds per token: ``way start number-of-tokens``.

    The library is that of the checkout that PYTHONPATH names.
    """
    model = qwen3(options)
    prompt = torch.randint(1, options.vocabulary, (options.batch, options.prompt))

    def generated(model: Any, tokens: torch.Tensor, num_new: int) -> torch.Tensor:
        lengths = {"max_new_tokens": num_new, "min_new_tokens": num_new}
        mask = torch.ones_like(tokens)
        found: torch.Tensor = model.generate(tokens, attention_mask=mask, do_sample=False, pad_token_id=0, **lengths)
        return found

    def loop(model: Any, tokens: torch.Tensor, num_new: int) -> torch.Tensor:
        with torch.no_grad():
            for _ in range(num_new):
                tokens = torch.cat([tokens, model(input_ids=tokens).logits[:, -1:].argmax(-1)], 1)
        return tokens

    expected = generated(model, prompt, options.tokens)
    device = roundpipe.Device("cpu", memory_bytes=options.budget)
    wrapper = roundpipe.compile(model, devices=[device])
    ways = {"plain": (generated, model), "generate": (generated, wrapper), "loop": (loop, wrapper)}
    for line in sys.stdin:
        name, *numbers = line.split()
        start, num_new = map(int, numbers)
        way, of = ways[name]
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        found = way(of, expected[:, :start], num_new)
        sample = {"s": time.perf_counter() - start_s, "cpu_s": time.process_time() - start_cpu_s}
        if not torch.equal(found, expected[:, : start + num_new]):
            raise SystemExit(f"{name}: other tokens than plain")
        print(json.dumps({key: value / num_new for key, value in sample.items()}), flush=True)
    wrapper.close()


class Server:
    """A process that serves, with the library of a checkout."""

    def __init__(self, checkout: Path, arguments: list[str]) -> None:
        command = [sys.executable, __file__, str(checkout), "--serve", *arguments]
        environment = os.environ | {"PYTHONPATH": str(checkout.resolve())}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )

    def ask(self, name: str, start: int, num_new: int) -> Sample:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        print(name, start, num_new, file=process.stdin, flush=True)
        if not (line := process.stdout.readline()):
            raise SystemExit(f"{name}: the process that ran it has ended; see what it printed")
        answer: Sample = json.loads(line)
        print(f"{name:10} {answer['s'] * 1e3:9.1f} ms, {answer['cpu_s'] * 1e3:9.1f} of processors", flush=True)
        return answer

    def close(self) -> None:
        self._process.communicate()


def measure(case: list[int], options: argparse.Namespace) -> dict[str, Any]:
    """Medians of all ways, and how many times the others' tokens `generate` makes."""
    sizes = {name: getattr(options, name) for name in ("layers", "width", "vocabulary")}
    sizes |= dict(zip(("batch", "prompt", "tokens", "budget"), case, strict=False))
    print(", ".join(f"{name} {value:,}" for name, value in sizes.items()))
    arguments = [f"--{name}={value}" for name, value in sizes.items()]
    prompt, num_new = sizes["prompt"], sizes["tokens"]
    middle = prompt + (num_new - options.loop_tokens) // 2
    samples: dict[str, list[Sample]] = {"loop": [], "generate": [], "plain": []}
    with contextlib.ExitStack() as servers:
        before, now = (Server(path, arguments) for path in (options.checkout, Path(__file__).parents[1]))
        servers.callback(before.close)
        servers.callback(now.close)
        first = {
            "loop": before.ask("loop", max(prompt, middle - 1), 1),
            "generate": now.ask("generate", prompt, num_new),
        }
        for _ in range(options.runs):
            samples["loop"].append(before.ask("loop", middle, options.loop_tokens))
            for name in ("generate", "plain"):
                samples[name].append(now.ask(name, prompt, num_new))
    per_token = {
        name: {key: statistics.median(sample[key] for sample in found) for key in ("s", "cpu_s")}
        for name, found in samples.items()
    }
    ratios = {
        f"of_{name}": {key: per_token[name][key] / value for key, value in per_token["generate"].items()}
        for name in ("loop", "plain")
    }
    for of, ratio in ratios.items():
        print(f"generate {of.replace('_', ' ')}: {ratio['s']:.2f} by seconds, {ratio['cpu_s']:.2f} by processor time")
    return {"sizes": sizes, "first_call": first, "per_token": per_token, "generate": ratios}


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="of the earlier commit")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument(
        "--case", type=int, nargs="+", action="append", default=[], help="prompts, their tokens, new ones, budget"
    )
    parser.add_argument("--loop-tokens", type=int, default=3, help="new ones that the loop makes each time")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    for hidden in ("batch", "prompt", "tokens", "budget"):
        parser.add_argument(f"--{hidden}", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve(options)
        return 0
    found = [measure(case, options) for case in options.case]
    git = ["git", "-C", str(options.checkout), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    report(options.json, {"transformers": transformers.__version__, "loop_of_commit": commit, "cases": found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
