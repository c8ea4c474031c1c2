"""What a loss_fn trains beside the model, such as a learned bias or a critic, while updates run beside the loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe

DTYPE = torch.float64
DEVICES = ["cpu", "cpu"]


def network(inputs: int, outputs: int, width: int = 16) -> nn.Sequential:
    torch.manual_seed(inputs)
    layers = (nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3))
    return nn.Sequential(nn.Linear(inputs, width), *layers, nn.Linear(width, outputs)).to(DTYPE)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_learned_bias_of_the_loss_is_updated_once_in_each_step(is_async: bool) -> None:
    """Its gradient is 1 in every step, whichever weights the model has."""
    model, bias = network(8, 5, width=256), nn.Parameter(torch.zeros((), dtype=DTYPE))
    with roundpipe.compile(model, devices=DEVICES) as piped:
        optimizer = torch.optim.SGD([*piped.optim_parameters(), bias], 0.1)
        for _ in range(20):
            x, label = torch.randn(7, 8, dtype=DTYPE), torch.randint(5, (7,))
            piped.forward_backward(
                (x,), label=label, loss_fn=lambda y, t: F.cross_entropy(y, t) + bias, loss_reduction="mean"
            )
            piped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
        piped.synchronize()
    torch.testing.assert_close(bias.detach(), torch.tensor(-2.0, dtype=DTYPE))


def play(generator: Any, critic: Any, compiled: tuple[bool, bool], clear: str, is_async: tuple[bool, bool]) -> None:
    """Trains a generator that does not change, and a critic, whose gradients in the generator's loss nobody wants."""
    first, second = (
        roundpipe.compile(model, devices=DEVICES) if is_compiled else model
        for model, is_compiled in zip((generator, critic), compiled, strict=True)
    )
    of_first = torch.optim.SGD(first.optim_parameters() if compiled[0] else first.parameters(), 0.0)
    of_second = torch.optim.SGD(second.optim_parameters() if compiled[1] else second.parameters(), 0.1)
    draws = torch.Generator().manual_seed(1)

    def train(model: Any, optimizer: Any, x: torch.Tensor, loss_fn: Any, number: int) -> None:
        if compiled[number]:
            model.forward_backward((x,), loss_fn=loss_fn, loss_reduction="mean")
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async[number])
        else:
            loss_fn(model(x), None).backward()
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(12):
        z, real = (torch.randn(7, size, generator=draws, dtype=DTYPE) for size in (4, 8))
        train(first, of_first, z, lambda fake, _: F.softplus(-critic(fake)).mean(), 0)
        {"net": critic, "wrapper": second, "optimizer": of_second}[clear].zero_grad()
        with torch.no_grad():
            both = torch.cat([real, first(z)])
        train(second, of_second, both, lambda scores, _: scores.square().mean(), 1)
    for model in (first, second):
        if isinstance(model, roundpipe.RoundPipe):
            model.close()


@pytest.mark.parametrize("is_async", [(False, False), (True, True), (False, True)])
@pytest.mark.parametrize("clear", ["net", "wrapper", "optimizer"])
@pytest.mark.parametrize("is_critic_compiled", [False, True])
def test_a_critic_is_trained_by_its_own_loss_only(
    is_critic_compiled: bool, clear: str, is_async: tuple[bool, bool]
) -> None:
    models = network(4, 8), network(8, 1, width=64)
    references = copy.deepcopy(models)
    play(*models, (True, is_critic_compiled), clear, is_async)
    play(*references, (False, False), "net", is_async)
    for one, other in zip(models[1].parameters(), references[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2 if is_async[1] and is_critic_compiled else 1e-9, atol=1e-9)
