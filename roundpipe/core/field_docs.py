"""Shows what the fields of a dataclass are for in ``help()``, which knows nothing of the texts below them."""

from __future__ import annotations

import ast
import inspect
import textwrap
from itertools import pairwise
from typing import TypeVar

Kind = TypeVar("Kind")


def with_field_docs(kind: type[Kind]) -> type[Kind]:
    """A class whose docstring also has the texts below its fields."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    except (OSError, TypeError, SyntaxError):  # there is no source: a frozen program
        return kind
    assert isinstance(body, ast.ClassDef)
    entries = []
    for field, text in pairwise(body.body):
        is_field = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if is_field and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            words = " ".join(str(text.value.value).split())
            entry = f"{field.target.id}: {words}"  # type: ignore[attr-defined]
            entries.append(textwrap.fill(entry, 112, initial_indent="    ", subsequent_indent="        "))
    kind.__doc__ = "\n".join([inspect.cleandoc(kind.__doc__ or ""), "", "Fields:", *entries])
    return kind
