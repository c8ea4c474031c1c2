"""Memory pinned where it lies, against a driver that checks each copy, and what happens where pinning is refused."""

import gc
import logging
import resource
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.runtime.device import accelerator, host_memory
from roundpipe.runtime.device.backend import Device
from roundpipe.runtime.device.cpu import CpuBackend
from roundpipe.runtime.device.host_memory import MIN_REGISTERED_BYTES, Registrar
from roundpipe.runtime.weights.host_weights import HostWeights
from roundpipe.wrappers import session
from tests.runtime.models import batch, mlp, square_loss
from tests.runtime.pinning import PAGE, WIDTH, Driver, Heap, wide_model


@pytest.fixture
def driver():
    return Driver()


@pytest.fixture
def unwarned(monkeypatch):
    monkeypatch.setattr(host_memory, "_has_warned", type(host_memory._has_warned)())  # as in a new process


def prepare_all(host, model):
    host.prepare([str(index) for index, _ in enumerate(model)], list(model))


def registering(driver, model):
    registrar = Registrar(driver.pin, driver.unpin)
    allocated = []

    def allocate(num_bytes):
        allocated.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    return HostWeights("register", allocate, registrar, model), registrar, allocated


# ------------------------------------------------------------------------------- where memory lies


def test_large_tensors_are_pinned_where_they_are_and_small_ones_packed(driver):
    model = wide_model()
    before = [layer.weight.data_ptr() for layer in model]
    values = [p.detach().clone() for p in model.parameters()]
    host, registrar, allocated = registering(driver, model)
    prepare_all(host, model)
    assert [layer.weight.data_ptr() for layer in model] == before
    assert all(driver.covers(layer.weight) and registrar.is_registered(layer.weight) for layer in model)
    assert sum(allocated) == sum(layer.bias.nbytes for layer in model)
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), values, strict=True))
    assert sum(allocated) + sum(driver.ranges.values()) == sum(p.nbytes for p in model.parameters())


def test_views_of_one_memory_are_pinned_together(driver):
    flat = torch.zeros(6 * WIDTH * WIDTH + 3)
    model = wide_model(6)
    for index, layer in enumerate(model):
        layer.weight.data = flat[index * WIDTH * WIDTH + 3 :][: WIDTH * WIDTH].view(WIDTH, WIDTH)
    host, _, _ = registering(driver, model)
    prepare_all(host, model)
    assert len(driver.ranges) == 1 and all(driver.covers(layer.weight) for layer in model)


def test_memory_is_pinned_with_all_that_is_a_view_of_it(driver):
    flat = torch.zeros(2 * WIDTH * WIDTH + 3)
    first, second = flat[: WIDTH * WIDTH + 3], flat[WIDTH * WIDTH + 3 :]
    registrar = Registrar(driver.pin, driver.unpin)
    registrar.register([first])
    assert registrar.is_registered(second) and driver.covers(flat)
    registrar.register([second, first])
    assert driver.num_calls == 1


def test_storages_of_the_same_memory_are_pinned_together(driver):
    array = torch.zeros(2 * WIDTH * WIDTH).numpy()
    halves = [torch.from_numpy(array[:-WIDTH]), torch.from_numpy(array[WIDTH:])]
    registrar = Registrar(driver.pin, driver.unpin)
    registrar.register(halves)
    assert driver.num_calls == 1 and all(map(driver.covers, halves))


