"""Actions that call the model or the optimizer.

An action is a function of a side and a generator of choices, which are the same on both sides; it returns what is
compared.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import torch

import roundpipe
from roundpipe import RoundPipeRunConfig
from tests.actions.models import NUM_IDS, WIDTH, blocks_of, loss_of
from tests.actions.sides import Batch, Piped, Side, counted

Action = Callable[[Side, random.Random], list[Any]]
ACTIONS: dict[str, tuple[Action, float]] = {}
"""By name, with how often it is drawn."""


def action(weight: float = 1.0) -> Callable[[Action], Action]:
    """Register an action."""

    def register(function: Action) -> Action:
        ACTIONS[function.__name__] = function, weight
        return function

    return register


def dtype_of(side: Side) -> torch.dtype:
    """That of the model's weights."""
    return next(side.model.parameters()).dtype


def draw_batch(side: Side, choose: random.Random, *, is_whole: bool = False) -> Batch:
    """Inputs and labels of random sizes; ``is_whole``: one microbatch."""
    generator = torch.Generator().manual_seed(choose.randrange(2**31))
    samples, length = choose.randint(1, 7), choose.randint(2, 5)
    dtype = dtype_of(side)
    x = torch.randn(samples, length, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    if choose.random() < 0.15:
        x = torch.randint(0, NUM_IDS, (samples, length), generator=generator)
    label = torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    kwargs = {}
    if choose.random() < 0.25 and not isinstance(side.model, torch.nn.Sequential):
        kwargs["mask"] = torch.rand(samples, length, generator=generator) < 0.7
    number = 1 if is_whole else choose.choice([1, 2, 2, 3, 4])
    by_function = choose.random() < 0.15 and number <= samples  # the number is the function's business
    tiles = choose.choice([None, None, "off", 2, 3])
    return Batch((x,), kwargs, label, number, choose.choice([None, "stage", "layer"]), by_function, tiles)


def _mean(outputs: Any, label: Any) -> Any:
    return (outputs - label).abs().mean()


def _two(outputs: Any, label: Any) -> Any:
    return [loss_of(outputs, label), outputs.square().mean()]


def _penalty(side: Side) -> Callable[[Any, Any], Any]:
    model = side.model

    def loss_fn(outputs: Any, label: Any) -> Any:
        return loss_of(outputs, label) + 0.01 * sum(weight.square().sum() for weight in model.parameters())

    return loss_fn


def _loss_with_label_graph(outputs: Any, label: Any) -> Any:
    return loss_of(outputs, label * 0.5)


@action(6)
def train(side: Side, choose: random.Random) -> list[Any]:
    batch = draw_batch(side, choose)
    loss_fn: Any = choose.choice([loss_of, loss_of, _mean, _two, _penalty(side)])
    return list(_flat(side.train(batch, loss_fn, choose.random() < 0.3)))


def _counted_mean(outputs: Any, label: Any) -> Any:
    weight = counted(label)
    return (outputs - label).abs().sum() / weight.clamp(min=1), weight


def _draw_reduction(batch: Batch, choose: random.Random) -> Any:
    """A loss function for how the microbatches' losses are to make up the batch's."""
    batch.scope = choose.choice([None, "microbatch", "batch"])
    batch.reduction = choose.choice(["mean", "mean", None])
    if batch.reduction and choose.random() < 0.4 and int(counted(batch.label)):
        return _counted_mean
    return choose.choice([loss_of, _mean, _two])


@action(2)
def train_reduced(side: Side, choose: random.Random) -> list[Any]:
    """A mean over microbatches, or a loss of the whole batch."""
    batch = draw_batch(side, choose)
    loss_fn = _draw_reduction(batch, choose)
    return list(_flat(side.train(batch, loss_fn, choose.random() < 0.3)))


@action(1)
def evaluate_loss(side: Side, choose: random.Random) -> list[Any]:
    side.settle()
    batch = draw_batch(side, choose)
    loss_fn = _draw_reduction(batch, choose)
    was = side.model.training
    side.handle.eval()
    loss = side.evaluate(batch, loss_fn)
    side.handle.train(was)
    return list(_flat(loss))


@action(1)
def train_inputs(side: Side, choose: random.Random) -> list[Any]:
    """Gradients for inputs and labels, sometimes of a graph in front; the same input may be used again."""
    batch = draw_batch(side, choose)
    name = choose.choice(["a", "b"])
    x = side.kept.get(name)
    if x is None or x.dtype != dtype_of(side):
        x = side.kept[name] = torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(7)).to(dtype_of(side))
        x.requires_grad_()
    batch.args, batch.kwargs = (x * 2 if choose.random() < 0.4 else x,), {}
    batch.label = x.detach().mean(1)
    loss_fn = loss_of
    if choose.random() < 0.4:
        batch.label, loss_fn = batch.label.requires_grad_(), _loss_with_label_graph
    how = choose.choice(["forward_backward", "forward", "twice", "label only"])
    if how == "label only":
        batch.args, batch.label = (x.detach(),), x.mean(1)
    if how in ("forward", "twice"):
        batch.num_microbatches = 1  # a model in parts splits part by part
    if how in ("forward_backward", "label only"):
        seen = list(_flat(side.train(batch, loss_fn, False)))
    else:
        outputs = side.forward(batch)
        if how == "twice":
            outputs = outputs + side.forward(batch)
        loss = loss_fn(outputs, batch.label)
        loss.backward()
        side.collect()
        seen = [loss.detach()]
    return [*seen, x.grad, batch.label.grad if batch.label.is_leaf else None]


