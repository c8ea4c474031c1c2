"""A notebook's life: cells that run again, Ctrl-C in the middle of a call, models that are deleted."""

from __future__ import annotations

import copy
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe

CELL = """
model = roundpipe.compile(net, devices=["cpu", "cpu"], name="cell")
optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)

def update():
    optimizer.step()
    optimizer.zero_grad()

losses = []
for x in data:
    losses.append(model.forward_backward((x,), loss_fn=lambda outputs, _: outputs.square().mean()))
    model.step(update, is_async=False)
"""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def network() -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(4))).double()


def batches(number: int = 3) -> list[torch.Tensor]:
    return [torch.randn(9, 64, dtype=torch.float64) for _ in range(number)]


def eager(net: nn.Module, data: list[torch.Tensor], num: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for x in data:
        parts = [net(piece).square().mean() for piece in torch.tensor_split(x, num)]
        for part in parts:
            part.backward()
        losses.append(torch.stack(parts).sum().detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


THREADS = 1 + 2 * 3
"""Of one model: the optimizer's, and of each of two workers its own, that of gradients and that of conversions."""


def names_of_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if "roundpipe" in thread.name}


def reached(state: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not state() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return state()


@pytest.fixture(autouse=True)
def no_threads_of_other_tests() -> Iterator[None]:
    assert reached(lambda: not names_of_threads())
    yield
    assert reached(lambda: not names_of_threads())


def test_a_cell_can_run_again() -> None:
    """Each run compiles the same module again, and goes on from the weights that the one before left."""
    net = network()
    reference = copy.deepcopy(net)
    namespace: dict[str, Any] = {"roundpipe": roundpipe, "torch": torch, "net": net}
    counts = []
    for _ in range(4):
        namespace["data"] = batches()
        exec(CELL, namespace)
        torch.testing.assert_close(namespace["losses"], eager(reference, namespace["data"]), rtol=1e-9, atol=1e-9)
        assert reached(lambda: len(names_of_threads()) <= THREADS), "the model before has ended"
        counts.append(len(names_of_threads()))
    assert len(set(counts)) == 1
    namespace["model"].synchronize()
    for name, tensor in reference.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], tensor, rtol=1e-9, atol=1e-9)
    namespace.clear()


def test_two_wrappers_of_one_module_take_turns() -> None:
    """The one before was not deleted: it still runs, on the weights that are there now."""
    net = network()
    reference, data = copy.deepcopy(net), batches(4)
    expected = eager(reference, data)
    found = []
    with (
        roundpipe.compile(net, devices=["cpu"] * 2) as first,
        roundpipe.compile(net, devices=["cpu"]) as second,
    ):
        for model, x in zip((first, second, first, second), data, strict=True):
            config = roundpipe.RoundPipeRunConfig(num_microbatch=3)
            found.append(
                model.forward_backward((x,), loss_fn=lambda outputs, _: outputs.square().mean(), run_config=config)
            )
            model.synchronize()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_a_cell_can_run_again_after_an_exception_that_is_kept() -> None:
    """A notebook keeps the last traceback, with all frames of the failed call and what they hold."""
    net, data = network(), batches(1)
    model = roundpipe.compile(net, devices=["cpu"] * 2)

    def failing(outputs: Any, label: Any) -> torch.Tensor:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as kept:
        model.forward_backward((data[0],), loss_fn=failing)
    model = roundpipe.compile(net, devices=["cpu"] * 2)
    reference = copy.deepcopy(net)
    config = roundpipe.RoundPipeRunConfig(num_microbatch=3)
    loss = model.forward_backward((data[0],), loss_fn=lambda outputs, _: outputs.square().mean(), run_config=config)
    torch.testing.assert_close(loss, eager(reference, data)[0], rtol=1e-9, atol=1e-9)
    model.close()
    assert kept.value.args == ("mine",)
    del kept


