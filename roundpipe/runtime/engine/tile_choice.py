"""Into how many tiles the rows of a call's layers are cut: few where nothing fits without, or where they bring time.

a plan fits untiled      in tiles of the tail too, if the room that larger stages have makes it faster by enough
none does                in the fewest tiles in which one does: of the tail, then of all layers
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from roundpipe.core.errors import DeviceMemoryError
from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.core.tiling import UNTILED, Tiles
from roundpipe.reports.tables import format_bytes
from roundpipe.runtime.config import ResolvedConfig
from roundpipe.runtime.engine.cost_model import CostModel, Prediction
from roundpipe.runtime.engine.spec import Call

logger = logging.getLogger(__name__)

TILES_GAIN = 0.03
"""Share of a step's time that tiles of the tail must be predicted to save where a plan fits without them."""
TAIL_RUNGS = (Tiles(1, 4), Tiles(1, 16), Tiles(1, 64), Tiles(1, 64, at_once=False))
LAYER_RUNGS = (Tiles(4, 64), Tiles(16, 64), Tiles(64, 256), Tiles(64, 256, at_once=False))
LADDER = (*TAIL_RUNGS, *LAYER_RUNGS)
"""Tiles to try, in turn. The tail is first: logits are what is largest, and its gradients are computed with it."""


def given_tiles(config: ResolvedConfig) -> Sequence[Tiles]:
    """Those that the user has chosen, to try in turn; empty: the choice is the planner's."""
    if config.tiles is None:
        return ()
    given = Tiles(config.tiles, config.tiles)
    return (given,) if given == UNTILED else (given, replace(given, at_once=False))


class PlansInTiles(Protocol):
    """Plans of calls in given tiles; ``free`` layers are taken as if what runs in them took no memory."""

    costs: CostModel

    @property
    def has_budget(self) -> bool: ...

    def choose(self, call: Call, tiles: Tiles, free: Iterable[int] = ()) -> ExecutePlan:
        """The best plan; a `DeviceMemoryError` if none fits."""

    def fits(self, call: Call, tiles: Tiles, free: Iterable[int] = ()) -> bool:
        """Whether a plan fits; quicker than a plan."""

    def least_seconds(self, call: Call, tiles: Tiles, free: Iterable[int] = ()) -> float:
        """Seconds per step that no plan goes below; quicker than a plan."""

    def prediction(self, call: Call, tiles: Tiles) -> Prediction | None:
        """The simulator's seconds per step of a plan; None where transfers take no time."""

    def seconds(self, call: Call, tiles: Tiles) -> Prediction:
        """Seconds per step of a plan."""


def choose_with_tiles(plans: PlansInTiles, call: Call) -> tuple[ExecutePlan, Tiles]:
    """The best plan, and the tiles it is for: none where one fits, unless they bring time; else few."""
    if given := given_tiles(call.config):
        for tiles in given[:-1]:
            with contextlib.suppress(DeviceMemoryError):
                return plans.choose(call, tiles), tiles
        return plans.choose(call, given[-1]), given[-1]
    try:
        plan, tiles = _faster_in_tiles(plans, call, plans.choose(call, UNTILED))
    except DeviceMemoryError:
        # the first is quicker, and may say no where values between layers are smaller in tiles
        may_fit = plans.fits(call, UNTILED, free=range(len(call.chain))) or plans.fits(call, LADDER[-1])
        found = _with_fewest_tiles(plans, call) if may_fit else _in_smallest_tiles(plans, call)
        if found is None:
            raise
        plan, tiles = found
    before, after = (plans.costs.training_bytes(call, each) for each in (UNTILED, tiles))
    if tiles != UNTILED and before is not None and after is not None:
        logger.info("what is computed for each token alone runs in tiles; %s", _savings(tiles, before, after))
    return plan, tiles


def choose_for(plans: PlansInTiles, call: Call) -> tuple[ExecutePlan, Tiles]:
    """A plan that training could have too; for an evaluation one without a backward where no such plan fits."""
    try:
        return choose_with_tiles(plans, call)
    except DeviceMemoryError:
        if not call.is_evaluation or call.has_own_plan:
            raise
    call.has_own_plan = True
    return choose_with_tiles(plans, call)


def tiles_to_try(plans: PlansInTiles, call: Call, tiles: Tiles) -> Iterator[Sequence[Tiles]]:
    """Tiles in which a call may need less memory: of the tail, then of other layers, which take long to measure."""
    for finer in _finer_tiles(call.config, tiles):
        if plans.has_budget and any(plans.costs.is_less(call, tiles, each) for each in (finer[0], finer[-1])):
            yield finer


