"""Places inside the library where a fault can be raised: transfers, sums of gradients, hand-overs, written files."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from roundpipe.runtime.device.cpu import CpuBackend
from roundpipe.runtime.weights import download
from roundpipe.runtime.weights.master_weights import ParameterPair
from roundpipe.wrappers.checkpoint_files import SummedFile
from tests.faults.points import POINTS

PREFIX = "library: "
# private, since no public name is passed there alone
PLACES: dict[str, tuple[Any, str]] = {
    "upload": (CpuBackend, "upload"),
    "download": (CpuBackend, "download"),
    "gradient add": (download, "_add_gradient"),
    "gradient to the optimizer": (ParameterPair, "take_gradient"),
    "weights into the model": (ParameterPair, "write_weights"),
    "checkpoint write": (SummedFile, "write"),
}


def _visiting(place: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def visits(*args: Any, **kwargs: Any) -> Any:
        POINTS.visit(PREFIX + place)
        return function(*args, **kwargs)

    return visits


@contextlib.contextmanager
def points_in_library() -> Iterator[None]:
    """Inside, the library's places count as those of users' code do."""
    with contextlib.ExitStack() as patches:
        for place, (owner, name) in PLACES.items():
            patches.enter_context(patch.object(owner, name, _visiting(place, getattr(owner, name))))
        yield
