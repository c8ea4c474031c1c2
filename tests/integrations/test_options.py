"""What needs no training: options, refusals, and what a loss is found to be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import TrainingArguments

import roundpipe
from roundpipe.integrations.microbatches import MAX_CLASSES, Batch, LossKind
from roundpipe.integrations.stand_in import MAX_ITEMS, attributes_kept
from roundpipe.integrations.transformers import RoundPipeArguments, RoundPipeTrainer
from tests.integrations.trainers import llama, padded, texts


def test_options_are_read_from_a_command_line() -> None:
    parser = transformers.HfArgumentParser(RoundPipeArguments)
    words = ["--devices", "cpu", "cpu", "--is_async", "--run_config", '{"num_microbatch": 4}']
    (options,) = parser.parse_args_into_dataclasses([*words, "--optim_dtype", "float64"])
    assert options.devices == ["cpu", "cpu"] and options.is_async and options.dtype is torch.float64
    assert options.config == roundpipe.RoundPipeRunConfig(num_microbatch=4)
    for wrong, message in (
        ({"optim_dtype": "int8"}, "optim_dtype='int8'; give the name of a floating-point dtype"),
        ({"run_config": {"microbatches": 3}}, "has no option 'microbatches'; did you mean 'num_microbatch'"),
        ({"run_config": "{"}, "give fields of RoundPipeRunConfig"),
        ({"run_config": {"loss_reduction": "mean"}}, "run_config has loss_reduction='mean'; leave it out"),
        ({"run_config": '{"loss_scope": "batch"}'}, "run_config has loss_scope='batch'; leave it out"),
        ({"run_config": {"split_input": (None, None), "merge_output": False}}, "has split_input, merge_output=False;"),
    ):
        with pytest.raises(roundpipe.ConfigError, match=message):
            RoundPipeArguments(**wrong)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"torch_compile": True}, "torch_compile"),
        ({"bf16_full_eval": True}, "bf16_full_eval"),
        ({"optim": "galore_adamw_layerwise"}, "updates inside the backward"),
    ],
)
def test_what_can_not_work_is_refused_by_name(given: dict[str, object], message: str, tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **given)
    with pytest.raises(roundpipe.ConfigError, match=f"can't train with .*{message}"):
        RoundPipeTrainer(model=llama(), args=arguments)


@pytest.mark.parametrize("name", ["deepspeed", "fsdp", "parallelism_config"])
def test_launchers_of_several_processes_are_refused_by_name(name: str, tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    setattr(arguments, name, "asked for")  # what they need is not installed here
    with pytest.raises(roundpipe.ConfigError, match=f"can't train with {name}; start the script with python"):
        RoundPipeTrainer(model=llama(), args=arguments)


def test_several_processes_and_foreign_options_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(roundpipe.ConfigError, match="roundpipe= is dict; give a RoundPipeArguments"):
        RoundPipeTrainer(model=llama(), args=arguments, roundpipe={})
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    with pytest.raises(roundpipe.ConfigError, match=r"a launcher with 2 processes .*start the script with python"):
        RoundPipeTrainer(model=llama(), args=arguments)


def losses_of(kind: str, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The cross entropy of some rows, put together in different ways."""
    if labels.ndim == 1:
        return torch.nn.functional.cross_entropy(logits[:, 0], labels)
    each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    counted = labels.ne(-100)
    if kind == "shifted":
        each, counted = each[:, 1:], counted[:, 1:]
    if kind == "sum":
        return each.sum() / 7
    if kind == "samples":
        return (each.sum(1) / counted.sum(1)).mean()
    return each.sum() / counted.sum() if kind != "neither" else each.sum().square()


