"""Checkpoints while things go wrong: background saves, crashes, full disks."""

import errno
import logging
import os
import pathlib
import resource
import shutil
import signal
import threading
import time
from concurrent.futures import wait as wait_for

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import CheckpointError
from roundpipe.wrappers import checkpoint_files
from tests.faults.checkpoints import Killer
from tests.wrappers.cases_checkpoint import WIDTH, adamw, assert_equal, clones, loss, piped, train

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def test_a_background_save_is_of_the_moment_it_was_asked_for(tmp_path, monkeypatch):
    go_on = threading.Event()
    write = checkpoint_files.write_weights
    monkeypatch.setattr(checkpoint_files, "write_weights", lambda *args: (go_on.wait(20), write(*args)))
    with piped() as model:
        optimizer = adamw(model)
        train(model, optimizer, 2)
        extra = {"seen": torch.zeros(2)}
        expected = clones(model)
        model.save_checkpoint(tmp_path / "c", optimizer, extra=extra, is_async=True)
        expected_moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
        extra["seen"] += 1
        for _ in range(2):
            model.forward_backward((torch.randn(8, WIDTH),), loss_fn=loss)
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        assert not (tmp_path / "c").exists()
        go_on.set()
        model.synchronize()
        assert (tmp_path / "c").exists()
    with piped(seed=2) as model:
        optimizer = adamw(model)
        found = model.load_checkpoint(tmp_path / "c", optimizer)
        assert_equal(clones(model), expected)
        assert found.extra["seen"].sum() == 0
        for state, moment in zip(optimizer.state.values(), expected_moments, strict=True):
            assert torch.equal(state["exp_avg"], moment)


def test_close_and_the_next_save_wait_for_a_background_save(tmp_path, monkeypatch):
    write = checkpoint_files.write_weights
    monkeypatch.setattr(checkpoint_files, "write_weights", lambda *args: (time.sleep(0.2), write(*args)))
    with piped() as model:
        model.save_checkpoint(tmp_path / "a", step=1, is_async=True)
        model.save_checkpoint(tmp_path / "b", step=2, is_async=True)
        assert (tmp_path / "a").exists() and not (tmp_path / "b").exists()
        model.save_checkpoint(tmp_path / "b", step=3, is_async=True)
    assert (tmp_path / "b").exists()
    assert torch.load(tmp_path / "b" / "training_state.pt", weights_only=True)["step"] == 3


@pytest.mark.parametrize("noticed_by", ["call", "save", "synchronize", "close", "result", "exception"])
def test_the_error_of_a_background_save_is_raised_once(tmp_path, monkeypatch, noticed_by, caplog):
    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    caplog.set_level(logging.CRITICAL)
    with piped() as model:
        with monkeypatch.context() as patched:
            patched.setattr(checkpoint_files, "write_weights", fail)
            future = model.save_checkpoint(tmp_path / "c", is_async=True)
            wait_for([future])
        with pytest.raises(OSError, match="No space left") as caught:
            if noticed_by == "call":
                model(torch.randn(4, WIDTH))
            elif noticed_by == "save":
                model.save_checkpoint(tmp_path / "c")
            elif noticed_by == "exception":
                raise future.exception()
            else:
                (future.result if noticed_by == "result" else getattr(model, noticed_by))()
        assert type(caught.value) is CheckpointError and str(tmp_path / "c") in str(caught.value)
        assert not list(tmp_path.iterdir())
        if noticed_by != "close":
            model(torch.randn(4, WIDTH))
            model.save_checkpoint(tmp_path / "c")


def test_the_future_of_a_save(tmp_path, monkeypatch):
    go_on = threading.Event()
    write = checkpoint_files.write_weights
    with piped() as model:
        with monkeypatch.context() as patched:
            patched.setattr(checkpoint_files, "write_weights", lambda *args: (go_on.wait(20), write(*args)))
            future = model.save_checkpoint(tmp_path / "c", step=1, is_async=True)
            assert not future.done() and not future.cancel()
            with pytest.raises(TimeoutError):
                future.result(timeout=0.05)
            go_on.set()
            assert future.result() is None and future.done()
        assert model.load_checkpoint(tmp_path / "c").step == 1
        future = model.save_checkpoint(tmp_path / "c", step=2)
        assert future.done() and future.exception() is None


