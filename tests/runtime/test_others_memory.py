"""What others have of a device is what is in use beside a worker's own, also while gradients are still on their way."""

import threading
import time

import pytest
import torch

import roundpipe
from roundpipe.runtime.device.backend import Device
from roundpipe.runtime.device.cpu import CpuBackend
from roundpipe.runtime.engine import pace, worker
from tests.runtime.models import batch, config, mlp, square_loss

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
