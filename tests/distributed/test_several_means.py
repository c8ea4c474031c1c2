"""Each of several means counts by the targets of all ranks, as in one process on what they have together."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import Ranks
from tests.distributed.several_means import Case, joined, steps

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch is built without gloo")

CASES = [
    Case("pretraining", (5, 2), microbatches=3, is_async=True, options=(("recompute_grain", "layer"),)),
    Case("penalised", returns=True),
    Case("one mean", (5, 2)),
]
MORE = [
    Case("list", (6, 5), microbatches=1),
    Case("quotients", (5, 2), is_async=True),
    Case("penalised", (6, 1), microbatches=1, returns=True),
    Case("penalised", (4, 3), is_async=True, options=(("tiles", 2),)),
    Case("weights", (2,), is_async=True),
    Case("quotients", (6, 3), microbatches=3, options=(("tiles", 2),)),
]


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE, marks=pytest.mark.long)], ids=["some", "more"])
def test_losses_and_gradients_are_those_of_one_process(two: Ranks, cases: list[Case]) -> None:
    for case, *of_ranks in zip(cases, *two.run(steps, cases), strict=True):
        expected, reference = joined(case)
        for _, found, _ in of_ranks:
            assert len(found) == 1 + case.is_async
            for each in found:
                torch.testing.assert_close(each, reference, rtol=0, atol=1e-12, msg=f"gradients of {case}")
        if case.name == "one mean":  # has each rank's own loss
            continue
        for call, whole in enumerate(expected):
            pairs = [losses[call] for losses, *_ in of_ranks]
            average = torch.stack([torch.stack(own) if isinstance(own, list) else own for own in pairs]).mean(0)
            whole = torch.stack(whole) if isinstance(whole, list) else whole
            torch.testing.assert_close(average, whole, rtol=0, atol=1e-12, msg=f"loss of {case}")
        if case.returns:
            assert all(torch.equal(output, losses[-1]) for losses, _, output in of_ranks)
