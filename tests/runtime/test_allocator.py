"""The choice of how CUDA's caching allocator grows: torch's private functions are there, and users' choices stay."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from roundpipe.runtime.device import allocator
from roundpipe.runtime.device.allocator import SETTING, VARIABLES, expand_segments, pinning

CUDA = torch.device("cuda", 0)


@pytest.fixture
def as_if_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A machine on which torch has CUDA and nobody has chosen anything; gives what is set."""
    chosen: list[str] = []
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(allocator, "change", chosen.append)  # the setting is the process's
    monkeypatch.setattr(allocator, "code_settings", lambda: "")
    expand_segments.cache_clear()
    yield chosen
    expand_segments.cache_clear()


def test_torch_has_the_functions() -> None:
    """What broke, should torch rename them: `change` and `code_settings`."""
    setting = f"expandable_segments:True,{pinning()}"
    context = multiprocessing.get_context("fork")  # the setting is the process's
    found = context.SimpleQueue()

    def choose() -> None:
        allocator.change(setting)
        found.put(allocator.code_settings())

    process = context.Process(target=choose)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert found.get() in (setting, "")  # torch 2.9 can't tell


@pytest.mark.parametrize(("num_cores", "num_threads"), [(None, 1), (1, 1), (2, 2), (12, 8), (16, 16), (192, 16)])
def test_pages_are_pinned_by_a_power_of_two_of_threads(
    monkeypatch: pytest.MonkeyPatch, num_cores: int | None, num_threads: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: num_cores)
    assert pinning().endswith(f"pinned_num_register_threads:{num_threads}")


def test_other_devices_are_left_alone(as_if_cuda: list[str]) -> None:
    assert not expand_segments(torch.device("cpu"))
    assert not expand_segments(torch.device("xpu", 0))
    assert as_if_cuda == []


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize(
    ("choice", "expected"),
    [("max_split_size_mb:64", False), ("expandable_segments:False", False), ("expandable_segments: True", True)],
)
def test_a_choice_of_the_environment_stays(
    as_if_cuda: list[str], monkeypatch: pytest.MonkeyPatch, variable: str, choice: str, expected: bool
) -> None:
    monkeypatch.setenv(variable, choice)
    assert expand_segments(CUDA) is expected
    assert as_if_cuda == []


def test_a_choice_of_code_stays(as_if_cuda: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "code_settings", lambda: "garbage_collection_threshold:0.8")
    assert not expand_segments(CUDA)
    assert as_if_cuda == []


def test_another_allocator_stays(as_if_cuda: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert not expand_segments(CUDA)
    assert as_if_cuda == []


def test_a_driver_that_refuses_leaves_things_as_they_were(
    as_if_cuda: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(device: torch.device) -> None:
        raise RuntimeError("CUDA driver error: operation not supported")

    monkeypatch.setattr(torch.cuda, "Stream", refuse)
    assert not expand_segments(CUDA)
    assert as_if_cuda == [f"{SETTING}:True,{pinning()}", f"{SETTING}:False,{pinning()}"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none")
def test_free_pieces_are_put_together() -> None:
    """Four of 60 MiB, every other one freed: 120 MiB are there at once, with hardly more reserved."""
    code = """
import torch
from roundpipe.runtime.device.allocator import PAGE_BYTES, expand_segments
device = torch.device("cuda", 0)
print(expand_segments(device))
piece = 3 * PAGE_BYTES
total = torch.cuda.mem_get_info()[1]
before = torch.cuda.memory_reserved()
torch.cuda.set_per_process_memory_fraction((before + 4.9 * piece) / total)
pieces = [torch.empty(piece, dtype=torch.uint8, device=device) for _ in range(4)]
del pieces[0], pieces[1]
whole = torch.empty(2 * piece, dtype=torch.uint8, device=device)
print(torch.cuda.memory_reserved() - before <= 4 * piece + PAGE_BYTES)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert result.stdout.split() == ["True", "True"], result.stderr
