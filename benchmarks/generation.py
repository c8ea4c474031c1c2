"""Tokens per second of ``generate``: through the devices, plain, and of a loop that calls the model again per token.

Greedy, for a decoder of random weights, by medians of runs in turns; all ways must give the same tokens:

    plain       ``model.generate`` of the model that was wrapped
    generate    ``generate`` of the wrapper, with room for all weights on the device
    counted     the same with a budget that holds them: on the CPU each operator's memory is counted then
    streamed    with a budget for ``--share`` of the weights, and ``--room`` for all else
    linked      the same over a link of ``--link`` GB/s (CPU only, where it is modelled)
    loop        the wrapper called with all tokens so far, for each token: what is left to do without ``generate``
    tight loop  the same with the budget of ``streamed``

The loops begin in the middle of the new tokens, where a token costs what it does on average, and make some of them.
Where other processes share the machine, only the ratios by processor time say something. ``generation_before.py``
compares with the loop of an earlier commit.

    python benchmarks/generation.py --json benchmarks/results/generation.json
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from environment import report
from torch import nn

import roundpipe

TARGET = 20.0
"""How many times the tokens of the loop ``generate`` should make."""


def decoder(options: argparse.Namespace, device: str = "cpu") -> Any:
    """A model of random weights, made on a device: billions of random numbers take the host a minute."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        options.model,
        vocab_size=options.vocabulary,
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // 64,
        num_key_value_heads=max(1, options.width // 128),
        head_dim=64,
        max_position_embeddings=4096,
    )
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype)).eval()


def add_sizes(parser: argparse.ArgumentParser, layers: int) -> None:
    """The options of `decoder`, and of the device it runs on."""
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", choices=("qwen3", "llama"), default="qwen3")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=8192)


def loop(model: nn.Module, tokens: torch.Tensor, num_new: int) -> torch.Tensor:
    """Greedy tokens `[1, T + num_new]`, each of a call with all before it."""
    with torch.no_grad():
        for _ in range(num_new):
            following = model(input_ids=tokens, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, following], 1)
    return tokens


def generated(model: Any, tokens: torch.Tensor, num_new: int) -> torch.Tensor:
    """The same by ``generate``."""
    options = {"max_new_tokens": num_new, "min_new_tokens": num_new, "do_sample": False, "pad_token_id": 0}
    return model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)


def uploaded_bytes(model: Any) -> int:
    """What has gone to the device so far."""
    return sum(model._session.engine.backends[0].moved_bytes)  # shown nowhere else


class Measurement:
    """Seconds, processor seconds and uploads per new token of each way, and the tokens it made."""

    def __init__(self) -> None:
        self.samples: dict[str, list[dict[str, float]]] = {}

    def run(self, name: str, way: Any, model: Any, tokens: torch.Tensor, expected: torch.Tensor) -> None:
        """Tokens `[B, T]` continued as far as ``expected`` goes, timed; they must be these."""
        is_plain = name == "plain"
        num_new = expected.shape[1] - tokens.shape[1]
        before = 0 if is_plain else uploaded_bytes(model)
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        found = way(model, tokens, num_new)
        sample = {"s": time.perf_counter() - start_s, "cpu_s": time.process_time() - start_cpu_s}
        sample["uploaded_bytes"] = 0 if is_plain else uploaded_bytes(model) - before
        if not torch.equal(found, expected):
            raise SystemExit(f"{name}: other tokens than plain")
        self.samples.setdefault(name, []).append({key: value / num_new for key, value in sample.items()})
        print(f"{name:12} {sample['s'] / num_new * 1e3:9.1f} ms per token", flush=True)

    def medians(self) -> dict[str, dict[str, float]]:
        """By way, its samples' medians."""
        return {
            name: {key: statistics.median(sample[key] for sample in samples) for key in samples[0]}
            for name, samples in self.samples.items()
        }


