"""What the code around parts may do with outputs that are still in pieces."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import RoundPipePackedData
from roundpipe.core.errors import MicrobatchError
from roundpipe.wrappers.lazy_outputs import LazyBatch, merge_lazily, repack
from tests.wrappers.cases_later import WIDTH, Listed, batch, block, check


class Pair(nn.Module):
    """Takes and gives more than one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, x: torch.Tensor, state: Any, place: torch.Tensor) -> Any:
        out = self.inner(x) + place
        return out, {"sum": out.sum(-1), "norm": out.mean(), "count": 3, "before": state}


def test_structures_scalars_and_tensors_that_are_no_batch() -> None:
    """A scalar is averaged and what is no tensor stays one, as when an element merges by itself."""

    def body(model: Listed, x: torch.Tensor) -> Any:
        state: Any = None
        place = torch.linspace(0, 1, WIDTH, dtype=x.dtype)[None]
        for one in model.blocks:
            x, state = one(x, state, place)
            assert state["count"] == 3 and state["norm"].ndim == 0
            state = {"sum": state["sum"]}
        return x, state["sum"]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # place is not as long as the batch
        check(body, blocks=[Pair() for _ in range(3)], x=batch(12))


class Placed(nn.Module):
    """Its first argument is not the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, place: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + place


def test_another_first_argument_decides_the_number() -> None:
    def body(model: Listed, x: torch.Tensor) -> torch.Tensor:
        place = torch.linspace(0, 1, WIDTH, dtype=x.dtype)[None]
        x = model.blocks[0](x)
        return model.blocks[2](place, model.blocks[1](place, x))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        check(body, blocks=[block(), Placed(), Placed()])


def pieces() -> list[torch.Tensor]:
    return [torch.randn(size, 3, dtype=torch.float64, requires_grad=True) for size in (3, 3, 2)]


USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "print": repr,
    "format": lambda x: f"{x.sum():.6f}",
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(force=True).tolist(),
    "numpy of gradients": lambda x: x.detach().numpy().tolist(),
    "pointer": lambda x: x.data_ptr() != 0,
    "storage": lambda x: x.untyped_storage().nbytes(),
    "data": lambda x: x.data.sum(),
    "item": lambda x: x[0, 0].item(),
    "truth": lambda x: bool((x > 0).any()),
    "iteration": lambda x: [row.sum() for row in x],
    "into": lambda x: torch.add(x.detach(), 1, out=torch.empty(0, dtype=x.dtype)),
    "conversion": lambda x: x.float().double(),
    "strides": lambda x: (x.stride(), x.t().stride(), x.contiguous().stride()),
    "inference": lambda x: torch.inference_mode()(lambda: x.detach() * 2)().clone(),
    "vmap": lambda x: torch.vmap(torch.sum)(x.detach()),
    "saved": lambda x: torch.load(_saved(x.detach()), weights_only=True),
    "copied": lambda x: copy.deepcopy(x.detach()),
    "autocast": lambda x: torch.autocast("cpu")(lambda: nn.functional.linear(x.float(), x.float()))(),
    "numpy function": lambda x: torch.as_tensor(x.detach().__array__()),
}


def _saved(x: torch.Tensor) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("use", USES)
def test_uses_of_the_tensor(use: str, grad: bool) -> None:
    parts = pieces()
    with torch.set_grad_enabled(grad):
        later, whole = merge_lazily(RoundPipePackedData([1 * one for one in parts])), torch.cat([1 * x for x in parts])
        assert isinstance(later, LazyBatch)
        found, expected = USES[use](later), USES[use](whole)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert type(found) is torch.Tensor
    elif use != "print":
        assert found == expected
    else:
        assert found.partition("grad_fn")[0] == expected.partition("grad_fn")[0]


def test_pieces_that_make_no_batch() -> None:
    assert merge_lazily([RoundPipePackedData([1, 1]), "a"]) == [1, "a"]
    scalars = merge_lazily(RoundPipePackedData([torch.tensor(1.0), torch.tensor(2.0)]))
    assert type(scalars) is torch.Tensor and scalars == 1.5
    one = torch.zeros(2)
    assert merge_lazily(RoundPipePackedData([one])) is one
    with pytest.raises(MicrobatchError, match="can't be concatenated"):
        merge_lazily(RoundPipePackedData([torch.zeros(2, 3), torch.zeros(2, 4)]))


def test_pieces_are_taken_only_as_they_would_be_cut() -> None:
    later = merge_lazily(RoundPipePackedData(pieces()))
    assert isinstance(repack([later], [3, 3, 2])[0], RoundPipePackedData)
    for sizes in ([4, 4], [2, 3, 3], None):
        assert type(repack([later], sizes)[0]) is torch.Tensor


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_pieces_have_what_is_written(grad: bool, before: bool) -> None:
    """By operations, views, and through memory alone."""
    with torch.set_grad_enabled(grad):
        later = merge_lazily(RoundPipePackedData([1 * one for one in pieces()]))
        if before:
            repack([later], [3, 3, 2])
        later.add_(1)
        later[2:4] = 7
        later.view(-1)[:2].mul_(3)
        later.data[7] = 5
        later.detach()[6] = 4
        later.detach().numpy()[5] = 3
        taken = repack([later], [3, 3, 2])[0]
        assert isinstance(taken, RoundPipePackedData)
        torch.testing.assert_close(torch.cat(list(taken)), later * 1, rtol=0, atol=0)
        assert [later[row, 0].item() for row in (2, 3, 5, 6, 7)] == [7, 7, 3, 4, 5]
        assert all(one.requires_grad == grad for one in taken)


def test_events_are_awaited_when_looked_at() -> None:
    class Arrival:
        happened = 0

        def synchronize(self) -> None:
            self.happened += 1

    events = [Arrival() for _ in range(3)]
    later = merge_lazily(RoundPipePackedData(pieces(), events))
    assert later.shape == (8, 3) and [one.happened for one in events] == [0, 0, 0]
    assert repack([later], [3, 3, 2])[0].events == events
    later.sum()
    assert [one.happened for one in events] == [1, 1, 1]


def test_other_data_in_its_place() -> None:
    """Its place in the autograd graph stays, as eager's does."""

    def body(model: Listed, x: torch.Tensor) -> torch.Tensor:
        for index, one in enumerate(model.blocks):
            x = one(x)
            x.data = x.data * (index + 2)
            assert x.data.requires_grad is False
        return x

    def shorter(model: Listed, x: torch.Tensor) -> torch.Tensor:
        x = model.blocks[0](x)
        with torch.no_grad():
            y = x.detach()
            y.data = torch.cat([y.data, y.data])[:, :3]
            assert y.shape == (2 * len(x), 3)
            factor = y.sum()
        return x * factor

    check(body, batch(8))
    check(shorter)
