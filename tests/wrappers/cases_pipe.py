"""What the tests beside it share."""

import threading

from tests.runtime.models import (
    batch,
    config,
    square_loss,
)

LR = 0.05


def train_once(piped, num=3, **options):
    return piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(num, **options))


def threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("roundpipe")}
