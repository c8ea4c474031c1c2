"""``zero_grad()`` of the optimizer itself beside `step`: behind, before and between rounds, as in a plain loop."""

import copy
import threading

import pytest
import torch

import roundpipe
from tests.runtime.models import assert_same, batch, config, mlp, square_loss
from tests.wrappers.cases_pipe import LR, train_once


def trained(loop, is_async, num_optimizers=1, **options):
    """The weights after a loop, and its model's gradients."""
    torch.manual_seed(1)
    model = mlp()
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as wrapper:
        copies = list(wrapper.optim_parameters())
        parts = [copies[index::num_optimizers] for index in range(num_optimizers)]
        optimizers = [torch.optim.Adam(part, lr=LR) for part in parts]

        def step():
            for optimizer in optimizers:
                optimizer.step()

        def clear():
            for optimizer in optimizers:
                optimizer.zero_grad(**options)

        for number in range(5):
            if loop == "above":
                clear()
            wrapper.forward_backward((batch(seed=number),), loss_fn=square_loss, run_config=config(3))
            if loop == "leave out" and number in (0, 2):
                wrapper.forward_backward((batch(seed=90 + number),), loss_fn=square_loss, run_config=config(3))
                clear()
                wrapper.forward_backward((batch(seed=number),), loss_fn=square_loss, run_config=config(3))
            wrapper.step(step if loop != "inside" else lambda: (step(), clear()), is_async)
            if loop in ("behind", "leave out"):
                clear()
        wrapper.synchronize()
        return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("is_async", [True, False])
def test_wherever_it_stands_the_loop_trains_the_same(is_async):
    expected = trained("inside", is_async)
    for loop in ("behind", "above", "leave out"):
        assert_same(trained(loop, is_async), expected, atol=0)
    assert_same(trained("behind", is_async, set_to_none=False), expected, atol=0)
    assert_same(trained("above", is_async, num_optimizers=2), trained("inside", is_async, num_optimizers=2), atol=0)


def test_an_update_that_has_not_begun_keeps_its_gradients():
    torch.manual_seed(0)
    with roundpipe.RoundPipe(mlp(), devices=["cpu"] * 2) as piped:
        may_go = threading.Event()
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=LR)
        before = [copy.detach().clone() for copy in piped.optim_parameters()]
        train_once(piped)
        piped.synchronize()
        gradients = [parameter.grad.clone() for parameter in piped.model.parameters()]
        handle = piped.step(lambda: (may_go.wait(30), optimizer.step()))
        optimizer.zero_grad()
        assert not handle.done()
        may_go.set()
        handle.wait()
        expected = [start - LR * gradient for start, gradient in zip(before, gradients, strict=True)]
        torch.testing.assert_close([copy.detach() for copy in piped.optim_parameters()], expected)
        assert all(copy.grad is None for copy in piped.optim_parameters())


def test_other_optimizers_clear_at_once():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=LR)
    with roundpipe.RoundPipe(mlp(), devices=["cpu"]) as piped:
        own = torch.optim.SGD(piped.optim_parameters(), lr=LR)
        may_go = threading.Event()
        train_once(piped)
        piped.step(lambda: (may_go.wait(30), own.step()))
        weight.sum().backward()
        optimizer.zero_grad()
        assert weight.grad is None
        may_go.set()


def test_gradients_that_a_plain_backward_has_added_are_cleared_too():
    """As of a penalty on gradients, which needs the model itself."""
    torch.manual_seed(0)
    model = mlp()
    reference = copy.deepcopy(model)
    with roundpipe.compile(model, devices=["cpu"] * 2) as piped:
        parameters = (piped.optim_parameters(), reference.parameters())
        optimizers = [torch.optim.SGD(each, lr=LR) for each in parameters]
        for number in range(3):
            for net, called, optimizer in zip((model, reference), (piped, reference), optimizers, strict=True):
                optimizer.zero_grad()
                assert all(parameter.grad is None for parameter in net.parameters())
                x = batch(seed=number).requires_grad_()
                (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
                gradient.square().mean().backward()
                called(x.detach()).square().mean().backward()
                optimizer.step()
        assert_same(dict(model.state_dict()), dict(reference.state_dict()), atol=1e-12)
