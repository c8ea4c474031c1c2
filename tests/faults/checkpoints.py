"""Damages checkpoints and kills saves: ``python -m tests.campaigns kills``, ``flips`` and ``cuts``.

kills     a process that saves over and over is killed; the last checkpoint that it told of, or the next, loads
flips     one bit of one file is another; the load is refused, names the file and has changed nothing
cuts      a file ends early, likewise
fields    a checkpoint of the first version, which has no checksums, with a wrong field; refused, nothing changed
paths     an index or a manifest that names files elsewhere; refused, nothing changed
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import roundpipe
from roundpipe import CheckpointError
from roundpipe.core.random_state import portable_random_state
from roundpipe.wrappers import checkpoint_files
from tests.faults.fields import EDITS

WIDTH = 4
ROOT = Path(__file__).parent.parent.parent
MANIFEST, INDEX = checkpoint_files.MANIFEST_FILE, "model.safetensors.index.json"


class Config:
    """Writes itself, as those of transformers do."""

    def save_pretrained(self, folder: Path) -> None:
        """Write ``config.json``."""
        (Path(folder) / "config.json").write_text(json.dumps({"model_type": "linear", "width": WIDTH}))


class Counting(nn.Linear):
    """Has state beside its tensors."""

    seen = 0

    def get_extra_state(self) -> dict[str, int]:
        """Called by ``state_dict``."""
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Called by ``load_state_dict``."""
        self.seen = state["seen"] + 0


class Trained:
    """A model with everything that a checkpoint can hold."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Counting(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
        model = nn.Sequential(*layers).to(torch.bfloat16)
        model.config = Config()  # type: ignore[assignment]
        self.pipe = roundpipe.RoundPipe(model, optim_dtype=torch.float32, devices=["cpu"])
        self.optimizer = torch.optim.AdamW(self.pipe.optim_parameters(), lr=0.01 * seed)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.scaler = roundpipe.GradScaler(init_scale=2.0 * seed)

    def step(self) -> None:
        """One step of training."""
        x = torch.randn(4, WIDTH, dtype=torch.bfloat16)
        self.pipe.forward_backward((x,), loss_fn=lambda outputs, label: self.scaler.scale(outputs.square().sum()))
        self.pipe.step(lambda: (self.scaler.step(self.optimizer), self.scaler.update()), is_async=False)
        self.scheduler.step()

    def save(self, folder: Path) -> None:
        """In several shards."""
        shards, checkpoint_files.write_weights.__defaults__ = checkpoint_files.write_weights.__defaults__, (60,)
        try:
            extra = {"seen": [1, 2.5, torch.arange(3)]}
            self.pipe.save_checkpoint(folder, self.optimizer, self.scheduler, self.scaler, step=3, extra=extra)
        finally:
            checkpoint_files.write_weights.__defaults__ = shards

    def load(self, folder: Path) -> Any:
        """All of it."""
        return self.pipe.load_checkpoint(folder, self.optimizer, self.scheduler, self.scaler)

    def snapshot(self) -> Any:
        """Everything that a load changes; can be compared."""
        parts = [self.pipe.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict()]
        copies = list(self.pipe.optim_named_parameters())
        return _comparable([*parts, self.scaler.state_dict(), copies, portable_random_state()])


def _comparable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: _comparable(each) for key, each in value.items()}
    return [_comparable(each) for each in value] if isinstance(value, list | tuple) else value


def refusal(trained: Trained, folder: Path, word: str) -> str:
    """What is wrong with how a damaged folder is refused; empty: as promised."""
    before = trained.snapshot()
    try:
        trained.load(folder)
    except CheckpointError as error:
        problem = "" if word in str(error) else f"names no {word}: {error}"
    except Exception as error:
        problem = f"raw {type(error).__name__}: {error}"
    else:
        problem = "loaded"
    return problem or ("" if trained.snapshot() == before else "changed something")


@contextmanager
def _restored(path: Path) -> Iterator[bytes]:
    content = path.read_bytes()
    try:
        yield content
    finally:
        path.write_bytes(content)


class Damager:
    """Flips bits and cuts files of a checkpoint, and looks at how it is refused."""

    def __enter__(self) -> Damager:
        self._root = tempfile.TemporaryDirectory()
        self._folder = Path(self._root.name) / "c"
        self._saved, self._trained = Trained(1), Trained(2)
        for each in (self._saved, self._trained):
            each.step()
        self._saved.save(self._folder)
        return self

    def __exit__(self, *exception: object) -> None:
        with self._saved.pipe, self._trained.pipe, self._root:
            self._saved.load(self._folder)  # the files are as they were

    def damage(self, seed: int, *, cuts: bool = False) -> list[str]:
        """Flip one bit, or cut one file; what was not as promised."""
        rng = random.Random(seed)
        path = rng.choice(sorted(self._folder.iterdir()))
        with _restored(path) as content:
            position = rng.randrange(len(content) if cuts else 8 * len(content))
            damaged = bytearray(content[:position] if cuts else content)
            if not cuts:
                damaged[position // 8] ^= 1 << position % 8
            path.write_bytes(damaged)
            problem = refusal(self._trained, self._folder, path.name)
        what = f"{path.name} cut to {position} bytes" if cuts else f"bit {position} of {path.name}"
        return [f"{what}: {problem}"] if problem else []


def as_first_version(folder: Path, edit: Callable[[dict[str, Any]], Any] = lambda state: None) -> None:
    """Make a checkpoint one of the versions without checksums."""
    path = folder / checkpoint_files.STATE_FILE
    state = torch.load(path, weights_only=True)
    for name in ("scheduler_class", "scaler_class"):
        del state[name]
    edited = edit(state)
    torch.save(state if edited is None else edited, path)
    (folder / MANIFEST).unlink(missing_ok=True)


def fields() -> list[str]:
    """Wrong fields, and names of files elsewhere; returns what was not as promised."""
    problems = []
    with tempfile.TemporaryDirectory() as root:
        saved, trained = Trained(1), Trained(2)
        with saved.pipe, trained.pipe:
            for each in (saved, trained):
                each.step()
            saved.save(Path(root) / "whole")
            for name, edit in EDITS.items():
                folder = Path(root) / "c"
                shutil.copytree(Path(root) / "whole", folder)
                as_first_version(folder, edit)
                if problem := refusal(trained, folder, ""):
                    problems.append(f"{name}: {problem}")
                shutil.rmtree(folder)
            for name in ELSEWHERE:
                problems += _named_elsewhere(trained, Path(root), name)
            shutil.copytree(Path(root) / "whole", folder)
            as_first_version(folder)
            saved.load(folder)
    return problems


ELSEWHERE = ["../outside.safetensors", "/dev/zero", "..", "", "a/../b", "no such file", None, 3, ["x"], "\0"]


def _named_elsewhere(trained: Trained, root: Path, name: Any) -> Iterator[str]:
    folder = root / "c"
    shutil.copytree(root / "whole", folder)
    shutil.copy(next(folder.glob("*.safetensors")), root / "outside.safetensors")
    if isinstance(name, str):
        checksums = json.loads((folder / MANIFEST).read_bytes())["files"]
        checksums[name] = {"bytes": 0, "crc32": 0}
        (folder / MANIFEST).write_bytes(checkpoint_files._manifest(checksums))  # as somebody with bad intent would
        if problem := refusal(trained, folder, "manifest"):
            yield f"manifest with {name!r}: {problem}"
    as_first_version(folder)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][next(iter(index["weight_map"]))] = name
    (folder / INDEX).write_text(json.dumps(index))
    if problem := refusal(trained, folder, INDEX):
        yield f"index with {name!r}: {problem}"
    shutil.rmtree(folder)


SAVE_UNTIL_KILLED = """
import os, sys
import torch, roundpipe
from torch import nn

