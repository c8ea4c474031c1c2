"""The README is true: snippets run in order, shell lines name what exists, the table is the one printed."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from roundpipe.runtime.schedule import ExecutePlan, make_schedule

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
    picture = str(make_schedule(plan, 3, 4))
    assert picture.strip() in [block.text.strip() for block in BLOCKS if block.language == "text"]


def test_the_gate_is_explained(outputs: list[tuple[Block, str]]) -> None:
    assert re.search(r"^1 +\S", outputs[-1][1], re.MULTILINE)


@pytest.mark.parametrize("line", [line for line in SHELL_LINES if line.startswith("make ")])
def test_make_targets_exist(line: str) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    result = subprocess.run([*shlex.split(line), "--dry-run"], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("line", [line for line in SHELL_LINES if line.startswith("python ")])
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


def test_the_training_loop_is_short() -> None:
    loop = next(block for block in BLOCKS if block.language == "python")
    assert len([line for line in loop.text.splitlines() if line.strip()]) <= 20


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX")
def test_ci_is_executable() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
