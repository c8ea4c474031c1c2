"""Train a byte-level Llama with the Hugging Face Trainer, in rotation: the import is all that differs.

    python examples/finetune_trainer.py                    # some minutes on two cores
    python examples/finetune_trainer.py --check            # and compare with the plain Trainer

The text is the reference that comes with Python: one paragraph is one sample, so lengths vary and batches are padded.
"""

from __future__ import annotations

import argparse
import contextlib
import pydoc_data.topics
import tempfile
from typing import Any

import command_line
import torch
import transformers
from command_line import Parser, parse_devices
from transformers import Trainer, TrainingArguments

from roundpipe import RoundPipeRunConfig
from roundpipe.integrations.transformers import RoundPipeArguments, RoundPipeTrainer
from roundpipe.reports.tables import format_bytes, summary_table

PADDING = 0
NUM_EVALUATED = 32
"""Paragraphs that are not trained on."""
TOLERANCE = 1e-4
"""Of ``--check``: by how much losses may differ, relatively."""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = Parser(__doc__)
    parser.add_argument("--steps", type=int, default=100, help="updates of the weights")
    parser.add_argument("--batch", type=int, default=4, help="paragraphs per batch")
    parser.add_argument("--accumulate", type=int, default=4, help="batches per step, the microbatches of one round")
    parser.add_argument("--seq", type=int, default=128, help="bytes of a paragraph at most")
    parser.add_argument("--layers", type=int, default=6, help="of the Llama")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    options = parser.parse_args(argv)
    parser.require_positive(options, "steps", "batch", "accumulate", "seq", "layers", "microbatches")
    return options


def paragraphs(seq: int) -> list[dict[str, torch.Tensor]]:
    """Token numbers of each paragraph of Python's reference: its bytes, plus one."""
    text = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    rows = [paragraph.encode()[:seq] for paragraph in text.split("\n\n") if len(paragraph) > 1]
    return [{"input_ids": torch.tensor(list(row)) + 1} for row in rows]


def padded(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch, `[B, S]`; padding is no target."""
    rows = [sample["input_ids"] for sample in samples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)
    mask = (ids != PADDING).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def make_model(options: argparse.Namespace) -> Any:
    """A small Llama, the same for the same seed."""
    torch.manual_seed(options.seed)
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": options.layers}
    config = transformers.LlamaConfig(vocab_size=257, num_attention_heads=4, use_cache=False, **sizes)
    return transformers.LlamaForCausalLM(config)


def make_trainer(kind: type[Trainer], options: argparse.Namespace, folder: str, **rotation: Any) -> Any:
    """A trainer of either kind; only the rotation's options differ."""
    arguments = TrainingArguments(
        folder,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=options.lr,
        lr_scheduler_type="cosine",
        logging_steps=max(options.steps // 10, 1),
        save_strategy="no",
        report_to=[],
        seed=options.seed,
        use_cpu=not torch.accelerator.is_available(),
    )
    data = paragraphs(options.seq)
    held_out, data = data[:NUM_EVALUATED], data[NUM_EVALUATED:]
    return kind(make_model(options), arguments, padded, data, held_out, **rotation)


def losses(trainer: Trainer) -> list[float]:
    """What it has logged, training and evaluation."""
    return [entry[name] for entry in trainer.state.log_history for name in ("loss", "eval_loss") if name in entry]


def run(argv: list[str] | None) -> int:
    """Everything from the arguments to the table; the exit code."""
    options = parse_arguments(argv)
    rotation = RoundPipeArguments(
        devices=parse_devices(options.devices),  # type: ignore[arg-type]
        run_config=RoundPipeRunConfig(num_microbatch=options.microbatches),  # type: ignore[arg-type]
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(RoundPipeTrainer, options, folder, roundpipe=rotation)
        before = trainer.evaluate()["eval_loss"]
        with contextlib.nullcontext() if options.timeline is None else trainer.pipe.record_timeline(options.timeline):
            trainer.train()
        summary = {
            "loss before": f"{before:.3f} on paragraphs that are not trained on",
            "loss after": f"{trainer.evaluate()['eval_loss']:.3f}",
            "peak device memory": format_bytes(trainer.pipe.peak_device_bytes()),
        }
        trainer.pipe.close()
        difference = 0.0
        if options.check:
            plain = make_trainer(Trainer, options, folder)
            plain.train()
            plain.evaluate()
            pairs = zip(losses(plain), losses(trainer)[-len(losses(plain)) :], strict=True)
            difference = max(abs(one - other) / one for one, other in pairs)
            summary["check"] = f"losses differ from the plain Trainer's by {difference:.1e} at most"
    print(summary_table(summary))
    return 0 if difference <= TOLERANCE else 1


def main(argv: list[str] | None = None) -> int:
    """The program; returns its exit code."""
    transformers.logging.set_verbosity_error()
    return command_line.main("finetune_trainer.py", run, argv)


if __name__ == "__main__":
    raise SystemExit(main())
