"""Random modules, trained by `roundpipe.compile` and by eager PyTorch, and compared in everything.

A case is the source of a few `nn.Module` classes, written statement by statement from the templates below,
and a scenario: several calls at several sizes, in train and eval mode, over microbatches and workers. The
templates are what real models do and what is hard to trace: views written through their base, data read by
Python, state kept in attributes, dicts and closures, hooks, regions, containers.

    python -m tests.fx.fuzz --cases 2000 --seed 1      prints how many cases were traced, retraced, ... different
    python -m tests.fx.fuzz --show 17 --seed 1         prints the source of one case and runs it
    python -m tests.fx.fuzz --untraced                 runs all of them module by module

The invariant: a case may be refused loudly, kept whole or traced again, but never gives another number.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import linecache
import logging
import random
import re
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.fx import Node

import roundpipe
from roundpipe import ExecutePlan, RoundPipeError, RoundPipeRunConfig, TraceError
from roundpipe.core import trees
from roundpipe.fx.graph.nodes import is_accessor, value_bytes
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.passes.cost import NodeCost
from roundpipe.wrappers.auto import AutoRoundPipe

WIDTH = 8

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

# Kinds of values: float BLD [B, L, 8], BD [B, 8], BL [B, L], LD [1, L, 8], S []; int IBL [B, L], IB [B];
# bool MBL [B, L]; P = a Python number.
EXPRESSIONS: list[tuple[str, str]] = [
    ("BLD", "torch.tanh({BLD})"),
    ("BLD", "{BLD} + {BLD}"),
    ("BLD", "{BLD} * torch.sigmoid({BLD})"),
    ("BLD", "{BLD} - 0.5 * {BD}[:, None]"),
    ("BLD", "{BLD} * {S}"),
    ("BLD", "{BLD} * {P}"),
    ("BLD", "{BLD} + {BL}.unsqueeze(-1)"),
    ("BLD", "{BLD} + {LD}"),
    ("BLD", "torch.where({MBL}[..., None], {BLD}, {BLD})"),
    ("BLD", "torch.where({MBL}[..., None], {BLD}, 0.0)"),
    ("BLD", "{BLD}.masked_fill(~{MBL}[..., None], 0.5)"),
    ("BLD", "F.one_hot({IBL} % 8, 8).to({BLD}.dtype)"),
    ("BLD", "{BLD}.reshape({BLD}.shape[0], -1, 4, 2).flatten(2)"),
    ("BLD", "{BLD}.reshape(-1, 8).reshape({BLD}.shape) * 1.5"),
    ("BLD", "{BLD}.view({BLD}.size(0), {BLD}.size(1), 2, -1).transpose(2, 3).reshape({BLD}.shape)"),
    ("BLD", "torch.cat({BLD}.chunk(2, dim=-1)[::-1], -1)"),
    ("BLD", "torch.cat([{BLD}[:, {BLD}.shape[1] // 2 :], {BLD}[:, : {BLD}.shape[1] // 2]], 1)"),
    ("BLD", "torch.cat({BLD}.split({BLD}.size(1) // 2 + 1, dim=1)[::-1], dim=1)"),
    ("BLD", "torch.cat({BLD}.split([1, {BLD}.size(1) - 1], dim=1)[::-1], dim=1)"),
    ("BLD", "torch.stack({BLD}.unbind(1)[::-1], 1)"),
    ("BLD", "torch.cat([{BLD}[: {BLD}.shape[0] // 2] * 2, {BLD}[{BLD}.shape[0] // 2 :]])"),
    ("BLD", "{BD}[:, None].expand(-1, {BLD}.size(1), -1)"),
    ("BLD", "{BD}.unsqueeze(1).expand_as({BLD})"),
    ("BLD", "{BD}.unsqueeze(1).repeat(1, {BLD}.shape[1], 1)"),
    ("BLD", "F.scaled_dot_product_attention({BLD}, {BLD}, {BLD})"),
    ("BLD", "F.scaled_dot_product_attention({BLD}, {BLD}, {BLD}, is_causal=True)"),
    ("BLD", "F.scaled_dot_product_attention({BLD}, {BLD}, {BLD}, attn_mask=torch.ones({BLD}.size(1), "
            "{BLD}.size(1), dtype=torch.bool).tril())"),
    ("BLD", "{BLD}.softmax(-1)"),
    ("BLD", "F.layer_norm({BLD}, (8,))"),
    ("BLD", "F.pad({BLD}, (0, 0, 1, 0))[:, :-1]"),
    ("BLD", "{BLD}.flip(1)"),
    ("BLD", "{BLD}.roll(1, dims=1)"),
    ("BLD", "{BLD}.cumsum(1) / 4"),
    ("BLD", "{BLD}.transpose(1, 2).contiguous().transpose(1, 2)"),
    ("BLD", "{BLD}.permute(1, 0, 2).permute(1, 0, 2)"),
    ("BLD", "{BLD}.detach()"),
    ("BLD", "{BLD}.float().to({BLD}.dtype)"),
    ("BLD", "{BLD}.type_as({BLD})"),
    ("BLD", "{BLD}[:, torch.arange({BLD}.size(1) - 1, -1, -1)]"),
    ("BLD", "{BLD}[:, ::2].repeat_interleave(2, 1)[:, : {BLD}.size(1)]"),
    ("BLD", "{BLD} + {BLD}[:, :0].sum(1, keepdim=True)"),
    ("BLD", "torch.cat([{BLD}, {BLD}[:, :0]], 1)"),
    ("BLD", "{BLD} * ({BLD}.shape[1] / 4)"),
    ("BLD", "{BLD} / math.sqrt({BLD}.size(-1))"),
    ("BLD", "{BLD} * ({BLD}.numel() / {BLD}.size(0) / 16)"),
    ("BLD", "{BLD} * len({BLD})"),
    ("BLD", "{BLD} * min({BLD}.shape[1], 5)"),
    ("BLD", "{BLD} + OFFSET"),
    ("BLD", "SHIFTED({BLD})"),
    ("BLD", "Doubled.apply({BLD})"),
    ("BLD", "{BLD} + positions({BLD}.shape[1])"),
    ("BLD", "average([{BLD}, {BLD}])"),
    ("BLD", "torch.vmap(lambda row: row * 2 - row.mean())({BLD})"),
    ("BLD", "torch.einsum('bld,bmd->blm', {BLD}, {BLD}).softmax(-1) @ {BLD}"),
    ("BLD", "torch.lerp({BLD}, {BLD}, 0.25)"),
    ("BLD", "torch.addcmul({BLD}, {BLD}, {BLD}, value=0.1)"),
    ("BLD", "{BLD}.gather(1, ({IBL} % {BLD}.size(1))[..., None].expand(-1, -1, 8))"),
    ("BLD", "{BLD}.index_select(1, torch.arange({BLD}.size(1)).flip(0))"),
    ("BLD", "{BLD}.sort(dim=1).values"),
    ("BLD", "torch.topk({BLD}, 8, dim=-1)[0]"),
    ("BLD", "{BLD}.as_strided({BLD}.size(), {BLD}.stride()) if {BLD}.is_contiguous() else {BLD} * 3"),
    ("BLD", "{BLD}.clamp(-{BLD}.shape[1] / 2, 2)"),
    ("BLD", "{BLD}.masked_scatter(~{MBL}[..., None], {BLD})"),
    ("BLD", "torch.rand({BLD}.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + {BLD}"),
    ("BD", "{BLD}.mean(1)"),
    ("BD", "{BLD}[:, 0]"),
    ("BD", "{BLD}[:, -1]"),
    ("BD", "{BLD}.amax(1)"),
    ("BD", "{BLD}[torch.arange({BLD}.shape[0]), {IBL}[:, 0] % {BLD}.shape[1]]"),
    ("BD", "({BLD} * {MBL}[..., None]).sum(1) / ({MBL}.sum(1, keepdim=True) + 1)"),
    ("BD", "torch.stack([{BD}, {BD}]).sum(0)"),
    ("BD", "sum([{BD}, {BD}, {BD}])"),
    ("BD", "{BLD}.new_zeros({BLD}.shape[0], 8)"),
    ("BD", "torch.zeros_like({BD}) + {BD}"),
    ("BD", "{BLD}.index_select(1, {IBL}[0] % {BLD}.size(1)).sum(1)"),
    ("BD", "{BLD}[{MBL}].sum(0) + {BD}"),
    ("BD", "{BD} * 0.5 + {BLD}.std(1, unbiased=False)"),
    ("BL", "{BLD}.sum(-1)"),
    ("BL", "{BLD}[..., 3]"),
    ("BL", "{MBL}.to({BLD}.dtype)"),
    ("BL", "{IBL}.double() / 7"),
    ("BL", "{BL}.softmax(1)"),
    ("LD", "{BLD}.mean(0, keepdim=True)"),
    ("LD", "torch.arange({BLD}.size(1), dtype={BLD}.dtype)[None, :, None].expand(1, -1, 8) / 5"),
    ("LD", "torch.outer(torch.arange({BLD}.size(1)).double(), OFFSET)[None]"),
    ("S", "{BLD}.pow(2).mean()"),
    ("S", "{BD}.sum() / 10"),
    ("S", "{BLD}.new_tensor(1.25)"),
    ("S", "torch.tensor({BLD}.shape[1] / 3, dtype=torch.float64)"),
    ("S", "{BL}[0, 0]"),
    ("S", "{MBL}.double().mean()"),
    ("S", "torch.stack([{S}, {S}]).amax()"),
    ("IBL", "({IBL} * 3 + 1) % 11"),
    ("IBL", "{BLD}.argmax(-1)"),
    ("IBL", "{MBL}.long().cumsum(1) % 11"),
    ("IBL", "torch.arange({BLD}.shape[1]).expand({BLD}.shape[0], -1) % 11"),
    ("IBL", "torch.where({MBL}, {IBL}, 0)"),
    ("IBL", "{IBL}.sort(1)[1]"),
    ("IB", "{IBL}.amax(1)"),
    ("IB", "{MBL}.sum(1)"),
    ("MBL", "{BL} > 0.1"),
    ("MBL", "{IBL} > 5"),
    ("MBL", "{MBL} & {MBL}"),
    ("MBL", "~{MBL}"),
    ("MBL", "torch.arange({BLD}.size(1)) < {IB}[:, None]"),
    ("P", "{BLD}.shape[0] * 0.25"),
    ("P", "{BLD}.size(1) % 3 + 1"),
    ("P", "0.5 if {BLD}.requires_grad else 0.25"),
    ("P", "float({BLD}.dim())"),
    ("P", "TABLE['gain']"),
    ("BLD", "{BLD} * self.options.gain"),
    ("BLD", "{BLD} if self.options.skip else {BLD} * 0.5"),
    ("BLD", "{BLD} * self.scales[-1]"),
    ("BLD", "{BLD} + self.offset"),
    ("BLD", "{BLD} + self.tables['a']"),
    ("BLD", "{BLD} * GAIN"),
    ("BLD", "{BLD} * self.factor"),
    ("BLD", "{BLD} * getattr(self, 'ga' + 'in')"),
    ("BLD", "{BLD} * getattr(self, 'extra_gain', 1.0)"),
    ("BLD", "scaled(self, {BLD})"),
    ("BLD", "self.act({BLD})"),
    ("BLD", "{BLD} * self.settings.gain"),
    ("BLD", "{BLD} * self.scalars[0] + self.scalars[1]"),
    ("BLD", "torch.cat(list(pieces({BLD})), -1)"),
    ("BLD", "{BLD} * 2 if isinstance(self.second, nn.Linear) else {BLD}"),
    ("BLD", "{BLD} * (2 if torch.is_tensor({BLD}) and not isinstance({BLD}, nn.Parameter) else 3)"),
    ("BLD", "F.relu_({BLD} * 1.0)"),
    ("BLD", "{BLD}.masked_fill(~{MBL}[..., None], torch.finfo({BLD}.dtype).min).softmax(1)"),
    ("BLD", "torch.full_like({BLD}, 0.5) * {BLD}"),
    ("BLD", "{BLD}[{MBL}].mean(0, keepdim=True).nan_to_num() + {BLD}"),
    ("BLD", "{BLD}.index_put((torch.where({MBL})), {BLD}[{MBL}] * 2)"),
    ("BLD", "{BLD} * self.first.in_features / 8 + self.norm.eps"),
]  # fmt: skip

READS: list[tuple[str, str]] = [
    ("P", "ids[0, 0].item() / 7"),
    ("P", "float(mask.double().mean())"),
    ("P", "int(ids.max()) % 3"),
    ("P", "len(ids.unique()) / 5"),
    ("P", "ids.tolist()[0][0] * 0.1"),
    ("P", "mask.sum().item() / 9"),
    ("P", "int((ids > 6).sum()) * 0.1"),
]
"""Reads of an input's data: root only."""

