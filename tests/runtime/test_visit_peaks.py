"""Measured peaks of visits correct what was computed, so that the next plan is made by what layers really take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import Device, ExecutePlan, RoundPipeRunConfig
from roundpipe.core.layers import LayerCost
from roundpipe.planning.stage_costs import StageCosts, plan_peak_bytes
from roundpipe.runtime.device.cpu import CpuBackend
from roundpipe.runtime.engine import cost_model
from roundpipe.runtime.engine.pace import InFlight
from roundpipe.runtime.engine.visit_peaks import MeasuredVisit, VisitPeaks
from roundpipe.wrappers import calls_in_tiles
from tests.fx.test_memory import Block, cross_entropy
from tests.repeats import repeats

NUM_MICROBATCHES = 4
IDS = torch.randint(0, 2048, (8, 64), generator=torch.Generator().manual_seed(0))
Change = Callable[[LayerCost], LayerCost]


def decoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(2048, 32), *[Block() for _ in range(6)], nn.Linear(32, 2048, bias=False))


def seed_prediction(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """Let every layer's memory be computed wrong."""
    right = calls_in_tiles.measure_memory

    def wrong(*args: Any, **options: Any) -> list[LayerCost]:
        costs = right(*args, **options)
        assert costs is not None
        return [change(cost) for cost in costs]

    monkeypatch.setattr(calls_in_tiles, "measure_memory", wrong)


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Bytes that the prediction of each round lacked, by visit; all rounds are measured."""
    monkeypatch.setattr(cost_model, "MEASURED_PEAKS", 1000)
    found: list[list[int]] = []
    correct = VisitPeaks.correct

    def noted(peaks: VisitPeaks) -> None:
        found.append([visit.missing_bytes for visit in peaks.compared()])
        correct(peaks)

    monkeypatch.setattr(VisitPeaks, "correct", noted)
    return found


def train(pipe: Any, run: RoundPipeRunConfig, num_rounds: int = 1) -> int:
    """The peak of some rounds, by the ledger; one more is begun, so that all are learned from."""
    pipe.peak_device_bytes(reset=True)
    for _ in range(num_rounds):
        pipe.forward_backward((IDS,), {}, IDS, cross_entropy, run_config=run)
        pipe.synchronize()
    pipe.report()
    return pipe.peak_device_bytes()


def cuts(num_layers: int, num_stages: int) -> ExecutePlan:
    ends = [round(i * num_layers / num_stages) for i in range(num_stages + 1)]
    ranges = list(zip(ends, ends[1:], strict=False))
    return ExecutePlan(ranges[:-1], ranges[-1], ranges[-2::-1] if ranges[:-1] else [])


def half(cost: LayerCost) -> LayerCost:
    return replace(
        cost,
        activation_bytes=cost.activation_bytes // 2,
        temporary_bytes=cost.temporary_bytes // 2,
        workspace_bytes=cost.workspace_bytes // 2,
    )


WRONG: dict[str, Change] = {
    "right": lambda cost: cost,
    "half": half,
    "twice": lambda cost: cost.scaled(2.0),
    "an unseen temporary": lambda cost: replace(cost, temporary_bytes=max(cost.temporary_bytes - 500_000, 0)),
}


@pytest.mark.parametrize("grain", ["stage", pytest.param("layer", marks=pytest.mark.long)])
@pytest.mark.parametrize("num_stages", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("wrong", repeats(WRONG, ["half", "an unseen temporary"]))
def test_after_a_round_predictions_are_right(
    monkeypatch: pytest.MonkeyPatch, rounds: list[list[int]], wrong: str, num_stages: int, grain: Any
) -> None:
    seed_prediction(monkeypatch, WRONG[wrong])
    with roundpipe.compile(decoder(), example_args=(IDS[:2],), devices=[Device("cpu", 10**9)]) as pipe:
        plan = cuts(len(pipe._runner.source.latest), num_stages)  # a plan needs the number
        run = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCHES, recompute_grain=grain, execute_plan=plan)
        peak_bytes = train(pipe, run, 3)
    assert len(rounds) == 3
    if wrong in ("half", "twice"):
        assert max(map(abs, rounds[0])) > 0.1 * peak_bytes
    for missing in rounds[1:]:
        assert len(missing) == 2 * num_stages - 1
        assert all(-0.05 * peak_bytes <= num_bytes <= 0 for num_bytes in missing)


def test_a_temporary_of_one_kind_is_found_in_another_plan(
    monkeypatch: pytest.MonkeyPatch, rounds: list[list[int]]
) -> None:
    """The embedding takes more than computed; that its stage did is not held against the blocks beside it."""

    def unseen(cost: LayerCost) -> LayerCost:
        return replace(cost, temporary_bytes=0, activation_bytes=0) if cost.num_parameters == 2048 * 32 else cost

    seed_prediction(monkeypatch, unseen)
    with roundpipe.compile(decoder(), example_args=(IDS[:2],), devices=[Device("cpu", 10**9)]) as pipe:
        num_layers = len(pipe._runner.source.latest)  # a plan needs the number
        for num_stages in (4, 3, 2):
            plan = cuts(num_layers, num_stages)
            train(pipe, RoundPipeRunConfig(num_microbatch=NUM_MICROBATCHES, execute_plan=plan))
        peak_bytes = pipe.peak_device_bytes()
    assert max(rounds[0]) > 0
    assert all(num_bytes <= 0.02 * peak_bytes for missing in rounds[1:] for num_bytes in missing)


def test_a_plan_that_proves_too_large_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what it takes was computed: the first round needs more than the budget that the planner is told of."""
    seed_prediction(monkeypatch, half)
    device, budget_bytes = Device("cpu", 10**9), 6_000_000  # the device does not refuse what is beyond it
    monkeypatch.setattr(CpuBackend, "take_budget", lambda backend: budget_bytes)
    run = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCHES)
    with roundpipe.compile(decoder(), example_args=(IDS[:2],), devices=[device]) as pipe:
        train(pipe, run)
        first = plans_of(pipe)
        peak_bytes = train(pipe, run, 2)
        second = plans_of(pipe)
        # what the second is made by
        plans, chain = pipe._runner.builder.plans, pipe._runner.last_chain
        costs = plans.costs.of(chain, IDS.numel() // NUM_MICROBATCHES)
    assert second.num_stages > first.num_stages
    assert plan_peak_bytes(first, costs, num_workers=1) > budget_bytes >= peak_bytes


def plans_of(pipe: Any) -> ExecutePlan:
    # the latest plan is told to nobody
    return pipe._runner.builder.last_plan


def test_deterministic_runs_learn_nothing(rounds: list[list[int]]) -> None:
    run = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCHES)
    torch.use_deterministic_algorithms(True)
    try:
        with roundpipe.compile(decoder(), example_args=(IDS[:2],), devices=[Device("cpu", 10**9)]) as pipe:
            train(pipe, run, 3)
    finally:
        torch.use_deterministic_algorithms(False)
    assert rounds == []


