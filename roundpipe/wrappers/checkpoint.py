"""Checkpoints: everything that training needs to go on as if it had never stopped.

    model.safetensors, or shards and an index    `state_dict()` with its own keys; each tied weight once
    config.json, generation_config.json          for models that have them, so that `from_pretrained(dir)` works;
                                                 not with PEFT's adapters, which have `save_pretrained`
    checkpoint_manifest.json                     checksums of the files
    training_state.pt                            plain containers and tensors: optimizer, scheduler, scaler,
                                                 random number generators, step, extra

Invariant: nothing in a checkpoint depends on the devices. Optimizer state is kept by the names of
parameters, random state is that of the host (and of each accelerator, taken up as far as there are as many).

A load checks everything that it can before it changes anything: the files' checksums, then fields, names, shapes and
kinds. What only the loads of other objects can tell is found out while all of them can still be put back.
"""

from __future__ import annotations

import copy
import functools
import logging
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe.core.attributes import given_attribute
from roundpipe.core.checks import check_flag, path_of
from roundpipe.core.errors import (
    CheckpointError,
    CheckpointMisfitError,
    CheckpointNotFoundError,
    ConfigError,
    said,
    shown,
)
from roundpipe.core.random_state import portable_random_state, restore_random_state
from roundpipe.runtime.weights.parameter_pair import ParameterPair
from roundpipe.wrappers import checkpoint_files as files
from roundpipe.wrappers.background_writer import CheckpointWrite
from roundpipe.wrappers.checkpoint_folder import check_replaceable, read_whole, replacing
from roundpipe.wrappers.checkpoint_state import (
    FORMAT,
    OBJECTS,
    by_index,
    copied,
    is_of_first_version,
    misfits,
    missing_fields,
    plain,
    raise_misfit,
    read_state,
    shared,
    whole_state,
)
from roundpipe.wrappers.session import Session

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What the caller of a load gets back."""

    step: int | None
    """As given to the save."""
    extra: Any
    """As given to the save; numpy scalars have become Python numbers."""


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
            number = None if isinstance(step, bool) else operator.index(step)
        except TypeError:
            number = None
        if number is None:
            raise ConfigError(f"step is {shown(step)}; give an int, or None")
        step = number
    folder = _begin(session, dir, objects)
    done = CheckpointWrite()
    optimizer, scheduler, scaler = (objects[name] for name in OBJECTS)
    state_of_optimizer, weights_of_optimizer = whole_state(optimizer, pairs, session.ranks)
    if session.ranks is not None and not session.ranks.is_writer:
        done.set_result(None)
        return done
    check_replaceable(folder)
    weights = target.state_dict()
    tensors = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
    for name, tensor in tensors.items():
        files.check_storable(name, tensor)
    tensors, aliases = _once_each(tensors, target)
    parts: dict[str, Any] = {
        "optimizer": state_of_optimizer,
        **{f"{name}_class": type(value).__qualname__ for name, value in objects.items()},
        "optimizer_weights": weights_of_optimizer,
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "module_state": {name: value for name, value in weights.items() if name not in tensors | aliases},
        "random": portable_random_state(),
        "step": step,
        "extra": extra,
    }
    keep = copied if is_async else shared
    state = {"format": FORMAT, **{name: plain(part, name, keep) for name, part in parts.items()}}
    if is_async:
        tensors = {name: copied(tensor) for name, tensor in tensors.items()}
    configs = _configs(target)

    def write() -> None:
        """Hold nothing of the model but, unless copied, its tensors."""
        with replacing(folder) as draft:
            files.write_weights(draft, tensors, aliases)
            for config in configs:
                try:
                    config.save_pretrained(draft.folder)
                except ValueError as error:  # transformers refuses to write what it reads without complaint
                    logger.warning("the checkpoint %s is without a %s: %s", folder, type(config).__name__, error)
            files.write_state(draft, state)

    if is_async:
        return session.writer.start(write, str(folder))
    write()
    done.set_result(None)
    return done


def _begin(session: Session, dir: str | os.PathLike[str], objects: Mapping[str, Any]) -> Path:
    """Wait for what is running; the folder itself: a link to it stays a link when the folder is replaced."""
    for name, value in objects.items():
        if name == "optimizer" and not isinstance(value, torch.optim.Optimizer | None):
            advice = "give a torch.optim.Optimizer, or None; of several, the states of the others in extra={...}"
            raise ConfigError(f"optimizer is {type(value).__name__}; {advice}")
        has_state = all(callable(given_attribute(value, name)) for name in ("state_dict", "load_state_dict"))
        if value is not None and (isinstance(value, type) or not has_state):
            raise ConfigError(
                f"{name} is {type(value).__name__}, which has no state_dict and load_state_dict; give one that has them"
            )
    files.safetensors_library()
    session.writer.wait()
    session.optimizer.synchronize()
    session.optimizer.come_home()
    return Path(os.path.realpath(path_of("dir", dir, "the path of a folder")))


def _once_each(
    tensors: Mapping[str, torch.Tensor], target: nn.Module
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Each tensor under one name, and the other names of tied ones.

    Where the model says which name it makes from the other (transformers does), that one is left out.
    """
    derived = given_attribute(target, "all_tied_weights_keys") or given_attribute(target, "_tied_weights_keys") or ()
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
    if given_attribute(target, "peft_config") is not None:
        return []
    given = ((name, given_attribute(target, name)) for name in ("config", "generation_config"))
    own = {name: copy.deepcopy(each) for name, each in given if callable(given_attribute(each, "save_pretrained"))}
    if (config := own.get("config")) is not None:
        config.architectures = [type(target).__name__]
        if hasattr(config, "dtype"):
            config.dtype = next((p.dtype for p in target.parameters() if p.is_floating_point()), config.dtype)
    return list(own.values())


