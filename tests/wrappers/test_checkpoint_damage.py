"""Damaged checkpoints, two savers at once, and Ctrl-C: nothing wrong is loaded, nothing whole is lost."""

import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from roundpipe import CheckpointError
from roundpipe.core.contexts import garbage_kept
from roundpipe.wrappers import checkpoint_files, checkpoint_folder
from tests.faults.checkpoints import Damager, Trained, fields
from tests.faults.interrupts import Interrupter
from tests.wrappers.cases_checkpoint import WIDTH, adamw, assert_equal, clones, piped, train

ROOT = Path(__file__).parent.parent.parent


def test_flipped_bits_and_cut_files_are_refused_by_name():
    with Damager() as damager:
        assert not [problem for seed in range(60) for problem in damager.damage(seed)]
        assert not [problem for seed in range(20) for problem in damager.damage(seed, cuts=True)]


def test_wrong_fields_and_files_elsewhere_are_refused():
    assert not fields()


def test_what_is_on_the_disk_is_compared_before_it_replaces_the_old_one(tmp_path, monkeypatch):
    flush = os.fsync

    def damaging(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.endswith("model.safetensors"):
            with open(path, "r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"\xff")
        flush(descriptor)

    with piped() as model:
        model.save_checkpoint(tmp_path / "c", step=1)
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", damaging)
            with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
                model.save_checkpoint(tmp_path / "c", step=2)
        assert [path.name for path in tmp_path.iterdir()] == ["c"]
        assert model.load_checkpoint(tmp_path / "c").step == 1


def test_a_save_by_an_older_version_leaves_a_manifest_that_does_not_count(tmp_path):
    with piped() as model:
        model.save_checkpoint(tmp_path / "c", step=1)
        model.save_checkpoint(tmp_path / "d", step=2)
        state = torch.load(tmp_path / "d" / "training_state.pt", weights_only=True)
        del state["scheduler_class"], state["scaler_class"]
        torch.save(state, tmp_path / "d" / "training_state.pt")
        shutil.copy(tmp_path / "c" / "checkpoint_manifest.json", tmp_path / "d")
        assert model.load_checkpoint(tmp_path / "d").step == 2
        (tmp_path / "c" / "checkpoint_manifest.json").unlink()
        with pytest.raises(CheckpointError, match=r"checkpoint_manifest\.json is damaged or missing"):
            model.load_checkpoint(tmp_path / "c")


def test_a_load_that_fails_late_puts_back_what_it_has_changed(tmp_path):
    class Refusing(torch.optim.lr_scheduler.StepLR):
        def load_state_dict(self, state):
            super().load_state_dict(state)
            if self.gamma == 0.5:
                raise RuntimeError("refused")

    with piped() as model:
        optimizer = adamw(model)
        train(model, optimizer, 2)
        model.save_checkpoint(tmp_path / "c", optimizer, Refusing(optimizer, 1, gamma=0.5))
    with piped(seed=2) as model:
        optimizer = adamw(model)
        train(model, optimizer, 1)
        scheduler = Refusing(optimizer, 7, gamma=0.1)
        before = clones(model), repr(optimizer.state_dict()), repr(scheduler.state_dict()), torch.get_rng_state()
        with pytest.raises(CheckpointError, match="scheduler can't take over its state.*refused; nothing was changed"):
            model.load_checkpoint(tmp_path / "c", optimizer, scheduler)
        assert_equal(clones(model), before[0])
        assert (repr(optimizer.state_dict()), repr(scheduler.state_dict())) == before[1:3]
        assert torch.equal(torch.get_rng_state(), before[3])
        train(model, optimizer, 1)


SAVE_OFTEN = """
    import sys, torch, roundpipe
    from torch import nn

    with roundpipe.RoundPipe(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), devices=["cpu"]) as model:
        for step in range(int(sys.argv[2]), int(sys.argv[2]) + 15):
            with torch.no_grad():
                for parameter in model.model.parameters():
                    parameter.fill_(step)
            model.save_checkpoint(sys.argv[1], step=step, is_async=step % 2 == 1)
            loaded = model.load_checkpoint(sys.argv[1]).step
            assert all((parameter == loaded).all() for parameter in model.model.parameters())
"""


@pytest.mark.long
def test_two_processes_save_into_one_folder(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(SAVE_OFTEN), str(tmp_path / "c")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen([*command, str(first)], env=environment, stderr=subprocess.PIPE, text=True)
        for first in (100, 200)
    ]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_save_that_goes_on_for_ever_is_not_waited_for_as_long(tmp_path, monkeypatch):
    go_on, write = threading.Event(), checkpoint_files.write_weights
    monkeypatch.setattr(checkpoint_folder, "LOCK_DEADLINE_S", 0.2)
    with piped() as model, piped() as other:
        with monkeypatch.context() as patched:
            patched.setattr(checkpoint_files, "write_weights", lambda *args: (go_on.wait(20), write(*args)))
            future = model.save_checkpoint(tmp_path / "c", step=1, is_async=True)
            while not list(tmp_path.glob("c.tmp-*")):
                time.sleep(0.01)
        with pytest.raises(CheckpointError, match=rf"process {os.getpid()} on .* has been saving .* remove .*c\.lock"):
            other.save_checkpoint(tmp_path / "c", step=2)
        go_on.set()
        future.result()
        assert model.load_checkpoint(tmp_path / "c").step == 1
        other.save_checkpoint(tmp_path / "c", step=3)
        assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_file_system_without_locks_is_told_of(tmp_path, monkeypatch, caplog):
    def refuse(file, operation):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(checkpoint_folder.fcntl, "flock", refuse)
    with piped() as model:
        model.save_checkpoint(tmp_path / "c", step=1)
        assert "has no locks" in caplog.text and model.load_checkpoint(tmp_path / "c").step == 1


def test_ctrl_c_at_any_line_of_a_save_leaves_the_old_or_the_new_checkpoint(tmp_path):
    with piped() as model:
        optimizer = adamw(model)
        train(model, optimizer, 1)
        model.save_checkpoint(tmp_path / "c", optimizer, step=0)
        with Interrupter() as counter:
            model.save_checkpoint(tmp_path / "c", optimizer, step=0)
        last = interrupts = 0
        for line in range(0, counter.count, max(1, counter.count // 90)):
            try:
                with Interrupter(line) as interrupter:
                    model.save_checkpoint(tmp_path / "c", optimizer, step=line + 1)
            except KeyboardInterrupt:
                interrupts += 1
            else:  # what a load has read anew may take fewer lines to save
                assert not interrupter.place, f"the interrupt at {interrupter.place} was lost"
            expected = clones(model)
            step = model.load_checkpoint(tmp_path / "c", optimizer).step
            assert step in (last, line + 1), line
            assert_equal(clones(model), expected)
            last = step
        assert interrupts > 60
        model.save_checkpoint(tmp_path / "c", optimizer, step=-1)
        assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_ctrl_c_at_any_line_of_a_load_leaves_the_old_or_the_new_state(tmp_path):
    saved, trained = Trained(1), Trained(2)
    with saved.pipe, trained.pipe:
        for each, name in ((saved, "c"), (trained, "own")):
            each.step()
            each.save(tmp_path / name)
        states = {"own": trained.snapshot()}
        with Interrupter() as counter:
            trained.load(tmp_path / "c")
        states["c"] = trained.snapshot()
        seen, lines = set(), range(counter.count // 2, counter.count - 100, counter.count // 50)
        interrupts = 0
        for line in lines:
            trained.load(tmp_path / "own")
            try:
                with Interrupter(line) as interrupter:
                    trained.load(tmp_path / "c")
            except KeyboardInterrupt:
                interrupts += 1
            else:  # a load may take fewer lines than the one that was counted
                assert not interrupter.place, f"the interrupt at {interrupter.place} was lost"
            found = [name for name, state in states.items() if state == trained.snapshot()]
            assert found, line
            seen.update(found)
        assert seen == {"own", "c"} and interrupts >= len(lines) - 3


def test_ctrl_c_inside_safetensors_is_a_keyboard_interrupt(tmp_path, monkeypatch):
    with piped() as model:
        optimizer = adamw(model)
        train(model, optimizer, 1)
        model.save_checkpoint(tmp_path / "c", optimizer)
        read = torch.UntypedStorage.__getitem__

        def interrupted(storage, place):
            if isinstance(place, int):  # by torch, whose error takes the place of the interrupt
                signal.raise_signal(signal.SIGINT)
            return read(storage, place)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(torch.UntypedStorage, "__getitem__", interrupted)
            model.load_checkpoint(tmp_path / "c", optimizer)
        model.load_checkpoint(tmp_path / "c", optimizer)
        train(model, optimizer, 1)


def test_ctrl_c_at_any_moment_of_a_save_is_a_keyboard_interrupt(tmp_path):
    """No garbage is collected meanwhile: an interrupt inside a finalizer or the warning of an unclosed file is lost."""
    rng, num_interrupts = random.Random(1), 0
    gc.collect()
    with garbage_kept(), piped() as model:
        model.save_checkpoint(tmp_path / "c", step=0)
        extra = {str(index): torch.zeros(20_000) for index in range(100)}
        for step in range(1, 25):
            timer = threading.Timer(rng.uniform(0.0, 0.05), os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()
                model.save_checkpoint(tmp_path / "c", step=step, extra=extra)
                timer.join()
                time.sleep(0.01)
            except KeyboardInterrupt:
                num_interrupts += 1
            timer.join()
            assert model.load_checkpoint(tmp_path / "c").step <= step
    assert num_interrupts == 24


INSIDE_TORCH = """
    import signal, sys, traceback, torch
    from pathlib import Path
    from roundpipe.wrappers.checkpoint_files import Draft, write_state

    def interrupt(frame, event, argument):
        if frame.f_code.co_name == sys.argv[2] and frame.f_code.co_filename == torch.serialization.__file__:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)

    sys.settrace(interrupt)
    try:
        write_state(Draft(Path(sys.argv[1])), {"x": torch.ones(8)})
    except KeyboardInterrupt as error:
        traceback.clear_frames(error.__traceback__)  # with them torch's writer is deleted
        print("interrupted")
"""


@pytest.mark.parametrize("where", ["__enter__", "__exit__"])
def test_ctrl_c_around_the_writer_of_torch_does_not_end_the_process(tmp_path, where):
    given = [sys.executable, "-c", textwrap.dedent(INSIDE_TORCH), str(tmp_path), where]
    ended = subprocess.run(given, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "interrupted\n"), ended.stderr


def test_ctrl_c_inside_what_removes_the_old_checkpoint_is_a_keyboard_interrupt(tmp_path):
    """`shutil.rmtree` closes a file again if it is cut short before it has noted that it has."""
    with piped() as model:
        model.save_checkpoint(tmp_path / "c", step=0)
        with Interrupter(source=shutil.__file__) as counter:
            model.save_checkpoint(tmp_path / "c", step=0)
        assert counter.count > 20
        for line in range(counter.count):
            with pytest.raises(KeyboardInterrupt), Interrupter(line, shutil.__file__):
                model.save_checkpoint(tmp_path / "c", step=1)
        model.save_checkpoint(tmp_path / "c", step=2)
        assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError])
def test_what_ends_a_write_inside_the_writer_of_torch_is_what_the_caller_gets(tmp_path, monkeypatch, error):
    write, due = checkpoint_files.SummedFile.write, [error("once")]

    def interrupted(file, data):
        if file.num_bytes > 2000 and due:
            raise due.pop()
        return write(file, data)

    with piped() as model:
        model.save_checkpoint(tmp_path / "c", step=1)
        with monkeypatch.context() as patched:
            patched.setattr(checkpoint_files.SummedFile, "write", interrupted)
            with pytest.raises(CheckpointError if error is OSError else error, match="once"):
                try:
                    raise ValueError("handled, while the save runs")
                except ValueError:
                    model.save_checkpoint(tmp_path / "c", step=2, extra=torch.zeros(WIDTH, 10_000))
        assert model.load_checkpoint(tmp_path / "c").step == 1
        assert [path.name for path in tmp_path.iterdir()] == ["c"]
