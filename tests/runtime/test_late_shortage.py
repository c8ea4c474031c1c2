"""Out of memory at the end of a round whose call has returned: the worker runs its stage again; numbers are eager's."""

import copy
import itertools
import logging
import threading
import warnings

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.schedule import Phase
from roundpipe.runtime.device.backend import Device, Lane
from roundpipe.runtime.device.cpu import CpuBackend
from roundpipe.runtime.engine import kept_runs
from roundpipe.runtime.engine.runner import MicrobatchRunner
from roundpipe.runtime.engine.stage import Stage
from roundpipe.runtime.engine.worker import Worker
from roundpipe.runtime.weights.residency import Visit
from tests.repeats import repeats
from tests.runtime.cases_overlap import LR, eager, stale_loop
from tests.runtime.models import DTYPE, assert_same, batch, config, gradients, skip_chain, square_loss

ROOM = 10**6
NUM = 3
PLANS = {
    "stages": roundpipe.ExecutePlan([(0, 2), (2, 4)], (4, 6), [(2, 4), (0, 2)]),
    "one stage": roundpipe.ExecutePlan([(0, 5)], (5, 6), [(0, 5)]),
    "short stages": roundpipe.ExecutePlan([(0, 3)], (3, 6), [(2, 3), (1, 2), (0, 1)]),
}


class Fault:
    """Raises out of memory at some visits of a place, once the call has returned; ``at`` is empty: never."""

    def __init__(self):
        self.at = range(0)
        self.visits = itertools.count()
        self.returned = threading.Event()
        self.num_raised = 0

    def visit(self, *, waits=True):
        if not self.at:
            return
        if waits:
            assert self.returned.wait(20), "the call did not return"
        if next(self.visits) in self.at:
            self.num_raised += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


# private, since no code of the user's runs there
PLACES = {
    "recomputation": (Stage, "recompute", "before"),
    "backward": (Stage, "backward", "before"),
    "behind a backward": (Stage, "backward", "behind"),
    "values": (MicrobatchRunner, "_upload_gradients", "before"),
    "gradients of values": (MicrobatchRunner, "_download_gradients", "before"),
    "gradients of weights": (CpuBackend, "download", "before"),
    "weights": (Visit, "__init__", "behind"),
}


def break_at(monkeypatch, fault, place):
    owner, name, when = PLACES[place]
    real, running = getattr(owner, name), threading.local()
    run = MicrobatchRunner.run
    prefetch = Worker._prefetch  # only it knows of which stage weights are

    def noted(self, step, job, *args):
        running.phase = job.phase
        run(self, step, job, *args)

    def noted_before(self, step, job):  # those of stages that the call waits for are run again by the call
        running.uploads = job.phase
        prefetch(self, step, job)

    def broken(self, *args, **kwargs):
        phase = getattr(running, "phase", None)
        is_there = phase is Phase.BACKWARD
        if place == "weights":
            is_there = getattr(running, "uploads", None) is Phase.BACKWARD
        if place == "gradients of weights":  # a call waits for buffers, which come down with those of the losses
            is_there = args[1:] == (Lane.GRADIENTS,) and phase is not Phase.FORWARD
        waits = phase is Phase.BACKWARD and place != "weights"
        if is_there and when == "before":
            fault.visit(waits=waits)
        result = real(self, *args, **kwargs)
        if is_there and when == "behind":
            fault.visit(waits=waits)
        return result

    monkeypatch.setattr(MicrobatchRunner, "run", noted)
    monkeypatch.setattr(Worker, "_prefetch", noted_before)  # as above
    monkeypatch.setattr(owner, name, broken)


class Block(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, value):
        return value + torch.tanh(self.norm(self.linear(value)))


def model_of(depth=6):
    torch.manual_seed(1)
    return nn.Sequential(*(Block() for _ in range(depth))).to(DTYPE)


def skips():
    torch.manual_seed(1)
    return skip_chain()


BUILDS = {"norms": model_of, "skips": skips}


def run(model, fault, at=(), *, workers=1, plan=None, grain="stage", steps=5, memory_bytes=ROOM):
    """Asynchronous steps of SGD; faults are in the third round or later, and the caller writes into each batch."""
    batches = [batch(9, seed=i) for i in range(steps)]
    expected = copy.deepcopy(model)
    weights = stale_loop(expected, batches, NUM, 1)
    with roundpipe.RoundPipe(model, devices=[Device("cpu", memory_bytes=memory_bytes)] * workers) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=LR)
        run_config = config(NUM, grain, plan, preserve_rng_state=False)
        for k, value in enumerate(batches):
            value = value.clone()
            if k == 2:
                fault.at = at
            piped.forward_backward((value,), loss_fn=square_loss, run_config=run_config)
            value.fill_(float("nan"))
            if k == 2:
                fault.returned.set()
            handle = piped.step(lambda: (optimizer.step(), optimizer.zero_grad()))
            if k == 1:
                handle.wait()  # or the fault would be in a round before
        model.eval()
        piped.forward_loss((batches[0],), loss_fn=square_loss, run_config=run_config)  # logs what the last round met
        piped.synchronize()
        engine = piped._session.engine  # no report has what is in use now
        engine.release_memory()
        assert [backend.ledger.total_bytes for backend in engine.backends] == [0] * workers
    for found, each in zip(model.parameters(), weights, strict=True):
        torch.testing.assert_close(found, each, rtol=0, atol=1e-9)
    assert_same(dict(model.named_buffers()), dict(expected.named_buffers()), atol=1e-9)


