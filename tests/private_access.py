"""Finds where tests take what is private to the package, and whether a comment says why."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

BY_NAME = {"getattr", "setattr", "hasattr", "delattr"}
"""Functions, and methods such as monkeypatch's, whose second argument is the name of an attribute."""


def private_names(sources: Iterable[ast.Module]) -> frozenset[str]:
    """Private names that the package binds, to anything; less those of torch's modules and tensors."""
    found: set[str] = set()
    for node in (node for source in sources for node in ast.walk(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    torchs = vars(torch.nn.Module()).keys() | set(dir(torch.Tensor))
    return frozenset(name for name in found if re.match("_[A-Za-z]", name)) - torchs


def _lines_with_access(tree: ast.Module, private: frozenset[str]) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of_others = not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "os"))
            if of_others and node.attr in private:
                yield node.end_lineno or node.lineno
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            function, key = node.func, node.args[1]
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if name in BY_NAME and isinstance(key, ast.Constant) and key.value in private:
                yield node.lineno


def accesses_without_reason(private: frozenset[str], tests: Iterable[Path]) -> Iterator[str]:
    """Files and lines that take what is private, without a comment there or above the first of successive ones."""
    for path in tests:
        text = path.read_text()
        lines = sorted(set(_lines_with_access(ast.parse(text), private)))
        if not lines:
            continue
        explained = set(_lines_with_comment(text))
        for line in lines:
            if line - 1 in explained and line - 1 in lines:
                explained.add(line)
        yield from (f"{path}:{line}" for line in lines if line not in explained)


def _lines_with_comment(text: str) -> Iterator[int]:
    """Of code: with a comment at the end, or with one above that has a line for itself."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not re.match(r"# (type|noqa|fmt)\b", token.string):
            yield token.start[0] + token.line.lstrip().startswith("#")
