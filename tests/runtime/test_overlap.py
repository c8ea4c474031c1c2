"""Rounds that are under way at once: after an asynchronous step a call returns with its losses."""

import copy
import re
import threading

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.runtime.device.cpu import CpuBackend
from tests.runtime.cases_overlap import LR, SINGLES, Held, build, eager, in_asynchronous_steps, train
from tests.runtime.models import DTYPE, assert_equal_bits, assert_same, batch, config, gradients, square_loss

pytestmark = pytest.mark.timeout(60)


def test_the_next_round_begins_beside_the_last_backward_stages():
    model = build(held=1)
    hold = model[1].switch
    calls = []

    def on_forward(module, args):
        calls.extend([] if roundpipe.doing_recompute() else [1])
        if len(calls) > 3:  # the second round's
            hold.may_go.set()

    model[0].register_forward_pre_hook(on_forward)
    with in_asynchronous_steps(model) as piped:
        hold.may_go.clear()
        train(piped, batch())  # hangs here if the call waits for its backward
        assert not hold.may_go.is_set()
        piped.step(lambda: None)
        train(piped, batch())
        piped.synchronize()


def test_a_step_that_waits_ends_the_overlap():
    model = build()
    with in_asynchronous_steps(model) as piped:
        piped.step(lambda: None, is_async=False)
        reference = eager(copy.deepcopy(model), batch())
        train(piped, batch())
        assert_same(gradients(model), reference)


def test_gradients_are_whole_wherever_they_are_asked_for():
    model = build()
    reference = eager(copy.deepcopy(model), batch())
    with in_asynchronous_steps(model) as piped:
        hold = model[2].switch
        for ask in (piped.synchronize, lambda: list(piped.parameters()), lambda: piped.step(lambda: None, False)):
            hold.may_go.clear()
            train(piped, batch())
            threading.Timer(0.1, hold.may_go.set).start()
            if ask is not piped.synchronize:
                ask()
            piped.synchronize()
            assert_same(gradients(model), reference)
            piped.zero_grad()
            piped.step(lambda: None)


def test_what_the_caller_changes_after_the_call_is_not_seen():
    """Arguments, attributes, modes and frozen parameters are those of the call."""
    for change in ("argument", "attribute", "mode", "frozen"):
        model = build(held=2)
        model[1] = nn.Sequential(Held(), nn.BatchNorm1d(6)).to(DTYPE)
        value = batch(9)
        twin = copy.deepcopy(model)
        reference = eager(twin, value)
        with in_asynchronous_steps(model) as piped:
            hold = model[2].switch
            hold.may_go.clear()
            train(piped, value)
            if change == "argument":
                value.fill_(100)
            elif change == "attribute":
                model[1][0].scale = 100.0
            elif change == "mode":
                model.eval()
            else:
                model[0].requires_grad_(False)
                model[1].requires_grad_(False)
            hold.may_go.set()
            list(piped.parameters())
            model.requires_grad_(True)
            assert_same(gradients(model), reference, atol=1e-12)
            assert_same(dict(model.named_buffers()), dict(twin.named_buffers()), atol=1e-12)


def test_an_argument_that_is_being_uploaded_when_the_call_could_return(monkeypatch):
    upload = CpuBackend.upload
    began, changed = threading.Event(), threading.Event()
    model, value = build(), batch(9)
    given = value.clone()

    def slowly(self, source, *args, **kwargs):
        if _share_memory(source, given) and not in_forward.match(threading.current_thread().name):
            began.set()
            changed.wait(0.5)
        return upload(self, source, *args, **kwargs)

    def loss_fn(output, label):
        assert began.wait(20), "the last stage's upload waits for nothing"
        return square_loss(output, label)

    in_forward = re.compile(".*worker [0-3]$")
    monkeypatch.setattr(CpuBackend, "upload", slowly)
    expected = eager(copy.deepcopy(model), value)
    with in_asynchronous_steps(model, 7) as piped:  # one for each job
        options = config(3, plan=SINGLES, preserve_rng_state=False)
        piped.forward_backward((given,), loss_fn=loss_fn, run_config=options)
        given.fill_(100)
        changed.set()
        piped.synchronize()
    assert_same(gradients(model), expected, atol=1e-12)


