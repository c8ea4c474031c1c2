"""One operator thread and one seed for every test, so that results repeat bit for bit."""

import pytest
import torch

from tests.clock import clock as clock

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
