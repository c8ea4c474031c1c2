"""One thread trains while another evaluates."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional

import roundpipe
from roundpipe.core.errors import DeadlockError
from roundpipe.runtime.optimizer.optimizer import OptimizerSide

DTYPE = torch.float64


def network():
    torch.manual_seed(0)
    hidden = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)]
    return nn.Sequential(nn.Linear(8, 16), *hidden, nn.Linear(16, 4)).to(DTYPE)


@pytest.mark.parametrize("is_async", [False, True])
def test_evaluation_beside_training_comes_between_calls_and_steps(is_async):
    model = network()
    reference = copy.deepcopy(model)
    x, y = torch.randn(8, 8, dtype=DTYPE), torch.randint(4, (8,))
    eager = torch.optim.SGD(reference.parameters(), lr=0.1)
    errors, is_over = [], threading.Event()
    with roundpipe.compile(model, devices=["cpu", "cpu"]) as piped:
        ours = torch.optim.SGD(piped.optim_parameters(), lr=0.1)

        def evaluate():
            try:
                while not is_over.is_set():
                    with torch.no_grad():
                        assert piped(x).isfinite().all()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=evaluate)
        thread.start()
        try:
            for _ in range(25):
                loss = piped.forward_backward((x,), label=y, loss_fn=functional.cross_entropy, loss_reduction="mean")
                piped.step(lambda: (ours.step(), ours.zero_grad()), is_async=is_async)
                expected = functional.cross_entropy(reference(x), y)
                if not is_async:
                    torch.testing.assert_close(loss, expected)
                    expected.backward()
                    eager.step()
                    eager.zero_grad()
        finally:
            is_over.set()
            thread.join(60)
        assert not thread.is_alive() and not errors
        piped.synchronize()
        if not is_async:
            for one, other in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(one, other)


def test_a_step_that_waits_for_a_thread_that_calls_the_model_is_told_of():
    model = nn.Linear(4, 4)
    side = OptimizerSide(lambda: model.named_parameters(), deadline_s=0.2)
    entered, leave = threading.Event(), threading.Event()

    def hold():
        with side.turn():
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert entered.wait(30)
        with pytest.raises(DeadlockError, match="another thread has been in a step"):
            side.synchronize()
    finally:
        leave.set()
        thread.join(30)
    side.synchronize()
    side.close()
