"""How long it takes to trace, cost and cut a large model, and in how much memory; without its weights.

Each shape is compiled on the meta device in a process of its own, so that its peak memory is its own. The
ratio is against plain PyTorch building the same model on the meta device.

    python benchmarks/compile_time.py --json benchmarks/results/compile_time.json
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from environment import report

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
}
MAX_S = {"Llama-3.1-8B": 10.0, "Llama-3.1-405B": 20.0}
MAX_PEAK_BYTES = {"Llama-3.1-8B": 10**9}


def peak_bytes() -> int:
    """The most memory that this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def compile_one(shape: str, batch: int, seq: int) -> dict[str, Any]:
    """Compiles one shape in this process."""
    import transformers

    import roundpipe

    started = time.perf_counter()
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPES[shape])).to(torch.bfloat16)
    build_s = time.perf_counter() - started
    example = {"input_ids": torch.zeros(batch, seq, dtype=torch.long), "use_cache": False}
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
    return found


def main() -> int:
    """Measures every shape, prints and writes; exit code 1 if a target is missed under --strict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES], action="append", help="default: all")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tables", action="store_true", help="show the partition tables too")
    parser.add_argument("--strict", action="store_true", help="exit code 1 if a target is missed")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    shapes = options.shape or [*SHAPES]
    if options.here:
        print(json.dumps(compile_one(shapes[0], options.batch, options.seq)))
        return 0

    results: dict[str, Any] = {}
    met = True
    for shape in shapes:
        sizes = ["--batch", str(options.batch), "--seq", str(options.seq)]
        command = [sys.executable, __file__, "--here", "--shape", shape, *sizes]
        finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if finished.returncode != 0:
            print(f"{shape}: failed with exit code {finished.returncode}, see above")
            return 1
        found = json.loads(finished.stdout.splitlines()[-1])
        table = found.pop("table")
        results[shape] = found
        in_time = found["compile_s"] <= MAX_S[shape]
        in_memory = found["peak_bytes"] <= MAX_PEAK_BYTES.get(shape, sys.maxsize)
        met = met and in_time and in_memory
        print(
            f"{shape:15} {found['compile_s']:.1f} s (target {MAX_S[shape]:.0f} s: "
            f"{'ok' if in_time else 'MISSED'}), {found['ratio']:.1f}x the time to build it, "
            f"peak {found['peak_bytes'] / 1e9:.2f} GB{'' if in_memory else ' MISSED'}, "
            f"{found['peak_bytes_before'] / 1e9:.2f} GB before it"
        )
        if options.tables:
            print(table)
    report(options.json, results)
    return 1 if options.strict and not met else 0


if __name__ == "__main__":
    raise SystemExit(main())
