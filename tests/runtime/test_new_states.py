"""States that an optimizer makes at its first step lie on huge pages, where the host has such."""

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.runtime.optimizer import new_states
from roundpipe.runtime.optimizer.new_states import StatesOnHugePages


@pytest.fixture
def asked(monkeypatch):
    """Sizes for which huge pages are asked for."""
    sizes = []
    monkeypatch.setattr(new_states, "HUGE_PAGE_BYTES", 1000)
    monkeypatch.setattr(new_states, "on_huge_pages", lambda tensor: sizes.append(tensor.numel()) or tensor)
    return sizes


def test_zeros_like_large_tensors_are_zeros_of_the_same_kind(asked):
    large, small = torch.ones(20, 30).T, torch.ones(5)
    with StatesOnHugePages():
        made = torch.zeros_like(large, dtype=torch.bfloat16, memory_format=torch.preserve_format)
        torch.testing.assert_close(torch.zeros_like(small), torch.zeros(5))
        leaf = torch.zeros_like(nn.Parameter(large), requires_grad=True)
        sparse = torch.zeros_like(torch.ones(40, 40).to_sparse())
    assert asked == [600, 600]
    torch.testing.assert_close(made, torch.zeros(30, 20, dtype=torch.bfloat16))
    assert made.stride() == large.stride() and leaf.is_leaf and leaf.requires_grad and sparse.is_sparse


@pytest.mark.parametrize("is_async", [False, True])
def test_of_the_first_updates(asked, is_async):
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 2))
    with roundpipe.RoundPipe(model, devices=["cpu"]) as pipe:
        optimizer = torch.optim.Adam(pipe.optim_parameters())
        for _ in range(4):
            pipe.forward_backward((torch.randn(4, 20),), loss_fn=lambda out, label: out.square().sum())
            pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
        pipe.synchronize()
    assert asked == [600, 600]  # two states of the first layer's weight