@pytest.mark.parametrize("overlaps", [False, True])
def test_what_is_on_its_way_counts_from_the_start(overlaps: bool) -> None:
    """Gradients of the step before are not there in the first one, which is no reason to plan for less."""
    cost = LayerCost(activation_bytes=1000, carry_bytes=0, weight_bytes=100, gradient_bytes=100, workspace_bytes=500)
    plan = ExecutePlan([(0, 1)], (1, 2), [(0, 1)])
    costs = [cost, cost]
    peaks = VisitPeaks(plan, "stage", 1, costs)
    before_bytes = 100 if overlaps else 0
    for position, num_bytes in enumerate((500 + before_bytes, 1100, 1200)):
        peaks.begin(position, has_rest=overlaps or position > 0)
        peaks.add(position, num_bytes + 200 + 50, surplus_bytes=50)
    assert [visit.missing_bytes for visit in peaks.compared()] == [0, 0, 0]
    assert StageCosts(costs).forward(0, 1).excess_bytes == 0


@pytest.mark.parametrize("speeds", [(None,), (1e6, 1e7, 1e9)])
def test_what_leaves_takes_the_same_however_fast_it_does(
    monkeypatch: pytest.MonkeyPatch, speeds: tuple[float | None, ...]
) -> None:
    """A visit finds the gradients of the one before, and values by a link: plans do not learn that they are gone."""
    found: list[list[MeasuredVisit]] = []
    monkeypatch.setattr(cost_model, "MEASURED_PEAKS", 1000)
    monkeypatch.setattr(VisitPeaks, "correct", lambda peaks: found.append(peaks.compared()))
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    batch = torch.randn(4 * 8, 64)
    plan = ExecutePlan([(0, 2), (2, 3)], (3, 4), [(2, 3), (1, 2), (0, 1)])
    run = RoundPipeRunConfig(num_microbatch=4, execute_plan=plan, tiles="off", residency="off")
    for speed in speeds:
        device = Device("cpu", 10**9, upload_bytes_per_s=speed, download_bytes_per_s=speed)
        with roundpipe.compile(model, example_args=(batch[:8],), devices=[device]) as pipe:
            for _ in range(3):
                pipe.forward_backward((batch,), loss_fn=lambda outputs, _: outputs.square().mean(), run_config=run)
            pipe.synchronize()
            pipe.report()
    assert len(found) == 3 * len(speeds)
    assert len({tuple(visit.measured_bytes for visit in visits[1:]) for visits in found}) == 1
    assert all(visit.missing_bytes <= 0 for visits in found for visit in visits)


