"""Device memory that no plan counts with: the context, and what fragmentation takes."""

from types import SimpleNamespace

import pytest
import torch

import roundpipe
from roundpipe.runtime.device import accelerator, device_memory
from roundpipe.runtime.device.accelerator import AcceleratorBackend
from roundpipe.runtime.device.backend import Device, UnplannedMemory
from roundpipe.runtime.device.cpu import CpuBackend
from roundpipe.runtime.engine.allocator_room import RetryCounter
from tests.runtime.models import batch, config, mlp, square_loss


@pytest.fixture
def figures(monkeypatch):
    """What torch says of a device of 10,000 bytes."""
    figures = {"memory_reserved": 600, "memory_allocated": 0, "max_memory_allocated": 0}
    for name in figures:
        monkeypatch.setattr(torch.accelerator, name, lambda device, name=name: figures[name])
    figures["num_ooms"] = 0
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda device: figures)
    monkeypatch.setattr(
        torch.accelerator,
        "reset_peak_memory_stats",
        lambda device: figures.update(max_memory_allocated=figures["memory_allocated"]),
    )
    module = SimpleNamespace(mem_get_info=lambda index: (9_600 - figures["memory_reserved"], 10_000))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch, "Stream", lambda device: None)
    monkeypatch.setattr(accelerator, "expand_segments", lambda device: True)
    # a backend leaves its streams to the next one, which may be a real one
    monkeypatch.setattr(accelerator, "_idle_streams", {})
    return figures


def test_plans_leave_what_the_allocator_could_not_give_when_it_failed(figures):
    backend = AcceleratorBackend(Device("cuda:0"), "fake")
    assert backend.unplanned() == UnplannedMemory(context=400, fragmentation=0)
    assert backend.take_budget() == 8_640
    for reserved, most_allocated, fragmentation, budget in (
        (1_600, 1_400, 200, 8_640),  # less than plans leave
        (4_600, 3_000, 1_600, 8_000),
        (4_600, 4_000, 1_600, 8_000),
        (4_600, 4_700, 1_600, 8_000),  # of a phase before
    ):
        backend.begin_visit()
        figures.update(memory_reserved=reserved, max_memory_allocated=most_allocated)
        figures["num_ooms"] += 1
        backend.note_failure()
        assert backend.unplanned() == UnplannedMemory(400, fragmentation)
        assert backend.take_budget() == budget


@pytest.mark.parametrize("change", [-500, 500])
def test_memory_that_the_allocator_takes_or_gives_back_meanwhile_is_counted_once(figures, monkeypatch, change):
    """A worker allocates while the caller looks."""
    backend = AcceleratorBackend(Device("cuda:0"), "fake")
    before = backend.take_budget()
    free = torch.get_device_module(None).mem_get_info

    def look(index):
        found = free(index)
        if changes:
            figures["memory_reserved"] += changes.pop()
        return found

    changes = [change]
    monkeypatch.setattr(torch.get_device_module(None), "mem_get_info", look)
    assert backend.take_budget() == before and not changes
    changes = [change, -change] * 10  # without an end
    assert backend.take_budget() > 0 and len(changes) == 16


def test_what_the_allocator_keeps_for_later_is_no_fragmentation(figures):
    """A visit that needs much, the peak set back, and one that needs little: the plans have all that is free."""
    backend = AcceleratorBackend(Device("cuda:0"), "fake")
    for allocated in (6_000, 1_000):
        backend.begin_visit()
        figures.update(memory_reserved=figures["memory_reserved"] + 3_000, max_memory_allocated=allocated)
        assert backend.visit_peak_bytes() == allocated
        backend.peak_bytes(reset=True)
        backend.note_failure()  # of another kind: nothing has failed here
        assert backend.unplanned().fragmentation == 0
        assert backend.take_budget() == 8_640


def test_the_peak_is_that_of_the_form_in_which_a_device_keeps_it(figures):
    """CUDA's figures unsorted and not made flat, if they are there; the generic ones elsewhere."""
    device, module = torch.device("cuda:0"), torch.get_device_module("cuda")
    figures["max_memory_allocated"] = 5
    assert device_memory.peak_allocated_bytes(device) == 5
    module.memory_stats_as_nested_dict = lambda device: {"allocated_bytes": {"all": {"peak": 7, "current": 3}}}
    assert device_memory.peak_allocated_bytes(device) == 7
    module.memory_stats_as_nested_dict = lambda device: {}  # the device is not in use yet
    assert device_memory.peak_allocated_bytes(device) == 0


def test_without_a_limit_what_lives_on_the_device_leaves_the_budget_as_it_was(figures):
    """Weights and the optimizer's side are the worker's own, also where less of it is there than was counted."""
    backend = AcceleratorBackend(Device("cuda:0"), "fake")
    before = backend.take_budget()
    for allocated, own in ((3_000, 3_000), (2_500, 3_000), (3_000, 3_000)):
        figures.update(memory_reserved=allocated + 600, memory_allocated=allocated, max_memory_allocated=allocated)
        backend.note_others(own)
        assert backend.take_budget() == before


def test_retries_are_those_since_a_counter_was_made(figures):
    figures["num_alloc_retries"] = 3
    backends = [AcceleratorBackend(Device("cuda:0"), name, num_sharing=2) for name in ("one", "other")]
    counter = RetryCounter(backends)
    assert counter.read() == 0
    figures["num_alloc_retries"] += 4
    assert [backend.num_retries() for backend in backends] == [7, 7]
    assert counter.read() == 4, "of a device that two workers share"


def test_a_report_shows_it(monkeypatch):
    with roundpipe.RoundPipe(mlp(2), devices=["cpu"]) as piped:
        piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(1))
        assert "context" not in str(piped.report())
        monkeypatch.setattr(CpuBackend, "unplanned", lambda backend: UnplannedMemory(512 << 20, 3 << 20))
        report = piped.report()
    assert (report.workers[0].context_bytes, report.workers[0].fragmentation_bytes) == (512 << 20, 3 << 20)
    header, _, row = str(report).splitlines()[-3:]
    assert header.split()[-2:] == ["context", "fragmentation"] and row.endswith("512 MiB         3.00 MiB")
