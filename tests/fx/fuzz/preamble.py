"""What every random model's source begins with: imports, globals, and classes and functions that its code uses."""

PREAMBLE = """
import collections
import contextlib
import copy
import dataclasses
import functools
import math
import types
import typing

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

OFFSET = torch.linspace(-1.0, 1.0, 8, dtype=torch.float64)
CALLS = [0]
TABLE = {"gain": 1.5, "calls": 0}
CACHE = {}
GAIN = 1.0


@dataclasses.dataclass
class Pair:
    first: torch.Tensor
    second: typing.Any = None


class Both(typing.NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def make_closure():
    scale = torch.tensor(0.75, dtype=torch.float64)
    calls = 0

    def shifted(x):
        return x * scale + OFFSET

    def counted(x):
        nonlocal calls
        calls += 1
        return x * (1.0 + 0.25 * calls)

    return shifted, counted


SHIFTED, COUNTED = make_closure()


@functools.lru_cache(maxsize=8)
def positions(length):
    return torch.arange(length, dtype=torch.float64)[None, :, None] / 10


def average(values):
    total = 0
    for value in values:
        total = total + value
    return total / len(values)


def scale_gradient(module, inputs, output):
    return output * 1.25


def shift_input(module, inputs):
    return (inputs[0] + 0.125, *inputs[1:])


def shift_by_keywords(module, args, kwargs):
    return tuple(value + 0.125 for value in args), {name: value + 0.125 for name, value in kwargs.items()}


def double_gradient(module, gradients, gradients_of_outputs):
    return tuple(None if one is None else one * 2 for one in gradients)


def scaled(module, x):
    return x * module.gain * module.options.gain


def pieces(x):
    for one in x.chunk(2, dim=-1):
        yield one * 2


@contextlib.contextmanager
def switched(module, gain):
    before, module.gain = module.gain, gain
    try:
        yield
    finally:
        module.gain = before


class Store:
    def __init__(self):
        self.items = []

    def add(self, x):
        self.items.append(x)
        return sum(self.items)


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, h):
        return h if h.shape[0] > 2 else self.linear(h)


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, h):
        h.add_(self.linear(h.detach()))
        return h


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.aux = None

    def forward(self, h):
        h = self.linear(h)
        self.aux = h.pow(2).mean()
        return h


class Twice(nn.Linear):
    def __call__(self, x):
        return super().__call__(x) * 2


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs) * self.inner.in_features / 8


class Decays(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("average", torch.ones(8))

    def forward(self, h):
        self.average.data.mul_(0.9)
        return self.linear(h) * self.average


class Shrinks(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, h):
        self.linear.weight.data.mul_(0.9)
        return self.linear(h)
"""
