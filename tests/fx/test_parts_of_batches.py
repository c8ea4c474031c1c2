"""Models that take a batch of three parts, which can't run on a number of samples that has no thirds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from roundpipe.fx.passes.sample_dependence import dependence_of_samples
from roundpipe.fx.trace.tracer import trace
from tests.fx.test_sample_dependence import WIDTH, Block, Model, Outer


def layers_of_thirds(model: Any, x: torch.Tensor) -> torch.Tensor:
    first, second, third = x.split(len(x) // 3)
    return torch.cat([model.core(first), model.core(second) + 1, model.core(third) + 2])


def norms_of_thirds(model: Any, x: torch.Tensor) -> torch.Tensor:
    """As the norms that a batch of three kinds of pictures has."""
    assert len(x) % 3 == 0
    first, *rest = x.split(len(x) // 3)
    return model.core(torch.cat([F.batch_norm(first, None, None, training=True), *rest]))


def thirds_of_features(model: Any, x: torch.Tensor) -> torch.Tensor:
    first, second, third = x.split(WIDTH // 3, dim=1)
    return model.core(torch.cat([third, first, second], dim=1))


@pytest.mark.parametrize("kind", [Model, Block, Outer])
@pytest.mark.parametrize(
    ("run", "is_mixed"), [(layers_of_thirds, True), (norms_of_thirds, True), (thirds_of_features, False)]
)
def test_parts_of_a_batch_are_found(
    kind: Any, run: Callable[[Any, torch.Tensor], torch.Tensor], is_mixed: bool
) -> None:
    traced = trace(kind(run), (torch.randn(9, WIDTH),), {})
    assert bool(dependence_of_samples(traced).where) == is_mixed
