"""Training under random timing, and what that finds: each wait that is taken out of the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from roundpipe.runtime.engine.step import StepState
from roundpipe.runtime.optimizer.hand_over import _Group
from roundpipe.runtime.weights.download import Download
from roundpipe.runtime.weights.gate import Gate
from roundpipe.runtime.weights.residency import Visit
from tests.races.schedules import problem_of

NUM_TRIES = 60


def passes(*args: Any) -> None:
    """In the place of a wait."""


# private, since no public name takes a wait away
WAITS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "the uploads of a visit": (Visit, "arrive", passes),
    "a microbatch of the stage before": (StepState, "wait_done", passes),
    "gradients on their way": (Download, "wait", passes),
    "gradients that an update takes": (_Group, "is_added", lambda group: True),
    "copies of the caller's tensors": (StepState, "detach", passes),
    "buffers": (StepState, "wait_settled", passes),
}
RARE: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "the gates of an update": (Gate, "wait", passes),
    "random draws": (StepState, "wait_runs", passes),
    "gradients of other workers": (StepState, "hand_in", lambda step, job, download, who: [(job.index, download)]),
    "uploads before an update writes": (_Group, "uploads", lambda group: []),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("seed", [0, 3, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(10, 40))])
def test_random_timing_changes_no_bit(seed: int) -> None:
    assert not problem_of(seed)


@pytest.mark.parametrize("wait", [*WAITS, *(pytest.param(wait, marks=pytest.mark.long) for wait in RARE)])
def test_a_wait_that_is_taken_out_is_found(wait: str) -> None:
    owner, name, instead = {**WAITS, **RARE}[wait]
    with patch.object(owner, name, instead):
        assert any(problem_of(seed) for seed in range(NUM_TRIES))
