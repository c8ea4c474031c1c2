"""The table of promises is complete, and every test that it names is there and is collected."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract import TABLE, node_ids

ROOT = Path(__file__).parent.parent
NUMBERED = {"A": 8, "B": 4, "C": 6, "D": 8, "E": 5, "G": 5, "H": 5, "J": 5, "P": 10}


@functools.cache
def names_in(file: str) -> frozenset[str]:
    """The test functions of a file that `make test` runs."""
    tree = ast.parse((ROOT / file).read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return frozenset(node.name for node in functions if "pytest.mark.long" not in map(ast.unparse, node.decorator_list))


def test_every_row_is_there() -> None:
    numbered = {f"{letter}{number}" for letter, last in NUMBERED.items() for number in range(1, last + 1)}
    assert set(TABLE) == numbered | {"recompute", "errors", "K3", "K4"}


@pytest.mark.parametrize("row", list(TABLE))
def test_every_row_has_tests_that_exist(row: str) -> None:
    assert TABLE[row].tests, "a promise that nothing holds"
    assert len(set(TABLE[row].tests)) == len(TABLE[row].tests)
    for test in TABLE[row].tests:
        file, _, name = test.partition("::")
        assert name.startswith("test_") and name in names_in(f"tests/{file}"), test


def test_all_named_tests_are_collected() -> None:
    files = sorted({node.partition("::")[0] for node in node_ids()})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--no-header", *files]
    environment = {**os.environ, "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:]
    collected = {line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line}
    assert set(node_ids()) <= collected


def test_the_node_ids_are_printed_for_make() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.contract"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == node_ids()
    assert "python -m tests.contract" in (ROOT / "Makefile").read_text()
