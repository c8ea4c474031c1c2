"""A model whose code does something else for each batch's data is traced twice, and then runs in parts."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import roundpipe
from tests.equality import assert_same_gradients

WIDTH, NUM_CLASSES = 16, 5
RUNS_IN_PARTS = "where no trace serves a batch"


def as_integers(sizes: torch.Tensor) -> list[int]:
    """Numbers of Python's and nothing else, so that a graph serves no others."""
    return [int(size) for size in sizes]


class Tower(nn.Module):
    """Mixes rows within images, of which ``sizes`` has the numbers of rows."""

    def __init__(self, read: Callable[[torch.Tensor], list[int]] = as_integers) -> None:
        super().__init__()
        self.read = read
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, rows: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            images = torch.split(block(rows).tanh(), self.read(sizes))
            rows = rows + torch.cat([image - image.mean(0) for image in images])
        return self.head(torch.stack([image.mean(0) for image in torch.split(rows, self.read(sizes))]))


def batch_of(*sizes: int) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(sizes))
    rows = torch.randn(sum(sizes), WIDTH, generator=generator)
    return (rows, torch.tensor(sizes)), torch.randint(0, NUM_CLASSES, (len(sizes),), generator=generator)


class Both:
    """A model, and a copy of it that runs in eager mode on the same batches."""

    def __init__(self, model: nn.Module | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = model or Tower()
        self.reference = copy.deepcopy(self.model)
        self.piped = roundpipe.compile(self.model, devices=["cpu"], **options)
        self.optimizers = [
            torch.optim.AdamW(self.piped.optim_parameters(), lr=1e-2),
            torch.optim.AdamW(self.reference.parameters(), lr=1e-2),
        ]

    def step(self, *sizes: int) -> list[str]:
        """A training step of both, which must agree; what it warned of."""
        args, label = batch_of(*sizes)
        config = roundpipe.RoundPipeRunConfig(num_microbatch=1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = self.piped.forward_backward(
                args, label=label, loss_fn=nn.functional.cross_entropy, run_config=config
            )
        expected = nn.functional.cross_entropy(self.reference(*args), label)
        expected.backward()
        assert_close(loss, expected.detach())
        self.piped.synchronize()
        assert_same_gradients(self.model, self.reference, 1e-5)
        self.piped.step(lambda: self._update(self.optimizers[0]), is_async=False)
        self._update(self.optimizers[1])
        for mine, theirs in zip(self.model.parameters(), self.reference.parameters(), strict=True):
            assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        return [str(warning.message) for warning in caught]

    @staticmethod
    def _update(optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()


def test_batches_with_other_data_run_in_parts_after_two_traces() -> None:
    both = Both()
    with both.piped:
        said = [both.step(size, 3, 7 - size % 4) for size in range(1, 9)]
        assert both.piped.trace_count == 2
        told = [[text for text in texts if RUNS_IN_PARTS in text] for texts in said]
        assert [len(texts) for texts in told] == [0, 0, 1, 0, 0, 0, 0, 0]
        assert "sizes (__int__)" in told[2][0] and "int(size)" in told[2][0]


def test_sizes_that_are_read_as_a_list_are_inputs() -> None:
    torch.manual_seed(0)
    both = Both(Tower(torch.Tensor.tolist), fallback=False)
    with both.piped:
        for size in range(2, 9):
            assert not both.step(size, 3, 7 - size % 4)
        assert both.piped.trace_count == 2
        both.step(5, 3)  # another number of images
        assert both.piped.trace_count == 3


def test_a_batch_whose_data_were_traced_still_runs_in_layers(caplog: pytest.LogCaptureFixture) -> None:
    both = Both()
    with both.piped:
        for size in range(1, 7):
            both.step(size, 3, 4)
        assert both.piped.trace_count == 2
        both.step(2, 3, 4)
        assert both.piped.trace_count == 2
        assert "own forward on the CPU" not in both.piped.partition_table()
        both.step(9, 3, 4)
        assert "own forward on the CPU" in both.piped.partition_table()


def test_no_fallback_means_a_trace_each() -> None:
    both = Both(fallback=False)
    with both.piped:
        said = [both.step(size, 3, 4) for size in range(1, 8)]
        assert both.piped.trace_count == 7
        assert not any(RUNS_IN_PARTS in text for texts in said for text in texts)


def test_a_graph_of_too_many_steps_by_data_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roundpipe.fx.trace.example_data.MOST_CALLS", 20)
    both = Both(Tower(torch.Tensor.tolist))
    with both.piped:
        said = [both.step(size, 3, 4) for size in (1, 2, 3)]
        assert [any("would have over 20 calls" in text for text in texts) for texts in said] == [True, False, False]
        assert both.piped.trace_count == 1


def test_plain_calls_run_in_parts_too() -> None:
    both = Both(model_run_config=roundpipe.RoundPipeRunConfig(num_microbatch=1))
    with both.piped, pytest.warns(UserWarning, match=RUNS_IN_PARTS):
        for size in range(1, 8):
            args, _ = batch_of(size, 3, 4)
            out, expected = both.piped(*args), both.reference(*args)
            assert_close(out, expected)
            out.square().sum().backward()
            expected.square().sum().backward()
        both.piped.synchronize()
        assert_same_gradients(both.model, both.reference, 1e-5)
        assert both.piped.trace_count == 2


class Divided(nn.Module):
    """What it divides by is a number of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.layers(x) / lengths.sum().item()


class Chosen(nn.Module):
    """It takes one of two ways."""

    def __init__(self, takes_first: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.takes_first = takes_first
        self.first, self.second = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.first(x) if self.takes_first(lengths) else self.second(x)


def compare_steps(model: nn.Module, num_steps: int, num_microbatch: int) -> int:
    """Train it and its copy on lengths that differ in each step; the number of traces."""
    reference = copy.deepcopy(model)
    config = roundpipe.RoundPipeRunConfig(num_microbatch=num_microbatch)
    with roundpipe.compile(model, devices=["cpu"]) as piped, warnings.catch_warnings():
        warnings.filterwarnings("error", RUNS_IN_PARTS)
        for step in range(num_steps):
            x, lengths = torch.randn(4, WIDTH), torch.arange(4) + step
            piped.forward_backward(
                (x, lengths), loss_fn=lambda out, _: out.square().sum(), loss_reduction="sum", run_config=config
            )
            reference(x, lengths).square().sum().backward()
        piped.synchronize()
        assert_same_gradients(model, reference, 1e-5)
        return piped.trace_count


def test_numbers_of_the_whole_batch_are_inputs() -> None:
    assert compare_steps(Divided(), 7, 2) == 2


def test_decisions_are_traced_once_each() -> None:
    assert compare_steps(Chosen(lambda lengths: bool(lengths[0] % 2 == 0)), 8, 1) == 2


class Mixed(nn.Module):
    """Each image belongs to a sample, and a statistic of all is subtracted."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, images: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(images)
        hidden = torch.stack([each[:size].mean(0) for each, size in zip(hidden, sizes.tolist(), strict=True)])
        return self.head(hidden - hidden.mean(0))


def test_a_batch_that_is_not_cut_by_default_is_not_cut_for_a_trace() -> None:
    torch.manual_seed(0)
    model = Mixed()
    reference = copy.deepcopy(model)
    with roundpipe.compile(model, devices=["cpu", "cpu"]) as piped, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(5):
            images, sizes = (
                torch.randn(4, 9, WIDTH),
                torch.randint(1, 9, (4,), generator=torch.Generator().manual_seed(step)),
            )
            label = torch.randint(0, NUM_CLASSES, (4,))
            loss = piped.forward_backward((images, sizes), label=label, loss_fn=nn.functional.cross_entropy)
            expected = nn.functional.cross_entropy(reference(images, sizes), label)
            expected.backward()
            assert_close(loss, expected.detach())
        assert piped.trace_count <= 3
        piped.synchronize()
        assert_same_gradients(model, reference, 1e-5)
