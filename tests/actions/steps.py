"""Actions that are about the optimizer and gradients."""

from __future__ import annotations

import random
from typing import Any

import torch

import roundpipe
from tests.actions.calls import action, draw_batch
from tests.actions.models import loss_of
from tests.actions.sides import Piped, Side


@action(5)
def step(side: Side, choose: random.Random) -> list[Any]:
    if side.optimizer is None:
        new_optimizer(side, choose)
    is_async, clips, zeroes = choose.random() < 0.6, choose.random() < 0.25, choose.random() < 0.85
    norms = []
    optimizer, scheduler = side.optimizer, side.scheduler

    def step_fn() -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if clips:
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, 0.5).clone())
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if zeroes:
            optimizer.zero_grad()

    side.step(step_fn, is_async)
    side.kept["norms"] = norms
    return []


@action(0.8)
def step_plainly(side: Side, choose: random.Random) -> list[Any]:
    """Without the wrapper's step."""
    if side.optimizer is None:
        new_optimizer(side, choose)
    side.step_plainly()
    return []


@action(0.7)
def step_scaled(side: Side, choose: random.Random) -> list[Any]:
    """A call and a step with a scaler, between two moments at which there are no gradients."""
    if side.optimizer is None:
        new_optimizer(side, choose)
    zero_grad_all(side)
    batch = draw_batch(side, choose)
    optimizer, is_async = side.optimizer, choose.random() < 0.6
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if isinstance(side, Piped):
        scaler = roundpipe.GradScaler("cpu", init_scale=256.0)
        loss, _ = side.train(batch, lambda outputs, label: scaler.scale(loss_of(outputs, label)), False)
        loss = loss / 256.0
        side.step(lambda: (scaler.step(optimizer), scaler.update(), optimizer.zero_grad()), is_async)
    else:
        loss, _ = side.train(batch, loss_of, False)
        side.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async)
    if any(id(copy) not in known for copy in side.optim_parameters().values()):
        zero_grad_all(side)  # no scaler has seen theirs
    return [loss]


def zero_grad_all(side: Side) -> None:
    """No gradients anywhere."""
    side.settle()
    side.handle.zero_grad()
    side.edited_gradients()


@action(1)
def new_optimizer(side: Side, choose: random.Random) -> list[Any]:
    """Another one, of the parameters that are trained now, or of some of them."""
    side.settle()
    copies = side.optim_parameters()
    if not copies:
        return []
    names = [name for name in copies if choose.random() < 0.8] or list(copies)
    parameters = [copies[name] for name in names]
    make = choose.choice(
        [
            lambda: torch.optim.SGD(parameters, lr=0.02),
            lambda: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=0.01),
            lambda: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3),
        ]
    )
    side.optimizer = make()
    side.scheduler = torch.optim.lr_scheduler.StepLR(side.optimizer, 2, 0.5) if choose.random() < 0.3 else None
    return []


@action(0.6)
def add_group(side: Side, choose: random.Random) -> list[Any]:
    """The parameters that the optimizer does not have."""
    if side.optimizer is not None and side.scheduler is None:
        side.settle()
        known = {id(p) for group in side.optimizer.param_groups for p in group["params"]}
        others = [copy for copy in side.optim_parameters().values() if id(copy) not in known]
        if others:
            side.optimizer.add_param_group({"params": others, "lr": 0.005})
    return []


@action(0.5)
def change_rate(side: Side, choose: random.Random) -> list[Any]:
    side.settle()
    for group in side.optimizer.param_groups if side.optimizer is not None else ():
        group["lr"] *= 0.5
    return []


@action(0.8)
def zero_grad(side: Side, choose: random.Random) -> list[Any]:
    """Through the wrapper, the model or the optimizer."""
    way = choose.choice(["wrapper", "model", "optimizer", "wrapper to zero"])
    side.settle()
    if way == "optimizer" and side.optimizer is not None:
        # what `synchronize` shows is theirs; a model's ``.grad`` that stays is handed over again
        side.model.zero_grad()
        side.optimizer.zero_grad()
    elif way == "model":
        side.model.zero_grad()
    else:
        side.handle.zero_grad(set_to_none=way == "wrapper")
    side.edited_gradients()
    return []


@action(0.6)
def edit_gradients(side: Side, choose: random.Random) -> list[Any]:
    side.settle()
    for parameter in side.model.parameters():
        if parameter.grad is not None:
            if choose.random() < 0.5:
                parameter.grad.mul_(0.5)
            else:
                parameter.grad = parameter.grad.clone() * 2
    side.edited_gradients()
    return []
