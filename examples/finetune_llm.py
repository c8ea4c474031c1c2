"""Train a causal language model that may be larger than the device.

Without arguments: a byte-level Llama of 5 M parameters, built from its config, learns to write Python
from the standard library's own source. With ``--model DIR``: any Hugging Face causal language model on disk.

    python examples/finetune_llm.py
    python examples/finetune_llm.py --model ~/models/Qwen3-1.7B --data notes.txt --dtype bfloat16 --lora 16
    python examples/finetune_llm.py --check --steps 5
    python examples/finetune_llm.py --check --steps 5 --lora 8 --quantize int8 --dtype bfloat16

The part about roundpipe is `train`: an ordinary loop for one device.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import command_line
import torch
import torch.nn.functional as F
import transformers
from command_line import Parser, Refused, parse_devices, recorded
from torch import nn
from tqdm import tqdm

import roundpipe
from roundpipe.reports.tables import format_bytes, format_count, summary_table

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CHECK_STEPS = 3
CHECK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
STANDARD_LIBRARY_BYTES = 4_000_000


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The options, checked as far as that is possible without loading anything."""
    parser = Parser(__doc__)
    parser.add_argument("--model", type=Path, metavar="DIR", help="checkpoint with its tokenizer")
    parser.add_argument("--data", type=Path, metavar="FILE", help="UTF-8 text to train on")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--seq", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train low-rank adapters only")
    parser.add_argument("--quantize", choices=["int8"], help="with --lora: the weights below the adapters (torchao)")
    parser.add_argument("--recompute", choices=["stage", "layer"], help="layer: less memory, more transfers")
    parser.add_argument("--lr", type=float, help="default: 1e-3 from scratch, 2e-4 for adapters, else 1e-5")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write the trained model here")
    parser.add_argument("--check", action="store_true", help="compare the first steps with plain PyTorch")
    parser.add_argument("--sample", type=int, default=120, metavar="N", help="tokens to generate at the end")
    options = parser.parse_args(argv)
    if options.lr is None:
        options.lr = 2e-4 if options.lora else 1e-3 if options.model is None else 1e-5
    parser.require_positive(options, "steps", "batch", "seq", "microbatches", "lora")
    if options.quantize is not None and options.lora is None:
        parser.error("--quantize needs --lora: quantized weights can't be trained")
    if options.save is not None and options.save.is_file():
        parser.error(f"--save {options.save} is a file; give a folder")
    return options


# Data


def standard_library() -> str:
    """Source of Python's standard library, in a fixed order, without its tests."""
    root = Path(os.__file__).parent
    pieces, size = [], 0
    for path in sorted(root.rglob("*.py")):
        folders = path.relative_to(root).parts[:-1]
        if {"site-packages", "dist-packages", "test", "tests", "idlelib"} & {*folders}:
            continue
        pieces.append(path.read_text(encoding="utf-8", errors="ignore"))
        size += len(pieces[-1])
        if size > STANDARD_LIBRARY_BYTES:
            break
    return "\n".join(pieces)


def load_tokens(path: Path | None, tokenizer: Any, seq: int) -> torch.Tensor:
    """The text as one row of token numbers, `[T]`."""
    try:
        text = standard_library() if path is None else path.read_text(encoding="utf-8")
    except OSError as error:
        raise Refused(f"--data {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise Refused(f"--data {path} is not UTF-8 text") from error
    pieces = [text[start : start + 10_000] for start in range(0, len(text), 10_000)]
    rows = tokenizer(pieces, add_special_tokens=False)["input_ids"] if pieces else []
    tokens = torch.tensor([token for row in rows for token in row], dtype=torch.long)
    if len(tokens) <= seq:
        raise Refused(f"--data {path} has {len(tokens)} tokens; --seq {seq} needs more than {seq}")
    return tokens


def batches(tokens: torch.Tensor, batch: int, seq: int, seed: int) -> Iterator[torch.Tensor]:
    """Random windows, `[B, S + 1]`, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - seq, (batch, 1), generator=generator)
        yield tokens[starts + torch.arange(seq + 1)]


# Models


def byte_tokenizer() -> Any:
    """A tokenizer with one token per byte, and one that ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # it comes in another order in every process
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def byte_llama() -> tuple[nn.Module, Any]:
    """A small Llama with random weights, and its tokenizer."""
    tokenizer = byte_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    return transformers.LlamaForCausalLM(config), tokenizer


def load_checkpoint(folder: Path) -> tuple[nn.Module, Any]:
    """A causal language model and its tokenizer from disk."""
    if not folder.is_dir():
        raise Refused(f"--model {folder} is not a folder")
    if not (folder / "config.json").is_file():
        raise Refused(f"--model {folder} has no config.json: not a Hugging Face checkpoint")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        architectures = config.architectures or []
        if not any("CausalLM" in name or "LMHead" in name for name in architectures):
            kind = " / ".join(architectures) or "base model"
            raise Refused(f"--model {folder} is a {kind}, not a causal language model")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
        raise Refused(f"--model {folder} can't be loaded: {error}") from error
    return model, tokenizer


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    """The model frozen, with trainable low-rank adapters on its linear layers."""
    try:
        import peft
    except ImportError as error:
        raise Refused("--lora needs the package peft: pip install 'roundpipe[hf]'") from error
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks by a name that transformers gives up
        return peft.get_peft_model(model, config)


def quantize(model: nn.Module) -> None:
    """Turn the weights below adapters into int8, a scale per row; torchao's linear layers compute with them."""
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise Refused("--quantize needs the package torchao: pip install 'roundpipe[quantized]'") from error
    quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda module, name: name.endswith(".base_layer"))


