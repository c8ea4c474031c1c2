"""What tests of out of memory in a round whose call may have returned share: where it comes, and what is trained."""

import copy
import itertools
import threading

import torch
from torch import nn

import roundpipe
from roundpipe.core.schedule import Phase
from roundpipe.runtime.device.backend import Device, Lane
from roundpipe.runtime.device.cpu import CpuBackend
from roundpipe.runtime.engine.runner import MicrobatchRunner
from roundpipe.runtime.engine.stage import Stage
from roundpipe.runtime.engine.worker import Worker
from roundpipe.runtime.weights.residency import Visit
from tests.runtime.cases_overlap import LR, stale_loop
from tests.runtime.models import DTYPE, assert_same, batch, config, skip_chain, square_loss

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
