"""Actions that change the model, or what is around it, between calls."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.actions.calls import action, dtype_of
from tests.actions.models import KINDS, WIDTH, blocks_of
from tests.actions.sides import Side


def _draw_module(side: Side, choose: random.Random) -> Any:
    return choose.choice([module for _, module in side.model.named_modules()][1:])


@action(1)
def set_mode(side: Side, choose: random.Random) -> list[Any]:
    """Of the whole, or of a part."""
    mode = choose.random() < 0.6
    (side.handle if choose.random() < 0.5 else _draw_module(side, choose)).train(mode)
    return []


@action(1.2)
def freeze(side: Side, choose: random.Random) -> list[Any]:
    """Or train again; also between a backward and its step."""
    trained = choose.random() < 0.5
    if choose.random() < 0.5:
        _draw_module(side, choose).requires_grad_(trained)
    else:
        choose.choice(list(side.model.parameters())).requires_grad_(trained)
    if not any(parameter.requires_grad for parameter in side.model.parameters()):
        side.handle.requires_grad_()
    return []


class _Counter:
    """Counts calls of a hook."""

    def __init__(self, side: Side, name: str) -> None:
        self.kept, self.name = side.kept, name
        self.kept.setdefault(name, 0)

    def __call__(self, *args: Any) -> None:
        self.kept[self.name] += 1


@action(1.5)
def put_hook(side: Side, choose: random.Random) -> list[Any]:
    """On a module or a parameter; hooks that change values, and ones that count."""
    module = choose.choice(blocks_of(side.model))
    if choose.random() < 0.4:
        module = module.linear
    name = f"hook {len(side.handles)}"
    kind = choose.choice(["scale", "pre", "gradient", "parameter", "backward pre", "keyword"])
    if kind == "scale":
        handle = module.register_forward_hook(lambda module, args, output: output * 0.75)
    elif kind == "pre":
        handle = module.register_forward_pre_hook(lambda module, args: (args[0] * 1.25,))
    elif kind == "keyword":
        handle = module.register_forward_hook(
            lambda module, args, kwargs, output: output + 0.1 * args[0], with_kwargs=True
        )
    elif kind == "gradient":
        handle = module.register_full_backward_hook(lambda module, inner, outer: tuple(each * 0.5 for each in inner))
    elif kind == "backward pre":
        handle = module.register_full_backward_pre_hook(lambda module, outer: tuple(each * 0.5 for each in outer))
    else:
        parameter = choose.choice([p for p in module.parameters() if p.requires_grad] or [None])
        if parameter is None:
            return []
        handle = parameter.register_hook(lambda gradient: gradient * 0.5)
    side.handles[name] = handle
    return []


@action(0.7)
def put_counting_hook(side: Side, choose: random.Random) -> list[Any]:
    """One that does nothing but count: calls in training may be counted again by recomputation, others not."""
    module = choose.choice(blocks_of(side.model))
    name = f"called {len(side.handles)}"
    side.handles[name] = module.register_forward_hook(_Counter(side, name))
    return []


@action(0.8)
def take_hook_off(side: Side, choose: random.Random) -> list[Any]:
    names = sorted(side.handles)
    if names:
        side.handles.pop(choose.choice(names)).remove()
    return []


@action(1)
def load_state(side: Side, choose: random.Random) -> list[Any]:
    """Into the wrapper, the model or a part of it; all or some keys."""
    side.settle(explicit=choose.random() < 0.3)
    way = choose.choice(["wrapper", "model", "part", "some", "assign"])
    target = side.handle if way == "wrapper" else side.model
    if way == "part":
        target = choose.choice(blocks_of(side.model))
    state = {name: value.detach().clone() for name, value in target.state_dict().items()}
    for name, value in state.items():
        generator = torch.Generator().manual_seed(len(name) + choose.randrange(1000))
        if value.is_floating_point():
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.dtype)
            state[name] = (value * 0 + 0.3 * noise).abs() if "var" in name else 0.3 * noise
    if way == "some":
        state = {name: value for name, value in state.items() if choose.random() < 0.5}
    if way == "assign":
        _forget_optimizer(side)
        target.load_state_dict(state, assign=True)
    else:
        target.load_state_dict(state, strict=way != "some")
    side.edited()
    return []


@action(1)
def edit_weights(side: Side, choose: random.Random) -> list[Any]:
    """In place, through ``.data``, or other memory."""
    side.settle()
    name, parameter = choose.choice(list(side.model.named_parameters()))
    way = choose.choice(["mul", "data", "memory", "element"])
    with torch.no_grad():
        if way == "mul":
            parameter.mul_(0.9)
        elif way == "data":
            parameter.data.add_(0.01)
        elif way == "memory":
            parameter.data = parameter.data * 1.1
        else:
            parameter.view(-1)[0] = 0.5
    side.edited()
    return []


@action(0.8)
def edit_buffers(side: Side, choose: random.Random) -> list[Any]:
    """In place, or another tensor."""
    side.settle()
    buffers = [(module, name) for module in side.model.modules() for name in module._buffers]
    if buffers:
        module, name = choose.choice(buffers)
        value = module._buffers[name]
        if choose.random() < 0.5:
            value.mul_(2).add_(1)
        else:
            setattr(module, name, value * 2 + 1)
    return []


@action(0.6)
def add_buffer(side: Side, choose: random.Random) -> list[Any]:
    """One that a forward looks for, or one that nobody reads."""
    side.settle()
    block = choose.choice(blocks_of(side.model))
    name = choose.choice(["offset", "unread"])
    if name not in block._buffers:
        block.register_buffer(name, torch.full((WIDTH,), 0.1 * choose.randint(1, 5), dtype=dtype_of(side)))
    return []


@action(0.8)
def set_gain(side: Side, choose: random.Random) -> list[Any]:
    choose.choice(blocks_of(side.model)).gain = choose.choice([0.25, 0.5, 2.0])
    return []


@action(0.7)
def change_config(side: Side, choose: random.Random) -> list[Any]:
    """In the object that all blocks have in common, or by another one for a block."""
    block, slope = choose.choice(blocks_of(side.model)), choose.choice([0.25, 0.5, 2.0])
    if choose.random() < 0.6:
        block.config.slope = slope
    else:
        block.config = SimpleNamespace(slope=slope)
    return []


@action(0.7)
def replace_activation(side: Side, choose: random.Random) -> list[Any]:
    block = choose.choice(blocks_of(side.model))
    block.activation = choose.choice([nn.Sigmoid, nn.Tanh, nn.Identity, nn.SiLU])()
    return []


def _forget_optimizer(side: Side) -> None:
    """One that holds parameters that the model no longer has is of no use."""
    side.optimizer = side.scheduler = None


@action(0.7)
def replace_weights(side: Side, choose: random.Random) -> list[Any]:
    """A module, or a parameter, that the optimizer does not know."""
    side.settle()
    side.handle.zero_grad()
    side.edited_gradients()
    _forget_optimizer(side)
    block = choose.choice(blocks_of(side.model))
    with torch.random.fork_rng():
        torch.manual_seed(choose.randrange(1000))
        if choose.random() < 0.5:
            block.linear = nn.Linear(WIDTH, WIDTH).to(dtype_of(side))
        else:
            block.linear.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).to(dtype_of(side)) * 0.3)
    side.edited()
    return []


@action(0.5)
def convert(side: Side, choose: random.Random) -> list[Any]:
    """To the other precision."""
    side.settle()
    side.handle.zero_grad()
    side.edited_gradients()
    _forget_optimizer(side)
    to_single = dtype_of(side) is torch.float64 and not side.setup.is_exact
    dtype = torch.float32 if to_single else torch.float64
    side.handle.to(dtype)
    side.edited()
    side.kept["is single"] = True
    return []


@action(0.5)
def rewrap(side: Side, choose: random.Random) -> list[Any]:
    """In another wrapper; the first one is closed, or stays open and unused."""
    side.settle()
    side.handle.zero_grad()
    side.edited_gradients()
    kinds = ["by hand"] if isinstance(side.model, nn.Sequential) else [k for k in KINDS if k != "by hand"]
    kinds += ["compile", "compile later"]
    if type(side.model).__name__ == "Decides":
        kinds = ["fallback", "parts", "module by module", "one layer"]
    side.rewrap(choose.choice(kinds), close_first=choose.random() < 0.5)
    return []


@action(0.5)
def duplicate(side: Side, choose: random.Random) -> list[Any]:
    """The case goes on with a deep copy, which has hooks of its own; the campaign sees to it."""
    return []


@action(0.6)
def save(side: Side, choose: random.Random) -> list[Any]:
    side.save()
    side.kept["optimizer of saved"] = side.optimizer
    side.kept["keys of saved"] = [(name, p.shape, p.dtype, p.requires_grad) for name, p in _all(side)]
    return []


@action(0.6)
def load(side: Side, choose: random.Random) -> list[Any]:
    """What was saved, if model and optimizer are still those."""
    keys = [(name, p.shape, p.dtype, p.requires_grad) for name, p in _all(side)]
    saved = side.kept.get("keys of saved")
    if saved == keys and side.optimizer is side.kept["optimizer of saved"] and side.scheduler is None:
        side.load()
        side.edited_gradients()
    return []


def _all(side: Side) -> Any:
    return sorted([*side.model.named_parameters(), *side.model.named_buffers()], key=lambda item: item[0])
