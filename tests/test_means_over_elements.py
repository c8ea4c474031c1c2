"""Means over all elements, KL divergences and flattened tokens beside losses of counted targets, as plain PyTorch's."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig
from tests.runtime.models import assert_same, gradients

Loss = Callable[[Any, Any], torch.Tensor]
SIZE, LENGTH, CLASSES = 7, 6, 5


microbatches = pytest.mark.parametrize(
    "num", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(4, marks=pytest.mark.long)]
)


def of_samples() -> tuple[nn.Module, torch.Tensor, Any]:
    """Labels of which the first microbatches have none that counts."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
    classes, teacher = torch.randint(CLASSES, (SIZE,)), torch.randn(SIZE, CLASSES).double()
    classes[:4], classes[5] = -100, -100
    return model, torch.randn(SIZE, 6).double(), {"classes": classes, "teacher": teacher}


def of_tokens() -> tuple[nn.Module, torch.Tensor, Any]:
    """As above, with fewer and fewer tokens that count."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
    classes, teacher = torch.randint(CLASSES, (SIZE, LENGTH)), torch.randn(SIZE, LENGTH, CLASSES).double()
    for sample in range(SIZE):
        classes[sample, max(0, LENGTH - sample) :] = -100
    return model, torch.randint(11, (SIZE, LENGTH)), {"classes": classes, "teacher": teacher}


def check(made: Any, loss_fn: Loss, num: int, reduction: Any = "mean", **options: Any) -> tuple[bool, list[str]]:
    """Whether loss and gradients are those of the whole batch, and what is warned of."""
    model, inputs, label = made
    reference = copy.deepcopy(model)
    expected = loss_fn(reference(inputs), label)
    expected.backward()
    config = RoundPipeRunConfig(num_microbatch=num, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with roundpipe.compile(model, devices=["cpu"] * 2, model_run_config=config) as piped:
            loss = piped.forward_backward((inputs,), label=label, loss_fn=loss_fn, loss_reduction=reduction)
            piped.synchronize()
    texts = [str(each.message) for each in caught if "nothing overlaps" not in str(each.message)]
    try:
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
        assert_same(gradients(model), gradients(reference), 1e-12)
    except AssertionError:
        return False, texts
    return True, texts


def cross_entropy(outputs: torch.Tensor, label: Any) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), label["classes"].flatten())


def entropy(outputs: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Categorical(logits=outputs, validate_args=False).entropy()


def with_classes_alone(made: Any) -> tuple[nn.Module, torch.Tensor, Any]:
    """Nothing in the label tells how many elements a sample has in the outputs."""
    model, inputs, label = made()
    return model, inputs, {"classes": label["classes"]}


OVER_ELEMENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "squares": lambda outputs: outputs.pow(2).mean(),
    "a hinge": lambda outputs: F.relu(1 - outputs).mean(),
    "absolute": lambda outputs: torch.mean(outputs.abs()),
    "clamped": lambda outputs: outputs.clamp(min=0).mean(),
    "over all dimensions": lambda outputs: outputs.exp().mean(dim=tuple(range(outputs.ndim))),
    "flattened": lambda outputs: outputs.tanh().flatten().mean(),
    "in another shape": lambda outputs: outputs.reshape(-1, 1).tanh().mean(),
    "then over samples": lambda outputs: outputs.pow(2).flatten(1).mean(1).mean(),
    "entropy": lambda outputs: entropy(outputs).mean(),
    "a part": lambda outputs: outputs[..., 1:3].sigmoid().mean() - 2 * outputs[..., 0].mean(),
}


@pytest.mark.parametrize("name", OVER_ELEMENTS)
@pytest.mark.parametrize("made", [of_samples, of_tokens])
@microbatches
def test_a_mean_over_elements_is_one_over_samples(name: str, made: Any, num: int) -> None:
    def loss_fn(outputs: torch.Tensor, label: Any) -> torch.Tensor:
        return cross_entropy(outputs, label) + 0.3 * OVER_ELEMENTS[name](outputs)

    assert check(with_classes_alone(made), loss_fn, num) == (True, [])


@pytest.mark.parametrize("made", [of_samples, of_tokens])
def test_a_mean_over_elements_is_logged_as_that_of_the_batch(made: Any) -> None:
    logs = dict[str, torch.Tensor]()

    def loss_fn(outputs: torch.Tensor, label: Any) -> torch.Tensor:
        loss = cross_entropy(outputs, label)
        logs["mean"], logs["positive"] = outputs.detach().mean(), (outputs > 0).float().mean()
        logs["total"] = loss.detach() + outputs.detach().square().mean()
        return loss

    model, inputs, label = with_classes_alone(made)
    loss_fn(model(inputs), label)
    expected = {**logs}
    assert check((model, inputs, label), loss_fn, 2) == (True, [])
    assert len({*map(id, expected.values()), *map(id, logs.values())}) == 6
    torch.testing.assert_close(logs, expected)


KL: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "batchmean": lambda student, teacher: F.kl_div(student, teacher.exp(), reduction="batchmean"),
    "of logarithms": lambda student, teacher: F.kl_div(student, teacher, reduction="batchmean", log_target=True),
    "a module": lambda student, teacher: nn.KLDivLoss(reduction="batchmean", log_target=True)(student, teacher),
    "all tokens": lambda student, teacher: F.kl_div(
        student.flatten(0, -2), teacher.flatten(0, -2), reduction="batchmean", log_target=True
    ),
}


@pytest.mark.parametrize("name", KL)
@pytest.mark.parametrize("made", [of_samples, of_tokens])
@microbatches
def test_a_teacher_is_followed_by_samples_and_classes_count_by_targets(name: str, made: Any, num: int) -> None:
    def loss_fn(outputs: torch.Tensor, label: Any) -> torch.Tensor:
        student, teacher = (each.div(2).log_softmax(-1) for each in (outputs, label["teacher"]))
        return 0.5 * 4 * KL[name](student, teacher) + 0.5 * cross_entropy(outputs, label)

    assert check(made(), loss_fn, num) == (True, [])


class Distilled(nn.Module):
    """A model that computes the divergence itself, by a module that is one of its own."""

    def __init__(self, made: nn.Module) -> None:
        super().__init__()
        self.made, self.divergence = made, nn.KLDivLoss(reduction="batchmean", log_target=True)

    def forward(self, inputs: torch.Tensor, classes: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        outputs = self.made(inputs)
        label = {"classes": classes}
        return self.divergence(outputs.log_softmax(-1), teacher.log_softmax(-1)) + cross_entropy(outputs, label)


@pytest.mark.parametrize("made", [of_samples, of_tokens])
@microbatches
def test_a_models_own_divergence_counts_by_samples(made: Any, num: int) -> None:
    inner, inputs, label = made()
    model = Distilled(inner)
    reference = copy.deepcopy(model)
    expected = reference(inputs, **label)
    expected.backward()
    config = RoundPipeRunConfig(num_microbatch=num)
    with roundpipe.compile(model, devices=["cpu"], model_run_config=config) as piped, warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = piped.forward_backward((inputs,), label, loss_fn=lambda loss, _: loss, loss_reduction="mean")
        piped.synchronize()
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
        assert_same(gradients(model), gradients(reference), 1e-12)


def shifted(outputs: torch.Tensor, label: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What each token loses, all samples' one after the other, their targets, and which of these count."""
    classes = label["classes"][..., 1:].contiguous()
    losses = F.cross_entropy(outputs[..., :-1, :].reshape(-1, CLASSES), classes.view(-1), reduction="none")
    return losses, classes, classes != -100


