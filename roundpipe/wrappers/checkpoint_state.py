"""The parts of a checkpoint that are not weights, in a form that any process reads: plain and by name.

Invariant: what is here can be written by ``torch.save`` and read by ``torch.load(weights_only=True)``, which
runs no code, and mentions neither devices nor positions of parameters.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe.core.errors import ConfigError, enumerated
from roundpipe.runtime.weights.master_weights import ParameterPair

_LEAVES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


# Plain values


def shared(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the host; a part of a larger memory alone, since all of it would be written."""
    tensor = tensor.detach().cpu()
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor on the host."""
    return tensor.detach().to("cpu", copy=True)


def plain(value: Any, where: str, keep: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A value in types that ``torch.load(weights_only=True)`` reads back; ``keep`` is applied to tensors."""
    kind = type(value)
    if kind in _LEAVES:
        return value
    if isinstance(value, torch.Tensor) and type(value.detach()) is torch.Tensor and not value.is_meta:
        return keep(value)
    if kind in (list, tuple):
        return kind(plain(item, f"{where}[{index}]", keep) for index, item in enumerate(value))
    if kind is set:
        return {plain(item, where, keep) for item in value}
    if isinstance(value, dict) and kind in (dict, OrderedDict, Counter):
        items = {plain(k, f"a key of {where}", keep): plain(v, f"{where}[{k!r}]", keep) for k, v in value.items()}
        return items if kind is dict else kind(items)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and type(value.item()) in _LEAVES:
        return value.item()
    raise ConfigError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which can't be in a checkpoint: only numbers, strings, "
        "bytes, None, plain tensors, dtypes, devices, and dicts, lists, tuples and sets of them"
    )


def raise_misfit(what: str, problems: Mapping[str, Iterable[str]]) -> None:
    """Raise a `ConfigError` with the first names of each problem, if there is one."""
    parts = []
    for problem, subjects in problems.items():
        names = list(subjects)
        if names:
            parts.append(f"{len(names)} {problem}: {enumerated(names)}")
    if parts:
        raise ConfigError(f"{what}; {'; '.join(parts)}")


# Optimizer state by name


def names_of_copies(pairs: Sequence[ParameterPair]) -> dict[nn.Parameter, str]:
    """The first name of each of the optimizer's parameters, also of those frozen since."""
    return {pair.copy: pair.names[0] for pair in pairs if pair.copy is not None}


def copies_of_another_dtype(pairs: Sequence[ParameterPair]) -> dict[str, nn.Parameter]:
    """The optimizer's parameters that the model's weights don't tell exactly."""
    return {
        pair.names[0]: pair.copy for pair in pairs if pair.copy is not None and pair.copy.dtype != pair.parameter.dtype
    }


def _group_names(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> list[list[str]]:
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if parameter not in names:
                raise ConfigError(
                    f"optimizer.param_groups[{group_index}]['params'][{index}], of shape {list(parameter.shape)}, is "
                    "not the model's; make the optimizer from model.optim_parameters(), and save others in extra="
                )
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def by_name(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    """The optimizer's state with names of parameters in place of indices."""
    packed = optimizer.state_dict()
    name_of: dict[Any, str] = {}
    groups = []
    for group, group_names in zip(packed["param_groups"], _group_names(optimizer, names), strict=True):
        name_of.update(zip(group["params"], group_names, strict=True))
        groups.append({**group, "params": group_names})
    state = {name_of.get(key, key): value for key, value in packed["state"].items()}
    return {**packed, "state": state, "param_groups": groups}


def by_index(
    saved: Mapping[str, Any], optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], folder: Path
) -> dict[str, Any]:
    """What `by_name` saved, with this optimizer's indices; groups correspond by position, parameters by name."""
    grouped = _group_names(optimizer, names)
    what = f"the optimizer in the checkpoint at {folder} does not fit the one given"
    if len(saved["param_groups"]) != len(grouped):
        raise ConfigError(f"{what}: it has {len(saved['param_groups'])} parameter groups, the other {len(grouped)}")
    index_of: dict[Any, Any] = {}
    groups = []
    for index, (group, own) in enumerate(zip(saved["param_groups"], grouped, strict=True)):
        missing, unexpected = set(own) - set(group["params"]), set(group["params"]) - set(own)
        raise_misfit(
            f"{what}, in group {index}",
            {
                "parameters are missing in it": sorted(missing),
                "of its parameters are not in the other": sorted(unexpected),
            },
        )
        indices = {name: len(index_of) + position for position, name in enumerate(own)}
        index_of.update(indices)
        groups.append({**group, "params": list(indices.values())})
        if "param_names" in group:
            groups[-1]["param_names"] = optimizer.param_groups[index].get("param_names", group["param_names"])
    state = {index_of.get(key, key): value for key, value in saved["state"].items()}
    return {**saved, "state": state, "param_groups": groups}
