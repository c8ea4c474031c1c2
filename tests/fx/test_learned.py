"""What the attempts of one trace have found out is known in the next trace of the same model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import roundpipe
from roundpipe.fx.trace.attempt import Attempt
from roundpipe.fx.trace.decisions import Decision, Knowledge, Learned, Need

WIDTH = 8


class Within(nn.Module):
    """A leaf until an attempt shows that it asks for data that arguments tell."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        return torch.cat([part - part.mean(0) for part in torch.split(self.linear(rows), sizes.tolist())])


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Within() for _ in range(8)])

    def forward(self, rows: torch.Tensor, sizes: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for block in self.blocks:
            rows = rows + block(rows, sizes) * scale
        return rows


@pytest.fixture
def num_attempts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Attempts that were made so far."""
    made, run = [0], Attempt.run

    def counted(attempt: Attempt) -> object:
        made[0] += 1
        return run(attempt)

    monkeypatch.setattr(Attempt, "run", counted)
    return made


def test_attempts_that_failed_are_not_made_again(num_attempts: list[int]) -> None:
    model = Tower()
    rows, sizes = torch.randn(7, WIDTH), torch.tensor([3, 4])
    config = roundpipe.RoundPipeRunConfig(num_microbatch=1)
    with roundpipe.compile(model, devices=["cpu"], model_run_config=config) as piped:
        for scale, most in [(1.0, None), (2.0, 1), (3.0, 1)]:
            before = num_attempts[0]
            assert_close(piped(rows, sizes, scale), model(rows, sizes, scale))
            attempts = num_attempts[0] - before
            assert attempts <= most if most else attempts > 1
        assert piped.trace_count == 3


def test_another_model_is_looked_at_anew(num_attempts: list[int]) -> None:
    model = Tower()
    rows, sizes = torch.randn(7, WIDTH), torch.tensor([3, 4])
    config = roundpipe.RoundPipeRunConfig(num_microbatch=1)
    with roundpipe.compile(model, devices=["cpu"], model_run_config=config) as piped:
        piped(rows, sizes)
        first = num_attempts[0]
        model.blocks[0].linear.weight.requires_grad_(False)
        assert_close(piped(rows, sizes), model(rows, sizes))
        assert piped.trace_count == 2 and num_attempts[0] == 2 * first


def test_what_is_kept_whole_and_numbers_of_pieces_are_not_learned() -> None:
    learned, given = Learned(), Knowledge(max_leaf_bytes=5)
    assert learned.added_to(given) == given
    decisions = {"a": Decision.LEAF, "b": Decision.DESCEND, Tower: Decision.PROBE}
    needs, reasons = frozenset({Need.OWN_NUMBERS, Need.LAYOUTS}), dict.fromkeys(decisions, "why")
    learned.note(Knowledge(needs=needs, decisions=decisions, reasons=reasons, max_leaf_bytes=7))
    known = learned.added_to(given)
    assert known.needs == {Need.LAYOUTS} and known.max_leaf_bytes == 5
    assert known.decisions == {"b": Decision.DESCEND} and known.reasons == {"b": "why"}
    learned.forget()
    assert learned.added_to(given) == given


def test_a_list_of_data_is_one_read() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, rows: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
            return self.linear(rows) * sum(sum(pair) for pair in grid.tolist())

    graph = roundpipe.fx.trace.tracer.trace(Listed(), (torch.randn(2, WIDTH), torch.tensor([[1, 2], [3, 4], [5, 6]])))
    (read,) = graph.guards.values.reads
    assert read.expected == [[1, 2], [3, 4], [5, 6]]
    assert not any(node.target == "item" for node in graph.graph.nodes)
