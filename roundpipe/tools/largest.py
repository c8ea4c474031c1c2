"""The longest sequence, or the largest batch, that fits given devices, and what limits it.

Sizes are tried on plans as runs have them, in the finest tiles; then with the model cut otherwise, if more fits so.
What a plan needs grows about linearly with the size, so that a line through the sizes tried tells which to try next.

Invariant: the answer's own forecast fits, by a trace of that size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from tqdm import tqdm

from roundpipe.core.errors import ConfigError, DeviceMemoryError
from roundpipe.fx.passes.lower import LowerOptions
from roundpipe.fx.source import misfit
from roundpipe.planning.planner import LeastNeed
from roundpipe.reports.tables import counted, format_bytes
from roundpipe.tools.forecast import Forecast, cut_otherwise, forecast_at, plans_for
from roundpipe.tools.problem import Layers, Machine, Training
from roundpipe.tools.target import MOST_ELEMENTS, Target

What = Literal["length", "batch"]

SHORTEST = 16
"""Tokens per sample of the shortest sequence that is tried."""
FIRST_LENGTH = 8192
"""Tokens per sample of the first one."""
STEPS_PER_OCTAVE = 64
"""How finely sizes are told apart: in steps of a power of two, of at most this part of a size."""
MOST_TRIES = 20


@dataclass(frozen=True, slots=True)
class Largest:
    """What fits, and why no more does."""

    what: What
    size: int
    """Tokens per sample, or samples per step; none larger fits, to a step of the search."""
    limit: str
    """What a larger one would lack, in words."""
    forecast: Forecast
    """Of this size."""

    def __str__(self) -> str:
        unit = "token" if self.what == "length" else "sample"
        return f"{counted(self.size, unit)}: {self.limit}"


def largest(what: What, target: Target, machine: Machine, training: Training) -> Largest:
    """The longest sequence, or the largest batch in as many microbatches, that fits the devices and the host.

    Raises:
        ConfigError: samples have no length that could be another.
        DeviceMemoryError: none fits.
    """
    search = _SizeSearch(what, target, machine, training)
    try:
        return search.run()
    finally:
        search.bar.close()


class _SizeSearch:
    def __init__(self, what: What, target: Target, machine: Machine, training: Training) -> None:
        if what == "length" and target.with_tokens is None:
            raise ConfigError("--max-length: samples of this model have no number of tokens that could be another")
        self.what = what
        self.target = target
        self.machine = machine
        self.training = training
        self.layers: Layers | None = None
        """Of the latest trace."""
        self.options: LowerOptions | None = None
        """Of another cut, in which more fits; None: layers are cut for the device."""
        self.needs: dict[int, LeastNeed] = {}
        self.bar = tqdm(desc=f"roundpipe: largest {what}", unit=" tried", file=sys.stderr, leave=False, delay=2.0)

    def run(self) -> Largest:
        tokens = self.target.tokens_per_sample or 1
        per_sample = self.training.microbatch if self.what == "length" else tokens
        least, most = (SHORTEST if self.what == "length" else 1), MOST_ELEMENTS // per_sample
        start = FIRST_LENGTH if self.what == "length" else 1
        size, limit = largest_size(self._share, start, least, most), ""
        if (more := max(size + _step(size), least)) <= most and self._fits_otherwise(more):
            size = largest_size(self._share, more, least, most)
        while size:
            found = forecast_at(self._traced(size), self.machine, self._training(size))
            if found.fits:
                return Largest(self.what, self._shown(size), limit or self._limit(size), found)
            limit, host_bytes = "; and ".join(found.reasons), self.machine.host_memory_bytes
            size -= _step(size)
            if host_bytes is not None and found.fits_devices:
                host = found.streamed_host or found.host  # of which values between stages grow, and all else stays
                limit = f"the host has {format_bytes(host_bytes)} and would need {format_bytes(host.total)} for more"
                size = min(size, int(size * max(host_bytes - host.total + host.carried, 0) / max(host.carried, 1)))
                size -= size % _step(size) if size else 0
        raise DeviceMemoryError(f"no {self.what} fits: {limit or self._limit(0)}")

    def _target(self, size: int) -> Target:
        if self.what == "batch":
            return self.target
        assert self.target.with_tokens is not None
        target = self.target.with_tokens(size)
        return replace(target, notes=(*self.target.notes, *target.notes))

    def _training(self, size: int) -> Training:
        return self.training if self.what == "length" else replace(self.training, batch=self._shown(size))

    def _shown(self, size: int) -> int:
        """Of microbatches of this size, the batch."""
        return size if self.what == "length" else size * self.training.num_microbatches

    def _fits_otherwise(self, size: int) -> bool:
        """Whether a size fits that does not as layers are cut: it and others are tried in that cut from then on."""
        layers, need = cut_otherwise(self._layers(size), self.machine, self._training(size))
        if need.memory.total > self.machine.budget_bytes:
            return False
        self.layers, self.options = layers, layers.options
        self.needs.clear()
        return True

    def _traced(self, size: int) -> Layers:
        """Layers by a trace of a size, whose times are known exactly."""
        target, samples = self._target(size), self._training(size).microbatch
        if self.options is not None:
            return Layers.within(self.options, target, samples, self.machine.profile)
        return Layers.of(target, samples, self.machine)

    def _layers(self, size: int) -> Layers:
        """Layers by a trace that serves a size."""
        target, samples = self._target(size), self._training(size).microbatch
        if self.layers is None or misfit(self.layers.traced, (), target.kwargs_for(samples)) is not None:
            self.layers = self._traced(size)
        return replace(self.layers, target=target)

    def _share(self, size: int) -> float:
        """Of the devices' budget, what the plan with the least memory takes."""
        layers = self._layers(size)
        training = self._training(size)
        call = layers.call(training, self.machine.num_devices)
        self.needs[size] = need = plans_for(layers, self.machine, training).least_need(call)
        self.bar.set_postfix_str(f"{self._shown(size):,}: {format_bytes(need.memory.total)}")
        self.bar.update()
        return need.memory.total / self.machine.budget_bytes

    def _limit(self, size: int) -> str:
        """What the next larger size that was tried would need."""
        larger = min((other for other in self.needs if other > size), default=max(self.needs))
        need, layers = self.needs[larger], self._layers(larger)
        name, budget = layers.chain.specs[need.layer_index].name, format_bytes(self.machine.budget_bytes)
        return (
            f"with {self._shown(larger):,}, {name} needs {format_bytes(need.memory.total)} of the device's {budget}, "
            f"in the finest tiles: {need.memory}"
        )


