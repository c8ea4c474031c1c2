"""Tokens per second of ``generate``: through the devices, plain, and of a loop that calls the model again per token.

Greedy, one prompt, for a Qwen3 of random weights, by medians of runs in turns; all ways must give the same tokens:

    plain       ``model.generate`` of the model that was wrapped
    generate    ``generate`` of the wrapper, with room for all weights on the device
    streamed    the same with a budget for ``--share`` of the weights
    linked      the same over a link of ``--link`` GB/s
    loop        the wrapper called with all tokens so far, for each token: what is left to do without ``generate``
    tight loop  the same with the budget of ``streamed``

    python benchmarks/generation.py --json benchmarks/results/generation.json
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from environment import report
from torch import nn

import roundpipe

TARGET = 20.0
"""How many times the tokens of the loop ``generate`` should make."""


def qwen3(options: argparse.Namespace) -> Any:
    """A model of random weights."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=options.vocabulary,
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // 64,
        num_key_value_heads=max(1, options.width // 128),
        head_dim=64,
        max_position_embeddings=4096,
    )
    return transformers.Qwen3ForCausalLM(config).eval()


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


@contextlib.contextmanager
def compiled(model: nn.Module, device: roundpipe.Device) -> Iterator[Any]:
    """A wrapper that no stage of a call before weighs on."""
    with roundpipe.compile(model, devices=[device]) as wrapper:
        yield wrapper
    gc.collect()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds, tokens per second and uploads per token of all ways."""
    model = qwen3(options)
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    tokens = torch.randint(1, options.vocabulary, (1, options.prompt))
    budget = int(options.share * weight_bytes + options.room * 2**20)
    devices = {
        "generate": roundpipe.Device(options.device),
        "streamed": roundpipe.Device(options.device, memory_bytes=budget),
    }
    if options.device == "cpu":
        devices["linked"] = roundpipe.Device("cpu", memory_bytes=budget, upload_bytes_per_s=1e9 * options.link)
    times: dict[str, list[float]] = {}
    uploads: dict[str, float] = {}
    found: dict[str, torch.Tensor] = {}

    def note(name: str, call: Callable[[], torch.Tensor], num_new: int) -> None:
        start_s = time.perf_counter()
        found[name] = call()[:, : options.prompt + num_new]
        times.setdefault(name, []).append((time.perf_counter() - start_s) / num_new)
        print(f"{name:12} {1 / times[name][-1]:9.2f} tokens/s", flush=True)

    def turns(name: str, way: Any, wrapper: Any, num_new: int) -> None:
        way(wrapper, tokens, 2)
        for _ in range(options.runs):
            before = uploaded_bytes(wrapper)
            note(name, lambda: way(wrapper, tokens, num_new), num_new)
            uploads[name] = (uploaded_bytes(wrapper) - before) / num_new / weight_bytes
            if way is generated:
                note("plain", lambda: generated(model, tokens, num_new), num_new)

    for name, device in devices.items():
        with compiled(model, device) as wrapper:
            turns(name, generated, wrapper, options.tokens)
    for name, device in {"loop": devices["generate"], "tight loop": devices["streamed"]}.items():
        if options.loop_tokens:
            with compiled(model, device) as wrapper:
                turns(name, loop, wrapper, options.loop_tokens)
    for name, output in found.items():
        assert torch.equal(output, found["plain"][:, : output.shape[1]]), f"{name}: other tokens than plain"
    ways = {
        name: {"s_per_token": statistics.median(each), "tokens_per_s": 1 / statistics.median(each)}
        | ({"uploads_of_all_weights_per_token": uploads[name]} if name in uploads else {})
        for name, each in times.items()
    }
    return {"weight_bytes": weight_bytes, "budget_bytes": budget, "ways": ways}


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints and writes; exit code 1 if the target is missed under --strict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--tokens", type=int, default=128, help="new ones")
    parser.add_argument("--loop-tokens", type=int, default=128, help="new ones of the loops; 0: no loops")
    parser.add_argument("--share", type=float, default=0.5, help="of the weights that the budget has room for")
    parser.add_argument("--room", type=float, default=32, help="MiB of the budget for all else")
    parser.add_argument("--link", type=float, default=4, help="GB/s of the modelled link")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    results = measure(options)
    results["sizes"] = {name: value for name, value in vars(options).items() if name not in ("json", "strict")}
    per_second = {name: way["tokens_per_s"] for name, way in results["ways"].items()}
    results["of_plain"] = {name: value / per_second["plain"] for name, value in per_second.items()}
    results["target"] = TARGET
    for name, value in per_second.items():
        print(f"{name:12} {value:9.2f} tokens/s {results['of_plain'][name]:8.3f} of plain", end="")
        print(f" {results['ways'][name].get('uploads_of_all_weights_per_token', 0):8.2f} uploads of all weights")
    missed = False
    pairs = {name: pair for name, pair in {"all": ("generate", "loop"), "tight": ("streamed", "tight loop")}.items()}
    if options.loop_tokens:
        results["of_loop"] = {name: per_second[ours] / per_second[theirs] for name, (ours, theirs) in pairs.items()}
        print("of the loop:", results["of_loop"], f"target {TARGET}")
        missed = min(results["of_loop"].values()) < TARGET
    report(options.json, results)
    return int(missed and options.strict)


if __name__ == "__main__":
    raise SystemExit(main())