def measure(model: Any, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Medians of all ways."""
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    tokens = torch.randint(1, options.vocabulary, (batch, options.prompt))
    budget = int(options.share * weight_bytes + options.room * 2**20)
    limits: dict[str, dict[str, Any]] = {
        "generate": {},
        "counted": {"memory_bytes": 4 * weight_bytes},
        "streamed": {"memory_bytes": budget},
        "linked": {"memory_bytes": budget, "upload_bytes_per_s": 1e9 * options.link},
        "loop": {},
        "tight loop": {"memory_bytes": budget},
    }
    measurement = Measurement()
    expected = generated(model, tokens, options.tokens)
    middle = options.prompt + (options.tokens - options.loop_tokens) // 2
    for name, limit in limits.items():
        if options.device != "cpu" and name in ("counted", "linked"):
            continue
        device = roundpipe.Device(options.device, **limit)
        config = roundpipe.RoundPipeRunConfig(num_microbatch=batch)
        with roundpipe.compile(model, devices=[device], model_run_config=config) as wrapper:
            if "loop" in name:
                way, start, end = loop, middle, middle + options.loop_tokens
            else:
                way, start, end = generated, options.prompt, options.prompt + options.tokens
            way(wrapper, expected[:, : start - 3], 3)
            for _ in range(options.runs):
                measurement.run(name, way, wrapper, expected[:, :start], expected[:, :end])
                if way is generated and options.device == "cpu":
                    measurement.run("plain", generated, model, tokens, expected)
        gc.collect()
    if options.device != "cpu":  # after the rest, which should have the memory
        on_device = model.to(options.device)
        generated(on_device, tokens.to(options.device), 2)
        for _ in range(options.runs):
            way = lambda model, tokens, count: generated(model, tokens.to(options.device), count).cpu()  # noqa: E731
            measurement.run("plain", way, on_device, tokens, expected)
        model.to("cpu")
    return {"weight_bytes": weight_bytes, "budget_bytes": budget, "per_token": measurement.medians()}


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints and writes; exit code 1 if the target is missed under --strict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sizes(parser, layers=8)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="prompts")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--tokens", type=int, default=128, help="new ones")
    parser.add_argument("--loop-tokens", type=int, default=4, help="new ones that the loops make")
    parser.add_argument("--share", type=float, default=0.5, help="of the weights that the budget has room for")
    parser.add_argument("--room", type=float, default=32, help="MiB of the budget for all else")
    parser.add_argument("--link", type=float, default=4, help="GB/s of the modelled link")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    sizes = {name: value for name, value in vars(options).items() if name not in ("json", "strict")}
    versions = {"transformers": transformers.__version__}
    results: dict[str, Any] = versions | {"sizes": sizes, "target_of_loop": TARGET, "batches": {}}
    model, missed = decoder(options), False
    for batch in options.batches:
        results["batches"][batch] = found = measure(model, batch, options)
        ways = found["per_token"]
        print(f"{batch} prompts, {found['weight_bytes']:,} bytes of weights")
        for name, way in ways.items():
            way["tokens_per_s"] = batch / way["s"]
            way["of_plain"], way["of_plain_by_cpu"] = (ways["plain"][key] / way[key] for key in ("s", "cpu_s"))
            print(f"{name:12} {way['tokens_per_s']:9.2f} tokens/s, {way['of_plain']:6.3f} of plain", end="")
            print(f" ({way['of_plain_by_cpu']:6.3f} by {way['cpu_s'] * 1e3:8.1f} ms of processors per token)", end="")
            print(f" {way['uploaded_bytes'] / found['weight_bytes']:6.2f} uploads of all weights")
        found["of_loop"] = {
            name: {"s": ways[of]["s"] / ways[name]["s"], "cpu_s": ways[of]["cpu_s"] / ways[name]["cpu_s"]}
            for name, of in (("generate", "loop"), ("plain", "loop"), ("streamed", "tight loop"))
        }
        for name, ratios in found["of_loop"].items():
            missed |= name == "generate" and ratios["s"] < TARGET
            print(f"{name:12} {ratios['s']:9.1f} times the loop, {ratios['cpu_s']:9.1f} by processor time")
    report(options.json, results)
    return int(missed and options.strict)


if __name__ == "__main__":
    raise SystemExit(main())
