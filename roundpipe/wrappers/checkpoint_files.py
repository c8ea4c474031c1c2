"""What a checkpoint is on disk: weights in safetensors shards, in a folder that is replaced as a whole.

*Weights.* Safetensors files, written one shard after the other: a save takes host memory for at most the shard that
is being written (`SHARD_BYTES`, or a single tensor that is larger). Most take none: only some versions of the library
copy what they write. Reading maps the files, so that weights come into memory once, where they belong.

*Replacing.* With one random token X for each save:

    dir.tmp-X is written and flushed to disk      a crash here: dir is the previous checkpoint
    dir -> dir.old-X                              a crash here: dir.tmp-X is whole, since dir.old-X is there
    dir.tmp-X -> dir                              a crash here: dir is the new checkpoint
    dir.old-X -> dir.tmp-Y, and removed

Invariant: a checkpoint under its own name, or ``dir.tmp-X`` beside ``dir.old-X``, is whole. `find` only looks;
leftovers are put right or removed by the next save (`replacing`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

from roundpipe.core.contexts import contextmanager
from roundpipe.core.errors import CheckpointError, CheckpointNotFoundError, ConfigError

Result = TypeVar("Result")

STATE_FILE = "training_state.pt"
"""Everything but the weights; a folder that has it is a checkpoint."""

SHARD_BYTES = 2 * 1024**3
"""Most bytes of weights in a file, and so in memory beside the model, unless a single tensor is larger."""

_NUM_READS = 20
_WEIGHTS_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_OWN_FILES = re.compile(
    r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|(generation_)?config\.json|"
    + re.escape(STATE_FILE)
)
_LIBRARY_MISSING = "checkpoints need the safetensors library; install it with pip install roundpipe[hf]"

# Weights


def safetensors_library() -> ModuleType:
    """The library, also before there is something to write; raises `ConfigError` if it is not installed."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ConfigError(_LIBRARY_MISSING) from error
    return safetensors


@functools.cache
def _has_dtype(dtype: torch.dtype) -> bool:
    """Whether the library that is installed stores a dtype; found out by trying, since it has no list of them."""
    library = safetensors_library()
    try:
        library.torch.save({"one": torch.empty(1, dtype=dtype)})
    except ImportError as error:  # numpy, which the library needs for this
        raise ConfigError(_LIBRARY_MISSING) from error
    except Exception:  # a KeyError from its tables, or an error of its own
        return False
    return True


def check_storable(name: str, tensor: torch.Tensor) -> None:
    """Raise a `ConfigError` if a tensor can't be in a safetensors file."""
    if tensor.is_meta:
        raise ConfigError(f"{name} is on the meta device and has no values; load the model's weights first")
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        kind = type(tensor).__name__ if type(tensor) is not torch.Tensor else str(tensor.layout)
        raise ConfigError(f"{name} is a {kind}; a checkpoint holds plain dense tensors")
    if not _has_dtype(tensor.dtype):
        raise ConfigError(f"{name} has dtype {tensor.dtype}, which the safetensors library does not store")


def write_weights(
    folder: Path, tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str], shard_bytes: int = SHARD_BYTES
) -> None:
    """Write tensors as one file or, past ``shard_bytes`` of tensors, as several and an index.

    ``aliases`` are further names of the tensors, noted in the files' metadata.
    """
    shards: list[dict[str, torch.Tensor]] = [{}]
    filled_bytes = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled_bytes + tensor.nbytes > shard_bytes:
            shards.append({})
            filled_bytes = 0
        shards[-1][name] = tensor
        filled_bytes += tensor.nbytes
    if len(shards) == 1:
        _write_file(folder / _WEIGHTS_FILE, shards[0], aliases)
        return
    weight_map = {}
    for index, shard in enumerate(shards, start=1):
        file_name = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / file_name, shard, aliases)
        weight_map.update(dict.fromkeys(shard, file_name))
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    index_json = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / _INDEX_FILE).write_text(json.dumps(index_json, indent=2))


def _write_file(path: Path, tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str]) -> None:
    library = safetensors_library()
    here = {alias: name for alias, name in aliases.items() if name in tensors}
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        library.torch.save_file(_storable(tensors), path, metadata={**here, "format": "pt"})
    except library.SafetensorError as error:  # also when the disk is full
        raise CheckpointError(f"{path} can't be written: {error}") from error
    path.chmod(mode)  # the library puts a file of its own there, which nobody else could read


