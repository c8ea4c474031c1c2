"""Processes that are the ranks of a process group, kept for several tests.

They are forks of one process that has imported what all need, which takes seconds, and has run nothing.
"""

from __future__ import annotations

import datetime
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

DEADLINE_S = 300


def _serve(rank: int, size: int, store: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=DEADLINE_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    while True:
        function, args = connection.recv()
        try:
            connection.send((function(*args), None))
        except BaseException:
            connection.send((None, traceback.format_exc()))


class Ranks:
    """A process group of gloo on this machine; after a failure its processes are new ones."""

    def __init__(self, size: int, folder: Path) -> None:
        self.size = size
        self.folder = folder
        self.processes: list[Any] = []
        self.connections: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What a function returns on each rank."""
        if not self.processes:
            self._start()
        for connection in self.connections:
            connection.send((function, args))
        deadline = time.monotonic() + DEADLINE_S
        results = []
        failures = []
        for rank, connection in enumerate(self.connections):
            # once one has failed, the others may wait for it
            left_s = 2.0 if failures else max(deadline - time.monotonic(), 0.0)
            if not connection.poll(left_s):
                failures.append(f"rank {rank} did not answer in time")
                continue
            try:
                result, failure = connection.recv()
            except EOFError:
                result, failure = None, "it ended"
            results.append(result)
            if failure is not None:
                failures.append(f"rank {rank}: {failure}")
        if failures:
            self.kill()
            raise AssertionError("\n".join(failures))
        return results

    def _start(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["roundpipe.distributed"])
        store = str(self.folder / f"store-{time.monotonic_ns()}")
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, store, there), daemon=True)
            process.start()
            self.processes.append(process)
            self.connections.append(here)

    def kill(self) -> None:
        """End the processes: an orderly end takes seconds, and there is nothing to keep."""
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.connections = [], []
