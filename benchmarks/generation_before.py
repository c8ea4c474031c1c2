"""Tokens per second of ``generate``, against a loop over an earlier commit's wrapper, in turns.

Before there was `generate`, a user called the wrapper again for each token:

    tokens = torch.cat([tokens, wrapper(input_ids=tokens).logits[:, -1:].argmax(-1)], 1)

That loop runs on a checkout of the commit, in a process of its own; `generate`, and the plain model's with all weights
on the device, in others. All have the same decoder of random weights. The loop makes ``--loop-tokens`` in the middle of
the new ones, where a token costs what it does on average; its traces and the first upload of `generate` are apart.

    git worktree add --detach ../before 9dca4e8
    python benchmarks/generation_before.py ../before --case 1 512 64 --case 8 256 64 --case 1 256 64 200000000
    python benchmarks/generation_before.py ../before --device cuda --model llama --dtype bfloat16 --layers 24 \\
        --width 2048 --vocabulary 32000 --case 8 512 64 --case 8 512 64 40%

A case is a number of prompts, their tokens, new ones and, if the device has a limit, its bytes or a share of the
weights' bytes. In float32 all must make the same tokens. In half precision many logits of random weights are equal, so
even plain PyTorch makes other tokens in its second call; the share of equal ones is told.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from environment import report
from generation import add_sizes, decoder

import roundpipe

Sample = dict[str, float]
WAYS = ("plain", "generate", "loop")


def generated(model: Any, tokens: torch.Tensor, num_new: int) -> torch.Tensor:
    """Tokens with as many new ones, by the model's own ``generate``."""
    lengths = {"max_new_tokens": num_new, "min_new_tokens": num_new}
    mask = torch.ones_like(tokens)
    found: torch.Tensor = model.generate(tokens, attention_mask=mask, do_sample=False, pad_token_id=0, **lengths)
    return found


def loop(model: Any, tokens: torch.Tensor, num_new: int) -> torch.Tensor:
    """The same by a call for each."""
    with torch.no_grad():
        for _ in range(num_new):
            tokens = torch.cat([tokens, model(input_ids=tokens).logits[:, -1:].argmax(-1)], 1)
    return tokens


def limit_of(budget: str, weight_bytes: int) -> int | None:
    """A case's budget in bytes."""
    if budget.endswith("%"):
        return int(float(budget[:-1]) / 100 * weight_bytes)
    return int(budget) if budget else None


def serve(options: argparse.Namespace) -> None:
    """Continue the tokens of each line by so many, and answer with what a token took, and all tokens.

    The library is that of the checkout that PYTHONPATH names.
    """
    if options.checkout.resolve() not in Path(roundpipe.__file__).resolve().parents:
        raise SystemExit(f"{roundpipe.__file__} is not of the checkout {options.checkout}")
    device = options.device
    model = decoder(options, device)
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    ready: dict[str, Any] = {"weight_bytes": weight_bytes, "budget_bytes": limit_of(options.budget, weight_bytes)}
    with contextlib.ExitStack() as stack:
        if options.serve != "plain":
            model.to("cpu")
            if device != "cpu":
                torch.get_device_module(device).empty_cache()
            limits = {"memory_bytes": ready["budget_bytes"]}
            model = roundpipe.compile(model, devices=[roundpipe.Device(device, **limits)])
            stack.callback(model.close)
        way = loop if options.serve == "loop" else generated
        to_device = "cpu" if options.serve != "plain" else device  # a wrapper takes and gives tokens on the host
        print(json.dumps(ready), flush=True)
        before = 0
        for line in sys.stdin:
            asked = json.loads(line)
            start, num_new = torch.tensor(asked["tokens"]), asked["num_new"]
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            found = way(model, start.to(to_device), num_new).cpu()
            sample = {"s": time.perf_counter() - start_s, "cpu_s": time.process_time() - start_cpu_s}
            answer: dict[str, Any] = {key: value / num_new for key, value in sample.items()}
            if options.serve == "generate":
                backend = model._session.engine.backends[0]  # shown nowhere else
                moved, before = before, sum(backend.moved_bytes)
                answer |= {"moved_bytes": (before - moved) / num_new, "peak_bytes": backend.peak_bytes()}
            print(json.dumps(answer | {"tokens": found.tolist()}), flush=True)


