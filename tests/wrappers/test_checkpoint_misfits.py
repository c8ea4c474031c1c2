"""What a load or a save refuses, and what it leaves alone."""

import json
import os
import shutil

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.errors import CheckpointError, CheckpointMisfitError, CheckpointNotFoundError, ConfigError
from roundpipe.wrappers import checkpoint
from tests.faults.checkpoints import as_first_version
from tests.wrappers.cases_checkpoint import WIDTH, assert_equal, clones, piped, sgd


def test_only_checkpoints_are_replaced_and_strangers_in_them_are_kept(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("")
    (tmp_path / "c.tmp-notes").mkdir()
    with piped() as model:
        for is_async in (False, True):
            with pytest.raises(ConfigError, match=r"holds thesis\.tex and no training_state\.pt"):
                model.save_checkpoint(tmp_path / "work", is_async=is_async)
            with pytest.raises(ConfigError, match="is a file"):
                model.save_checkpoint(tmp_path / "file", is_async=is_async)
        (tmp_path / "deeper" / "c").mkdir(parents=True)  # empty: may be replaced
        model.save_checkpoint(tmp_path / "deeper" / "c")
        folder = tmp_path / "c"
        model.save_checkpoint(folder)
        (folder / "tokenizer.json").write_text("{}")
        (folder / "logs").mkdir()
        (folder / "logs" / "1").write_text("one")
        (folder / "link").symlink_to("nowhere")
        (folder / "model-00001-of-00002.safetensors").write_text("of an earlier save")
        model.save_checkpoint(folder, step=5)
        assert (folder / "tokenizer.json").read_text() == "{}" and (folder / "logs" / "1").read_text() == "one"
        assert os.readlink(folder / "link") == "nowhere"
        assert not (folder / "model-00001-of-00002.safetensors").exists()
        folder.chmod(0o750)
        model.save_checkpoint(folder, step=5)
        assert folder.stat().st_mode & 0o777 == 0o750
        assert (tmp_path / "c.tmp-notes").exists() and (tmp_path / "work" / "thesis.tex").exists()
        os.symlink(folder, tmp_path / "latest")
        model.save_checkpoint(tmp_path / "latest", step=6)
        assert (tmp_path / "latest").is_symlink() and model.load_checkpoint(folder).step == 6


def test_what_does_not_fit_is_named_and_changes_nothing(tmp_path):
    folder = tmp_path / "c"
    with piped(depth=2) as model:
        for make in (lambda: None, folder.mkdir, lambda: (folder / "notes.txt").write_text("")):
            make()
            with pytest.raises(FileNotFoundError, match=f"no checkpoint at {folder}|{folder} has neither") as caught:
                model.load_checkpoint(folder)
            assert type(caught.value) is CheckpointNotFoundError and isinstance(caught.value, roundpipe.RoundPipeError)
        (folder / "notes.txt").unlink()
        with pytest.raises(ConfigError, match="dir=''"):
            model.load_checkpoint("")
        model.save_checkpoint(folder)

    def fails(model, match, *args, kind=CheckpointMisfitError, **kwargs):
        before = clones(model)
        torch_state = torch.get_rng_state()
        with pytest.raises(kind, match=match) as caught:
            model.load_checkpoint(folder, *args, **kwargs)
        assert type(caught.value) is kind
        assert_equal(clones(model), before)
        assert torch.equal(torch.get_rng_state(), torch_state)

    with piped(depth=3, seed=2) as model:
        fails(model, r"7 are missing in it: 2.0.weight, 2.0.bias, 2.1.weight, 2.1.bias, and 3 more$")
        fails(model, "optimizer= was given, and the checkpoint .* without one", sgd(model))
        fails(model, "scaler= was given", scaler=roundpipe.GradScaler())
        fails(model, "does not restore optimizer", sgd(model), weights_only=True, kind=ConfigError)
    with piped(depth=1, seed=2) as model:
        fails(model, "7 are not in the model: 1.0.bias, 1.0.weight, 1.1.bias, ")
    with roundpipe.RoundPipe(nn.Sequential(nn.Sequential(nn.Linear(WIDTH, 5)))) as model:
        fails(
            model, r"2 have another shape or kind of values: 0.0.weight \(\[6, 6\], the model has \[5, 6\]\), 0.0.bias"
        )
    with piped(depth=2, seed=2) as model:
        optimizer = sgd(model)
        model.save_checkpoint(folder, optimizer, scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer))
        fails(model, "has optimizer state, and no optimizer was given; give optimizer=, or")
        fails(model, "has scheduler state", optimizer)
        model.load_checkpoint(folder, weights_only=True)
        wrong = torch.optim.SGD(model.model.parameters(), lr=0.1)
        with pytest.raises(ConfigError, match=r"\['params'\]\[0\], of shape \[6, 6\], is not the model's"):
            model.save_checkpoint(folder, wrong)
        fails(model, "is not the model's", wrong, torch.optim.lr_scheduler.ConstantLR(optimizer), kind=ConfigError)
        for name, match in (
            ("model.safetensors", "model.safetensors is damaged"),
            ("training_state.pt", "training_state.pt can't be read"),
            ("checkpoint_manifest.json", "checkpoint_manifest.json is damaged"),
        ):
            path = folder / name
            whole = path.read_bytes()
            for num_bytes in (len(whole) - 8, 100, 4, 0):
                path.write_bytes(whole[:num_bytes])
                fails(model, match, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer), kind=CheckpointError)
            path.write_bytes(whole)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        index = folder / "model.safetensors.index.json"
        index.write_text("{}")
        fails(model, "index.json is not of this checkpoint", optimizer, scheduler, kind=CheckpointError)
        as_first_version(folder)
        fails(model, "index.json can't be read as an index", optimizer, scheduler, kind=CheckpointError)
        index.write_text(json.dumps({"weight_map": {"0.0.weight": "model-00001-of-00001.safetensors"}}))
        fails(model, "of-00001.safetensors is missing, model", optimizer, scheduler, kind=CheckpointError)
        index.unlink()
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-8])
        fails(model, "can't be read as safetensors", optimizer, scheduler, kind=CheckpointError)
        (folder / "model.safetensors").unlink()
        fails(model, "neither model.safetensors nor model.safe", optimizer, scheduler, kind=CheckpointError)


