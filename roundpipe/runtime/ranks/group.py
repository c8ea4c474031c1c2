"""The connection of one model to its ranks: gloo groups that nobody else uses, and memory that ranks of one host share.

What travels lies in host memory, so gloo serves, whatever the user's group is. Nothing of the user's comes between its
collectives. When it is closed, whoever waits for this rank is told at once. The second group is for a ``step_fn``,
which may run while the ranks' thread uses the first one. If all ranks are on one host, gradients and weights travel
through `SharedMemory`, several times as fast, and gloo only tells when; else through gloo.

Invariant: after `RankGroup` was made, weights and buffers are those of rank 0 on every rank, bit for bit.
"""

from __future__ import annotations

import datetime
import logging
import os
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from roundpipe.core.caller import warn
from roundpipe.core.errors import ConfigError, enumerated, quoted
from roundpipe.core.storages import is_plain
from roundpipe.runtime.ranks.shared_memory import SharedMemory, SlotFile, open_all

logger = logging.getLogger(__name__)

ProcessGroupLike: TypeAlias = "dist.ProcessGroup | Literal['world']"
"""Whose ranks train together; ``"world"`` is the default group."""

TIMEOUT = datetime.timedelta(minutes=30)
"""How long a rank waits for a slower one, if the user's group does not say."""


class RankGroup:
    """The ranks of one model; made on all of them at once, used by the ranks' thread, `agree` by ``step_fn``.

    Raises:
        ConfigError: there is no such group, or a rank has another model.
    """

    def __init__(self, process_group: ProcessGroupLike, model: nn.Module, options: Sequence[Any]) -> None:
        group = _resolved(process_group)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        timeout = _timeout_of(group)
        slots = SlotFile()
        own = (uuid.uuid4().hex, slots.address, [f"the option {each!r}" for each in options], _described(model))
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own, group=group)
        _check_same([(options, tensors) for *_, options, tensors in found])
        if self.rank == 0 and (advice := _advice_on_threads()):
            warn(advice)
        store = dist.PrefixStore(f"roundpipe/{found[0][0]}", dist.distributed_c10d._get_default_store())
        self._group: Any = dist.ProcessGroupGloo(store, self.rank, self.size, timeout=timeout)
        second = dist.PrefixStore("step_fn", store)
        self._second: Any = dist.ProcessGroupGloo(second, self.rank, self.size, timeout=timeout)
        opened = open_all([address for _, address, *_ in found])
        self._memory: SharedMemory | None = None
        if all(is_open for (is_open,) in self.gather([opened is not None])) and opened is not None:
            self._memory = SharedMemory(opened, self.rank, self.meet)
        logger.info("%d ranks are connected by %s", self.size, "gloo" if self._memory is None else "shared memory")
        with torch.no_grad():
            for tensor in _host_tensors(model):
                whole = tensor.contiguous()
                self._open().broadcast([whole]).wait()
                if whole is not tensor:
                    tensor.copy_(whole)

    def gather(self, row: Sequence[float]) -> list[list[float]]:
        """The rows of all ranks, equally long."""
        return self._gathered(self._open(), row)

    def agree(self, row: Sequence[float]) -> list[list[float]]:
        """The rows of all ranks, for a ``step_fn``."""
        return self._gathered(_opened(self._second), row)

    def _gathered(self, group: Any, row: Sequence[float]) -> list[list[float]]:
        own = torch.tensor(row, dtype=torch.float64)
        rows = [torch.empty_like(own) for _ in range(self.size)]
        group.allgather([rows], [own]).wait()
        return [each.tolist() for each in rows]

    def meet(self) -> None:
        """Return once all ranks have called it."""
        self._open().allreduce([torch.zeros(1, dtype=torch.int32)]).wait()

    def count(self, numbers: torch.Tensor) -> None:
        """Make a few numbers the sums of all ranks', in place."""
        self._open().allreduce([numbers]).wait()

    @property
    def joins(self) -> bool:
        """Whether several tensors travel as fast as one that they were copied into."""
        return self._memory is not None

    def add_up(self, flats: Sequence[torch.Tensor], divisor: int = 1) -> None:
        """Make tensors of one dimension and one dtype the sums of all ranks' over a divisor, the same bits everywhere.

        In place; see `joins`.
        """
        if self._memory is not None:
            return self._memory.add_up(flats, divisor)
        for flat in flats:
            self._open().allreduce([flat]).wait()
            if divisor != 1:
                flat.div_(divisor)

    def swap(self, received: torch.Tensor, sent: torch.Tensor, lengths: Sequence[int]) -> None:
        """Send each rank its part of one dimension, of these lengths; receive a row from each, as long as its own."""
        if self._memory is not None:
            return self._memory.swap(received, sent, lengths)
        width = sent.itemsize
        sizes = [received.shape[1] * width] * self.size, [length * width for length in lengths]
        self._open().alltoall_base(_bytes(received), _bytes(sent), *sizes).wait()

    def collect(self, found: torch.Tensor, own: torch.Tensor) -> None:
        """A row from each rank, equally long."""
        if self._memory is not None:
            return self._memory.collect(found, own)
        self._open()._allgather_base(_bytes(found), _bytes(own)).wait()

    def send_to_first(self, whole: torch.Tensor, own: torch.Tensor, lengths: Sequence[int]) -> None:
        """Rank 0 gets the parts of all ranks, of these lengths, one after the other; others get none."""
        received = [length * own.itemsize if self.rank == 0 else 0 for length in lengths]
        sent = [own.nbytes, *[0] * (self.size - 1)]
        self._open().alltoall_base(_bytes(whole), _bytes(own), received, sent).wait()

    def close_second(self) -> None:
        """Let go of the connection of ``step_fn``; other ranks that wait there get an error."""
        self._second = None

    def close(self) -> None:
        """Let go of the connection; ranks that wait for this one get an error."""
        self._group = self._second = self._memory = None

    def _open(self) -> Any:
        return _opened(self._group)


