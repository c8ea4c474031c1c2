"""Teach a causal language model a second kind of text with low-rank adapters (PEFT), and generate before and after.

Without arguments: the byte-level Llama of finetune_llm.py first learns from the standard library's source, all of its
weights; then adapters of it learn English from the language reference that comes with Python. With ``--model DIR``:
adapters of any Hugging Face causal language model on disk.

    python examples/finetune_lora.py                       # some minutes on two cores
    python examples/finetune_lora.py --model ~/models/Qwen3-1.7B --data notes.txt --save adapters

The weights below the adapters are frozen: they have no gradients, no optimizer state and no copy, and devices only
read them.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import command_line
import finetune_llm
import torch
import transformers
from command_line import Parser, parse_devices, recorded
from torch import nn
from tqdm import tqdm

import roundpipe
from roundpipe.reports.tables import format_bytes, format_count, summary_table

HELD_OUT = 0.1
"""Share of the text, its end, that is not trained on."""
NUM_EVALUATED = 8
"""Batches of held-out text that the loss is measured on."""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = Parser(__doc__)
    parser.add_argument("--model", type=Path, metavar="DIR", help="checkpoint with its tokenizer")
    parser.add_argument("--data", type=Path, metavar="FILE", help="UTF-8 text to learn; default: Python's reference")
    parser.add_argument("--pretrain", type=int, default=200, help="steps on source code, without --model")
    parser.add_argument("--steps", type=int, default=150, help="steps of the adapters")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--seq", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--lr", type=float, default=2e-3, help="of the adapters")
    parser.add_argument("--sample", type=int, default=120, metavar="N", help="tokens to generate, before and after")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write the adapters here")
    parser.add_argument("--merge", type=Path, metavar="DIR", help="write the model with its adapters merged in here")
    options = parser.parse_args(argv)
    parser.require_positive(options, "pretrain", "steps", "rank", "batch", "seq", "microbatches", "sample")
    for folder in (options.save, options.merge):
        if folder is not None and folder.is_file():
            parser.error(f"{folder} is a file; give a folder")
    return options


def language_reference() -> str:
    """The texts that Python's ``help()`` shows, in a fixed order."""
    return "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))


def beginning(text: str) -> str:
    """Some words that a paragraph of prose begins with, to be continued."""
    found = re.search(r"\n\n(\w+ [a-z]+ .{24})", text)
    return text[:40] if found is None else found[1]


def tokens_of(text: str, tokenizer: Any) -> torch.Tensor:
    """A text as token numbers, `[T]`."""
    return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.long)


def compiled(llm: nn.Module, tokens: torch.Tensor, options: argparse.Namespace) -> Any:
    """The model, cut for the devices."""
    return roundpipe.compile(
        llm.train(),
        example_kwargs={"input_ids": tokens[None, : options.seq], "use_cache": False},
        devices=parse_devices(options.devices),
        model_run_config=roundpipe.RoundPipeRunConfig(num_microbatch=options.microbatches),
    )


def train(
    model: Any, data: Iterator[torch.Tensor], what: str, steps: int, lr: float, timeline: Path | None = None
) -> None:
    """An ordinary training loop; the update of one step runs while the next is computed.

    Args:
        model: the compiled model.
        data: batches of token numbers, `[B, S + 1]`.
        what: the name of the progress bar.
        steps: how many batches to train on.
        lr: learning rate of AdamW.
        timeline: where to write a recording of some steps; None: nowhere.
    """
    optimizer = torch.optim.AdamW(model.optim_parameters(), lr=lr)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    bar = tqdm(range(steps), desc=what, unit="step", dynamic_ncols=True)
    for _ in recorded(bar, model, timeline, steps):
        tokens = next(data)
        labels = tokens[:, 1:]
        loss = model.forward_backward(
            input_kwargs={"input_ids": tokens[:, :-1], "use_cache": False},
            label=labels,
            loss_fn=lambda outputs, piece, total=labels.numel(): finetune_llm.loss_function(outputs, piece, total),  # noqa: B008
        )
        model.step(update)
        bar.set_postfix(loss=f"{float(loss):.3f}")
    model.synchronize()


