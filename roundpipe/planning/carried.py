"""Carried values on a device: those that live there at a visit's peak.

A run, one microbatch through one stage, brings values up and leaves values or gradients to go down. They live until the
run is done and for as many runs more as the device may be behind its worker: some where values are small, one where
they are large (`num_ahead`). So at a visit's peak there are those of the run itself and those of the runs before it,
which may be of the worker's visit before.

A device that falls behind by one run alone would wait for its worker at each stage: values come up by the link that
brings the next stage's weights, and if they are not there by then, they wait for these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from roundpipe.core.layers import LayerCost

LARGE_BYTES = 64 * 1024**2
"""Of values of one run that several layers bring up or leave: with more, the worker waits between them."""
SMALL_BYTES = 4 * 1024**2
"""Of values of one run: with no more, plans count one run ahead, whose few MB are lost in what they leave."""
RUNS_AHEAD = 3
"""Runs given to an accelerator before the first of them is done: they keep it busy, and take its memory."""
AHEAD_BYTES = 128 * 1024**2
"""Of values of these runs: fewer are ahead where they have more, but one."""


def num_ahead(run_bytes: int) -> int:
    """Runs given to an accelerator before the first of them is done, from the bytes of one that come and go."""
    return max(min(AHEAD_BYTES // max(run_bytes, 1), RUNS_AHEAD), 1)


RecomputeGrain = Literal["stage", "layer"]


class Carried(NamedTuple):
    """Bytes of carried values and their gradients of one visit."""

    present: int
    """Of the run at its peak, beside what is counted with its layers."""
    held: int
    """Of the visit's runs before it, at that peak."""
    left: int
    """Of its last runs, which the worker's next visit finds."""


class CarriedValues:
    """The carried values of ranges of a chain's layers; if a run ``is_alone``, a visit is one run."""

    def __init__(self, costs: Sequence[LayerCost], grain: RecomputeGrain, *, is_alone: bool) -> None:
        self._carry_bytes = [cost.carry_bytes for cost in costs]
        self._input_bytes = costs[0].input_bytes or costs[0].carry_bytes
        self._label_bytes = costs[-1].label_bytes
        self._made_bytes = list(accumulate((cost.made_bytes or cost.carry_bytes for cost in costs), initial=0))
        self._grain = grain
        self._is_alone = is_alone
        layers = range(len(costs))
        self._ups = list(accumulate((self.before(i) + self.made(i, i + 1) for i in layers), initial=0))
        self._downs = list(accumulate(map(self.gradients, layers), initial=0))

    def before(self, start: int) -> int:
        """What comes up for a range, but for gradients."""
        return self._carry_bytes[start - 1] if start else self._input_bytes

    def made(self, start: int, stop: int) -> int:
        """What a range makes for the layers behind it."""
        return min(self._carry_bytes[stop - 1], self._made_bytes[stop] - self._made_bytes[start])

    def _label(self, stop: int) -> int:
        """What comes up for the loss, of a range that ends with it."""
        return self._label_bytes if stop == len(self._carry_bytes) else 0

    def gradients(self, start: int) -> int:
        """What goes down of a backward: nothing for the model's inputs."""
        return self.before(start) if start else 0

    def forward(self, start: int, stop: int, cuts: Sequence[int], peak: Callable[[int, int], int]) -> Carried:
        """Values go down at each of the cuts inside, for backward stages that begin there, and at the end.

        The layers from one to another have a peak of their own, the value that the first reads included.
        """
        first, leaving, made_since, has_waited = start, 0, start, False
        parts: list[tuple[int, bool]] = []
        for cut in (*cuts, stop):
            behind = min(cut + 1, stop)  # the layer behind the cut reads it, and so counts it
            if first < behind:
                parts.append((peak(first, behind) + leaving, has_waited))
                first = behind
            num_bytes = self.made(made_since, cut)
            if leaving and leaving + num_bytes > LARGE_BYTES:
                leaving, has_waited = 0, True
            leaving, made_since = leaving + num_bytes, cut
        found = self._of_runs(self.before(start) + self._label(stop), leaving)
        present_bytes = max(num_bytes for num_bytes, _ in parts)
        # what was waited for is gone, and with it all that was held
        most_bytes = max(num_bytes + (0 if is_over else found.held) for num_bytes, is_over in parts)
        return found._replace(
            present=found.present + present_bytes - peak(start, stop), held=most_bytes - present_bytes
        )

    def fused(self, start: int) -> Carried:
        return self._of_runs(self.before(start) + self._label_bytes, self.gradients(start))

    def backward(self, start: int, stop: int) -> Carried:
        if self._grain == "stage":
            found = self._of_runs(self.before(start) + self.made(start, stop), self.gradients(start))
            return found._replace(present=self.before(start))  # the gradient is counted with the last layer
        # layers take and leave values one by one, and those of the ones behind are still there
        up, down = (total[stop] - total[start] for total in (self._ups, self._downs))
        if up > LARGE_BYTES:  # then the worker has waited for some
            share = (LARGE_BYTES + up // (stop - start)) / up
            up, down = round(up * min(share, 1.0)), round(down * min(share, 1.0))
        found = self._of_runs(up, down)
        before_bytes = max(map(self.before, range(start, stop)))
        return found._replace(present=before_bytes + (up + down) * (stop - start - 1) // (stop - start))

    def _of_runs(self, up_bytes: int, down_bytes: int) -> Carried:
        """Of runs that have so much on the device when they end."""
        if self._is_alone:  # the device is done with it; what goes down may still do so in the next visit
            return Carried(up_bytes, 0, down_bytes)
        run_bytes = up_bytes + down_bytes
        held_bytes = run_bytes if run_bytes <= SMALL_BYTES else num_ahead(run_bytes) * run_bytes
        return Carried(up_bytes, held_bytes, held_bytes)
