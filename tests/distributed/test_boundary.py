"""What passes between stages arrives as it was."""

from __future__ import annotations

import pytest
import torch

from roundpipe.distributed.boundary import Boundary

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_integers_arrive_bit_by_bit_where_all_must_have_gradients(dtype: torch.dtype) -> None:
    """Torch before 2.12 takes nothing else; among the bits are those of a NaN and of numbers too small to be normal."""
    limits = torch.iinfo(dtype)
    given = torch.tensor([[limits.min, limits.max, 0], [1, limits.max - 1, limits.min + 1]], dtype=dtype)
    boundary = Boundary(("value",), (dtype,))
    (sent,) = boundary.pack({"value": given.T}, CPU)
    received = torch.empty_like(sent).copy_(sent).requires_grad_()
    assert received.is_contiguous()
    arrived = boundary.unpack((received,))["value"]
    assert arrived.dtype is dtype
    assert torch.equal(arrived, given.T)
    assert not arrived.requires_grad


@pytest.mark.parametrize("value", [torch.tensor(True), torch.tensor([[False], [True]]), torch.zeros(0, 2).bool()])
def test_bools_arrive(value: torch.Tensor) -> None:
    boundary = Boundary(("value",), (torch.bool,))
    (sent,) = boundary.pack({"value": value}, CPU)
    arrived = boundary.unpack((sent.clone().requires_grad_(),))["value"]
    assert arrived.dtype is torch.bool
    assert torch.equal(arrived, value)


def test_a_size_arrives() -> None:
    boundary = Boundary(sizes=("length",))
    (sent,) = boundary.pack({"length": 7}, CPU)
    assert boundary.unpack((torch.empty_like(sent).requires_grad_(),)) == {"length": 7}
