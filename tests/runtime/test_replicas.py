"""Stages that several workers run at the same time, each with a share of the microbatches: eager's numbers."""

import copy
import itertools
import random
import threading
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import Device, ExecutePlan
from roundpipe.core.schedule import make_schedule
from roundpipe.planning.simulator import simulate
from tests.repeats import repeats
from tests.runtime.models import (
    DTYPE,
    assert_equal_bits,
    assert_round_is_eager,
    assert_same,
    batch,
    buffers,
    config,
    eager_round,
    gradients,
    mlp,
    square_loss,
)
from tests.runtime.schedule_rules import check

PLANS = {
    "one": ExecutePlan(fused=(0, 4), replicas=[2]),
    "several": ExecutePlan([(0, 1), (1, 3)], (3, 4), [(1, 3), (0, 1)], replicas=[2, 1, 3, 1, 2]),
    "apart": ExecutePlan([(0, 2), (2, 4)], None, [(2, 4), (0, 2)], replicas=[2, 2, 3, 1]),
    "most at first": ExecutePlan([(0, 2)], (2, 4), [(0, 2)], replicas=[3, 1, 1]),
}


def tied():
    """Four layers, of which the second is frozen, and the last has the first one's weight."""
    model = mlp()
    model[1].requires_grad_(False)
    model[3][0].weight = model[0][0].weight
    return model


def replicas_of(piped):
    return piped._runner.builder.last_plan.replicas  # a table has it as text only, a report after training alone


def train(model, options, num_workers=2, num_steps=3, loss_fn=square_loss, way="train"):
    """Losses and gradients of a few rounds whose gradients add up, and the replicas of the last."""
    losses = []
    torch.manual_seed(2)
    with roundpipe.RoundPipe(model, devices=["cpu"] * num_workers, model_run_config=options) as piped:
        for seed in range(num_steps):
            if way == "train":
                losses.append(piped.forward_backward((batch(seed=seed),), loss_fn=loss_fn))
            else:
                loss = loss_fn(piped(batch(seed=seed)), None)
                loss.backward()
                losses.append(loss.detach())
        piped.synchronize()
        replicas = replicas_of(piped)
    return {f"loss {i}": loss for i, loss in enumerate(losses)} | gradients(model), replicas


@pytest.mark.parametrize(
    ("plan", "workers", "grain"),
    repeats(
        itertools.product(("one", "several", "most at first"), (1, 2, 3, 4), ("stage", "layer")),
        ["one-2-stage", "several-2-layer", "several-3-stage", "most at first-4-layer"],
    ),
)
def test_rounds_are_eager(plan, workers, grain):
    options = {"plan": PLANS[plan], "workers": workers, "grain": grain}
    assert_round_is_eager(mlp(), (batch(),), num=5, calls=3, **options)
    assert_round_is_eager(tied(), (batch(),), label=batch(seed=1), num=4, calls=2, **options)


@pytest.mark.parametrize("workers", [2, 3])
def test_a_forward_and_its_backward_apart(workers):
    model, reference = mlp(), mlp()
    reference.load_state_dict(model.state_dict())
    found, _ = train(model, config(5, plan=PLANS["apart"]), workers, way="apart")
    for seed in range(3):
        eager_round(reference, (batch(seed=seed),), num=5)
    assert_same({n: found[n] for n in gradients(model)}, gradients(reference))
    with roundpipe.RoundPipe(
        model, devices=["cpu"] * workers, model_run_config=config(5, plan=PLANS["several"])
    ) as piped:
        for _ in range(2):
            loss, outputs = piped.forward_loss((batch(),), loss_fn=square_loss, return_outputs=True)
            torch.testing.assert_close(outputs, reference(batch()).detach(), rtol=0, atol=1e-10)
            torch.testing.assert_close(loss, square_loss(outputs, None), rtol=0, atol=1e-9)
        assert replicas_of(piped) == (2, 1, workers, 1, 2)


def weighted_loss(output, label):
    """Takes another time at every call."""
    time.sleep(0.005 * random.Random().random())
    return output.square().sum(), float(output.shape[0])


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_sums_are_the_same_in_every_run_and_draws_are_those_of_one_worker(reduction):
    def run(plan, num_workers):
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3)) for _ in range(4))).to(DTYPE)
        loss_fn = weighted_loss if reduction == "mean" else square_loss
        return train(model, config(5, plan=plan, loss_reduction=reduction), num_workers, loss_fn=loss_fn)

    for plan in (PLANS["one"], PLANS["several"], PLANS["most at first"]):
        first, replicas = run(plan, 3)
        assert replicas == plan.replicas
        assert_equal_bits(run(plan, 3)[0], first)
        assert_same(first, run(replace(plan, replicas=()), 1)[0])


def test_a_loss_function_runs_once_at_a_time_and_in_order():
    seen, at_once = [], threading.Lock()

    def loss_fn(output, label):
        assert at_once.acquire(blocking=False), "twice at a time"
        time.sleep(0.002)
        seen.append(int(label[0]))
        at_once.release()
        return output.sum()

    with roundpipe.RoundPipe(mlp(), devices=["cpu"] * 3, model_run_config=config(6, plan=PLANS["several"])) as piped:
        for _ in range(3):
            piped.forward_backward((batch(6),), label=torch.arange(6), loss_fn=loss_fn)
        assert replicas_of(piped)[2] == 3
    assert seen == 3 * [*range(6)]


