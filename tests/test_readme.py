"""The README is true: snippets run in order, shell lines name what exists, the table is the one printed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

from roundpipe.core.schedule import ExecutePlan, make_schedule
from tests.runtime.schedule_rules import table

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


class Block(NamedTuple):
    language: str
    text: str


BLOCKS = [Block(*found) for found in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)]
SHELL_LINES = [
    line.partition(" #")[0].strip()
    for block in BLOCKS
    if block.language == "bash"
    for line in block.text.splitlines()
    if line.strip()
]


@pytest.fixture(scope="module")
def outputs() -> list[tuple[Block, str]]:
    """Every Python snippet with what it printed; they share one namespace, as in one file."""
    namespace: dict[str, object] = {"__name__": "readme"}
    printed = []
    for index, block in enumerate(block for block in BLOCKS if block.language == "python"):
        stream = io.StringIO()
        with contextlib.redirect_stdout(stream):
            exec(compile(block.text, f"README.md[{index}]", "exec"), namespace)
        printed.append((block, stream.getvalue()))
    namespace["model"].close()  # type: ignore[attr-defined]
    return printed


def test_every_block_has_a_language_that_is_checked_here() -> None:
    assert {block.language for block in BLOCKS} == {"bash", "python", "text"}
    assert README.count("```") == 2 * len(BLOCKS)


def test_snippets_run(outputs: list[tuple[Block, str]]) -> None:
    assert len(outputs) == sum(block.language == "python" for block in BLOCKS)


def test_the_partition_table_is_the_one_that_the_snippet_prints(outputs: list[tuple[Block, str]]) -> None:
    snippet = "print(roundpipe.compile("
    printed = next(text for block, text in outputs if block.text.startswith(snippet))
    shown = BLOCKS[next(i for i, block in enumerate(BLOCKS) if block.text.startswith(snippet)) + 1]
    assert shown.language == "text"
    assert shown.text.strip() == printed.strip()


def test_the_picture_of_the_rotation_is_a_schedule() -> None:
    plan = ExecutePlan(forward=[(0, 3), (3, 6)], fused=(6, 8), backward=[(4, 6), (2, 4), (0, 2)])
    picture = table(make_schedule(plan, 3, 4))
    assert picture.strip() in [block.text.strip() for block in BLOCKS if block.language == "text"]


def test_the_gate_is_explained(outputs: list[tuple[Block, str]]) -> None:
    assert re.search(r"^1 +\S", outputs[-1][1], re.MULTILINE)


@pytest.mark.parametrize("line", [line for line in SHELL_LINES if line.startswith("make ")])
def test_make_targets_exist(line: str) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    result = subprocess.run([*shlex.split(line), "--dry-run"], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("line", [line for line in SHELL_LINES if line.startswith("python -m pip ")])
def test_extras_to_install_exist(line: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"\[([\w,]+)\]", line)
    assert named and set(",".join(named).split(",")) <= set(extras)


@pytest.mark.parametrize("line", [line for line in SHELL_LINES if re.match(r"python (?!-m pip )", line)])
def test_example_lines_use_options_that_exist(line: str) -> None:
    _, script, *arguments = shlex.split(line)
    source = (ROOT / script).read_text() + (ROOT / "examples" / "command_line.py").read_text()
    for argument in arguments:
        if argument.startswith("--"):
            assert f'"{argument}"' in source, f"{script} has no option {argument}"


def test_no_other_shell_lines() -> None:
    assert all(line.startswith(("make ", "python ")) for line in SHELL_LINES)


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert targets
    for target in targets:
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_names_of_the_package_in_the_text_exist() -> None:
    import roundpipe

    for dotted in set(re.findall(r"`roundpipe((?:\.\w+)+)", README)):
        value: object = roundpipe
        for name in dotted.strip(".").split("."):
            value = getattr(value, name)


def test_the_first_screen_says_what_it_is_how_to_install_it_and_how_to_use_it() -> None:
    screen = "\n".join(README.splitlines()[:50])
    assert "It is for people who" in screen
    assert "tokens/s" in screen and "-m pip install" in screen and "forward_backward" in screen
    loop = next(block for block in BLOCKS if block.language == "python")
    assert loop.text in screen
    assert len([line for line in loop.text.splitlines() if line.strip()]) <= 16


def test_figures_in_the_text_are_those_that_were_measured() -> None:
    """The table of the first screen, and the throughput on several devices."""
    results = ROOT / "benchmarks" / "results"
    one = json.loads((results / "throughput_h200.json").read_text())["results"]
    for name, way in {
        "plain PyTorch, everything on the device": "plain",
        "the same with activation checkpointing": "checkpointed",
        "roundpipe, all of the device's memory": "roundpipe",
        "roundpipe, told to use 24 GB": "budget",
    }.items():
        speed, peak_bytes = one[way]["tokens_per_s"], one[way]["peak_device_bytes"]
        share = f"{speed / one['plain']['tokens_per_s']:.2f}".replace("1.00", "1")
        assert f"| {name} | {speed / 1e3:.1f} K | {share} | {peak_bytes / 1e9:.1f} GB |" in README
    several = json.loads((results / "throughput_h200_x4.json").read_text())["results"]
    speeds = {number: several[f"roundpipe_x{number}"]["tokens_per_s"] for number in (2, 4)}
    share = speeds[4] / (4 * one["checkpointed"]["tokens_per_s"])
    assert f"gives {speeds[2] / 1e3:.1f} K and {speeds[4] / 1e3:.1f} K tokens/s, {share:.2f} of four cards" in README
    losses = json.loads((results / "long_run.json").read_text())["results"]
    waiting, stale = (sum(losses[mode]["ours"][-10:]) / 10 for mode in ("sync", "async"))
    assert f"at a loss of {waiting:.2f} with\n  `is_async=False` and of {stale:.2f} without" in README


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX")
def test_ci_is_executable() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
