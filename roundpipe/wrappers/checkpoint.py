"""Checkpoints: everything that training needs to go on as if it had never stopped.

    model.safetensors, or shards and an index    `state_dict()` with its own keys; each tied weight once
    config.json, generation_config.json          for models that have them, so that `from_pretrained(dir)` works;
                                                 not with PEFT's adapters, which have `save_pretrained`
    training_state.pt                            plain containers and tensors: optimizer, scheduler, scaler,
                                                 random number generators, step, extra

Invariant: nothing in a checkpoint depends on the devices. Optimizer state is kept by the names of
parameters, random state is that of the host (and of each accelerator, taken up as far as there are as many).

What is not weights can be written by ``torch.save`` and read by ``torch.load(weights_only=True)``, which runs no code.
"""

from __future__ import annotations

import copy
import logging
import operator
import os
import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe.core.errors import CheckpointError, CheckpointNotFoundError, ConfigError, enumerated
from roundpipe.core.random_state import portable_random_state, restore_random_state
from roundpipe.runtime.weights.master_weights import ParameterPair
from roundpipe.wrappers import checkpoint_files as files
from roundpipe.wrappers.session import CheckpointWrite, Session

logger = logging.getLogger(__name__)

FORMAT = 1
"""Raised when an older version could not read ``training_state.pt`` any more."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What the caller of a load gets back."""

    step: int | None
    """As given to the save."""
    extra: Any
    """As given to the save; numpy scalars have become Python numbers."""


_OBJECTS = ("optimizer", "scheduler", "scaler")
_LEAVES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def save(
    session: Session,
    dir: str | os.PathLike[str],
    objects: Mapping[str, Any],
    step: int | None,
    extra: Any,
    is_async: bool,
) -> CheckpointWrite:
    """See `RoundPipe.save_checkpoint`; ``objects`` are the optimizer, the scheduler and the scaler by name."""
    target, pairs = session.shown, session.optimizer.parameter_pairs()
    if step is not None:
        try:
            step = operator.index(step)
        except TypeError:
            raise ConfigError(f"step is {step!r}; give an int, or None") from None
    folder = _begin(session, dir, objects)
    files.check_replaceable(folder)
    weights = target.state_dict()
    tensors = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
    for name, tensor in tensors.items():
        files.check_storable(name, tensor)
    tensors, aliases = _once_each(tensors, target)
    optimizer, scheduler, scaler = (objects[name] for name in _OBJECTS)
    parts: dict[str, Any] = {
        "optimizer": None if optimizer is None else _by_name(optimizer, pairs),
        "optimizer_class": type(optimizer).__qualname__,
        "optimizer_weights": {
            pair.names[0]: pair.copy
            for pair in pairs
            if pair.copy is not None and pair.copy.dtype != pair.parameter.dtype
        },
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "module_state": {name: value for name, value in weights.items() if name not in tensors | aliases},
        "random": portable_random_state(),
        "step": step,
        "extra": extra,
    }
    keep = _copied if is_async else _shared
    state = {"format": FORMAT, **{name: _plain(part, name, keep) for name, part in parts.items()}}
    if is_async:
        tensors = {name: _copied(tensor) for name, tensor in tensors.items()}
    configs = _configs(target)

    def write() -> None:
        """Hold nothing of the model but, unless copied, its tensors."""
        with files.replacing(folder) as new:
            files.write_weights(new, tensors, aliases)
            for config in configs:
                try:
                    config.save_pretrained(new)
                except ValueError as error:  # transformers refuses to write what it reads without complaint
                    logger.warning("the checkpoint %s is without a %s: %s", folder, type(config).__name__, error)
            files.write_state(new, state)

    if is_async:
        return session.writer.start(write, str(folder))
    write()
    done = CheckpointWrite()
    done.set_result(None)
    return done


def _begin(session: Session, dir: str | os.PathLike[str], objects: Mapping[str, Any]) -> Path:
    """Wait for what is running; the folder itself: a link to it stays a link when the folder is replaced."""
    for name, value in objects.items():
        if name == "optimizer" and not isinstance(value, torch.optim.Optimizer | None):
            raise ConfigError(f"optimizer is {type(value).__name__}; give a torch.optim.Optimizer, or None")
        if value is not None and not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            raise ConfigError(
                f"{name} is {type(value).__name__}, which has no state_dict and load_state_dict; give one that has them"
            )
    files.safetensors_library()
    session.writer.wait()
    session.optimizer.synchronize()
    if not isinstance(dir, str | os.PathLike) or not os.fspath(dir):
        raise ConfigError(f"dir is {dir!r}; give the path of a folder")
    return Path(os.path.realpath(dir))


