"""Seconds per step of a vision-language model whose images have other sizes in each batch, beside plain PyTorch.

A Qwen2.5-VL of random weights, in bfloat16, is trained with LoRA adapters on its language model. Each sample is a text
with one image, and the code of the vision tower does something else for each set of sizes. The ways:

    plain          the model on the device, with all of its memory
    checkpointed   the same with gradient checkpointing
    roundpipe      compiled, within ``--cap`` GiB as the process's share of the device

    python benchmarks/images.py --device cuda:0 --cap 24 --json benchmarks/results/images_h200.json
    python benchmarks/images.py --device cpu --preset small --json /tmp/images.json
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from training_steps import Step, compiled_step, measure_ways, plain_step

import roundpipe

WAYS = ("plain", "checkpointed", "roundpipe")
PRESETS: dict[str, dict[str, Any]] = {
    "7b": {
        "text": (152064, 3584, 18944, 28, 28, 4, [16, 24, 24]),
        "vision": (32, 1280, 3420, 16),
    },
    "3b": {
        "text": (151936, 2048, 11008, 36, 16, 2, [16, 24, 24]),
        "vision": (32, 1280, 3420, 16),
    },
    "small": {
        "text": (1000, 64, 128, 4, 4, 2, [2, 3, 3]),
        "vision": (4, 32, 64, 4),
    },
}
"""Vocabulary, widths, layers, heads, key and value heads and sections of positions; layers, widths and heads."""
IMAGE, VIDEO, BEGIN, END = 990, 991, 992, 993
"""Tokens; those of texts are below."""
_MERGED = 2
"""Patches along each side of an image that become one token."""


def model_of(options: argparse.Namespace) -> torch.nn.Module:
    """With random weights, made on the device, which is faster."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    preset = PRESETS[options.preset]
    vocabulary, width, inner, layers, heads, groups, sections = preset["text"]
    depth, vision_width, vision_inner, vision_heads = preset["vision"]
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": vocabulary,
            "hidden_size": width,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "rope_parameters": {"mrope_section": sections, "rope_type": "default", "rope_theta": 1e6},
            "use_cache": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        vision_config={
            "depth": depth,
            "hidden_size": vision_width,
            "intermediate_size": vision_inner,
            "num_heads": vision_heads,
            "out_hidden_size": width,
            "fullatt_block_indexes": list(range(depth // 4 - 1, depth, max(depth // 4, 1))),
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
    )
    dtype = torch.bfloat16 if options.preset != "small" else torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(options.device):
            return Qwen2_5_VLForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(before)


def batches(options: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """Texts, each with an image of a size of its own, padded at the end."""
    small = options.preset == "small"
    found = []
    for step in range(options.steps):
        draws = torch.Generator().manual_seed(options.seed + step)

        def draw(least: int, most: int, draws: torch.Generator = draws) -> int:
            return int(torch.randint(least, most, (1,), generator=draws))

        grids, rows = [], []
        for _ in range(options.batch):
            height, width = (_MERGED * (draw(2, 6) if small else draw(12, 24)) for _ in range(2))
            grids.append([1, height, width])
            text = torch.randint(3, 900, (draw(5, 12) if small else draw(100, 400),), generator=draws).tolist()
            rows.append([BEGIN, *[IMAGE] * (height * width // _MERGED**2), END, *text])
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        mask = (ids != 0).long()
        grid = torch.tensor(grids)
        found.append(
            {
                "input_ids": ids,
                "attention_mask": mask,
                "labels": ids.masked_fill((mask == 0) | (ids >= IMAGE), -100),
                "mm_token_type_ids": (ids == IMAGE).long(),
                "pixel_values": torch.randn(int(grid.prod(1).sum()), 3 * 2 * 14 * 14, generator=draws),
                "image_grid_thw": grid,
            }
        )
    return found


def trainer(way: str, options: argparse.Namespace) -> tuple[Step, Callable[[], dict[str, Any]]]:
    """What makes one step, and what ends it all and tells what was seen."""
    import peft

    on_device = way != "roundpipe"
    model = model_of(options)
    if not on_device:
        model.cpu()
    adapters = peft.LoraConfig(r=options.lora, target_modules=r".*language_model.*(q_proj|k_proj|v_proj|o_proj)")
    model = peft.get_peft_model(model, adapters).train()
    if way == "checkpointed":
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    if on_device:
        return plain_step(model, options.device), dict
    config = roundpipe.RoundPipeRunConfig(loss_reduction="mean", num_microbatch=1)
    piped = roundpipe.compile(model, devices=[options.device], model_run_config=config)

    def end() -> dict[str, Any]:
        traces = piped.trace_count
        piped.close()
        return {"traces": traces}

    return compiled_step(piped), end


def measure(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each step, and the median of the latter half."""
    is_cuda = torch.device(options.device).type == "cuda"
    if is_cuda:
        total = torch.cuda.get_device_properties(options.device).total_memory
        share = min(options.cap * 2**30 / total, 1.0) if way == "roundpipe" else 1.0
        torch.cuda.empty_cache()
    torch.manual_seed(options.seed)
    step, end = trainer(way, options)
    gc.collect()
    if is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(share)
        torch.cuda.reset_peak_memory_stats()
    seconds, losses = [], []
    for batch in batches(options):
        start = time.perf_counter()
        losses.append(float(step(batch)))
        seconds.append(time.perf_counter() - start)
        print(f"{way}: {seconds[-1]:.2f} s, loss {losses[-1]:.4f}", flush=True)
    found = {"steps_s": [round(each, 3) for each in seconds], "losses": losses, **end()}
    found["later_steps_s"] = round(statistics.median(seconds[len(seconds) // 2 :]), 3)
    if is_cuda:
        found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    del step, end
    gc.collect()
    return found


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--preset", choices=tuple(PRESETS), default="7b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12, help="batches, each with images of other sizes")
    parser.add_argument("--lora", type=int, default=16, help="rank of the adapters")
    parser.add_argument("--cap", type=float, default=24, help="GiB of the device that roundpipe may use")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    return measure_ways(options, measure)


if __name__ == "__main__":
    raise SystemExit(main())
