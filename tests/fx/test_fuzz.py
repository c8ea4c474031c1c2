"""Random modules through `roundpipe.compile`: kept whole or traced again if need be, but never another number.

Hypothesis drives the generator of `tests.fx.fuzz`, always with the same cases; `python -m tests.fx.fuzz --cases 2000`
runs as many others as wanted.
"""

from __future__ import annotations

import collections
import random

import hypothesis
from hypothesis import strategies

from tests.fx.fuzz.cases import Case, Scenario, Step, make_case
from tests.fx.fuzz.outcomes import Outcome, run

NUM_CASES = 4
"""Half a second or so each; more with the script."""

SEEN: collections.Counter[str] = collections.Counter()


@hypothesis.settings(max_examples=NUM_CASES, derandomize=True, database=None, deadline=None)
@hypothesis.given(strategies.integers(0, 2**32))
def test_random_modules_equal_eager(seed: int) -> None:
    case = make_case(random.Random(seed))
    outcome = run(case)
    SEEN[outcome.kind] += 1
    assert outcome.kind not in ("different", "crashed"), f"{outcome.detail}\n{case.scenario}\n{case.source}"


def test_the_fuzz_tells_a_difference() -> None:
    """A model that draws numbers differs from eager, which draws others: the comparison must see it."""
    source = (
        "import torch\nfrom torch import nn\nCALLS = []\nTABLE = {}\n"
        "class Root(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))\n"
        "    def forward(self, x, ids, mask, scale=1.0):\n"
        "        for layer in self.layers:\n"
        "            x = layer(x) NOISE\n"
        "        return x\n"
    )
    scenario = Scenario((Step(4, 6), Step(3, 5)), num_microbatches=2, num_workers=2)
    assert run(Case(source.replace("NOISE", ""), scenario)).kind in ("traced", "retraced")
    noisy = run(Case(source.replace("NOISE", "+ torch.rand(x.shape)"), scenario))
    assert noisy == Outcome("different", noisy.detail, noisy.num_layers) and "loss" in noisy.detail
