"""What lives on a device is counted as what is there, and gradients that add up as twice as much."""

import logging
from itertools import pairwise

import pytest
import torch

from roundpipe.core import trees
from tests.runtime.cases_twins import OPTIMIZERS, ROOM, WIDTH, optimizer_of, wrapped
from tests.runtime.models import DTYPE, assert_equal_bits, batch, mlp, square_loss
from tests.runtime.test_some_layers_stay import EIGHT_LAYERS, KINDS, eight_layers, number_there, one_stage


def test_rounds_that_begin_to_add_up_let_fewer_stay_within_the_budget():
    def run(residency):
        torch.manual_seed(4)
        model, found, numbers = mlp(8, WIDTH).to(DTYPE), [], []
        with wrapped(model, residency, one_stage(8), EIGHT_LAYERS) as piped:
            ours = optimizer_of(piped, OPTIMIZERS["AdamW"])
            for step in range(8):
                for part in range(1 + (step > 3)):
                    x = batch(4, width=WIDTH, seed=10 * step + part)
                    found.append(piped.forward_backward((x,), loss_fn=square_loss))
                numbers.append(number_there(piped))
                piped.step(lambda: (ours.step(), ours.zero_grad()))
            piped.synchronize()
            found += [parameter.detach().clone() for parameter in model.parameters()]
            assert piped.peak_device_bytes() <= EIGHT_LAYERS
        return dict(enumerate(found)), numbers

    streamed, _ = run("off")
    found, numbers = run("full")
    assert numbers[0] == 0 < numbers[-1] < numbers[3] and len(set(numbers)) == 3
    assert_equal_bits(found, streamed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("optimizer", ["AdamW fused", "momentum", "Factored"])
def test_the_optimizers_side_is_counted_as_what_is_there(optimizer, dtype):
    torch.manual_seed(4)
    model = mlp(3, WIDTH).to(dtype)
    with wrapped(model, "full", one_stage(3), ROOM, optim_dtype=torch.float32) as piped:
        ours, side = optimizer_of(piped, KINDS[optimizer]), piped._session.optimizer  # nothing public counts it
        copies = list(piped.optim_parameters())
        for step in range(4):
            piped.forward_backward((batch(4, width=WIDTH, seed=step).to(dtype),), loss_fn=square_loss)
            piped.step(ours.step, is_async=False)
        assert number_there(piped) == 6
        states = [tensor for state in ours.state.values() for tensor in trees.tensors(state)]
        there = [*copies, *(copy.grad for copy in copies), *states]
        counted_bytes = side.device_bytes(set(model.parameters()))
        temporary_bytes = counted_bytes - sum(each.nbytes for each in there)
        whole_bytes, most_bytes = sum(each.nbytes for each in copies), max(each.nbytes for each in copies)
    if optimizer == "Factored":
        assert temporary_bytes == whole_bytes + 4 * most_bytes
    else:
        assert temporary_bytes == 0


def test_where_weights_are_is_said_once(caplog):
    """Each size of batch has a plan of its own."""
    _, piped = eight_layers("full")
    with piped, caplog.at_level(logging.INFO, "roundpipe"):
        ours = optimizer_of(piped, KINDS["AdamW"])
        for size in (5, 5, 88, 96, 5, 88):  # the larger ones leave no room
            piped.forward_backward((batch(size, width=WIDTH),), loss_fn=square_loss)
            piped.step(lambda: (ours.step(), ours.zero_grad()), is_async=False)
    said = [each.getMessage() for each in caplog.records if "the optimizer's side" in each.getMessage()]
    assert any("live on the device" in each for each in said) and any("are streamed" in each for each in said)
    assert all(one != other for one, other in pairwise(said))
