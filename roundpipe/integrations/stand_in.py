"""What a user's loss code gets in the place of the model.

The loss code of a trainer calls the model itself: ``compute_loss(model, inputs)``. A stand-in tells what it calls the
model with, before anything runs, and gives it, on the device, the outputs of the microbatch that has run. It is asked
for attributes, its class included, like the model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from roundpipe.core.contexts import contextmanager
from roundpipe.effects.places import CONTAINER, CONTAINERS, contents


class ModelStandIn:
    """Looks like ``model``; a call of it is ``answer(*args, **kwargs)``, and ``others`` are attributes of its own.

    It is equal to what answers: loss code asks so whether it has the wrapped model, which it then puts in the place of
    the plain one that it holds. Of another stand-in it has the model, and the attributes, too.
    """

    def __init__(self, model: Any, answer: Callable[..., Any], **others: Any) -> None:
        known = model.__dict__ if type(model) is ModelStandIn else {"_model": model}
        self.__dict__.update({**known, **others, "_answer": answer})

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.__dict__["_model"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_answer"](*args, **kwargs)

    forward = __call__

    def __eq__(self, other: object) -> bool:
        return self is other or self.__dict__["_answer"] is other

    def __hash__(self) -> int:
        return id(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_model"], name)


def model_of(model: Any) -> Any:
    """The model that a stand-in stands for, or the argument itself."""
    return model.__dict__["_model"] if type(model) is ModelStandIn else model


class ModelCalled(BaseException):
    """The loss code has called the model; no `Exception`, which it may catch."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.model_args = args
        self.model_kwargs = kwargs


class CalledAgain(RuntimeError):
    """The loss code has called the model more than once."""


def arguments_for_model(model: nn.Module, loss_code: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What ``loss_code(model)`` calls the model with first.

    Raises:
        CalledAgain: it does not call the model, but something else that computes.
    """

    def tell(*args: Any, **kwargs: Any) -> Any:
        raise ModelCalled(args, kwargs)

    try:
        loss_code(ModelStandIn(model, tell))
    except ModelCalled as call:
        return call.model_args, call.model_kwargs
    raise CalledAgain


def answer_once(model: nn.Module, outputs: Any) -> ModelStandIn:
    """Stands for a model that has run: gives its outputs to the first call."""
    left = [outputs]

    def give(*args: Any, **kwargs: Any) -> Any:
        if not left:
            raise CalledAgain
        return left.pop()

    return ModelStandIn(model, give)


@contextmanager
def attributes_kept(owner: Any, model: nn.Module, *, runs: bool = False) -> Iterator[None]:
    """What is done inside to the attributes of an object, and to the containers that they hold, is taken back.

    So is what is done to modules that it has beside the ``model``, such as a loss, and to their buffers; if the model
    ``runs``, to its buffers, too.
    """
    own = {*model.modules()}
    trees = ({*each.modules()} for each in vars(owner).values() if isinstance(each, nn.Module))
    modules = {module for tree in trees if own.isdisjoint(tree) for module in tree}
    attributes = [(each, dict(vars(each))) for each in (owner, *modules)]
    held = [(container, contents(container)) for _, values in attributes for container in _containers_in(values)]
    buffers = {buffer for module in (*modules, *([model] if runs else [])) for buffer in module.buffers()}
    values = [(buffer, buffer.detach().clone()) for buffer in buffers]
    try:
        yield
    finally:
        for each, before in attributes:
            for name in vars(each).keys() - before.keys():
                delattr(each, name)
            vars(each).update(before)
        for container, before in held:
            CONTAINER.write(container, None, before)
        with torch.no_grad():
            for buffer, value in values:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


MAX_ITEMS = 10_000
"""A container of more is taken for data, which loss code does not change: each batch would copy it."""


def _containers_in(values: dict[str, Any]) -> list[Any]:
    """Those among the values, and among the values of dicts that are."""
    found: dict[int, Any] = {}
    pending = deque(values.values())
    while pending:
        value = pending.popleft()
        if isinstance(value, CONTAINERS) and len(value) <= MAX_ITEMS and id(value) not in found:
            found[id(value)] = value
            pending += value.values() if isinstance(value, dict) else ()
    return list(found.values())