class Failed(Exception):
    """A process has ended, or did not answer in time."""


class Server:
    """A process that serves one way, with the library of a checkout."""

    def __init__(self, checkout: Path, way: str, budget: str, options: argparse.Namespace) -> None:
        sizes = [f"--{name}={getattr(options, name)}" for name in ("model", "dtype", "layers", "width", "vocabulary")]
        command = [sys.executable, __file__, str(checkout), "--serve", way, "--budget", budget, *sizes]
        path = [str(checkout.resolve()), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
        self._way, self._timeout_s = way, options.timeout
        self._process = subprocess.Popen(
            [*command, "--device", options.device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def answer(self) -> dict[str, Any]:
        process = self._process
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], self._timeout_s)[0]:
            raise Failed(f"{self._way}: no answer in {self._timeout_s} s")
        if not (line := process.stdout.readline()):
            raise Failed(f"{self._way}: the process that ran it has ended; see what it printed")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, tokens: list[list[int]], num_new: int) -> tuple[Sample, list[list[int]]]:
        """Seconds per new token, and all tokens."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"tokens": tokens, "num_new": num_new}), file=self._process.stdin, flush=True)
        answer = self.answer()
        found = answer.pop("tokens")
        print(f"{self._way:10} {answer['s'] * 1e3:9.1f} ms, {answer['cpu_s'] * 1e3:9.1f} of processors", flush=True)
        return answer, found

    def close(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
            self._process.communicate(timeout=10)
        self._process.kill()
        self._process.communicate()


class Servers:
    """Processes by the way and the limit that they serve; all start at once, and one that has failed is replaced."""

    def __init__(self, cases: list[dict[str, Any]], options: argparse.Namespace) -> None:
        self._options = options
        self._running: dict[tuple[str, str], Server] = {}
        self._ready: dict[tuple[str, str], dict[str, Any]] = {}
        for case in cases:
            for way in WAYS:
                self._start(self._key(way, case))

    def _key(self, way: str, case: dict[str, Any]) -> tuple[str, str]:
        return way, "" if way == "plain" else case["budget"]

    def _start(self, key: tuple[str, str]) -> None:
        if key not in self._running:
            checkout = self._options.checkout if key[0] == "loop" else Path(__file__).parents[1]
            self._running[key] = Server(checkout, *key, self._options)

    def get(self, way: str, case: dict[str, Any]) -> tuple[Server, dict[str, Any]]:
        """A server that is ready, and what it told of itself."""
        key = self._key(way, case)
        self._start(key)
        if key not in self._ready:
            self._ready[key] = self._running[key].answer()
        return self._running[key], self._ready[key]

    def drop(self, way: str, case: dict[str, Any]) -> None:
        key = self._key(way, case)
        self._ready.pop(key, None)
        if key in self._running:
            self._running.pop(key).close()

    def close(self) -> None:
        for server in self._running.values():
            server.close()


class Measurement:
    """One case: samples of each way that runs, and why the others do not."""

    def __init__(self, case: dict[str, Any], servers: Servers, options: argparse.Namespace) -> None:
        self._case, self._servers = case, servers
        self._is_exact = options.dtype == "float32"
        self._num_loop = options.loop_tokens
        self._tokens: list[list[int]] = []
        self.failed: dict[str, str] = {}
        self.first: dict[str, Sample] = {}
        self.samples: dict[str, list[Sample]] = {}
        self.told: dict[str, Any] = {}

    def warm_up(self, seed: int) -> None:
        """Tokens of the plain model, that all shall make, and the first call of the others."""
        prompts = torch.randint(
            1, self._case["vocabulary"], (self._case["batch"], self._case["prompt"]), generator=torch.manual_seed(seed)
        )
        self._tokens = prompts.tolist()
        for way in WAYS:
            with self._noting(way):
                server, told = self._servers.get(way, self._case)
                self.told |= told
                if way == "plain":
                    self.first[way], self._tokens = server.ask(self._tokens, self._case["tokens"])
                elif "plain" not in self.failed:
                    self.first[way] = self._ask(way, 1 if way == "loop" else None)

    def run(self) -> None:
        """One sample more of each way."""
        for way in WAYS:
            if not self.failed.keys() & {way, "plain"}:
                with self._noting(way):
                    sample = self._ask(way, self._num_loop if way == "loop" else None)
                    self.samples.setdefault(way, []).append(sample)

    def _ask(self, way: str, num_new: int | None) -> Sample:
        """So many tokens in the middle of the new ones, the first call's before those of others; or all of these."""
        prompt, total = self._case["prompt"], self._case["tokens"]
        start, end = prompt, prompt + total
        if num_new is not None:
            middle = prompt + (total - self._num_loop) // 2
            start = max(prompt, middle if num_new > 1 else middle - 1)
            end = start + num_new
        sample, found = self._servers.get(way, self._case)[0].ask([row[:start] for row in self._tokens], end - start)
        pairs = [
            pair
            for row, others in zip(found, self._tokens, strict=True)
            for pair in zip(row[start:], others[start:end], strict=True)
        ]
        sample["equal_tokens"] = sum(one == other for one, other in pairs) / len(pairs)
        if sample["equal_tokens"] < 1:
            different = f"{way}: {1 - sample['equal_tokens']:.1%} of the tokens are other than plain's"
            if self._is_exact:
                raise Failed(different)
            print(different)
        return sample

    @contextlib.contextmanager
    def _noting(self, way: str) -> Any:
        try:
            yield
        except Failed as failure:
            self.failed[way] = str(failure)
            print(failure, flush=True)
            self._servers.drop(way, self._case)

    def results(self) -> dict[str, Any]:
        """Medians of all ways, and how many times the others' tokens `generate` makes."""
        per_token = {
            name: {key: statistics.median(sample[key] for sample in found) for key in found[0]}
            for name, found in self.samples.items()
        }
        ratios: dict[str, Sample] = {}
        for other in ("loop", "plain"):
            if {other, "generate"} <= per_token.keys():
                own = per_token["generate"]
                ratio = ratios[f"of_{other}"] = {key: per_token[other][key] / own[key] for key in ("s", "cpu_s")}
                print(f"generate of {other}: {ratio['s']:.2f} by seconds, {ratio['cpu_s']:.2f} by processor time")
        found = {"sizes": self._case | self.told, "first_call": self.first, "per_token": per_token}
        return found | {"generate": ratios, "failed": self.failed}


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints and writes; exit code 1 if something did not run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="of the earlier commit")
    add_sizes(parser, layers=4)
    parser.add_argument(
        "--case", nargs="+", action="append", default=[], help="prompts, their tokens, new ones, budget"
    )
    parser.add_argument("--loop-tokens", type=int, default=3, help="new ones that the loop makes each time")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=600, help="seconds that a process has for an answer")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--budget", default="", help=argparse.SUPPRESS)
    parser.add_argument("--serve", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve(options)
        return 0
    sizes = {name: getattr(options, name) for name in ("model", "dtype", "layers", "width", "vocabulary")}
    cases = []
    for batch, prompt, tokens, *budget in options.case:
        case = {"batch": int(batch), "prompt": int(prompt), "tokens": int(tokens), "budget": "".join(budget)}
        cases.append(sizes | case)
    versions = {"transformers": transformers.__version__}
    versions |= {
        "loop_of_commit": commit_of(options.checkout),
        "generate_of_commit": commit_of(Path(__file__).parents[1]),
    }
    found: list[dict[str, Any]] = []
    servers = Servers(cases, options)
    with contextlib.closing(servers):
        for seed, case in enumerate(cases):
            print(", ".join(f"{name} {value}" for name, value in case.items()), flush=True)
            measurement = Measurement(case, servers, options)
            measurement.warm_up(seed)
            for _ in range(options.runs):
                measurement.run()
            found.append(measurement.results())
            report(options.json, versions | {"cases": found})
    return int(any(each["failed"] for each in found))


def commit_of(checkout: Path) -> str:
    """The commit of a checkout, or, of an exported tree, the folder's name."""
    git = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    if not (checkout / ".git").exists():
        return checkout.absolute().name
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())
