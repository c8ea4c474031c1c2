"""The examples for adapters and for vision, and all of them as programs."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.cases_examples import EXAMPLES, assert_one_line
from tests.repeats import repeats

pytest.importorskip("transformers", reason="the examples need the extra [hf]")


pytest.importorskip("sklearn", reason="the examples need the extra [test]")


@pytest.fixture(scope="module")
def on_path() -> Iterator[None]:
    """The folder of a script is on the path while it runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield


@pytest.fixture(scope="module")
def language(on_path: None) -> ModuleType:
    return importlib.import_module("language")


@pytest.fixture(scope="module")
def vision(on_path: None) -> ModuleType:
    return importlib.import_module("train_vision")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "data.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    return path


@pytest.fixture(scope="module")
def checkpoint(language: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal language model and its tokenizer on disk, smaller than the example's own."""
    import transformers

    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = language.byte_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def lora(on_path: None) -> ModuleType:
    pytest.importorskip("peft", reason="adapters need peft")
    return importlib.import_module("finetune_lora")


@pytest.mark.long
def test_adapters_learn_and_only_they(
    lora: ModuleType, checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import peft
    import transformers

    arguments = ["--model", str(checkpoint), "--data", str(text), "--devices", "cpu,cpu", "--batch", "4", "--seq", "16"]
    arguments += ["--steps", "20", "--lr", "5e-2", "--rank", "4", "--sample", "2"]
    saved, merged = tmp_path / "adapters", tmp_path / "merged"
    assert lora.main([*arguments, "--save", str(saved), "--merge", str(merged)]) == 0
    printed = capsys.readouterr().out
    before, after = (
        float(re.search(rf"^loss {when} +([\d.]+)", printed, re.MULTILINE)[1]) for when in ("before", "after")
    )
    assert after < before - 0.05
    assert "--- before ---" in printed and "--- after ---" in printed
    base = transformers.LlamaForCausalLM.from_pretrained(checkpoint)
    weight = base.model.layers[0].mlp.up_proj.weight.detach().clone()
    adapted = peft.PeftModel.from_pretrained(base, saved).eval()
    assert torch.equal(adapted.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight, weight)
    whole = transformers.LlamaForCausalLM.from_pretrained(merged).eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(adapted(input_ids=ids).logits, whole(input_ids=ids).logits, rtol=1e-3, atol=1e-4)


@pytest.mark.long
def test_adapters_of_the_model_that_is_trained_first(
    lora: ModuleType, language: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, source = language.language_reference(), language.standard_library()[:2000]
    assert len(reference) > 300_000
    monkeypatch.setattr(lora, "NUM_EVALUATED", 2)
    monkeypatch.setattr(language, "language_reference", lambda: reference[:2000])
    monkeypatch.setattr(language, "standard_library", lambda: source)
    arguments = ["--pretrain", "2", "--steps", "2", "--batch", "2", "--seq", "16", "--sample", "3", "--devices", "cpu"]
    assert lora.main(arguments) == 0
    assert "parameters of rank 16" in capsys.readouterr().out


TINY_ADAPTERS = ["--steps", "1", "--batch", "4", "--seq", "16", "--sample", "1", "--rank", "2", "--devices", "cpu,cpu"]


@pytest.mark.long
@pytest.mark.parametrize(
    "options", ["", "--dtype bfloat16 --microbatches 2", "--dtype bfloat16 --quantize int8", "--quantize nf4"]
)
def test_adapters_agree_with_plain_pytorch(
    lora: ModuleType,
    checkpoint: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: str,
) -> None:
    for kind, package in {"int8": "torchao", "nf4": "bitsandbytes"}.items():
        if kind in options:
            pytest.importorskip(package, reason=f"{kind} weights need it")
    arguments = ["--model", str(checkpoint), "--data", str(text), "--save", str(tmp_path), *options.split()]
    assert lora.main([*TINY_ADAPTERS, "--check", *arguments]) == 0
    assert (tmp_path / "adapter_model.safetensors").is_file()
    printed = capsys.readouterr().out
    assert "check: largest loss difference" in printed and str(tmp_path) in printed


def test_a_checkpoint_keeps_its_dtype(
    lora: ModuleType, checkpoint: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in bfloat16 was trained in float32 unless asked otherwise: twice the memory and the transfers."""
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.torch")
    half, adapters = tmp_path / "half", tmp_path / "adapters"
    monkeypatch.setattr(lora, "NUM_EVALUATED", 2)
    shutil.copytree(checkpoint, half)
    transformers.LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).save_pretrained(half)
    assert lora.main([*TINY_ADAPTERS, "--model", str(half), "--data", str(text), "--save", str(adapters)]) == 0
    saved = safetensors.load_file(adapters / "adapter_model.safetensors")
    assert {weight.dtype for weight in saved.values()} == {torch.bfloat16}


def test_a_missing_package_is_named(on_path: None, capsys: pytest.CaptureFixture[str]) -> None:
    command_line = importlib.import_module("command_line")
    assert command_line.main("one.py", lambda argv: importlib.import_module("nowhere.found"), None) == 2
    assert capsys.readouterr().err == "one.py: error: No module named 'nowhere'; pip install nowhere\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rank", "0"], "--rank must be at least 1, not 0"),
        (["--model", "/nowhere"], "--model /nowhere is not a folder"),
        (["--model", "Some/Model"], "is not a folder; hf download Some/Model --local-dir Model makes one"),
        (["--devices", "tpu"], "--devices tpu: 'tpu' can't be used here"),
    ],
)
def test_adapters_wrong_arguments(
    lora: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert_one_line(lora, arguments, message, capsys)


@pytest.mark.long
def test_vision_learns(vision: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timeline = tmp_path / "run.json"
    assert vision.main(["--devices", "cpu,cpu", "--epochs", "12", "--timeline", str(timeline)]) == 0
    names = [event["name"] for event in json.loads(timeline.read_text())["traceEvents"]]
    assert sum(name.startswith("optimizer step") for name in names) in (4, 5)  # the one before may still be running
    printed = capsys.readouterr().out
    accuracy = re.search(r"test accuracy +([\d.]+)%", printed)
    assert accuracy is not None
    assert float(accuracy[1]) > 95
    assert "head" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "0"], "--epochs must be at least 1, not 0"),
        (["--batch", "100000"], "--batch 100000 is more than the 1438 training images"),
        (["--lr", "0"], "--lr must be positive, not 0.0"),
        (["--devices", "tpu"], "--devices tpu: 'tpu' can't be used here"),
        (["--timeline", "run.txt"], "argument --timeline: a timeline is written as .json or .png"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_vision_wrong_arguments(
    vision: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert_one_line(vision, arguments, message, capsys)


def test_vision_agrees_with_plain_pytorch(vision: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--epochs", "1", "--batch", "400", "--channels", "2"]
    assert vision.main(["--check", "--devices", "cpu,cpu", *sizes]) == 0
    printed = capsys.readouterr().out
    assert "check: largest loss difference" in printed and "FAILED" not in printed and "test accuracy" in printed


def test_vision_without_its_data(
    vision: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert_one_line(vision, ["--devices", "cpu"], "pip install scikit-learn", capsys)


def test_the_trainer_in_rotation_is_the_plain_one(on_path: None, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("accelerate", reason="the Trainer needs it")
    example = importlib.import_module("finetune_trainer")
    sizes = ["--steps", "2", "--layers", "1", "--batch", "2", "--accumulate", "3", "--seq", "16"]
    assert example.main(["--devices", "cpu,cpu", "--check", *sizes]) == 0
    assert "losses differ from the plain Trainer's by" in capsys.readouterr().out
    assert_one_line(example, ["--accumulate", "0"], "--accumulate must be at least 1, not 0", capsys)


@pytest.mark.parametrize(
    "name",
    repeats(["finetune_llm", "finetune_lora", "finetune_trainer", "train_vision"], []),
)
def test_as_a_program(name: str, tmp_path: Path) -> None:
    """An error is one line, behind what packages that are installed say as they are imported."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    shown, refused = (
        subprocess.run([*command, *options], capture_output=True, text=True, cwd=tmp_path, timeout=120)
        for options in (["--help"], ["--devices", "nonsense"])
    )
    assert (shown.returncode, refused.returncode) == (0, 2)
    assert shown.stdout.startswith(f"usage: {name}.py") and refused.stdout == ""
    assert refused.stderr.splitlines()[-1].startswith(f"{name}.py: error: --devices nonsense")
    assert refused.stderr.count("\n") == shown.stderr.count("\n") + 1
