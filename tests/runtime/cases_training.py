"""What the tests beside it share."""

import pytest

from tests.runtime.models import pieces, square_loss

workers = pytest.mark.parametrize("workers", [1, 2, 3, 4])


modes = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


NUM = 3


def eager_backward(model, x, num=NUM, loss_fn=square_loss):
    total = 0.0
    for piece in pieces(x, num):
        loss = loss_fn(model(piece), None)
        loss.backward()
        total += float(loss.detach())
    return total
