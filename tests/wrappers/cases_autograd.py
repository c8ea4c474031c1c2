"""What the tests beside it share."""

import pytest
import torch

from tests.runtime.models import (
    pieces,
)

workers = pytest.mark.parametrize("workers", [1, 2, 3, 4])


grains = pytest.mark.parametrize("grain", ["stage", "layer"])


def by_microbatch(model, value, num=3):
    run = model.run if hasattr(model, "run") else model
    return torch.cat([run(one) for one in pieces(value, num)])