# Loading


def load(session: Session, dir: str | os.PathLike[str], objects: Mapping[str, Any], weights_only: bool) -> Checkpoint:
    """See `RoundPipe.load_checkpoint` and `save`; everything is checked before anything is changed."""
    check_flag("weights_only", weights_only)
    pairs = session.optimizer.parameter_pairs()
    folder = _begin(session, dir, objects)
    objects = {name: value for name, value in objects.items() if value is not None}
    if weights_only and objects:
        raise ConfigError(f"weights_only=True does not restore {', '.join(objects)}; leave it out")
    content = read_whole(folder, lambda whole: _read(whole, weights_only))
    if content is None:
        raise CheckpointNotFoundError(f"there is no checkpoint at {folder}; give the folder that save_checkpoint wrote")
    weights, aliases, state = content
    if not weights_only:
        _check_parts(objects, state, folder)
    own = session.shown.state_dict()
    values = _fit(own, {**weights, **state["module_state"]}, aliases, folder)
    masters = {} if weights_only else state["optimizer_weights"]
    if masters:
        list(session.optimizer.optim_named_parameters())  # makes the copies that are missing
        parameters = {pair.names[0]: pair.parameter for pair in pairs}
        wrong = [name for name, copy in masters.items() if not _fits(copy, parameters.get(name))]
        problems = {"copies of the optimizer have no parameter of their shape": wrong}
        raise_misfit(f"the checkpoint at {folder} does not fit the model", problems)
    changes: list[_Change] = []
    if not weights_only:
        if "optimizer" in objects:
            state["optimizer"] = by_index(state["optimizer"], objects["optimizer"], pairs, folder)
        changes = [_taken_over(name, value, state, folder) for name, value in objects.items()]
        restore = functools.partial(restore_random_state, portable_random_state())
        changes.append(("random", functools.partial(restore_random_state, state["random"]), restore))
        extra = _owned(state["extra"], "extra", folder)
    modules = dict(session.shown.named_modules(remove_duplicate=False))
    for name in own:
        path, _, last = name.rpartition(".")
        if last == "_extra_state" and path in modules:  # as torch names what get_extra_state gives
            put = modules[path].set_extra_state
            before = copy.deepcopy(own[name])
            changes.append((name, functools.partial(put, values[name]), functools.partial(put, before)))

    def put_weights() -> None:
        session.shown.load_state_dict(values)
        session.optimizer.refresh()
        _set_copies(masters, pairs)
        if not weights_only:
            session.optimizer.zero_grad()
            restore_random_state(state["random"])  # again, since hooks of the model may have drawn

    _change_all(changes, put_weights, folder)
    return Checkpoint(None, None) if weights_only else Checkpoint(state["step"], extra)


_Change = tuple[str, Callable[[], object], Callable[[], object]]
"""What is changed, the change, and what puts back how it was."""


def _change_all(changes: Sequence[_Change], put_weights: Callable[[], None], folder: Path) -> None:
    """Make all changes or none, also if interrupted: no copy of the old weights is kept, so once begun they are put."""
    begun: list[Callable[[], object]] = []
    puts_weights = False
    try:
        for name, change, put_back in changes:
            begun.append(put_back)
            _change(name, change, folder)
        puts_weights = True
        put_weights()
    except BaseException as error:
        if puts_weights and not isinstance(error, Exception):
            put_weights()
        else:
            for put_back in reversed(begun):
                put_back()
        raise


