"""Cutting a weighted chain: exact against brute force, and the errors of misuse."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe.core.balance import cut_into, cut_under
from roundpipe.core.errors import PartitionError

chains = st.lists(st.one_of(st.integers(0, 5), st.floats(0, 5)), min_size=1, max_size=8)


@st.composite
def chains_with_cuts(draw: st.DrawFn) -> tuple[list[float], list[int] | None]:
    weights = draw(chains)
    cuts = draw(st.one_of(st.none(), st.sets(st.integers(1, max(len(weights) - 1, 1)))))
    return weights, None if cuts is None or len(weights) == 1 else sorted(cuts)


def heaviest(weights: Sequence[float], parts: Sequence[tuple[int, int]]) -> float:
    return max((sum(weights[start:stop]) for start, stop in parts), default=0.0)


def brute_force(weights: list[float], num_parts: int, cuts: list[int] | None) -> float:
    allowed = range(1, len(weights)) if cuts is None else cuts
    best = float("inf")
    for chosen in itertools.combinations(allowed, min(num_parts - 1, len(allowed))):
        bounds = [0, *chosen, len(weights)]
        best = min(best, heaviest(weights, list(itertools.pairwise(bounds))))
    return best


@given(chains_with_cuts(), st.integers(1, 9))
@settings(max_examples=300, deadline=None)
def test_heaviest_part_is_as_light_as_can_be(chain: tuple[list[float], list[int] | None], num_parts: int) -> None:
    weights, cuts = chain
    parts = cut_into(weights, num_parts, cuts)
    num_cuts = len(weights) - 1 if cuts is None else len(cuts)
    assert len(parts) == min(num_parts, num_cuts + 1)
    assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
    assert parts[-1][1] == len(weights) and all(start < stop for start, stop in parts)
    assert cuts is None or all(start in cuts for start, _ in parts[1:])
    assert heaviest(weights, parts) == pytest.approx(brute_force(weights, num_parts, cuts))


@given(chains_with_cuts(), st.integers(0, 12).map(lambda number: number + 0.4142))
@settings(max_examples=300, deadline=None)
def test_fewest_parts_under_a_limit(chain: tuple[list[float], list[int] | None], limit: float) -> None:
    weights, cuts = chain
    counts = range(1, len(weights) + 1)
    possible = [n for n in counts if brute_force(weights, n, cuts) <= limit]
    if not possible:
        with pytest.raises(PartitionError):
            cut_under(weights, limit, cuts)
        return
    parts = cut_under(weights, limit, cuts)
    assert heaviest(weights, parts) <= limit * (1 + 1e-9)
    assert len(parts) == possible[0]


def test_parts_are_even_where_the_heaviest_leaves_a_choice() -> None:
    assert cut_into([2] * 7, 3) == [(0, 2), (2, 4), (4, 7)]
    assert cut_into([1, 1, 1, 1, 1, 1, 3], 3) == [(0, 3), (3, 6), (6, 7)]


def test_fewer_parts_than_asked_for() -> None:
    assert cut_into([1, 2], 5) == [(0, 1), (1, 2)]
    assert cut_into([1, 2, 3], 5, cuts=[2]) == [(0, 2), (2, 3)]
    assert cut_into([], 3) == [] and cut_under([], 1) == []


@pytest.mark.parametrize(
    ("weights", "num_parts", "cuts", "message"),
    [
        ([1], 0, None, "num_parts is 0"),
        ([1, -2], 1, None, "weight 1 is -2"),
        ([1, float("nan")], 1, None, "weight 1 is nan"),
        ([1, 2], 2, [2], "between 1 and 1"),
    ],
)
def test_misuse(weights: list[float], num_parts: int, cuts: list[int] | None, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        cut_into(weights, num_parts, cuts)


def test_an_item_over_the_limit_is_named() -> None:
    with pytest.raises(PartitionError, match="items 1 to 2 can't be cut and weigh 7"):
        cut_under([1, 3, 4, 1], 5, cuts=[1, 3])


def test_long_chains_are_quick() -> None:
    weights = [1 + (index * 7919 % 13) / 13 for index in range(5000)]
    assert heaviest(weights, cut_into(weights, 64)) * 64 / sum(weights) < 1.02


def test_no_torch() -> None:
    code = (
        "import sys, types; package = types.ModuleType('roundpipe'); package.__path__ = ['roundpipe'];"
        "sys.modules['roundpipe'] = package; import roundpipe.core.balance; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
