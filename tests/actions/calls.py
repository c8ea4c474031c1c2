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
    splitting: Any = choose.choice([None] * 4 + ["function", "specs"])
    if splitting == "function" and number > samples:  # the number is the function's business
        splitting = None
    tiles = choose.choice([None, None, "off", 2, 3])
    return Batch((x,), kwargs, label, number, choose.choice([None, "stage", "layer"]), splitting, tiles)


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


def _counted_two(outputs: Any, label: Any) -> Any:
    loss, weight = _counted_mean(outputs, label)
    return [loss, outputs.square().mean()], weight


def _draw_reduction(batch: Batch, choose: random.Random) -> Any:
    """A loss function for how the microbatches' losses are to make up the batch's."""
    batch.scope = choose.choice([None, "microbatch", "batch"])
    batch.reduction = choose.choice(["mean", "mean", None])
    if batch.reduction and choose.random() < 0.4 and int(counted(batch.label)):
        return choose.choice([_counted_mean, _counted_two])
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


@action(0.8)
def generate(side: Side, choose: random.Random) -> list[Any]:
    """By a method of the model that calls it again and again."""
    side.settle(explicit=choose.random() < 0.5)
    batch = draw_batch(side, choose, is_whole=True)
    if isinstance(side.model, torch.nn.Sequential) or not batch.args[0].is_floating_point():
        return []
    was = side.model.training
    side.handle.train(choose.random() < 0.2)
    with choose.choice([torch.no_grad, torch.inference_mode])():
        rows = side.handle.generate(batch.args[0], choose.randint(1, 3))
    side.handle.train(was)
    return [rows.clone()]


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


@action(1.0)
def synchronize(side: Side, choose: random.Random) -> list[Any]:
    side.settle()
    return list(side.observe().values())


@action(0.3)
def seed(side: Side, choose: random.Random) -> list[Any]:
    """A call leaves Python's random numbers as they were; of torch's it may draw a seed."""
    torch.manual_seed(choose.randrange(100))
    random.seed(choose.randrange(100))
    result = side.train(draw_batch(side, choose), loss_of, False)
    return [*_flat(result), random.random()]


def _flat(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from _flat(each)
    elif value is not None:
        yield value
