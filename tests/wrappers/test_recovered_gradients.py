"""Gradients that a loss adds on the host by itself are those of one call, also if the call is run again."""

import copy
import threading
import time

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.errors import DeviceMemoryError
from roundpipe.runtime.device.backend import Device
from tests.runtime.models import DTYPE, assert_same, batch, config, eager_round, gradients
from tests.runtime.test_recovery import ROOM, Fault, counted, model_of

NUM = 3


class Loss:
    """Computes with weights of a model, and with one of its own."""

    def __init__(self, model):
        self.model = model
        self.scale = nn.Parameter(torch.ones((), dtype=DTYPE))

    def __call__(self, outputs, label):
        penalty = sum(weight.square().sum() for weight in self.model.parameters())
        return outputs.square().sum() * self.scale + 0.01 * penalty


def pair(fault):
    model = model_of(fault)
    reference = copy.deepcopy(model)
    for layer in reference:
        layer.fault[0] = Fault()
    return model, reference, Loss(model), Loss(reference)


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("position", range(4, 12))
def test_what_a_loss_adds_counts_once(position, accumulates):
    fault = Fault()
    fault.at = 1 + position * (counted(Fault()) - 1) // 11
    model, reference, loss_fn, expected_loss_fn = pair(fault)
    if accumulates:
        for each in (model, reference):
            for weight in each.parameters():
                weight.grad = torch.full_like(weight, 0.25)
    with roundpipe.RoundPipe(model, devices=[Device("cpu", memory_bytes=ROOM)] * 2) as piped:
        found = piped.forward_backward((batch(),), loss_fn=loss_fn, run_config=config(NUM))
        expected, _ = eager_round(reference, (batch(),), num=NUM, loss_fn=expected_loss_fn)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    assert_same(gradients(model), gradients(reference), atol=1e-9)
    torch.testing.assert_close(loss_fn.scale.grad, expected_loss_fn.scale.grad, rtol=0, atol=1e-9)


def test_where_gradients_were_not_kept_the_call_is_not_run_again():
    fault = Fault()
    model, _, loss_fn, _ = pair(fault)
    with roundpipe.RoundPipe(model, devices=[Device("cpu", memory_bytes=ROOM)]) as piped:
        piped.forward_backward((batch(),), loss_fn=loss_fn, run_config=config(NUM))
        fault.at = fault.visits + counted(Fault()) - 2
        with pytest.raises(DeviceMemoryError, match="its loss_fn has added gradients to tensors of the host"):
            piped.forward_backward((batch(),), loss_fn=loss_fn, run_config=config(NUM))


class Told(nn.Parameter):
    """Tells who reads its gradient."""

    reads: list[str]

    @property
    def grad(self):
        self.reads.append(threading.current_thread().name)
        return super().grad

    @grad.setter
    def grad(self, value):
        torch.Tensor.grad.__set__(self, value)


def test_gradients_that_an_update_is_about_to_drop_are_not_read():
    """A read of ``.grad`` beside a thread that sets it can end the process: a loss that trains more waits for it."""
    model, loss_fn = model_of(Fault()), Loss(nn.Linear(1, 1))
    loss_fn.scale = Told(torch.ones((), dtype=DTYPE))
    dropped, early = threading.Event(), []

    def update():
        ours.step()
        loss_fn.scale.grad = None
        dropped.set()
        time.sleep(0.2)
        early.extend(loss_fn.scale.reads)

    with roundpipe.RoundPipe(model, devices=[Device("cpu", memory_bytes=ROOM)]) as piped:
        ours = torch.optim.SGD(piped.optim_parameters(), lr=0.01)
        loss_fn.scale.reads = []
        for _ in range(2):
            piped.forward_backward((batch(),), loss_fn=loss_fn, run_config=config(NUM))
        del loss_fn.scale.reads[:]
        handle = piped.step(update)
        assert dropped.wait(30)
        piped.forward_backward((batch(),), loss_fn=loss_fn, run_config=config(NUM))
        assert handle.done() and not early
        piped.synchronize()
        assert loss_fn.scale.grad is not None and loss_fn.scale._post_accumulate_grad_hooks
    assert not loss_fn.scale._post_accumulate_grad_hooks
