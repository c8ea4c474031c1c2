"""Teach a causal language model a second kind of text with low-rank adapters (PEFT), and generate before and after.

Without arguments: a small Llama first learns the standard library's source, all of its weights; then adapters of it
learn English from Python's language reference. With ``--model DIR``: any causal language model on disk.

    python examples/finetune_lora.py
    python examples/finetune_lora.py --model ~/models/Qwen3-1.7B --data notes.txt --save adapters
    python examples/finetune_lora.py --check --pretrain 5 --steps 5 --quantize nf4   # needs bitsandbytes
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import command_line
import language
import peft
import torch
import transformers
from against_plain import agrees
from command_line import Parser, folder_path, parse_devices, recorded
from language import DTYPES, batches, next_token_loss, sample
from quantization import KINDS, check_installed, quantize
from torch import nn
from tqdm import tqdm

import roundpipe
from roundpipe.reports.tables import format_bytes, format_count, summary_table

NUM_EVALUATED = 64  # sequences of the text's last tenth, which is not trained on


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = Parser(__doc__)
    parser.add_argument("--model", type=Path, metavar="DIR", help="checkpoint with its tokenizer")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="default: that of the checkpoint, or float32")
    parser.add_argument("--quantize", choices=KINDS, help="the weights below the adapters")
    parser.add_argument("--pretrain", type=int, default=200, help="steps on source code, without --model")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_text_options(150, 8, None, "default: 2e-3 for the small Llama, else 2e-4")
    parser.add_argument("--sample", type=int, default=120, metavar="N", help="tokens to generate, before and after")
    parser.add_argument("--save", type=folder_path, metavar="DIR", help="write the adapters here")
    parser.add_argument("--merge", type=folder_path, metavar="DIR", help="write the model with adapters merged in here")
    options = parser.parse_args(argv)
    if options.lr is None:
        options.lr = 2e-3 if options.model is None else 2e-4
    parser.require_positive(options, "pretrain", "steps", "rank", "batch", "seq", "microbatches", "sample")
    return options


def with_adapters(llm: Any, options: argparse.Namespace) -> nn.Module:
    """The model frozen, quantized if asked for, with trainable low-rank adapters on its linear layers."""
    config = peft.LoraConfig(
        r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(llm, config).to(DTYPES.get(options.dtype, llm.dtype))
    if options.quantize is not None:
        quantize(adapted, options.quantize)
    return adapted


def compiled(llm: nn.Module, options: argparse.Namespace) -> Any:
    """The model, cut for the devices at the first call."""
    config = roundpipe.RoundPipeRunConfig(num_microbatch=options.microbatches)
    return roundpipe.compile(llm.train(), devices=options.devices, model_run_config=config)


def train(model: Any, data: Iterator[Any], what: str, steps: int, lr: float, timeline: Path | None = None) -> None:
    """An ordinary training loop; the update of one step runs while the next is computed."""
    optimizer = torch.optim.AdamW(model.optim_parameters(), lr=lr)
    bar = tqdm(range(steps), desc=what, unit="step", dynamic_ncols=True)
    for _ in recorded(bar, model, timeline, steps):
        inputs, labels = next(data)
        loss = model.forward_backward(input_kwargs=inputs, label=labels, loss_fn=next_token_loss, loss_reduction="mean")
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        bar.set_postfix(loss=f"{float(loss):.3f}")
    model.synchronize()


def evaluate(model: Any, inputs: dict[str, Any], labels: torch.Tensor) -> float:
    """Mean cross entropy of a batch, two sequences at a time: their logits stay on the devices."""
    few = roundpipe.RoundPipeRunConfig(num_microbatch=NUM_EVALUATED // 2, loss_reduction="mean")
    loss = model.eval().forward_loss(input_kwargs=inputs, label=labels, loss_fn=next_token_loss, run_config=few)
    model.train()
    return float(loss)


def pretrained(options: argparse.Namespace) -> tuple[nn.Module, Any]:
    """The model to adapt and its tokenizer: from disk, or trained here on source code."""
    if options.model is not None:
        return language.load_checkpoint(options.model)
    llm, tokenizer = language.byte_llama()
    data = batches(language.load_tokens(None, tokenizer, options.seq), options.batch, options.seq, options.seed)
    with compiled(llm, options) as model:
        train(model, data, "all weights, source code", options.pretrain, 1e-3)
    return llm, tokenizer


def run(argv: list[str] | None) -> int:
    """Everything from the arguments to the samples; the exit code."""
    options = parse_arguments(argv)
    check_installed(options.quantize)
    torch.manual_seed(options.seed)
    options.devices = parse_devices(options.devices)
    llm, tokenizer = pretrained(options)
    tokens = language.load_tokens(options.data, tokenizer, options.seq, 3, language.language_reference)
    first = len(tokens) - max(len(tokens) // 10, options.seq + 1)
    data, held_out = batches(tokens[:first], options.batch, options.seq, options.seed), tokens[first:]
    evaluated = next(batches(held_out, NUM_EVALUATED, options.seq, options.seed))
    adapted = with_adapters(llm, options)
    num_trained = sum(one.numel() for one in adapted.parameters() if one.requires_grad)
    with compiled(adapted, options) as model:
        if options.check and not agrees(model, adapted, data, next_token_loss, options.lr):
            return 1
        prompt = language.tokens_of(language.beginning(tokenizer.decode(held_out)), tokenizer)[: options.seq]
        before = evaluate(model, *evaluated), sample(model, tokenizer, prompt, options.sample)
        train(model, data, "adapters", options.steps, options.lr, options.timeline)
        after = evaluate(model, *evaluated), sample(model, tokenizer, prompt, options.sample)
        peak_bytes = model.peak_device_bytes()
        if options.save is not None:
            model.save_pretrained(options.save)
    summary = {
        "adapters": f"{format_count(num_trained)} parameters of rank {options.rank}",
        "loss before": f"{before[0]:.3f} on text that is not trained on",
        "loss after": f"{after[0]:.3f}",
        "peak device memory": format_bytes(peak_bytes),
        "saved to": options.save,
        "merged into": options.merge,
    }
    if options.merge is not None:
        adapted.merge_and_unload().save_pretrained(options.merge)  # type: ignore[operator]
        tokenizer.save_pretrained(options.merge)
    print(summary_table({name: str(value) for name, value in summary.items() if value is not None}))
    print("\n--- before ---", before[1], "\n--- after ---", after[1], sep="\n")
    return 0


def main(argv: list[str] | None = None) -> int:
    """The program; returns its exit code."""
    transformers.logging.set_verbosity_error()
    return command_line.main("finetune_lora.py", run, argv)


if __name__ == "__main__":
    raise SystemExit(main())