def _opened(group: Any) -> Any:
    assert group is not None, "a rank speaks after it has closed its connection"
    return group


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor; gloo does not know all dtypes."""
    return tensor.view(-1).view(torch.uint8)


def _advice_on_threads() -> str:
    """What to say if this rank has one thread only because torchrun gives each process one; empty: nothing."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    threads = cores // num_ranks
    if "TORCHELASTIC_RUN_ID" not in os.environ or torch.get_num_threads() > 1 or threads < 2:
        return ""
    return (
        "this rank's optimizer, and averages over ranks, have one thread of the host: torchrun sets OMP_NUM_THREADS=1 "
        f"unless it is set. With {cores} cores for {num_ranks} ranks, start torchrun with OMP_NUM_THREADS={threads}, "
        f"or call torch.set_num_threads({threads}) before the model is wrapped"
    )


def _resolved(process_group: ProcessGroupLike) -> dist.ProcessGroup:
    if not (dist.is_available() and dist.is_gloo_available()):
        raise ConfigError("process_group= needs torch.distributed with gloo, and this torch is built without")
    is_world = isinstance(process_group, str) and process_group == "world"
    if isinstance(process_group, int) and process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError("process_group= is a group that this process is not in; wrap the model on its members only")
    if not (is_world or isinstance(process_group, dist.ProcessGroup)):
        raise ConfigError(
            f"process_group={quoted(process_group)}; give 'world', or a group that torch.distributed.new_group returned"
        )
    if not dist.is_initialized():
        raise ConfigError(
            "process_group= was given, and torch.distributed has none: start the program with torchrun, and call "
            "torch.distributed.init_process_group('gloo') before the model is wrapped"
        )
    return process_group if isinstance(process_group, dist.ProcessGroup) else dist.distributed_c10d._get_default_group()


def _timeout_of(group: Any) -> datetime.timedelta:
    """That of the user's group, the shortest if it has several backends."""
    backends = [group._get_backend(device) for device in group._device_types]
    options = [options for backend in backends if (options := getattr(backend, "options", None)) is not None]
    return min((each._timeout for each in options if hasattr(each, "_timeout")), default=TIMEOUT)


def _named_tensors(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _described(model: nn.Module) -> list[str]:
    return [
        f"{name} {list(tensor.shape)} {tensor.dtype}{' trainable' if tensor.requires_grad else ''}"
        for name, tensor in _named_tensors(model)
    ]


def _host_tensors(model: nn.Module) -> Iterable[torch.Tensor]:
    return (tensor.detach() for _, tensor in _named_tensors(model) if is_plain(tensor) and not tensor.is_meta)


def _check_same(found: Sequence[tuple[list[str], list[str]]]) -> None:
    """Raise, on all ranks alike, if one is different from the first."""
    for rank, (options, tensors) in enumerate(found):
        for here, there in ((options, found[0][0]), (tensors, found[0][1])):
            if here != there:
                only_here = enumerated([each for each in here if each not in there]) or "nothing more"
                only_there = enumerated([each for each in there if each not in here]) or "nothing more"
                raise ConfigError(
                    "process_group=: ranks train one model, and theirs are different: "
                    f"rank {rank} has {only_here}; rank 0 has {only_there}. Build the model alike on all ranks"
                )
