"""What the terms of a loss count for in one microbatch, where graphs multiply them before they add them up.

A loss that is a linear combination of means has one number of targets for each, and so have its microbatches: each mean
counts by its own share of the batch. The graph of such a loss has `weighed` around its means.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

import torch

from roundpipe.core.contexts import contextmanager

TermShares = Mapping[str, float]
"""By name of a term, what it counts for."""


class _PresentShares(threading.local):
    shares: TermShares = {}


_present = _PresentShares()


@contextmanager
def with_shares(shares: TermShares) -> Iterator[None]:
    """Inside, terms count for this in what the thread computes; elsewhere, and those not named, for themselves."""
    before, _present.shares = _present.shares, shares
    try:
        yield
    finally:
        _present.shares = before


def weighed(term: torch.Tensor, name: str) -> torch.Tensor:
    """A term of a loss, times what it counts for; a tensor of its own."""
    share = _present.shares.get(name)
    if share is None:
        return term.clone()
    return term * share if share else torch.zeros_like(term)  # a mean over no targets is no number