ACTIVATION_READS: list[tuple[str, str]] = [
    ("P", "{BLD}.mean().item()"),
    ("P", "float({S})"),
    ("P", "round({BD}.sum().tolist(), 3)"),
]

ACTIONS: list[str] = [
    # views, then writes through the base or the view
    "{new} = {BLD}.clone(); {new}[:, ::2].mul_(2.0); {BLD=new}",
    "{new} = {BLD} * 1.0; {tmp} = {new}[:, 1:]; {new}.add_(1.0); {new} = {new} + F.pad({tmp}, (0, 0, 1, 0)); {BLD=new}",
    "{new} = {BLD}.clone(); {tmp} = {new}.view({new}.shape[0], -1); {tmp} += 0.5; {BLD=new}",
    "{new} = {BLD}.clone(); {tmp} = {new}.transpose(1, 2); {tmp}[:, 0].zero_(); {new} = {tmp}.transpose(1, 2); "
    "{BLD=new}",
    "{new} = {BLD} + 0.0; {tmp} = {new}.reshape(-1, 8); {tmp}.sub_(0.25); {BLD=new}",
    "{new} = {BLD}.clone(); {tmp} = {new}.flatten(); {tmp}[:3] = 0.75; {BLD=new}",
    "{new} = {BLD}.clone(); {tmp}, {tmp}b = {new}.chunk(2, -1); {tmp}.data.mul_(1.5); {BLD=new}",
    "{new} = {BLD} * 1.0; {tmp} = {new}.detach(); {tmp}.add_(0.125); {BLD=new}",
    "{new} = {BLD}.clone(); {tmp} = {new}; {tmp} += 1; {BLD=new}",
    "{new} = {BLD}.clone(); {tmp} = {'a': {new}}; {tmp}['a'].mul_(0.5); {BLD=new}",
    "{new} = {BLD}.clone(); {tmp} = [{new}, {new}[:, 0]]; {tmp}[0].add_(1); {BD=tmp}[1] * 1.0; {BLD=new}",
    # masked and indexed assignment
    "{new} = {BLD}.clone(); {new}[{MBL}] = 0.0; {BLD=new}",
    "{new} = {BLD}.clone(); {new}[{MBL}] = {new}[{MBL}] * 2; {BLD=new}",
    "{new} = {BLD}.clone(); {new}[:, 0] = {BD}; {BLD=new}",
    "{new} = {BLD}.clone(); {new}[..., :4] = {BLD}[..., 4:]; {BLD=new}",
    "{new} = torch.zeros_like({BLD}); {new}[:, -1] = {BD}; {new}[0] += 0.5; {BLD=new}",
    "{new} = {BLD}.new_zeros({BLD}.size(0), {BLD}.size(1), 8); {new} += {BLD}; {BLD=new}",
    "{new} = {BLD}.clone(); {new}.masked_fill_({MBL}[..., None], 0.25); {BLD=new}",
    "{new} = {BLD}.clone(); {new}.index_add_(1, torch.arange({new}.size(1)), {BLD}); {BLD=new}",
    "{new} = torch.empty_like({BLD}); {new}.copy_({BLD}); {BLD=new}",
    "{new} = {IBL}.clone(); {new}[{new} > 7] = 2; {IBL=new}",
    "{new} = {IBL}.clone(); {new} -= 1; {new}.clamp_(min=0); {IBL=new}",
    "{new} = {BLD} * 1.0; torch.add({BLD}, 1.0, out={tmp}) if False else {new}.add_(0.5); {BLD=new}",
    "{BLD!} += 1.0",
    "{BLD!}.add_({BD}[:, None])",
    "{BLD!}.mul_(0.5)",
    "{BLD!}[:, 0] += 0.5",
    "{BD!} += 0.25",
    "{MBL!}[:, 0] = True",
    "{IBL!}.remainder_(9)",
    # containers
    "{tmp} = Pair({BLD}, {BD}); {tmp}.second = {tmp}.second + 1; {BD=tmp}.second; {BLD=tmp}.first",
    "{tmp} = Both({BLD}, {BLD})._replace(left={BLD} * 0.5); {BLD=tmp}.left",
    "{tmp} = collections.OrderedDict(a={BLD}, b={BD}); {tmp}.update(a={tmp}.pop('a') * 2); {BLD=tmp}['a']",
    "{tmp} = []; {tmp}.append({BLD}); {tmp}.extend([{BLD}, {BLD}]); {BLD=tmp}.pop() + {tmp}[0]",
    "{tmp} = dict(zip('ab', {BLD}.chunk(2, -1))); {BLD}; {new} = torch.cat([{tmp}['b'], {tmp}['a']], -1); {BLD=new}",
    # regions
    "with torch.no_grad():\n    {new} = {BLD} * 2\n{BLD=new}",
    "with torch.no_grad():\n    with torch.enable_grad():\n        {new} = {BLD} * 2\n{BLD=new}",
    "with torch.set_grad_enabled(False):\n    {new} = {BLD}.softmax(-1)\n{BLD=new}",
    "{new} = {BLD} * 1.0\nwith torch.no_grad():\n    {new}.mul_(0.5)\n{BLD=new}",
    "with torch.autocast('cpu', dtype=torch.bfloat16):\n    {new} = ({BLD}.float() @ self.weight.float()).double()\n"
    "{BLD=new}",
    "with torch.autocast('cpu', dtype=torch.bfloat16, enabled=False):\n    {new} = {BLD} @ self.weight\n{BLD=new}",
    "with contextlib.suppress(KeyError):\n    {new} = {BLD} * 2\n    {new} = {'a': {BLD}}['b']\n{BLD=new}",
    "with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):\n"
    "    {new} = F.scaled_dot_product_attention({BLD}, {BLD}, {BLD})\n{BLD=new}",
    # python over sizes
    "{tmp} = {BD}\nfor {tmp}i in range({BLD}.size(1)):\n    {tmp} = torch.tanh({tmp} + {tmp}i * 0.1)\n{BD=tmp}",
    "{tmp} = [{BLD}[:, {tmp}i] * ({tmp}i + 1) for {tmp}i in range({BLD}.shape[1])]\n{new} = torch.stack({tmp}, 1)\n"
    "{BLD=new}",
    "{tmp} = {BD}\nfor {tmp}r in {BLD}.unbind(1):\n    {tmp} = {tmp} * 0.5 + {tmp}r\n{BD=tmp}",
    "{tmp} = {BD}\nfor {tmp}r in {BLD}.transpose(0, 1):\n    {tmp} = {tmp} * 0.5 + {tmp}r\n{BD=tmp}",
    "for {tmp}l in (self.first, self.second):\n    {BLD!!} = {tmp}l({BLD})",
    "{tmp}n, {tmp}l, {tmp}d = {BLD}.shape; {new} = {BLD}.reshape({tmp}n * {tmp}l, {tmp}d).view({tmp}n, {tmp}l, -1); "
    "{BLD=new}",
    # detach, hooks, autograd
    "{new} = {BLD} * 1.0; {new}.register_hook(lambda g: g * 2) if {new}.requires_grad else None; {BLD=new}",
    "{new} = {BLD}.clone(); {new}.detach_(); {BLD=new}",
    "{new} = {BLD} * 1.0; {new}.retain_grad() if {new}.requires_grad else None; {BLD=new}",
    "{new} = {BLD}.detach().requires_grad_(); {BLD=new}",
    # checkpoint
    "{new} = checkpoint(self.first, {BLD}, use_reentrant=False); {BLD=new}",
    "{new} = checkpoint(self.second, {BLD}, use_reentrant=True); {BLD=new}",
    "{new} = checkpoint(lambda a, b: self.first(a) * b.sigmoid(), {BLD}, {BLD}, use_reentrant=False); {BLD=new}",
    # buffers
    "self.steps += 1",
    "self.mean.mul_(0.5).add_({BD}.detach().mean(0))",
    "self.mean = self.mean * 0.9 + {BD}.detach().mean(0) * 0.1",
    "self.mean.copy_({BD}[0].detach())",
    "with torch.no_grad():\n    self.mean[:4] += 0.25",
    "{new} = {BLD} + self.mean; {BLD=new}",
    "{new} = {BLD} * self.steps; {BLD=new}",
    "self._buffers['mean'] = {BD}.detach().mean(0)",
    "{new} = {BLD} + self.memory.sum(0); {BLD=new}",
    # norms by hand, modes set around a call, weights put in for a call
    "{new} = F.batch_norm({BLD}.transpose(1, 2), self.mean, self.var, training=self.training)"
    ".transpose(1, 2); {BLD=new}",
    "self.norm.eval(); {new} = self.norm({BLD}.transpose(1, 2)).transpose(1, 2); "
    "self.norm.train(self.training); {BLD=new}",
    "{new} = torch.func.functional_call(self.first, {'weight': self.weight, 'bias': {BD}[0]}, ({BLD},)); {BLD=new}",
    "{new} = torch.func.functional_call(self.norm, {'weight': {BD}[0], 'bias': {BD}[-1]}, ({BLD}.transpose(1, 2),)); "
    "{BLD=new}.transpose(1, 2)",
    # caches, objects, closures, generators of Python
    "if {BLD}.shape[1] not in CACHE:\n    CACHE[{BLD}.shape[1]] = torch.arange({BLD}.shape[1]).double()\n"
    "{new} = {BLD} + CACHE[{BLD}.shape[1]][None, :, None]; {BLD=new}",
    "{tmp} = Store(); {new} = {tmp}.add({BLD}) + {tmp}.add({BLD} * 0.5); {BLD=new}",
    "{tmp} = []\ndef {tmp}f(value):\n    {tmp}.append(value)\n    return value * 0.5\n"
    "{new} = {tmp}f({tmp}f({BLD})) + {tmp}[0]\n{BLD=new}",
    "with switched(self, 0.5):\n    {new} = {BLD} * self.gain\n{BLD=new}",
    "try:\n    {new} = {BLD} @ {BLD}\nexcept RuntimeError:\n    {new} = {BLD} * 0.5\n{BLD=new}",
    "{new} = torch.view_as_real(torch.view_as_complex({BLD}.reshape(*{BLD}.shape[:-1], 4, 2)) * torch.polar("
    "torch.ones(4).double(), torch.arange(4).double())).flatten(-2); {BLD=new}",
    "for {tmp}k, {tmp}m in self.nest.items():\n    {BLD!!} = ({tmp}m[0] if {tmp}k == 'a' else {tmp}m)({BLD})",
    "{tmp} = {BLD}.reshape(-1, 8); {new} = torch.zeros_like({tmp})\n"
    "for {tmp}e, {tmp}l in enumerate((self.first, self.second)):\n"
    "    {tmp}i, = torch.where({tmp}.argmax(-1) % 2 == {tmp}e)\n"
    "    {new} = {new}.index_add(0, {tmp}i, {tmp}l({tmp}[{tmp}i]))\n"
    "{new} = {new}.view_as({BLD}); {BLD=new}",
    "{new} = self.keeps({BLD}) * self.keeps.aux; {BLD=new}",
    # parameters in glue
    "{new} = {BLD} @ self.weight; {BLD=new}",
    "{new} = F.linear({BLD}, self.weight.t(), self.bias); {BLD=new}",
    "{new} = F.linear({BLD}, self.first.weight); {BLD=new}",
    "{new} = {BLD} * self.bias; {BLD=new}",
    # keyword arguments, None
    "{new} = torch.clamp(input={BLD}, min=-1.0, max=None); {BLD=new}",
    "{tmp} = None if {BLD}.dim() == 2 else {BLD}; {new} = {tmp} if {tmp} is not None else {BLD}; {BLD=new}",
    "{tmp} = (lambda *args, **kwargs: args[0] + sum(kwargs.values()))({BLD}, a={BLD}, b={S}); {BLD=tmp}",
    "try:\n    {new} = {BLD} / 2\nfinally:\n    {tmp} = 1\n{BLD=new}",
    "assert {BLD}.shape[-1] == 8, f'{{BLD}.shape}'",
]

