"""The CPU backend: real copies, clocks that find a missing wait, links that take time, shared generators."""

import gc
import threading

import pytest
import torch
from torch import func, nn

from roundpipe.core.errors import SynchronizationError
from roundpipe.core.random_state import SeededTorch
from roundpipe.core.storages import bytes_of
from roundpipe.runtime.device.backend import Device, Lane
from roundpipe.runtime.device.cpu import CpuBackend
from tests.runtime.models import DTYPE, assert_round_is_eager, batch


def backend(name="test", **limits):
    return CpuBackend(Device("cpu", **limits), name)


def test_copies_are_copies():
    one = backend()
    source = torch.arange(4.0)
    up = one.upload(source)
    one.wait(Lane.DOWNLOAD, one.record(Lane.UPLOAD))
    down = one.download(up)
    assert len({t.data_ptr() for t in (source, up, down)}) == 3
    assert torch.equal(down, source)
    target = torch.zeros(4)
    assert one.upload(source, target) is target and torch.equal(target, source)


def test_copies_take_no_part_in_autograd():
    source = torch.ones(3, requires_grad=True) * 2
    assert not backend().upload(source).requires_grad


@pytest.mark.parametrize("lane", [Lane.UPLOAD, Lane.WEIGHTS], ids=str)
def test_compute_must_wait_for_an_upload(lane):
    one = backend("here")
    value = one.upload(torch.ones(2, 3), lane=lane)
    with pytest.raises(SynchronizationError, match=rf"shape \(2, 3\) made by {lane} work on here is used by compute"):
        one.check_ready([value])
    event = one.record(lane)
    one.wait(Lane.COMPUTE, event)
    one.check_ready([value])
    later = one.upload(torch.ones(1), lane=lane)
    with pytest.raises(SynchronizationError):
        one.check_ready([later])


def test_another_worker_must_wait_for_a_download():
    one, other = backend(), backend()
    value = one.download(torch.ones(2))
    with pytest.raises(SynchronizationError, match="download"):
        other.upload(value)
    other.wait(Lane.UPLOAD, one.record(Lane.DOWNLOAD))
    other.upload(value)


def test_waiting_is_transitive():
    """What an event's stream had waited for, the waiter has waited for."""
    one = backend()
    value = one.upload(torch.ones(2))
    one.wait(Lane.COMPUTE, one.record(Lane.UPLOAD))
    one.wait(Lane.DOWNLOAD, one.record(Lane.COMPUTE))
    one.download(value)


def test_an_event_covers_what_was_before_it_alone():
    one = backend()
    event = one.record(Lane.UPLOAD)
    value = one.upload(torch.ones(2))
    one.wait(Lane.COMPUTE, event)
    with pytest.raises(SynchronizationError):
        one.check_ready([value])


def test_a_link_takes_its_time_beside_the_thread(clock):
    one = backend(upload_bytes_per_s=400)
    start_s = clock.now_s
    one.upload(torch.ones(100))
    event = one.record(Lane.UPLOAD)
    assert clock.now_s == start_s and not event.is_done()
    one.wait(Lane.COMPUTE, event)
    assert clock.now_s == start_s + 1 and event.is_done()


def test_copies_on_a_link_queue(clock):
    one = backend(download_bytes_per_s=400)
    start_s = clock.now_s
    for _ in range(3):
        one.download(torch.ones(100))
    one.synchronize()
    assert clock.now_s == start_s + 3


def test_values_go_before_weights_and_share_their_link(clock):
    one = backend(upload_bytes_per_s=400)
    start_s = clock.now_s
    one.upload(torch.ones(300), lane=Lane.WEIGHTS)
    one.upload(torch.ones(100))
    value = one.record(Lane.UPLOAD)
    one.upload(torch.ones(100), lane=Lane.WEIGHTS)
    value.synchronize()
    assert clock.now_s == start_s + 1
    one.synchronize()
    assert clock.now_s == start_s + 5


def test_counted_memory_and_held_memory():
    one = backend(memory_bytes=1000)
    buffer = one.allocate(600, "weights")
    assert buffer.numel() == 600 and one.ledger.total_bytes == 600
    with one.hold(400, "values"):
        assert one.ledger.total_bytes == 1000
    one.free(buffer, "weights")
    assert one.ledger.total_bytes == 0 and one.peak_bytes() == 1000
    assert one.peak_bytes(reset=True) == 1000 and one.peak_bytes() == 0
    assert one.host_buffer(77).numel() == 77


