"""The fewest tiles that fit, with few looks; where a plan fits without, those that make it faster by enough."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest

from roundpipe.core.layers import LayerCost
from roundpipe.core.tiling import UNTILED, Tiles
from roundpipe.planning.residency import DEVICE_BYTES_PER_S
from roundpipe.runtime.engine.cost_model import with_tiles
from roundpipe.runtime.engine.tile_choice import LAYER_RUNGS, TAIL_RUNGS, choose_with_tiles, fewest_that_fit


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


FREE = "free"


class Plans:
    """Each plan is named by its tiles, and takes the seconds that are given."""

    def __init__(self, seconds: dict[Tiles | str, float]) -> None:
        self._seconds = seconds
        self.asked: list[Tiles | str] = []
        self.has_budget = True
        self.costs = SimpleNamespace(
            is_less=lambda call, tiles, finer: finer in seconds, training_bytes=lambda call, tiles: None
        )

    def choose(self, call, tiles, free=()):
        self.asked.append(FREE if free else tiles)
        return self.asked[-1]

    def least_seconds(self, call, tiles, free=()):
        return 0.0

    def seconds(self, call, tiles):
        return self._seconds.__getitem__

    prediction = seconds


@pytest.mark.parametrize(
    ("untiled_s", "free_s", "tiled_s", "expected", "num_asked"),
    [
        pytest.param(1.0, 0.98, {}, UNTILED, 2, id="no room that counts"),
        pytest.param(1.0, 0.9, {}, UNTILED, 2, id="nothing runs in tiles"),
        pytest.param(1.0, 0.9, {4: 0.95, 16: 0.9}, Tiles(1, 16), 4, id="finer ones bring as much again"),
        pytest.param(1.0, 0.93, {4: 0.95, 16: 0.93}, Tiles(1, 4), 3, id="finer ones could bring little"),
        pytest.param(1.0, 0.9, {4: 0.95, 16: 0.98, 64: 1.1}, Tiles(1, 4), 5, id="finer ones are slower"),
        pytest.param(1.0, 0.9, {4: 0.98, 16: 0.95, 64: 0.94}, Tiles(1, 16), 5, id="the fewest bring too little"),
        pytest.param(1.0, 0.9, {4: 1.0, 16: 1.0, 64: 1.0}, UNTILED, 5, id="tiles take what the room brings"),
    ],
)
def test_a_tail_in_tiles_if_that_makes_the_plan_faster_by_enough(untiled_s, free_s, tiled_s, expected, num_asked):
    plans = Plans({UNTILED: untiled_s, FREE: free_s} | {Tiles(1, number): each for number, each in tiled_s.items()})
    call = SimpleNamespace(config=SimpleNamespace(tiles=None), chain=[None] * 3)

    assert choose_with_tiles(plans, call) == (expected, expected)
    assert len(plans.asked) == num_asked


def test_each_tile_reads_the_weights_and_adds_to_their_gradients():
    quarter = int(DEVICE_BYTES_PER_S) // 4
    frozen = LayerCost(1.0, 2.0, 10, 20, 1, weight_bytes=quarter, gradient_bytes=0)
    trained = replace(frozen, gradient_bytes=quarter)

    def seconds(layer: LayerCost, num_tiles: int, *, repeats: bool = False) -> tuple[float, float]:
        (found,) = with_tiles([layer], [replace(layer, num_tiles=num_tiles, repeats=repeats)])
        return found.forward_s, found.backward_s

    assert seconds(frozen, 0) == seconds(frozen, 4) == (1.0, 2.0), "which is hidden by what they compute"
    assert seconds(frozen, 16) == (4.0, 4.0)
    assert seconds(frozen, 16, repeats=True) == (4.0, 8.0)
    assert seconds(trained, 4) == (1.0, 5.0)