def test_without_a_thread_a_background_save_raises_and_the_next_one_works(tmp_path, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with piped() as model:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start"):
                model.save_checkpoint(tmp_path / "c", is_async=True)
        model.synchronize()
        assert not list(tmp_path.iterdir())
        model.save_checkpoint(tmp_path / "c", step=1, is_async=True).result()
        assert model.load_checkpoint(tmp_path / "c").step == 1


@pytest.mark.parametrize("then", ["synchronize", "close", "save", "load"])
@pytest.mark.parametrize("interrupted", ["synchronize", "close"])
def test_after_ctrl_c_in_a_wait_for_a_background_save_the_next_wait_is_one(tmp_path, monkeypatch, interrupted, then):
    go_on = threading.Event()
    write = checkpoint_files.write_weights
    monkeypatch.setattr(checkpoint_files, "write_weights", lambda *args: (go_on.wait(20), write(*args)))
    with piped() as model:
        future = model.save_checkpoint(tmp_path / "c", step=1, is_async=True)
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            getattr(model, interrupted)()
        timer.join()
        assert not future.done()
        threading.Timer(0.3, go_on.set).start()
        if interrupted == "close":
            model.close()
        elif then == "save":
            model.save_checkpoint(tmp_path / "d")
        elif then == "load":
            assert model.load_checkpoint(tmp_path / "c").step == 1
        else:
            getattr(model, then)()
        assert future.done() and (tmp_path / "c").exists()


def test_killed_at_any_moment_the_last_complete_checkpoint_loads():
    with Killer() as killer:
        assert not [problem for seed in range(12) for problem in killer.kill(seed)]
        assert not killer.what_is_left()


RENAME_CALLS = ["the old one away", "the new one in", "the old one to be removed"]


@pytest.mark.parametrize("call_index", range(3), ids=RENAME_CALLS)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_crash_around_each_rename(tmp_path, monkeypatch, call_index, before):
    folder = tmp_path / "c"

    class Crash(BaseException):
        pass

    calls = []

    def rename(source, target):
        if len(calls) == call_index:
            calls.append((source, target))
            if not before:
                os.replace(source, target)
            raise Crash
        if len(calls) > call_index:
            raise Crash  # a dead process renames nothing back
        calls.append((source, target))
        os.replace(source, target)

    with piped() as model:
        model.save_checkpoint(folder, step=1)
        with monkeypatch.context() as patched:
            patched.setattr(os, "rename", rename)
            patched.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
            with pytest.raises(Crash):
                model.save_checkpoint(folder, step=2)
        is_new = (call_index, before) != (0, True)  # once the old one is out of the way, the new one is whole
        assert model.load_checkpoint(folder).step == (2 if is_new else 1)
        assert folder.exists() is not ((call_index, before) in [(0, False), (1, True)])
        folder.mkdir(exist_ok=True)  # as scripts do when they start
        assert model.load_checkpoint(folder).step == (2 if is_new else 1)
        with monkeypatch.context() as patched:  # the next save fails, after it has put things right
            patched.setattr(checkpoint_files, "write_weights", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model.save_checkpoint(folder, step=3)
        assert model.load_checkpoint(folder).step == (2 if is_new else 1)
        assert [path.name for path in tmp_path.iterdir()] == ["c"]
        model.save_checkpoint(folder, step=4)
        assert model.load_checkpoint(folder).step == 4
        assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("error", [OSError(errno.EBUSY, "busy"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("call_index", [0, 1])
def test_an_error_between_the_renames_puts_the_old_one_back(tmp_path, monkeypatch, call_index, error):
    calls = []

    def rename(source, target):
        calls.append((source, target))
        if len(calls) == call_index + 1:
            raise error
        os.replace(source, target)

    with piped() as model:
        model.save_checkpoint(tmp_path / "c", step=1)
        with monkeypatch.context() as patched:
            patched.setattr(os, "rename", rename)
            with pytest.raises(type(error)):
                model.save_checkpoint(tmp_path / "c", step=2)
        assert [path.name for path in tmp_path.iterdir()] == ["c"]
        assert model.load_checkpoint(tmp_path / "c").step == 1


@pytest.mark.parametrize("limit_bytes", [1000, 100_000])
def test_a_full_disk_leaves_nothing_behind(tmp_path, limit_bytes):
    with roundpipe.RoundPipe(nn.Linear(50, 50)) as model:
        model.save_checkpoint(tmp_path / "c", step=1)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))  # in the weights, or in the state
        try:
            with pytest.raises(OSError) as caught:
                model.save_checkpoint(tmp_path / "c", step=2, extra=torch.zeros(200_000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert type(caught.value) is CheckpointError and "have room for two" in str(caught.value)
        assert caught.value.errno == errno.EFBIG
        assert [path.name for path in tmp_path.iterdir()] == ["c"]
        assert model.load_checkpoint(tmp_path / "c").step == 1


def test_reading_while_another_saves_finds_one_checkpoint(tmp_path):
    over = threading.Event()

    def linear():
        return roundpipe.RoundPipe(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))

    def save_on():
        step = 1
        with linear() as model:
            while not over.is_set():
                with torch.no_grad():
                    for parameter in model.model.parameters():
                        parameter.fill_(step)
                model.save_checkpoint(tmp_path / "c", step=step)
                step += 1

    with linear() as model:
        model.save_checkpoint(tmp_path / "c", step=0)
        thread = threading.Thread(target=save_on)
        thread.start()
        found = set()
        try:
            while len(found) < 15:
                step = model.load_checkpoint(tmp_path / "c").step
                found.add(step)
                assert not step or all((parameter == step).all() for parameter in model.parameters())
        finally:
            over.set()
            thread.join()


def test_without_write_permission(tmp_path, monkeypatch):
    def refuse(path, *args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with piped() as model:
        model.save_checkpoint(tmp_path / "c", step=1)
        with monkeypatch.context() as patched:  # not by chmod, which root does not feel
            patched.setattr(pathlib.Path, "mkdir", refuse)
            with pytest.raises(CheckpointError, match=r"Permission denied.*must be writable") as caught:
                model.save_checkpoint(tmp_path / "c", step=2)
        assert caught.value.errno == errno.EACCES and isinstance(caught.value.__cause__, PermissionError)
        assert model.load_checkpoint(tmp_path / "c").step == 1
