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
