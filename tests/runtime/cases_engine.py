"""What the tests beside it share."""

import pytest
from torch import nn

import roundpipe
from tests.runtime.models import (
    DTYPE,
    Noted,
)

workers = pytest.mark.parametrize("workers", [1, 2, 3])


grains = pytest.mark.parametrize("grain", ["stage", "layer"])


PLANS = {
    "planned": None,
    "one stage": roundpipe.ExecutePlan([], (0, 6), []),
    "one layer each": roundpipe.ExecutePlan(
        [(i, i + 1) for i in range(5)], (5, 6), [(i, i + 1) for i in reversed(range(5))]
    ),
    "uneven": roundpipe.ExecutePlan([(0, 1), (1, 4)], (4, 6), [(2, 4), (0, 2)]),
    "one backward": roundpipe.ExecutePlan([(0, 2), (2, 5)], (5, 6), [(0, 5)]),
}


plans = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


def norms():
    return nn.Sequential(
        nn.Linear(6, 6),
        nn.BatchNorm1d(6),
        Noted(),
        nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None), nn.Tanh()),
        nn.BatchNorm1d(6, track_running_stats=False),
        nn.Linear(6, 6),
    ).to(DTYPE)


def backends_of(piped):
    return piped._session.engine.backends  # streams and ledgers of workers: reports have sums
