"""Models on one CPU worker with a budget, whose weights may live on its device."""

import torch

import roundpipe
from roundpipe.core.schedule import ExecutePlan
from roundpipe.runtime.device.backend import Device
from tests.runtime.models import DTYPE, config, mlp

WIDTH, NUM, DEPTH = 8, 2, 3
PLANS = {"one stage": ExecutePlan([], (0, DEPTH), []), "stages": ExecutePlan([(0, 2)], (2, DEPTH), [(1, 2), (0, 1)])}
ROOM = 10**7


def wrapped(model, residency="full", plan=None, memory_bytes=ROOM, **options):
    """A model on one CPU worker whose memory is counted."""
    run_config = config(NUM, plan=plan, residency=residency)
    devices = [Device("cpu", memory_bytes=memory_bytes)]
    return roundpipe.RoundPipe(model, devices=devices, model_run_config=run_config, **options)


def model_of(dtype=DTYPE):
    torch.manual_seed(4)
    return mlp(DEPTH, WIDTH).to(dtype)


def moved(piped):
    """Bytes of weights and gradients that the worker has moved since the last call."""
    (worker,) = piped.report().workers
    return worker.moved_bytes["weights"], worker.moved_bytes["gradients"]


def lives_there(piped):
    return bool(piped._session.engine.twins)  # what is private to the runtime tells where weights are


def optimizer_of(piped, kind):
    return kind(piped.optim_parameters())


OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, foreach=False),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False),
}
