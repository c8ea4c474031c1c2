"""Texts and language models of the examples: from disk, or small ones that need nothing but Python and transformers."""

from __future__ import annotations

import os
import pydoc_data.topics
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from command_line import Refused
from torch import nn

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STANDARD_LIBRARY_BYTES = 4_000_000


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


def language_reference() -> str:
    """The texts that Python's ``help()`` shows, in a fixed order."""
    return "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))


def tokens_of(text: str, tokenizer: Any) -> torch.Tensor:
    """A text as one row of token numbers, `[T]`."""
    pieces = [text[start : start + 10_000] for start in range(0, len(text), 10_000)]
    rows = tokenizer(pieces, add_special_tokens=False)["input_ids"] if pieces else []
    return torch.tensor([token for row in rows for token in row], dtype=torch.long)


def beginning(text: str) -> str:
    """Some words that a paragraph of prose begins with, to be continued."""
    found = re.search(r"\n\n(\w+ [a-z]+ .{24})", text)
    return text[:40] if found is None else found[1]


def load_tokens(
    path: Path | None, tokenizer: Any, seq: int, least: int = 1, default: Callable[[], str] | None = None
) -> torch.Tensor:
    """The tokens of a file, `[T]`, more than ``least`` sequences; without a path, of the default text."""
    try:
        text = (default or standard_library)() if path is None else path.read_text(encoding="utf-8")
    except OSError as error:
        raise Refused(f"--data {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise Refused(f"--data {path} is not UTF-8 text") from error
    tokens = tokens_of(text, tokenizer)
    if len(tokens) <= least * seq:
        raise Refused(f"--data {path} has {len(tokens)} tokens; --seq {seq} needs more than {least * seq}")
    return tokens


def batches(tokens: torch.Tensor, batch: int, seq: int, seed: int) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """Random windows without end: the model's arguments and, for each token `[B, S]`, the one that follows."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - seq, (batch, 1), generator=generator)
        rows = tokens[starts + torch.arange(seq + 1)]
        yield {"input_ids": rows[:, :-1], "use_cache": False}, rows[:, 1:]


def next_token_loss(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of logits `[B, S, V]` and labels `[B, S]`."""
    return F.cross_entropy(outputs.logits.flatten(0, 1).float(), labels.flatten())


def byte_tokenizer() -> Any:
    """A tokenizer with one token per byte, and one that ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # it comes in another order in every process
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def byte_llama(hidden_size: int = 256) -> tuple[Any, Any]:
    """A small Llama with random weights, and its tokenizer."""
    tokenizer = byte_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 11 // 4,
        num_hidden_layers=6,
        num_attention_heads=4,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    return transformers.LlamaForCausalLM(config), tokenizer


def load_checkpoint(folder: Path) -> tuple[nn.Module, Any]:
    """A causal language model in the dtype of its file, and its tokenizer."""
    if not folder.is_dir():
        is_name = folder.as_posix().count("/") == 1 and not folder.parent.exists()  # of a model on the hub
        fetch = f"; hf download {folder} --local-dir {folder.name} makes one" if is_name else ""
        raise Refused(f"--model {folder} is not a folder{fetch}")
    if not (folder / "config.json").is_file():
        raise Refused(f"--model {folder} has no config.json: not a Hugging Face checkpoint")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        architectures = config.architectures or []
        if not any("CausalLM" in name or "LMHead" in name for name in architectures):
            kind = " / ".join(architectures) or "base model"
            raise Refused(f"--model {folder} is a {kind}, not a causal language model")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype="auto")
    except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
        raise Refused(f"--model {folder} can't be loaded: {error}") from error
    return model, tokenizer


def sample(model: Any, tokenizer: Any, prompt: torch.Tensor, num_new: int) -> str:
    """What a model writes after a prompt, `[T]`."""
    is_training = model.training
    model.eval()
    text = model.generate(
        input_ids=prompt[None],
        attention_mask=torch.ones_like(prompt)[None],
        max_new_tokens=num_new,
        do_sample=True,
        temperature=0.7,
        pad_token_id=tokenizer.eos_token_id,
    )
    model.train(is_training)
    return tokenizer.decode(text[0], skip_special_tokens=True)
