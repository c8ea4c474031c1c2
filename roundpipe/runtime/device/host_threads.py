"""How many threads an operator on the host has, where it runs beside the workers of accelerators.

An operator's threads share its work evenly and wait for the last of them. If there is one for every core, some of them
share a core with a worker's Python, so that the worker gives its device work later and the operator takes longer, too.
Memory, which limits updates and conversions, needs no more threads than are left.

torch's number of threads is each thread's own, but for threads that ask for theirs later: `leave_cores` takes care that
these get what they would have got.
"""

from __future__ import annotations

import os
import threading

import torch

LEAST_SHARE = 4
"""Cores are left only up to one in so many."""
CORES_BESIDE, CORES_PER_WORKER = 2, 2
"""Left for callers and for gradients that come home; and for a worker and its backwards."""


def leave_cores(num_accelerators: int) -> None:
    """Let operators of the calling thread have some threads less than there are cores, if they have more."""
    present = torch.get_num_threads()
    most = most_threads(_num_cores(), num_accelerators)
    if present <= most or "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return
    torch.set_num_threads(most)
    others = threading.Thread(target=torch.set_num_threads, args=(present,), name="roundpipe number of threads")
    others.start()
    others.join()


def most_threads(num_cores: int, num_accelerators: int) -> int:
    """The most threads of an operator beside so many workers of accelerators."""
    if not num_accelerators:
        return num_cores
    return num_cores - min(CORES_BESIDE + CORES_PER_WORKER * num_accelerators, num_cores // LEAST_SHARE)


def _num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
