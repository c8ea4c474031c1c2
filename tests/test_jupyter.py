"""A real Jupyter kernel: cells that run again, an interrupt in the middle of a call, a model that is deleted."""

from __future__ import annotations

import json
import os
import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

jupyter_client = pytest.importorskip("jupyter_client", reason="runs a Jupyter kernel")
pytest.importorskip("ipykernel", reason="runs a Jupyter kernel")

TIMEOUT_S = 120.0

SETUP = """
import copy, gc, threading, time
import torch
from torch import nn
import roundpipe

class Block(nn.Module):
    seconds = 0.0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        time.sleep(Block.seconds)
        return x + torch.tanh(self.linear(x))

torch.manual_seed(0)
net = nn.Sequential(*(Block() for _ in range(4))).double()
reference = copy.deepcopy(net)
x = torch.randn(6, 8, dtype=torch.float64)

def loss_fn(outputs, label):
    return outputs.square().sum()

wanted = None  # how many threads are waited for

def threads():
    deadline = time.monotonic() + 20
    while True:
        gc.collect()
        found = sum("roundpipe" in thread.name for thread in threading.enumerate())
        if found == wanted or wanted is None or time.monotonic() > deadline:
            return found
        time.sleep(0.05)
"""

TRAIN = """
model = roundpipe.RoundPipe(net, devices=["cpu"] * 2, name="cell")
optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.05)

def update():
    optimizer.step()
    optimizer.zero_grad()

for _ in range(2):
    loss = model.forward_backward((x,), loss_fn=loss_fn)
    model.step(update, is_async=False)
    loss_fn(reference(x), None).backward()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter -= 0.05 * parameter.grad
            parameter.grad = None
model.step(lambda: None)  # the optimizer's thread
model.synchronize()
print(threads(), all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(net.parameters(), reference.parameters())))
"""


class Kernel:
    """One kernel and a client of it."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._manager, self._client = jupyter_client.manager.start_new_kernel(
            startup_timeout=TIMEOUT_S, kernel_name="python3", env=environment, cwd=os.getcwd()
        )

    def run(self, cell: str, when_it_prints: Callable[[], None] | None = None) -> tuple[str, str | None]:
        """What a cell printed, and the name of the exception that it ended with."""
        request = self._client.execute(cell)
        text, error = "", None
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                message: dict[str, Any] = self._client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream" and content["name"] == "stdout":
                text += content["text"]
                if when_it_prints is not None:
                    when_it_prints()
                    when_it_prints = None
            elif kind == "error":
                error = content["ename"]
            elif kind == "status" and content["execution_state"] == "idle":
                return text.strip(), error
        raise TimeoutError(f"the kernel did not finish: {cell}")

    def interrupt(self) -> None:
        """What the notebook's stop button does, a moment into the call that the cell announced."""
        time.sleep(0.3)
        self._manager.interrupt_kernel()

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    assert kernel.run(SETUP) == ("", None)
    yield kernel
    kernel.close()


def test_a_cell_runs_again_and_its_model_is_deleted(kernel: Kernel) -> None:
    count, is_eager = kernel.run("wanted = None\n" + TRAIN)[0].split()
    assert int(count) >= 3 and is_eager == "True"
    for _ in range(2):
        assert kernel.run(f"wanted = {count}\n" + TRAIN) == (f"{count} True", None)
    assert "cell: 4 layers" in kernel.run("print(model)")[0]
    assert kernel.run("del model, optimizer, update; wanted = 0") == ("", None)
    assert kernel.run("print(threads())") == ("0", None)


def test_an_interrupted_call_leaves_a_usable_model(kernel: Kernel) -> None:
    assert kernel.run("wanted = None\n" + TRAIN)[0].endswith("True")
    slow = "Block.seconds = 0.3\nprint('in call', flush=True)\n{}"
    for call in (
        "model.forward_backward((x,), loss_fn=loss_fn)",
        "model(x)",
        "model.step(lambda: time.sleep(20), is_async=False)",
    ):
        assert kernel.run(slow.format(call), when_it_prints=kernel.interrupt) == ("in call", "KeyboardInterrupt")
        assert kernel.run("Block.seconds = 0.0; model.zero_grad(); reference.zero_grad()") == ("", None)
        check = """
loss = model.forward_backward((x,), loss_fn=loss_fn)
model.synchronize()
expected = loss_fn(reference(x), None)
expected.backward()
pairs = [(loss, expected), *((a.grad, b.grad) for a, b in zip(net.parameters(), reference.parameters()))]
model.zero_grad(), reference.zero_grad()
print(all(torch.allclose(a, b, rtol=1e-9) for a, b in pairs))
"""
        assert kernel.run(check) == ("True", None)
    assert kernel.run("model.close(); wanted = 0; print(threads())") == ("0", None)


def test_the_notebook_of_the_examples_runs(kernel: Kernel) -> None:
    notebook = json.loads((Path(__file__).parent.parent / "examples" / "tour.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    printed = []
    for cell in (each for each in cells for _ in range(2)):  # people run cells again
        text, error = kernel.run(cell)
        assert error is None, cell
        printed.append(text)
    assert any(text.startswith("loss ") for text in printed) and "tour: " in "".join(printed)
    assert all(not cell.get("outputs") for cell in notebook["cells"]), "outputs don't belong into the repository"
