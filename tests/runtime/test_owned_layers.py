"""Layers that have one worker each: eager's numbers, and what stays of frozen weights is on one device alone."""

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import Device, ExecutePlan
from roundpipe.core.errors import ScheduleError
from roundpipe.core.layers import LayerCost
from roundpipe.core.schedule import make_schedule
from roundpipe.planning.machine import HardwareProfile
from roundpipe.planning.owned_plans import best_owned, owned_plans
from roundpipe.planning.planner import plan as choose_plan
from roundpipe.planning.residency import choose_residency
from roundpipe.planning.simulator import simulate
from roundpipe.planning.stage_costs import StageCosts, plan_seconds
from tests.runtime.models import (
    DTYPE,
    assert_equal_bits,
    assert_round_is_eager,
    assert_same,
    batch,
    config,
    eager_round,
    gradients,
    mlp,
    square_loss,
)
from tests.runtime.schedule_rules import check


def singles(num_layers, **options):
    """A plan of stages of one layer each."""
    return ExecutePlan(
        [(i, i + 1) for i in range(num_layers - 1)],
        (num_layers - 1, num_layers),
        [(i, i + 1) for i in reversed(range(num_layers - 1))],
        **options,
    )


PLANS = {
    "one each": ExecutePlan([(0, 2)], (2, 4), [(0, 2)], rotates=False),
    "several each": singles(4, rotates=False),
    "backward cut again": ExecutePlan([(0, 2)], (2, 4), [(1, 2), (0, 1)], rotates=False),
}
APART = ExecutePlan([(0, 2), (2, 4)], None, [(2, 4), (0, 2)], rotates=False)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_rounds_are_eager(plan, workers, grain):
    options = {"plan": PLANS[plan], "workers": workers, "grain": grain}
    assert_round_is_eager(mlp(), (batch(),), num=5, calls=3, **options)


def test_tied_and_frozen_weights_buffers_and_draws_are_those_of_a_rotation():
    def run(plan, workers):
        torch.manual_seed(1)
        blocks = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)) for _ in range(4)]
        model = nn.Sequential(*blocks).to(DTYPE)
        model[1].requires_grad_(False)
        model[3][0].weight = model[0][0].weight
        found = []
        with roundpipe.RoundPipe(model, devices=["cpu"] * workers, model_run_config=config(3, plan=plan)) as piped:
            ours = torch.optim.AdamW(piped.optim_parameters(), lr=0.05, foreach=False)
            for seed in range(4):
                found.append(piped.forward_backward((batch(9, seed=seed),), loss_fn=square_loss))
                piped.step(lambda: (ours.step(), ours.zero_grad()), is_async=seed % 2 == 0)
            piped.synchronize()
            found += [value.clone() for value in model.state_dict().values()]
            found.append(piped.eval()(batch(9, seed=7)).detach())
        return dict(enumerate(found))

    expected = run(singles(4), 1)
    for workers in (2, 3):
        for plan in PLANS.values():
            assert_equal_bits(run(plan, workers), expected)


@pytest.mark.parametrize("workers", [2, 3])
def test_a_forward_and_its_backward_apart(workers):
    model, reference = mlp(), mlp()
    reference.load_state_dict(model.state_dict())
    with roundpipe.RoundPipe(model, devices=["cpu"] * workers, model_run_config=config(5, plan=APART)) as piped:
        for seed in range(3):
            square_loss(piped(batch(seed=seed)), None).backward()
            eager_round(reference, (batch(seed=seed),), num=5)
        piped.synchronize()
    assert_same(gradients(model), gradients(reference))


@pytest.mark.parametrize("kind", ["train", "forward", "backward"])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_schedules_keep_the_rules_and_layers_their_worker(kind, workers):
    plans = [APART] if kind != "train" else PLANS.values()
    for plan in plans:
        schedule = make_schedule(plan, workers, 3, kind=kind)
        for _ in range(3):
            check(schedule)
            of_layers = {index: set() for index in range(4)}
            for job in schedule.jobs:
                for index in job.layers:
                    of_layers[index].add(job.worker)
            assert of_layers == {index: {worker} for index, worker in enumerate(plan.owners(workers))}
            schedule = schedule.following()


def test_a_backward_stage_has_layers_of_one_worker():
    plan = ExecutePlan([(0, 1), (1, 2)], (2, 3), [(0, 2)], rotates=False)
    with pytest.raises(ScheduleError, match=r"the backward range \(0, 2\) has layers of 2 of 3 workers"):
        make_schedule(plan, 3, 2)
    assert make_schedule(plan, 1, 2).jobs[-1].worker == 0
    with roundpipe.RoundPipe(mlp(3), devices=["cpu"] * 2, model_run_config=config(2, plan=plan)) as piped:
        with pytest.raises(ScheduleError, match="cut backward ranges where the forward ranges are cut"):
            piped.forward_backward((batch(),), loss_fn=square_loss)


def test_what_is_given_is_checked():
    with pytest.raises(ScheduleError, match="rotates is 0; give True or False"):
        ExecutePlan(fused=(0, 4), rotates=0)
    with pytest.raises(ScheduleError, match=r"replicas=\[2\] with rotates=False"):
        ExecutePlan(fused=(0, 4), replicas=[2], rotates=False)
    assert ExecutePlan(fused=(0, 4), replicas=[1], rotates=False).replicas == ()


# Frozen weights

WIDTH, DEPTH = 64, 6
LAYER_BYTES = WIDTH * WIDTH * 4


