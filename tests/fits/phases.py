"""Out of memory at each place of a step: in all phases of all stages, the loss, and what goes up and down for them.

A case is a model and a place. The call is planned anew and run again with eager's numbers, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from roundpipe import DeviceMemoryError
from roundpipe.runtime.device.cpu import CpuBackend
from roundpipe.runtime.engine.stage import Stage
from tests.fits.budgets import examine_error
from tests.fits.models import MODELS, Setting, problems_of, trained

PLACES: dict[str, tuple[Any, str]] = {
    "forward": (Stage, "forward"),
    "loss": (Stage, "_read_losses"),
    "recomputation": (Stage, "recompute"),
    "backward": (Stage, "backward"),
    "upload": (CpuBackend, "upload"),
    "download": (CpuBackend, "download"),
    "memory of weights": (CpuBackend, "allocate"),
}
"""What is called at each visit of them, in every stage and for every microbatch; private, since no public name is."""
NUM_SETTINGS = 2 * len(MODELS)


class Visits:
    """Counts visits of all places, and is out of memory at one of them, once."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.places: list[str] = []

    def visit(self, place: str) -> None:
        self.places.append(place)
        if len(self.places) - 1 == self.at:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 2.00 GiB ({place})")


@contextlib.contextmanager
def visited(visits: Visits) -> Iterator[None]:
    """Inside, places are visited."""

    def visiting(place: str, function: Callable[..., Any], after: bool) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not after:
                visits.visit(place)
            result = function(*args, **kwargs)
            if after:
                visits.visit(place)
            return result

        return call

    with contextlib.ExitStack() as patches:
        for place, (owner, name) in PLACES.items():
            wrapped = visiting(place, getattr(owner, name), place in ("forward", "recomputation", "loss"))
            patches.enter_context(patch.object(owner, name, wrapped))
        yield


@functools.cache
def places_of(setting: Setting) -> tuple[str, ...]:
    """All visits of a run in which nothing goes wrong."""
    visits = Visits()
    with visited(visits):
        trained(setting)
    return tuple(visits.places)


@functools.cache
def setting_of(number: int) -> Setting:
    """A model in a few stages, with synchronous or asynchronous steps; `NUM_SETTINGS` of them, then again."""
    model, is_async = divmod(number % NUM_SETTINGS, 2)
    whole = Setting(MODELS[model], is_async=bool(is_async))
    return replace(whole, memory_bytes=int(0.7 * trained(whole).peak_bytes))


def examine(setting: Setting, position: int) -> tuple[list[str], str]:
    """What is not as promised of a run that is out of memory at one visit, and what became of it."""
    places = places_of(setting)
    position %= len(places)
    visits = Visits(position)
    where = f"out of memory at visit {position} ({places[position]}) of {len(places)}: "
    try:
        with visited(visits):
            problems = problems_of(setting, trained(setting))
        kind = "trained"
    except DeviceMemoryError as error:
        problems, kind = examine_error(str(error), setting)
    except torch.OutOfMemoryError as error:
        problems, kind = [f"a bare error of torch: {error}"], "refused"
    return [where + problem for problem in problems], kind
