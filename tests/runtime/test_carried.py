"""Carried values that live at the peak of a visit: predicted, and counted by workers that are paced as accelerators."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import Device, ExecutePlan, RoundPipeRunConfig
from roundpipe.core.layers import LayerCost
from roundpipe.planning import carried
from roundpipe.planning.stage_costs import StageCosts, device_memory, training_stages
from roundpipe.runtime.device.backend import Lane
from roundpipe.runtime.device.cpu import CpuBackend, CpuEvent
from roundpipe.runtime.engine import cost_model, pace
from roundpipe.runtime.engine.visit_peaks import MeasuredVisit, VisitPeaks
from tests.repeats import repeats

ROWS, WIDTH, NUM_MICROBATCHES = 64, 32, 4
VALUE = ROWS * WIDTH * 4
PARAMETERS = (8 * WIDTH * WIDTH + 5 * WIDTH) * 4
"""Bytes of one carried value of one microbatch."""


class Part(nn.Module):
    """Its result is kept for the next one's backward, if that saves what it reads."""

    def __init__(self, saves: bool = True) -> None:
        super().__init__()
        self.up, self.down, self.saves = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), saves

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.down(torch.tanh(self.up(value if self.saves else value.clone())))


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> list[list[MeasuredVisit]]:
    """Per round, the visits of CPU workers that hold what accelerators do, in whose ledgers all of it counts."""
    taken: dict[int, list[torch.Tensor]] = {}
    upload, hold = CpuBackend.upload, CpuBackend.hold

    def counted(backend: Any, source: torch.Tensor, target: Any = None, lane: Lane = Lane.UPLOAD) -> torch.Tensor:
        tensor = upload(backend, source, target, lane)
        if lane is Lane.UPLOAD:
            taken.setdefault(id(backend), []).append(tensor)
            backend.ledger.add(tensor.nbytes, "values")
            weakref.finalize(tensor.untyped_storage(), backend.ledger.remove, tensor.nbytes, "values").atexit = False
        return tensor

    def other(backend: Any, num_bytes: int, purpose: str) -> Any:
        return contextlib.nullcontext() if purpose.startswith("carried") else hold(backend, num_bytes, purpose)

    monkeypatch.setattr(CpuBackend, "upload", counted)
    monkeypatch.setattr(CpuBackend, "take_uploads", lambda backend: taken.pop(id(backend), []))
    monkeypatch.setattr(CpuBackend, "hold", other)
    monkeypatch.setattr(pace.Pace, "has_lanes", True)
    monkeypatch.setattr(cost_model, "MEASURED_PEAKS", 1000)
    found: list[list[MeasuredVisit]] = []
    correct = VisitPeaks.correct

    def noted(peaks: VisitPeaks) -> None:
        found.append(peaks.compared())
        correct(peaks)

    monkeypatch.setattr(VisitPeaks, "correct", noted)
    return found


class LateEvent(CpuEvent):
    """Comes only when it, or a later one of its lane, is waited for."""

    __slots__ = ("come", "number")

    def __init__(self, event: CpuEvent, come: list[int], number: int) -> None:
        self.seen, self.ready_at, self.come, self.number = event.seen, event.ready_at, come, number

    def synchronize(self) -> None:
        super().synchronize()
        self.come[0] = max(self.come[0], self.number)

    def is_done(self) -> bool:
        return self.come[0] >= self.number


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is done before it is waited for: copies queue behind others, and a device is behind its worker."""
    record, come, numbers = CpuBackend.record, {lane: [0] for lane in Lane}, itertools.count(1)
    monkeypatch.setattr(
        CpuBackend, "record", lambda backend, lane: LateEvent(record(backend, lane), come[lane], next(numbers))
    )


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of all sizes are treated as those of real models."""
    monkeypatch.setattr(carried, "SMALL_BYTES", 0)
    monkeypatch.setattr(carried, "AHEAD_BYTES", 0)


def train(plan: ExecutePlan, saves: bool, grain: Any = "stage", num_microbatches: int = NUM_MICROBATCHES) -> None:
    model = nn.Sequential(*[Part(saves) for _ in range(8)])
    batch = torch.randn(num_microbatches * ROWS, WIDTH)
    run = RoundPipeRunConfig(
        num_microbatch=num_microbatches, recompute_grain=grain, execute_plan=plan, tiles="off", residency="off"
    )
    with roundpipe.compile(model, example_args=(batch[:ROWS],), devices=[Device("cpu", 10**9)]) as pipe:
        assert len(pipe._runner.source.latest) == 8  # a plan needs the number
        for _ in range(3):
            pipe.forward_backward((batch,), loss_fn=lambda outputs, label: outputs.square().mean(), run_config=run)
            pipe.synchronize()
        pipe.report()


