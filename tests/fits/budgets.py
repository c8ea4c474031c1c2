"""Models on devices of 20 sizes, from what the smallest plan needs to all that the model takes.

A case is a model, a size, and synchronous or asynchronous steps. Either it trains with eager's numbers, or it ends in a
`DeviceMemoryError`, each of whose proposals then does.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import replace

from roundpipe import DeviceMemoryError
from tests.fits.models import MODELS, Setting, problems_of, trained

NUM_SIZES = 20
NUM_CASES = len(MODELS) * NUM_SIZES * 2
BELOW = 0.7
"""The smallest device has this share of what the smallest plan needs: there an error is the right answer."""


def draw(seed: int) -> Setting:
    """The case of a seed; after `NUM_CASES` the same with two devices."""
    seed, is_async = divmod(seed, 2)
    seed, model = divmod(seed, len(MODELS))
    num_devices, size = divmod(seed, NUM_SIZES)
    setting = Setting(MODELS[model], is_async=bool(is_async), num_workers=1 + num_devices)
    least, most = _sizes(MODELS[model])
    return replace(setting, memory_bytes=int(least * (most / least) ** (size / (NUM_SIZES - 1))))


@functools.cache
def _sizes(model: str) -> tuple[int, int]:
    """Of the smallest device that is tried, and of one that holds everything."""
    whole = Setting(model)
    smallest = replace(whole, num_microbatch=16, grain="layer", memory_bytes=1000)
    try:
        trained(smallest)
    except DeviceMemoryError as error:
        least = next((other.memory_bytes for other in proposed(str(error), smallest) if other != smallest), None)
    assert least is not None, f"{model}: no plan needs so little memory, and the error names no other size"
    return int(least * BELOW), trained(whole).peak_bytes


def examine(setting: Setting) -> tuple[list[str], str]:
    """What is not as promised, and what became of it."""
    try:
        return problems_of(setting, trained(setting)), "trained"
    except DeviceMemoryError as error:
        message = str(error)
    return examine_error(message, setting)


def examine_error(message: str, setting: Setting) -> tuple[list[str], str]:
    """The same of a run that ended in an error: each of its proposals must train."""
    others = list(proposed(message, setting))
    if not others:
        return [f"{setting}: no proposal in: {message}"], "refused"
    problems = []
    for other in others:
        try:
            problems += problems_of(other, trained(other))
        except DeviceMemoryError as error:
            problems.append(f"{setting}: proposed was {other}, which fails: {error}. It was proposed in: {message}")
    return problems, "refused, and what is proposed works"


def proposed(message: str, setting: Setting) -> Iterator[Setting]:
    """The settings that an error proposes."""
    advice = message.rpartition(". ")[2]
    if advice.endswith("is predicted to fit"):
        for part in advice.split(" or "):
            number = re.search(r"num_microbatch=(\d+)", part)
            grain = re.search(r"recompute_grain='(\w+)'", part)
            yield replace(
                setting,
                num_microbatch=int(number[1]) if number else setting.num_microbatch,
                grain=grain[1] if grain else setting.grain,
                tiles="auto" if "tiles='auto'" in part else setting.tiles,
            )
    elif needed := re.search(r"\(([\d,]+) bytes are needed", advice):
        yield replace(setting, memory_bytes=int(needed[1].replace(",", "")))
