"""Out of memory at the end of a round whose call has returned: the worker runs its stage again; numbers are eager's."""

import copy
import logging
import re
import threading
import warnings

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core import trees
from roundpipe.core.errors import DeviceMemoryError
from roundpipe.runtime.device.backend import Device
from roundpipe.runtime.engine import kept_runs
from roundpipe.runtime.engine.stage import Stage
from roundpipe.runtime.engine.worker import Worker
from roundpipe.runtime.weights.residents import Residents
from tests.repeats import repeats
from tests.runtime.cases_overlap import LR, eager
from tests.runtime.cases_shortage import (
    BUILDS,
    NUM,
    PLACES,
    PLANS,
    ROOM,
    Fault,
    break_at,
    model_of,
    run,
    shortages,
    skips,
)
from tests.runtime.models import DTYPE, assert_same, batch, config, gradients, mlp, square_loss


@pytest.mark.parametrize(
    "place, at, build, plan, grain, workers",
    repeats(
        [
            (place, at, build, plan, grain, workers)
            for place in PLACES
            for at in (*range(3 if place == "weights" else 6), "often", "twice")  # weights come up once per visit
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
            *(f"{place}-twice-skips-stages-stage-2" for place in PLACES),
        ],
    ),
)
def test_a_round_that_runs_out_of_memory_late_has_eagers_numbers(
    monkeypatch, caplog, place, at, build, plan, grain, workers
):
    fault = Fault()
    break_at(monkeypatch, fault, place)
    at = {"often": {1, 30, 60}, "twice": {1, 2}}.get(at, {at})
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
    with pytest.raises(DeviceMemoryError) as caught:
        run(model_of(), fault, range(1, 1000), plan=PLANS["stages"])
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert any("its gradients are not whole" in note for note in caught.value.__notes__)
    assert fault.num_raised >= 3


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
        with pytest.raises(DeviceMemoryError):
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
    monkeypatch.setattr(kept_runs, "HOST_LIMIT", Asked(has_room=False))
    with pytest.raises(DeviceMemoryError) as caught:
        run(model_of(), fault, {1}, plan=PLANS["stages"])
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert fault.num_raised == 1


