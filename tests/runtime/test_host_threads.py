"""Operators beside accelerators leave some cores to the workers, in the threads that ask for it and in no others."""

import threading

import pytest
import torch

import roundpipe
from roundpipe.runtime.device import host_threads
from roundpipe.runtime.threads import TaskThread

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("num_cores", "num_accelerators", "expected"),
    [(1, 1, 1), (2, 1, 2), (4, 1, 3), (8, 1, 6), (16, 1, 12), (32, 1, 28), (32, 8, 24), (128, 8, 110), (16, 0, 16)],
)
def test_cores_are_left_but_no_more_than_a_quarter(num_cores, num_accelerators, expected):
    assert host_threads.most_threads(num_cores, num_accelerators) == expected


@pytest.mark.parametrize(("present", "expected"), [(16, 12), (13, 12), (12, 12), (1, 1)])
def test_the_number_is_changed_in_one_thread_only(monkeypatch, present, expected):
    monkeypatch.setattr(host_threads, "_num_cores", lambda: 16)  # of another machine
    before, found = torch.get_num_threads(), []

    def leave():
        torch.set_num_threads(present)
        host_threads.leave_cores(1)
        found.append(torch.get_num_threads())
        later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        later.start()
        later.join()
        torch.set_num_threads(before)  # for threads that begin later

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert found == [expected, present]
    assert torch.get_num_threads() == before


def test_a_thread_of_tasks_begins_before_its_first_one():
    order = []
    thread = TaskThread("of a test", begin=lambda: order.append("begin"))
    assert not order
    for number in range(2):
        thread.submit(order.append, number)
    thread.close()
    assert order == ["begin", 0, 1]


def test_what_computes_on_the_host_is_told(monkeypatch):
    """Updates, and gradients on their way to them: of a model on one device of another kind than this host's."""
    asked = []
    monkeypatch.setattr("roundpipe.runtime.engine.engine.leave_cores", lambda number: asked.append(number))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).bfloat16()
    with roundpipe.RoundPipe(model, torch.float32, devices=["cpu"]) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.1)
        piped.forward_backward((torch.ones(2, 4).bfloat16(),), loss_fn=lambda output, label: output.float().sum())
        piped.step(lambda: (optimizer.step(), optimizer.zero_grad())).wait()
    assert asked == [0] * 3  # the optimizer's thread, and two for gradients


@pytest.mark.parametrize(
    ("present", "num_workers", "operator_flops", "expected"),
    [(8, 1, 1e6, 1), (8, 1, 1e8, 8), (8, 1, 0, 8), (8, 3, 1e8, 2), (8, 16, 1e8, 1), (8, 2, 0, 4), (1, 1, 1e8, 1)],
)
def test_cpu_workers_share_the_cores_and_small_operators_have_one_thread(
    present, num_workers, operator_flops, expected
):
    assert host_threads.worker_threads(present, num_workers, operator_flops) == expected


@pytest.mark.parametrize(("num_workers", "width", "number"), [(1, 4, 1), (1, 4096, 6), (2, 4096, 3)])
def test_workers_ask_for_the_threads_that_a_step_is_worth(monkeypatch, num_workers, width, number):
    asked = set()

    def set_threads(number, of_others):
        asked.add((threading.current_thread().name, number, of_others))

    monkeypatch.setattr("roundpipe.runtime.device.cpu.set_threads", set_threads)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)  # of another machine
    model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 4))
    example = torch.ones(2 * width, 4)
    with roundpipe.compile(model, example_args=(example,), devices=["cpu"] * num_workers, name="here") as piped:
        piped.forward_backward((example,), loss_fn=lambda output, label: output.sum())
    assert asked == {(f"roundpipe here worker {index}", number, 6) for index in range(num_workers)}


@pytest.mark.parametrize("present", [1, 3])
def test_a_worker_changes_the_number_of_its_own_thread_only(present):
    """Small operators have one thread each in a worker, as long as nobody asks for another number in it."""
    before = torch.get_num_threads()
    torch.set_num_threads(present)
    try:
        with roundpipe.compile(torch.nn.Linear(4, 4), example_args=(torch.ones(2, 4),), devices="cpu") as piped:
            for _ in range(2):
                piped(torch.ones(2, 4))
            later = []
            thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
            thread.start()
            thread.join()
        assert [*later, torch.get_num_threads()] == [present] * 2
    finally:
        torch.set_num_threads(before)