STATE_ACTIONS: list[str] = [
    "self.count += 1",
    "self.count += 1; {new} = {BLD} * (1 + 0.1 * self.count); {BLD=new}",
    "self.state['n'] += 1",
    "self.state['n'] = self.state.get('n', 0) + 1; {new} = {BLD} * self.state['n']; {BLD=new}",
    "self.history.append({BLD}.shape[0])",
    "self.history.append(1); {new} = {BLD} * len(self.history); {BLD=new}",
    "self.last = {BD}.detach()",
    "{new} = {BLD} + (0.0 if self.last is None else self.last.mean()); self.last = {BD}.detach(); {BLD=new}",
    "CALLS[0] += 1",
    "CALLS[0] += 1; {new} = {BLD} * CALLS[0]; {BLD=new}",
    "TABLE['calls'] += 1; {new} = {BLD} * TABLE['calls']; {BLD=new}",
    "{new} = COUNTED({BLD}); {BLD=new}",
    "type(self).total = getattr(type(self), 'total', 0) + 1; {new} = {BLD} * type(self).total; {BLD=new}",
    "if {BLD}.shape[1] not in self.cache:\n    self.cache[{BLD}.shape[1]] = torch.arange({BLD}.shape[1]).double()\n"
    "{new} = {BLD} + self.cache[{BLD}.shape[1]][None, :, None]; {BLD=new}",
    "{new} = {BLD} * self.gain; {BLD=new}",
    "{new} = {BLD} * self.settings.gain; {BLD=new}",
    "self.gain = 1.0 if self.gain == 2.0 else 2.0",
    "self.memory = torch.cat([self.memory, {BD}.detach().mean(0)[None]])",
    "self.memory = {BD}.detach()",
    "{new} = {BLD} + torch.rand({BLD}.shape, generator=self.generator, dtype=torch.float64); {BLD=new}",
    "self.inner_calls.n += 1; {new} = {BLD} * self.inner_calls.n; {BLD=new}",
    "self.weight.data.mul_(0.9)",
    "with torch.no_grad():\n    self.first.weight[0].mul_(0.5)",
    "if {BLD}.shape[1] > self.longest:\n    self.longest = {BLD}.shape[1]\n"
    "    self.offsets = torch.arange(self.longest).double()\n"
    "{new} = {BLD} + self.offsets[: {BLD}.shape[1], None]; {BLD=new}",
    "{new} = self.shrinks({BLD}); {BLD=new}",
    "self.norm.eval(); {new} = self.norm({BLD}.transpose(1, 2)).transpose(1, 2); {BLD=new}",
    "{new} = {BLD} * (1.0 if self.keeps.aux is None else 2.0); {tmp} = self.keeps({BLD}.detach()); {BLD=new}",
]