def _share_memory(one, other):
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def test_buffers_are_there_with_the_losses():
    model = build(held=2)
    model[0] = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).to(DTYPE)
    twin = copy.deepcopy(model)
    eager(twin, batch(9))
    with in_asynchronous_steps(model) as piped:
        hold = model[2].switch
        hold.may_go.clear()
        train(piped, batch(9))
        assert_same(dict(model.named_buffers()), dict(twin.named_buffers()), atol=1e-12)
        hold.may_go.set()


@pytest.mark.parametrize("then", ["train", "step", "synchronize", "parameters"])
def test_a_late_error_is_raised_at_the_next_call(then):
    model = build(held=1)
    with in_asynchronous_steps(model) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=LR)
        before = [p.detach().clone() for p in model.parameters()]
        model[1].switch.may_go.clear()
        train(piped, batch())
        model[1].switch.fails = True
        model[1].switch.may_go.set()
        (running,) = piped._session.engine.running() or [None]  # to be there before it fails
        if running is not None:
            running.wait_over()
        with pytest.raises(ZeroDivisionError, match="in the backward") as caught:
            {
                "train": lambda: train(piped, batch()),
                "step": lambda: piped.step(optimizer.step),
                "synchronize": piped.synchronize,
                "parameters": piped.parameters,
            }[then]()
        assert any("phase backward" in note for note in caught.value.__notes__)
        model[1].switch.fails = False
        piped.zero_grad()
        piped.synchronize()
        assert_equal_bits(dict(enumerate(before)), dict(enumerate(p.detach() for p in model.parameters())))
        reference = eager(copy.deepcopy(model), batch())
        train(piped, batch())
        piped.synchronize()
        assert_same(gradients(model), reference)


def test_no_step_is_taken_on_the_gradients_of_a_round_that_fails():
    """The step is called before the round fails."""
    model = build(held=1)
    with in_asynchronous_steps(model) as piped:
        stepped = []
        model[1].switch.may_go.clear()
        train(piped, batch())
        piped.step(lambda: stepped.append(1))
        model[1].switch.fails = True
        model[1].switch.may_go.set()
        with pytest.raises(ZeroDivisionError):
            piped.synchronize()
        piped.synchronize()
        assert not stepped
        model[1].switch.fails = False
        piped.zero_grad()
        piped.step(lambda: stepped.append(1))
        piped.synchronize()
        assert stepped == [1]


def test_closing_ends_what_is_running():
    threads = set(threading.enumerate())
    model = build()
    piped = in_asynchronous_steps(model)
    model[2].switch.may_go.clear()
    train(piped, batch())
    threading.Timer(0.1, model[2].switch.may_go.set).start()
    piped.close()
    assert not {one for one in set(threading.enumerate()) - threads if one.name.startswith("roundpipe")}


def test_an_interrupted_call_leaves_the_round_before_alone(monkeypatch):
    from roundpipe.runtime.engine.step import StepState

    model = build(held=1)
    with in_asynchronous_steps(model) as piped:
        train(piped, batch())
        real = StepState.wait_losses

        def interrupted(self):
            monkeypatch.setattr(StepState, "wait_losses", real)
            raise KeyboardInterrupt

        monkeypatch.setattr(StepState, "wait_losses", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(piped, batch())
        piped.zero_grad()
        reference = eager(copy.deepcopy(model), batch())
        train(piped, batch())
        piped.synchronize()
        assert_same(gradients(model), reference)


def test_rounds_with_random_draws_overlap_and_the_callers_draws_are_its_own():
    """A call returns once all is drawn, when gradients are still on their way."""

    def rounds(waits):
        torch.manual_seed(4)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4)) for _ in range(4))).to(DTYPE)
        devices, found, running = [roundpipe.Device("cpu", download_bytes_per_s=5e3)] * 2, [], []
        with roundpipe.RoundPipe(model, devices=devices, model_run_config=config(3, plan=SINGLES)) as piped:
            optimizer = torch.optim.SGD(piped.optim_parameters(), lr=LR)
            for seed in range(4):
                found.append(piped.forward_backward((batch(seed=seed),), loss_fn=square_loss))
                running.append(len(piped._session.engine.running()))  # nothing public tells
                if waits:
                    piped.synchronize()
                found.append(torch.rand(3))
                piped.step(lambda: (optimizer.step(), optimizer.zero_grad()))
            piped.synchronize()
        assert running[0] == 0 and all(running[1:])
        return dict(enumerate(found)) | gradients(model)

    assert_equal_bits(rounds(waits=False), rounds(waits=True))