def _change(name: str, change: Callable[[], object], folder: Path) -> None:
    try:
        change()
    except Exception as error:
        problem = f"{name} can't take over its state in {folder}: {type(error).__name__}: {said(error)}"
        raise CheckpointMisfitError(f"{problem}; nothing was changed") from error


def _taken_over(name: str, value: Any, state: Mapping[str, Any], folder: Path) -> _Change:
    """An object's load of its state, once what can be checked before is checked."""
    kind, saved_kind = type(value).__qualname__, state.get(f"{name}_class")
    before, after = value.state_dict(), _owned(state[name], name, folder)
    part = (lambda packed: packed["param_groups"]) if name == "optimizer" else (lambda packed: packed)
    problems = {"fields have another type": misfits(part(before), part(after), name)}
    if name != "optimizer" and kind != saved_kind:
        problems["fields are missing in it"] = missing_fields(before, after)
    what = f"the state of the {name}, of class {saved_kind or 'unknown'}, in the checkpoint at {folder}"
    raise_misfit(f"{what} does not fit the {kind} that was given", problems)
    if saved_kind not in (kind, None):  # it may read the state, as a subclass does
        logger.warning("%s is loaded into one of class %s", what, kind)
    if name != "optimizer":
        before = copy.deepcopy(before)
        return name, lambda: value.load_state_dict(after), lambda: value.load_state_dict(before)

    def load_optimizer() -> None:
        needed = set(value.defaults)  # a load adds to them
        value.load_state_dict(after)  # may add what older versions of its class did not have
        missing = {key for group in value.param_groups for key in needed - group.keys()}
        if missing:
            raise ValueError(f"{what} has no {', '.join(sorted(missing))}, which {kind} needs")

    # a load replaces both, so that the very same come back, whatever dtypes it converts to
    put_back = functools.partial(vars(value).update, state=value.state, param_groups=value.param_groups)
    return name, load_optimizer, put_back


def _owned(value: Any, name: str, folder: Path) -> Any:
    """A copy of a part of the state, whose tensors are mapped from a file that will be replaced."""
    try:
        return plain(value, name, torch.clone)
    except ConfigError as error:
        raise CheckpointError(f"{folder / files.STATE_FILE} is damaged: {error}") from error


def _read(folder: Path, weights_only: bool) -> tuple[dict[str, torch.Tensor], dict[str, str], dict[str, Any]]:
    """Weights, further names of some of them, and state, of files that are whole."""
    path = folder / files.STATE_FILE
    if not path.is_file():
        weights = files.read_weights(folder)
        if weights_only:
            return *weights, {"module_state": {}, "optimizer_weights": {}}
        raise ConfigError(
            f"{folder} has no {files.STATE_FILE}: its weights were not written by save_checkpoint; "
            "load_checkpoint(..., weights_only=True) reads them"
        )
    try:
        files.verify(folder)
    except CheckpointError:
        if not is_of_first_version(read_state(path)):  # which wrote no manifest, and left that of a later one
            raise
    return *files.read_weights(folder), read_state(path)


def _check_parts(objects: Mapping[str, Any], state: Mapping[str, Any], folder: Path) -> None:
    for name in OBJECTS:
        if name in objects and state[name] is None:
            raise CheckpointMisfitError(
                f"{name}= was given, and the checkpoint at {folder} was saved without one; leave it out"
            )
        if name not in objects and state[name] is not None:
            raise CheckpointMisfitError(
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
        f"{name} ({list(getattr(values[name], 'shape', []))}, the model has {list(tensor.shape)})"
        for name, tensor in tensors.items()
        if name in values and not _fits(values[name], tensor)
    ]
    problems = {
        "are missing in it": [name for name in own if name not in values],
        "are not in the model": sorted(name for name in saved if name not in own and name not in aliases.values()),
        "have another shape or kind of values": shapes,
    }
    raise_misfit(f"the checkpoint at {folder} does not fit the model", problems)
    return values


def _fits(value: Any, tensor: torch.Tensor | None) -> bool:
    """Whether a saved value can become a tensor's without a loss of more than precision."""
    return (
        tensor is not None
        and isinstance(value, torch.Tensor)
        and value.shape == tensor.shape
        and torch.can_cast(value.dtype, tensor.dtype)
    )


@torch.no_grad()
def _set_copies(masters: Mapping[str, torch.Tensor], pairs: Sequence[ParameterPair]) -> None:
    for pair in pairs:
        if pair.copy is not None and pair.names[0] in masters:
            whole = masters[pair.names[0]]
            pair.copy.copy_(pair.part(whole))
            if pair.parameter.requires_grad:  # no change, unless the weights were saved in a narrower dtype
                pair.parameter.copy_(whole.to(pair.copy.dtype))
            pair.agree()
