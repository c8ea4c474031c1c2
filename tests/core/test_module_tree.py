"""Quick walks over module trees give what torch's own give, in its order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe.core.module_tree import (
    buffers_at,
    buffers_in,
    modules_in,
    named_modules_in,
    parameters_at,
    parameters_in,
    places_in,
)


def shared() -> nn.Module:
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model = nn.Sequential(
        nn.ModuleDict({"a": inner, "b": nn.Sequential(inner, nn.Linear(2, 2))}), inner, nn.Linear(2, 2)
    )
    model[2].weight = model[1][0].weight
    model[2].bias = None
    model.register_module("nothing", None)
    return model


class Backwards(nn.Module):
    """Its own order."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        yield from reversed(list(super().named_modules(*args, **kwargs)))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from reversed(list(super().named_parameters(*args, **kwargs)))


def cyclic() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].add_module("above", model)
    return model


@pytest.mark.parametrize(
    "make",
    [
        shared,
        cyclic,
        Backwards,
        lambda: nn.Sequential(nn.Linear(2, 2), Backwards()),
        lambda: torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU())),
    ],
    ids=["shared", "cyclic", "its own order", "its own order inside", "scripted"],
)
def test_as_torch_walks(make: Any) -> None:
    model = make()
    assert list(map(id, modules_in(model))) == list(map(id, model.modules()))
    assert list(named_modules_in(model)) == [name for name, _ in model.named_modules()]
    assert list(map(id, named_modules_in(model).values())) == list(map(id, model.modules()))
    assert list(map(id, parameters_in(model))) == list(map(id, model.parameters()))
    assert list(map(id, buffers_in(model))) == list(map(id, model.buffers()))


@pytest.mark.parametrize(
    "make",
    [
        shared,
        lambda: nn.Sequential(nn.BatchNorm1d(2), nn.ModuleDict({"a": nn.BatchNorm1d(2, affine=False)})),
        Backwards,
        lambda: nn.Sequential(nn.Linear(2, 2), Backwards()),
        lambda: torch.jit.script(nn.Sequential(nn.BatchNorm1d(2), nn.ReLU())),
    ],
    ids=["shared", "a tree", "its own order", "its own order inside", "scripted"],
)
def test_as_torch_names(make: Any) -> None:
    """Each at all of its names."""
    model = make()
    pairs = [
        (places_in(model), model.named_modules(remove_duplicate=False)),
        (parameters_at(model), model.named_parameters(remove_duplicate=False)),
        (buffers_at(model), model.named_buffers(remove_duplicate=False)),
    ]
    for found, expected in pairs:
        assert [(name, id(each)) for name, each in found] == [(name, id(each)) for name, each in expected]


def test_a_cycle_is_refused_as_by_torch() -> None:
    with pytest.raises(RecursionError):
        places_in(cyclic())