def test_what_others_read_later_needs_no_more_room_on_the_host(monkeypatch):
    """A skip that two stages read in their backward is on the host until the second one is through, kept or not."""
    asked = Asked()
    monkeypatch.setattr(kept_runs, "HOST_LIMIT", asked)
    plan = roundpipe.ExecutePlan([(0, 3), (3, 5)], (5, 6), [(3, 5), (1, 3), (0, 1)])
    with roundpipe.RoundPipe(skips(), devices=[Device("cpu", memory_bytes=ROOM)]) as piped:
        piped.step(lambda: None)  # rounds are asynchronous from then on
        run_config = config(NUM, plan=plan, preserve_rng_state=False)
        piped.forward_backward((batch(9),), loss_fn=square_loss, run_config=run_config)
        piped.synchronize()
    assert asked.bytes == [batch(9).nbytes // NUM] * 3 * NUM


class Asked:
    def __init__(self, *, has_room=True):
        self._has_room = has_room
        self.bytes = []

    def has_room(self, num_bytes):
        self.bytes.append(num_bytes)
        return self._has_room


def _raise_above(monkeypatch, most_rows):
    """Backwards of microbatches of more rows, behind that of the loss, are out of memory."""
    real = Stage.backward

    def backward(self, recorded, incoming, microbatch):
        rows = max(len(tensor) for tensor in trees.tensors(recorded.leaves))
        if recorded.losses is None and rows > most_rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(self, recorded, incoming, microbatch)

    monkeypatch.setattr(Stage, "backward", backward)


@pytest.mark.parametrize("kind, given", [("round", True), ("forward", True), ("forward", False)])
def test_what_the_error_of_a_backward_proposes_works(monkeypatch, kind, given):
    """Of a round whose call has returned, or of the backward of a ``forward``."""
    model, value = mlp(), batch(12)
    plan = roundpipe.ExecutePlan([(0, 2)], (2, 4), [(0, 2)]) if given else None

    def backward(piped, number, grain):
        options = config(number, grain, plan, preserve_rng_state=False)
        if kind == "round":
            piped.forward_backward((value,), loss_fn=square_loss, run_config=options)
        else:
            square_loss(piped(value, roundpipe_run_config=options), None).backward()
        piped.synchronize()

    with roundpipe.RoundPipe(model, devices=[Device("cpu", memory_bytes=ROOM)]) as piped:
        piped.step(lambda: None)
        backward(piped, NUM, "stage")
        piped.zero_grad()
        _raise_above(monkeypatch, 2)
        with pytest.raises(DeviceMemoryError, match="is predicted to fit") as caught:
            backward(piped, NUM, "stage")
        proposed = re.search(r"num_microbatch=(\d+) with recompute_grain='(\w+)'", str(caught.value))
        expected = copy.deepcopy(model)
        expected.zero_grad()
        piped.zero_grad()
        backward(piped, int(proposed[1]), proposed[2])
        eager(expected, value)
        assert_same(gradients(model), gradients(expected), atol=1e-9)


@pytest.mark.parametrize("workers", [1, 2])
def test_at_the_second_shortage_weights_of_other_stages_leave_the_device(monkeypatch, caplog, workers):
    fault, left = Fault(), []
    fault.returned.set()
    break_at(monkeypatch, fault, "backward")
    drop_others = Residents.drop_others

    def noted(self, used):
        before_bytes = self.num_bytes
        drop_others(self, used)
        left.append((self.num_bytes, before_bytes))

    monkeypatch.setattr(Residents, "drop_others", noted)
    model = mlp(depth=6)
    for layer in (*model[:2], *model[3:5]):
        layer.requires_grad_(False)
    expected = copy.deepcopy(model)
    with roundpipe.RoundPipe(model, devices=[Device("cpu", memory_bytes=ROOM)] * workers) as piped:
        piped.step(lambda: None)
        for k in range(3):
            fault.at = {0, 1} if k == 1 else ()
            run_config = config(NUM, plan=PLANS["stages"], preserve_rng_state=False)
            piped.forward_backward((batch(9),), loss_fn=square_loss, run_config=run_config)
            piped.synchronize()
            eager(expected, batch(9))
        assert_same(gradients(model), gradients(expected), atol=1e-9)
    assert len(left) == 1 and left[0][0] < left[0][1]


def test_weights_that_can_not_come_up_ahead_come_up_in_their_turn(monkeypatch):
    """While the last stage of a round still runs, its worker begins with the weights of the next round."""
    is_ahead, raised, calls = threading.local(), [], []
    has_next = threading.Event()
    # only the worker knows what it does ahead
    look_ahead, prefetch, submit, backward = Worker._look_ahead, Worker._prefetch, Worker.submit, Stage.backward

    def noted(self):
        is_ahead.now = True
        look_ahead(self)
        is_ahead.now = False

    def broken(self, step, job):
        if has_next.is_set() and getattr(is_ahead, "now", False):
            raised.append(job)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        prefetch(self, step, job)

    def counted(self, step):
        submit(self, step)
        if len(calls) == 2:
            has_next.set()

    def held(self, recorded, incoming, microbatch):
        if recorded.losses is None and calls:
            assert has_next.wait(20), "there was no next round"
        return backward(self, recorded, incoming, microbatch)

    monkeypatch.setattr(Worker, "_look_ahead", noted)  # as above
    monkeypatch.setattr(Worker, "_prefetch", broken)  # as above
    monkeypatch.setattr(Worker, "submit", counted)
    monkeypatch.setattr(Stage, "backward", held)
    model = mlp(depth=6)
    expected = copy.deepcopy(model)
    run_config = config(NUM, plan=PLANS["one stage"], preserve_rng_state=False)
    with roundpipe.RoundPipe(model, devices=[Device("cpu", memory_bytes=ROOM)]) as piped:
        piped.step(lambda: None)
        for k in range(4):
            if k == 2:
                piped.synchronize()  # or the round before would be held
            if k >= 2:
                calls.append(k)
            piped.forward_backward((batch(9),), loss_fn=square_loss, run_config=run_config)
            eager(expected, batch(9))
        piped.synchronize()
    assert raised
    assert_same(gradients(model), gradients(expected), atol=1e-9)


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
