"""Counting what runs: bytes moved, kernels, live memory; and that torch still dispatches as assumed."""

from __future__ import annotations

from typing import Any

import torch

from roundpipe.core.allocations import TorchDispatchMode
from roundpipe.fx.counting import Tally


def test_a_dispatch_mode_sees_operators_below_autograd() -> None:
    """If this fails, torch has moved or changed its dispatch mode: nothing would be counted or recorded."""
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    weight = torch.ones(2, 2, requires_grad=True)
    with Watch():
        (weight @ torch.ones(2, 2)).sum().backward()
    assert seen[1] == "aten.mm.default" and "aten.mm.default" in seen[3:]


def test_views_cost_nothing_and_kernels_their_bytes() -> None:
    x = torch.ones(10, 4)
    with Tally([x]) as tally:
        y = x.t().reshape(4, 10)
        z = y.contiguous() + 1
    assert tally.num_kernels == 2 and tally.moved_bytes == 4 * 160  # a copy and an addition
    assert tally.peak_bytes == 320 and z.shape == (4, 10)


def test_a_gather_reads_only_what_it_returns() -> None:
    table, index = torch.ones(1000, 4), torch.zeros(3, dtype=torch.int64)
    with Tally([table, index]) as tally:
        torch.nn.functional.embedding(index, table)
    assert tally.moved_bytes == 2 * 3 * 4 * 4


def test_freed_memory_is_not_live() -> None:
    x = torch.ones(100)
    with Tally([x]) as tally:
        y = x + 1
        for _ in range(5):
            y = y + 1
    assert tally.peak_bytes == 800 and tally.live_bytes == 400
    del y
    assert tally.live_bytes == 0


def test_writes_in_place_move_bytes_and_make_nothing() -> None:
    x = torch.ones(100)
    with Tally([x]) as tally:
        x.add_(1)
    assert tally.num_kernels == 1 and tally.moved_bytes == 400 and tally.peak_bytes == 0


def test_an_expanded_operand_is_read_once() -> None:
    x = torch.ones(1, 100).expand(50, 100)
    with Tally([x]) as tally:
        x + 0
    assert tally.moved_bytes == 400 + 50 * 400
