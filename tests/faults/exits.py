"""The end of a process at any moment of training: ``python -m tests.campaigns exits``.

Each case is a child process that trains until a signal ends it: SIGTERM with a handler that calls ``sys.exit``, SIGINT
as Ctrl-C sends it, or SIGTERM as the system handles it. Afterwards:

    hang      it ends within some seconds
    status    its exit status is the signal's, or what ``sys.exit`` was given
    stderr    Python reports nothing, but for the traceback of a KeyboardInterrupt
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import IO

import torch
from torch import nn

import roundpipe

DEADLINE_S = 30.0
STATUS = 3
ENDS = ("SIGTERM with a handler", "SIGINT", "SIGTERM")


def train(seed: int, tell: Callable[[], object]) -> None:
    """Train for ever, one model or many that are closed after a few steps; ``tell`` is called after each step."""
    rng = random.Random(seed)
    num_steps = rng.choice((3, sys.maxsize))
    is_async = rng.random() < 0.7
    x = torch.randn(8, 64)
    while True:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
        with roundpipe.RoundPipe(model, devices=["cpu"] * rng.randint(1, 3)) as pipe:
            optimizer = torch.optim.Adam(pipe.optim_parameters())
            for _ in range(num_steps):
                pipe.forward_backward((x,), loss_fn=lambda outputs, label: outputs.square().sum())
                pipe.step(lambda optimizer=optimizer: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
                if rng.random() < 0.3:
                    pipe.synchronize()
                tell()


def _exit(number: int, frame: object) -> None:
    sys.exit(STATUS)


def _child(seed: int, end: str, ready: int, stderr: IO[bytes]) -> None:
    """What a forked process does; it never returns normally."""
    os.dup2(stderr.fileno(), 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _exit if end == ENDS[0] else signal.SIG_DFL)
    train(seed, lambda: os.write(ready, b"."))


def examine(seed: int) -> list[str]:
    """End a child at some moment; what was not as promised."""
    end = ENDS[seed % len(ENDS)]
    receiver, sender = os.pipe()
    with tempfile.TemporaryFile() as stderr:
        child = os.fork()
        if not child:
            os.close(receiver)
            _child(seed, end, sender, stderr)
        os.close(sender)
        os.read(receiver, 1)
        time.sleep(random.Random(seed).random() * 0.05)
        os.kill(child, signal.SIGINT if end == "SIGINT" else signal.SIGTERM)
        deadline = time.monotonic() + DEADLINE_S
        problems = []
        while not (status := os.waitpid(child, os.WNOHANG))[0]:
            os.set_blocking(receiver, False)
            try:
                os.read(receiver, 65536)
            except BlockingIOError:
                pass
            if time.monotonic() > deadline:
                problems.append("hang")
                os.kill(child, signal.SIGUSR1)
                time.sleep(1.0)
                os.kill(child, signal.SIGKILL)
                status = os.waitpid(child, 0)
                break
            time.sleep(0.005)
        os.close(receiver)
        stderr.seek(0)
        text = stderr.read().decode(errors="replace")
    expected = {ENDS[0]: STATUS, "SIGINT": -signal.SIGINT, "SIGTERM": -signal.SIGTERM}[end]
    code = os.waitstatus_to_exitcode(status[1])
    if code != expected:
        problems.append(f"status: {code} for {expected}")
    if "Fatal" in text or "terminate called" in text or (text and (end != "SIGINT" or "KeyboardInterrupt" not in text)):
        problems.append(f"stderr: {text}")
    return [f"seed {seed}, {end}: {problem}" for problem in problems]