def _with_fewest_tiles(plans: PlansInTiles, call: Call) -> tuple[ExecutePlan, Tiles] | None:
    """A plan in tiles; None if nothing runs in tiles."""
    tiles = UNTILED
    for rungs in tiles_to_try(plans, call, UNTILED):
        fewest = fewest_that_fit(rungs, functools.partial(plans.fits, call))
        tiles = fewest or rungs[-1]
        if fewest is not None:
            break
    return None if tiles == UNTILED else _in_tiles(plans, call, tiles)


def _in_smallest_tiles(plans: PlansInTiles, call: Call) -> tuple[ExecutePlan, Tiles] | None:
    """Likewise, where not even these fit: what is missing then is the least that can be missing."""
    return _in_tiles(plans, call, LADDER[-1]) if plans.costs.is_less(call, UNTILED, LADDER[-1]) else None


def _in_tiles(plans: PlansInTiles, call: Call, tiles: Tiles) -> tuple[ExecutePlan, Tiles]:
    try:
        return plans.choose(call, tiles), tiles
    except DeviceMemoryError as error:
        raise DeviceMemoryError(f"{error}. This already counts on {tiles.tail} tiles, the most there are") from None


def _faster_in_tiles(plans: PlansInTiles, call: Call, plan: ExecutePlan) -> tuple[ExecutePlan, Tiles]:
    """The plan; or one with the tail in tiles, whose room larger stages have, if it is faster by enough.

    The same for finer tiles, unless what the tail still takes can't bring enough, at what the room so far has brought.
    """
    found = plan, UNTILED
    predict = plans.prediction(call, UNTILED)
    if predict is None or not plans.has_budget or call.config.tiles is not None:
        return found
    untiled_s = found_s = predict(plan)
    if plans.least_seconds(call, UNTILED, [len(call.chain) - 1]) > (1 - TILES_GAIN) * untiled_s:
        return found
    for tiles in filter(operator.attrgetter("at_once"), TAIL_RUNGS):
        whole, tiled = (plans.costs.training_bytes(call, each) for each in (UNTILED, tiles))
        if whole is None or tiled is None or tiled[-1] >= whole[-1]:
            break
        other, seconds = _timed(plans, call, tiles)
        if seconds <= (1 - TILES_GAIN) * found_s:
            found, found_s = (other, tiles), seconds
        if (untiled_s - seconds) / (whole[-1] - tiled[-1]) * tiled[-1] < TILES_GAIN * found_s:
            break
    return found


def _timed(plans: PlansInTiles, call: Call, tiles: Tiles) -> tuple[ExecutePlan, float]:
    """The best plan in tiles, and its seconds per step."""
    plan = plans.choose(call, tiles)
    return plan, plans.seconds(call, tiles)(plan)


def _finer_tiles(config: ResolvedConfig, tiles: Tiles) -> Iterator[Sequence[Tiles]]:
    """Those behind some, in groups of which each takes longer to measure than the one before."""
    given = given_tiles(config)
    groups = (given,) if given else (TAIL_RUNGS, LAYER_RUNGS)
    rungs = [each for group in groups for each in group]
    left = rungs[rungs.index(tiles) + 1 :] if tiles in rungs else rungs
    yield from filter(None, ([each for each in group if each in left] for group in groups))


def fewest_that_fit(rungs: Sequence[Tiles], fits: Callable[[Tiles], bool]) -> Tiles | None:
    """The first of some tiles, each finer than the one before, that fit; None if the last don't.

    Each look takes long, and mostly the first do.
    """
    if fits(rungs[0]):
        return rungs[0]
    return rungs[bisect_left(rungs, True, lo=1, hi=len(rungs) - 1, key=fits)] if fits(rungs[-1]) else None


def _savings(tiles: Tiles, before: Sequence[int], after: Sequence[int]) -> str:
    """A message of the bytes that layers take without tiles and in them, those of the layer that takes the most."""

    def less(part: slice) -> str:
        return " instead of ".join(format_bytes(max(each[part], default=0)) for each in (after, before))

    text = f"the last layer and the loss in {tiles.tail} tiles: {less(slice(-1, None))}"
    return f"{text}; other layers in {tiles.layers}: {less(slice(-1))}" if tiles.layers > 1 else text
