"""Copies that code asks for after a backward have its gradients, as those that were there before."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe

X, Y = torch.randn(9, 6), torch.randn(9, 4)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 4))


def plain_losses(model, optimizer, clipped):
    losses = []
    for _ in range(3):
        loss = F.mse_loss(model(X), Y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(clipped(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.item(), norm.item()))
    return losses


def test_a_plain_loop_clips_from_its_first_step_on():
    """By the copies, with an optimizer of the model's own parameters."""
    model = net()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    expected = plain_losses(reference, optimizer, reference.parameters)
    with roundpipe.compile(model, devices=["cpu"] * 2) as piped:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        found = plain_losses(piped, optimizer, piped.optim_parameters)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))


@pytest.mark.parametrize("is_async", [True, False])
def test_an_optimizer_may_be_made_after_the_first_backward(is_async):
    model = net()
    reference = copy.deepcopy(model)
    F.mse_loss(reference(X), Y).backward()
    with roundpipe.compile(model, devices=["cpu"] * 2) as piped:
        piped.forward_backward((X,), label=Y, loss_fn=F.mse_loss, loss_reduction="mean")
        copies = list(piped.optim_parameters())
        for parameter, other in zip(copies, reference.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad)
        norm = nn.utils.clip_grad_norm_(copies, 0.1)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
        optimizer = torch.optim.SGD(copies, lr=0.5)
        piped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
        piped.synchronize()
        torch.optim.SGD(reference.parameters(), lr=0.5).step()
        for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(parameter, other)
