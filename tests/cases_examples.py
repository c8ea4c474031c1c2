"""What the tests beside it share."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def assert_one_line(
    example: ModuleType, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example refuses with exit code 2 and one line on stderr that holds ``message``."""
    assert example.main(arguments) == 2
    printed = capsys.readouterr()
    lines = printed.err.strip().splitlines()
    assert len(lines) == 1, printed.err
    assert lines[0].startswith(f"{example.__name__}.py: error: ")
    assert message in lines[0]
