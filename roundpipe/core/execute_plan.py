"""Which layers are visited together, and in which phase: plans as plain data."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from roundpipe.core.checks import check_count, items_of
from roundpipe.core.errors import ScheduleError, shown

LayerRange = tuple[int, int]
"""Consecutive layers: index of the first, index behind the last."""

ScheduleKind = Literal["train", "forward", "backward"]

Value = TypeVar("Value")


class Ring(NamedTuple):
    """Jobs of a step that workers take in turn: all jobs and all workers, or each worker's own."""

    positions: Sequence[int]
    """In the step, ascending."""
    workers: Sequence[int]

    def before(self, number: int) -> int:
        """The position of the job that the worker of the ring's n-th job runs before it, maybe in the step before."""
        return self.positions[(number - len(self.workers)) % len(self.positions)]

    def of(self, values: Sequence[Value]) -> list[Value]:
        """Of something that each job of the step has."""
        return [values[position] for position in self.positions]


def _parse_range(where: str, spec: object) -> LayerRange:
    if isinstance(spec, range) and spec.step == 1:
        start, stop = spec.start, spec.stop
    elif isinstance(spec, tuple | list) and len(spec) == 2 and all(type(edge) is int for edge in spec):
        start, stop = spec
    else:
        raise ScheduleError(f"{where} is {spec!r}; give range(start, stop) or a pair (start, stop)")
    if not 0 <= start < stop:
        raise ScheduleError(f"{where} is ({start}, {stop}); a range needs 0 <= start < stop")
    return start, stop


def _parse_ranges(what: str, specs: Iterable[object]) -> tuple[LayerRange, ...]:
    if isinstance(specs, range):
        raise ScheduleError(f"{what} is {specs!r}; give a sequence of ranges, such as [range(0, 2)]")
    ranges = items_of(what, specs, "a sequence of ranges, such as [range(0, 2)]", ScheduleError)
    return tuple(_parse_range(f"{what} range {index}", spec) for index, spec in enumerate(ranges))