@pytest.mark.parametrize("refused", [(), (0,), (1, 2), (0, 1, 2, 3, 6), range(1000)])
def test_nothing_is_pinned_in_part_whatever_lies_on_its_pages(unwarned, refused):
    """What others have pinned there, such as torch's allocator, and what nobody pins, such as inputs."""
    driver, heap = Driver(refused), Heap()
    heap.empty(WIDTH)
    model = heap.model()
    others = heap.given[0], heap.given[-1]
    for other in others:
        driver.ranges[other.data_ptr()] = other.nbytes
    host, registrar, _ = registering(driver, model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepare_all(host, model)
        prepare_all(host, model)
    assert len(caught) == bool(refused)
    assert all(driver.covers(layer.weight) == registrar.is_registered(layer.weight) for layer in model)
    assert all(driver.covers(layer.weight) for layer in model) or refused
    for tensor in (*heap.given, *model.parameters()):
        driver.check_copy(tensor)
    registrar.close()
    assert len(driver.ranges) == len(others)


@pytest.mark.parametrize("refused", [(), (0, 2)])
def test_no_copy_of_a_training_is_pinned_in_part(monkeypatch, unwarned, refused):
    driver, heap, num_pinned = Driver(refused), Heap(), 0
    upload = CpuBackend.upload

    def checked(backend, source, *args, **options):
        nonlocal num_pinned
        driver.check_copy(source)
        num_pinned += driver.covers(source)
        return upload(backend, source, *args, **options)

    monkeypatch.setattr(CpuBackend, "upload", checked)
    monkeypatch.setattr(session, "open_registrar", lambda backends: Registrar(driver.pin, driver.unpin))
    inputs = heap.empty(8, WIDTH).normal_()
    model = heap.model()
    inputs_behind = heap.empty(8, WIDTH).copy_(inputs)
    with warnings.catch_warnings(), roundpipe.RoundPipe(model, devices=["cpu"], pin_model="register") as piped:
        warnings.simplefilter("ignore")
        for given in (inputs, inputs_behind):
            piped.forward_backward((given,), loss_fn=square_loss)
        piped.synchronize()
    assert num_pinned and not driver.ranges


@pytest.mark.parametrize(
    ("make", "suits"),
    [
        (lambda: torch.zeros(MIN_REGISTERED_BYTES, dtype=torch.uint8), True),
        (lambda: torch.zeros(MIN_REGISTERED_BYTES - 1, dtype=torch.uint8), False),
        (lambda: torch.zeros(WIDTH, WIDTH).t(), True),
        (lambda: torch.zeros(WIDTH, 2 * WIDTH)[:, :WIDTH], False),
        (lambda: torch.zeros(1).expand(WIDTH, WIDTH), False),
        (lambda: torch.zeros(WIDTH, WIDTH, device="meta"), False),
        (lambda: torch.zeros(WIDTH, WIDTH).to_sparse(), False),
    ],
)
def test_what_suits_is_large_and_without_holes(make, suits):
    assert Registrar.suits(make()) is suits


# -------------------------------------------------------------------------------- and until when


def test_pages_are_given_back_before_the_memory_is(driver):
    model = nn.Sequential(*(nn.Linear(3000, 3000, bias=False) for _ in range(2)))  # each a mapping of its own
    host, registrar, _ = registering(driver, model)
    prepare_all(host, model)
    pinned = len(driver.ranges)
    model[0].weight.data = torch.zeros(3000, 3000)
    assert len(driver.ranges) == pinned - 1 and driver.gone == [True]
    assert not registrar.is_registered(model[0].weight)
    del host
    while len(model):
        del model[0]
    gc.collect()
    assert not driver.ranges and driver.gone == [True] * pinned


def test_closing_and_collecting_give_pages_back(driver):
    model = wide_model()
    host, registrar, _ = registering(driver, model)
    prepare_all(host, model)
    assert driver.ranges
    registrar.close()
    registrar.close()
    assert not driver.ranges
    registrar.register([model[0].weight])
    assert not driver.ranges
    host, registrar, _ = registering(driver, model)
    prepare_all(host, model)
    assert driver.ranges
    del host, registrar
    gc.collect()
    assert not driver.ranges and all(driver.gone)


def test_replaced_memory_is_pinned_at_the_next_call(driver):
    model = wide_model()
    host, _, _ = registering(driver, model)
    prepare_all(host, model)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    gc.collect()
    assert not host.is_prepared(model[1])
    prepare_all(host, model)
    assert all(driver.covers(layer.weight) and host.is_prepared(layer) for layer in model)
    model.double()
    prepare_all(host, model)
    assert all(driver.covers(layer.weight) for layer in model)


# -------------------------------------------------------------------------------- where it is refused


def test_a_refusal_warns_once_with_the_limit(unwarned):
    driver = Driver(refused=range(1000))
    model = wide_model()
    host, registrar, _ = registering(driver, model)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,} bytes"
    with pytest.warns(RuntimeWarning) as caught:
        prepare_all(host, model)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "out of locked memory" in text and f"limit of locked memory is {limit}" in text and "ulimit -l" in text
    assert not any(registrar.is_registered(layer.weight) for layer in model)


class Cudart:
    """A CUDA runtime that refuses."""

    def __init__(self, result):
        self.result = result
        self.calls = []

    def cudaHostRegister(self, address, num_bytes, flags):
        self.calls.append(("register", address, num_bytes))
        return self.result

    def cudaGetErrorString(self, result):
        return {2: "out of memory"}[result]

    def cudaHostUnregister(self, address):
        self.calls.append(("unregister", address))
        return 0