def evaluate(model: Any, data: Iterator[torch.Tensor]) -> float:
    """Mean cross entropy of some batches, run by the pipeline without gradients."""
    model.eval()
    losses = []
    with torch.no_grad():
        for _ in range(NUM_EVALUATED):
            tokens = next(data)
            outputs = model(input_ids=tokens[:, :-1], use_cache=False)
            losses.append(float(finetune_llm.loss_function(outputs, tokens[:, 1:], tokens[:, 1:].numel())))
    model.train()
    return sum(losses) / len(losses)


def generate(model: Any, tokenizer: Any, prompt: torch.Tensor, options: argparse.Namespace) -> str:
    """What the model writes after a prompt, `[T]`; ``generate`` is the model's own, on a device."""
    torch.manual_seed(options.seed)
    model.eval()
    text = model.generate(
        input_ids=prompt[None],
        attention_mask=torch.ones_like(prompt)[None],
        max_new_tokens=options.sample,
        do_sample=True,
        temperature=0.7,
        pad_token_id=tokenizer.eos_token_id,
    )
    model.train()
    return tokenizer.decode(text[0], skip_special_tokens=True)


def pretrained(options: argparse.Namespace) -> tuple[nn.Module, Any]:
    """The model to adapt and its tokenizer: from disk, or trained here on source code."""
    if options.model is not None:
        return finetune_llm.load_checkpoint(options.model)
    llm, tokenizer = finetune_llm.byte_llama()
    tokens = finetune_llm.load_tokens(None, tokenizer, options.seq)
    with compiled(llm, tokens, options) as model:
        data = finetune_llm.batches(tokens, options.batch, options.seq, options.seed)
        train(model, data, "all weights, source code", options.pretrain, 1e-3)
    return llm, tokenizer


def run(argv: list[str] | None) -> int:
    """Everything from the arguments to the samples; the exit code."""
    options = parse_arguments(argv)
    torch.manual_seed(options.seed)
    parse_devices(options.devices)
    llm, tokenizer = pretrained(options)
    if options.data is None:
        tokens = tokens_of(language_reference(), tokenizer)
    else:
        tokens = finetune_llm.load_tokens(options.data, tokenizer, options.seq)
    num_trained = min(int(len(tokens) * (1 - HELD_OUT)), len(tokens) - options.seq - 1)
    if num_trained <= options.seq:
        raise command_line.Refused(
            f"--data has {len(tokens)} tokens; --seq {options.seq} needs more than twice as many"
        )
    trained_on, held_out = tokens[:num_trained], tokens[num_trained:]

    adapted = finetune_llm.with_adapters(llm, options.rank)
    num_adapters = sum(one.numel() for one in adapted.parameters() if one.requires_grad)
    with compiled(adapted, trained_on, options) as model:
        prompt = tokens_of(beginning(tokenizer.decode(held_out)), tokenizer)[: options.seq]

        def loss() -> float:
            return evaluate(model, finetune_llm.batches(held_out, options.batch, options.seq, options.seed))

        loss_before, text_before = loss(), generate(model, tokenizer, prompt, options)
        data = finetune_llm.batches(trained_on, options.batch, options.seq, options.seed)
        train(model, data, "adapters", options.steps, options.lr, options.timeline)
        loss_after, text_after = loss(), generate(model, tokenizer, prompt, options)
        peak_bytes = model.peak_device_bytes()
        if options.save is not None:
            model.save_pretrained(options.save)
    summary = {
        "model": f"{format_count(sum(one.numel() for one in llm.parameters()))} parameters with adapters",
        "adapters": f"{format_count(num_adapters)} parameters of rank {options.rank}",
        "loss before": f"{loss_before:.3f} on text that is not trained on",
        "loss after": f"{loss_after:.3f}",
        "peak device memory": format_bytes(peak_bytes),
    }
    if options.save is not None:
        summary["saved to"] = str(options.save)
    if options.timeline is not None:
        summary["timeline"] = str(options.timeline)
    if options.merge is not None:
        merged: Any = adapted.merge_and_unload()  # type: ignore[operator]
        merged.save_pretrained(options.merge)
        tokenizer.save_pretrained(options.merge)
        summary["merged into"] = str(options.merge)
    print(summary_table(summary))
    print("\n--- before ---", text_before, "\n--- after ---", text_after, sep="\n")
    return 0


def main(argv: list[str] | None = None) -> int:
    """The program; returns its exit code."""
    transformers.logging.set_verbosity_error()
    return command_line.main("finetune_lora.py", run, argv)


if __name__ == "__main__":
    raise SystemExit(main())