def _once_each(
    tensors: Mapping[str, torch.Tensor], target: nn.Module
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Each tensor under one name, and the other names of tied ones.

    Where the model says which name it makes from the other (transformers does), that one is left out.
    """
    derived = getattr(target, "all_tied_weights_keys", None) or getattr(target, "_tied_weights_keys", None) or ()
    chosen: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for names in _groups(tensors):
        own = [name for name in names if not any(re.search(pattern, name) for pattern in derived)]
        first = (own or names)[0]
        chosen[first] = tensors[first]
        aliases.update((name, first) for name in names if name != first)
    return chosen, aliases


def _groups(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    groups: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        groups.setdefault(memory if tensor.numel() and not tensor.is_meta else name, []).append(name)
    return list(groups.values())


def _configs(target: nn.Module) -> list[Any]:
    """Copies of the model's configurations that know how to write themselves.

    A model with adapters has the configuration of its base and other keys: `from_pretrained` would start at random.
    """
    if hasattr(target, "peft_config"):
        return []
    found: list[Any] = [copy.deepcopy(getattr(target, name, None)) for name in ("config", "generation_config")]
    config = found[0]
    if hasattr(config, "save_pretrained"):
        config.architectures = [type(target).__name__]
        if hasattr(config, "dtype"):
            config.dtype = next((p.dtype for p in target.parameters() if p.is_floating_point()), config.dtype)
    return [config for config in found if callable(getattr(config, "save_pretrained", None))]


# Loading


def load(session: Session, dir: str | os.PathLike[str], objects: Mapping[str, Any], weights_only: bool) -> Checkpoint:
    """See `RoundPipe.load_checkpoint` and `save`; everything is checked before anything is changed."""
    pairs = session.optimizer.parameter_pairs()
    folder = _begin(session, dir, objects)
    objects = {name: value for name, value in objects.items() if value is not None}
    if weights_only and objects:
        raise ConfigError(f"weights_only=True does not restore {', '.join(objects)}; leave it out")
    content = files.read_whole(folder, lambda whole: (*files.read_weights(whole), _read_state(whole, weights_only)))
    if content is None:
        raise CheckpointNotFoundError(f"there is no checkpoint at {folder}; give the folder that save_checkpoint wrote")
    weights, aliases, state = content
    if not weights_only:
        _check_parts(objects, state, folder)
    values = _fit(session.shown.state_dict(), {**weights, **state["module_state"]}, aliases, folder)
    optimizer = objects.get("optimizer")
    if optimizer is not None:
        kind, saved = type(optimizer).__qualname__, state["optimizer_class"]
        if kind != saved:  # it may read the state, as a subclass does; most others fail at their next step
            message = "the checkpoint at %s has the state of an optimizer %s, and is loaded into one of class %s"
            logger.warning(message, folder, saved, kind)
        state["optimizer"] = _by_index(state["optimizer"], optimizer, pairs, folder)
    masters = state["optimizer_weights"]
    if masters and not weights_only:
        list(session.optimizer.optim_named_parameters())  # makes the copies that are missing
        own = {pair.names[0]: pair.parameter for pair in pairs}
        wrong = [name for name, copy in masters.items() if name not in own or own[name].shape != copy.shape]
        problems = {"copies of the optimizer have no parameter": wrong}
        _raise_misfit(f"the checkpoint at {folder} does not fit the model", problems)

    session.shown.load_state_dict(values)
    session.optimizer.refresh()
    _set_copies(masters, pairs)
    if weights_only:
        return Checkpoint(None, None)
    session.optimizer.zero_grad()
    # Cloned, because what is loaded is mapped from a file that will be replaced.
    for name, value in objects.items():
        value.load_state_dict(_plain(state[name], name, torch.clone))
    restore_random_state(state["random"])
    return Checkpoint(state["step"], _plain(state["extra"], "extra", torch.clone))


def _read_state(folder: Path, weights_only: bool) -> dict[str, Any]:
    path = folder / files.STATE_FILE
    if not path.is_file():
        if weights_only:
            return {"module_state": {}, "optimizer_weights": {}}
        raise ConfigError(
            f"{folder} has no {files.STATE_FILE}: its weights were not written by save_checkpoint; "
            "load_checkpoint(..., weights_only=True) reads them"
        )
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error
    if state["format"] > FORMAT:
        raise CheckpointError(
            f"{path} has format {state['format']}, this version reads up to {FORMAT}; install a newer roundpipe"
        )
    return state


def _check_parts(objects: Mapping[str, Any], state: Mapping[str, Any], folder: Path) -> None:
    for name in _OBJECTS:
        if name in objects and state[name] is None:
            raise ConfigError(f"{name}= was given, and the checkpoint at {folder} was saved without one; leave it out")
        if name not in objects and state[name] is not None:
            raise ConfigError(
                f"the checkpoint at {folder} has {name} state, and no {name} was given; give {name}=, or "
                "weights_only=True to load the weights alone"
            )


def _fit(own: Mapping[str, Any], saved: Mapping[str, Any], aliases: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """A saved value for each of the model's keys; a tied weight may have been saved under another of its names."""
    tensors = {name: value for name, value in own.items() if isinstance(value, torch.Tensor)}
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ConfigError(f"{name} is on the meta device; give the model memory (model.to_empty) before a load")
    values = {name: saved[name] for name in own if name in saved}
    for names in _groups(tensors):
        among = [name for name in names if name in saved]
        for name in names:
            if name not in values and (among or aliases.get(name) in saved):
                values[name] = saved[aliases[name] if aliases.get(name) in saved else among[0]]
    shapes = [
        f"{name} ({list(values[name].shape)}, the model has {list(tensor.shape)})"
        for name, tensor in tensors.items()
        if name in values and values[name].shape != tensor.shape
    ]
    problems = {
        "are missing in it": [name for name in own if name not in values],
        "are not in the model": sorted(name for name in saved if name not in own and name not in aliases.values()),
        "have another shape": shapes,
    }
    _raise_misfit(f"the checkpoint at {folder} does not fit the model", problems)
    return values


@torch.no_grad()
def _set_copies(masters: Mapping[str, torch.Tensor], pairs: Sequence[ParameterPair]) -> None:
    for pair in pairs:
        if pair.copy is not None and pair.names[0] in masters:
            pair.copy.copy_(masters[pair.names[0]])
            if pair.parameter.requires_grad:  # no change, unless the weights were saved in a narrower dtype
                pair.parameter.copy_(pair.copy)
            pair.agree()


# Plain values


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the host; a part of a larger memory alone, since all of it would be written."""
    tensor = tensor.detach().cpu()
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor on the host."""
    return tensor.detach().to("cpu", copy=True)


def _plain(value: Any, where: str, keep: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A value in types that ``torch.load(weights_only=True)`` reads back; ``keep`` is applied to tensors."""
    kind = type(value)
    if kind in _LEAVES:
        return value
    if isinstance(value, torch.Tensor) and type(value.detach()) is torch.Tensor and not value.is_meta:
        return keep(value)
    if kind in (list, tuple):
        return kind(_plain(item, f"{where}[{index}]", keep) for index, item in enumerate(value))
    if kind is set:
        return {_plain(item, where, keep) for item in value}
    if isinstance(value, dict) and kind in (dict, OrderedDict, Counter):
        items = {_plain(k, f"a key of {where}", keep): _plain(v, f"{where}[{k!r}]", keep) for k, v in value.items()}
        return items if kind is dict else kind(items)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and type(value.item()) in _LEAVES:
        return value.item()
    raise ConfigError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which can't be in a checkpoint: only numbers, strings, "
        "bytes, None, plain tensors, dtypes, devices, and dicts, lists, tuples and sets of them"
    )


def _raise_misfit(what: str, problems: Mapping[str, Sequence[str]]) -> None:
    """Raise a `ConfigError` with the first names of each problem, if there is one."""
    parts = [f"{len(names)} {problem}: {enumerated(names)}" for problem, names in problems.items() if names]
    if parts:
        raise ConfigError(f"{what}; {'; '.join(parts)}")


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


def _by_name(optimizer: torch.optim.Optimizer, pairs: Sequence[ParameterPair]) -> dict[str, Any]:
    """The optimizer's state with names of parameters in place of indices."""
    packed = optimizer.state_dict()
    name_of: dict[Any, str] = {}
    groups = []
    for group, group_names in zip(packed["param_groups"], _group_names(optimizer, pairs), strict=True):
        name_of.update(zip(group["params"], group_names, strict=True))
        groups.append({**group, "params": group_names})
    state = {name_of.get(key, key): value for key, value in packed["state"].items()}
    return {**packed, "state": state, "param_groups": groups}


def _by_index(
    saved: Mapping[str, Any], optimizer: torch.optim.Optimizer, pairs: Sequence[ParameterPair], folder: Path
) -> dict[str, Any]:
    """What `_by_name` saved, with this optimizer's indices; groups correspond by position, parameters by name."""
    grouped = _group_names(optimizer, pairs)
    what = f"the optimizer in the checkpoint at {folder} does not fit the one given"
    if len(saved["param_groups"]) != len(grouped):
        raise ConfigError(f"{what}: it has {len(saved['param_groups'])} parameter groups, the other {len(grouped)}")
    index_of: dict[Any, Any] = {}
    groups = []
    for index, (group, own) in enumerate(zip(saved["param_groups"], grouped, strict=True)):
        problems = {
            "parameters are missing in it": sorted(set(own) - set(group["params"])),
            "of its parameters are not in the other": sorted(set(group["params"]) - set(own)),
        }
        _raise_misfit(f"{what}, in group {index}", problems)
        indices = {name: len(index_of) + position for position, name in enumerate(own)}
        index_of.update(indices)
        groups.append({**group, "params": list(indices.values())})
        if "param_names" in group:
            groups[-1]["param_names"] = optimizer.param_groups[index].get("param_names", group["param_names"])
    state = {index_of.get(key, key): value for key, value in saved["state"].items()}
    return {**saved, "state": state, "param_groups": groups}
