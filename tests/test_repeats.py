"""The list of cases that only `make test-long` runs."""

from __future__ import annotations

from tests.repeats import GONE_CASES, LONG_CASES


def test_the_list_of_long_cases_names_cases_that_there_are() -> None:
    """Where all tests were collected; else nothing is known of them."""
    assert not GONE_CASES, f"{LONG_CASES.name} names cases that are gone"