def eager_bytes(model: nn.Module, options: argparse.Namespace) -> int:
    """Device memory that plain PyTorch needs for a step with AdamW: everything is there at once.

    Activations are those that autograd keeps for one short sequence, scaled to the batch.
    """
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    length = min(options.seq, 128)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(input_ids=torch.zeros(1, length, dtype=torch.long), use_cache=False)
    activations = (sum(kept.values()) + output.logits.nbytes) * options.batch * options.seq // length
    weights = sum(parameter.nbytes for parameter in model.parameters())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = sum(parameter.nbytes for parameter in trained)
    copies = 2 if DTYPES[options.dtype] is torch.float32 else 3  # two moments, and the float32 weights
    return weights + gradients + activations + copies * sum(4 * parameter.numel() for parameter in trained)


# Training


def loss_function(outputs: Any, labels: torch.Tensor, num_targets: int) -> torch.Tensor:
    """A microbatch's share of the batch's mean cross entropy: the shares of all add up to it."""
    logits = outputs.logits.flatten(0, 1).float()
    return F.cross_entropy(logits, labels.flatten(), reduction="sum") / num_targets


def largest(differences: list[float]) -> float:
    """The largest, or NaN if there is one, which `max` would lose."""
    return float(torch.tensor(differences).max())


def gradient_difference(model: nn.Module, plain: nn.Module) -> float:
    """Largest difference of two models' gradients, relative to the parameter's largest gradient."""
    differences = [0.0]
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if (ours.grad is None) != (theirs.grad is None):
            raise SystemExit(f"check: only one of the two has a gradient for {name}")
        if ours.grad is not None and theirs.grad is not None:
            scale = theirs.grad.abs().max().clamp_min(1e-12)
            differences.append(float((ours.grad - theirs.grad).abs().max() / scale))
    return largest(differences)


def check(model: Any, llm: nn.Module, data: Iterator[torch.Tensor], options: argparse.Namespace) -> tuple[float, float]:
    """Takes the first steps here and in plain PyTorch, both without dropout; the largest differences."""
    plain = copy.deepcopy(llm).eval()
    model.eval()
    ours = torch.optim.SGD(model.optim_parameters(), lr=options.lr)
    theirs = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=options.lr)

    def update() -> None:
        ours.step()
        ours.zero_grad()

    loss_differences, gradient_differences = [], []
    for _ in range(CHECK_STEPS):
        tokens = next(data)
        inputs, labels = {"input_ids": tokens[:, :-1], "use_cache": False}, tokens[:, 1:]
        num_targets = labels.numel()
        loss = model.forward_backward(
            input_kwargs=inputs, label=labels, loss_fn=lambda out, y, n=num_targets: loss_function(out, y, n)
        )
        model.synchronize()
        expected = loss_function(plain(**inputs), labels, num_targets)
        expected.backward()
        loss_differences.append(abs(float(loss) - float(expected.detach())))
        gradient_differences.append(gradient_difference(llm, plain))
        model.step(update, is_async=False)
        theirs.step()
        theirs.zero_grad()
    model.train()
    return largest(loss_differences), largest(gradient_differences)