@pytest.mark.filterwarnings("ignore:the loss is neither")
@pytest.mark.parametrize("kind", ["sum", "tokens", "shifted", "samples", "neither", "classes"])
def test_what_a_loss_is_is_measured(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = padded(texts(7))["labels"]
    labels = torch.arange(7) % 3 if kind == "classes" else labels
    logits = torch.randn(7, 10, 48, generator=generator)
    batch = Batch((), {"logits": logits, "labels": labels})
    measured = []

    def measure(batches: list[Batch]) -> list[float]:
        measured.append(len(batches))
        return [float(losses_of(kind, each.kwargs["logits"], each.kwargs["labels"])) for each in batches]

    loss_kind = LossKind(["labels"])
    for number in (1, 3, 4):
        pieces = loss_kind.cut(batch, number, measure)
        assert len(pieces) == (1 if kind == "neither" else number)
        total = sum(
            factor * loss for (_, factor), loss in zip(pieces, measure([each for each, _ in pieces]), strict=True)
        )
        assert total == pytest.approx(measure([batch])[0], rel=1e-5)
    times = 2 if kind == "classes" else 1  # each class beside another
    assert measured.count(3) == times + 1 if kind != "neither" else 1  # once above


def test_means_of_different_kinds_are_told_from_one_although_samples_have_like_losses() -> None:
    """As those of a new model: 1.2 and 1.21, so that any weighing gives nearly the loss of both together."""
    labels = torch.tensor([[1, 1, 1, 1], [1, 1, -100, -100]])

    def loss_of(batch: Batch) -> float:
        each, counted = batch.kwargs["each"], batch.kwargs["labels"].ne(-100)
        by_tokens = (each[:, None] * counted).sum() / counted.sum()
        return float(by_tokens + each.mean())

    batch = Batch((), {"each": torch.tensor([1.2, 1.21]), "labels": labels})
    with pytest.warns(UserWarning, match="the loss is neither"):
        assert len(LossKind(["labels"]).cut(batch, 2, lambda batches: [loss_of(each) for each in batches])) == 1


def of_pairs(scores: torch.Tensor) -> torch.Tensor:
    """Not a number of a single sample."""
    return (scores[: len(scores) // 2] - scores[len(scores) // 2 :][: len(scores) // 2]).square().mean()


def of_halves(scores: torch.Tensor) -> torch.Tensor:
    """Raises for a single sample."""
    chosen, rejected = scores.chunk(2)
    return torch.nn.functional.softplus(rejected - chosen).mean()


@pytest.mark.parametrize("loss, message", [(of_pairs, "is neither"), (of_halves, "can't be computed for single")])
def test_a_loss_that_a_single_sample_has_not_is_not_cut(
    loss: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    batch = Batch((), {"scores": torch.randn(8), "labels": torch.arange(8) % 3})
    kind = LossKind(["labels"])
    with pytest.warns(UserWarning, match=f"the loss {message}") as warned:
        for _ in range(4):
            pieces = kind.cut(batch, 2, lambda batches: [float(loss(each.kwargs["scores"])) for each in batches])
            assert [factor for _, factor in pieces] == [1.0]
    assert len(warned) == 1


def test_a_device_that_runs_out_of_memory_tells_nothing_of_a_loss() -> None:
    """Trainers look for it, to try smaller batches."""
    batch = Batch((), {"scores": torch.randn(8), "labels": torch.arange(8) % 3})
    kind = LossKind(["labels"])

    def fail(batches: list[Batch]) -> list[float]:
        raise roundpipe.DeviceMemoryError("too large")

    with pytest.raises(roundpipe.DeviceMemoryError):
        kind.cut(batch, 2, fail)
    assert kind.errors


WEIGHTS = torch.tensor([0.5, 1.0, 1.5, 1.0])


def by_class(batch: Batch) -> float:
    scores, labels = batch.kwargs["scores"], batch.kwargs["labels"]
    return float(torch.nn.functional.cross_entropy(scores, labels, weight=WEIGHTS))


@pytest.mark.filterwarnings("ignore:the loss is neither")
@pytest.mark.parametrize("later", [[2, 0, 0, 0, 0], [0, 1, 2, 3, 0]])
@pytest.mark.parametrize("first", [[0] * 5, [1, 1, 3, 1, 3], [3, 3, 3, 3, 1]])
def test_weights_of_classes_are_found_when_classes_come_up(first: list[int], later: list[int]) -> None:
    """The first batches may have only classes of one weight: these are cut, and right."""
    torch.manual_seed(1)
    kind = LossKind(["labels"])
    for labels, is_cut in ((first, True), (later, False)):
        batch = Batch((), {"scores": torch.randn(5, 4), "labels": torch.tensor(labels)})
        pieces = kind.cut(batch, 2, lambda batches: [by_class(each) for each in batches])
        assert (len(pieces) > 1) == is_cut
        assert sum(factor * by_class(piece) for piece, factor in pieces) == pytest.approx(by_class(batch))


@pytest.mark.parametrize("scale", [1e-3, 1e-2, 0.1])
def test_samples_of_like_losses_tell_nothing_of_classes(scale: float) -> None:
    """As with a head of zeros: the loss is that of any weights then, or nearly so, but gradients are not."""
    torch.manual_seed(1)
    kind, labels = LossKind(["labels"]), torch.tensor([0, 2, 0, 2, 0])
    with pytest.warns(UserWarning, match="the loss is neither"):
        for _ in range(MAX_CLASSES):
            batch = Batch((), {"scores": scale * torch.randn(5, 4), "labels": labels})
            assert len(kind.cut(batch, 2, lambda batches: [by_class(each) for each in batches])) == 1


def test_many_classes_are_measured_a_few_times() -> None:
    torch.manual_seed(1)
    kind, measured = LossKind(["labels"]), 0

    def measure(batches: list[Batch]) -> list[float]:
        nonlocal measured
        measured += 1
        return [
            float(torch.nn.functional.cross_entropy(each.kwargs["scores"], each.kwargs["labels"])) for each in batches
        ]

    for step in range(20):
        labels = (torch.arange(6) + 5 * step) % 100
        batch = Batch((), {"scores": torch.randn(6, 100), "labels": labels})
        assert len(kind.cut(batch, 2, measure)) == 2
    assert measured < MAX_CLASSES  # not 20, nor once for each class


def test_batches_whose_first_dimension_is_not_known_are_not_cut() -> None:
    batch = Batch((torch.zeros(4, 2), torch.zeros(2, 4)), {})
    assert LossKind(["labels"]).cut(batch, 2, lambda batches: []) == [(batch, 1.0)]


class ImageWords(torch.nn.Module):
    """Has the patches of all images of a batch in one tensor, in the places of words, as vision-language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 6)
        self.head = torch.nn.Linear(6, 3)

    def forward(self, words: torch.Tensor, patches: torch.Tensor) -> dict[str, torch.Tensor]:
        seen = self.embed(words).masked_scatter((words == 1)[..., None], patches)
        return {"logits": self.head(seen).sum(1)}


def test_predictions_of_batches_that_can_not_be_cut(tmp_path: Path) -> None:
    """Without labels they ran in microbatches, each with all patches, of which it took the first."""
    torch.manual_seed(3)
    words = torch.randint(2, 8, (4, 5))
    words[:, 2] = words[0, 3] = 1
    batch, model = {"words": words, "patches": torch.randn(5, 6)}, ImageWords()
    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], per_device_eval_batch_size=4, remove_unused_columns=False
    )
    options = {"model": model, "args": arguments, "data_collator": lambda rows: batch}
    expected = transformers.Trainer(**options).predict(range(4)).predictions
    found = RoundPipeTrainer(**options, roundpipe=RoundPipeArguments(devices=["cpu", "cpu"])).predict(range(4))
    torch.testing.assert_close(torch.tensor(found.predictions), torch.tensor(expected))


def test_what_is_done_to_attributes_is_taken_back_but_for_what_is_taken_for_data() -> None:
    owner = SimpleNamespace(counts={"train": {"tokens": [1]}}, data=[0] * (MAX_ITEMS + 1), mode="train")
    with attributes_kept(owner, torch.nn.Identity()):
        owner.counts["train"]["tokens"].append(2)
        owner.counts["eval"], owner.mode, owner.new = {}, "eval", 3
        owner.data.append(1)
    assert vars(owner).keys() == {"counts", "data", "mode"} and owner.mode == "train"
    assert owner.counts == {"train": {"tokens": [1]}} and len(owner.data) == MAX_ITEMS + 2
