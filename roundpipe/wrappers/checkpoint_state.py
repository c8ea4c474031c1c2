"""What a checkpoint holds beside weights: plain values, optimizer state by the names of parameters, and their checks.

Plain values can be written by ``torch.save`` and read by ``torch.load(weights_only=True)``, which runs no code.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any

import torch

from roundpipe.core.errors import CheckpointError, CheckpointMisfitError, ConfigError, enumerated
from roundpipe.runtime.ranks.turns import Ranks
from roundpipe.runtime.weights.parameter_pair import ParameterPair

FORMAT = 1
"""Raised when an older version could not read `STATE_FILE` any more."""

OBJECTS = ("optimizer", "scheduler", "scaler")

_FIELDS: dict[str, type | UnionType] = {
    "format": int,
    "optimizer": dict | None,
    "optimizer_class": str,
    "optimizer_weights": dict,
    "scheduler": object,
    "scaler": object,
    "module_state": dict,
    "random": dict,
    "step": int | None,
    "extra": object,
}
_LATER_FIELDS: dict[str, type | UnionType] = {"scheduler_class": str, "scaler_class": str}
"""Those that the first versions did not write; nor did they write checksums."""

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


def raise_misfit(what: str, problems: Mapping[str, Sequence[str]]) -> None:
    """Raise a `CheckpointMisfitError` with the first names of each problem, if there is one."""
    parts = [f"{len(names)} {problem}: {enumerated(names)}" for problem, names in problems.items() if names]
    if parts:
        raise CheckpointMisfitError(f"{what}; {'; '.join(parts)}")


# Optimizer state by name


def _group_names(optimizer: torch.optim.Optimizer, pairs: Sequence[ParameterPair]) -> list[list[str]]:
    """The first name of each parameter, also of those frozen since."""
    names = {pair.copy: pair.names[0] for pair in pairs if pair.copy is not None}
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if parameter not in names:
                raise ConfigError(
                    f"optimizer.param_groups[{group_index}]['params'][{index}], of shape {list(parameter.shape)}, is "
                    "not the model's; make the optimizer from model.optim_parameters(), and save others in extra="
                )
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def by_name(optimizer: torch.optim.Optimizer, pairs: Sequence[ParameterPair]) -> dict[str, Any]:
    """The optimizer's state with names of parameters in place of indices."""
    packed = optimizer.state_dict()
    name_of: dict[Any, str] = {}
    groups = []
    for group, group_names in zip(packed["param_groups"], _group_names(optimizer, pairs), strict=True):
        name_of.update(zip(group["params"], group_names, strict=True))
        groups.append({**group, "params": group_names})
    state = {name_of.get(key, key): value for key, value in packed["state"].items()}
    return {**packed, "state": state, "param_groups": groups}


def whole_state(
    optimizer: torch.optim.Optimizer | None, pairs: Sequence[ParameterPair], ranks: Ranks | None
) -> tuple[dict[str, Any] | None, dict[str, torch.Tensor]]:
    """The optimizer's state by name, and those of its weights that the model has in another dtype.

    Where each rank has a shard, all ranks call it, and rank 0 gets whole tensors.
    """
    packed = None if optimizer is None else by_name(optimizer, pairs)
    weights: dict[str, torch.Tensor] = {
        pair.names[0]: pair.copy for pair in pairs if pair.copy is not None and pair.copy.dtype != pair.parameter.dtype
    }
    if ranks is None or ranks.shard is None:
        return packed, weights
    state = {} if packed is None else {key: dict(value) for key, value in packed["state"].items()}
    shapes = {pair.names[0]: pair.parameter.shape for pair in pairs}
    parts: list[tuple[dict[str, torch.Tensor], str, torch.Size]] = [(weights, name, shapes[name]) for name in weights]
    for name in sorted(state.keys() & shapes.keys()):
        moments = sorted(ranks.shard.moments(state[name], shapes[name].numel()))
        parts += [(state[name], key, shapes[name]) for key in moments]
    whole = ranks.join([values[key].detach() for values, key, _ in parts], [shape.numel() for *_, shape in parts])
    for (values, key, shape), tensor in zip(parts, whole, strict=False):  # on other ranks there are none
        values[key] = tensor.view(shape)
    return (None if packed is None else {**packed, "state": state}), weights


def by_index(
    saved: Mapping[str, Any], optimizer: torch.optim.Optimizer, pairs: Sequence[ParameterPair], folder: Path
) -> dict[str, Any]:
    """What `by_name` saved, with this optimizer's indices; groups correspond by position, parameters by name."""
    grouped = _group_names(optimizer, pairs)
    what = f"the optimizer in the checkpoint at {folder} does not fit the one given"
    if len(saved["param_groups"]) != len(grouped):
        raise CheckpointMisfitError(
            f"{what}: it has {len(saved['param_groups'])} parameter groups, the other {len(grouped)}"
        )
    _check_fields(saved, pairs, what)
    index_of: dict[Any, Any] = {}
    groups = []
    for index, (group, own) in enumerate(zip(saved["param_groups"], grouped, strict=True)):
        problems = {
            "parameters are missing in it": sorted(set(own) - set(group["params"])),
            "of its parameters are not in the other": sorted(set(group["params"]) - set(own)),
        }
        raise_misfit(f"{what}, in group {index}", problems)
        indices = {name: len(index_of) + position for position, name in enumerate(own)}
        index_of.update(indices)
        groups.append({**group, "params": list(indices.values())})
        if "param_names" in group:
            groups[-1]["param_names"] = optimizer.param_groups[index].get("param_names", group["param_names"])
    pair_of = {pair.names[0]: pair for pair in pairs}
    state = {
        index_of.get(key, key): _part(pair_of[key], value) if key in pair_of else value
        for key, value in saved["state"].items()
    }
    return {**saved, "state": state, "param_groups": groups}