def train(model: Any, data: Iterator[torch.Tensor], options: argparse.Namespace) -> tuple[list[float], float]:
    """The training loop; the losses and the tokens per second without the first step."""
    optimizer = torch.optim.AdamW(model.optim_parameters(), lr=options.lr, betas=(0.9, 0.95))
    warmup = max(1, options.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / options.steps)),
    )

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    losses: list[float] = []
    num_tokens = options.batch * options.seq
    started = time.perf_counter()
    bar = tqdm(range(options.steps), desc="training", unit="step", dynamic_ncols=True)
    for step in recorded(bar, model, options.timeline, options.steps):
        tokens = next(data)
        loss = model.forward_backward(
            input_kwargs={"input_ids": tokens[:, :-1], "use_cache": False},
            label=tokens[:, 1:],
            loss_fn=lambda outputs, labels: loss_function(outputs, labels, num_tokens),
        )
        model.step(update)  # runs in the background, while the next step is computed
        losses.append(float(loss))
        if step == 0:
            bar.write(model.partition_table() + "\n")
            started = time.perf_counter()
        tokens_per_s = step * num_tokens / max(time.perf_counter() - started, 1e-9)
        bar.set_postfix(loss=f"{losses[-1]:.3f}", tokens_per_s=f"{tokens_per_s:.0f}")
    model.synchronize()
    return losses, max(options.steps - 1, 0) * num_tokens / (time.perf_counter() - started)


def sample(llm: Any, tokenizer: Any, tokens: torch.Tensor, num_new: int) -> str:
    """A text that starts like the data, from the trained model in plain PyTorch."""
    llm.eval()
    prompt = tokens[None, :16]
    text = llm.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=num_new,
        do_sample=True,
        temperature=0.7,
        pad_token_id=tokenizer.eos_token_id,
    )
    return tokenizer.decode(text[0], skip_special_tokens=True)


def run(argv: list[str] | None) -> int:
    """Everything from the arguments to the sample; the exit code."""
    options = parse_arguments(argv)
    torch.manual_seed(options.seed)
    devices = parse_devices(options.devices)
    llm, tokenizer = byte_llama() if options.model is None else load_checkpoint(options.model)
    tokens = load_tokens(options.data, tokenizer, options.seq)
    dtype = DTYPES[options.dtype]
    llm.to(dtype)
    if options.lora is not None:
        llm = with_adapters(llm, options.lora).to(dtype)
    plain_bytes = eager_bytes(llm, options)
    if options.quantize is not None:
        quantize(llm)
    data = batches(tokens, options.batch, options.seq, options.seed)

    model = roundpipe.compile(
        llm.train(),
        example_kwargs={"input_ids": next(data)[:, :-1], "use_cache": False},
        optim_dtype=torch.float32,
        devices=devices,
        model_run_config=roundpipe.RoundPipeRunConfig(
            num_microbatch=options.microbatches, recompute_grain=options.recompute
        ),
    )
    with model:
        if options.check:
            loss_difference, gradient = check(model, llm, data, options)
            print(f"check: largest loss difference {loss_difference:.1e}, gradient difference {gradient:.1e}")
            if not largest([loss_difference, gradient]) < CHECK_TOLERANCE[dtype]:
                print(f"check: FAILED, more than {CHECK_TOLERANCE[dtype]:.0e}")
                return 1
        losses, tokens_per_s = train(model, data, options)
        peak_bytes = model.peak_device_bytes()
        if options.save is not None:
            llm.save_pretrained(options.save)
            tokenizer.save_pretrained(options.save)
    summary = {
        "first loss": f"{losses[0]:.3f}",
        "last loss": f"{sum(losses[-5:]) / len(losses[-5:]):.3f} (mean of the last {len(losses[-5:])})",
        "tokens per second": format_count(tokens_per_s),
        "peak device memory": format_bytes(peak_bytes),
        "plain PyTorch needs": f"{format_bytes(plain_bytes)} (weights, gradients, AdamW, activations)",
    }
    if options.save is not None:
        summary["saved to"] = str(options.save)
    if options.timeline is not None:
        summary["timeline"] = str(options.timeline)
    print(summary_table(summary))
    if options.sample > 0:
        print("\n--- sample ---", sample(llm, tokenizer, tokens, options.sample), sep="\n")
    return 0


def main(argv: list[str] | None = None) -> int:
    """The program; returns its exit code."""
    return command_line.main("finetune_llm.py", run, argv)


if __name__ == "__main__":
    raise SystemExit(main())
