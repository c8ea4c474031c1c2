"""The README and the pages of docs/ as data: their blocks of code, and what a remark above a block says of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]


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