SIZE_CONDITIONS = [
    "{BLD}.shape[0] > 2",
    "{BLD}.size(1) % 2 == 0",
    "{BLD}.numel() > 120",
    "{BLD}.shape[0] == 1",
    "{BLD}.shape[1] in (4, 6)",
    "{BLD}.size(1) > {BLD}.size(0)",
    "len({BLD}) >= 3",
]
FLAG_CONDITIONS = [
    "self.training",
    "torch.is_grad_enabled()",
    "{BLD}.requires_grad",
    "{BLD}.is_contiguous()",
    "{BLD}.dtype == torch.float64",
    "{BLD}.stride(1) == 8",
    "{P} > 0.7",
    "{BLD}.data_ptr() != 0",
    "self.gain > 1.0",
    "{BLD} is not None",
    "self.options.skip",
    "hasattr(self, 'extra_gain')",
    "isinstance(self.second, nn.Sequential)",
    "self.norm.training",
    "self.first.weight.requires_grad",
]
DATA_CONDITIONS = [
    "mask.all()",
    "bool((ids > 8).any())",
    "ids[0, 0].item() > 5",
    "ids.max() > 9",
    "torch.equal(ids, ids.clamp(max=8))",
    "not mask[:, 0].all()",
    "3 in ids",
    "ids.float().mean() > 5",
    "x.sum() > 0",
    "torch.allclose(x, x.abs())",
]
ACTIVATION_CONDITIONS = ["{BLD}.sum() > 0", "float({S}) > 0.1", "{BD}[0, 0] > {BD}[0, 1]", "bool(({BL} > 0).any())"]
BUFFER_CONDITIONS = ["self.steps > 1", "self.mean.sum() > 0", "self.norm.num_batches_tracked > 1"]

RETURNS = [
    "return {BLD}",
    "return {BLD}, {BD}",
    "return {'h': {BLD}, 'aux': {S}, 'n': {n}, 'none': None}",
    "return Pair({BLD}, {BD})",
    "return Both({BLD}, {BLD})",
    "return [{BLD}, ({BD}, {'s': {S}}), None]",
    "return {BLD}, {P}",
    "return {BLD}, {BLD}.shape[1]",
    "return ({BLD},)",
    "return {BLD}, {BLD}",
]
USES = ["{}", "{}[0]", "{}['h']", "{}.first", "{}.left", "{}[0]", "{}[0]", "{}[0]", "{}[0]", "{}[1]"]

_SLOT = re.compile(r"\{(BLD|BD|BL|LD|S|IBL|IB|MBL|P)(!{0,2})\}")
_RESULT = re.compile(r"\{(BLD|BD|BL|LD|S|IBL|IB|MBL|P)=(new|tmp)\}([^;\n]*)")


class Writer:
    """Writes the forward of one class.

    Args:
        choose: the source of all choices.
        is_root: whether the inputs' data are in scope.
        modules: calls of submodules, as templates of kind BLD.
        nasty: probability of what depends on activations or state.
    """

    def __init__(self, choose: random.Random, is_root: bool, modules: list[str], nasty: float) -> None:
        self.choose = choose
        self.is_root = is_root
        self.modules = modules
        self.nasty = nasty
        self.lines: list[str] = []
        self.scope: dict[str, list[str]] = {}
        self.made = 0
        self.depth = 2

    def emit(self, text: str) -> None:
        for line in text.split("\n"):
            self.lines.append("    " * self.depth + line)

    def define(self, kind: str, name: str) -> None:
        known = self.scope.setdefault(kind, [])
        if name not in known:
            known.append(name)

    def name(self) -> str:
        self.made += 1
        return f"v{self.made}"

    def variable(self, kind: str) -> str:
        known = self.scope[kind]
        if self.choose.random() < 0.55:
            return known[-1]
        return self.choose.choice(known)

    def can_fill(self, template: str) -> bool:
        return all(self.scope.get(match[0]) for match in _SLOT.findall(template))

    def filled(self, template: str) -> str:
        return _SLOT.sub(lambda match: self.variable(match[1]), template)

    def expression(self, pool: list[tuple[str, str]]) -> None:
        kind, template = self.choose.choice([item for item in pool if self.can_fill(item[1])])
        name = self.name()
        self.emit(f"{name} = {self.filled(template)}")
        self.define(kind, name)

    def action(self, pool: list[str]) -> None:
        template = self.choose.choice([item for item in pool if self.can_fill(item)])
        new, tmp = self.name(), self.name()
        results = _RESULT.findall(template)
        body = _RESULT.sub("", template).replace("{new}", new).replace("{tmp}", tmp)
        body = "\n".join(line.rstrip("; ") for line in self.filled(body).split("\n") if line.strip("; "))
        self.emit(body)
        for kind, source, path in results:
            name = new if source == "new" else tmp
            path = path.replace("{tmp}", tmp).replace("{new}", new)
            if path:
                other = self.name()
                self.emit(f"{other} = {name}{path}")
                name = other
            self.define(kind, name)

    def condition(self) -> str:
        pools = [SIZE_CONDITIONS, FLAG_CONDITIONS]
        if self.is_root:
            pools.append(DATA_CONDITIONS)
        if self.choose.random() < self.nasty:
            pools = [ACTIVATION_CONDITIONS, BUFFER_CONDITIONS]
        pool = [item for item in self.choose.choice(pools) if self.can_fill(item)]
        return self.filled(self.choose.choice(pool or SIZE_CONDITIONS))

    def branch(self) -> None:
        name = self.name()
        kind = self.choose.choice(["BLD", "BLD", "BD"])
        before = {key: list(names) for key, names in self.scope.items()}
        self.emit(f"if {self.condition()}:")
        for half in range(2):
            self.scope = {key: list(names) for key, names in before.items()}
            self.depth += 1
            for _ in range(self.choose.randint(0, 2)):
                self.statement()
            self.expression([item for item in EXPRESSIONS if item[0] == kind])
            result = self.scope[kind][-1]
            self.emit(f"{name} = {result}")
            self.depth -= 1
            if not half:
                self.emit("else:")
        self.scope = before
        self.define(kind, name)

    def early_exit(self, returns: str) -> None:
        self.emit(f"if {self.condition()}:")
        self.depth += 1
        self.emit(self.filled(returns))
        self.depth -= 1

    def statement(self) -> None:
        what = self.choose.random()
        if what < 0.22 and self.modules:
            name = self.name()
            self.emit(f"{name} = {self.filled(self.choose.choice(self.modules))}")
            self.define("BLD", name)
        elif what < 0.52:
            self.expression(EXPRESSIONS)
        elif what < 0.78:
            self.action(ACTIONS)
        elif what < 0.78 + 0.12 * self.nasty * 3:
            self.action(STATE_ACTIONS)
        elif what < 0.92 and self.depth < 4:
            self.branch()
        elif self.is_root and what < 0.96:
            self.expression(READS)
        elif self.choose.random() < self.nasty:
            self.expression(ACTIVATION_READS)
        else:
            self.expression(EXPRESSIONS)

    def write(self, num_statements: int, returns: str, early: bool) -> str:
        for index in range(num_statements):
            if early and index == num_statements // 2:
                self.early_exit(returns)
            self.statement()
        self.emit(self.filled(returns))
        return "\n".join(self.lines)