def shortages(caplog):
    return [record.message for record in caplog.records if "ran out of device memory" in record.message]


@pytest.mark.parametrize(
    "place, at, build, plan, grain, workers",
    repeats(
        [
            (place, at, build, plan, grain, workers)
            for place in PLACES
            for at in (range(3) if place == "weights" else (*range(6), "often"))  # a visit's come up once
            for build in BUILDS
            for plan in PLANS
            for grain, workers in (("stage", 1), ("layer", 1), ("stage", 2), ("layer", 2), ("stage", 3))
        ],
        [
            "recomputation-0-norms-stages-stage-1",
            "recomputation-4-skips-short stages-layer-2",
            "recomputation-often-norms-stages-stage-2",
            "backward-2-norms-one stage-stage-1",
            "backward-5-skips-stages-stage-3",
            "backward-often-skips-one stage-stage-2",
            "behind a backward-1-skips-stages-layer-2",
            "behind a backward-2-norms-one stage-stage-1",
            "behind a backward-3-norms-stages-stage-2",
            "behind a backward-4-skips-one stage-layer-1",
            "values-1-skips-stages-stage-2",
            "gradients of values-2-skips-one stage-layer-1",
            "gradients of values-4-norms-stages-stage-3",
            "gradients of weights-0-skips-stages-stage-1",
            "gradients of weights-5-norms-stages-layer-2",
            "weights-1-norms-stages-stage-2",
            "weights-2-skips-short stages-layer-2",
        ],
    ),
)
def test_a_round_that_runs_out_of_memory_late_has_eagers_numbers(
    monkeypatch, caplog, place, at, build, plan, grain, workers
):
    fault = Fault()
    break_at(monkeypatch, fault, place)
    at = {1, 30, 60} if at == "often" else {at}
    with caplog.at_level(logging.WARNING, logger="roundpipe"):
        run(BUILDS[build](), fault, at, workers=workers, plan=PLANS[plan], grain=grain)
    assert fault.num_raised
    assert 1 <= len(shortages(caplog)) <= fault.num_raised


@pytest.mark.parametrize("workers", [1, 2])
def test_later_rounds_have_a_smaller_plan(monkeypatch, caplog, workers):
    fault = Fault()
    break_at(monkeypatch, fault, "behind a backward")
    with caplog.at_level(logging.INFO, logger="roundpipe"):
        run(model_of(12), fault, {1}, workers=workers, memory_bytes=20_000)
    assert fault.num_raised == 1
    assert any("the end of a round; the next ones have a smaller plan" in message for message in shortages(caplog))


def test_a_stage_that_runs_out_of_memory_again_is_an_error_of_the_next_call(monkeypatch):
    fault = Fault()
    break_at(monkeypatch, fault, "backward")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run(model_of(), fault, range(1, 1000), plan=PLANS["stages"])
    assert any("its gradients are not whole" in note for note in caught.value.__notes__)
    assert fault.num_raised >= 2


def test_after_such_an_error_training_goes_on(monkeypatch):
    fault, model = Fault(), model_of()
    break_at(monkeypatch, fault, "backward")
    with roundpipe.RoundPipe(model, devices=[Device("cpu", memory_bytes=ROOM)]) as piped:
        options = {"loss_fn": square_loss, "run_config": config(NUM, None, PLANS["stages"], preserve_rng_state=False)}
        piped.step(lambda: None)
        piped.synchronize()
        before = copy.deepcopy(model)
        fault.at = range(1000)
        piped.forward_backward((batch(),), **options)
        fault.returned.set()
        with pytest.raises(torch.OutOfMemoryError):
            piped.synchronize()
        fault.at = ()
        piped.zero_grad()
        piped.forward_backward((batch(),), **options)
        piped.synchronize()
        for _ in range(2):
            before.zero_grad()
            eager(before, batch())
        assert_same(gradients(model), gradients(before), atol=1e-9)


def test_without_room_on_the_host_a_stage_is_not_run_again(monkeypatch):
    fault = Fault()
    break_at(monkeypatch, fault, "backward")
    monkeypatch.setattr(kept_runs, "HOST_LIMIT", Full())
    with pytest.raises(torch.OutOfMemoryError):
        run(model_of(), fault, {1}, plan=PLANS["stages"])
    assert fault.num_raised == 1


