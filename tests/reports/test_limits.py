"""The word for what decides how long a step takes."""

import pytest

from roundpipe.reports.limits import ADVICE, LIMITS, limit_of

BUSY_OPTIMIZER = {"update": 0.6, "hand-over": 0.3}
CASES = {
    "nothing waits": ({"overhead": 0.03, "weights": 0.05}, {}, "compute"),
    "uploads": ({"weights": 0.3, "activations": 0.1, "overhead": 0.3}, {}, "up"),
    "gradients": ({"gradients": 0.3, "weights": 0.1}, BUSY_OPTIMIZER, "down"),
    "slow update": ({"optimizer": 0.3, "weights": 0.1}, BUSY_OPTIMIZER, "update"),
    "slow hand-over": ({"optimizer": 0.3}, {"update": 0.1, "hand-over": 0.2}, "hand-over"),
    "an update that the round hides": ({"optimizer": 0.16}, {"update": 0.35, "hand-over": 0.29}, "hand-over"),
    "slow ranks": ({"optimizer": 0.3}, {"update": 0.1, "hand-over": 0.1, "averaging": 0.5}, "averaging"),
    "the caller waits in step": ({"caller": 0.5}, BUSY_OPTIMIZER, "update"),
    "the caller reads data": ({"caller": 0.5}, {"update": 0.2, "hand-over": 0.1}, "caller"),
    "few microbatches": ({"no_work": 0.4, "weights": 0.2}, {}, "stages"),
    "small microbatches": ({"overhead": 0.4}, {}, "overhead"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_largest_cause_is_the_limit(case):
    idle, optimizer_s, expected = CASES[case]
    assert limit_of(idle, optimizer_s, wall_s=1.0) == expected


def test_every_limit_has_advice():
    assert set(ADVICE) == set(LIMITS)
