"""Late gradients where other threads look, graphs add to them, and Ctrl-C comes: each counts once."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.runtime.optimizer import pieces
from tests.runtime.cases_late_gradients import WIDTH, assert_same_converted, step, used
from tests.runtime.models import square_loss

__all__ = ["used"]  # a fixture
pytestmark = pytest.mark.timeout(120)


@contextmanager
def small():
    """A model in rotation, its copies, an optimizer of them, and a function that runs a round."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).bfloat16()
    with roundpipe.RoundPipe(model, torch.float32, devices=["cpu"]) as piped:
        copies = list(piped.optim_parameters())

        def run(index):
            value = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(index)).bfloat16()
            piped.forward_backward((value,), loss_fn=square_loss)

        yield piped, copies, torch.optim.AdamW(copies, 0.1, fused=True), run


def beside_an_update(act):
    """Weights after rounds in which the training thread acts while the update before its optimizer's step waits."""
    with small() as (piped, copies, optimizer, run):
        for index in range(4):
            begun, goes_on = threading.Event(), threading.Event()

            def update(begun=begun, goes_on=goes_on):
                begun.set()
                assert goes_on.wait(30)
                optimizer.step()

            run(index)
            handle = piped.step(update)
            assert begun.wait(30)
            act(optimizer, copies)
            goes_on.set()
            handle.wait()
            optimizer.zero_grad()
        piped.synchronize()
        assert [int(optimizer.state[each]["step"]) for each in copies] == [4] * len(copies)
        return {str(index): each.detach().clone() for index, each in enumerate(copies)}


@pytest.mark.parametrize(
    "act",
    [
        lambda optimizer, copies: optimizer.zero_grad(),
        lambda optimizer, copies: copies[0].norm(),
        lambda optimizer, copies: copy.deepcopy(copies[:2]),
        lambda optimizer, copies: copies[0].grad,
    ],
)
def test_the_training_thread_changes_nothing_beside_an_update(act, used, monkeypatch):
    assert_same_converted(monkeypatch, partial(beside_an_update, act))
    assert torch.bfloat16 in used


def looked_at_in_the_middle(monkeypatch):
    """Weights where another thread looks at each copy right before its update in pieces."""
    update = pieces._update_in_pieces  # where the middle is

    def look_and_update(run_update, parameter, *args):
        look = threading.Thread(target=lambda: (parameter.norm(), parameter.grad))
        look.start()
        look.join()
        update(run_update, parameter, *args)

    with small() as (piped, copies, optimizer, run), monkeypatch.context() as patch:
        patch.setattr(pieces, "_update_in_pieces", look_and_update)  # it
        for index in range(3):
            run(index)
            piped.step(lambda: step(optimizer, copies, 0)).wait()
        assert [int(optimizer.state[each]["step"]) for each in copies] == [3] * len(copies)
        return {str(index): each.detach().clone() for index, each in enumerate(copies)}


def test_a_look_in_the_middle_of_an_update_changes_nothing(used, monkeypatch):
    assert_same_converted(monkeypatch, partial(looked_at_in_the_middle, monkeypatch))
    assert torch.bfloat16 in used


def test_threads_of_a_step_find_the_gradient(used):
    with small() as (piped, copies, optimizer, run), ThreadPoolExecutor(4) as pool:

        def look(barrier):
            barrier.wait(30)
            return copies[0].grad is not None

        run(0)
        barrier = threading.Barrier(4)
        handle = piped.step(lambda: [*pool.map(look, [barrier] * 4)])
        assert all(handle.result())


def penalized():
    """A graph from before the update adds to gradients in it, which tells nobody."""
    with small() as (piped, copies, optimizer, run):
        for index in range(3):
            run(index)
            penalty = sum(each.square().sum() for each in copies)
            piped.step(lambda penalty=penalty: (penalty.backward(), step(optimizer, copies, 0)), is_async=False)
        return {str(index): each.detach().clone() for index, each in enumerate(copies)}


def interrupted(behind):
    """Ctrl-C between the exchange and ``step_fn``, what is done then, and another step."""
    with small() as (piped, copies, optimizer, run):
        run(0)
        piped.step(lambda: step(optimizer, copies, 0), is_async=False)
        side = piped._session.optimizer  # nobody else can interrupt it there
        exchange = side._exchange  # it

        def exchange_and_interrupt(*args, **kwargs):
            exchange(*args, **kwargs)
            raise KeyboardInterrupt

        side._exchange = exchange_and_interrupt  # it
        run(1)
        with pytest.raises(KeyboardInterrupt):
            piped.step(lambda: step(optimizer, copies, 0), is_async=False)
        side._exchange = exchange  # it
        found = behind(piped, copies, optimizer)
        run(2)
        piped.step(lambda: step(optimizer, copies, 0), is_async=False)
        found = [*copies, *([] if found is None else [found])]
        return {str(index): each.detach().clone() for index, each in enumerate(found)}


INTERRUPTED = {
    "nothing": lambda piped, copies, optimizer: None,
    "a look": lambda piped, copies, optimizer: copies[0].grad.clone(),
    "clearing": lambda piped, copies, optimizer: piped.zero_grad(),
    "clearing by hand": lambda piped, copies, optimizer: [setattr(each, "grad", None) for each in copies] and None,
    "a step": lambda piped, copies, optimizer: step(optimizer, copies, 0),
}


@pytest.mark.parametrize("case", [penalized, *(partial(interrupted, each) for each in INTERRUPTED.values())])
def test_what_is_taken_counts_once(case, used, monkeypatch):
    assert_same_converted(monkeypatch, case)
