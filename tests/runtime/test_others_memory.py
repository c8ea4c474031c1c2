"""What others have of a device is what is in use beside a worker's own, also while gradients are still on their way."""

import threading
import time

import pytest
import torch

import roundpipe
from roundpipe.runtime.device.backend import Device
from roundpipe.runtime.device.cpu import CpuBackend
from roundpipe.runtime.engine import full_plans, pace, worker
from tests.runtime import cases_twins
from tests.runtime.models import DTYPE, batch, config, mlp, square_loss
from tests.runtime.test_some_layers_stay import number_there

WIDTH = 8
BIAS_BYTES = 8 * WIDTH
"""The least that a gradient takes; a loss that is there is its reader's."""


@pytest.fixture
def others(monkeypatch):
    """Bytes that are taken for others', at each look, by the ledger."""
    found = []
    monkeypatch.setattr(
        CpuBackend, "note_others", lambda self, own_bytes: found.append(self.ledger.total_bytes - own_bytes)
    )
    return found


def train(num_steps, residency, accumulate=1, settles=False):
    """``settles``: each step begins once the one before has left nothing to let go of, or it does not look."""
    torch.manual_seed(0)
    options = config(2, residency=residency)
    with roundpipe.RoundPipe(
        mlp(3, WIDTH), devices=[Device("cpu", memory_bytes=10**6)], model_run_config=options
    ) as piped:
        ours = torch.optim.AdamW(piped.optim_parameters(), lr=0.1)
        for step in range(num_steps):
            for part in range(accumulate):
                x = batch(4, width=WIDTH, seed=10 * step + part)
                piped.forward_backward((x,), loss_fn=square_loss)
            piped.step(lambda: (ours.step(), ours.zero_grad())).wait()
            deadline_s = time.monotonic() + 20
            while settles and worker_of(piped).pace.has_left:
                assert time.monotonic() < deadline_s
                time.sleep(0.001)


def worker_of(piped):
    return piped._session.engine._workers[0]  # nothing public tells what it has left


def test_gradients_that_another_thread_lets_go_of_are_not_others(others, monkeypatch):
    """It does so only once the next step has begun."""
    is_asked, has_begun = threading.Event(), threading.Event()
    wait, make_room = pace.InFlight.wait, worker.Worker._make_room  # nothing public tells of either

    def wait_late(self):
        if threading.current_thread().name.endswith("gradients"):
            is_asked.set()
            has_begun.wait(60)
        wait(self)

    def begin(self, spec):
        if is_asked.is_set():
            has_begun.set()
        make_room(self, spec)

    monkeypatch.setattr(pace.InFlight, "wait", wait_late)
    monkeypatch.setattr(worker.Worker, "_make_room", begin)  # as above
    train(6, "off")
    assert has_begun.is_set() and others and max(others) < BIAS_BYTES


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_of_weights_that_live_there_are_not_others(others, accumulate):
    """The next round begins while they are there; copies and states are counted before they are."""
    train(4, "full", accumulate=accumulate, settles=True)
    assert len(others) > 4 and max(others) < BIAS_BYTES


def test_layers_stay_while_others_take_what_is_left_over_and_give_it_back(monkeypatch):
    """Without another look at what fits; if they take more, some go."""
    chosen, choose = [], full_plans.FullPlans._choose  # nothing else tells that it was looked for
    monkeypatch.setattr(full_plans.FullPlans, "_choose", lambda self, *given: chosen.append(1) or choose(self, *given))
    torch.manual_seed(4)
    with cases_twins.wrapped(mlp(8, cases_twins.WIDTH).to(DTYPE), "full", memory_bytes=60_000) as piped:
        ours = cases_twins.optimizer_of(piped, cases_twins.OPTIMIZERS["AdamW"])

        def there(taken_bytes=0):
            monkeypatch.setattr(CpuBackend, "take_budget", lambda backend: 60_000 - taken_bytes)
            piped.forward_backward((batch(4, width=cases_twins.WIDTH),), loss_fn=square_loss)
            piped.step(lambda: (ours.step(), ours.zero_grad()))
            return number_there(piped)

        assert [there() for _ in range(3)] == [0, 16, 16]
        number = len(chosen)
        assert [there(taken_bytes) for taken_bytes in (3_000, 0, 10_000, 2_000, 0)] == [16] * 5
        assert len(chosen) == number
        assert 0 < there(30_000) < 16 and len(chosen) > number
