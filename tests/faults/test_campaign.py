"""Some cases of the campaigns of faults, in which a download of gradients failed, and of signals."""

import gc
from collections.abc import Iterator

import pytest

from tests.faults.campaign import examine
from tests.faults.cases import draw_plain_case
from tests.faults.library import points_in_library
from tests.faults.signals import Files


@pytest.fixture(autouse=True)
def only_what_is_made_here() -> Iterator[None]:
    """Cases look through all that is alive; what was there before is left out."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [500049, pytest.param(400008, marks=pytest.mark.long)])
def test_a_fault_leaves_nothing_behind(seed):
    with points_in_library():
        assert examine(draw_plain_case(seed)).problems == ()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [68, 16])
def test_ctrl_c_in_a_trace_leaves_nothing_behind(seed):
    with Files() as files:
        assert not files.examine(seed)