def largest_size(share: Callable[[int], float], start: int, least: int, most: int) -> int:
    """The largest size from ``least`` to ``most``, to a step, whose share is at most one; 0 if none is.

    Args:
        share: grows with the size, about linearly.
        start: the first to try.
    """
    shares: dict[int, float] = {}
    width = 0
    size = min(max(start, least), most)
    for _ in range(MOST_TRIES):
        shares[size] = share(size)
        fits = max((each for each, value in shares.items() if value <= 1), default=0)
        over = min((each for each, value in shares.items() if value > 1), default=most + 1)
        lowest, highest = fits + _step(fits) if fits else least, over - 1
        if lowest > highest:
            break
        is_slow, width = width and highest - lowest > width // 2, highest - lowest
        if len(shares) == 1:
            size = 4 * size if fits else size // 4
        elif is_slow and fits and over <= most:
            size = (fits + over) // 2
        else:
            a, b = sorted(shares, key=lambda each: (each not in (fits, over), abs(shares[each] - 1)))[:2]
            slope = (shares[b] - shares[a]) / (b - a)
            size = min(int(a + (1 - shares[a]) / slope), 16 * max(a, b)) if slope > 0 else 2 * max(a, b)
        size = min(max(size - size % _step(size), lowest), highest)
    return fits


def _step(size: int) -> int:
    """Sizes between which nobody wants to tell."""
    return 1 << max((size // STEPS_PER_OCTAVE).bit_length() - 1, 0)