@action(2)
def forward_and_backward(side: Side, choose: random.Random) -> list[Any]:
    batch = draw_batch(side, choose, is_whole=True)
    outputs = side.forward(batch)
    loss = loss_of(outputs, batch.label)
    if choose.random() < 0.2:  # a second model behind it
        loss = loss + side.forward(batch).square().sum()
    loss.backward()
    side.collect()
    return [outputs.detach(), loss.detach()]


@action(1.5)
def infer(side: Side, choose: random.Random) -> list[Any]:
    """In evaluation mode or not, without gradients."""
    side.settle()
    batch = draw_batch(side, choose, is_whole=True)
    was, mode = side.model.training, choose.random() < 0.3
    side.handle.train(mode)
    context = choose.choice([torch.no_grad, torch.inference_mode])
    with context():
        outputs = side.forward(batch)
    side.handle.train(was)
    return [outputs.clone()]


@action(0.7)
def infer_packed(side: Side, choose: random.Random) -> list[Any]:
    """Outputs that are left in pieces."""
    side.settle()
    batch = draw_batch(side, choose)
    was = side.model.training
    side.handle.eval()
    with torch.no_grad():
        if isinstance(side, Piped):
            config = RoundPipeRunConfig(num_microbatch=batch.num_microbatches, merge_output=False)
            packed = side.pipe(*batch.args, **batch.kwargs, roundpipe_run_config=config)
            packed.synchronize()
        else:
            packed = [side.forward(batch)]
    side.handle.train(was)
    return [torch.cat(list(packed))]


@action(0.7)
def train_autocast(side: Side, choose: random.Random) -> list[Any]:
    """What is rounded to bfloat16 is compared roughly."""
    batch = draw_batch(side, choose)
    with torch.autocast("cpu", dtype=torch.bfloat16) if dtype_of(side) is torch.float32 else contextlib.nullcontext():
        result = side.train(batch, lambda outputs, label: loss_of(outputs.to(label.dtype), label), False)
    side.kept["is coarse"] = side.kept.get("is coarse", False) or dtype_of(side) is torch.float32
    return list(_flat(result))


@action(0.8)
def train_on_features(side: Side, choose: random.Random) -> list[Any]:
    """A loss that reads what a forward hook collected."""
    features: dict[str, Any] = {}
    block = choose.choice(blocks_of(side.model))
    is_detached = choose.random() < 0.3

    def collect(module: Any, args: Any, output: Any) -> None:
        features["x"] = output.detach() if is_detached else output

    handle = block.register_forward_hook(collect)
    batch = draw_batch(side, choose)
    try:
        result = side.train(
            batch, lambda outputs, label: loss_of(outputs, label) + 0.1 * features["x"].square().mean(), False
        )
    finally:
        handle.remove()
    return list(_flat(result))


@action(0.5)
def train_counting(side: Side, choose: random.Random) -> list[Any]:
    """A loss that knows the number of microbatches."""
    batch = draw_batch(side, choose)
    number = min(batch.num_microbatches, len(batch.args[0]))
    of = roundpipe.num_microbatches if isinstance(side, Piped) else lambda: number
    return list(_flat(side.train(batch, lambda outputs, label: loss_of(outputs, label) / of(), True)))


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


@action(1.0)
def synchronize(side: Side, choose: random.Random) -> list[Any]:
    side.settle()
    return list(side.observe().values())


@action(0.3)
def seed(side: Side, choose: random.Random) -> list[Any]:
    torch.manual_seed(choose.randrange(100))
    return []


def _flat(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from _flat(each)
    elif value is not None:
        yield value
