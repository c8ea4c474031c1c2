"""What memory is used for, on a device and on the host, by name: planned, forecast and reported in the same terms."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

from roundpipe.reports.tables import format_bytes


class DeviceMemory(NamedTuple):
    """Bytes of device memory in use while a stage runs."""

    weights: int
    """Of the worker's two visits that are largest together: it keeps one piece of memory for both."""
    gradients: int
    """Of the visit, and of the worker's visit before, which are still on their way down."""
    activations: int
    """Activations kept or in use, temporaries, and the values at the stage's cuts."""
    measured: int = 0
    """What measured peaks showed beside these, such as what kernels take by themselves; negative: less."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.activations + self.measured

    def __str__(self) -> str:
        terms = self._asdict()
        measured = terms.pop("measured")
        shown = ", ".join(f"{name} {format_bytes(size)}" for name, size in terms.items())
        if not measured:
            return shown
        return f"{shown}, {format_bytes(abs(measured))} {'less' if measured < 0 else 'more'} as measured"


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes in host memory."""

    weights: int
    """With buffers."""
    gradients: int
    """Of a run: those that are there now."""
    optimizer_copies: int
    optimizer_gradients: int
    """Of the step that is being applied, while the next one's come down."""
    optimizer_states: int = 0
    """Forecast only; of a run they are the optimizer's own and are not counted."""
    carried: int = 0
    """Values and gradients between stages, most at once; forecast only."""

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def pinned(self) -> int:
        """The part of it that is pinned where devices copy from and to pinned memory."""
        return self.weights + self.gradients + self.carried

    def __str__(self) -> str:
        sizes = {field.name.replace("_", " "): getattr(self, field.name) for field in fields(self)}
        sizes["carried values"] = sizes.pop("carried")
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size)