def over_count(outputs: torch.Tensor, label: Any) -> torch.Tensor:
    losses, _, counted = shifted(outputs, label)
    return losses.sum() / counted.sum()


def over_mask(outputs: torch.Tensor, label: Any) -> torch.Tensor:
    losses, _, counted = shifted(outputs, label)
    mask = counted.reshape(-1).double()
    return (losses * mask).sum() / mask.sum()


def in_shape_again(outputs: torch.Tensor, label: Any) -> torch.Tensor:
    losses, classes, counted = shifted(outputs, label)
    return (losses.view(classes.shape) * counted).sum() / counted.sum().clamp(min=1)


def by_sequence(outputs: torch.Tensor, label: Any) -> torch.Tensor:
    losses, classes, counted = shifted(outputs, label)
    return over_count(outputs, label) + (losses.view_as(classes).sum(1) / counted.sum(1).clamp(min=1)).mean()


def with_all(outputs: torch.Tensor, label: Any) -> torch.Tensor:
    losses, _, _ = shifted(outputs, label)
    return over_count(outputs, label) + losses.mean()


@pytest.mark.parametrize("loss_fn", [over_count, over_mask, in_shape_again, by_sequence, with_all])
@microbatches
def test_tokens_that_are_shifted_and_flattened_count_by_targets(loss_fn: Loss, num: int) -> None:
    assert check(of_tokens(), loss_fn, num) == (True, [])


def test_sums_of_them_are_sums() -> None:
    def loss_fn(outputs: torch.Tensor, label: Any) -> torch.Tensor:
        losses, _, counted = shifted(outputs, label)
        return (losses * counted.flatten()).sum() / 9 + outputs[:, 1:].flatten().square().sum()

    assert check(of_tokens(), loss_fn, 4, "sum") == (True, [])


