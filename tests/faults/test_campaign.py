"""Two cases of the campaign of faults, in which a download of gradients failed and they stayed alive."""

import pytest

from tests.faults.campaign import draw_case, examine
from tests.faults.library import points_in_library


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [500049, pytest.param(400008, marks=pytest.mark.long)])
def test_a_fault_leaves_nothing_behind(seed):
    with points_in_library():
        assert examine(draw_case(seed)).problems == ()
