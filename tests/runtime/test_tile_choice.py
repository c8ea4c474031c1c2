"""The fewest tiles that fit are found, with few looks."""

from itertools import product

import pytest

from roundpipe.core.tiling import Tiles
from roundpipe.runtime.engine.tile_choice import LAYER_RUNGS, TAIL_RUNGS, fewest_that_fit


@pytest.mark.parametrize(
    ("rungs", "num_that_fit"), list(product((TAIL_RUNGS, LAYER_RUNGS, LAYER_RUNGS[-1:]), range(5)))
)
def test_the_fewest_that_fit(rungs: tuple[Tiles, ...], num_that_fit: int) -> None:
    fitting = rungs[len(rungs) - num_that_fit :] if num_that_fit <= len(rungs) else rungs
    asked: list[Tiles] = []

    def fits(tiles: Tiles) -> bool:
        asked.append(tiles)
        return tiles in fitting

    assert fewest_that_fit(rungs, fits) == next(iter(fitting), None)
    assert len(asked) == 1 if fitting == rungs else len(asked) <= 2 + len(rungs) // 2
