"""The files of a checkpoint: weights in safetensors shards, everything else in one file, and checksums of them all.

*Weights.* Safetensors files, written tensor by tensor, one file after the other: a save takes host memory for at most
one tensor, and for none that is contiguous on the host. Reading maps the files, so that weights come into memory once,
where they belong.

*Checksums.* `MANIFEST_FILE` has the size and the CRC-32 of every file, and its own. They are taken of what is written,
while it is written; the files are read again and compared before they replace others (`Draft.finish`) and before
anything of them is used (`verify`).
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import torch

from roundpipe.core.contexts import contextmanager
from roundpipe.core.errors import CheckpointError, CheckpointNotFoundError, ConfigError
from roundpipe.core.interrupts import interrupts_held, safe_point

STATE_FILE = "training_state.pt"
"""Everything but the weights; a folder that has it is a checkpoint."""

MANIFEST_FILE = "checkpoint_manifest.json"
"""Checksums; checkpoints of the first versions have none."""

SHARD_BYTES = 2 * 1024**3
"""Most bytes of weights in a file, unless a single tensor is larger."""

_BLOCK_BYTES = 1024**2
_WEIGHTS_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
OWN_FILES = re.compile(
    r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|(generation_)?config\.json|"
    + "|".join(re.escape(name) for name in (STATE_FILE, MANIFEST_FILE))
)
"""What saves write; everything else in a folder is the user's."""

_LIBRARY_MISSING = "checkpoints need the safetensors library; install it with pip install roundpipe[hf]"

# Checksums


@dataclass(slots=True)
class SummedFile:
    """A file that knows the checksum of what was written to it.

    Torch's writer, whose save has failed, writes once more when it is deleted, and an error would then end the process:
    what comes behind a failed write, or when the file is closed, is dropped.
    """

    file: BinaryIO
    crc32: int = 0
    num_bytes: int = 0
    _is_whole: bool = True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if not self._is_whole or self.file.closed:
            return len(view)
        self._is_whole = False
        for start in range(0, len(view), _BLOCK_BYTES):
            safe_point()
            block = view[start : start + _BLOCK_BYTES]
            self.file.write(block)
            self.crc32 = zlib.crc32(block, self.crc32)
        self.num_bytes += len(view)
        self._is_whole = True
        return len(view)

    def flush(self) -> None:
        self.file.flush()


@dataclass(frozen=True, slots=True)
class Draft:
    """A folder in which a checkpoint is being written."""

    folder: Path
    checksums: dict[str, dict[str, int]] = field(default_factory=dict)

    @contextmanager
    def open(self, name: str) -> Iterator[SummedFile]:
        """A new file."""
        with open(self.folder / name, "wb") as file:
            yield (summed := SummedFile(file))
        self.checksums[name] = {"bytes": summed.num_bytes, "crc32": summed.crc32}

    def finish(self) -> None:
        """Write the manifest, make all files survive a power failure, and read them again.

        Raises:
            CheckpointError: what is on the disk is not what was written.
        """
        own = [entry.name for entry in self.folder.iterdir() if OWN_FILES.fullmatch(entry.name)]
        for name in own:  # those that others have written
            if name not in self.checksums:
                self.checksums[name] = _checksum(self.folder / name)
        (self.folder / MANIFEST_FILE).write_bytes(_manifest(self.checksums))
        for name in (*own, MANIFEST_FILE):
            flush(self.folder / name, forget=True)  # so that the check reads the disk
        flush(self.folder)
        verify(self.folder)


def flush(path: Path, *, forget: bool = False) -> None:
    """Make a file, or the names in a folder, survive a power failure; ``forget``: drop the file from memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if forget and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _manifest(checksums: Mapping[str, Mapping[str, int]]) -> bytes:
    files = json.dumps(checksums, indent=1, sort_keys=True)
    return f'{{"crc32": {zlib.crc32(files.encode())},\n"files": {files}}}\n'.encode()


def _checksum(path: Path) -> dict[str, int]:
    crc32 = num_bytes = 0
    block = memoryview(bytearray(_BLOCK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            crc32 = zlib.crc32(block[:count], crc32)
            num_bytes += count
    return {"bytes": num_bytes, "crc32": crc32}


def verify(folder: Path) -> None:
    """Compare all files of a checkpoint with its manifest.

    Raises:
        CheckpointError: a file differs or is missing, or there is no manifest.
    """
    manifest = folder / MANIFEST_FILE
    try:
        written = manifest.read_bytes()
        checksums = dict(json.loads(written)["files"])
        if _manifest(checksums) != written:
            raise ValueError("it does not match its own checksum")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{manifest} is damaged or missing: {error}; load another checkpoint") from error
    if (folder / _INDEX_FILE).is_file() and _INDEX_FILE not in checksums:  # it would say which files are read
        raise CheckpointError(f"{folder / _INDEX_FILE} is not of this checkpoint; remove it")
    for name, expected in checksums.items():
        found = _checksum(_inside(folder, name, manifest))
        if found != expected:
            raise CheckpointError(
                f"{folder / name} is damaged: {found} is not the {expected} that was written; load another checkpoint"
            )


def _inside(folder: Path, name: Any, named_by: Path) -> Path:
    """The path of a folder's file; nothing in a checkpoint may lead to files elsewhere."""
    if not isinstance(name, str) or name in ("", ".", "..") or re.search(r"[/\\\0]", name):
        raise CheckpointError(f"{named_by} names {name!r}, which is not a file in its folder")
    if not (folder / name).is_file():
        raise CheckpointError(f"{folder / name} is missing, {named_by.name} names it; load another checkpoint")
    return folder / name