def test_what_others_take_between_calls_counts(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Another process takes and gives back memory of the device: plans follow, and no step runs out of it."""
    others_bytes = 0
    monkeypatch.setattr(CpuBackend, "take_budget", lambda backend: 8_000_000 - others_bytes)
    run = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCHES, tiles="off")  # in tiles, one stage may do
    with roundpipe.compile(decoder(), example_args=(IDS[:2],), devices=[Device("cpu", 8_000_000)]) as pipe:
        train(pipe, run, 2)
        alone = plans_of(pipe)
        others_bytes = 2_000_000
        peak_bytes = train(pipe, run, 2)
        beside = plans_of(pipe)
        others_bytes = 2_050_000  # too little a difference to be planned for
        train(pipe, run)
        assert plans_of(pipe) == beside
        others_bytes = 0
        train(pipe, run)
        assert plans_of(pipe) == alone
    assert beside.num_stages > alone.num_stages
    assert peak_bytes <= 6_000_000
    assert "ran out" not in caplog.text


class Done:
    """An event that has come."""

    def is_done(self) -> bool:
        return True

    def synchronize(self) -> None: ...


def test_what_is_done_is_held_for_some_runs() -> None:
    in_flight = InFlight()
    in_flight.held_runs = 2
    for _ in range(5):
        in_flight.num_runs += 1
        in_flight.release()
        in_flight.add(Done(), "values")
        assert len(in_flight) == min(in_flight.num_runs, 2)
    in_flight.held_runs = 0
    in_flight.release()
    assert len(in_flight) == 0


def test_one_visit_that_takes_more_is_not_held_against_others() -> None:
    """Four equal layers: what one backward stage took more stays with its layers."""
    costs = [LayerCost(activation_bytes=1000, weight_bytes=100, workspace_bytes=500) for _ in range(4)]
    plan = ExecutePlan([(0, 3)], (3, 4), [(2, 3), (1, 2), (0, 1)])
    peaks = VisitPeaks(plan, "stage", 1, costs)
    expected = [visit.predicted_bytes for visit in _all_measured(VisitPeaks(plan, "stage", 1, list(costs)))]
    for position, num_bytes in enumerate(expected):
        peaks.add(position, num_bytes + (700 if position == 3 else -100))
    peaks.correct()
    assert [visit.missing_bytes for visit in peaks.compared()] == [0] * 5


def _all_measured(peaks: VisitPeaks) -> list[MeasuredVisit]:
    for position in range(peaks.plan.num_stages):
        peaks.add(position, 0)
    return peaks.compared()