def tensor_bytes() -> int:
    """Bytes of memory that live tensors hold; storages that lie in one another count once."""
    total = end = 0
    tensors = (one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter))
    storages = (one.untyped_storage() for one in tensors if one.layout is torch.strided)
    for start, num_bytes in sorted((storage.data_ptr(), storage.nbytes()) for storage in storages):
        total += max(start + num_bytes - max(start, end), 0)
        end = max(end, start + num_bytes)
    return total


def updater(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return update


def test_a_deleted_model_frees_threads_and_memory() -> None:
    net, data = network(), batches(2)
    gc.collect()
    before = tensor_bytes()
    model = roundpipe.compile(net, devices=["cpu"] * 2)
    update = updater(torch.optim.AdamW(model.optim_parameters(), lr=1e-3))
    for x in data:
        model.forward_backward((x,), loss_fn=lambda outputs, _: outputs.square().mean())
        model.step(update)
    model(data[0]).square().mean().backward()
    model.zero_grad()
    copies = [weakref.ref(parameter) for parameter in model.optim_parameters()]
    wrapper = weakref.ref(model)
    copy_and_moments = 3 * sum(parameter.nbytes for parameter in net.parameters())
    assert len(names_of_threads()) >= 3 and tensor_bytes() >= before + copy_and_moments
    del model, update
    assert reached(lambda: wrapper() is None and not names_of_threads())
    assert reached(lambda: all(copy_() is None for copy_ in copies))
    gc.collect()
    assert tensor_bytes() <= before + copy_and_moments / 10
    assert torch.isfinite(net(data[0])).all(), "the user's model lives on"


INTERRUPTED = """
import copy, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it runs in the background
import torch
from torch import nn
import roundpipe

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        time.sleep(Slow.seconds)
        return torch.tanh(self.linear(x))

Slow.seconds = 0.0
torch.manual_seed(0)
net = nn.Sequential(*(Slow() for _ in range(4))).double()
x = torch.randn(6, 8, dtype=torch.float64)
config = roundpipe.RoundPipeRunConfig(num_microbatch=3)
loss_of = lambda outputs, _: outputs.square().sum()
model = roundpipe.RoundPipe(net, devices=["cpu"] * 2, model_run_config=config)
optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
calls = {
    "train": lambda: model.forward_backward((x,), loss_fn=loss_of),
    "forward": lambda: model(x),
    "backward": lambda: model(x).square().sum().backward(),
    "step": lambda: model.step(lambda: time.sleep(30), is_async=False),
    "synchronize": lambda: (model.step(lambda: time.sleep(Slow.seconds * 10)), model.synchronize()),
}
for kind in sys.argv[1:]:
    Slow.seconds = 0.2
    print("in", kind, flush=True)
    try:
        calls[kind]()
        print("not interrupted", flush=True)
    except KeyboardInterrupt:
        pass
    Slow.seconds = 0.0
    model.zero_grad()
    reference = copy.deepcopy(net)
    expected = sum(loss_of(reference(piece), None) for piece in x.chunk(3))
    expected.backward()
    found = model.forward_backward((x,), loss_fn=loss_of)
    model.synchronize()
    assert torch.allclose(found, expected.detach(), rtol=0, atol=1e-10)
    for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=0, atol=1e-10)
    before = net[0].linear.weight.detach().clone()
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    model.synchronize()
    assert not torch.equal(net[0].linear.weight, before)
    print("usable after", kind, flush=True)
model.close()
print("closed", flush=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
def test_an_interrupt_leaves_a_usable_model() -> None:
    """A real signal, while the caller waits for workers, for a backward, for a step and for an update."""
    kinds = ["train", "forward", "backward", "step", "synchronize"]
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(INTERRUPTED), *kinds],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    seen = []
    try:
        for line in process.stdout:
            seen.append(line.strip())
            if line.startswith("in "):
                time.sleep(0.25 if "backward" not in line else 1.4)
                process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    expected = [text for kind in kinds for text in (f"in {kind}", f"usable after {kind}")] + ["closed"]
    assert seen == expected, errors
    assert process.returncode == 0, errors
