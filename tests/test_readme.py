"""The README's first screen and size, and figures that were measured; see also `tests.test_documents`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from pathlib import Path

import pytest

from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.core.schedule import make_schedule
from roundpipe.tools.optimizer_side import COPY_ACCESSES, conversion_bytes
from tests.documents import README, ROOT, blocks_of
from tests.runtime.schedule_rules import table

TEXT = README.read_text()
DOCS = ROOT / "docs"


def shown(page: Path) -> list[str]:
    """The blocks of plain text on a page."""
    return [block.text.strip() for block in blocks_of(page) if block.language == "text"]


def test_the_partition_table_is_the_one_that_the_snippet_prints() -> None:
    (snippet,) = [
        block.text for block in blocks_of(DOCS / "tuning.md") if block.text.startswith("print(roundpipe.comp")
    ]
    first = next(block.text for block in blocks_of(DOCS / "tuning.md") if block.language == "python")
    made, _, _ = first.partition("model =")
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream):
        exec(made + snippet, {})
    assert stream.getvalue().strip() in shown(DOCS / "tuning.md")


def test_the_picture_of_the_rotation_is_a_schedule() -> None:
    plan = ExecutePlan(forward=[(0, 3), (3, 6)], fused=(6, 8), backward=[(4, 6), (2, 4), (0, 2)])
    assert table(make_schedule(plan, 3, 4)).strip() in shown(DOCS / "tracing.md")


def test_the_first_screen_says_what_it_is_how_to_install_it_and_how_to_use_it() -> None:
    assert len(TEXT.splitlines()) <= 150
    screen = "\n".join(TEXT.splitlines()[:50])
    assert "It is for people who" in screen
    assert "make demo" in screen and "make test" in TEXT
    assert "tokens/s" in screen and "-m pip install" in screen and "forward_backward" in screen
    loop = next(block for block in blocks_of(README) if block.language == "python")
    assert loop.text in screen
    assert len([line for line in loop.text.splitlines() if line.strip()]) <= 16


def test_figures_in_the_text_are_those_that_were_measured() -> None:
    """The table of the first screen, the throughput on several devices, and what stale weights cost."""
    results = ROOT / "benchmarks" / "results"
    comparison = (DOCS / "comparison.md").read_text()
    one = json.loads((results / "throughput_h200.json").read_text())["results"]
    for name, way in {
        "plain PyTorch, everything on the device": "plain",
        "the same with activation checkpointing": "checkpointed",
        "roundpipe, all of the device's memory": "roundpipe",
        "roundpipe, told to use 24 GB": "budget",
    }.items():
        speed, peak_bytes = one[way]["tokens_per_s"], one[way]["peak_device_bytes"]
        share = f"{speed / one['plain']['tokens_per_s']:.2f}".replace("1.00", "1")
        row = f"| {name} | {speed / 1e3:.1f} K | {share} | {peak_bytes / 1e9:.1f} GB |"
        assert row in TEXT and row in comparison
    several = json.loads((results / "throughput_h200_x4.json").read_text())["results"]
    speeds = {number: several[f"roundpipe_x{number}"]["tokens_per_s"] for number in (2, 4)}
    share = speeds[4] / (4 * one["checkpointed"]["tokens_per_s"])
    two, four = (f"{speeds[number] / 1e3:.1f} K" for number in (2, 4))
    assert f"gives {two} and {four} tokens/s, {share:.2f} of four cards" in comparison
    assert f"{two} and {four} tokens/s" in (DOCS / "several-gpus.md").read_text()
    losses = json.loads((results / "long_run.json").read_text())["results"]
    waiting, stale = (sum(losses[mode]["ours"][-10:]) / 10 for mode in ("sync", "async"))
    words = re.sub(r"\s+", " ", (DOCS / "asynchronous.md").read_text())
    assert f"at a loss of {waiting:.2f} with `is_async=False` and of {stale:.2f} without" in words


def test_bytes_of_an_update_are_those_that_plans_count() -> None:
    moved = 4 * COPY_ACCESSES["adamw"] + sum(conversion_bytes(4, 2))
    assert f"the host moves {moved} bytes per parameter of a bfloat16 model" in (DOCS / "asynchronous.md").read_text()


def test_peaks_under_a_cap_are_those_that_were_measured() -> None:
    """Each row of the page has a run behind it, and each run a row."""
    runs = json.loads((ROOT / "benchmarks" / "results" / "fits_h200.json").read_text())["results"]
    measured = {run["command"].partition("fits.py ")[2]: run["steps"] for run in runs}
    eight, long = "--batch 32 --microbatches 8", "--grain layer"
    cases = [
        (f"plain-1.7b --cap 24 {eight}", f"plain-1.7b --cap 12 {eight}"),
        (f"plain-1.7b --cap 24 --budget 16 {eight}", None),
        (f"plain-3.6b --cap 24 {eight}", f"plain-3.6b --cap 12 {eight}"),
        (f"plain-3.6b --cap 24 --budget 16 {eight}", None),
        (f"qwen3-1.7b --cap 24 {eight}", f"qwen3-1.7b --cap 12 {eight}"),
        (None, f"qwen3-8b-lora --cap 12 --length 16384 {long}"),
        (None, f"qwen3-8b-lora --cap 12 --length 32768 {long} --steps 2"),
        (f"qwen3-8b-lora --cap 24 --length 131072 {long} --steps 3", None),
    ]
    _, _, rest = (DOCS / "hardware.md").read_text().partition("| peak under 24 GB | under 12 GB |\n|---|---|---|---|\n")
    rows = [line.split("|")[3:5] for line in rest.partition("\n\n")[0].splitlines()]
    for cells, commands in zip(rows, cases, strict=True):
        for cell, command in zip(cells, commands, strict=True):
            peaks = {f"{step['peak_gb']:.1f}" for step in measured.pop(command)} if command else set()
            shown = set(re.findall(r"([\d.]+) GB", cell))
            assert shown <= peaks and max(map(float, shown), default=0) == max(map(float, peaks), default=0), cell
    assert not measured


def test_rows_of_decoders_are_those_that_were_measured() -> None:
    """Speeds, the slowest and the fastest where a row was measured again, and peaks; in the order of the table."""
    cases = [
        ("rows_h200", "2.0b-all-8x4x2048", "auto"),
        ("rows_h200", "1.5b-24-8x4x2048", "auto"),
        ("rows_h200", "2.0b-24-4x1x2048", "auto"),
        ("rows_h200", "2.0b-24-4x1x2048", "full"),
        ("rows_h200_16_cores", "2.0b-24-4x1x2048", "auto"),
        ("rows_h200_16_cores", "2.0b-all-8x4x2048", "auto"),
        ("rows_h200_16_cores", "2.0b-all-4x1x2048", "auto"),
        ("rows_h200_16_cores", "1.5b-24-8x4x2048", "auto"),
        ("rows_h200_16_cores", "qwen3-8b-lora-24-4x1x4096", "auto"),
        ("rows_h200_16_cores", "qwen3-8b-lora-all-4x1x4096", "auto"),
        ("rows_h200", "qwen3-8b-lora-24-4x1x4096", "auto"),
        ("rows_h200", "2.0b-all-16x4x2048-x2", "auto"),
        ("rows_h200", "1.5b-24-16x4x2048-x2", "auto"),
        ("rows_h100", "2.0b-all-8x4x2048", "auto"),
        ("rows_h100", "2.0b-all-4x1x2048", "auto"),
        ("rows_h100", "1.5b-24-8x4x2048", "auto"),
        ("rows_h100", "2.0b-all-16x4x2048-x2", "auto"),
        ("rows_h100", "1.5b-24-16x4x2048-x2", "auto"),
        ("rows_h100", "8.0b-all-8x4x2048-x2", "auto"),
        ("rows_h100", "qwen3-8b-lora-24-4x1x4096", "auto"),
        ("rows_h100", "qwen3-8b-lora-all-4x1x4096", "auto"),
    ]
    _, _, rest = (DOCS / "comparison.md").read_text().partition("`residency` as below |")
    rows = [line.split("|")[3:6] for line in rest.partition("\n\n")[0].splitlines()[2:]]
    for (speed, _, peak), (file, name, kind) in zip(rows, cases, strict=True):
        measured = json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text())["results"]["rows"][name]
        ways = [way for key, way in measured["ways"].items() if key.partition(",")[0] == kind and "seconds" in way]
        speeds = sorted({f"{way['tokens_per_s'] / 1e3:.1f} K" for way in ways}, key=lambda text: float(text[:-2]))
        assert speed.strip() == " to ".join(dict.fromkeys((speeds[0], speeds[-1]))), name
        assert peak.split("(")[0].strip() == f"{max(way['peak_bytes'] for way in ways) / 1e9:.1f} GB", name


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX")
def test_ci_is_executable() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
