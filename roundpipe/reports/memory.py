"""What memory is used for, on a device and on the host, by name: planned, forecast and reported in the same terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from roundpipe.reports.tables import format_bytes, repetitions, table


class DeviceMemory(NamedTuple):
    """Bytes of device memory in use while a stage runs."""

    weights: int
    """Of the visit."""
    next_weights: int
    """Room for those of the next visit, which come up meanwhile, or of the one before: as much as any two need."""
    gradients: int
    """Of the visit."""
    leaving_gradients: int
    """Of the worker's visit before, still on their way down."""
    activations: int
    """Activations kept or in use, temporaries and known workspaces; of the last stage with the loss."""
    carried: int
    """Values and gradients at the stage's cuts that are in use, and what a forward stage has left to go down."""
    staged: int
    """Those of the microbatch before, of this stage or of the worker's visit before, which are on their way."""
    measured: int = 0
    """What measured peaks showed beside these, such as what kernels take by themselves; negative: less."""
    resident: int = 0
    """Of weights that stay there, which no visit brings up."""
    allocator: int = 0
    """Left to the device's allocator, which was at its limit in steps with less."""

    @property
    def total(self) -> int:
        """The sum of all of them."""
        return sum(self)

    @property
    def of_weights(self) -> int:
        """The part that no smaller microbatch makes smaller."""
        return self.weights + self.next_weights + self.gradients + self.leaving_gradients

    def __str__(self) -> str:
        sizes = _named(self)
        measured = sizes.pop("measured")
        shown = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size)
        if not measured:
            return shown
        return f"{shown}, {format_bytes(abs(measured))} {'less' if measured < 0 else 'more'} as measured"


def memory_table(stages: Mapping[str, DeviceMemory]) -> str:
    """Device memory while each stage runs, by term; stages alike are one row."""
    sizes = [_named(memory) for memory in stages.values()]
    names = [name for name in sizes[0] if any(each[name] for each in sizes)]
    labels, memory = list(stages), list(stages.values())
    keys = [(label[0], *each) for label, each in zip(labels, memory, strict=True)]
    body = []
    for start, period, repeats in repetitions(keys, max_period=1, min_repeats=3):
        stop = start + period * repeats
        span = labels[start] if stop == start + 1 else f"{labels[start]} .. {labels[stop - 1]}"
        body.append([span, *(format_bytes(sizes[start][name]) for name in names), format_bytes(memory[start].total)])
    return table(["stage", *names, "in all"], body)


def _named(memory: DeviceMemory) -> dict[str, int]:
    """The terms under the names that people read."""
    return {name.replace("_", " "): size for name, size in memory._asdict().items()}


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes in host memory."""

    weights: int
    """With buffers."""
    gradients: int
    """Of a run: those that are there now, or while it goes on those of all that is trained."""
    optimizer_copies: int
    """In the optimizer's dtype."""
    optimizer_gradients: int
    """Of the step that is being applied, while the next one's come down: in the model's dtype where an update can do
    with that."""
    optimizer_states: int = 0
    """Forecast only; of a run they are the optimizer's own and are not counted."""
    carried: int = 0
    """Values and gradients between stages, most at once; forecast only."""

    def fits(self, room_bytes: int | None) -> bool:
        """Whether a host has it; None: nobody asks."""
        return room_bytes is None or self.total <= room_bytes

    @property
    def total(self) -> int:
        """The sum of all of them."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def pinned(self) -> int:
        """The part of it that is pinned where devices copy from and to pinned memory."""
        return self.weights + self.gradients + self.carried

    def __str__(self) -> str:
        sizes = {field.name.replace("_", " "): getattr(self, field.name) for field in fields(self)}
        sizes["carried values"] = sizes.pop("carried")
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size)
