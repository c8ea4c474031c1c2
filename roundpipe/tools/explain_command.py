"""``explain``: what is traced and cut of a model, from `roundpipe.tools.explain`."""

from __future__ import annotations

import argparse
from pathlib import Path

from roundpipe.tools.arguments import DTYPES, MOST_RANK, MOST_SAMPLES, MOST_TOKENS, TARGET_HELP, Answer, Command, count
from roundpipe.tools.explain import explain
from roundpipe.tools.target import EXPLAINED_SEQ, load_target

EXPLAINED_SAMPLES = 2
"""One is not like others: dimensions of one are broadcast."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``explain``."""
    parser.add_argument("target", metavar="TARGET", help=TARGET_HELP)
    parser.add_argument(
        "--batch", type=count(MOST_SAMPLES), metavar="N", help=f"samples of the example; default: {EXPLAINED_SAMPLES}"
    )
    parser.add_argument(
        "--seq", type=count(MOST_TOKENS), metavar="N", help=f"tokens per sample; default: {EXPLAINED_SEQ}"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; default: bfloat16")
    parser.add_argument("--lora", type=count(MOST_RANK), metavar="RANK", help="with adapters of this rank")
    parser.add_argument("--eval", action="store_true", help="the model in evaluation mode; default: in training mode")
    parser.add_argument("--graph", type=Path, metavar="FILE", help="write the graph to FILE.dot or FILE.png")


def run(options: argparse.Namespace) -> Answer:
    """The answer of ``explain``."""
    dtype = DTYPES[options.dtype or "bfloat16"]
    target = load_target(
        options.target, dtype=dtype, seq=options.seq, lora_rank=options.lora, default_seq=EXPLAINED_SEQ
    )
    target.model.train(not options.eval)
    kwargs = target.kwargs_for(options.batch or target.batch or EXPLAINED_SAMPLES)
    explanation = explain(target.model, example_kwargs=kwargs, graph=options.graph)
    exit_code = 0 if explanation.error is None else 1
    if options.json:
        return Answer({**explanation.as_json(), "notes": list(target.notes)}, exit_code)
    return Answer("\n".join((str(explanation), *(f"Note: {note}." for note in target.notes))), exit_code)


COMMAND = Command(
    name="explain",
    summary="what is traced and cut of a model",
    description="The graph of a model, the layers it is cut into, what stays whole and why, what is carried over "
    "each cut, and when a call traces again; no weights are needed. Exit code 1: it can't be cut.",
    add_options=add_options,
    run=run,
)
