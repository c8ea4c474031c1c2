"""Which hooks of parameters make of parts of a gradient what adds up to what they make of the whole."""

import numpy
import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.fx.passes.gradient_hooks import adds_up
from tests.runtime.models import batch, config, mlp, square_loss

MASK, INDEX, SEEN = torch.tensor([[1.0], [0.0], [1.0], [1.0]]), torch.tensor([0, 2]), []
AVERAGE, NUMBERS = torch.ones(4, 3), numpy.ones((4, 3))


def clamps_in_place(gradient):
    gradient.clamp_(-0.1, 0.1)


def clears_rows(gradient):
    gradient = gradient.clone()
    gradient[1:] = 0
    return gradient


def clears_in_place(gradient):
    gradient[0] = 0


def scales(gradient):
    return helper(gradient) / 2


def helper(gradient):
    return gradient * MASK


def decides(gradient):
    return gradient / 2 if gradient.norm() > 1 else gradient


def average(gradient):
    AVERAGE.mul_(0.9).add_(gradient)
    return gradient


def writes_there(gradient):
    return torch.mul(gradient, 2, out=AVERAGE)


def names_later():
    def hook(gradient):
        return gradient * later

    made = [hook]
    if not made:
        later = 1
    return hook


class Strange:
    __hash__ = None

    def __eq__(self, other):
        raise RuntimeError("asked")


STRANGE = Strange()


class Object:
    def hook(self, gradient):
        return gradient.clamp(-1, 1)


HOOKS = {
    "clamp": (lambda g: g.clamp(-0.1, 0.1), False),
    "torch.clamp": (lambda g: torch.clamp(g, -0.1, 0.1), False),
    "in place": (clamps_in_place, False),
    "norm": (lambda g: g / g.norm(), False),
    "sign": (lambda g: g.sign(), False),
    "square": (lambda g: g * g, False),
    "noise": (lambda g: g + torch.randn_like(g), False),
    "constant": (lambda g: g + 1, False),
    "overwritten": (lambda g: g.copy_(torch.ones(4, 3)), False),
    "ones": (lambda g: g.masked_fill(MASK > 0, 1.0), False),
    "nan_to_num": (lambda g: torch.nan_to_num(g), False),
    "mask": (lambda g: g * MASK, True),
    "scale": (scales, True),
    "mul_": (lambda g: g.mul_(2), True),
    "zeros": (lambda g: g.masked_fill(MASK > 0, 0.0), True),
    "index_fill": (lambda g: g.index_fill(0, INDEX, 0.0), True),
    "where": (lambda g: torch.where(MASK > 0, g, torch.zeros_like(g)), True),
    "rows": (clears_rows, True),
    "rows in place": (clears_in_place, True),
    "projection": (lambda g: g - g.mean(0, keepdim=True), True),
    "product": (lambda g: torch.eye(4) @ g, True),
    "dtype": (lambda g: g.half().float(), True),
    "nothing": (lambda g: None, True),
    "keeps": (lambda g: SEEN.append(g), None),
    "prints": (lambda g: print(g), None),
    "decides": (decides, None),
    "of an object": (Object().hook, None),
    "averages": (average, None),
    "writes into another": (writes_there, None),
    "of numpy": (lambda g: g * torch.from_numpy(NUMBERS), None),
    "of what can't be compared": (lambda g: g * STRANGE, None),
    "of what has no value": (names_later(), None),
    "writes numbers": (lambda g: g.index_put((INDEX,), torch.zeros(())), None),
}


@pytest.mark.parametrize(("hook", "expected"), HOOKS.values(), ids=HOOKS)
def test_hooks(hook, expected):
    assert adds_up(hook, nn.Parameter(torch.randn(4, 3))) is expected
    assert not SEEN and torch.equal(AVERAGE, torch.ones(4, 3))


@pytest.mark.parametrize("way", ["forward_backward", "plain", "auto"])
@pytest.mark.parametrize(("hook", "number", "count"), [("clamp", 2, 1), ("clamp", 1, 0), ("mask", 2, 0)])
def test_one_warning_tells_of_them(way, hook, number, count, recwarn):
    model, rounds = mlp(width=4), 2
    for parameter in (model[0][0].weight, model[1][0].weight):
        parameter.register_hook(HOOKS[hook][0])
    kind = roundpipe.AutoRoundPipe if way == "auto" else roundpipe.RoundPipe
    with kind(model, devices=["cpu"] * 2, model_run_config=config(number)) as piped:
        for _ in range(rounds):
            if way == "plain":
                square_loss(piped(batch(4, width=4)), None).backward()
            else:
                piped.forward_backward((batch(4, width=4),), loss_fn=square_loss)
        piped.synchronize()
    told = [str(each.message) for each in recwarn if "runs on the gradient of each" in str(each.message)]
    assert len(told) == count and all(each.startswith("a hook of 0.0.weight") for each in told)
