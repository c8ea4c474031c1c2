"""What the tests beside it share."""

import torch
from torch import nn

LR = 0.1


def make_model(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def make_batches(count, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]


def loss_of(model, batch):
    return model(batch).square().mean()


def gradient_at(weights, batch):
    """Gradients of the loss at given weights, by name."""
    model = make_model()
    model.load_state_dict(weights)
    loss_of(model, batch).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def weights_of(side):
    return {name: parameter.detach().clone() for name, parameter in side.optim_named_parameters()}


def assert_same(one, other, **tolerance):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def make_step(side, **options):
    optimizer = torch.optim.SGD(side.optim_parameters(), lr=LR, **options)

    def step_fn():
        optimizer.step()
        optimizer.zero_grad()

    return optimizer, step_fn
