"""Gives an optimizer that was made from a model's own parameters the optimizer's copies of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from roundpipe.core.errors import ConfigError
from roundpipe.runtime.weights.master_weights import ParameterPair


def adopt(optimizer: torch.optim.Optimizer, pairs: Sequence[ParameterPair]) -> None:
    """Put the copies in the place of the parameters, and the optimizer's state under them.

    Raises:
        ConfigError: it is no optimizer, or has none of the parameters.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"adopt() takes a torch.optim.Optimizer, got {type(optimizer).__name__} as optimizer")
    copies = {pair.parameter: pair.copy for pair in pairs if pair.copy is not None and pair.parameter.requires_grad}
    known = {*copies, *copies.values()}
    if not any(parameter in known for group in optimizer.param_groups for parameter in group["params"]):
        raise ConfigError(
            f"adopt(): the {type(optimizer).__name__} has none of the model's trainable parameters; make it from "
            "the parameters of this model, or from optim_parameters()"
        )
    _put_copies(optimizer, [pair for pair in pairs if pair.parameter in copies])


def adopt_own(optimizer: torch.optim.Optimizer, pairs: Sequence[ParameterPair]) -> None:
    """The same of an optimizer that steps, as far as it has parameters of the model's own, and not the copies, too."""
    given = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    own = [pair for pair in pairs if pair.parameter in given and pair.copy is not None and pair.copy not in given]
    if own:
        _put_copies(optimizer, own)


def _put_copies(optimizer: torch.optim.Optimizer, pairs: Sequence[ParameterPair]) -> None:
    copies = {pair.parameter: pair.copy for pair in pairs if pair.copy is not None}
    for group in optimizer.param_groups:  # in place: LBFGS has the list itself
        group["params"][:] = [copies.get(parameter, parameter) for parameter in group["params"]]
    for parameter, copy in copies.items():
        if parameter in optimizer.state:
            state = optimizer.state.pop(parameter)
            optimizer.state[copy] = {name: _of_copy(value, parameter, copy) for name, value in state.items()}
    for pair in pairs:
        if pair.shard is not None and pair.copy is not None and pair.copy in optimizer.state:
            optimizer.state[pair.copy] = pair.shard.of_state(optimizer.state[pair.copy], pair.parameter.shape)


def _of_copy(value: Any, parameter: torch.Tensor, copy: torch.Tensor) -> Any:
    """An entry of the state: moments, which have the parameter's dtype, get the copy's."""
    is_moment = isinstance(value, torch.Tensor) and value.ndim > 0 and value.dtype == parameter.dtype
    return value.to(copy.device, copy.dtype) if is_moment else value
