"""The README and the pages of docs/ as data, and public names that lack a text; ``make docs`` reads this, too."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import roundpipe

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
PUBLIC = [*roundpipe.__all__, *(f"distributed.{name}" for name in roundpipe.distributed.__all__)]


class Block(NamedTuple):
    language: str
    text: str
    remark: str
    """Of the line above: ``not run: REASON``, ``needs: PACKAGE``, or empty."""


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found = re.findall(
        r"^(?:<!-- (.*?) -->\n)?```([\w{}-]*)[^\n]*\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL
    )
    return [Block(language, text, remark) for remark, language, text in found]


def shell_lines(page: Path) -> list[str]:
    """The lines of the blocks for a shell, without comments."""
    lines = [line for block in blocks_of(page) if block.language == "bash" for line in block.text.splitlines()]
    return [line.partition(" #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


def undocumented_names() -> Iterator[str]:
    """Names that are public or in the reference, and public members of such classes, without a text."""
    for name in sorted({*PUBLIC, *names_in_reference()}):
        if not name.startswith("integrations.transformers.") or importlib.util.find_spec("transformers"):
            yield from undocumented(name)


def undocumented(name: str) -> Iterator[str]:
    """A public name and its own public members, as far as they have no text."""
    value = pkgutil.resolve_name(f"roundpipe.{name}")
    if not inspect.getdoc(value):
        yield name
    if not inspect.isclass(value):
        return
    for kind in value.__mro__:
        if not kind.__module__.startswith("roundpipe."):
            continue
        fields = (
            {field.name for field in dataclasses.fields(kind) if "help" not in field.metadata}
            if dataclasses.is_dataclass(kind)
            else set()
        )
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


def names_in_reference() -> set[str]:
    text = (ROOT / "docs" / "api.md").read_text()
    return set(re.findall(r"^\.\. (?:auto|py:)\w+:: roundpipe\.([\w.]+)", text, re.MULTILINE))


def names_missing_in_reference() -> set[str]:
    """Public names that the reference does not list; of the package ``distributed`` each name is listed."""
    return set(PUBLIC) - names_in_reference() - {"distributed"}
