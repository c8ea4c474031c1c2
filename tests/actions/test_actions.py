"""A fixed selection of the fuzz of user actions."""

import pytest

from tests.actions.campaign import draw_case, run

SEED = 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize("index", [9, *(pytest.param(index, marks=pytest.mark.long) for index in (12, 16, 20, 21, 32))])
def test_a_sequence_of_actions_is_as_in_eager_or_refused(index):
    outcome = run(draw_case(SEED, index))
    assert outcome.kind in ("equal", "refused"), outcome.detail
