"""How many threads an operator on the host has, beside the workers of accelerators and in CPU workers.

An operator's threads share its work evenly and wait for the last of them. If there is one for every core, some of them
share a core with a worker's Python, so that the worker gives its device work later and the operator takes longer, too.
Memory, which limits updates and conversions, needs no more threads than are left.

CPU workers share the cores. And in a small operator other threads take longer to wake than to do their share: libgomp
puts them to sleep at once where there are more of them than cores, and it counts those of all threads that compute.

torch's number of threads is each thread's own, but for threads that ask for theirs later: `set_threads` takes care that
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
SHARED_FLOPS = 32e6
"""Of an operator with weights, the least for which other threads are woken. On two cores, one thread was 1.6 to 2.8
times as fast as two at a quarter of it and less, as fast at it, and 0.6 times as fast at 8 times as much."""


def leave_cores(num_accelerators: int) -> None:
    """Let operators of the calling thread have some threads less than there are cores, if they have more."""
    present = torch.get_num_threads()
    set_threads(min(present, most_threads(_num_cores(), num_accelerators)), present)


def set_threads(number: int, of_others: int) -> None:
    """Let operators of the calling thread have so many threads, if that can be changed, and ``of_others`` those of
    threads that begin later.
    """
    if number == torch.get_num_threads() or "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return
    torch.set_num_threads(number)
    others = threading.Thread(target=torch.set_num_threads, args=(of_others,), name="roundpipe number of threads")
    others.start()
    others.join()


def worker_threads(present: int, num_workers: int, operator_flops: float) -> int:
    """The threads of an operator in one of so many CPU workers, of which without others each had ``present``.

    ``operator_flops`` are those of an average operator with weights; 0: not known.
    """
    return max(present // num_workers, 1) if not operator_flops or operator_flops >= SHARED_FLOPS else 1


def most_threads(num_cores: int, num_accelerators: int) -> int:
    """The most threads of an operator beside so many workers of accelerators."""
    if not num_accelerators:
        return num_cores
    return num_cores - min(CORES_BESIDE + CORES_PER_WORKER * num_accelerators, num_cores // LEAST_SHARE)


def _num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
