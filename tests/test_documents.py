"""README and docs/ are true: code runs in order, shell lines, messages and names are those of the package.

The blocks of a page share one namespace, as in one file. A block that can't run here has a remark above it that says
why: ``<!-- not run: ... -->``, or ``<!-- needs: package -->``.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import json
import re
import shlex
import shutil
import subprocess
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import roundpipe
from roundpipe.core.errors import RoundPipeError
from roundpipe.tools import command_line as cli
from tests.documents import PAGES, README, ROOT, Block, blocks_of, shell_lines
from tests.tools.cases_command_line import TINY

PUBLIC = [*roundpipe.__all__, *(f"distributed.{name}" for name in roundpipe.distributed.__all__)]
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
    """With a small model of that name in the folder."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    _, _, _, command, model, *options = shlex.split(line)
    folder = tmp_path / model.removesuffix("/config.json")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(TINY))
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


def undocumented(name: str) -> Iterator[str]:
    """A public name and its own public members, as far as they have no text."""
    value = roundpipe
    for part in name.split("."):
        value = getattr(value, part)
    if not inspect.getdoc(value):
        yield name
    if not inspect.isclass(value):
        return
    for kind in value.__mro__:
        if not kind.__module__.startswith("roundpipe."):
            continue
        fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
        yield from (
            f"{name}.{field}" for field in fields & set(vars(kind).get("__annotations__", ())) - described(kind)
        )
        for member, entry in vars(kind).items():
            function = entry.fget if isinstance(entry, property) else getattr(entry, "__func__", entry)
            if (
                inspect.isfunction(function)
                and not member.startswith("_")
                and not inspect.getdoc(getattr(value, member))
            ):
                yield f"{name}.{member}"


def described(kind: type) -> set[str]:
    """The fields with a text below them."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    body = tree.body  # type: ignore[attr-defined]
    return {
        entry.target.id
        for entry, text in zip(body, body[1:], strict=False)
        if isinstance(entry, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def test_every_public_name_and_field_has_a_text() -> None:
    assert [missing for name in PUBLIC for missing in undocumented(name)] == []


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    listed = set(re.findall(r"^\.\. (?:auto|py:)\w+:: roundpipe\.([\w.]+)", text, re.MULTILINE))
    assert set(roundpipe.__all__) - listed == {"distributed"}  # a package, of which the names are listed
    assert {f"distributed.{name}" for name in roundpipe.distributed.__all__} <= listed


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
