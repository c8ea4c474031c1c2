"""One operator thread and one seed for every test, so that results repeat bit for bit."""

import logging

import pytest
import torch

from tests.clock import clock as clock

torch.set_num_threads(1)
# pytest listens to loggers that do not propagate; of this one, torch writes records with stacks only if anybody listens.
logging.getLogger("torch.__trace").propagate = True


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