COMPARED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "centred": lambda outputs: (outputs - outputs.mean(0)).square().mean(),
    "centred, flattened": lambda outputs: (outputs.flatten() - outputs.flatten().mean()).square().mean(),
    "neighbours, flattened": lambda outputs: outputs.flatten().diff().square().mean(),
    "sorted, flattened": lambda outputs: outputs.flatten().sort().values.diff().mean(),
    "a softmax, flattened": lambda outputs: outputs.flatten().softmax(0).square().mean(),
    "classes first": lambda outputs: outputs.movedim(0, 1).reshape(CLASSES, -1).softmax(-1).square().mean(),
    "halves": lambda outputs: outputs[..., :4].reshape(2, -1).prod(0).mean(),
    "a root": lambda outputs: outputs.flatten().square().mean().sqrt(),
    "first ones": lambda outputs: outputs.flatten()[:9].square().mean(),
    "without the first": lambda outputs: outputs.flatten()[1:].square().mean(),
    "similarity": lambda outputs: (outputs.flatten(1) @ outputs.flatten(1).T).mean(),
    "sums, not a mean": lambda outputs: outputs.square().sum(),
}


@pytest.mark.parametrize("name", COMPARED)
@pytest.mark.parametrize("made", [of_samples, of_tokens])
def test_what_compares_samples_is_not_taken_for_a_mean(name: str, made: Any) -> None:
    def loss_fn(outputs: torch.Tensor, label: Any) -> torch.Tensor:
        return cross_entropy(outputs, label) + COMPARED[name](outputs)

    is_right, texts = check(made(), loss_fn, 4)
    assert is_right or texts


def test_a_divergence_over_the_samples_is_not_taken_for_one_of_samples() -> None:
    """The first size is that of the classes: parts of it add up, and no microbatch has a share of its number."""

    def loss_fn(outputs: torch.Tensor, label: Any) -> torch.Tensor:
        student, teacher = (each.log_softmax(-1).T for each in (outputs, label["teacher"]))
        divergence = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
        return cross_entropy(outputs, label) + divergence

    is_right, texts = check(of_samples(), loss_fn, 4)
    assert not is_right and texts


def by_length(args: tuple[torch.Tensor], kwargs: dict[str, Any], number: int) -> Any:
    """Microbatches of which the last one has shorter samples."""
    (inputs,) = args
    pieces = [*inputs.chunk(number)]
    pieces[-1] = pieces[-1][:, : LENGTH - 2]
    return [(piece,) for piece in pieces], [kwargs] * number


@pytest.mark.parametrize("is_told", [True, False])
def test_where_samples_differ_in_length_elements_are_counted_or_it_is_said_that_they_are_not(is_told: bool) -> None:
    model, inputs, label = of_tokens()
    classes, lengths = label["classes"], [LENGTH, LENGTH, LENGTH, LENGTH - 2]
    rows = zip(classes.chunk(4), lengths, strict=True)
    labels = [{"classes": piece[:, :length] if is_told else piece[:, 0]} for piece, length in rows]

    def loss_fn(outputs: torch.Tensor, label: Any) -> torch.Tensor:
        classes = label["classes"]
        if classes.ndim == 1:
            return F.cross_entropy(outputs[:, 0], classes) + outputs.square().mean()
        losses = F.cross_entropy(outputs.flatten(0, 1), classes.flatten(), reduction="none")
        return F.cross_entropy(outputs[:, 0], classes[:, 0]) + losses.exp().mean()

    pieces = [model(each[:, :length]) for each, length in zip(inputs.chunk(4), lengths, strict=True)]
    if is_told:
        flat, targets = (
            torch.cat([x.flatten(0, 1) for x in pieces]),
            torch.cat([x["classes"].flatten() for x in labels]),
        )
        second = F.cross_entropy(flat, targets, reduction="none").exp().mean()
    else:
        second = torch.cat([x.flatten() for x in pieces]).square().mean()
    expected = F.cross_entropy(torch.cat([x[:, 0] for x in pieces]), classes[:, 0]) + second
    config = RoundPipeRunConfig(num_microbatch=4, split_input=by_length, split_label=lambda *_: labels)
    with roundpipe.compile(model, devices=["cpu"]) as piped, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss = piped.forward_backward((inputs,), label=label, loss_fn=loss_fn, loss_reduction="mean", run_config=config)
    is_right = torch.allclose(loss, expected.detach(), rtol=0, atol=1e-12)
    assert is_right == is_told and bool(caught) != is_told, [str(each.message) for each in caught]
