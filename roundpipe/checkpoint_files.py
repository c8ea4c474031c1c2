"""What a checkpoint is on disk: weights in safetensors shards, in a folder that is replaced as a whole.

*Weights.* The safetensors format (length of the header in 8 bytes, header as JSON, bytes of the tensors) is
written and read here and not through its package, because then no tensor is copied on the way out, the
interpreter is free while a background write goes on, and a full disk is an `OSError`. Reading maps the
files, so that weights come into memory once, where they belong.

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
import ctypes
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch

from roundpipe.errors import ConfigError

Result = TypeVar("Result")

STATE_FILE = "training_state.pt"
"""Everything but the weights; a folder that has it is a checkpoint."""

SHARD_BYTES = 4 * 1024**3
"""Largest file of weights, unless a single tensor is larger."""

NUM_READS = 20
"""How often a folder is read again that is replaced while it is read."""

_WEIGHTS_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_OWN_FILES = re.compile(
    r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|(generation_)?config\.json|"
    + re.escape(STATE_FILE)
)
_PIECE_BYTES = 64 * 1024**2

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}

# Weights


def check_storable(name: str, tensor: torch.Tensor) -> None:
    """Raise a `ConfigError` if a tensor can't be in a safetensors file."""
    if tensor.is_meta:
        raise ConfigError(f"{name} is on the meta device and has no values; load the model's weights first")
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        kind = type(tensor).__name__ if type(tensor) is not torch.Tensor else str(tensor.layout)
        raise ConfigError(f"{name} is a {kind}; a checkpoint holds plain dense tensors")
    if tensor.dtype not in _DTYPE_NAMES:
        raise ConfigError(f"{name} has dtype {tensor.dtype}, which the safetensors format does not have")


def write_weights(
    folder: Path, tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str], shard_bytes: int = SHARD_BYTES
) -> None:
    """Write tensors as one file or, past ``shard_bytes``, as several and an index.

    Args:
        folder: where to.
        tensors: by name, in host memory; not copied.
        aliases: further names of the tensors, noted in the files' metadata.
        shard_bytes: largest number of bytes of tensors in a file of more than one tensor.
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
    """One safetensors file; larger elements first, so that each tensor is aligned."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    here = {alias: name for alias, name in aliases.items() if name in tensors}
    header: dict[str, Any] = {"__metadata__": {**here, "format": "pt"}}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for _, tensor in ordered:
            _write_bytes(file, tensor)


def _write_bytes(file: BinaryIO, tensor: torch.Tensor) -> None:
    dense = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    if dense.nbytes:
        memory = memoryview((ctypes.c_char * dense.nbytes).from_address(dense.data_ptr()))
        for begin in range(0, dense.nbytes, _PIECE_BYTES):
            file.write(memory[begin : begin + _PIECE_BYTES])


def read_weights(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a folder, mapped from its files, and further names of some of them.

    Raises:
        ConfigError: there are no weights, or a file is cut short or not what its header says.
    """
    index = folder / _INDEX_FILE
    if index.is_file():
        try:
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (KeyError, ValueError) as error:
            raise ConfigError(f"{index} can't be read as an index of shards: {error}") from error
    elif (folder / _WEIGHTS_FILE).is_file():
        files = [_WEIGHTS_FILE]
    else:
        raise ConfigError(f"{folder} has neither {_WEIGHTS_FILE} nor {_INDEX_FILE}; it is not a checkpoint")
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for name in files:
        try:
            found, metadata = _read_file(folder / name)
        except (KeyError, ValueError, OSError, RuntimeError) as error:
            raise ConfigError(f"{folder / name} can't be read as safetensors: {error}") from error
        tensors.update(found)
        aliases.update((alias, name) for alias, name in metadata.items() if name in found)
    return tensors, aliases


def _read_file(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    num_bytes = path.stat().st_size
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > num_bytes - 8:
            raise ValueError(f"its header should have {header_bytes} bytes, the file has {num_bytes}")
        header = json.loads(file.read(header_bytes))
    metadata = header.pop("__metadata__", {})
    mapped = torch.from_file(str(path), shared=False, size=num_bytes, dtype=torch.uint8)
    tensors = {}
    for name, entry in header.items():
        dtype = _DTYPES[entry["dtype"]]
        begin, end = (offset + 8 + header_bytes for offset in entry["data_offsets"])
        if not 0 <= begin <= end <= num_bytes:
            raise ValueError(f"{name} should end at byte {end}, the file has {num_bytes}")
        piece = mapped[begin:end]
        if begin % dtype.itemsize:
            piece = piece.clone()
        tensors[name] = piece.view(dtype).view(entry["shape"])
    return tensors, metadata


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
    for _ in range(NUM_READS):
        found = find(folder)
        if found is None:
            return None
        with _held(found) as still_there:
            try:
                result = read(found)
            except (ConfigError, OSError):
                if still_there():
                    raise
            else:
                if still_there():
                    return result
    raise ConfigError(
        f"{folder} was replaced {NUM_READS} times while it was read; stop the saves, or read a copy of it"
    )


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[Callable[[], bool]]:
    """Whether the path still leads to the same folder; held open, as its inode could be another folder's soon."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        yield lambda: False
        return

    def still_there() -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(folder))
        except FileNotFoundError:
            return False

    try:
        yield still_there
    finally:
        os.close(descriptor)


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


@contextlib.contextmanager
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
        _swap(new, folder, old)
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


def _swap(new: Path, folder: Path, old: Path) -> None:
    if folder.is_dir():
        os.rename(folder, old)
    os.rename(new, folder)
    _flush_entries(folder.parent)


def _tidy(folder: Path) -> None:
    """End the swap that a crash left half done, and remove what crashes left behind."""
    found = find(folder)
    if found is not None and found != folder:
        os.rename(found, folder)
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