@pytest.mark.parametrize("kind", ["buffers", "hooks", "attributes"])
def test_layers_that_leave_something_behind_have_no_replicas(kind):
    class Counts(nn.Identity):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x

    extra = {"buffers": lambda: nn.BatchNorm1d(6), "hooks": nn.Identity, "attributes": Counts}[kind]
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), extra() if i == 3 else nn.Tanh()) for i in range(4)))
    reference, seen = copy.deepcopy(model.to(DTYPE)), []
    if kind == "hooks":
        model[3].register_forward_hook(lambda *_: seen.append(0))
    with roundpipe.RoundPipe(model, devices=["cpu"] * 3) as piped:
        for _ in range(3):
            piped.forward_backward((batch(10),), loss_fn=square_loss, run_config=config(5, plan=PLANS["several"]))
            eager_round(reference, (batch(10),), num=5)
        piped.synchronize()
        assert replicas_of(piped) == (2, 1, 1, 1, 2)
    assert_same(gradients(model), gradients(reference))
    assert_same(buffers(model), buffers(reference))
    assert len(seen) in (0, 15) and getattr(model[3][1], "calls", 15) == 15


def test_the_planner_gives_replicas_where_they_are_faster_and_layers_are_known_to_allow_it():
    model = mlp(3)
    for replicas, expected in ((None, False), ("auto", True)):
        options = config(4, replicas=replicas)
        with roundpipe.compile(model, devices=["cpu"] * 2, example_args=(batch(),), model_run_config=options) as piped:
            for count in range(2):
                piped.forward_backward((batch(8),), loss_fn=square_loss)
                assert replicas_of(piped) == ((2,) if expected and count else ())
            assert ("U x2" in piped.partition_table()) is ("U x2" in str(piped.report())) is expected
            piped.forward_backward((batch(1),), loss_fn=square_loss)
            assert replicas_of(piped) == ()
    reference = copy.deepcopy(model)
    reference.zero_grad()
    for _ in range(2):
        for size, num in ((8, 4), (8, 4), (1, 1)):
            eager_round(reference, (batch(size),), num=num)
    assert_same(gradients(model), gradients(reference))


def test_a_worker_that_runs_out_of_memory_leaves_no_gradients_of_its_stage(caplog):
    """The other worker's are on the host by then; the call is run again with a smaller plan."""
    model = mlp(3)
    reference, calls = copy.deepcopy(model), []
    last = itertools.count()  # which is not taken back where the call begins anew, as the list is

    def loss_fn(output, label):
        calls.append(0)
        if len(calls) == 8 and next(last) == 0:
            time.sleep(0.1)  # the other worker is done
            raise torch.OutOfMemoryError("made up")
        return square_loss(output, label)

    devices, options = [Device("cpu", memory_bytes=10**6)] * 2, config(4, replicas="auto")
    with roundpipe.compile(model, devices=devices, example_args=(batch(),), model_run_config=options) as piped:
        for _ in range(2):
            piped.forward_backward((batch(8),), loss_fn=loss_fn)
            eager_round(reference, (batch(8),), num=4)
            piped.synchronize()
            assert_same(gradients(model), gradients(reference))
        assert len(calls) == 8 and next(last) == 2
        assert sum("ran out of device memory" in record.message for record in caplog.records) == 1


def test_an_error_of_one_worker_ends_the_round():
    def loss_fn(output, label):
        if int(label[0]) == 3:
            raise ZeroDivisionError("of one microbatch")
        return output.square().sum()

    model = mlp()
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2, model_run_config=config(4, plan=PLANS["one"])) as piped:
        piped.forward_backward((batch(4),), label=torch.zeros(4), loss_fn=loss_fn)
        piped.synchronize()
        before = gradients(model)
        with pytest.raises(ZeroDivisionError, match="of one microbatch") as caught:
            piped.forward_backward((batch(4),), label=torch.arange(4), loss_fn=loss_fn)
        assert any("microbatch 3" in note for note in caught.value.__notes__)
        assert_equal_bits(gradients(model), before)
        piped.forward_backward((batch(4),), label=torch.zeros(4), loss_fn=loss_fn)
        piped.synchronize()
        assert_same(gradients(model), {name: 2 * gradient for name, gradient in before.items()})


def test_each_worker_moves_the_stage_as_simulated():
    model, num_rounds = mlp(width=8), 3  # whose tensors need no padding
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2, model_run_config=config(4, plan=PLANS["one"])) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.01)
        for _ in range(num_rounds + 1):
            piped.forward_backward((batch(8, width=8),), loss_fn=square_loss)
            piped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
            if replicas_of(piped) == ():
                piped.report()  # counts begin anew: in the first round one worker has all
        # the schedule and the costs as values: a report's prediction has them in sums with values between stages
        report, latest = piped.report(), piped._session.log.latest
        costs = [replace(cost, carry_bytes=0) for cost in latest.plans.costs.of(latest.chain(), latest.elements)]
        found = simulate(latest.schedule, costs)
    moved = [worker.moved_bytes["weights"] for worker in report.workers]
    assert moved[0] == moved[1] and sum(moved) == num_rounds * found.uploaded_bytes
    moved = [worker.moved_bytes["gradients"] for worker in report.workers]
    assert moved[0] == moved[1] and sum(moved) == num_rounds * found.downloaded_bytes


def test_schedules_keep_the_rules():
    for plan in (PLANS["one"], PLANS["several"]):
        for workers in (1, 2, 3, 5):
            schedule = make_schedule(plan, workers, 4)
            for kind in ("train", "forward", "backward"):
                check(make_schedule(plan, workers, 4, kind=kind))
            check(schedule.following())
            last = {job.name for job in schedule.jobs if schedule.is_of_last_stage(job)}
            assert last == {schedule.jobs[-1].name}
            for job in schedule.jobs:
                for microbatch in range(4):
                    assert microbatch in schedule.microbatches(schedule.job(schedule.sharer(job.index, microbatch)))
