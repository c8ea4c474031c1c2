"""Sizes that a model's code turns into text, or asks for their type: eager mode has plain numbers there."""

from __future__ import annotations

import logging
import numbers
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.fx.trace.tracer import trace
from tests.fx.against_eager import Seen, check
from tests.fx.test_fixed_lengths import tokens
from tests.fx.test_shapes import Layers

logger = logging.getLogger(__name__)
TABLE = {"6": 2.0, "[6, 8]": 3.0}


class Tokens(Layers):
    """Layers over tokens, and a forward that a test gives; lengths of tokens are symbols."""

    def __init__(self, run: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.table, self.run = nn.Embedding(20, 8), run
        self.at = nn.ParameterDict({"at_6": nn.Parameter(torch.randn(8))})

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.run(self, self.layers[0](self.table(ids))))


def seen_for(run: Callable[[Any, torch.Tensor], torch.Tensor]) -> Seen:
    """What becomes of a forward at a length of 6, of 5, and of 6 again."""
    seen = check(lambda: Tokens(run), tokens, sizes=[(4, 6), (4, 5), (6, 6)])
    assert not seen.fell_back and not seen.opaque
    return seen


@pytest.mark.parametrize(
    "use",
    [
        "TABLE.get(str(n), 1.0)",
        "TABLE.get(f'{n}', 1.0)",
        "TABLE.get(repr(n), 1.0)",
        "2.0 if '%s' % n == '6' else 1.0",
        "2.0 if f'{n:03d}' == '006' else 1.0",
        "2.0 if f'{n / 4}' == '1.5' else 1.0",
        "2.0 if str(n == 6) == 'True' else 1.0",
        "TABLE.get(str(list(x.shape[1:])), 1.0)",
        "model.at[f'at_{n}'] if f'at_{n}' in model.at else 1.0",
    ],
)
def test_a_text_of_a_size_has_its_number(use: str) -> None:
    assert seen_for(lambda model, x: x * eval(use, globals(), locals() | {"n": x.shape[1]})).trace_count == 2


def check_that(holds: bool, text: str) -> None:
    """Raises a text, as libraries do it."""
    if not holds:
        raise ValueError(text)


def test_a_text_for_people_serves_every_size() -> None:
    def run(_: Any, x: torch.Tensor) -> torch.Tensor:
        check_that(x.shape[1] > 1, f"there are {x.shape[1]} tokens")
        logger.debug(f"{x.shape[1]} tokens")
        check_that(
            x.shape[2] == 8,
            f"{x.shape[1]} tokens have {x.shape[2]} features",
        )
        return x

    assert seen_for(run).trace_count == 1


def test_a_text_for_people_needs_no_data() -> None:
    def run(_: Any, x: torch.Tensor) -> torch.Tensor:
        check_that(x.shape[1] > 1, f"the mean is {x.mean()}, and {x[x > 0].shape[0]} are positive")
        return x

    assert seen_for(run).trace_count == 1


def test_a_text_that_is_raised_has_the_number() -> None:
    def run(_: Any, x: torch.Tensor) -> torch.Tensor:
        check_that(x.shape[1] > 6, f"there are {x.shape[1]} tokens")
        return x

    run_once = Tokens(run)
    with pytest.raises(ValueError, match="there are 6 tokens"):
        roundpipe.compile(run_once, devices=["cpu"])(**tokens(4, 6))


def test_a_text_that_is_kept_by_a_statement_fixes_the_size() -> None:
    def run(_: Any, x: torch.Tensor) -> torch.Tensor:
        names: list[str] = []
        names.append(f"{x.shape[1]}")
        return x * TABLE.get(names[0], 1.0)

    assert seen_for(run).trace_count == 2


@pytest.mark.parametrize("kind", [int, (str, int), float | int, numbers.Number, numbers.Integral])
def test_a_size_is_an_integer(kind: Any) -> None:
    def run(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if isinstance(x.shape[1], kind) and not isinstance(x.shape[1] / 2, int) else x

    assert seen_for(run).trace_count == 1 and "isinstance" not in globals()


def test_a_leaf_takes_what_it_names_by_a_size() -> None:
    class Named(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * TABLE.get(f"{x.shape[1]}", 1.0)

    class Holds(Tokens):
        def __init__(self) -> None:
            super().__init__(lambda model, x: model.named(x))
            self.named = Named(8, 8)

    assert not check(Holds, tokens, sizes=[(4, 6), (4, 5)]).fell_back


def test_texts_for_others_than_the_models_code_fix_no_size() -> None:
    def run(_: Any, x: torch.Tensor) -> torch.Tensor:
        size: Any = x.shape[1]
        found.append(size.node.str())
        torch.nn.functional.relu(x.reshape(x.shape[0], -1))
        return x

    found: list[str] = []
    traced = trace(Tokens(run).double(), (), tokens(4, 6))
    assert not traced.guards.describe()
    assert not any(text.isdigit() for text in found) and "_text_of_size" not in str(torch.SymInt.__repr__)


class Broadcast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.target = nn.Linear(4, 4), nn.Parameter(torch.randn(1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        warnings.warn(f"{x.shape[0]} samples", stacklevel=1)
        return nn.functional.mse_loss(self.linear(x), self.target)


def test_warnings_of_torch_have_numbers_and_no_symbols() -> None:
    model, config = Broadcast(), roundpipe.RoundPipeRunConfig(num_microbatch=1)
    with (
        roundpipe.compile(model, devices=["cpu"], model_run_config=config) as pipe,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        with torch.no_grad():
            pipe(torch.randn(6, 4))
    said = [str(warning.message) for warning in caught]
    assert said[0] == "6 samples"
    assert any("input size (torch.Size([6, 4]))" in text for text in said[1:])
    assert not any(re.search(r"\bs\d+\b", text) for text in said)
