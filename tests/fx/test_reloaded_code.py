"""Code that is replaced between two calls, as tools do that reload a file in a notebook."""

import types

import pytest
import torch
from torch import nn

import roundpipe


def helper(x):
    return x.tanh()


def other_helper(x):
    return x.sigmoid() - 1.0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def act(self, x):
        return helper(x)

    def forward(self, x):
        return self.act(self.linear(x))


class OtherBlock(Block):
    def act(self, x):
        return x.sin() * 2

    def forward(self, x):
        return self.act(self.linear(x)) + x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class OtherNet(Net):
    def forward(self, x):
        return self.blocks[0](x) - self.blocks[1](x)


def code_like(function):
    return types.FunctionType(function.__code__, globals()).__code__


def change_root(net, monkeypatch):
    net.__class__ = OtherNet


def change_blocks(net, monkeypatch):
    for block in net.blocks:
        block.__class__ = OtherBlock


def change_code(function, by):
    return lambda net, monkeypatch: monkeypatch.setattr(function, "__code__", code_like(by))


def subtract(self, x):
    for block in self.blocks:
        x = x - block(x)
    return x


def cube(self, x):
    return x**3


CHANGES = {
    "class of the root": change_root,
    "class of blocks": change_blocks,
    "code of forward": change_code(Net.forward, subtract),
    "code of a method": change_code(Block.act, cube),
    "code of a function": change_code(helper, other_helper),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_new_code_is_traced(change, monkeypatch):
    net, x = Net(), torch.randn(5, 6)
    with roundpipe.compile(net, devices=["cpu", "cpu"]) as piped:
        before = net(x).detach()
        for _ in range(2):
            torch.testing.assert_close(piped(x), before)
        change(net, monkeypatch)
        after = net(x).detach()
        assert not torch.allclose(before, after)
        for _ in range(2):
            torch.testing.assert_close(piped(x), after)
        assert piped.trace_count == 2
