"""Every argument of every public entry point, with values that don't belong there: refused by name, or right."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import distributed
from roundpipe.integrations.arguments import RoundPipeArguments
from roundpipe.runtime.optimizer.update import StepHandle
from roundpipe.wrappers.model_view import ModelView
from tests.options.entries import ENTRIES, network
from tests.options.values import VALUES

RESULTS = {
    "RunReport",
    "Span",
    "distributed.ModelStage",
    "distributed.StageModule",
}
"""Classes of what users get and don't make."""
MADE_BY_METHODS = {"StepHandle"}
"""Classes of whose objects users call methods, and which they don't make."""
OF_MODULES = {name for name in vars(nn.Module) if name != "forward"}
"""Methods that are torch's; see `test_an_argument_of_torch`."""
OF_THE_LIBRARY = {
    "ExecutePlan.owners",
    "ExecutePlan.rings",
    "ExecutePlan.shares",
    "ExecutePlan.with_fewer_replicas",
    "ExecutePlan.workers",
    "RoundPipe.num_microbatches_for",
    "RoundPipe.own_losses",
}
"""Called by the library alone."""


def public() -> Iterator[tuple[str, Any]]:
    """Functions, classes that users make, and methods, by name; what is inherited, once."""
    names = [(name, getattr(roundpipe, name)) for name in roundpipe.__all__ if name != "distributed"]
    names += [("integrations.RoundPipeArguments", RoundPipeArguments)]
    names += [(f"distributed.{name}", getattr(distributed, name)) for name in distributed.__all__]
    seen: set[int] = set()
    for name, value in sorted([*names, ("StepHandle", StepHandle)], key=lambda item: item[0] != "RoundPipe"):
        is_class = isinstance(value, type)
        if name in RESULTS or id(value) in seen or (is_class and issubclass(value, BaseException)):
            continue
        seen.add(id(value))
        if name not in MADE_BY_METHODS:
            yield name, value
        for attribute in dir(value) if is_class else ():
            found = getattr(value, attribute)
            of_torch = issubclass(value, nn.Module) and attribute in OF_MODULES
            is_own = str(getattr(found, "__module__", "")).startswith("roundpipe")
            if attribute.startswith("_") or not callable(found) or id(found) in seen or of_torch or not is_own:
                continue
            seen.add(id(found))
            yield f"{name}.{attribute}", found


def arguments_of(function: Any) -> set[str]:
    """The names of its arguments, those among its ``**kwargs`` too."""
    named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = inspect.signature(function).parameters.values()
    names = {each.name for each in parameters if each.kind in named} - {"self"}
    return names | set(getattr(function, "further_options", ()))


def test_the_table_has_every_argument_of_every_public_name() -> None:
    found = {name: arguments_of(value) for name, value in public() if name not in OF_THE_LIBRARY}
    found = {name: arguments for name, arguments in found.items() if arguments}
    table = {name: set(entry.rules) for name, entry in ENTRIES.items() if entry.rules}
    assert found == table


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("argument", [f"{name}({each})" for name, entry in ENTRIES.items() for each in entry.rules])
def test_an_argument(argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    owner, name = argument.rstrip(")").split("(")
    entry = ENTRIES[owner]
    rule, wrong = entry.rules[name], []
    for value, make in VALUES.items():
        try:
            entry.call(**{name: make()})
        except Exception as error:
            refused = isinstance(error, roundpipe.RoundPipeError | TypeError | ValueError)
            is_named = refused and re.search(rf"\b{name}\b", str(error))
            if value not in rule.either and (value in rule.right or not is_named):
                wrong.append(f"{value}: {type(error).__name__}: {str(error)[:300]}")
        else:
            if value not in rule.right | rule.either:
                wrong.append(f"{value}: accepted")
    assert not wrong, "\n".join([argument, *wrong])


OVERRIDDEN = sorted(name for name in OF_MODULES & set(dir(ModelView)) if name in vars(ModelView) and name[0] != "_")
OF_TORCH = [
    f"{name}({each})"
    for name in OVERRIDDEN
    for each in sorted(arguments_of(getattr(nn.Module, name)) | arguments_of(getattr(ModelView, name)))
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("argument", OF_TORCH)
def test_an_argument_of_torch(argument: str) -> None:
    """What torch takes of it, we take or refuse in words of our own, and what raises there, raises here."""
    method, name = argument.rstrip(")").split("(")
    wrong = []
    for value, make in VALUES.items():
        with roundpipe.RoundPipe(network(), devices=["cpu"]) as piped:
            expected, found = (_raised(getattr(each, method), name, make()) for each in (network(), piped))
        if (expected is None) != (found is None) and not isinstance(found, roundpipe.ConfigError):
            wrong.append(f"{value}: {found!r}, and in torch {expected!r}")
    assert not wrong, "\n".join([argument, *wrong])


def _raised(function: Any, name: str, value: Any) -> Exception | None:
    """What it raises with a value for one argument, and right ones for others that it needs."""
    needed = [each.name for each in inspect.signature(function).parameters.values() if each.default is each.empty]
    right = {"name": "more", "module": nn.Identity(), "tensor": torch.ones(1), "param": None}
    try:
        result = function(**{each: right[each] for each in needed if each in right} | {name: value})
        if isinstance(result, Iterator):
            list(result)
    except Exception as error:
        return error
    return None