def _part(pair: ParameterPair, state: Mapping[str, Any]) -> Mapping[str, Any]:
    return state if pair.shard is None else pair.shard.of_state(state, pair.parameter.shape)


def _check_fields(saved: Mapping[str, Any], pairs: Sequence[ParameterPair], what: str) -> None:
    """One parameter's state has the fields that others of its shape and group have.

    And a field that has the shape of its parameter for one, as moments have, has it for all, or that of a sum over some
    of its dimensions, which are 1 then: Adafactor's sums over columns have it whole where there is one column.
    """
    shapes = {pair.names[0]: pair.parameter.shape for pair in pairs}
    state = {name: values for name, values in saved["state"].items() if name in shapes and values}
    like: set[Any] = set()
    missing, wrong = [], []
    for name, values in state.items():
        tensors = {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
        like |= {key for key, value in tensors.items() if value.numel() > 1 and value.shape == shapes[name]}
    for group in saved["param_groups"]:
        own = [name for name in group["params"] if name in state]
        for name in own:
            expected = {key for other in own if shapes[other] == shapes[name] for key in state[other]}
            missing += [f"{key} of {name}" for key in expected - state[name].keys()]
            odd = [key for key in like & state[name].keys() if not _has_shape(state[name][key], shapes[name])]
            wrong += [f"{key} of {name}" for key in odd]
    problems = {"fields are missing": missing, "fields have another shape than their parameter": wrong}
    raise_misfit(what, problems)


def _has_shape(value: Any, shape: torch.Size) -> bool:
    if not isinstance(value, torch.Tensor):
        return value is None
    return value.ndim == len(shape) and all(size in (1, whole) for size, whole in zip(value.shape, shape, strict=True))


# Checks


def read_state(path: Path) -> dict[str, Any]:
    """The content of a `STATE_FILE`, with all of its fields.

    Raises:
        CheckpointError: it can't be read, is of a newer version, or is no state.
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error
    if not isinstance(state, dict):
        state = {}
    number = state.get("format")
    if isinstance(number, int) and number > FORMAT:
        raise CheckpointError(
            f"{path} has format {number}, this version reads up to {FORMAT}; install a newer roundpipe"
        )
    kinds = _FIELDS if is_of_first_version(state) else _FIELDS | _LATER_FIELDS
    wrong = [name for name, kind in kinds.items() if name not in state or not isinstance(state[name], kind)]
    if not wrong:
        wrong = [f"optimizer_weights[{k!r}]" for k, v in state["optimizer_weights"].items() if not _is_tensor(v)]
        wrong += _wrong_fields(state["optimizer"])
    if wrong:
        raise CheckpointError(f"{path} is damaged: wrong or missing {enumerated(wrong)}; load another checkpoint")
    return state


def is_of_first_version(state: Mapping[str, Any]) -> bool:
    """Whether the fields are exactly those that versions without checksums wrote."""
    return state.keys() == _FIELDS.keys()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _wrong_fields(optimizer: Mapping[str, Any] | None) -> Iterator[str]:
    """Where the state of an optimizer is not that of one, whatever its class."""
    if optimizer is None:
        return
    state, groups = optimizer.get("state"), optimizer.get("param_groups")
    if not isinstance(state, dict):
        yield "optimizer['state']"
    if not isinstance(groups, list):
        yield "optimizer['param_groups']"
        return
    names = set()
    for index, group in enumerate(groups):
        params = group.get("params") if isinstance(group, dict) else None
        if isinstance(params, list) and all(isinstance(name, str) for name in params):
            names.update(params)
        else:
            yield f"optimizer['param_groups'][{index}]"
    if isinstance(state, dict):
        yield from (f"optimizer['state'][{n!r}]" for n in names if not isinstance(state.get(n, {}), dict))


def misfits(own: Any, saved: Any, where: str) -> list[str]:
    """Values inside a state that are of another kind than those of the object that is to take it over."""
    if own is None or saved is None:
        return []
    if isinstance(own, Mapping) and isinstance(saved, Mapping):
        pairs = [(own[key], saved[key], f"{where}[{key!r}]") for key in own if key in saved]
    elif isinstance(own, list | tuple) and isinstance(saved, list | tuple):
        pairs = [(*both, f"{where}[{index}]") for index, both in enumerate(zip(own, saved, strict=False))]
    elif isinstance(saved, type(own)) or all(isinstance(v, int | float | complex | torch.Tensor) for v in (own, saved)):
        return []
    else:
        return [f"{where} ({type(saved).__name__}, it has {type(own).__name__})"]
    return [problem for pair in pairs for problem in misfits(*pair)]


def missing_fields(own: Any, saved: Any) -> list[str]:
    """Public fields of an object that a state saved by another class, or nobody knows which, does not have."""
    if not isinstance(own, Mapping) or not isinstance(saved, Mapping):
        return [] if isinstance(saved, type(own)) else ["state"]
    return [str(key) for key, value in own.items() if value is not None and key not in saved and str(key)[:1] != "_"]