class Adapted(nn.Module):
    """A frozen matrix, and a small one that is trained."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.trained = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x):
        return torch.tanh(self.frozen(x) + self.trained(x))


def adapted():
    torch.manual_seed(0)
    return nn.Sequential(*(Adapted() for _ in range(DEPTH)))


def train(plan, memory_bytes, workers=2, steps=8, residency="auto"):
    """Losses and parameters, bytes of weights that each device's last round moves, and each device's peak."""
    model, found = adapted(), []
    devices = [Device("cpu", memory_bytes=memory_bytes, upload_bytes_per_s=1e6, download_bytes_per_s=1e6)] * workers
    options = config(4, plan=plan, residency=residency)
    with roundpipe.RoundPipe(model, devices=devices, model_run_config=options) as piped:
        ours = torch.optim.SGD(piped.optim_parameters(), lr=0.01, foreach=False)
        for step in range(steps):
            piped.report()
            found.append(piped.forward_backward((batch(8, WIDTH, seed=step).float(),), loss_fn=square_loss))
            piped.step(lambda: (ours.step(), ours.zero_grad()), is_async=False)
        report, text = piped.report(), str(piped)
        found += [parameter.detach().clone() for parameter in model.parameters()]
    moved = [worker.moved_bytes["weights"] for worker in report.workers]
    return dict(enumerate(found)), moved, [worker.peak_bytes for worker in report.workers], text


def test_frozen_weights_stay_where_their_layers_run():
    """Each device has room for half of them, which is all that it needs."""
    memory_bytes = 4 * LAYER_BYTES
    owned, rotating = singles(DEPTH, rotates=False), singles(DEPTH)
    expected, moved, _, _ = train(rotating, memory_bytes, residency="off")
    assert min(moved) > DEPTH // 2 * LAYER_BYTES
    found, moved, peaks, text = train(owned, memory_bytes)
    assert_equal_bits(found, expected)
    assert max(moved) < LAYER_BYTES and max(peaks) <= memory_bytes
    found, moved, _, _ = train(rotating, memory_bytes)
    assert_equal_bits(found, expected)
    assert min(moved) > 2 * LAYER_BYTES


# Predictions


def costs(num_layers=8, frozen_bytes=1000):
    return [
        LayerCost(
            forward_s=1.0,
            backward_s=2.0,
            weight_bytes=frozen_bytes + 10,
            gradient_bytes=10,
            num_parameters=frozen_bytes + 10,
            carry_bytes=1,
            activation_bytes=5,
        )
        for _ in range(num_layers)
    ]


def test_the_longest_of_each_number_of_stages_is_as_short_as_can_be():
    plans = list(owned_plans(costs(), 2))
    assert [len(plan.forward_stages) for plan in plans] == [2, 4, 6, 8]
    assert plans[0].forward == ((0, 3),) and plans[0].fused == (3, 8)  # 3 x 4 s and 5 x 3 s
    assert all(not plan.rotates and plan.backward == plan.forward[::-1] for plan in plans)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 3, 6])
def test_the_simulator_has_the_seconds_of_the_recurrence(workers, microbatches):
    for plan in owned_plans(costs(), workers):
        simulation = simulate(make_schedule(plan, workers, microbatches), costs())
        expected = plan_seconds(plan, costs(), num_workers=workers, num_microbatches=microbatches)
        assert simulation.seconds_per_step == pytest.approx(expected)
        assert len(simulation.idle) == workers and all(0 <= idle.total < 1 for idle in simulation.idle)


def test_what_stays_is_counted_on_the_device_that_has_it():
    plan, ranges = list(owned_plans(costs(), 2))[-1], StageCosts(costs())
    schedule = make_schedule(plan, 2, 4)
    found = choose_residency(schedule, ranges, None)
    assert [share.num_bytes for share in found.shares] == [4000, 4000]
    assert found.layers == frozenset(range(8)) and found.num_bytes == 4000
    streamed = choose_residency(schedule, ranges, 0)
    assert streamed.num_bytes == 0 and not streamed.layers
    most_bytes = found.peak_bytes(schedule, ranges)
    assert len(choose_residency(schedule, ranges, most_bytes).layers) >= 7
    some = choose_residency(schedule, ranges, most_bytes - 1000)
    assert 2 < len(some.layers) < 8 and some.peak_bytes(schedule, ranges) < most_bytes
    rotating = make_schedule(ExecutePlan(plan.forward, plan.fused, plan.backward), 2, 4)
    assert choose_residency(rotating, ranges, None).num_bytes == 8000


@pytest.mark.parametrize(("link", "is_taken"), [(50.0, True), (400.0, False)])
def test_the_planner_takes_such_a_plan_where_links_are_the_limit(link, is_taken):
    """Each of two devices has room for half of the layers beside what it runs."""
    profile, ranges, budget_bytes = HardwareProfile(link, link), StageCosts(costs()), 6_000

    def predict(plan):
        schedule = make_schedule(plan, 2, 4)
        residency = choose_residency(schedule, ranges, budget_bytes)
        return simulate(schedule, costs(), profile, residency=residency).seconds_per_step

    arguments = {"num_workers": 2, "num_microbatches": 4, "memory_budget_bytes": budget_bytes}
    rotating = choose_plan(costs(), predict=predict, link_bytes_per_s=link, **arguments)
    found = best_owned(costs(), predict, 0.97 * predict(rotating), **arguments)
    assert rotating.rotates and (found is not None) is is_taken
    if found is not None:
        stays = choose_residency(make_schedule(found, 2, 4), ranges, budget_bytes)
        assert not found.rotates and len(stays.layers) == 8
    assert best_owned(costs(frozen_bytes=0), predict, 1e9, **arguments) is None
