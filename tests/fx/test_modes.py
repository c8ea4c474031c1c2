"""Modes are entered as they were recorded, and left as they were found."""

from __future__ import annotations

import threading
import time

import torch

from roundpipe.core.modes import Modes


def test_nothing_differs_from_itself() -> None:
    assert Modes.current().changes_from(Modes.current()) is None


def test_changes_are_entered_and_restored() -> None:
    base = Modes.current()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        inside = Modes.current()
        change = inside.changes_from(base)
    assert change is not None and change.grad is False and change.attention_kernels is None
    assert [(state.device_type, state.enabled) for state in change.autocast] == [("cpu", True)]
    with change.enter():
        assert Modes.current() == inside
    assert Modes.current() == base


def test_changes_read_well() -> None:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        inside = Modes.current()
    change = inside.changes_from(Modes.current())
    assert change is not None
    assert change.describe() == "grad mode off, autocast on cpu to torch.bfloat16"


def test_attention_kernels_are_restored_whichever_worker_ends_first() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    base = Modes.current()
    with sdpa_kernel(SDPBackend.MATH):
        change = Modes.current().changes_from(base)
    assert change is not None

    def work(pause_s: float) -> None:
        for _ in range(20):
            with change.enter():
                time.sleep(pause_s)

    threads = [threading.Thread(target=work, args=(pause_s,)) for pause_s in (0.001, 0.0013, 0.0017)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    now = Modes.current()
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert now == base


def test_attention_kernels_are_restored_after_an_error() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    base = Modes.current()
    with sdpa_kernel(SDPBackend.MATH):
        change = Modes.current().changes_from(base)
    assert change is not None
    try:
        with change.enter():
            raise ValueError
    except ValueError:
        pass
    assert Modes.current() == base
