"""A part of the zoo, drawn from every kind: compiled models equal eager PyTorch."""

from __future__ import annotations

import zlib

import pytest

from roundpipe.testing.zoo.catalog import MAIN_TASKS, Row, all_rows
from roundpipe.testing.zoo.compare import examine
from roundpipe.testing.zoo.overrides import NOT_TRACED

ROWS_PER_KIND = {
    "causal-lm": 6,
    "masked-lm": 3,
    "seq2seq-lm": 3,
    "sequence-classification": 4,
    "image-classification": 4,
}
"""Rows of each main task; one of every other kind."""
ALWAYS = {
    "causal-lm/JetMoeForCausalLM": "how many tokens go to an expert differs from layer to layer",
    "causal-lm/BigBirdForCausalLM": "the model sets attributes of its layers",
    "causal-lm/MambaForCausalLM": "padding reaches a layer whose sizes are found by running it",
    "causal-lm/LlamaForCausalLM": "the usual decoder",
    "seq2seq-lm/T5ForConditionalGeneration": "the first block's position bias serves all of them",
}
"""Rows that are always there, with what they show."""


def chosen_rows() -> list[Row]:
    """A few rows of each kind, the same ones every time."""
    rows = [row for row in all_rows() if row.key not in NOT_TRACED]
    kinds: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: zlib.crc32(row.key.encode())):
        kinds.setdefault(row.kind, []).append(row)
    chosen = [row for kind, members in kinds.items() for row in members[: ROWS_PER_KIND.get(kind, 1)]]
    return chosen + [row for row in rows if row.key in ALWAYS and row not in chosen]


@pytest.mark.parametrize("row", chosen_rows(), ids=lambda row: row.key)
def test_equals_eager(row: Row) -> None:
    result = examine(row)
    if not result.counts:
        pytest.skip(f"{result.status}: {result.cause}")
    assert result.status == "right", f"{result.status}: {result.cause}"
    assert result.num_layers >= 3
    if row.kind in MAIN_TASKS:
        assert result.num_layers >= result.num_blocks
        assert result.traces["batch"] == 1


@pytest.mark.parametrize("key", ALWAYS)
def test_the_rows_that_are_always_there_are_there(key: str) -> None:
    pytest.importorskip("transformers", reason="the row is a model of transformers")
    assert key in {row.key for row in chosen_rows()}