_STATE = """
        self.first = nn.Linear(8, 8)
        self.second = {second}
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)
        self.bias = {bias}
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("memory", torch.zeros(1, 8))
        self.generator = torch.Generator().manual_seed(5)
        self.count = 0
        self.state = {{"n": 0}}
        self.history = []
        self.last = None
        self.cache = {{}}
        self.gain = 1.0
        self.settings = collections.namedtuple("Settings", "gain")(1.25)
        self.inner_calls = type("Calls", (), {{"n": 0}})()
        self.label = "block 0"
        self.act = torch.tanh
        self.register_buffer("var", torch.ones(8))
        self.options = types.SimpleNamespace(gain=1.25, skip=False)
        self.scales = [1.0, 0.75]
        self.offset = torch.linspace(0, 1, 8, dtype=torch.float64)
        self.tables = {{"a": torch.linspace(1, 0, 8, dtype=torch.float64)}}
        self.scalars = nn.ParameterList(nn.Parameter(torch.ones(8)) for _ in range(2))
        self.nest = nn.ModuleDict({{"a": nn.ModuleList([nn.Linear(8, 8)]), "b": nn.Sequential(nn.Tanh(), self.first)}})
        self.longest = 0
        self.zero = nn.Dropout(0.0)
        self.gate = Gate()
        self.writes = Writes()
        self.keeps = Keeps()
        self.decays = Decays()
        self.shrinks = Shrinks()
        self.wrapped = Wrapper(nn.Linear(8, 8))
"""

_SECONDS = [
    "nn.Linear(8, 8)",
    "self.first",
    "nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))",
    "nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True))",
    "nn.LayerNorm(8)",
    "nn.Dropout(0.0)",
    "nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))",
    "nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)",
    "copy.deepcopy(self.first)",
    "Twice(8, 8)",
]
_EXTRAS = [
    "",
    "",
    "self.second.requires_grad_(False)",
    "self.first.register_forward_hook(scale_gradient)",
    "self.first.register_forward_pre_hook(shift_input)",
    "self.weight.requires_grad_(False)",
    "self.weight.register_hook(lambda g: g * 2)",
    "self.first.register_full_backward_hook(lambda m, gi, go: tuple(g * 2 for g in gi))",
    "self.first.weight = self.weight",
    "self.second = nn.Linear(8, 8); self.second.weight = self.first.weight",
    "self.second.register_full_backward_hook(double_gradient)",
    "self.second.register_forward_hook(scale_gradient)",
    "self.first.register_forward_pre_hook(shift_by_keywords, with_kwargs=True)",
    "self.zero.p = 1.0",
]
_TWINS_DIFFER = [
    "pass",
    "twin.gain = 1.0 + index",
    "twin.count = index",
    "twin.settings = twin.settings._replace(gain=1.0 + index)",
    "twin.state['n'] = index",
    "twin.history.extend(range(index))",
    "twin.label = f'block {index}'",
    "twin.act = (torch.tanh, torch.sigmoid, torch.relu)[index]",
    "twin.first.weight.requires_grad_(index > 0)",
    "twin.second = nn.Identity() if index == 1 else twin.second",
    "twin.first.register_forward_hook(scale_gradient) if index == 2 else None",
    "twin.norm.eps = 0.1 * (index + 1)",
    "twin.norm.momentum = 0.2 * (index + 1)",
    "twin.first = self.twins[0].first",
]
"""How the modules of one class differ."""
_READS_ITSELF = [
    "h = h * self.gain",
    "h = h * self.settings.gain",
    "h = h * (1 + self.count)",
    "h = h * (1 + self.state['n'])",
    "h = h * (1 + len(self.history))",
    "h = h * 2 if '1' in self.label else h",
    "h = h * {'block 0': 0.5, 'block 1': 1.5}.get(self.label, 1.0)",
    "h = self.act(h)",
    "h = h if isinstance(self.second, nn.Identity) else h * 0.5",
    "h = h * (1.0 if self.first.weight.requires_grad else 0.5)",
]
_OWN_CALLS = [
    "self.first({BLD})",
    "self.second({BLD})",
    "self.first(input={BLD})",
    "self.norm({BLD}.transpose(1, 2)).transpose(1, 2)",
    "self.norm({BLD}.reshape(-1, 8)).view_as({BLD})",
    "self.zero({BLD})",
    "self.gate({BLD})",
    "self.writes({BLD} * 1.0)",
    "self.decays({BLD})",
    "self.wrapped({BLD})",
    "self.keeps({BLD})",
]


EDITS: list[tuple[str, str]] = [
    ("{h} * self.gain", "m.gain = 0.5"),
    ("{h} * getattr(self, 'ga' + 'in')", "m.gain = 0.5"),
    ("scaled(self, {h})", "m.gain = 0.5"),
    ("{h} * (1.0 if self.gain > 0.7 else 2.0)", "m.gain = 0.5"),
    ("{h} * self.settings.gain", "m.settings = m.settings._replace(gain=0.5)"),
    ("{h} * self.options.gain", "m.options.gain = 0.5"),
    ("scaled(self, {h})", "m.options.gain = 0.5"),
    ("{h} if self.options.skip else {h} * 0.5", "m.options.skip = not m.options.skip"),
    ("{h} * self.options.gain", "m.options = types.SimpleNamespace(gain=0.25, skip=True)"),
    ("{h} * self.scales[-1]", "m.scales[-1] = 0.25"),
    ("average([{h} * scale for scale in self.scales])", "m.scales[-1] = 0.25"),
    ("{h} + self.offset", "m.offset = torch.full((8,), 0.5, dtype=torch.float64)"),
    ("{h} + self.offset", "m.offset.mul_(0.5)"),
    ("{h} + self.tables['a']", "m.tables['a'] = torch.full((8,), 0.5, dtype=torch.float64)"),
    ("{h} * getattr(self, 'extra_gain', 1.0)", "m.extra_gain = 0.5"),
    ("{h} * 2 if hasattr(self, 'extra_gain') else {h}", "m.extra_gain = 0.5"),
    ("self.act({h})", "m.act = torch.sigmoid"),
    ("{h} * (1 + self.count)", "m.count = 3"),
    ("{h} * (1 + self.state['n'])", "m.state['n'] = 3"),
    ("{h} * 2 if '1' in self.label else {h}", "m.label = 'block 1'"),
    ("self.norm({h}.transpose(1, 2)).transpose(1, 2)", "m.norm.eval()"),
    ("{h} * 2 if self.norm.training else {h}", "m.norm.eval()"),
    ("self.norm({h}.transpose(1, 2)).transpose(1, 2)", "m.norm.eps = 0.25"),
    ("{h} + self.norm.eps", "m.norm.eps = 0.25"),
    ("self.norm({h}.transpose(1, 2)).transpose(1, 2)", "m.norm.momentum = 0.5"),
    ("self.zero({h})", "m.zero.p = 1.0 - m.zero.p"),
    ("{h} * self.zero.p", "m.zero.p = 1.0 - m.zero.p"),
    ("self.first({h})", "m.first.requires_grad_(not m.first.bias.requires_grad)"),
    (
        "{h} * (1.0 if self.first.weight.requires_grad else 0.5)",
        "m.first.requires_grad_(not m.first.bias.requires_grad)",
    ),
    ("self.first({h})", "m.first.register_forward_hook(scale_gradient)"),
    ("self.second({h})", "m.second.register_forward_hook(scale_gradient)"),
    ("self.second({h})", "m.second.register_full_backward_hook(double_gradient)"),
    ("self.first({h})", "m.first.forward = lambda x, old=m.first.forward: old(x) * 0.5"),
    ("self.second({h})", "m.second.forward = lambda x, old=m.second.forward: old(x) * 0.5"),
    ("{h} if self.keeps.aux is None else {h} * 2", "m.keeps.aux = None"),
    ("self.decays({h})", "m.decays.average.fill_(0.5)"),
    ("{h} * self.decays.average.clone()", "m.decays.average.fill_(0.5)"),
    ("{h} * self.factor", "type(m).factor = 0.5"),
    ("{h} * GAIN", "globals()['GAIN'] = 0.5"),
    ("{h} * TABLE['gain']", "TABLE['gain'] = 0.5"),
    ("{h} @ self.weight", "for p in m.parameters():\n    p.data.mul_(0.75)"),
    ("{h} @ self.weight", "for p in m.parameters():\n    p.data.sub_(0.01 * p.grad) if p.grad is not None else None"),
    ("{h} @ self.weight", "m.weight.data = m.weight.data * 0.5"),
]
"""What some code reads of a module, and what a user does to the module ``m`` between two calls that changes it."""