class Full:
    def has_room(self, num_bytes):
        return False


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("place", ["recomputation", "behind a backward", "gradients of weights"])
def test_the_backward_of_a_forward_is_run_again_where_it_ran_out_of_memory(monkeypatch, caplog, place, workers):
    fault, model, value = Fault(), model_of(), batch(9)
    fault.returned.set()
    break_at(monkeypatch, fault, place)
    expected = copy.deepcopy(model)
    eager(expected, value, NUM)
    with roundpipe.RoundPipe(model, devices=[Device("cpu", memory_bytes=ROOM)] * workers) as piped:
        outputs = piped(value, roundpipe_run_config=config(NUM, plan=PLANS["stages"]))
        fault.at = {4}
        sum(square_loss(each, None) for each in outputs.tensor_split(NUM)).backward()
        assert_same(gradients(model), gradients(expected), atol=1e-9)
        with caplog.at_level(logging.WARNING, logger="roundpipe"):
            piped(value, roundpipe_run_config=config(NUM, plan=PLANS["stages"]))
    assert fault.num_raised == len(shortages(caplog)) == 1


class Routed(nn.Module):
    """Draws which of its outputs count, once; the running mean counts too."""

    def __init__(self, width=6):
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, value):
        made = self.norm(self.linear(value))
        if roundpipe.doing_recompute():
            (chosen,) = roundpipe.get_recompute_data()
        else:
            chosen = torch.rand_like(made) > 0.3
            roundpipe.save_for_recompute(chosen)
        return nn.functional.dropout(made * chosen + self.norm.running_mean, 0.2)


@pytest.mark.parametrize("residency", ["off", "auto", "full"])
@pytest.mark.parametrize("grain, workers", [("stage", 1), ("layer", 2)])
def test_a_second_run_has_the_draws_and_the_data_of_the_first(monkeypatch, grain, workers, residency):
    def trained(at):
        torch.manual_seed(3)
        model = nn.Sequential(*(Routed() for _ in range(6))).to(DTYPE)
        fault = Fault()
        fault.returned.set()
        with monkeypatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            break_at(patch, fault, "behind a backward")
            with roundpipe.RoundPipe(model, devices=[Device("cpu", memory_bytes=ROOM)] * workers) as piped:
                optimizer = torch.optim.SGD(piped.optim_parameters(), lr=LR)
                for k in range(4):
                    fault.at = at if k > 1 else ()
                    options = config(NUM, grain, PLANS["stages"], residency=residency)
                    piped.forward_backward((batch(9, seed=k),), loss_fn=square_loss, run_config=options)
                    piped.step(lambda: (optimizer.step(), optimizer.zero_grad()))
                piped.synchronize()
        assert bool(fault.num_raised) == bool(at)
        return dict(model.state_dict())

    assert_same(trained({2, 15}), trained(()), atol=1e-9)


@pytest.mark.parametrize("is_tight", [False, True])
def test_only_where_memory_is_short_a_call_waits_for_backwards_beside_its_losses(monkeypatch, is_tight):
    go_on, is_reached = threading.Event(), threading.Event()
    go_on.set()
    backward = Stage.backward

    def held(self, *args):
        is_reached.set()
        assert go_on.wait(20)
        return backward(self, *args)

    monkeypatch.setattr(Stage, "backward", held)
    plan = roundpipe.ExecutePlan([(0, 5)], (5, 6), [(0, 5)])
    run_config = config(1, plan=plan, preserve_rng_state=False)  # else a call waits for what may draw

    def trained(memory_bytes, *, holds):
        layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(6))).to(DTYPE)  # calls wait for buffers as well
        with roundpipe.RoundPipe(layers, devices=[Device("cpu", memory_bytes=memory_bytes)]) as piped:
            optimizer = torch.optim.SGD(piped.optim_parameters(), lr=LR)

            def step():
                piped.forward_backward((batch(),), loss_fn=square_loss, run_config=run_config)
                piped.step(lambda: (optimizer.step(), optimizer.zero_grad()))

            for _ in range(3):
                step()
            piped.synchronize()
            peak_bytes = piped.peak_device_bytes()
            if holds:
                is_reached.clear()
                go_on.clear()
                caller = threading.Thread(target=step)
                caller.start()
                try:
                    assert is_reached.wait(20)
                    if is_tight:
                        caller.join(0.2)
                        assert caller.is_alive()
                    else:
                        caller.join(20)
                        assert not caller.is_alive()
                finally:
                    go_on.set()
                    caller.join()
                piped.synchronize()
        return peak_bytes

    # the peak has room for the weights of the next round, which a plan can do without
    trained(int(0.85 * trained(ROOM, holds=False)) if is_tight else ROOM, holds=True)