@dataclass(frozen=True, slots=True, init=False)
class ExecutePlan:
    """Which layers are visited together, and in which phase.

    Forward and backward ranges are independent of each other. The fused tail starts behind the last
    forward range and ends with the last layer; backward goes on from where it starts. It may be written
    as ``fused`` or as the first backward range, which is the same plan:

        ExecutePlan(forward=[range(0, 4)], fused=range(4, 6), backward=[range(2, 4), range(0, 2)])
        ExecutePlan(forward=[range(0, 4)], backward=[range(4, 6), range(2, 4), range(0, 2)])

    A plan without a fused tail has forward ranges over all layers and backward ranges over all layers: it
    serves ``forward`` and ``backward`` as separate calls, but not ``forward_backward``.

    Several workers may share the microbatches of a stage; each brings the stage's weights up and its gradients down:

        ExecutePlan(fused=range(0, 6), replicas=[2])

    In each step stages go on to the next worker, unless the plan says that they don't rotate. Then a worker has the
    same layers in every step, in forward and backward, and what of their weights it has room for stays there:

        ExecutePlan([range(0, 2)], range(2, 4), [range(0, 2)], rotates=False)

    Args:
        forward: ranges of layers, ascending; each a ``range`` or a pair ``(start, stop)``.
        fused: the range that runs forward, loss and backward in one visit, or None.
        backward: ranges of layers, descending.
        replicas: per stage of a training step, in order, how many workers share its microbatches, as far as there are
            workers and microbatches for them; empty: one each.
        rotates: whether stage K of a run goes to worker K mod N, counted over steps. If not, forward stage K of each
            step does (the fused one is the last of them), and a backward stage goes to the worker that has its layers.

    Raises:
        ScheduleError: something given is not a range, the replicas are not one count per stage, or stages that don't
            rotate have several.
    """

    forward: tuple[LayerRange, ...]
    """Forward stages, shallow to deep, without the fused tail; each a pair ``(start, stop)``."""
    fused: LayerRange | None
    """The stage that runs forward, loss and backward in one visit; None: the plan has none."""
    backward: tuple[LayerRange, ...]
    """Backward stages, deep to shallow, without the fused tail."""
    replicas: tuple[int, ...]
    """Per stage of a training step, how many workers share its microbatches; empty: one each."""
    rotates: bool
    """Whether stages go on to the next worker in each step; else each layer has one worker."""

    def __init__(
        self,
        forward: Iterable[range | LayerRange] = (),
        fused: range | LayerRange | None = None,
        backward: Iterable[range | LayerRange] = (),
        replicas: Iterable[int] = (),
        *,
        rotates: bool = True,
    ) -> None:
        forward_ranges = _parse_ranges("forward", forward)
        backward_ranges = _parse_ranges("backward", backward)
        fused_range = None if fused is None else _parse_range("fused range", fused)
        forward_stop = forward_ranges[-1][1] if forward_ranges else 0
        if fused_range is None and backward_ranges and backward_ranges[0][0] == forward_stop:
            fused_range, backward_ranges = backward_ranges[0], backward_ranges[1:]
        object.__setattr__(self, "forward", forward_ranges)
        object.__setattr__(self, "fused", fused_range)
        object.__setattr__(self, "backward", backward_ranges)
        counts = tuple(items_of("replicas", replicas, "one count of at least 1 per stage, or ()", ScheduleError))
        if counts and (len(counts) != self.num_stages or not all(type(count) is int and count > 0 for count in counts)):
            raise ScheduleError(
                f"replicas={shown(list(counts))} for {self.num_stages} stages: give one count of at least 1 per "
                "stage, or none"
            )
        object.__setattr__(self, "replicas", counts if any(count > 1 for count in counts) else ())
        if not isinstance(rotates, bool):
            raise ScheduleError(f"rotates is {shown(rotates)}; give True or False")
        if self.replicas and not rotates:
            raise ScheduleError(
                f"replicas={shown(list(counts))} with rotates=False: a layer has one worker then; leave one of them out"
            )
        object.__setattr__(self, "rotates", rotates)

    @property
    def num_layers(self) -> int:
        """The number of layers that the plan covers."""
        return max((stop for _, stop in (*self.forward_stages, *self.backward_stages)), default=0)

    @property
    def num_stages(self) -> int:
        """The number of visits in a training step."""
        return len(self.forward) + (self.fused is not None) + len(self.backward)

    @property
    def forward_stages(self) -> tuple[LayerRange, ...]:
        """The ranges of a forward pass on its own, ascending, the fused tail among them."""
        return self.forward if self.fused is None else (*self.forward, self.fused)

    @property
    def backward_stages(self) -> tuple[LayerRange, ...]:
        """The ranges of a backward pass on its own, descending, the fused tail among them."""
        return self.backward if self.fused is None else (self.fused, *self.backward)

    def named_stages(self) -> list[tuple[str, LayerRange]]:
        """The stages of a training step in order, by name: F0, F1, .., U, B1, B2, .."""
        return [
            *((f"F{index}", layers) for index, layers in enumerate(self.forward)),
            *([] if self.fused is None else [("U", self.fused)]),
            *((f"B{index}", layers) for index, layers in enumerate(self.backward, 1)),
        ]

    def shares(self, kind: ScheduleKind, most: int) -> list[int]:
        """Per stage of such a step, how many workers share its microbatches, each at most so many."""
        counts = [min(count, most) for count in self.replicas or (1,) * self.num_stages]
        first = len(self.forward)
        return {"train": counts, "forward": counts[: len(self.forward_stages)], "backward": counts[first:]}[kind]

    def with_fewer_replicas(self, most: int, alone: Container[int]) -> ExecutePlan:
        """The same with at most so many per stage, and without for stages that have one of the layers in ``alone``."""
        stages = zip(self.named_stages(), self.replicas, strict=False)
        counts = [1 if any(i in alone for i in range(*layers)) else min(n, most) for (_, layers), n in stages]
        return ExecutePlan(self.forward, self.fused, self.backward, counts, rotates=self.rotates)

    def owners(self, num_workers: int) -> list[int]:
        """Per layer, the worker that has it where stages don't rotate."""
        stages = enumerate(self.forward_stages)
        return [index % num_workers for index, (start, stop) in stages for _ in range(start, stop)]

    def workers(self, kind: ScheduleKind, num_workers: int) -> list[int] | None:
        """Per stage of such a step, the worker that has its layers; None: stages rotate.

        Raises:
            ScheduleError: a backward range has layers of several workers.
        """
        if self.rotates:
            return None
        owners = self.owners(num_workers)
        forward = [owners[start] for start, _ in self.forward_stages]
        backward: list[int] = []
        for start, stop in self.backward_stages:
            found = set(owners[start:stop])
            if len(found) != 1:
                raise ScheduleError(
                    f"the backward range ({start}, {stop}) has layers of {len(found)} of {num_workers} workers, but "
                    "with rotates=False a stage runs where the forward of its layers does: cut backward ranges where "
                    "the forward ranges are cut"
                )
            backward += found
        return {"train": forward[: len(self.forward)] + backward, "forward": forward, "backward": backward}[kind]

    def rings(self, kind: ScheduleKind, num_workers: int, most_replicas: int | None = None) -> list[Ring]:
        """Which workers take turns at which jobs of such a step, with at most so many replicas of a stage.

        Errors as for `workers`.
        """
        owners = self.workers(kind, num_workers)
        if owners is None:
            num_jobs = sum(self.shares(kind, num_workers if most_replicas is None else most_replicas))
            return [Ring(range(num_jobs), range(num_workers))]
        owned = {worker: [at for at, owner in enumerate(owners) if owner == worker] for worker in sorted({*owners})}
        return [Ring(positions, (worker,)) for worker, positions in owned.items()]

    def validate(self, num_layers: int) -> None:
        """Check that the plan covers each layer of a model once in forward and once in backward.

        Raises:
            ScheduleError: naming the range that leaves a gap, overlaps or is out of order.
        """
        check_count("num_layers", num_layers, "the number of layers of a model", error=ScheduleError)
        covered = 0
        for index, (start, stop) in enumerate(self.forward):
            if start != covered:
                raise ScheduleError(
                    f"forward range {index} is ({start}, {stop}) but must start at layer {covered}: "
                    "forward ranges ascend from layer 0 without gap or overlap"
                )
            covered = stop
        uncovered, deepest = num_layers, "the last forward range"
        if self.fused is not None:
            if self.fused[0] != covered:
                raise ScheduleError(
                    f"the fused range is {self.fused} but must start at layer {covered}, right behind the "
                    "last forward range"
                )
            (uncovered, covered), deepest = self.fused, "the fused range"
        if covered != num_layers:
            raise ScheduleError(
                f"{deepest} ends at layer {covered}, but the model has {num_layers} layers: it must end at {num_layers}"
            )
        for index, (start, stop) in enumerate(self.backward):
            if stop != uncovered:
                raise ScheduleError(
                    f"backward range {index} is ({start}, {stop}) but must stop at layer {uncovered}: "
                    "backward ranges descend from the fused range to layer 0 without gap or overlap"
                )
            uncovered = start
        if uncovered != 0:
            last = f"the last backward range is {self.backward[-1]}" if self.backward else "there are none"
            raise ScheduleError(
                f"backward ranges leave out layers 0 to {uncovered - 1} ({last}): they must go down to 0"
            )


ModelExecutePlan = ExecutePlan