def write_class(choose: random.Random, name: str, read: str, nasty: float) -> tuple[str, str]:
    """The source of a submodule's class, and a template that calls ``self.{name}``.

    Args:
        read: an expression of ``{h}`` that is somewhere in it, should it not be empty.
    """
    style = choose.randrange(8)
    returns = choose.randrange(len(RETURNS))
    signature, call = [
        ("self, h", "{BLD}"),
        ("self, h, mask=None, *, scale=1.0", "{BLD}, mask={MBL}, scale={P}"),
        ("self, h, *others", "{BLD}, {BLD}, {BLD}"),
        ("self, batch", "{'h': {BLD}, 'n': 3}"),
        ("self, h, extra=None", "h={BLD}"),
        ("self, pair", "Pair({BLD}, {BD})"),
        ("self, *, h, **others", "h={BLD}, a={BLD}, b={S}"),
        ("self, h, store", "{BLD}, Store()"),
    ][style]
    writer = Writer(choose, False, _OWN_CALLS, nasty)
    if style == 3:
        writer.emit("h = batch['h']")
    writer.define("BLD", "h")
    writer.define("P", "0.5")
    if style == 1:
        writer.emit("h = h * scale if mask is None else torch.where(mask[..., None], h, h * scale)")
    if style == 2:
        writer.emit("h = h + sum(others)")
    if style == 4:
        writer.emit("h = h if extra is None else h + extra")
    if style == 5:
        writer.emit("h = pair.first + pair.second[:, None]")
    if style == 6:
        writer.emit("h = h + others['a'] * others['b']")
    if style == 7:
        writer.emit("h = store.add(h) + store.add(h * 0.5)")
    if choose.random() < 0.4:
        writer.emit(choose.choice(_READS_ITSELF))
    if read:
        writer.emit(f"h = {read.format(h='h')}")
    writer.emit("d = h.mean(1)")
    writer.define("BD", "d")
    writer.emit("s = h.pow(2).mean()")
    writer.define("S", "s")
    text = RETURNS[returns].replace("{n}", "3")
    body = writer.write(choose.randint(1, 4), text, choose.random() < 0.15)
    source = f"class {name}(nn.Module):\n    factor = 1.0\n\n    def __init__(self):\n        super().__init__()"
    source += _STATE.format(second=choose.choice(_SECONDS), bias=choose.choice(["nn.Parameter(torch.ones(8))", "1.5"]))
    source += f"        {choose.choice(_EXTRAS) or 'pass'}\n\n    def forward({signature}):\n{body}\n"
    return source, USES[returns].format(f"self.{name.lower()}({call})")


def write_source(choose: random.Random, read: str) -> str:
    """The source of a random model, class ``Root``; what reads a place is in some of its classes."""
    places = choose.choice([{0}, {1}, {2}, {0, 1, 2}])
    nasty = choose.choice([0.0, 0.03, 0.15, 0.3])
    classes: list[str] = []
    calls: list[str] = []
    for index in range(choose.randint(1, 2)):
        source, call = write_class(
            choose, f"Block{index}", read if index in places else "", choose.choice([nasty, 0.4])
        )
        classes.append(source)
        calls.append(call)
    stack = choose.randint(2, 4)
    has_twins = choose.random() < 0.4
    if has_twins:
        calls += [calls[0].replace("self.block0(", f"self.twins[{index}](") for index in range(3)]
    writer = Writer(choose, True, [*calls, *calls, *_OWN_CALLS, "self.stack[{i}]({BLD})"], nasty)
    writer.modules = [text.replace("{i}", str(choose.randrange(stack))) for text in writer.modules]
    writer.emit("e = self.emb(ids) + x")
    for kind, name in [("BLD", "x"), ("BLD", "e"), ("IBL", "ids"), ("MBL", "mask"), ("P", "scale"), ("P", "2.0")]:
        writer.define(kind, name)
    if read and 2 in places:
        writer.emit(f"e = {read.format(h='e')}")
    writer.emit("d = e.mean(1)")
    writer.define("BD", "d")
    writer.emit("s = e.pow(2).mean()")
    writer.define("S", "s")
    if choose.random() < 0.4:
        writer.emit("for block in self.stack:\n    e = e + block(e)")
        writer.define("BLD", "e")
    if has_twins and choose.random() < 0.6:
        call = calls[0].replace("self.block0(", "twin(")
        for kind, name in [("{BLD}", "e"), ("{MBL}", "mask"), ("{P}", "scale")]:
            call = call.replace(kind, name)
        writer.emit(f"for twin in self.twins:\n    e = {call}")
        writer.define("BLD", "e")
    returns = choose.choice(RETURNS).replace("{n}", "len(self.stack)")
    body = writer.write(choose.randint(3, 8), returns, choose.random() < 0.1)
    source = "class Root(nn.Module):\n    factor = 1.0\n\n    def __init__(self):\n        super().__init__()"
    source += _STATE.format(second=choose.choice(_SECONDS), bias=choose.choice(["nn.Parameter(torch.ones(8))", "1.5"]))
    source += "        self.emb = nn.Embedding(11, 8)\n"
    source += f"        self.stack = nn.ModuleList(nn.Linear(8, 8) for _ in range({stack}))\n"
    for index in range(len(classes)):
        source += f"        self.block{index} = Block{index}()\n"
    if has_twins:
        source += "        self.twins = nn.ModuleList(Block0() for _ in range(3))\n"
        source += f"        for index, twin in enumerate(self.twins):\n            {choose.choice(_TWINS_DIFFER)}\n"
    source += f"        {choose.choice(_EXTRAS) or 'pass'}\n"
    source += f"\n    def forward(self, x, ids, mask, scale=1.0, *, extra=None):\n{body}\n"
    return "\n\n".join([PREAMBLE, *classes, source])


# ---------------------------------------------------------------------------------- scenarios


@dataclass(frozen=True)
class Step:
    """One call."""

    batch: int
    length: int
    training: bool = True
    needs_grad: bool = False
    scale: float = 1.0
    all_ones: bool = True
    seed: int = 0
    gain: float | None = None
    """Set on the model before the call."""
    mean: float | None = None
    """What a new buffer is filled with that is put in the place of every ``mean`` before the call."""
    edit: str = ""
    """One of `EDITS`, done before the call."""
    edits_all: bool = True
    """Whether to do it to every module of a random class, or to the root alone."""
    quiet: bool = False
    """Whether it is ``model(...)`` without gradients."""
    joined: bool = False
    """Whether it is ``model(...)``, in one microbatch, and a backward through what that returns."""


@dataclass(frozen=True)
class Scenario:
    """How a model is compiled and called."""

    steps: tuple[Step, ...]
    num_microbatches: int = 1
    num_workers: int = 1
    one_layer_per_stage: bool = True
    with_example: bool = True
    grain: str = "stage"
    drawn_costs: int | None = None
    """Seed of nodes' costs that are drawn, not measured: layers end anywhere they may, and tracing is quicker."""
    untraced: bool = False
    """As if the root could not be traced: module by module."""


@dataclass
class Case:
    """One model and how it is called."""

    source: str
    scenario: Scenario


def make_case(choose: random.Random) -> Case:
    """A random case."""
    read, edit = choose.choice(EDITS)
    is_edited = choose.random() < 0.6
    source = write_source(choose, read if is_edited else "")
    scale = choose.choice([0.5, 1.0])
    steps = []
    sizes = [(4, 6), (choose.choice([2, 5, 6]), 6), choose.choice([(3, 4), (6, 5), (4, 6)])]
    choose.shuffle(sizes)
    gain = choose.random() < 0.1
    eval_index = choose.choice([2, 2, 1, None])
    needs_grad = choose.random() < 0.4
    for index, (batch, length) in enumerate(sizes):
        steps.append(
            Step(
                batch,
                length,
                training=index != eval_index,
                needs_grad=needs_grad,
                scale=scale if choose.random() < 0.8 else 0.75,
                all_ones=choose.random() < 0.6,
                seed=choose.randrange(1000),
                gain=2.0 if gain and index == 1 else None,
            )
        )
    scenario = Scenario(
        tuple(steps),
        num_microbatches=choose.choice([1, 2, 2, 3]),
        num_workers=choose.choice([1, 1, 2]),
        one_layer_per_stage=choose.random() < 0.7,
        with_example=choose.random() < 0.7,
        grain=choose.choice(["stage", "layer"]),
    )
    joined = choose.randrange(len(steps)) if choose.random() < 0.3 else None
    renewed = choose.randrange(len(steps)) if choose.random() < 0.1 else None
    edited = choose.randrange(1, len(steps)) if is_edited else None
    edits_all = choose.random() < 0.8
    quiet = choose.randrange(len(steps)) if choose.random() < 0.15 else None
    return Case(
        source,
        replace(
            scenario,
            steps=tuple(
                replace(
                    step,
                    joined=index == joined and index != quiet,
                    quiet=index == quiet,
                    mean=0.25 if index == renewed else None,
                    edit=edit if index == edited else "",
                    edits_all=edits_all,
                )
                for index, step in enumerate(steps)
            ),
            drawn_costs=choose.randrange(1000) if choose.random() < 0.9 else None,
        ),
    )


