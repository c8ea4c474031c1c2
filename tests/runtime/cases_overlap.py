"""What the tests beside it share."""

import threading

import torch
from torch import nn

import roundpipe
from tests.runtime.models import DTYPE, call, config, gradients, square_loss

SINGLES = roundpipe.ExecutePlan([(0, 1), (1, 2), (2, 3)], (3, 4), [(2, 3), (1, 2), (0, 1)])


LR = 0.1


class _Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, layer):
        ctx.layer = layer
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.layer.fails:
            raise ZeroDivisionError("in the backward")
        assert ctx.layer.may_go.wait(20), "nobody let the backward go on"
        return gradient, None


class Held(nn.Module):
    """A linear layer whose backward waits until the test lets it go."""

    def __init__(self, size=6):
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.scale = 1.0
        self.switch = _Switch()

    def forward(self, value):
        return _Held.apply(self.linear(value) * self.scale, self.switch)


class _Switch:
    """Shared by all copies of a layer."""

    def __init__(self):
        self.may_go = threading.Event()
        self.may_go.set()
        self.fails = False

    def __deepcopy__(self, memo):
        return _Switch()


def build(held=2):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6) for _ in range(4)]
    layers[held] = Held()
    return nn.Sequential(*layers).to(DTYPE)


def in_asynchronous_steps(model, workers=3, **settings):
    """A pipe whose last step was asynchronous and did nothing."""
    piped = roundpipe.RoundPipe(model, devices=["cpu"] * workers, **settings)
    piped.step(lambda: None)
    piped.synchronize()
    return piped


def train(piped, value, plan=SINGLES, num=3):
    # a module that is not of torch.nn may draw random numbers, for all we know, and is waited for
    options = config(num, plan=plan, preserve_rng_state=False)
    return piped.forward_backward((value,), loss_fn=square_loss, run_config=options)


def eager(model, value, num=3):
    for piece in value.tensor_split(num):
        square_loss(call(model, (piece,), {}), None).backward()
    return gradients(model)


def stale_loop(model, batches, num, calls_per_step):
    """``W[k] = W[k-1] - lr * grad(W[max(k-2, 0)])``, in eager."""
    weights = [[p.detach().clone() for p in model.parameters()]]
    for k in range(1, len(batches) // calls_per_step + 1):
        with torch.no_grad():
            for parameter, old in zip(model.parameters(), weights[max(k - 2, 0)], strict=True):
                parameter.copy_(old)
        model.zero_grad()
        for value in batches[(k - 1) * calls_per_step : k * calls_per_step]:
            eager(model, value, num)
        weights.append([w - LR * p.grad for w, p in zip(weights[-1], model.parameters(), strict=True)])
    return weights[-1]
