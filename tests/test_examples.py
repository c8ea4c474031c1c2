"""The examples as a user runs them: tiny sizes, and every wrong argument that deserves a clear line."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.cases_examples import EXAMPLES, assert_one_line
from tests.repeats import repeats

pytest.importorskip("transformers", reason="the examples need the extra [hf]")


pytest.importorskip("sklearn", reason="the examples need the extra [test]")


TINY = ["--steps", "3", "--batch", "4", "--seq", "16", "--sample", "4", "--devices", "cpu,cpu"]


@pytest.fixture(scope="module")
def on_path() -> Iterator[None]:
    """The folder of a script is on the path while it runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield


@pytest.fixture(scope="module")
def finetune(on_path: None) -> ModuleType:
    return importlib.import_module("finetune_llm")


@pytest.fixture(scope="module")
def language(on_path: None) -> ModuleType:
    return importlib.import_module("language")


@pytest.fixture(scope="module")
def against_plain(on_path: None) -> ModuleType:
    return importlib.import_module("against_plain")


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


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_scripts_are_short_and_check_themselves(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < 150
    if "def main(argv" in text:
        assert f"examples/{path.name} --check" in text or "--check" in text.split('"""')[1]


def first_and_last_loss(printed: str) -> tuple[float, float]:
    first = re.search(r"^first loss +([\d.]+)", printed, re.MULTILINE)
    last = re.search(r"^last loss +([\d.]+)", printed, re.MULTILINE)
    assert first is not None and last is not None, printed
    return float(first[1]), float(last[1])


def test_byte_tokenizer_is_one_token_per_byte_and_loses_nothing(language: ModuleType) -> None:
    tokenizer = language.byte_tokenizer()
    text = "def naïve(x):\n    return 'ü'  # 漢\r\n\t\0"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(tokens) == len(text.encode())
    assert tokenizer.decode(tokens) == text
    assert len(tokenizer) == 257
    assert tokenizer("az09")["input_ids"] == [64, 89, 15, 24]  # the same in every process


def test_default_data_is_real_and_the_same_every_time(language: ModuleType) -> None:
    text = language.standard_library()
    assert len(text) > 1_000_000
    assert text.startswith(('"""', "#", "'''"))
    assert text == language.standard_library()


def test_batches_are_windows_of_the_data_and_follow_the_seed(language: ModuleType) -> None:
    (inputs, labels), again, other = (next(language.batches(torch.arange(100), 3, 8, seed)) for seed in (1, 1, 2))
    ids = inputs["input_ids"]
    assert ids.shape == labels.shape == (3, 8)
    assert torch.equal(ids, again[0]["input_ids"]) and not torch.equal(ids, other[0]["input_ids"])
    assert torch.equal(labels - 1, ids) and torch.equal(ids - ids[:, :1], torch.arange(8).expand(3, 8))


def test_eager_bytes_counts_weights_gradients_moments_and_activations(
    language: ModuleType, against_plain: ModuleType, checkpoint: Path
) -> None:
    model, _ = language.load_checkpoint(checkpoint)
    fixed = 4 * sum(parameter.nbytes for parameter in model.parameters())
    activations = against_plain.eager_bytes(model, 1, 16) - fixed
    assert activations > 0
    assert against_plain.eager_bytes(model, 3, 16) - fixed == 3 * activations
    for parameter in model.parameters():
        parameter.requires_grad = False
    assert against_plain.eager_bytes(model, 1, 16) < fixed


def test_trains_the_default_model(
    finetune: ModuleType, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    assert finetune.main([*TINY, "--data", str(text), "--timeline", str(path)]) == 0
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"]]
    assert sum(name.startswith("optimizer step") for name in names) == 3
    printed = capsys.readouterr().out
    assert "model.layers.0" in printed
    assert "weights" in printed
    for line in ("tokens per second", "peak device memory", "plain PyTorch needs", "--- sample ---"):
        assert line in printed
    assert first_and_last_loss(printed)[0] == pytest.approx(5.55, abs=0.4)


@pytest.mark.long
def test_loss_falls(finetune: ModuleType, checkpoint: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*TINY, "--model", str(checkpoint), "--data", str(text), "--steps", "60", "--lr", "1e-2"]
    assert finetune.main([*arguments, "--sample", "0"]) == 0
    printed = capsys.readouterr().out
    first, last = first_and_last_loss(printed)
    assert last < first - 2
    assert "--- sample ---" not in printed


@pytest.mark.parametrize("grain", repeats(["stage", "layer"], ["layer"]))
def test_check_agrees_with_plain_pytorch(
    finetune: ModuleType, checkpoint: Path, text: Path, capsys: pytest.CaptureFixture[str], grain: str
) -> None:
    arguments = [*TINY, "--model", str(checkpoint), "--data", str(text), "--check", "--recompute", grain]
    assert finetune.main(arguments) == 0
    found = re.search(r"loss difference ([\de.+-]+), gradient difference ([\de.+-]+)", capsys.readouterr().out)
    assert found is not None
    assert float(found[1]) < 1e-5
    assert float(found[2]) < 1e-4


@pytest.mark.long
def test_check_fails_when_gradients_differ(
    finetune: ModuleType,
    against_plain: ModuleType,
    checkpoint: Path,
    text: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(against_plain, "gradient_difference", lambda model, plain: float("nan"))
    assert finetune.main([*TINY, "--model", str(checkpoint), "--data", str(text), "--check"]) == 1
    assert "check: FAILED" in capsys.readouterr().out


def test_gradient_difference_is_relative_and_sees_a_missing_gradient(against_plain: ModuleType) -> None:
    one, two = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    one.weight.grad, two.weight.grad = torch.tensor([[99.0]]), torch.tensor([[100.0]])
    assert against_plain.gradient_difference(one, two) == pytest.approx(0.01)
    one.weight.grad = None
    with pytest.raises(SystemExit, match="only one of the two has a gradient for weight"):
        against_plain.gradient_difference(one, two)


@pytest.mark.long
def test_a_saved_model_trains_on(
    finetune: ModuleType, checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "trained"
    common = [*TINY, "--data", str(text), "--lr", "1e-2", "--sample", "0"]
    assert finetune.main([*common, "--model", str(checkpoint), "--steps", "40", "--save", str(folder)]) == 0
    _, last = first_and_last_loss(capsys.readouterr().out)
    assert finetune.main([*common, "--model", str(folder), "--steps", "1"]) == 0
    first, _ = first_and_last_loss(capsys.readouterr().out)
    assert first == pytest.approx(last, abs=0.5)


def wrong_kind(folder: Path) -> None:
    import transformers

    transformers.BertConfig(architectures=["BertForMaskedLM"]).save_pretrained(folder)


def no_tokenizer(folder: Path) -> None:
    import transformers

    transformers.LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(folder)


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1, not 0"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--microbatches", "-1"], "--microbatches must be at least 1, not -1"),
        (["--lr", "-1"], "--lr must be positive, not -1.0"),
        (["--lr", "nan"], "--lr must be positive, not nan"),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["--recompute", "never"], "argument --recompute: invalid choice: 'never'"),
        (["--devices", "gpu7"], "--devices gpu7: 'gpu7' can't be used here"),
        (["--devices", "cpu,cuda:99"], "--devices cpu,cuda:99: 'cuda:99' can't be used here"),
        (["--devices", ""], "--devices : '' can't be used here"),
        (["--model", "/nowhere"], "--model /nowhere is not a folder"),
        (["--data", "/nowhere.txt"], "--data /nowhere.txt: No such file or directory"),
        (["--data", "/"], "--data /: Is a directory"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_wrong_arguments(
    finetune: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert_one_line(finetune, [*TINY, *arguments], message, capsys)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "has no config.json: not a Hugging Face checkpoint"),
        (wrong_kind, "is a BertForMaskedLM, not a causal language model"),
        (no_tokenizer, "can't be loaded:"),
        (broken_config, "can't be loaded:"),
    ],
)
def test_wrong_checkpoints(
    finetune: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], make, message: str
) -> None:
    make(tmp_path)
    assert_one_line(finetune, [*TINY, "--model", str(tmp_path)], message, capsys)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 tokens; --seq 16 needs more than 16"),
        (b"short", "has 5 tokens"),
        (b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_wrong_data(
    finetune: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    path = tmp_path / "data.txt"
    path.write_bytes(content)
    assert_one_line(finetune, [*TINY, "--data", str(path)], message, capsys)


def test_saving_over_a_file(finetune: ModuleType, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_one_line(finetune, [*TINY, "--save", str(text)], "argument --save: ", capsys)