def inputs_of(step: Step) -> dict[str, Any]:
    """Keyword arguments of a call."""
    generator = torch.Generator().manual_seed(step.seed)
    x = torch.randn(step.batch, step.length, WIDTH, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, 11, (step.batch, step.length), generator=generator)
    mask = torch.rand(step.batch, step.length, generator=generator) > (-1.0 if step.all_ones else 0.4)
    return {"x": x.requires_grad_(step.needs_grad), "ids": ids, "mask": mask, "scale": step.scale}


def loss_of(outputs: Any) -> torch.Tensor:
    """A number that every tensor and number of a model's outputs has a part in."""
    total: Any = 0.0
    for index, leaf in enumerate(trees.leaves(outputs)):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            total = total + (leaf.double() * (1 + 0.1 * index)).pow(2).mean() + leaf.double().sum() * 0.01
        elif isinstance(leaf, (int, float)):
            total = total * (1 + leaf * 0.01)
    return total


_NUM_FILES = 0
WORLDS: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()
"""Model -> the globals of its source."""


def build(source: str) -> nn.Module:
    """The model of a source, in a world of its own: classes, closures and globals are new."""
    global _NUM_FILES
    _NUM_FILES += 1
    filename = f"random_model_{_NUM_FILES}.py"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"__name__": f"random_model_{_NUM_FILES}"}
    exec(compile(source, filename, "exec"), namespace)
    torch.manual_seed(0)
    model: nn.Module = namespace["Root"]().double()
    WORLDS[model] = namespace
    return model


# ---------------------------------------------------------------------------------- both sides


@dataclass
class Observed:
    """What one call showed."""

    loss: torch.Tensor | None = None
    outputs: dict[int, Any] = field(default_factory=dict)
    """First sample of the microbatch -> its outputs, detached."""
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)


def observe(model: nn.Module, inputs: dict[str, Any], seen: Observed) -> Observed:
    """Gradients, buffers and Python state as they are now."""
    for name, parameter in model.named_parameters():
        seen.gradients[name] = None if parameter.grad is None else parameter.grad.clone()
    x = inputs["x"]
    seen.gradients["input x"] = None if x.grad is None else x.grad.clone()
    seen.state = {name: buffer.clone() for name, buffer in model.named_buffers()}
    seen.state.update((name, parameter.detach().clone()) for name, parameter in model.named_parameters())
    for name, module in model.named_modules():
        for key in ("count", "state", "history", "gain", "last"):
            value = module.__dict__.get(key)
            value = dict(value) if isinstance(value, dict) else list(value) if isinstance(value, list) else value
            seen.attributes[f"{name}.{key}"] = value.clone() if isinstance(value, torch.Tensor) else value
        if "inner_calls" in module.__dict__:
            seen.attributes[f"{name}.inner_calls"] = module.inner_calls.n
    world = WORLDS[model]
    seen.attributes["CALLS"] = list(world["CALLS"])
    seen.attributes["TABLE"] = dict(world["TABLE"])
    return seen


def _snapshot(outputs: Any) -> Any:
    return [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in trees.leaves(outputs)]


def run_eager(model: nn.Module, case: Case) -> Iterator[Observed]:
    """The loop over microbatches that the contract is written in."""
    for step in case.scenario.steps:
        prepare(model, step)
        inputs = inputs_of(step)
        number = 1 if step.joined or step.quiet else min(case.scenario.num_microbatches, step.batch)
        seen = Observed(torch.zeros((), dtype=torch.float64))
        pieces = {
            name: value.tensor_split(number) if isinstance(value, torch.Tensor) else [value] * number
            for name, value in inputs.items()
        }
        first = 0
        for index in range(number):
            piece = {name: parts[index] for name, parts in pieces.items()}
            piece["ids"], piece["mask"] = piece["ids"].clone(), piece["mask"].clone()
            if not step.needs_grad:
                piece["x"] = piece["x"].clone()
            size = len(piece["x"])
            with torch.set_grad_enabled(not step.quiet):
                outputs = model(**piece)
                loss = loss_of(outputs)
            seen.outputs[first] = _snapshot(outputs)
            if not step.quiet:
                loss.backward()
            assert seen.loss is not None
            seen.loss = seen.loss + loss.detach()
            first += size
        yield observe(model, inputs, seen)


def prepare(model: nn.Module, step: Step) -> None:
    """Mode and attributes as a user would set them between calls."""
    model.train(step.training)
    world = WORLDS[model]
    if step.edit:
        own = [module for module in model.modules() if type(module).__name__.startswith(("Root", "Block"))]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for module in own if step.edits_all else own[:1]:
                exec(step.edit, world, {"m": module})
    if step.gain is not None:
        for module in model.modules():
            if "gain" in module.__dict__:
                module.gain = step.gain
    if step.mean is not None:
        for module in model.modules():
            if "mean" in module._buffers:
                module.mean = torch.full((WIDTH,), step.mean, dtype=torch.float64)


def one_layer_per_stage(num_layers: int) -> ExecutePlan:
    """Every layer its own stage."""
    stages = [(index, index + 1) for index in range(num_layers - 1)]
    return ExecutePlan(stages, (num_layers - 1, num_layers), stages[::-1])


@dataclass
class Compiled:
    """The compiled side of a case."""

    pipe: Any = None
    trace_count: int = 0
    fell_back: bool = False
    opaque: bool = False
    num_layers: int = 0


def run_compiled(model: nn.Module, case: Case, info: Compiled) -> Iterator[Observed]:
    """The same calls through `roundpipe.compile`."""
    scenario = case.scenario
    config = RoundPipeRunConfig(num_microbatch=scenario.num_microbatches, recompute_grain=scenario.grain)
    prepare(model, scenario.steps[0])
    options: dict[str, Any] = {"devices": ["cpu"] * scenario.num_workers, "model_run_config": config, "name": "fuzz"}
    if scenario.with_example:
        options["example_kwargs"] = inputs_of(scenario.steps[0])
    costs = _drawn_costs(scenario.drawn_costs)
    with contextlib.ExitStack() as patches:
        if costs is not None:
            patches.enter_context(mock.patch("roundpipe.fx.passes.lower.measure", costs))
        if scenario.untraced:
            patches.enter_context(mock.patch("roundpipe.fx.source.trace", side_effect=TraceError("not tried")))
        pipe = info.pipe = roundpipe.compile(model, **options)
        yield from _run_steps(pipe, model, scenario, info)


def _drawn_costs(seed: int | None) -> Callable[..., dict[Node, NodeCost]] | None:
    """A stand-in for `roundpipe.fx.passes.cost.measure`; what a node costs decides nothing but where layers end."""
    if seed is None:
        return None
    choose = random.Random(seed)

    def draw(node: Node) -> NodeCost:
        if node.op in ("placeholder", "get_attr") or is_accessor(node):
            return NodeCost(value_bytes=value_bytes(node))
        seconds = choose.choice([1e-6, 1e-4, 1e-3]) * (0.5 + choose.random())
        return NodeCost(value_bytes=value_bytes(node), forward_s=seconds, backward_s=2 * seconds)

    def measure(traced: TracedGraph, profile: object) -> dict[Node, NodeCost]:
        return {node: draw(node) for node in traced.graph.nodes if node.op != "output"}

    return measure


def _run_steps(pipe: Any, model: nn.Module, scenario: Scenario, info: Compiled) -> Iterator[Observed]:
    with pipe:
        if scenario.one_layer_per_stage and not isinstance(pipe, AutoRoundPipe):
            pipe._runner.builder.plans.plan = lambda call: one_layer_per_stage(len(call.chain))
        for step in scenario.steps:
            prepare(model, step)
            inputs = inputs_of(step)
            yield _compiled_step(pipe, model, step, inputs, info)