def test_a_newer_format_is_refused(tmp_path, monkeypatch):
    with piped() as model:
        with monkeypatch.context() as patched:
            patched.setattr(checkpoint, "FORMAT", 2)
            model.save_checkpoint(tmp_path / "c")
        with pytest.raises(CheckpointError, match="has format 2, this version reads up to 1"):
            model.load_checkpoint(tmp_path / "c")


def test_weights_that_can_not_be_saved_are_named(tmp_path):
    with torch.device("meta"):
        meta = nn.Linear(2, 2)
    with roundpipe.RoundPipe(meta) as model:
        with pytest.raises(ConfigError, match="weight is on the meta device"):
            model.save_checkpoint(tmp_path / "c")
    odd = nn.Linear(2, 2)
    odd.register_buffer("odd", torch.zeros(2, dtype=torch.complex128))
    with roundpipe.RoundPipe(odd) as model:
        with pytest.raises(ConfigError, match="odd has dtype torch.complex128"):
            model.save_checkpoint(tmp_path / "c")
    assert not list(tmp_path.iterdir())


def test_the_state_of_modules_beside_their_tensors(tmp_path):
    class Counting(nn.Linear):
        seen = 0

        def get_extra_state(self):
            return {"seen": self.seen}

        def set_extra_state(self, state):
            self.seen = state["seen"]

    with roundpipe.RoundPipe(nn.Sequential(Counting(2, 2))) as model:
        model.model[0].seen = 5
        model.save_checkpoint(tmp_path / "c")
    with roundpipe.RoundPipe(nn.Sequential(Counting(2, 2))) as model:
        model.load_checkpoint(tmp_path / "c")
        assert model.model[0].seen == 5
    shutil.rmtree(tmp_path / "c")