def test_what_operators_allocate_is_counted_once_per_storage_until_it_is_freed():
    one = backend(memory_bytes=10**6)
    weight = torch.ones(10, 10, requires_grad=True)
    given = torch.ones(10, 10)
    memory = one.activations([weight, given])
    with memory:
        first = given @ weight
        second = first * first.t()
        loss = second.tanh().sum()
    assert one.ledger.by_purpose["activations"] == 3 * 400 + 4
    del first, second
    assert one.ledger.by_purpose["activations"] == 2 * 400 + 4  # autograd keeps one of them, and what tanh gave
    one.ledger.peak_bytes = 0
    with memory:
        loss.backward()
    assert one.ledger.peak_bytes > 4 * 400
    del loss, memory
    gc.collect()
    assert one.ledger.by_purpose["activations"] == 400  # the weight's gradient
    weight.grad = None
    assert one.ledger.total_bytes == 0


def test_what_is_made_where_an_uploaded_value_was_is_counted():
    """A layer may be the last to read what came up: its outputs may be at the same address."""
    one = backend(memory_bytes=10**6)
    uploaded = [torch.ones(10, 10) for _ in range(50)]
    with one.activations([], uploaded):
        uploaded.clear()
        made = [torch.zeros(10, 10) for _ in range(100)]
    assert one.ledger.total_bytes == sum(map(bytes_of, made))


def test_activations_of_a_graph_that_is_dropped():
    one = backend(memory_bytes=10**6)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 4))
    with one.activations(list(model.parameters())):
        output = model(torch.ones(3, 4))
    assert one.ledger.total_bytes > 0
    del output
    gc.collect()
    assert one.ledger.total_bytes == 0


def test_drawing_leaves_the_generator_as_it_was():
    before = torch.get_rng_state()
    with backend().random(5):
        first = torch.rand(3)
    with pytest.raises(KeyError), SeededTorch(5, torch.device("cpu")):
        assert torch.equal(torch.rand(3), first)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), before)


def test_drawing_can_be_nested():
    with backend().random(1):
        first = torch.rand(2)
        with backend().random(2):
            torch.rand(2)
        second = torch.rand(2)
    with backend().random(1):
        assert torch.equal(torch.rand(2), first) and torch.equal(torch.rand(2), second)


def test_threads_draw_one_after_the_other():
    found, threads = [], []

    def draw():
        with backend().random(3):
            found.append(torch.stack([torch.rand(4) for _ in range(50)]))

    for _ in range(8):
        threads.append(threading.Thread(target=draw))
        threads[-1].start()
    for thread in threads:
        thread.join(20)
    with backend().random(3):
        expected = torch.stack([torch.rand(4) for _ in range(50)])
    assert len(found) == 8 and all(torch.equal(one, expected) for one in found)


# --------------------------------------------------------------------------- torch.func inside layers

TRANSFORMS = {
    "grad": lambda f, x: func.vmap(func.grad(lambda one: f(one).tanh().sum()))(x),
    "vjp": lambda f, x: func.vjp(f, x)[1](torch.ones_like(x))[0],
    "jvp": lambda f, x: func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "jacrev": lambda f, x: func.vmap(func.jacrev(lambda one: f(one).tanh()))(x).sum(1),
    "hessian": lambda f, x: func.vmap(func.hessian(lambda one: f(one).tanh().sum()))(x).sum(1),
    "vmap": lambda f, x: func.vmap(lambda one: f(one).tanh())(x),
}


class Transformed(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.name = name

    def forward(self, value):
        return torch.sigmoid(self.linear(value)) + TRANSFORMS[self.name](self.linear, value)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_layers_with_transforms_of_torch_func_train_like_eager(name):
    model = nn.Sequential(nn.Linear(6, 6), Transformed(name), nn.Linear(6, 6), Transformed(name)).to(DTYPE)
    assert_round_is_eager(model, (batch(),), workers=2, calls=2)


def disabling():
    return torch.autograd.graph.disable_saved_tensors_hooks


def test_what_transforms_allocate_is_counted_too():
    one = backend(memory_bytes=10**6)
    given = torch.ones(10, 10)
    with one.activations([given]):
        gradient = func.grad(lambda value: (value @ value).tanh().sum())(given)
        with torch.autograd.graph.save_on_cpu(), pytest.raises(RuntimeError, match="saved tensor hooks"):
            func.grad(lambda value: value.sum())(given)
    assert one.ledger.peak_bytes >= 3 * 400
    assert one.ledger.by_purpose["activations"] == 400
    del gradient
    assert one.ledger.total_bytes == 0
