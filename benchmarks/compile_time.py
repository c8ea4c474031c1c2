"""How long it takes to trace, cost and cut a large model, and in how much memory; without its weights.

Each shape is compiled on the meta device in a process of its own, so that its peak memory is its own. The
ratio is against plain PyTorch building the same model on the meta device. Further compiles in the same process, when
torch has made all that it makes at first use, are given by the least CPU time: those of a model with adapters against
those of the plain one.

    python benchmarks/compile_time.py --json benchmarks/results/compile_time.json
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from environment import report
from torch import nn

SHAPES: dict[str, dict[str, int]] = {
    "Llama-3.1-8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
    "Llama-3.1-405B": {
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
    "Qwen3-8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    },
}
LORA = "+LoRA"
"""Behind a shape's name: with adapters of rank 16 at all linear layers of the blocks."""
CACHE = " cache"
"""Behind that: with transformers' default ``use_cache=True``; the others say ``use_cache=False``."""
MODELS = (
    "Llama-3.1-8B",
    "Llama-3.1-405B",
    "Qwen3-8B",
    "Qwen3-8B" + LORA,
    "Qwen3-8B" + CACHE,
    "Qwen3-8B" + LORA + CACHE,
    "Llama-3.1-405B" + LORA,
)
MAX_S = {"Llama-3.1-8B": 10.0, "Llama-3.1-405B": 20.0, "Llama-3.1-405B" + LORA: 15.0}
MAX_PEAK_BYTES = {"Llama-3.1-8B": 10**9}
MAX_OF_PLAIN = {"Qwen3-8B" + LORA: 1.5, "Qwen3-8B" + LORA + CACHE: 1.5}
"""Compile time of a model with adapters, per that of the plain one."""


def peak_bytes() -> int:
    """The most memory that this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def build(name: str) -> nn.Module:
    """One of `MODELS` on the meta device."""
    import transformers

    name = name.removesuffix(CACHE)
    shape = name.removesuffix(LORA)
    kind = "Qwen3" if shape.startswith("Qwen3") else "Llama"
    config = getattr(transformers, f"{kind}Config")(**SHAPES[shape])
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
        if name.endswith(LORA):
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))  # type: ignore[arg-type, assignment]
        return model.to(torch.bfloat16)


def compile_one(name: str, batch: int, seq: int, again: int) -> dict[str, Any]:
    """Compiles one model in this process, and ``again`` so many times."""
    import roundpipe

    started = time.perf_counter()
    model = build(name)
    build_s = time.perf_counter() - started
    example: dict[str, Any] = {"input_ids": torch.zeros(batch, seq, dtype=torch.long)}
    if not name.endswith(CACHE):
        example["use_cache"] = False
    before_bytes = peak_bytes()
    started = time.perf_counter()
    compiled = roundpipe.compile(model, example_kwargs=example, devices=["cpu"], fallback=False)
    table = compiled.partition_table()
    compile_s = time.perf_counter() - started
    found = {
        "compile_s": compile_s,
        "peak_bytes": peak_bytes(),
        "peak_bytes_before": before_bytes,
        "build_s": build_s,
        "ratio": compile_s / build_s,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "table": table,
    }
    compiled.close()
    times_s = []
    for _ in range(again):
        gc.collect()
        started = time.process_time()
        compiled = roundpipe.compile(model, example_kwargs=example, devices=["cpu"], fallback=False)
        times_s.append(time.process_time() - started)
        compiled.close()
    if times_s:
        found["again_cpu_s"] = min(times_s)
    return found


def main() -> int:
    """Measures every shape, prints and writes; exit code 1 if a target is missed under --strict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=MODELS, action="append", help="default: all")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--again", type=int, default=5, help="further compiles in the same process")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tables", action="store_true", help="show the partition tables too")
    parser.add_argument("--strict", action="store_true", help="exit code 1 if a target is missed")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    shapes = options.shape or [*MODELS]
    if options.here:
        print(json.dumps(compile_one(shapes[0], options.batch, options.seq, options.again)))
        return 0

    results: dict[str, Any] = {}
    met = True
    for shape in shapes:
        sizes = ["--batch", str(options.batch), "--seq", str(options.seq), "--again", str(options.again)]
        command = [sys.executable, __file__, "--here", "--shape", shape, *sizes]
        finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if finished.returncode != 0:
            print(f"{shape}: failed with exit code {finished.returncode}, see above")
            return 1
        found = json.loads(finished.stdout.splitlines()[-1])
        table = found.pop("table")
        results[shape] = found
        max_s = MAX_S.get(shape, math.inf)
        in_time = found["compile_s"] <= max_s
        in_memory = found["peak_bytes"] <= MAX_PEAK_BYTES.get(shape, sys.maxsize)
        met = met and in_time and in_memory
        target = f" (target {max_s:.0f} s: {'ok' if in_time else 'MISSED'})" if shape in MAX_S else ""
        print(
            f"{shape:20} {found['compile_s']:.1f} s{target}, {found['ratio']:.1f}x the time to build it, "
            f"peak {found['peak_bytes'] / 1e9:.2f} GB{'' if in_memory else ' MISSED'}, "
            f"{found['peak_bytes_before'] / 1e9:.2f} GB before it"
        )
        if "again_cpu_s" in found:
            words = f"{'':20} again {found['again_cpu_s']:.2f} s of CPU time"
            plain = results.get(shape.replace(LORA, ""), {})
            if LORA in shape and "again_cpu_s" in plain:
                found["of_plain"] = found["again_cpu_s"] / plain["again_cpu_s"]
                words += f", {found['of_plain']:.2f}x plain"
                if (most := MAX_OF_PLAIN.get(shape)) is not None:
                    is_met = found["of_plain"] <= most
                    met = met and is_met
                    words += f" (target {most}: {'ok' if is_met else 'MISSED'})"
            print(words)
        if options.tables:
            print(table)
    report(options.json, results)
    return 1 if options.strict and not met else 0


if __name__ == "__main__":
    raise SystemExit(main())