torch.set_num_threads(1)
roundpipe.RoundPipe  # imported before the fork, which is quick

def child(dir, first):
    os.setpgid(0, 0)
    model = roundpipe.RoundPipe(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), devices=["cpu"])
    step = first
    while True:
        with torch.no_grad():
            for parameter in model.model.parameters():
                parameter.fill_(step)
        model.save_checkpoint(dir, step=step, extra=[torch.full((100,), step)], is_async=step % 2 == 1)
        model.synchronize()
        os.write(1, f"{step}\\n".encode())
        step += 1

for line in sys.stdin:
    dir, first = line.split()
    pid = os.fork()
    if pid == 0:
        child(dir, int(first))
    os.write(1, f"pid {pid}\\n".encode())
    os.waitpid(pid, 0)
    os.write(1, b"dead\\n")
"""


class Killer:
    """Kills processes in the middle of saves."""

    def __enter__(self) -> Killer:
        self._root = tempfile.TemporaryDirectory()
        self._folder = Path(self._root.name) / "c"
        self._last = 0
        self._model = roundpipe.RoundPipe(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), devices=["cpu"])
        self._saver = subprocess.Popen(
            [sys.executable, "-c", SAVE_UNTIL_KILLED],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._saver.stdin is not None
        self._saver.stdin.close()
        self._saver.wait()
        self._model.close()
        self._root.cleanup()

    def kill(self, seed: int) -> list[str]:
        """Kill one at some moment; what was not as promised."""
        given, told = self._saver.stdin, self._saver.stdout
        assert given is not None and told is not None
        print(self._folder, self._last + 1, file=given, flush=True)
        pid = int(told.readline().split()[1])
        self._last = int(told.readline())
        time.sleep(random.Random(seed).uniform(0, 0.04))
        os.kill(pid, signal.SIGKILL)
        while (line := told.readline()) != "dead\n":
            self._last = int(line)
        try:
            loaded = self._model.load_checkpoint(self._folder)
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]
        problems, last, self._last = [], self._last, loaded.step
        whole = torch.equal(loaded.extra[0], torch.full((100,), loaded.step))
        if not whole or not all((parameter == loaded.step).all() for parameter in self._model.parameters()):
            problems.append("a mixture of checkpoints")
        if not last <= loaded.step <= last + 1:
            problems.append(f"the checkpoint of step {loaded.step} after that of {last}")
        return problems

    def what_is_left(self) -> list[str]:
        """What is beside the checkpoint after one more save."""
        self._model.save_checkpoint(self._folder)
        names = [path.name for path in Path(self._root.name).iterdir()]
        return [] if names == ["c"] else [f"left behind: {names}"]
