"""What `step` returns, and `zero_grad` behind an update that runs."""

import gc
import threading
import time
import weakref

import pytest
import torch
from torch import nn

import roundpipe
from tests.runtime.models import assert_same, batch, config, mlp, square_loss
from tests.wrappers.cases_pipe import LR, train_once


@pytest.fixture
def piped():
    torch.manual_seed(0)
    with roundpipe.RoundPipe(mlp(), devices=["cpu"] * 2) as wrapper:
        yield wrapper


@pytest.fixture
def gate():
    """Opened at the latest when a test ends, so that no update hangs."""
    event = threading.Event()
    yield event
    event.set()


def test_a_handle_tells_when_an_update_is_done_and_what_it_returned(piped, gate):
    handle = piped.step(lambda number: (gate.wait(30), number)[1], True, 5)
    assert not handle.done() and not handle.wait(0.01) and repr(handle) == "<update 1: under way>"
    with pytest.raises(TimeoutError, match="update 1"):
        handle.result(0.01)
    gate.set()
    assert handle.result() == 5 and handle.done() and handle.wait() and repr(handle) == "<update 1: done>"
    assert piped.step(lambda: "now", is_async=False).result() == "now"


def test_an_error_is_raised_once(piped):
    def fails():
        raise KeyError("mine")

    handle = piped.step(fails)
    assert handle.wait(30) and handle.done() and repr(handle) == "<update 1: raised KeyError>"
    with pytest.raises(KeyError, match="mine"):
        handle.result()
    train_once(piped)
    handle = piped.step(fails)
    handle.wait()
    with pytest.raises(KeyError, match="mine"):
        train_once(piped)
    with pytest.raises(KeyError, match="mine"):
        handle.result()
    train_once(piped)


def test_an_update_that_was_never_made_has_no_result(piped):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            time.sleep(0.3)
            raise ZeroDivisionError

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp(1)

        def forward(self, value):
            return Fails.apply(self.inner(value)) if self.training else self.inner(value)

    model = nn.Sequential(Layer(), *mlp(3))
    plan = roundpipe.ExecutePlan([(0, 3)], (3, 4), [(0, 3)])
    options = config(2, plan=plan, preserve_rng_state=False)
    with roundpipe.RoundPipe(model.eval(), devices=["cpu"] * 2) as other:
        for number in range(3):
            model.train(number == 2)
            other.forward_backward((batch(),), loss_fn=square_loss, run_config=options)
            handle = other.step(lambda: "made")
        with pytest.raises(roundpipe.RoundPipeError, match="was not made"):
            handle.result()
        with pytest.raises(ZeroDivisionError):
            other.synchronize()


def test_no_wait_inside_its_own_step_fn(piped, gate):
    handles = []

    def step_fn():
        gate.wait(30)
        handles[0].wait()

    handles.append(piped.step(step_fn))
    gate.set()
    with pytest.raises(roundpipe.ConfigError, match="inside the step_fn"):
        handles[0].result()


def test_a_handle_keeps_neither_wrapper_nor_model():
    model = mlp()
    piped = roundpipe.RoundPipe(model, devices=["cpu"])
    optimizer = torch.optim.SGD(piped.optim_parameters(), lr=LR)
    train_once(piped)
    handle = piped.step(optimizer.step)
    piped.zero_grad()
    handle.wait()
    piped.close()
    gone = weakref.ref(piped), weakref.ref(model)
    del piped, model, optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    assert handle.done()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_does_not_wait_for_the_update(piped, gate, set_to_none):
    optimizer = torch.optim.SGD(piped.optim_parameters(), lr=LR)
    before = [copy.detach().clone() for copy in piped.optim_parameters()]
    train_once(piped)
    piped.synchronize()
    gradients = [parameter.grad.clone() for parameter in piped.model.parameters()]
    handle = piped.step(lambda: (gate.wait(30), optimizer.step()))
    began = time.monotonic()
    piped.zero_grad(set_to_none)
    assert time.monotonic() - began < 5 and not handle.done()
    train_once(piped)
    gate.set()
    handle.wait()
    expected = [start - LR * gradient for start, gradient in zip(before, gradients, strict=True)]
    torch.testing.assert_close([copy.detach() for copy in piped.optim_parameters()], expected)
    piped.synchronize()
    # the second round ran on the same weights, and its gradients are not among those that were dropped
    torch.testing.assert_close([parameter.grad for parameter in piped.model.parameters()], gradients)


def test_zero_grad_waits_where_a_round_follows_the_update(piped, gate):
    optimizer = torch.optim.SGD(piped.optim_parameters(), lr=LR)
    train_once(piped)
    handle = piped.step(lambda: (gate.wait(0.2), optimizer.step(), optimizer.zero_grad()))
    train_once(piped)
    piped.zero_grad()
    assert handle.done()
    piped.synchronize()
    assert all(parameter.grad is None for parameter in piped.model.parameters())


@pytest.mark.parametrize("is_async", [True, False])
def test_a_loop_that_clears_outside_of_step_fn_trains_the_same(is_async):
    def trained(clears_inside):
        torch.manual_seed(1)
        model = mlp()
        with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as wrapper:
            optimizer = torch.optim.Adam(wrapper.optim_parameters(), lr=LR)
            for number in range(5):
                wrapper.forward_backward((batch(seed=number),), loss_fn=square_loss, run_config=config(3))
                if clears_inside:
                    wrapper.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async)
                else:
                    wrapper.step(optimizer.step, is_async)
                    wrapper.zero_grad()
            wrapper.synchronize()
            return {name: value.clone() for name, value in model.state_dict().items()}

    assert_same(trained(True), trained(False), atol=0)
