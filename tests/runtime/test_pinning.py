"""Memory pinned where it lies, against a driver that counts pages, and what happens where pinning is refused."""

import ctypes
import gc
import logging
import mmap
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
from tests.runtime.models import batch, mlp, square_loss

PAGE = mmap.PAGESIZE
WIDTH = 160
"""A square weight of this width is above `MIN_REGISTERED_BYTES`, and no multiple of a page."""


def is_mapped(address, num_bytes):
    """Whether the process has all of these pages, asked in one call: a listing of its mappings is not read at once."""
    pages = (ctypes.c_ubyte * (num_bytes // PAGE))()
    mincore = ctypes.CDLL(None).mincore
    return mincore(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), pages) == 0


class Driver:
    """Pins whole pages, each once; ``refusal`` is what it says instead."""

    def __init__(self, refusal=None):
        self.ranges = {}
        self.refusal = refusal
        self.gone = []

    def pin(self, address, num_bytes):
        assert address % PAGE == 0 and num_bytes % PAGE == 0 and num_bytes > 0
        for other, size in self.ranges.items():
            assert address + num_bytes <= other or other + size <= address, "a page was pinned twice"
        if self.refusal is None:
            self.ranges[address] = num_bytes
        return self.refusal

    def unpin(self, address):
        self.gone.append(is_mapped(address, self.ranges.pop(address)))

    def covers(self, tensor):
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(one <= start and stop <= one + size for one, size in self.ranges.items())


@pytest.fixture
def driver():
    return Driver()


@pytest.fixture
def unwarned(monkeypatch):
    monkeypatch.setattr(host_memory, "_has_warned", type(host_memory._has_warned)())  # as in a new process


def wide_model(layers=3):
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def prepare_all(host, model):
    for index, layer in enumerate(model):
        host.prepare(str(index), layer)


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
    weight_bytes = sum(p.nbytes for p in model.parameters())
    assert sum(allocated) + sum(driver.ranges.values()) <= weight_bytes + 2 * PAGE * len(model)


def test_tensors_that_share_a_page_are_pinned_together(driver):
    """Views of one file's memory end and begin in the middle of pages."""
    flat = torch.zeros(6 * WIDTH * WIDTH + 3)
    model = wide_model(6)
    for index, layer in enumerate(model):
        layer.weight.data = flat[index * WIDTH * WIDTH + 3 :][: WIDTH * WIDTH].view(WIDTH, WIDTH)
    host, _, _ = registering(driver, model)
    prepare_all(host, model)
    assert len(driver.ranges) == 1 and all(driver.covers(layer.weight) for layer in model)


def test_a_later_tensor_on_a_pinned_page_stays_unpinned(driver):
    flat = torch.zeros(2 * WIDTH * WIDTH + 3)
    first, second = flat[: WIDTH * WIDTH + 3], flat[WIDTH * WIDTH + 3 :]
    registrar = Registrar(driver.pin, driver.unpin)
    registrar.register([first])
    registrar.register([second, first])
    assert registrar.is_registered(first) and not registrar.is_registered(second)


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
    driver = Driver("out of locked memory")
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
    for index, layer in enumerate(model):
        host.prepare(str(index), layer)
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
