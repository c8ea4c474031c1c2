"""What the tests beside it share."""

import copy

import torch
from torch import nn

import roundpipe
from tests.runtime.models import (
    DTYPE,
    assert_same,
    batch,
    config,
    eager_round,
    gradients,
    mlp,
    square_loss,
)

SINGLES = roundpipe.ExecutePlan([(i, i + 1) for i in range(4)], (4, 5), [(i, i + 1) for i in reversed(range(4))])


class Mine(Exception):
    """Somebody's own exception."""


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, owner):
        ctx.owner = owner
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.owner.maybe_fail("backward")
        return gradient, None


class Fragile(nn.Module):
    """Fails once in a phase, in the microbatch whose first value is asked for."""

    broken = {}

    def __init__(self, name):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.name = name

    def maybe_fail(self, phase):
        if self.broken.get(self.name) == phase:
            del self.broken[self.name]
            raise Mine(f"{self.name} in {phase}")

    def forward(self, value):
        self.maybe_fail("recomputation" if roundpipe.doing_recompute() else "forward")
        return FailsInBackward.apply(torch.tanh(self.linear(value)), self)


def fragile_model():
    Fragile.broken.clear()
    model = mlp(5)
    model[1] = nn.Sequential(nn.Tanh(), Fragile("early"))
    model[4] = nn.Sequential(Fragile("late"), nn.Tanh())
    return model.to(DTYPE)


def assert_still_works(piped, model, num=3):
    model.zero_grad()
    piped.zero_grad()
    reference = copy.deepcopy(model)
    expected, _ = eager_round(reference, (batch(),), num=num)
    found = piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(num, plan=SINGLES))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert_same(gradients(model), gradients(reference))
