"""README and docs/ are true: code runs in order, shell lines, messages and names are those of the package.

The blocks of a page share one namespace, as in one file. A block that can't run here has a remark above it that says
why: ``<!-- not run: ... -->``, or ``<!-- needs: package -->``.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import roundpipe
from roundpipe.core.errors import RoundPipeError
from roundpipe.tools import command_line as cli
from tests.documents import (
    PAGES,
    README,
    ROOT,
    Block,
    blocks_of,
    names_missing_in_reference,
    shell_lines,
    undocumented_names,
)
from tests.tools.cases_command_line import TINY

SHELL_LINES = sorted({line for page in PAGES for line in shell_lines(page)})


def runs(block: Block) -> bool:
    """Whether a block is Python that can be run here."""
    kind, _, what = block.remark.partition(": ")
    if block.language != "python" or kind == "not run":
        return False
    return kind != "needs" or importlib.util.find_spec(what) is not None


def named(page: Path) -> str:
    return page.stem


@pytest.mark.parametrize("page", [page for page in PAGES if any(map(runs, blocks_of(page)))], ids=named)
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": page.stem}
    for index, block in enumerate(filter(runs, blocks_of(page))):
        exec(compile(block.text, f"{page.name}[{index}]", "exec"), namespace)
    for value in namespace.values():
        if isinstance(value, roundpipe.RoundPipe):
            value.close()


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_blocks_are_closed_and_of_a_known_language(page: Path) -> None:
    blocks = blocks_of(page)
    assert page.read_text().count("```") == 2 * len(blocks)
    assert {block.language for block in blocks} <= {
        "",
        "bash",
        "python",
        "text",
        "{toctree}",
        "{eval-rst}",
        "{options}",
    }
    for block in blocks:
        assert not block.remark or block.remark.startswith(("not run: ", "needs: "))
        if block.language == "python":
            compile(block.text, page.name, "exec")


@pytest.mark.parametrize("line", [line for line in SHELL_LINES if line.startswith("make ")])
def test_make_targets_exist(line: str) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    result = subprocess.run([*shlex.split(line), "--dry-run"], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr


def test_a_broken_link_fails_each_build_of_the_site(tmp_path: Path) -> None:
    """A page that is kept from the build before would not be read, nor warned of, again."""
    pytest.importorskip("myst_parser")
    (tmp_path / "conf.py").write_text('extensions = ["myst_parser"]\n')
    (tmp_path / "index.md").write_text("# Page\n\n[link](nowhere.md)\n")
    recipe = (ROOT / "Makefile").read_text()
    (options,) = re.findall(r"-m sphinx (.*) docs build/docs$", recipe, re.MULTILINE)
    command = [sys.executable, "-m", "sphinx", *options.split(), str(tmp_path), str(tmp_path / "built")]
    for _ in range(2):
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert result.returncode == 1 and "nowhere.md" in result.stderr, result.stderr


def test_extras_to_install_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = [line for line in SHELL_LINES if "pip install" in line and "[" in line]
    assert lines
    for line in lines:
        assert set(re.findall(r"\[([\w,]+)\]", line)[0].split(",")) <= set(extras), line


def test_commands_take_the_options_that_are_shown() -> None:
    """Scripts of this repository, the tests' campaigns, and the package's own commands."""
    shared = (ROOT / "examples" / "command_line.py").read_text()
    commands = (ROOT / "roundpipe" / "tools" / "command_line.py").read_text()
    for line in SHELL_LINES:
        words = shlex.split(line)
        script = next((ROOT / word for word in words if word.endswith(".py")), None)
        if script is None and "roundpipe" not in words:
            continue
        source = commands if script is None else script.read_text() + shared
        for option in words[
            words.index("roundpipe") if script is None else words.index(str(script.relative_to(ROOT))) :
        ]:
            assert not option.startswith("--") or option == "--help" or f'"{option}"' in source, line


FORECASTS = [
    pytest.param(line, id=f"{page.stem}-{number}", marks=() if page == README else pytest.mark.long)
    for page in PAGES
    for number, line in enumerate(shell_lines(page))
    if line.startswith("python -m roundpipe plan Qwen")
]


@pytest.mark.parametrize("line", FORECASTS)
def test_forecasts_run_as_they_are_shown(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a small model of that name in the folder, which takes as many tokens as the line asks for."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    _, _, _, command, model, *options = shlex.split(line)
    folder = tmp_path / model.removesuffix("/config.json")
    folder.mkdir(parents=True)
    lengths = [int(number) for option, number in pairwise(options) if option == "--seq"]
    asked = {"max_position_embeddings": max(lengths)} if lengths else {}
    (folder / "config.json").write_text(json.dumps(TINY | asked))
    assert cli.main([command, model, *options]) == 0
    assert "fits" in capsys.readouterr().out


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_names_of_the_package_in_the_text_exist() -> None:
    for page in PAGES:
        for dotted in set(re.findall(r"`roundpipe((?:\.\w+)+)", page.read_text())):
            value: object = roundpipe
            for name in dotted.strip(".").split("."):
                value = getattr(value, name, None) or importlib.import_module(f"{value.__name__}.{name}")  # type: ignore[attr-defined]


# The reference


def test_every_public_name_and_field_has_a_text() -> None:
    assert list(undocumented_names()) == []


def test_the_reference_has_every_public_name() -> None:
    assert names_missing_in_reference() == set()


# Troubleshooting


def texts_of_the_package() -> str:
    """All strings of the package, with ``{}`` where a value goes."""
    found = []
    for path in sorted((ROOT / "roundpipe").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values))
    return "\n".join(found)


def test_messages_of_the_troubleshooting_page_are_those_of_the_package() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    texts = texts_of_the_package()
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    assert len(rows) > 40
    for row in rows:
        for message in re.findall(r"`([^`]+)`", row):
            for piece in message.split("..."):
                assert piece.strip(" ,") in texts, f"no message has {piece!r}, of {message!r}"


def test_every_error_has_an_entry() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    errors = [name for name in roundpipe.__all__ if inspect.isclass(getattr(roundpipe, name))]
    for name in errors:
        if issubclass(getattr(roundpipe, name), RoundPipeError):
            assert re.search(rf"\b{name}\b", page), name
