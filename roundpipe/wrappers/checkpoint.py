"""Checkpoints: everything that training needs to go on as if it had never stopped.

    model.safetensors, or shards and an index    `state_dict()` with its own keys; each tied weight once
    config.json, generation_config.json          for models that have them, so that `from_pretrained(dir)` works;
                                                 not with PEFT's adapters, which have `save_pretrained`
    training_state.pt                            plain containers and tensors: optimizer, scheduler, scaler,
                                                 random number generators, step, extra

Invariant: nothing in a checkpoint depends on the devices. Optimizer state is kept by the names of
parameters, random state is that of the host (and of each accelerator, taken up as far as there are as many).

A save begins with ``synchronize()``, so that what is saved is the latest update, and a run that goes on and
a run that starts from the checkpoint see the same weights: resuming is equal bit for bit, also with
asynchronous steps, whose first iteration after a save trains on the latest weights like the very first.
Gradients that no step has taken yet are not saved.
"""

from __future__ import annotations

import copy
import logging
import operator
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from roundpipe.core.errors import CheckpointError, CheckpointNotFoundError, ConfigError
from roundpipe.core.random_state import portable_random_state, restore_random_state
from roundpipe.runtime.weights.master_weights import ParameterPair
from roundpipe.wrappers import checkpoint_files as files
from roundpipe.wrappers import checkpoint_state as portable
from roundpipe.wrappers.model_view import ModelView
from roundpipe.wrappers.session import Session

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


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What is to be written; holds nothing of the model but, unless copied, its tensors."""

    tensors: dict[str, torch.Tensor]
    aliases: dict[str, str]
    state: dict[str, Any]
    configs: list[Any]

    def write(self, folder: Path) -> None:
        with files.replacing(folder) as new:
            files.write_weights(new, self.tensors, self.aliases)
            for config in self.configs:
                try:
                    config.save_pretrained(new)
                except ValueError as error:  # transformers refuses to write what it reads without complaint
                    logger.warning("the checkpoint %s is without a %s: %s", folder, type(config).__name__, error)
            files.write_state(new, self.state)


def save(
    model: ModelView,
    session: Session,
    dir: str | os.PathLike[str],
    objects: Mapping[str, Any],
    step: int | None,
    extra: Any,
    is_async: bool,
) -> None:
    """See `RoundPipe.save_checkpoint`; ``objects`` are the optimizer, the scheduler and the scaler by name."""
    target, pairs = session.shown, session.optimizer.parameter_pairs()
    if step is not None:
        try:
            step = operator.index(step)
        except TypeError:
            raise ConfigError(f"step is {step!r}; give an int, or None") from None
    folder = _begin(session, dir, objects)
    files.check_replaceable(folder)
    weights = model.state_dict()
    tensors = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
    for name, tensor in tensors.items():
        files.check_storable(name, tensor)
    tensors, aliases = _once_each(tensors, target)
    optimizer, scheduler, scaler = (objects[name] for name in _OBJECTS)
    parts: dict[str, Any] = {
        "optimizer": None if optimizer is None else portable.by_name(optimizer, portable.names_of_copies(pairs)),
        "optimizer_class": type(optimizer).__qualname__,
        "optimizer_weights": portable.copies_of_another_dtype(pairs),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "module_state": {name: value for name, value in weights.items() if name not in tensors | aliases},
        "random": portable_random_state(),
        "step": step,
        "extra": extra,
    }
    keep = portable.copied if is_async else portable.shared
    state = {"format": FORMAT, **{name: portable.plain(part, name, keep) for name, part in parts.items()}}
    if is_async:
        tensors = {name: portable.copied(tensor) for name, tensor in tensors.items()}
    snapshot = _Snapshot(tensors, aliases, state, _configs(target))
    if is_async:
        session.writer.start(lambda: snapshot.write(folder), str(folder))
    else:
        snapshot.write(folder)


def _begin(session: Session, dir: str | os.PathLike[str], objects: Mapping[str, Any]) -> Path:
    """Wait for what is running; the folder itself: a link to it stays a link when the folder is replaced."""
    for name, value in objects.items():
        if name == "optimizer" and not isinstance(value, torch.optim.Optimizer | None):
            raise ConfigError(f"optimizer is {type(value).__name__}; give a torch.optim.Optimizer, or None")
        if value is not None and not isinstance(value, _Stateful):
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
    configs: list[Any] = []
    if hasattr(target, "peft_config"):
        return configs
    for name in ("config", "generation_config"):
        config = getattr(target, name, None)
        if config is not None and callable(getattr(config, "save_pretrained", None)):
            config = copy.deepcopy(config)
            if name == "config":
                config.architectures = [type(target).__name__]
                if hasattr(config, "dtype"):
                    dtypes = [p.dtype for p in target.parameters() if p.dtype.is_floating_point]
                    config.dtype = dtypes[0] if dtypes else config.dtype
            configs.append(config)
    return configs


# Loading


def load(
    model: ModelView, session: Session, dir: str | os.PathLike[str], objects: Mapping[str, Any], weights_only: bool
) -> Checkpoint:
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
    values = _fit(model.state_dict(), {**weights, **state["module_state"]}, aliases, folder)
    optimizer = objects.get("optimizer")
    if optimizer is not None:
        kind, saved = type(optimizer).__qualname__, state["optimizer_class"]
        if kind != saved:  # it may read the state, as a subclass does; most others fail at their next step
            message = "the checkpoint at %s has the state of an optimizer %s, and is loaded into one of class %s"
            logger.warning(message, folder, saved, kind)
        names = portable.names_of_copies(pairs)
        state["optimizer"] = portable.by_index(state["optimizer"], optimizer, names, folder)
    masters = state["optimizer_weights"]
    if masters and not weights_only:
        list(session.optimizer.optim_named_parameters())  # makes the copies that are missing
        own = {pair.names[0]: pair.parameter for pair in pairs}
        wrong = [name for name, copy in masters.items() if name not in own or own[name].shape != copy.shape]
        problems = {"copies of the optimizer have no parameter": wrong}
        portable.raise_misfit(f"the checkpoint at {folder} does not fit the model", problems)

    model.load_state_dict(values)
    _set_copies(masters, pairs)
    if weights_only:
        return Checkpoint(None, None)
    model.zero_grad()
    # Cloned, because what is loaded is mapped from a file that will be replaced.
    for name, value in objects.items():
        value.load_state_dict(portable.plain(state[name], name, torch.clone))
    restore_random_state(state["random"])
    return Checkpoint(state["step"], portable.plain(state["extra"], "extra", torch.clone))


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
    portable.raise_misfit(f"the checkpoint at {folder} does not fit the model", problems)
    return values


@torch.no_grad()
def _set_copies(masters: Mapping[str, torch.Tensor], pairs: Sequence[ParameterPair]) -> None:
    for pair in pairs:
        if pair.copy is not None and pair.names[0] in masters:
            pair.copy.copy_(masters[pair.names[0]])
            if pair.parameter.requires_grad:  # no change, unless the weights were saved in a narrower dtype
                pair.parameter.copy_(pair.copy)
            pair.agree()
