"""Autograd functions that take a module and differentiate its parameters in their backward, as adjoint solvers do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe


class Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.module, ctx.parameters = module, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.module(x)
            gradients = torch.autograd.grad(y, (x, *ctx.parameters), gradient, allow_unused=True)
        return None, *gradients


class Solver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Adjoint.apply(self.field, x, *self.field.parameters())


class Wrapped(nn.Module):
    """Around another module, as solvers make one for each call."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class InRoot(nn.Module):
    def __init__(self, wraps: bool) -> None:
        super().__init__()
        self.first, self.solver, self.last, self.wraps = nn.Linear(3, 8), Solver(), nn.Linear(8, 2), wraps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        field: nn.Module = Wrapped(self.solver.field) if self.wraps else self.solver.field
        return self.last(Adjoint.apply(field, self.first(x), *field.parameters()))


def nested() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), Solver(), nn.Linear(8, 8), Solver(), nn.Linear(8, 2))


@pytest.mark.filterwarnings("ignore:.*runs module by module", "ignore:.*runs the model microbatch by microbatch")
@pytest.mark.parametrize(
    "make", [nested, lambda: InRoot(wraps=False), lambda: InRoot(wraps=True)], ids=["layers", "root", "wrapped"]
)
def test_their_parameters_get_gradients(make: Any) -> None:
    torch.manual_seed(0)
    net = make()
    reference = copy.deepcopy(net)
    x, label = torch.randn(6, 3), torch.randint(2, (6,))
    expected = F.cross_entropy(reference(x), label)
    expected.backward()
    with roundpipe.compile(net, devices=["cpu", "cpu"]) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.5)
        loss = piped.forward_backward((x,), label=label, loss_fn=F.cross_entropy, loss_reduction="mean")
        piped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    torch.optim.SGD(reference.parameters(), lr=0.5).step()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(dict(net.named_parameters()), dict(reference.named_parameters()))