def missing_values(visits: Sequence[MeasuredVisit]) -> list[float]:
    """By how many values a round was predicted too low."""
    return [round(visit.missing_bytes / VALUE, 1) for visit in visits]


FINE = ExecutePlan([(0, 1), (1, 4), (4, 5)], (5, 8), [(4, 5), (3, 4), (2, 3), (1, 2), (0, 1)])
COARSE = ExecutePlan([(0, 1), (1, 5)], (5, 8), [(1, 5), (0, 1)])


def test_values_at_a_peak_are_counted_one_by_one() -> None:
    """A run brings and leaves these; so did the run before it, of which all is still there."""
    costs = StageCosts([LayerCost(workspace_bytes=10, carry_bytes=1) for _ in range(8)])
    stages = training_stages(FINE, costs)
    assert [stage.carried for stage in stages] == [
        (1, 1 + 1, 1 + 1),  # the input; as large as a value, since nothing else is known
        (1 + 1, 1 + 3, 1 + 3),  # the last layer runs beside what the first has left; three backward stages read it
        (1, 1 + 1, 1 + 1),
        (1, 1 + 1, 1 + 1),  # a value up, its gradient down
        *[(1, 2 + 1, 2 + 1)] * 4,  # and the gradient of what it makes, up
        (1, 2, 2),
    ]
    before = [0, *[stage.carried.held for stage in stages]]
    assert [need.staged for need in device_memory(stages, 1)][1:] == [
        max(own, other) for own, other in zip(before[2:], before[1:], strict=False)
    ]
    alone = training_stages(FINE, StageCosts(costs.layers, is_alone=True))
    assert [stage.carried for stage in alone[:5]] == [(1, 0, 1), (2, 0, 3), (1, 0, 1), (1, 0, 1), (1, 0, 1)]


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize(("plan", "most_values"), [(FINE, 1000), (FINE, 2), (COARSE, 1000)])
def test_the_first_round_takes_what_is_predicted(
    visits: list[list[MeasuredVisit]],
    monkeypatch: pytest.MonkeyPatch,
    plan: ExecutePlan,
    most_values: int,
    saves: bool,
) -> None:
    """To the value; with more than so many on their way down, a forward waits for them."""
    for module in (carried, pace):
        monkeypatch.setattr(module, "LARGE_BYTES", most_values * VALUE)
    train(plan, saves)
    first, *later = visits
    # the last visit finds one more of the visit before it, but in its first run, when it has no gradients of weights
    assert missing_values(first) == [0.0] * (plan.num_stages - 1) + [-1.0]
    for visits_later in later:
        assert [visit.measured_bytes for visit in visits_later] == [visit.measured_bytes for visit in first]


@pytest.mark.parametrize("plan", [FINE, COARSE])
@pytest.mark.parametrize(("values_ahead", "after_fused"), [(1000, -2.0), (7, -1.0)])
def test_it_takes_what_is_predicted_with_more_runs_ahead(
    visits: list[list[MeasuredVisit]],
    monkeypatch: pytest.MonkeyPatch,
    plan: ExecutePlan,
    values_ahead: int,
    after_fused: float,
) -> None:
    """Three, or fewer where these have more values."""
    monkeypatch.setattr(carried, "AHEAD_BYTES", values_ahead * VALUE)
    train(plan, saves=True)
    first, *later = visits
    # behind the fused stage its gradients of weights are there in the first two runs, most values in the last one
    expected = [0.0] * plan.num_stages
    expected[len(plan.forward) + 1], expected[-1] = after_fused, -1.0
    assert missing_values(first) == expected
    for visits_later in later:
        assert [visit.measured_bytes for visit in visits_later] == [visit.measured_bytes for visit in first]


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("values_ahead", [1000, 7])
def test_it_takes_no_more_with_more_runs_ahead_where_copies_are_late(
    visits: list[list[MeasuredVisit]], monkeypatch: pytest.MonkeyPatch, values_ahead: int
) -> None:
    monkeypatch.setattr(carried, "AHEAD_BYTES", values_ahead * VALUE)
    train(FINE, saves=True)
    for found in map(missing_values, visits[:1]):
        behind_fused = found.pop(len(FINE.forward) + 1)  # as above; which of the two, is the gradients' thread's to say
        assert found == [0.0] * (FINE.num_stages - 2) + [-1.0]
        assert -2.0 <= behind_fused <= 0.0


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("plan", [FINE, COARSE])
def test_it_takes_no_more_where_copies_are_late(visits: list[list[MeasuredVisit]], plan: ExecutePlan) -> None:
    train(plan, saves=True)
    assert [missing_values(each) for each in visits[:1]] == [[0.0] * (plan.num_stages - 1) + [-1.0]]
    for later in visits[1:]:
        assert [visit.measured_bytes for visit in later] == [visit.measured_bytes for visit in visits[0]]


