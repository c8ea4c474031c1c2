"""The calls that the public documents show, made as they are shown there and held to what the text around them says.

Order: microbatch splitting, model interface, run configuration, training loop. Everything on CPU workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _CustomReducer, _Replicate

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig
from tests.cases_documented_examples import DEVICES, DTYPE, sequential


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(12, 3, 8, 8, dtype=DTYPE)


@pytest.fixture
def labels() -> torch.Tensor:
    return torch.randint(10, (12,))


@pytest.fixture
def sizes() -> Iterator[list[int]]:
    """Batch sizes that the models of this file saw, in the order of microbatches."""
    Seen.sizes = []
    yield Seen.sizes


class Seen(nn.Module):
    """Takes several arguments and notes what came in."""

    sizes: list[int] = []

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, dtype=DTYPE)

    def forward(self, x: Any, scale: Any = 1.0, **more: Any) -> Any:
        self.sizes.append(x.shape[0])
        x = self.inner(x) * scale
        for value in more.values():
            x = x + value
        return x


def one_after_the_other(model: nn.Module, **options: Any) -> RoundPipe:
    """One worker, so that microbatches run in their order."""
    return RoundPipe(model, devices=["cpu"], **options)


def test_twelve_pictures_in_four_microbatches(images: torch.Tensor) -> None:
    shapes = []

    def loss(outputs: torch.Tensor, given: Any) -> torch.Tensor:
        shapes.append(tuple(given.shape))
        return outputs.sum()

    config = RoundPipeRunConfig(num_microbatch=4)
    with one_after_the_other(sequential()) as model:
        model.forward_backward(input_args=(images,), label=images, loss_fn=loss, run_config=config)
    assert shapes == [(3, 3, 8, 8)] * 4


def test_split_spec_with_a_replicated_argument(sizes: list[int]) -> None:
    module, x, scale = Seen(), torch.randn(6, 4, dtype=DTYPE), torch.arange(1.0, 5.0, dtype=DTYPE)
    expected = module(x, scale)
    sizes.clear()
    config = RoundPipeRunConfig(split_input=((TensorChunkSpec(0), _Replicate), None), num_microbatch=3)
    with one_after_the_other(module) as model, torch.no_grad():
        found = model(x, scale, roundpipe_run_config=config)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert sizes == [2, 2, 2]


def test_split_spec_along_another_dimension(sizes: list[int]) -> None:
    class Positions(Seen):
        def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) + positions.transpose(0, 1)

    module = Positions()
    tokens, positions = torch.randn(6, 4, dtype=DTYPE), torch.randn(4, 6, dtype=DTYPE)
    expected = module(tokens, positions)
    config = RoundPipeRunConfig(split_input=((TensorChunkSpec(0), TensorChunkSpec(1)), None), num_microbatch=2)
    with one_after_the_other(module) as model, torch.no_grad():
        torch.testing.assert_close(model(tokens, positions, roundpipe_run_config=config), expected, rtol=0, atol=1e-12)


def test_split_functions(sizes: list[int]) -> None:
    module, x, mask = Seen(), torch.randn(6, 4, dtype=DTYPE), torch.randn(6, 4, dtype=DTYPE)
    expected = module(x, mask), module(x, mask=mask)

    def by_position(args: Any, kwargs: Any, num_microbatch: int) -> Any:
        pieces = zip(*(one.chunk(num_microbatch) for one in args), strict=True)
        return list(pieces), [kwargs] * num_microbatch

    def by_name(args: Any, kwargs: Any, num_microbatch: int) -> Any:
        pieces = {name: value.chunk(num_microbatch) for name, value in kwargs.items()}
        named = [{name: chunks[index] for name, chunks in pieces.items()} for index in range(num_microbatch)]
        return [()] * num_microbatch, named

    with one_after_the_other(module, model_run_config=RoundPipeRunConfig(num_microbatch=3)) as model, torch.no_grad():
        sizes.clear()
        found = model(x, mask, roundpipe_run_config=RoundPipeRunConfig(split_input=by_position))
        torch.testing.assert_close(found, expected[0], rtol=0, atol=1e-12)
        assert sizes == [2, 2, 2]
        found = model(x=x, mask=mask, roundpipe_run_config=RoundPipeRunConfig(split_input=by_name))
        torch.testing.assert_close(found, expected[1], rtol=0, atol=1e-12)


def chunked_labels(label: Any, num_microbatch: int) -> list[Any]:
    targets, weights = label
    return list(zip(targets.chunk(num_microbatch), weights.chunk(num_microbatch), strict=True))


@pytest.mark.parametrize(
    "split_label", [(TensorChunkSpec(0), TensorChunkSpec(0)), chunked_labels, None], ids=["spec", "function", "auto"]
)
def test_labels_are_split_beside_the_inputs(images: torch.Tensor, labels: torch.Tensor, split_label: Any) -> None:
    weights = torch.rand(12, dtype=DTYPE)

    def weighted(outputs: torch.Tensor, label: Any) -> torch.Tensor:
        targets, share = label
        return (nn.functional.cross_entropy(outputs, targets, reduction="none") * share).sum()

    net = sequential()
    expected = weighted(net(images), (labels, weights))
    config = RoundPipeRunConfig(split_label=split_label, num_microbatch=3)
    with RoundPipe(net, devices=DEVICES) as model:
        loss = model.forward_backward((images,), label=(labels, weights), loss_fn=weighted, run_config=config)
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-10)


def test_class_weights_are_replicated(images: torch.Tensor, labels: torch.Tensor) -> None:
    class_weights = torch.rand(10, dtype=DTYPE)

    def weighted(outputs: torch.Tensor, label: Any) -> torch.Tensor:
        targets, weights = label
        return nn.functional.cross_entropy(outputs, targets, weights, reduction="sum")

    net = sequential()
    expected = weighted(net(images), (labels, class_weights))
    config = RoundPipeRunConfig(split_label=(TensorChunkSpec(0), _Replicate), num_microbatch=4)
    with RoundPipe(net, devices=DEVICES) as model:
        loss = model.forward_backward((images,), label=(labels, class_weights), loss_fn=weighted, run_config=config)
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-10)


@dataclass
class Outputs:
    """What Hugging Face models return, in short."""

    logits: torch.Tensor
    hidden_states: torch.Tensor


class Heads(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner = kind, nn.Linear(4, 4, dtype=DTYPE)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.inner(x)
        return {
            "pair": lambda: (hidden * 2, hidden),
            "loss": lambda: hidden.square().sum(),
            "object": lambda: Outputs(hidden * 2, hidden),
            "mixed": lambda: {"hidden": hidden, "mean": hidden.mean(), "kind": "mixed"},
        }[self.kind]()


MERGES: dict[str, tuple[str, Any, Any]] = {
    "specs": ("pair", (TensorChunkSpec(0), TensorChunkSpec(0)), lambda whole: whole),
    "reducer": ("loss", _CustomReducer(torch.tensor(0.0, dtype=DTYPE), lambda x, y: x + y), lambda whole: whole),
    "function": ("object", lambda outputs: torch.cat([one.logits for one in outputs]), lambda whole: whole.logits),
    "auto": ("mixed", None, lambda whole: whole),
    "true": ("mixed", True, lambda whole: whole),
}


@pytest.mark.parametrize("name", list(MERGES))
def test_outputs_are_merged(name: str) -> None:
    kind, merge_output, of_whole = MERGES[name]
    net, x = Heads(kind), torch.randn(6, 4, dtype=DTYPE)
    expected = of_whole(net(x))
    config = RoundPipeRunConfig(merge_output=merge_output, num_microbatch=3)
    with RoundPipe(net, devices=DEVICES) as model, torch.no_grad():
        found = model(x, roundpipe_run_config=config)
    if kind == "mixed":
        assert found.pop("kind") == expected.pop("kind")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12, check_device=True)


def test_unmerged_outputs_feed_another_model(images: torch.Tensor) -> None:
    front, back = sequential()[:4], sequential()[4:]
    expected = back(front(images)).detach()
    config = RoundPipeRunConfig(merge_output=False)
    with RoundPipe(front, devices=DEVICES) as first, RoundPipe(back, devices=DEVICES) as second, torch.no_grad():
        output = first(images, roundpipe_run_config=config)
        assert isinstance(output, roundpipe.RoundPipePackedData) and isinstance(output, list)
        torch.testing.assert_close(second(output), expected, rtol=0, atol=1e-12)
        output.synchronize()
        assert torch.equal(torch.cat(list(output)), front(images))
