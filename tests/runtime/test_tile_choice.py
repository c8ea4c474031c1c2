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


class Plans:
    """Each plan is named by its tiles, and takes the seconds that are given; so does none, with a tail of no bytes.

    The tail's bytes go with the number of tiles.
    """

    def __init__(self, seconds: dict[int, float], least_s: float) -> None:
        self._seconds, self._least_s = seconds, least_s
        self.asked: list[int] = []
        self.has_budget = True
        self.costs = SimpleNamespace(training_bytes=lambda call, tiles: [10, 1000 // max(tiles.tail, 1)])

    def choose(self, call, tiles, free=()):
        self.asked.append(tiles.tail)
        return tiles.tail

    def least_seconds(self, call, tiles, free=()):
        assert list(free) == [1], "the last layer"
        return self._least_s

    def seconds(self, call, tiles):
        return self._seconds.__getitem__

    prediction = seconds


@pytest.mark.parametrize(
    ("least_s", "seconds", "expected", "asked"),
    [
        pytest.param(0.98, {1: 1.0}, 1, [1], id="no room that counts"),
        pytest.param(0.5, {1: 1.0, 4: 0.95}, 4, [1, 4], id="the rest can bring little"),
        pytest.param(0.5, {1: 1.0, 4: 0.8, 16: 0.75}, 16, [1, 4, 16], id="finer ones bring as much again"),
        pytest.param(0.5, {1: 1.0, 4: 0.8, 16: 0.79}, 4, [1, 4, 16], id="finer ones bring too little"),
        pytest.param(0.5, {1: 1.0, 4: 0.98}, 1, [1, 4], id="too little"),
        pytest.param(0.5, {1: 1.0, 4: 1.1}, 1, [1, 4], id="tiles take more than the room brings"),
    ],
)
def test_a_tail_in_tiles_if_that_makes_the_plan_faster_by_enough(least_s, seconds, expected, asked):
    plans = Plans(seconds, least_s)
    call = SimpleNamespace(config=SimpleNamespace(tiles=None), chain=[None] * 2)

    plan, tiles = choose_with_tiles(plans, call)
    assert (plan, tiles) == (expected, Tiles(1, expected))
    assert plans.asked == asked


def test_a_tail_that_no_tiles_make_smaller_runs_whole():
    plans = Plans({1: 1.0}, 0.5)
    plans.costs.training_bytes = lambda call, tiles: [10, 1000]
    call = SimpleNamespace(config=SimpleNamespace(tiles=None), chain=[None] * 2)
    assert choose_with_tiles(plans, call) == (1, UNTILED)


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
