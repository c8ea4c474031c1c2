"""The user's line: the code that called into the package, which names a wrapper and which warnings point at.

Between that code and here lie frames of the package and of torch (a module's call, decorators, containers), how many
depends on the call; so they are skipped by their files, never counted.
"""

from __future__ import annotations

import os
import sys
import warnings

import torch

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_FOLDERS = tuple(folder + os.sep for folder in (_PACKAGE, os.path.dirname(os.path.abspath(torch.__file__))))


def caller_name() -> str:
    """``filename:line`` of the code outside the package and torch that called into it; a notebook's cells are such."""
    frame = sys._getframe(_caller_level())
    path = frame.f_code.co_filename
    if (count := frame.f_globals.get("In")) and ("ipykernel" in path or path.startswith("<ipython-input")):
        return f"cell {len(count) - 1}:{frame.f_lineno}"
    return f"{os.path.basename(path)}:{frame.f_lineno}"


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """A warning that points at the code outside the package and torch that called into it."""
    warnings.warn(message, category, stacklevel=_caller_level() + 1)


def _caller_level() -> int:
    """How many frames above the function that calls this the user's code is; the outermost frame if there is none."""
    level, frame = 0, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_FOLDERS):
        level, frame = level + 1, frame.f_back
    return level
