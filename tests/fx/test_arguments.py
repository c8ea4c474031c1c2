"""One call has one normal form, however its arguments are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from roundpipe.fx.arguments import CallForm


class Plain(nn.Module):
    """Parameters of the usual kind."""

    def forward(self, x: Any, mask: Any = None, *, scale: float = 1.0, **rest: Any) -> Any:
        return x


class Variadic(nn.Module):
    """Positional arguments of any number."""

    def forward(self, first: Any, /, second: Any, *more: Any) -> Any:
        return first


def test_positions_become_names() -> None:
    form, x, mask = CallForm(Plain()), torch.ones(1), torch.ones(1)
    expected = ((), {"x": x, "mask": mask})
    assert form.normalise((x, mask), {}) == expected
    assert form.normalise((x,), {"mask": mask}) == expected
    assert form.normalise((), {"mask": mask, "x": x}) == expected


def test_defaults_are_dropped_and_extras_kept() -> None:
    form = CallForm(Plain())
    assert form.normalise((1, None), {"more": 2}) == ((), {"x": 1, "more": 2})
    assert form.normalise((1,), {"scale": 2.0}) == ((), {"x": 1, "scale": 2.0})


def test_variadic_arguments_stay_in_place() -> None:
    form = CallForm(Variadic())
    assert form.normalise((1, 2), {}) == ((1,), {"second": 2})
    assert form.normalise((1, 2, 3), {}) == ((1, 2, 3), {})


def test_arguments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TypeError):
        CallForm(Variadic()).normalise((), {})