@pytest.mark.parametrize(("grain", "most_values"), [("stage", 3.5), ("layer", 6.5)])
@pytest.mark.parametrize("plan", [FINE, COARSE])
def test_the_only_microbatch_takes_what_is_predicted(
    visits: list[list[MeasuredVisit]], plan: ExecutePlan, grain: str, most_values: float
) -> None:
    """Gradients of the layers behind the peak are there, none of those in front; its own count as if they were.

    Of layers one by one, values of all of a stage count beside any.
    """
    train(plan, saves=True, grain=grain, num_microbatches=1)
    assert all(-most_values <= number <= 0 for number in missing_values(visits[0]))


def test_labels_and_losses_are_counted(visits: list[list[MeasuredVisit]]) -> None:
    """Labels come up as values do; the kernel of this loss makes its scalar in memory as large as the outputs."""
    model = nn.Sequential(*[Part() for _ in range(4)])
    batch = torch.randn(NUM_MICROBATCHES * ROWS, WIDTH)
    run = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCHES, tiles="off", residency="off")
    with roundpipe.compile(model, example_args=(batch[:ROWS],), devices=[Device("cpu", 10**9)]) as pipe:
        pipe.forward_backward((batch,), label=batch.clone(), loss_fn=nn.functional.mse_loss, run_config=run)
        pipe.synchronize()
        pipe.report()
    assert missing_values(visits[0]) == [0.0]


@pytest.mark.parametrize("most_values", [1000, 2])
def test_layers_recomputed_one_by_one_take_no_more_than_is_predicted(
    visits: list[list[MeasuredVisit]], monkeypatch: pytest.MonkeyPatch, most_values: int
) -> None:
    for module in (carried, pace):
        monkeypatch.setattr(module, "LARGE_BYTES", most_values * VALUE)
    train(COARSE, saves=True, grain="layer")
    assert all(-3.0 <= number <= 0 for number in missing_values(visits[0]))


class Skips(nn.Module):
    """Each level's value is read again at the other end, and the first one by all layers behind the turn."""

    def __init__(self, num_levels: int = 3, num_frozen: int = 0) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.down = nn.ModuleList(Part() for _ in range(num_levels))
        self.up = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(num_levels))
        self.after = nn.ModuleList(Part() for _ in range(num_levels))
        for module in (self.first, *self.down)[:num_frozen]:
            module.requires_grad_(False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        first, kept = self.first(value), []
        value = first
        for part in self.down:
            value = part(value)
            kept.append(value)
        for up, part in zip(self.up, self.after, strict=True):
            value = part(up(torch.cat([value, kept.pop()], -1))) * first
        return value


@pytest.mark.parametrize(
    "num_frozen, num_workers, grain",
    repeats(itertools.product((0, 3), (1, 2, 3), ("stage", "layer")), ("0-1-stage", "0-2-layer", "3-3-stage")),
)
@pytest.mark.parametrize("edges", [([*range(6)], [0, 3, 5]), ([0, 5], [*range(6)]), ([0, 2, 3], [0, 1, 3])])
def test_skip_connections_count_where_they_are_taken(
    visits: list[list[MeasuredVisit]], edges: tuple[list[int], list[int]], num_frozen: int, num_workers: int, grain: Any
) -> None:
    forward, backward = ([*itertools.pairwise(each)] for each in edges)
    batch = torch.randn(NUM_MICROBATCHES * ROWS, WIDTH)
    devices = [Device("cpu", 10**9)] * num_workers
    with roundpipe.compile(Skips(num_frozen=num_frozen), example_args=(batch[:ROWS],), devices=devices) as pipe:
        num_layers = len(pipe._runner.source.latest)  # a plan needs the number
        plan = ExecutePlan(forward, (forward[-1][1], num_layers), backward[::-1])
        run = RoundPipeRunConfig(
            num_microbatch=NUM_MICROBATCHES, recompute_grain=grain, execute_plan=plan, tiles="off", residency="off"
        )
        for _ in range(2):
            pipe.forward_backward((batch,), label=batch.clone(), loss_fn=nn.functional.mse_loss, run_config=run)
            pipe.synchronize()
        pipe.report()
    off = {(visit.phase, visit.layers): round(-visit.missing_bytes / visit.measured_bytes, 4) for visit in visits[0]}
    # a backward may find values of the visit before in its first run, and gradients of its weights from then on
    most = {"F": 0.0, "U": 0.02, "B": 0.08}
    assert all(0.0 <= share <= most[phase] for (phase, _), share in off.items()), off