def _compiled_step(pipe: Any, model: nn.Module, step: Step, inputs: dict[str, Any], info: Compiled) -> Observed:
    seen = Observed()
    label = torch.arange(step.batch)

    def loss_fn(outputs: Any, start: torch.Tensor) -> torch.Tensor:
        seen.outputs[int(start[0])] = _snapshot(outputs)
        return loss_of(outputs)

    if step.quiet:
        with torch.no_grad():
            loss = loss_fn(pipe(**inputs, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1)), label)
        seen.loss = loss
    elif step.joined:
        loss = loss_fn(pipe(**inputs, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1)), label)
        if loss.requires_grad:  # not if no output depends on a weight or an input, such as a detached leaf
            loss.backward()
        seen.loss = loss.detach()
    else:
        seen.loss = pipe.forward_backward(input_kwargs=inputs, label=label, loss_fn=loss_fn)
    pipe.synchronize()
    source = getattr(pipe._runner, "source", None)
    info.trace_count = max(info.trace_count, pipe.trace_count)
    chain = None if source is None else source.latest
    info.fell_back |= isinstance(pipe, AutoRoundPipe) or chain is None or pipe._runner.last_chain is not chain
    info.opaque |= bool(getattr(source, "opaque", {}))
    info.num_layers = max(info.num_layers, 0 if chain is None else len(chain))
    return observe(model, inputs, seen)


# ---------------------------------------------------------------------------------- comparing


def difference(was: Observed, now: Observed, tolerance: float, logged: str) -> str:
    """The first thing that differs, in words; nothing if all is equal."""
    if _gap(was.loss, now.loss) > tolerance:
        return f"loss is {now.loss}, eager's {was.loss}"
    if sorted(was.outputs) != sorted(now.outputs):
        return f"microbatches start at {sorted(now.outputs)}, eager's at {sorted(was.outputs)}"
    for first, outputs in was.outputs.items():
        if len(outputs) != len(now.outputs[first]):
            return f"{len(now.outputs[first])} outputs, eager gives {len(outputs)}"
        for index, (a, b) in enumerate(zip(outputs, now.outputs[first], strict=True)):
            if _gap(a, b) > tolerance:
                return f"output {index} of microbatch {first} is off by {_gap(a, b):.2e}"
    scale = max([1e-3] + [float(g.abs().max()) for g in was.gradients.values() if g is not None and g.numel()])
    for name, gradient in was.gradients.items():
        gap = _gap(gradient, now.gradients[name], 1e-3 * scale)
        if gap > tolerance:
            return f"gradient of {name} is off by {gap:.2e}"
    for name, buffer in was.state.items():
        if _gap(buffer, now.state.get(name)) > tolerance:
            return f"buffer {name} is {now.state.get(name)}, eager's {buffer}"
    said = [words for line in logged.splitlines() for words in _SAID_TO_STAY.findall(line)]
    stays = {name.rpartition(".")[2] for words in said for name in re.split(r"[, ]+", words)}
    for name, value in was.attributes.items():
        if not _same(value, now.attributes[name], tolerance) and name.rpartition(".")[2] not in stays:
            return f"attribute {name} is {now.attributes[name]}, eager's {value}"
    return ""


_SAID_TO_STAY = re.compile("its forward sets (.*); the compiled model runs as if it had not")


def _same(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return _gap(a, b) <= tolerance
    return bool(a == b)


def _gap(a: Any, b: Any, least: float = 1e-6) -> float:
    """The largest relative difference; infinite for another kind of value; None is zero."""
    if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
        if isinstance(a, float) and isinstance(b, float):
            return abs(a - b) / max(abs(a), 1e-6)
        return 0.0 if a == b else float("inf")
    if a is None or b is None:
        other = b if a is None else a
        return float(other.abs().max()) if other.numel() else 0.0
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)) or a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if not a.numel():
        return 0.0
    a, b = a.double(), b.double()
    gap = float((a - b).abs().max()) / max(float(a.abs().max()), least)
    return gap if gap == gap else float("inf")


# ---------------------------------------------------------------------------------- outcomes

KINDS = ["traced", "opaque", "retraced", "fell back", "refused", "invalid", "crashed", "different"]


@dataclass
class Outcome:
    """What became of a case."""

    kind: str
    detail: str = ""
    num_layers: int = 0


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"

    def __enter__(self) -> _Log:
        logging.getLogger("roundpipe").addHandler(self)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        logging.getLogger("roundpipe").removeHandler(self)


TOLERANCE = 1e-6
"""Of float64, with room for what passes through float32."""
COARSE_TOLERANCE = 3e-2
ROUNDING = 1e-15
ROUNDED_RUNS = 8
_AUTOCAST = "torch.autocast('cpu', dtype=torch.bfloat16)"


def run(case: Case) -> Outcome:
    """Both sides of a case, compared call by call; one that rounds to bfloat16 once more without if it is close.

    A case in which rounding alone changes what eager computes (a branch on the sum of what a norm gave) is invalid.
    """
    outcome = _run(case, TOLERANCE)
    if outcome.kind == "different" and _turns_on_rounding(case):
        return Outcome("invalid", f"rounding decides: {outcome.detail}")
    if outcome.kind == "different" and _AUTOCAST in case.source:
        close = _run(case, COARSE_TOLERANCE)
        exact = replace(case, source=case.source.replace(_AUTOCAST, _AUTOCAST[:-1] + ", enabled=False)"))
        if close.kind not in ("different", "crashed") and _run(exact, TOLERANCE).kind not in ("different", "crashed"):
            return close
    return outcome


def _turns_on_rounding(case: Case) -> bool:
    """Whether eager differs from itself when its parameters are off by rounding."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = list(run_eager(build(case.source), case))
        for seed in range(ROUNDED_RUNS):
            model = build(case.source)
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter *= 1 + ROUNDING * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            found = run_eager(model, case)
            if any(difference(was, now, TOLERANCE, "") for was, now in zip(expected, found, strict=True)):
                return True
    return False


def _run(case: Case, tolerance: float) -> Outcome:
    with warnings.catch_warnings(), _Log() as log:
        warnings.simplefilter("ignore")
        try:
            expected = list(run_eager(build(case.source), case))
        except Exception as error:
            return Outcome("invalid", f"{type(error).__name__}: {error}")
        if not all(one.loss is not None and one.loss.isfinite() for one in expected):
            return Outcome("invalid", "the loss is not finite")
        if not all(g is None or g.isfinite().all() for one in expected for g in one.gradients.values()):
            return Outcome("invalid", "a gradient is not finite")
        info = Compiled()
        try:
            with contextlib.closing(run_compiled(build(case.source), case, info)) as found:  # type: ignore[type-var]
                for index, (was, now) in enumerate(zip(expected, found, strict=True)):
                    problem = difference(was, now, tolerance, log.text)
                    if problem:
                        return Outcome("different", f"call {index}: {problem}", info.num_layers)
        except RoundPipeError as error:
            return Outcome("refused", f"{type(error).__name__}: {error}")
        except Exception as error:
            return Outcome("crashed", f"{type(error).__name__}: {error}")
    kind = "traced"
    if info.fell_back:
        kind = "fell back"
    elif info.trace_count > 2:
        kind = "retraced"
    elif info.opaque:
        kind = "opaque"
    return Outcome(kind, num_layers=info.num_layers)


def case_of(seed: int, index: int, *, untraced: bool = False) -> Case:
    """The case of a number under a seed."""
    case = make_case(random.Random(f"{seed}:{index}"))
    return replace(case, scenario=replace(case.scenario, untraced=untraced))


def _totals(counts: collections.Counter[str]) -> str:
    return ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)


def main(arguments: list[str] | None = None) -> int:
    """The command line; 0 if no case differs."""
    parser = argparse.ArgumentParser(description="Random modules against eager PyTorch.")
    parser.add_argument("--cases", type=int, default=2000, help="how many valid cases to run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--show", type=int, help="print and run this case alone")
    parser.add_argument("--untraced", action="store_true", help="as if no root could be traced: module by module")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.show is not None:
        case = case_of(given.seed, given.show, untraced=given.untraced)
        print(case.source[len(PREAMBLE) :])
        print(case.scenario)
        print(run(case))
        return 0
    counts: collections.Counter[str] = collections.Counter()
    layers: collections.Counter[bool] = collections.Counter()
    gc.freeze()  # what is imported need not be looked through after every few cases
    start, index = time.monotonic(), given.start
    while sum(counts.values()) - counts["invalid"] < given.cases and time.monotonic() - start < given.seconds:
        outcome = run(case_of(given.seed, index, untraced=given.untraced))
        counts[outcome.kind] += 1
        layers[outcome.num_layers > 1] += outcome.kind != "invalid"
        if outcome.kind in ("different", "crashed", "refused"):
            print(f"{outcome.kind} case {index}: {outcome.detail[:300]}", flush=True)
        index += 1
        if index % 100 == 0:
            print(f"after {index}: {_totals(counts)}", flush=True)
    valid = sum(counts.values()) - counts["invalid"]
    print(_totals(counts))
    print(
        f"{valid} valid cases of seed {given.seed}, {layers[True]} of several layers, {time.monotonic() - start:.0f} s"
    )
    return 1 if counts["different"] or counts["crashed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
