"""`optim_parameters()` beside `step`: gradients are with the copies, at no more hand-overs than it takes."""

import copy

import pytest
import torch

import roundpipe
from tests.runtime.models import assert_same, mlp
from tests.wrappers.cases_pipe import LR, train_once


def hand_overs(piped, action):
    with piped.record_timeline() as timeline:
        action()
    return [span.name for span in timeline.on("optimizer", "hand-over")]


@pytest.mark.parametrize("is_async", [True, False])
def test_a_look_without_new_gradients_hands_nothing_over(is_async):
    torch.manual_seed(0)
    with roundpipe.RoundPipe(mlp(), devices=["cpu"]) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=LR)
        for number in range(3):
            train_once(piped)
            assert number == 0 or hand_overs(piped, lambda: list(piped.optim_parameters()))
            piped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async).wait()
            assert not hand_overs(piped, lambda: list(piped.optim_parameters()))
            piped.synchronize()
            assert not hand_overs(piped, lambda: list(piped.optim_parameters()))
            piped.zero_grad()
            assert not hand_overs(piped, lambda: list(piped.optim_parameters()))


@pytest.mark.parametrize("way", ["in place", "another", "after a step"])
def test_gradients_that_were_changed_by_hand_are_the_copies(way):
    """Copies of another dtype, whose gradients are no views of the model's."""
    torch.manual_seed(0)
    model = mlp().float()
    with roundpipe.RoundPipe(model, devices=["cpu"], optim_dtype=torch.float64) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=LR)
        for _ in range(2):
            piped.forward_backward((torch.randn(4, 6),), loss_fn=lambda out, label: out.square().sum())
            if way == "after a step":
                piped.step(lambda: (optimizer.step(), optimizer.zero_grad()))
            piped.synchronize()
            for parameter in model.parameters():
                if way == "in place":
                    parameter.grad.mul_(0.5)
                else:
                    parameter.grad = torch.full_like(parameter, 0.25)
            expected = {name: parameter.grad.double() for name, parameter in model.named_parameters()}
            assert_same({name: copy.grad for name, copy in piped.optim_named_parameters()}, expected, atol=0)
            piped.step(lambda: (optimizer.step(), optimizer.zero_grad()))


def test_the_optimizers_zero_grad_clears_what_is_shown():
    torch.manual_seed(0)
    model = mlp()
    with roundpipe.RoundPipe(model, devices=["cpu"]) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=LR)
        train_once(piped)
        piped.step(optimizer.step)  # which leaves the gradients
        piped.synchronize()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in (*model.parameters(), *piped.optim_parameters()))


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("function", ["clip_grad_norm_", "clip_grad_value_"])
def test_a_list_of_copies_from_earlier_can_be_clipped_before_a_step(function, dtype, is_async):
    """By torch's own functions; copies of another dtype have gradients of their own."""

    def clip(parameters):
        return getattr(torch.nn.utils, function)(parameters, 0.01)

    torch.manual_seed(0)
    model = mlp().float()
    reference = copy.deepcopy(model).to(dtype)
    plain = torch.optim.SGD(reference.parameters(), lr=LR)
    with roundpipe.RoundPipe(model, devices=["cpu"], optim_dtype=dtype) as piped:
        copies = list(piped.optim_parameters())
        optimizer = torch.optim.SGD(copies, lr=LR)
        for _ in range(4):
            x = torch.randn(4, 6)
            piped.forward_backward((x,), loss_fn=lambda out, label: out.square().sum())
            norm = clip(copies)
            assert all(each.grad is not None for each in copies)
            piped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async)
            if not is_async:
                reference(x.to(dtype)).square().sum().backward()
                torch.testing.assert_close(clip(reference.parameters()), norm, rtol=1e-5, atol=0)
                plain.step()
                plain.zero_grad()
                expected = {name: weight.float() for name, weight in reference.state_dict().items()}
                assert_same(model.state_dict(), expected, atol=1e-6)
