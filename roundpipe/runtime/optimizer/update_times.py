"""What updates have taken lately, part by part: what predictions of steps and choices between plans go by.

An update is cold where memory is used for the first time: the first of all, which makes the optimizer's states, and the
first after some copies moved. Such ones count only until there are others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import median_low
from typing import NamedTuple

from roundpipe.planning.machine import ChainSeconds
from roundpipe.runtime.profiling.host_log import HostLog
from roundpipe.runtime.weights.gate import Steps
from roundpipe.runtime.weights.parameter_pair import ParameterPair

KEPT = 6
"""Updates whose seconds are kept, so that what was measured long ago is forgotten."""
SETTLED_WITHIN = 0.25
"""Share by which two updates in a row may differ that are taken to be warm."""
LONG_STEP_S = 0.5
STEADY_WITHIN = 0.05
"""Share by which long steps in a row may differ that are taken to be steady. Those of large models get shorter over
some steps, as their memory is touched for the first time; what is decided by them stays decided."""
MOST_LOOKED_AT = 4
"""Updates behind the first after which they are taken as they are, however much they differ."""


class _Taken(NamedTuple):
    """What one update took."""

    num_rounds: int
    """Whose gradients it had."""
    num_on_host: int
    """Parameters whose copies were on the host."""
    begin_s: float
    """From when it was asked for, or the update before had ended, until it began."""
    exchange_s: float
    """Weights into the model and gradients out of it, before it."""
    update_s: float
    """``step_fn``."""
    ready_s: float
    """Weights made ready behind it."""
    gradients_s: float
    """To add gradients to the host's and to convert them, since the update before."""
    asked_s: float
    """When it was asked for."""

    @property
    def on_host_s(self) -> float:
        return self.exchange_s + self.update_s + self.ready_s


class UpdateTimes:
    """Times the updates of one model: each is ``asked`` for, has a ``begin``, is ``exchanged`` and has an ``end``.

    Args:
        steps: tell how many rounds there were, and how long gradients took so far on their way to the optimizer.
    """

    def __init__(self, log: HostLog, steps: Steps) -> None:
        self._log = log
        self._steps = steps
        self._cold: _Taken | None = None
        """The first one since copies were made or moved."""
        self._warm: deque[_Taken] = deque(maxlen=KEPT)
        """Those behind it."""
        self._all_on_host: ChainSeconds | None = None
        self._asked = self._begun = 0, 0.0
        """Rounds so far, and the time, when the latest was asked for, and the one that has begun."""
        self._before = 0, 0.0
        """Rounds whose gradients were used, and seconds that these took."""
        self._marks: list[tuple[float, float, float]] = []

    def asked(self) -> None:
        """An update is asked for; the one before may not have ended."""
        self._log.asked()
        self._asked = self._steps.num_trained, time.perf_counter()

    def begin(self) -> None:
        self._begun = self._asked
        self._marks.clear()
        self._mark()

    def exchanged(self) -> None:
        """Weights are in the model, and gradients the optimizer's."""
        self._mark()

    def _mark(self) -> None:
        seconds = self._log.seconds
        self._marks.append((seconds["begin"], seconds["hand-over"], seconds["update"] + seconds["averaging"]))

    def end(self, pairs: Sequence[ParameterPair]) -> None:
        """It has run."""
        self._mark()
        before, between, now = self._marks
        (num_rounds, asked_s), home_s = self._begun, self._steps.home_s()
        num_before, home_before_s = self._before
        self._before = num_rounds, home_s
        copies = {id(pair.copy): pair for pair in pairs if pair.copy is not None and pair.parameter.requires_grad}
        num_parameters = sum(pair.parameter.numel() for pair in copies.values())
        num_on_host = sum(pair.parameter.numel() for pair in copies.values() if not pair.is_away)
        taken = _Taken(
            max(num_rounds - num_before, 1),
            num_on_host,
            begin_s=between[0] - before[0],
            exchange_s=between[1] - before[1],
            update_s=now[2] - before[2],
            ready_s=now[1] - between[1],
            gradients_s=home_s - home_before_s,
            asked_s=asked_s,
        )
        if self._cold is None or self._cold.num_on_host != num_on_host:
            self._cold = taken
            self._warm.clear()
        else:
            self._warm.append(taken)
        if num_on_host and self.are_warm:
            share = num_parameters / num_on_host
            self._all_on_host = ChainSeconds(*(share * seconds for seconds in self.per_round() or ()))

    @property
    def are_warm(self) -> bool:
        """Whether the latest updates tell what later ones will take."""
        return _are_warm(list(self._warm))  # the optimizer's thread may add one meanwhile

    def per_round(self) -> ChainSeconds | None:
        """What the optimizer's side takes of a round with copies where they are now; None: there was no update."""
        taken = list(self._warm) or [each for each in (self._cold,) if each is not None]
        if not taken:
            return None
        return ChainSeconds(
            update_s=median_low((each.update_s + each.ready_s) / each.num_rounds for each in taken),
            hand_over_s=median_low((each.begin_s + each.exchange_s) / each.num_rounds for each in taken),
            gradients_s=median_low(each.gradients_s / each.num_rounds for each in taken),
        )

    def all_on_host(self) -> ChainSeconds | None:
        """The same with all copies on the host, from when some were; None: that is not known well enough."""
        return self._all_on_host

    def on_host_s(self) -> tuple[float, float] | None:
        """Seconds of an update on the host, its hand-over among them, and between two; None: not known well enough.

        Between two, the shortest count: a new plan, or memory that is touched for the first time, makes one longer.
        """
        if not _are_warm(taken := list(self._warm)):
            return None
        gaps = [now.asked_s - then.asked_s for then, now in pairwise(taken)]
        if len(taken) < KEPT and _still_change(gaps):
            return None
        return median_low(each.on_host_s for each in taken), min(gaps)


def _still_change(gaps_s: Sequence[float]) -> bool:
    """Whether the latest steps are long ones, and of several lengths."""
    latest_s = gaps_s[-2:]
    return max(latest_s) >= LONG_STEP_S and (
        len(latest_s) < 2 or max(latest_s) - min(latest_s) > STEADY_WITHIN * max(latest_s)
    )


def _are_warm(taken: Sequence[_Taken]) -> bool:
    if len(taken) < 2:
        return False
    before_s, latest_s = (each.on_host_s for each in taken[-2:])
    return len(taken) >= MOST_LOOKED_AT or abs(latest_s - before_s) <= SETTLED_WITHIN * max(latest_s, before_s)
