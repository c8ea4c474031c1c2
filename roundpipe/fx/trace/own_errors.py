"""Tells an error of the model's own from one of its trace: the forward is run once."""

from __future__ import annotations

import builtins
from typing import Any

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.errors import TraceCause, TraceError
from roundpipe.core.random_state import preserved_random_state
from roundpipe.core.storages import bytes_of
from roundpipe.effects.run_once import FirstCall
from roundpipe.fx.locations import raised_at, with_source

MAX_BYTES = 1 << 30
"""Of weights; the forward of a larger model on the CPU may take minutes, so it is not run to find out."""


def as_the_models_own(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], error: TraceError
) -> TraceError | None:
    """What to raise in place of a trace's error if eager raises the same; None if it does not, or is not asked.

    The forward of a model of up to `MAX_BYTES` is run once, and what it changes is taken back.
    """
    cause = error.__cause__
    if not isinstance(cause, Exception) or getattr(builtins, type(cause).__name__, None) is not type(cause):
        return None
    tensors = [*model.parameters(), *model.buffers()]
    without_data = any(tensor.is_meta for tensor in tensors)
    if not without_data and sum(map(bytes_of, tensors)) > MAX_BYTES:
        return None
    own = _exception_of(model, args, kwargs, without_data)
    if type(own) is not type(cause):
        return None
    if without_data and str(own) != str(cause):  # with data, whatever is raised would be by each call
        return None
    place = raised_at(own)
    words = (
        f"the forward of {type(model).__name__} raises {type(own).__name__} at {with_source(place) or 'its call'}: "
        f"{str(own).strip()}. Plain PyTorch raises it, too, given these arguments (of one microbatch, if the batch was "
        "split): correct them, or the model"
    )
    result = TraceError(words, TraceCause.MODEL_ERROR, error.facts)
    result.__cause__ = own
    return result


def _exception_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], without_data: bool
) -> Exception | None:
    def copy_of(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.detach().to("meta") if without_data else tensor.detach().clone()
        return copy.requires_grad_(tensor.requires_grad)

    args, kwargs = trees.map_tensors((args, kwargs), copy_of)
    before = FirstCall(model)
    weights = [(parameter, parameter.data, parameter.detach().clone()) for parameter in model.parameters()]
    try:
        with preserved_random_state():
            model(*args, **kwargs)
    except Exception as error:
        return error
    finally:
        before.restore()
        for parameter, data, original in weights:  # a forward may write them, also where no version tells
            parameter.data = data
            if not without_data:
                data.copy_(original)
    return None
