"""What the fuzz of user actions takes for rounding, and what it does not."""

from dataclasses import replace

import pytest
import torch

from tests.actions.campaign import Case, draw_case, run
from tests.actions.models import Block, NormBlock, Setup
from tests.actions.sides import Piped

SETUP = Setup(3, "compile", (Block, NormBlock), False, torch.float32, 1, None)
ACTIONS = (("train", 5), ("synchronize", 6))


@pytest.fixture
def gradients_off(monkeypatch):
    """Gradients of the wrapper's side are off by a factor, in some precisions."""

    def make(factor, *dtypes):
        train = Piped.train

        def off(side, *args):
            result = train(side, *args)
            side.pipe.synchronize()
            for parameter in side.model.parameters():
                if parameter.grad is not None and parameter.dtype in dtypes:
                    parameter.grad.mul_(factor)
            return result

        monkeypatch.setattr(Piped, "train", off)

    return make


def test_a_gradient_that_cancels_but_for_rounding_is_equal():
    """Of a bias in front of a norm: 0, if not for rounding, which is larger than any share of itself."""
    outcome = run(draw_case(960069, 0))
    assert outcome.kind == "equal", outcome.detail


@pytest.mark.parametrize("begins_single", [True, False])
def test_what_differs_in_single_precision_alone_is_rounding_if_it_is_small(gradients_off, begins_single):
    gradients_off(1 + 1e-2, torch.float32)
    setup = SETUP if begins_single else replace(SETUP, dtype=torch.float64)
    outcome = run(Case(setup, ACTIONS if begins_single else (("convert", 7), *ACTIONS)))
    assert outcome.kind == "equal" and "rounding" in outcome.detail


@pytest.mark.parametrize(
    ("factor", "of", "dtype"),
    [
        (1 + 1e-2, (torch.float32, torch.float64), torch.float32),
        (1 + 1e-1, (torch.float32,), torch.float32),
        (1 + 1e-6, (torch.float64,), torch.float64),
    ],
)
def test_other_differences_are_found(gradients_off, factor, of, dtype):
    gradients_off(factor, *of)
    assert run(Case(replace(SETUP, dtype=dtype), ACTIONS)).kind == "different"
