"""Between steps on a device the host launches little, and waits only where it reads."""

import threading
import time

import pytest
import torch
from torch import nn

from roundpipe.runtime.engine.stage import Stage
from roundpipe.runtime.optimizer.hand_over import HandOver
from roundpipe.runtime.profiling.host_log import HostLog
from roundpipe.runtime.weights.download import Download
from roundpipe.runtime.weights.gate import Gates
from roundpipe.runtime.weights.parameter_pair import ParameterPair
from roundpipe.runtime.weights.twins import Twin, Twins
from tests.runtime.cases_twins import OPTIMIZERS, WIDTH, lives_there, model_of, optimizer_of, wrapped
from tests.runtime.models import assert_equal_bits, batch, config, square_loss


@pytest.mark.parametrize("is_async", [False, True])
def test_gradients_that_a_step_leaves_are_added_to(is_async):
    """By zeros in place of nothing, and by a step that clears some of them alone."""

    def train(residency):
        losses, model = [], model_of(torch.bfloat16)
        with wrapped(model, residency, optim_dtype=torch.float32) as piped:
            ours = optimizer_of(piped, OPTIMIZERS["AdamW"])
            first = next(iter(piped.optim_parameters()))

            def update(step):
                ours.step()
                ours.zero_grad(set_to_none=False)
                if step % 2:
                    first.grad = None

            for step in range(6):
                x = batch(5, width=WIDTH, seed=step).bfloat16()
                losses.append(piped.forward_backward((x,), loss_fn=square_loss))
                piped.step(update, is_async, step)
            assert lives_there(piped) == (residency == "full")
        return {**dict(enumerate(losses)), **{name: value.clone() for name, value in model.state_dict().items()}}

    assert_equal_bits(train("full"), train("auto"))


class Waits:
    """In the place of an event on a device: counts who waits for it."""

    def __init__(self):
        self.num_waits = 0

    def synchronize(self):
        self.num_waits += 1

    def is_done(self):
        return True


@pytest.mark.parametrize("is_async", [False, True])
def test_the_host_waits_for_the_device_only_where_it_reads(is_async, monkeypatch):
    model, x, waits = model_of(), batch(5, width=WIDTH), Waits()
    streams = []
    monkeypatch.setattr(Twins, "record", lambda self: waits if self else None)
    monkeypatch.setattr(Twins, "precede_caller", lambda self: streams.append("precede") if self else None)
    monkeypatch.setattr(Twins, "follow_caller", lambda self: streams.append("follow") if self else None)
    with wrapped(model) as piped:
        ours = optimizer_of(piped, OPTIMIZERS["AdamW"])
        for _ in range(4):
            piped.forward_backward((x,), loss_fn=square_loss)
            handle = piped.step(lambda: (ours.step(), ours.zero_grad()), is_async)
        assert lives_there(piped)
        handle.wait()
        del streams[:]
        for step in range(3):
            piped.forward_backward((x,), loss_fn=square_loss)
            before = waits.num_waits
            handle = piped.step(lambda: (ours.step(), ours.zero_grad()), is_async)
            assert waits.num_waits == before + 1, step  # for the update before, long done
        # each call follows the caller's stream, which follows steps that it waits for
        assert streams == (["follow", "follow"] if is_async else ["follow", "follow", "precede"]) * 3
        before = waits.num_waits
        handle.wait()
        assert waits.num_waits == before + 1
        piped.synchronize()
        assert waits.num_waits > before + 1


def test_an_update_lets_a_round_that_waits_begin_first(monkeypatch):
    monkeypatch.setattr(Twins, "are_apart", property(bool))  # as on an accelerator
    model, x, num_steps, given, seen = model_of(), batch(5, width=WIDTH), 6, [], []
    backward = Stage.backward

    def slow_backward(stage, *args):
        time.sleep(0.05)
        gradients = backward(stage, *args)
        given.append(None)
        return gradients

    monkeypatch.setattr(Stage, "backward", slow_backward)  # what is given to a device shows nowhere else

    with wrapped(model) as piped:
        ours, side = optimizer_of(piped, OPTIMIZERS["AdamW"]), piped._session.optimizer  # the next round must be there
        exchange = side._hand_over.exchange

        def exchange_late(pairs, steps, *args, **kwargs):
            exchange(pairs, steps, *args, **kwargs)
            while side.num_steps < num_steps and side._steps.running()[-1:] == steps[-1:]:  # as above
                time.sleep(0.001)

        def update():
            seen.append(len(given))
            ours.step()
            ours.zero_grad()

        for step in range(num_steps):
            if step == 2:
                side._hand_over.exchange = exchange_late  # as above
            piped.forward_backward((x,), loss_fn=square_loss, run_config=config(1))
            piped.step(update)
        assert lives_there(piped)
        piped.synchronize()
    assert seen[2:-1] == [4, 5, 6]  # each behind a backward of the next round


@pytest.mark.parametrize("residency", ["full", "off"])
def test_gradients_that_stay_on_the_device_need_no_other_thread(residency, monkeypatch):
    threads, add = [], Download.settle
    monkeypatch.setattr(
        Download, "settle", lambda self, *args: (threads.append(threading.current_thread().name), add(self, *args))
    )
    model, x = model_of(), batch(5, width=WIDTH)
    with wrapped(model, residency) as piped:
        ours = optimizer_of(piped, OPTIMIZERS["AdamW"])
        for step in range(6):
            if step == 4:
                assert lives_there(piped) == (residency == "full")
                piped.synchronize()
                del threads[:]
            piped.forward_backward((x,), loss_fn=square_loss)
            piped.step(lambda: (ours.step(), ours.zero_grad()))
        piped.synchronize()
    assert threads and all(name.endswith("gradients") == (residency == "off") for name in threads), threads


class Running:
    """A step that has uploaded all, and is over once a gate is open."""

    failed = False

    def __init__(self, gate, parameter):
        self.has_added = lambda jobs: gate.is_open([parameter])

    def turns(self, parameter):
        return 0, 0, 0

    def jobs_of(self, parameters):
        return [0], [0]

    def uploads(self, jobs):
        return []


def test_what_was_uploaded_is_written_while_what_lives_on_the_device_is_in_use():
    pairs = [ParameterPair([name], nn.Parameter(torch.zeros(2))) for name in ("there", "streamed")]
    for pair in pairs:
        pair.make_copy(torch.float64)
        with torch.no_grad():
            pair.copy.add_(1)
    there, streamed = pairs
    there.begin_twin(Twin(nn.Parameter(torch.zeros(2)), there.parameter))
    gates = Gates()
    gates.close([pair.parameter for pair in pairs])
    step = Running(gates.weights, streamed.parameter)
    HandOver(gates, HostLog("optimizer")).exchange(pairs, [step], True)
    assert torch.equal(streamed.parameter, torch.ones(2)) and torch.equal(there.twin.weights, torch.ones(2))
    assert not there.parameter.any() and there.is_behind is False