# Weights


def safetensors_library() -> ModuleType:
    """The library, also before there is something to write; raises `ConfigError` if it is not installed."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ConfigError(_LIBRARY_MISSING) from error
    return safetensors


@functools.cache
def _dtype_entry(dtype: torch.dtype) -> tuple[str, int] | None:
    """The library's name of a dtype and how many values an element packs; None if it does not store it.

    Found out by trying, since it has no list of them.
    """
    library = safetensors_library()
    try:
        written = library.torch.save({"one": torch.empty(1, dtype=dtype)})
    except ImportError as error:  # numpy, which the library needs for this
        raise ConfigError(_LIBRARY_MISSING) from error
    except Exception:  # a KeyError from its tables, or an error of its own
        return None
    entry = json.loads(written[8 : 8 + int.from_bytes(written[:8], "little")])["one"]
    return entry["dtype"], entry["shape"][0]


def check_storable(name: str, tensor: torch.Tensor) -> None:
    """Raise a `ConfigError` if a tensor can't be in a safetensors file."""
    if tensor.is_meta:
        raise ConfigError(f"{name} is on the meta device and has no values; load the model's weights first")
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        kind = type(tensor).__name__ if type(tensor) is not torch.Tensor else str(tensor.layout)
        raise ConfigError(f"{name} is a {kind}; a checkpoint holds plain dense tensors")
    if _dtype_entry(tensor.dtype) is None:
        raise ConfigError(f"{name} has dtype {tensor.dtype}, which the safetensors library does not store")


def write_weights(
    draft: Draft, tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str], shard_bytes: int = SHARD_BYTES
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
        _write_file(draft, _WEIGHTS_FILE, shards[0], aliases)
        return
    parts = [write_part(draft, shard, aliases, index, len(shards)) for index, shard in enumerate(shards)]
    write_index(draft, parts)


def write_part(
    draft: Draft, tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str], index: int, num_parts: int
) -> dict[str, int]:
    """Write one file of several; the bytes of its tensors."""
    _write_file(draft, _part_name(index, num_parts), tensors, aliases)
    return {name: tensor.nbytes for name, tensor in tensors.items()}


def _part_name(index: int, num_parts: int) -> str:
    return f"model-{index + 1:05d}-of-{num_parts:05d}.safetensors"


def write_index(draft: Draft, parts: Sequence[Mapping[str, int]]) -> None:
    """Write which file has which tensor, from what `write_part` returned for each; of equal names the first counts."""
    files = [dict.fromkeys(part, _part_name(index, len(parts))) for index, part in enumerate(parts)]
    weight_map = {name: file for each in reversed(files) for name, file in each.items()}
    num_bytes = {name: size for part in parts for name, size in part.items()}
    index_json = {
        "metadata": {"total_size": sum(num_bytes.values())},
        "weight_map": {name: weight_map[name] for name in num_bytes},
    }
    with draft.open(_INDEX_FILE) as file:
        file.write(json.dumps(index_json, indent=2).encode())


def _write_file(draft: Draft, name: str, tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str]) -> None:
    """A safetensors file: the length of its header, the header, and the tensors in order of their alignment."""
    here = {alias: name for alias, name in aliases.items() if name in tensors}
    header: dict[str, Any] = {"__metadata__": {**here, "format": "pt"}}
    ordered = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    end = 0
    for key in ordered:
        entry, shape = _dtype_entry(tensors[key].dtype), list(tensors[key].shape)
        assert entry is not None
        if shape:
            shape[-1] *= entry[1]
        start, end = end, end + tensors[key].nbytes
        header[key] = {"dtype": entry[0], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with draft.open(name) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for key in ordered:
            dense = tensors[key].detach().cpu().contiguous().resolve_conj().resolve_neg()
            file.write(dense.reshape(-1).view(torch.uint8).numpy())


def read_weights(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a folder, mapped from its files, and further names of some of them.

    Raises:
        CheckpointNotFoundError: the folder holds nothing of a checkpoint.
        CheckpointError: weights are missing, or a file is cut short or not what its header says.
    """
    index = folder / _INDEX_FILE
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{index} can't be read as an index of shards: {error}") from error
        files = [_inside(folder, name, index) for name in names]
    elif (folder / _WEIGHTS_FILE).is_file():
        files = [folder / _WEIGHTS_FILE]
    elif (folder / STATE_FILE).is_file():
        raise CheckpointError(f"{folder} has {STATE_FILE}, and neither {_WEIGHTS_FILE} nor {_INDEX_FILE}")
    else:
        raise CheckpointNotFoundError(f"{folder} has neither {_WEIGHTS_FILE} nor {_INDEX_FILE}; it is not a checkpoint")
    library = safetensors_library()
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for path in files:
        try:
            # an interrupt inside the library would come out as an error of its own
            with interrupts_held(), library.safe_open(path, framework="pt") as file:
                content, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}
        except (library.SafetensorError, KeyError, ValueError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{path} can't be read as safetensors: {error}") from error
        tensors.update(content)
        aliases.update((alias, name) for alias, name in metadata.items() if name in content)
    return tensors, aliases


def write_state(draft: Draft, state: Mapping[str, Any]) -> None:
    """Write plain containers and tensors as `STATE_FILE`."""
    handled = sys.exception()
    try:
        with draft.open(STATE_FILE) as file, interrupts_held():
            torch.save(dict(state), file)  # type: ignore[arg-type]  # it has what torch needs
    except RuntimeError as error:  # torch's writer, closing after a failed write, hides why that ended
        first: BaseException = error
        while first.__context__ not in (None, handled):
            first = first.__context__
        raise first from None
