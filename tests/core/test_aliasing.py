"""Which views have elements in common."""

import itertools
import random

import pytest
import torch

from roundpipe.core import aliasing as overlap
from roundpipe.core.aliasing import share_elements


def really_share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """By a mark on every element."""
    size = one.untyped_storage().nbytes() // one.element_size()
    marks = torch.zeros(size, dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def some_view(base: torch.Tensor, draw: random.Random) -> torch.Tensor:
    shape = [draw.randint(1, 4) for _ in range(draw.randint(0, 3))]
    strides = [draw.randint(0, 9) for _ in shape]
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return base.as_strided(shape, strides, draw.randrange(base.numel() - reach))


def test_as_marks_on_every_element_tell() -> None:
    draw = random.Random(0)
    base = torch.zeros(100)
    told = []
    for _ in range(3000):
        one, other = some_view(base, draw), some_view(base, draw)
        told.append(share_elements(one, other))
        assert told[-1] == really_share(one, other), (one.shape, one.stride(), other.shape, other.stride())
    assert 300 < sum(told) < 2700


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_chunks_have_nothing_in_common(dim: int) -> None:
    base = torch.zeros(64, 128, 96)
    one, other, third = base.chunk(3, dim)
    assert not share_elements(one, other) and not share_elements(third, one)
    assert share_elements(base, one) and share_elements(other, base.flatten())


def test_other_memory_and_other_kinds() -> None:
    base = torch.zeros(8)
    assert not share_elements(base, base.clone()) and not share_elements(base[:0], base)
    assert share_elements(base, base.view(torch.int16))


def test_what_takes_long_counts_as_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    base = torch.zeros(1000)
    even, odd = base.as_strided((9, 9, 9), (2, 4, 6)), base.as_strided((9, 9, 9), (10, 12, 14), 1)
    assert not share_elements(even, odd)
    monkeypatch.setattr(overlap, "MAX_STEPS", 10)
    assert share_elements(even, odd)


def test_overlapping_finds_the_pairs_that_share_elements_do() -> None:
    draw = random.Random(1)
    found = 0
    for _ in range(60):
        bases = [torch.zeros(100), torch.zeros(100)]
        views = [some_view(draw.choice(bases), draw) for _ in range(6)] + [torch.zeros(0)]
        expected = {
            (i, j) for i, j in itertools.combinations(range(len(views)), 2) if share_elements(views[i], views[j])
        }
        pairs = list(overlap.overlapping(views))
        assert set(pairs) == expected and len(pairs) == len(expected)
        found += len(pairs)
    assert 60 < found < 600


def test_thousands_of_neighbours_in_one_memory_are_told_apart_at_once() -> None:
    flat = torch.zeros(40_000)
    views = [*flat.split(4), flat[39_998:]]
    assert list(overlap.overlapping(views)) == [(9_999, 10_000)]
