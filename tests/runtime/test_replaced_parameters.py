"""A parameter that another was put in the place of, between calls: the new one is trained as all others are."""

import copy

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.runtime.device.backend import Device
from tests.runtime.models import ATOL, DTYPE, assert_same, batch, config, gradients, mlp

WIDTH, DEPTH = 8, 3


def weighted_loss(out, label):
    """A mean, and how many samples it is of, not all of which count."""
    weight = (out.detach().sum(1) > 0).sum()
    return out.square().sum() / weight.clamp(min=1), weight


def replace(*models):
    torch.manual_seed(8)
    new = torch.randn(WIDTH, WIDTH, dtype=DTYPE)
    for model in models:
        model[1][0].weight = nn.Parameter(new.clone())


def wrapped(model, kind):
    make = roundpipe.AutoRoundPipe if kind == "parts" else roundpipe.RoundPipe
    return make(model, devices=["cpu"] * 2)


@pytest.mark.parametrize("kind", ["parts", "layers"])
def test_its_gradient_is_scaled_with_those_of_others(kind):
    torch.manual_seed(4)
    model, x = mlp(DEPTH, WIDTH).to(DTYPE), batch(7, width=WIDTH)
    reference = copy.deepcopy(model)
    with wrapped(model, kind) as piped:
        for _ in range(2):
            found = piped.forward_backward(
                (x,),
                loss_fn=weighted_loss,
                run_config=roundpipe.RoundPipeRunConfig(num_microbatch=3, loss_reduction="mean"),
            )
            sums = [weighted_loss(reference(part), None) for part in x.tensor_split(3)]
            expected = sum(loss * weight for loss, weight in sums) / sum(weight for _, weight in sums)
            expected.backward()
            torch.testing.assert_close(found, expected.detach(), rtol=0, atol=ATOL)
            piped.synchronize()
            assert_same(gradients(model), gradients(reference), ATOL)
            piped.zero_grad()
            reference.zero_grad()
            replace(model, reference)


@pytest.mark.parametrize("kind", ["parts", "layers"])
def test_gradients_of_inputs_alone_leave_it_as_it_is(kind):
    torch.manual_seed(4)
    model, x = mlp(DEPTH, WIDTH).to(DTYPE), batch(7, width=WIDTH).requires_grad_()
    with wrapped(model, kind) as piped:
        piped(x).sum().backward()
        piped.synchronize()
        piped.zero_grad()
        replace(model)
        torch.autograd.grad(piped(x).sum(), x)
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("residency", ["full", "auto"])
def test_it_takes_its_update_where_weights_live_on_the_device(residency):
    torch.manual_seed(4)
    model, x = mlp(DEPTH, WIDTH).to(DTYPE), batch(4, width=WIDTH)
    reference = copy.deepcopy(model)
    run_config = config(2, residency=residency)
    with roundpipe.RoundPipe(model, devices=[Device("cpu", memory_bytes=10**7)], model_run_config=run_config) as piped:
        for step in range(5):
            if step == 3:
                piped.synchronize()
                replace(model, reference)
            for _ in range(2):
                piped.forward_backward((x,), loss_fn=lambda out, label: out.square().sum())
                reference(x).square().sum().backward()
            piped.synchronize()
            assert_same(gradients(model), gradients(reference), ATOL)
            ours = torch.optim.SGD(piped.optim_parameters(), lr=0.01)
            theirs = torch.optim.SGD(reference.parameters(), lr=0.01)
            piped.step(lambda ours=ours: (ours.step(), ours.zero_grad()), is_async=False)
            theirs.step()
            theirs.zero_grad()
            piped.synchronize()
            assert_same(dict(model.named_parameters()), dict(reference.named_parameters()), ATOL)


def test_one_that_comes_back_has_the_same_copy():
    """Weights that were averaged, for an evaluation: the optimizer goes on with the copy that it has."""
    torch.manual_seed(4)
    model, x = mlp(DEPTH, WIDTH).to(DTYPE), batch(4, width=WIDTH).requires_grad_()
    with roundpipe.RoundPipe(model, devices=["cpu"]) as piped:
        before = dict(piped.optim_named_parameters())
        mine = model[1][0].weight
        replace(model)
        torch.autograd.grad(piped(x).sum(), x)
        model[1][0].weight = mine
        after = dict(piped.optim_named_parameters())
        assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)
        assert len(piped._session.optimizer.parameter_pairs()) == len(before)  # nothing is left of the other
