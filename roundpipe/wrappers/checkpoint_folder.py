"""The folder of a checkpoint: found after a crash, replaced as a whole, by one save at a time.

With one random token X for each save, which holds the lock file ``dir.lock`` from its beginning to its end:

    dir.tmp-X is written, flushed and checked     a crash here: dir is the previous checkpoint
    dir -> dir.old-X                              a crash here: dir.tmp-X is whole, since dir.old-X is there
    dir.tmp-X -> dir                              a crash here: dir is the new checkpoint
    dir.old-X -> dir.tmp-Y, and removed

Invariant: a checkpoint under its own name, or ``dir.tmp-X`` beside ``dir.old-X``, is whole. `find` only looks;
leftovers are put right or removed by the next save (`replacing`).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from roundpipe.core.contexts import contextmanager, interrupts_first
from roundpipe.core.errors import CheckpointError, ConfigError
from roundpipe.wrappers.checkpoint_files import OWN_FILES, STATE_FILE, Draft, flush

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

LOCK_DEADLINE_S = 1800.0
"""How long a save waits for one of another process into the same folder."""

_NUM_READS = 20


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
def replacing(folder: Path) -> Iterator[Draft]:
    """A draft to write into, which takes the place of ``folder`` at the end of the block, once it is checked.

    After an error everything is as it was. Files in ``folder`` that no checkpoint writes, such as those of a
    tokenizer, are kept. A save of another process into the same folder is waited for.

    Raises:
        ConfigError: ``folder`` is something else than a checkpoint.
        CheckpointError: the disk is full, there is no permission, or another save holds the folder.
    """
    check_replaceable(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with interrupts_first(), _locked(folder):
            yield from _replacing(folder)
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        problem = CheckpointError(
            f"the checkpoint {folder} can't be written: {error}; its parent folder must be writable and have room for "
            "two checkpoints. A checkpoint that was there is whole"
        )
        problem.errno = error.errno
        raise problem from error


def _replacing(folder: Path) -> Iterator[Draft]:
    token = secrets.token_hex(4)
    new, old = (folder.with_name(f"{folder.name}.{kind}-{token}") for kind in ("tmp", "old"))
    try:
        _tidy(folder)
        new.mkdir()
        draft = Draft(new)
        yield draft
        if folder.is_dir():
            shutil.copymode(folder, new)
            _carry_over(folder, new)
        draft.finish()
        flush(folder.parent)
        if folder.is_dir():
            os.rename(folder, old)
        os.rename(new, folder)
        flush(folder.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            _discard(new)  # first, since old counts as replaced while both are there
            if old.is_dir() and not folder.exists():
                os.rename(old, folder)
        raise
    _discard(old)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold ``dir.lock``, which says who holds it; the system gives it back when a process dies."""
    path, deadline_s = folder.with_name(f"{folder.name}.lock"), time.monotonic() + LOCK_DEADLINE_S
    is_told = False
    while True:
        with open(path, "a+b", buffering=0) as file:
            if _lock(file, path):
                try:
                    file.truncate(0)
                    file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
                    yield
                finally:
                    with contextlib.suppress(OSError):
                        path.unlink()  # while it is held, so that nobody else has it by now
                return
            file.seek(0)
            holder = file.read().decode(errors="replace") or "another process"
        if time.monotonic() > deadline_s:
            raise CheckpointError(
                f"the checkpoint {folder} was not written: {holder} has been saving to it for {LOCK_DEADLINE_S:.0f} s; "
                f"save to a folder of its own, or end that process and remove {path} if it is still there"
            )
        if not is_told:
            logger.warning("waiting for %s, which is saving to %s too", holder, folder)
            is_told = True
        time.sleep(0.02)


def _lock(file: BinaryIO, path: Path) -> bool:
    """Whether the open file could be locked and is still the one at ``path``."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning("%s: this file system has no locks (%s); nothing else may save there meanwhile", path, error)
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


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
        if OWN_FILES.fullmatch(entry.name) or (new / entry.name).exists():
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
