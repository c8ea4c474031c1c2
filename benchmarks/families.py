"""Steps of model families at their published sizes within a memory cap, beside gradient checkpointing without one.

Each model has random weights in bfloat16 and computes its own loss. `checkpointed` is plain PyTorch with the model's
own gradient checkpointing and all of the device's memory; `roundpipe` is compiled, within ``--cap`` GiB as the
process's share of the device, and updates float32 copies, which plain PyTorch does not have. Both run as many
microbatches. Batches differ in each step; their sizes stay.

    python benchmarks/families.py gemma3-4b --json benchmarks/results/families_h200.json
    python benchmarks/families.py t5-3b --small --device cpu --cap 0.5
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from training_steps import Step, compiled_step, measure_ways, plain_step

import roundpipe

WAYS = ("checkpointed", "roundpipe")
Batch = dict[str, torch.Tensor]


class Family(NamedTuple):
    """How one model is built, and what it is trained on."""

    model: str
    """The class of transformers."""
    config: dict[str, Any]
    batch: Callable[[Any, int, int], Batch]
    """Of the config, a number of samples and a length."""
    samples: int
    length: int
    """Tokens of a text, or what stands for them."""
    microbatches: int
    lora: str = ""
    """The modules with adapters, as a regular expression; all weights are trained without."""


def _texts(config: Any, samples: int, length: int) -> Batch:
    """Texts of various lengths, padded on the right."""
    ids = torch.randint(5, config.vocab_size, (samples, length))
    lengths = torch.randint(length // 2, length + 1, (samples, 1))
    lengths[0] = length
    mask = (torch.arange(length) < lengths).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _classified_texts(config: Any, samples: int, length: int) -> Batch:
    texts = _texts(config, samples, length)
    return {**texts, "labels": torch.randint(config.num_labels, (samples,))}


def _translations(config: Any, samples: int, length: int) -> Batch:
    texts, targets = _texts(config, samples, length), _texts(config, samples, length // 2)
    return {**texts, "labels": targets["labels"]}


def _sounds(config: Any, samples: int, length: int) -> Batch:
    features = torch.randn(samples, config.num_mel_bins, 2 * config.max_source_positions).bfloat16()
    labels = torch.randint(5, config.vocab_size, (samples, length))
    labels[1:, length * 3 // 4 :] = -100
    return {"input_features": features, "labels": labels}


def _waves(config: Any, samples: int, length: int) -> Batch:
    labels = torch.randint(1, config.vocab_size, (samples, length // 4000))
    return {"input_values": torch.randn(samples, length).bfloat16(), "labels": labels}


def _images(config: Any, samples: int, length: int) -> Batch:
    pixels = torch.randn(samples, 3, config.image_size, config.image_size).bfloat16()
    return {"pixel_values": pixels, "labels": torch.randint(config.num_labels, (samples,))}


def _texts_with_images(config: Any, samples: int, length: int) -> Batch:
    text, vision = config.text_config, config.vision_config
    batch = _texts(text, samples, length)
    num_tokens = (vision.image_size // vision.patch_size) ** 2
    batch["input_ids"][:, 5 : 5 + num_tokens] = config.image_token_id
    batch["labels"][:, : 5 + num_tokens] = -100
    return {**batch, "pixel_values": torch.randn(samples, 3, vision.image_size, vision.image_size).bfloat16()}


_ATTENTION = r".*(q_proj|k_proj|v_proj|o_proj)"
FAMILIES = {
    "gemma3-4b": Family(
        "Gemma3ForCausalLM",
        {
            "vocab_size": 262208,
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 1024,
        },
        _texts,
        8,
        2048,
        4,
    ),
    "whisper-large-v3": Family(
        "WhisperForConditionalGeneration",
        {
            "vocab_size": 51866,
            "pad_token_id": 50256,
            "decoder_start_token_id": 50258,
            "num_mel_bins": 128,
            "d_model": 1280,
            "encoder_layers": 32,
            "decoder_layers": 32,
            "encoder_attention_heads": 20,
            "decoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "decoder_ffn_dim": 5120,
        },
        _sounds,
        16,
        256,
        4,
    ),
    "t5-3b": Family(
        "T5ForConditionalGeneration",
        {
            "vocab_size": 32128,
            "d_model": 1024,
            "d_ff": 16384,
            "d_kv": 128,
            "num_layers": 24,
            "num_heads": 32,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
        _translations,
        16,
        1024,
        4,
    ),
    "dinov2-giant": Family(
        "Dinov2ForImageClassification",
        {
            "image_size": 518,
            "patch_size": 14,
            "hidden_size": 1536,
            "num_hidden_layers": 40,
            "num_attention_heads": 24,
            "mlp_ratio": 4,
            "use_swiglu_ffn": True,
            "num_labels": 1000,
        },
        _images,
        32,
        0,
        4,
    ),
    "xls-r-2b": Family(
        "Wav2Vec2ForCTC",
        {
            "vocab_size": 200,
            "ctc_loss_reduction": "mean",
            "hidden_size": 1920,
            "intermediate_size": 7680,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "do_stable_layer_norm": True,
            "feat_extract_norm": "layer",
            "conv_bias": True,
            "apply_spec_augment": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
            "feat_proj_dropout": 0.0,
            "final_dropout": 0.0,
            "layerdrop": 0.0,
            "ctc_zero_infinity": True,
        },
        _waves,
        8,
        160000,
        4,
    ),
    "deberta-xxlarge": Family(
        "DebertaV2ForSequenceClassification",
        {
            "vocab_size": 128100,
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "num_hidden_layers": 48,
            "num_attention_heads": 24,
            "relative_attention": True,
            "position_buckets": 256,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
            "max_relative_positions": -1,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "pooler_dropout": 0.0,
            "pooler_hidden_size": 1536,
            "num_labels": 3,
        },
        _classified_texts,
        32,
        512,
        4,
    ),
    "qwen3-moe-12-layers": Family(
        "Qwen3MoeForCausalLM",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
        _texts,
        8,
        2048,
        4,
        _ATTENTION,
    ),
    "gpt-oss-8-layers": Family(
        "GptOssForCausalLM",
        {
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 8,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
        },
        _texts,
        8,
        1024,
        4,
        _ATTENTION,
    ),
    "llava-7b": Family(
        "LlavaForConditionalGeneration",
        {
            "image_token_id": 4,
            "image_seq_length": 576,
            "vision_feature_layer": -2,
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "image_size": 336,
                "patch_size": 14,
                "projection_dim": 768,
            },
            "text_config": {
                "model_type": "llama",
                "vocab_size": 32064,
                "hidden_size": 4096,
                "intermediate_size": 11008,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
            },
        },
        _texts_with_images,
        8,
        1536,
        4,
        r".*language_model.*(q_proj|k_proj|v_proj|o_proj)",
    ),
}
_SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "d_model": 64,
    "d_ff": 96,
    "d_kv": 16,
    "num_layers": 3,
    "num_heads": 4,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "image_size": 56,
    "image_seq_length": 16,
    "sliding_window": 16,
    "pooler_hidden_size": 64,
    "projection_dim": 64,
    "num_mel_bins": 16,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}
"""Of a try on a CPU, in place of fields with these names."""


def _shrunk(config: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _shrunk(value) if isinstance(value, dict) else _SMALL.get(name, value) for name, value in config.items()
    }


def _model_and_config(family: Family, *, is_small: bool, device: str) -> tuple[nn.Module, Any]:
    """With random weights, made on the device, which is faster."""
    import transformers

    kind = getattr(transformers, family.model)
    config = kind.config_class(**_shrunk(family.config) if is_small else family.config)
    for part in (config, *(getattr(config, name, None) for name in ("text_config", "decoder"))):
        if hasattr(part, "use_cache"):
            part.use_cache = False
    with torch.device(device):
        return kind(config).to(torch.bfloat16).train(), config


def trainer(way: str, family: Family, options: argparse.Namespace) -> tuple[Step, Any, Callable[[], dict[str, Any]]]:
    """What makes one step, the model's config, and what ends it all and tells what was seen."""
    model, config = _model_and_config(family, is_small=options.small, device=options.device)
    if way == "roundpipe":
        model.cpu()
    if family.lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules=family.lora))  # type: ignore[arg-type, assignment]
    if way == "checkpointed":
        if family.lora:
            model.enable_input_require_grads()  # type: ignore[operator]
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        return plain_step(model, options.device, family.microbatches), config, dict
    run_config = roundpipe.RoundPipeRunConfig(loss_reduction="mean", num_microbatch=family.microbatches)
    piped = roundpipe.compile(model, devices=[options.device], model_run_config=run_config)

    def end() -> dict[str, Any]:
        print(piped.report(), flush=True)
        traces = piped.trace_count
        piped.close()
        return {"traces": traces}

    return compiled_step(piped, is_async=not options.synchronous), config, end


def measure(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each step, and the median of the latter half."""
    family = FAMILIES[options.family]
    is_cuda = torch.device(options.device).type == "cuda"
    torch.manual_seed(options.seed)
    step, config, end = trainer(way, family, options)
    gc.collect()
    if is_cuda:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(options.device).total_memory
        share = min(options.cap * 2**30 / total, 1.0) if way == "roundpipe" else 1.0
        torch.cuda.set_per_process_memory_fraction(share)
        torch.cuda.reset_peak_memory_stats()
    samples, length = (4, min(family.length, 64)) if options.small else (family.samples, family.length)
    if options.small and family.model.startswith("Wav2Vec2"):
        length = 16000
    seconds, losses = [], []
    for number in range(options.steps):
        torch.manual_seed(number)
        batch = family.batch(config, samples, length)
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
    parser.add_argument("family", choices=tuple(FAMILIES))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--cap", type=float, default=24, help="GiB of the device that roundpipe may use")
    parser.add_argument("--synchronous", action="store_true", help="wait for each update")
    parser.add_argument("--small", action="store_true", help="a model of a few layers, to try it on a CPU")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    return measure_ways(options, measure)


if __name__ == "__main__":
    raise SystemExit(main())