def _storable(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the library takes: contiguous tensors on the host, no two in the same memory; themselves where they are."""
    dense = {name: tensor.detach().cpu().contiguous().resolve_conj().resolve_neg() for name, tensor in tensors.items()}
    end = 0
    for name, tensor in sorted(dense.items(), key=lambda item: item[1].data_ptr()):
        if tensor.data_ptr() < end:
            dense[name] = tensor.clone()
        end = max(end, tensor.data_ptr() + tensor.nbytes)
    return dense


def read_weights(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a folder, mapped from its files, and further names of some of them.

    Raises:
        CheckpointNotFoundError: the folder holds nothing of a checkpoint.
        CheckpointError: weights are missing, or a file is cut short or not what its header says.
    """
    index = folder / _INDEX_FILE
    if index.is_file():
        try:
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{index} can't be read as an index of shards: {error}") from error
    elif (folder / _WEIGHTS_FILE).is_file():
        files = [_WEIGHTS_FILE]
    elif (folder / STATE_FILE).is_file():
        raise CheckpointError(f"{folder} has {STATE_FILE}, and neither {_WEIGHTS_FILE} nor {_INDEX_FILE}")
    else:
        raise CheckpointNotFoundError(f"{folder} has neither {_WEIGHTS_FILE} nor {_INDEX_FILE}; it is no checkpoint")
    library = safetensors_library()
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for name in files:
        try:
            with library.safe_open(folder / name, framework="pt") as file:
                content, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}
        except (library.SafetensorError, KeyError, ValueError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{folder / name} can't be read as safetensors: {error}") from error
        tensors.update(content)
        aliases.update((alias, name) for alias, name in metadata.items() if name in content)
    return tensors, aliases


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write plain containers and tensors as `STATE_FILE`."""
    try:
        with open(folder / STATE_FILE, "wb") as file:
            torch.save(dict(state), file)
    except RuntimeError as error:  # torch's writer, closing after a failed write, hides why that failed
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


# The folder


def find(folder: Path) -> Path | None:
    """Where the latest whole checkpoint of this name lies, also after a crash; None if there is none.

    A folder without `STATE_FILE`, such as one that a script has made anew after a crash, comes last.
    """
    if (folder / STATE_FILE).is_file():
        return folder
    for old in _leftovers(folder, "old"):
        new = old.with_name(re.sub(r"\.old-(\w+)$", r".tmp-\1", old.name))
        return new if new.is_dir() else old
    return folder if folder.is_dir() and any(folder.iterdir()) else None


def read_whole(folder: Path, read: Callable[[Path], Result]) -> Result | None:
    """What ``read`` makes of the latest whole checkpoint; None if there is none.

    If a save in another process replaces the folder meanwhile, it is read again, so that no two files are
    of different checkpoints. Files that are mapped stay readable after their removal.
    """
    for _ in range(_NUM_READS):
        latest = find(folder)
        if latest is None:
            return None
        identity = _identity(latest)
        try:
            result = read(latest)
        except (ConfigError, OSError):
            if identity is not None and identity == _identity(latest):
                raise
        else:
            if identity is not None and identity == _identity(latest):
                return result
    raise CheckpointError(
        f"{folder} was replaced {_NUM_READS} times while it was read; stop the saves, or read a copy of it"
    )


def _identity(folder: Path) -> tuple[int, int, int] | None:
    """What tells a folder from others of its name; with its last change, as its inode could be another's soon."""
    try:
        status = os.stat(folder)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns


def check_replaceable(folder: Path) -> None:
    """Raise a `ConfigError` if a save would have to replace something that is not a checkpoint."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; give a folder for the checkpoint")
    if folder.is_dir() and not (folder / STATE_FILE).is_file():
        names = sorted(entry.name for entry in folder.iterdir())
        if names:
            raise ConfigError(
                f"{folder} holds {', '.join(names[:3])}{', ...' * (len(names) > 3)} and no {STATE_FILE}: it is not "
                "a checkpoint, and a save replaces the folder as a whole; give a folder of its own"
            )


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """An empty folder to write into, which takes the place of ``folder`` at the end of the block.

    After an error everything is as it was. Files in ``folder`` that no checkpoint writes, such as those of a
    tokenizer, are kept.

    Raises:
        ConfigError: ``folder`` is something else than a checkpoint.
        OSError: the disk is full, or there is no permission.
    """
    check_replaceable(folder)
    token = secrets.token_hex(4)
    new, old = (folder.with_name(f"{folder.name}.{kind}-{token}") for kind in ("tmp", "old"))
    try:
        _tidy(folder)
        new.mkdir(parents=True)
        yield new
        if folder.is_dir():
            shutil.copymode(folder, new)
            _carry_over(folder, new)
        _flush(new)
        if folder.is_dir():
            os.rename(folder, old)
        os.rename(new, folder)
        _flush_entries(folder.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            _discard(new)  # first, since old counts as replaced while both are there
            if old.is_dir() and not folder.exists():
                os.rename(old, folder)
        if isinstance(error, OSError):
            error.add_note(
                f"raised while saving a checkpoint to {folder}; its parent folder must be writable and have room for "
                "two checkpoints. A checkpoint that was there is whole"
            )
        raise
    _discard(old)


def _tidy(folder: Path) -> None:
    """End the swap that a crash left half done, and remove what crashes left behind."""
    latest = find(folder)
    if latest is not None and latest != folder:
        os.rename(latest, folder)
    for kind in ("old", "tmp"):  # a tmp counts as whole while its old is there
        for leftover in _leftovers(folder, kind):
            _discard(leftover)


def _leftovers(folder: Path, kind: str) -> list[Path]:
    pattern = re.compile(re.escape(folder.name) + rf"\.{kind}-[0-9a-f]{{8}}")
    if not folder.parent.is_dir():
        return []
    return [path for path in folder.parent.iterdir() if pattern.fullmatch(path.name) and path.is_dir()]


def _discard(path: Path) -> None:
    """Remove a folder; under a name that never counts as whole, in case this is cut short."""
    if path.is_dir():
        doomed = path.with_name(re.sub(r"\.(old|tmp)-\w+$", f".tmp-{secrets.token_hex(4)}", path.name))
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _carry_over(folder: Path, new: Path) -> None:
    for entry in folder.iterdir():
        if _OWN_FILES.fullmatch(entry.name) or (new / entry.name).exists():
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, new / entry.name, symlinks=True, copy_function=_link_or_copy)
        else:
            _link_or_copy(entry, new / entry.name)


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # not on every file system
        shutil.copy2(source, target, follow_symlinks=False)


def _flush(folder: Path) -> None:
    """Make a folder's files, their names and its own name survive a power failure."""
    for entry in folder.iterdir():
        if _OWN_FILES.fullmatch(entry.name):
            _flush_entries(entry)
    _flush_entries(folder)
    _flush_entries(folder.parent)


def _flush_entries(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