@pytest.mark.parametrize("result", [0, 2])
def test_buffers_are_registered_on_pages_of_their_own_or_left_unpinned(monkeypatch, unwarned, result):
    runtime = Cudart(result)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # needs no device, unlike the backend around it
        buffer = accelerator._registered(5 * PAGE - 7)
    address = buffer.data_ptr()
    assert buffer.numel() == 5 * PAGE - 7 and address % PAGE == 0
    assert buffer.untyped_storage().data_ptr() == address, "what torch asks about, to tell whether memory is pinned"
    assert runtime.calls == [("register", address, 5 * PAGE)]
    assert [one.category for one in caught] == ([RuntimeWarning] if result else [])
    assert not caught or "cudaHostRegister: error 2, out of memory" in str(caught[0].message)
    del buffer
    gc.collect()
    assert runtime.calls[1:] == ([] if result else [("unregister", address)])


@pytest.mark.skipif(torch.accelerator.is_available(), reason="here pinning works")
def test_pinned_allocations_degrade(unwarned):
    with pytest.warns(RuntimeWarning, match="stays unpinned") as caught:
        # needs no device, unlike the backend around it
        made = [accelerator._pinned(torch.empty, (3, 4), dtype=torch.float32) for _ in range(2)]
    assert len(caught) == 1 and all(one.shape == (3, 4) and one.dtype is torch.float32 for one in made)
    source = torch.zeros(4, 3, dtype=torch.bfloat16).t()
    # as above
    like = accelerator._pinned(torch.empty_like, source)
    assert (like.shape, like.dtype, like.stride()) == (source.shape, source.dtype, source.stride())


def test_alloc_without_an_accelerator_says_so_in_the_log(caplog):
    with (
        caplog.at_level(logging.INFO, "roundpipe"),
        roundpipe.RoundPipe(mlp(3), devices=["cpu"], pin_model="alloc") as piped,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        piped.forward_backward((batch(),), loss_fn=square_loss)
    assert [text for text in caplog.messages if "pin_model='alloc'" in text] == [
        "pin_model='alloc': weights are packed into unpinned host memory"
    ]


def test_register_without_cuda_says_what_is_possible():
    with pytest.raises(roundpipe.RoundPipeError, match="devices are cpu; use 'alloc' or 'off'"):
        roundpipe.RoundPipe(mlp(3), devices=["cpu"], pin_model="register")


# ---------------------------------------------------------------------------------- the bound

MEASURE = """
import os, resource
import torch
from torch import nn
from roundpipe.runtime.device.backend import Device
from roundpipe.runtime.device.cpu import CpuBackend
from roundpipe.runtime.device.host_memory import Registrar
from roundpipe.runtime.weights.host_weights import HostWeights

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()

def pin(address, num_bytes):
    return None

def measure(pin_model):
    empty = resident()
    model = nn.Sequential(*(nn.utils.skip_init(nn.Linear, 1024, 1024, bias=False) for _ in range(48)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    registrar = Registrar(pin, lambda address: None) if pin_model == "register" else None
    host = HostWeights(pin_model, CpuBackend(Device("cpu"), "test").host_buffer, registrar, model)
    host.prepare([str(index) for index, _ in enumerate(model)], list(model))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(pin_model, whole, resident() - empty, peak - empty, flush=True)

resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
for pin_model in ("alloc", "register", "off"):
    child = os.fork()
    if not child:
        measure(pin_model)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_host_memory_of_a_model_is_bounded():
    """Resident memory of a model of 192 MiB, at the end and at its peak, with a small limit of locked memory."""
    done = subprocess.run([sys.executable, "-c", MEASURE], check=True, timeout=120, capture_output=True, text=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == ["alloc", "register", "off"]
    for _, *figures in lines:
        whole, resident, peak = map(int, figures)
        assert whole == 192 * 1024**2
        assert whole <= resident <= 1.1 * whole and peak <= 1.1 * whole


def test_counted_buffers_are_bounded():
    model = wide_model(5)
    backend = CpuBackend(Device("cpu"), "test")
    host = HostWeights("alloc", backend.host_buffer)
    prepare_all(host, model)
    # all that it holds, by address, so that nothing is counted twice
    held = {weights.packed.data_ptr(): weights.packed.numel() for weights in host._layers.values()}
    assert sum(held.values()) <= 1.1 * sum(p.nbytes for p in model.parameters())
