"""Ranks of one host share memory, and what travels through it is what travels over a connection."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from roundpipe.runtime.ranks.shared_memory import Address, SlotFile, open_all
from tests.distributed.data_parallel import Kind, train
from tests.distributed.ranks import Ranks
from tests.distributed.shared import train_without, transfers

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch is built without gloo")

needs_files = pytest.mark.skipif(SlotFile().address is None, reason="this system has no anonymous files to share")


def assert_same_transfers(ranks: Ranks) -> None:
    for shared, sent in zip(ranks.run(transfers, True), ranks.run(transfers, False), strict=True):
        assert len(shared) == len(sent) > 0
        assert all(torch.equal(one, other) for one, other in zip(shared, sent, strict=True))


@needs_files
def test_what_travels_is_what_a_connection_brings(two: Ranks) -> None:
    assert_same_transfers(two)


@needs_files
@pytest.mark.long
def test_so_it_is_for_three_ranks(tmp_path: Path) -> None:
    ranks = Ranks(3, tmp_path)
    try:
        assert_same_transfers(ranks)
    finally:
        ranks.kill()


def test_ranks_of_several_hosts_train_alike(two: Ranks) -> None:
    kinds = [Kind(is_async=True), Kind(shard=True)]
    for shared, sent in zip(two.run(train, kinds), two.run(train_without, kinds), strict=True):
        for one, other in zip(shared, sent, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


@needs_files
def test_memory_is_opened_on_its_own_host_only() -> None:
    slots = SlotFile()
    address = slots.address
    assert address is not None
    assert open_all([address, address]) is not None
    assert open_all([address, None]) is None
    others = [
        Address("another machine", address.process, address.descriptor, address.name),
        Address(address.host, address.process, address.descriptor, "another file"),
        Address(address.host, os.getpid(), 2**30, address.name),
    ]
    assert all(open_all([address, other]) is None for other in others)
