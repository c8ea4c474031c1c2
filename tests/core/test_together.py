"""What is done to many tensors in one call gives what one call per tensor gives."""

import pytest
import torch

from roundpipe.core import together as module
from roundpipe.core.together import Together, add_all, add_converted, copy_all, scale_all

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def pairs_of(seed):
    """Pairs of all dtypes, of several sizes, transposed ones and scalars among them."""
    torch.manual_seed(seed)
    pairs = []
    for size in ((3, 5), (7,), (), (0,)):
        pairs += [(torch.randn(size).to(one), torch.randn(size).to(other)) for one in DTYPES for other in DTYPES]
    return [*pairs, (torch.randn(4, 6).T, torch.randn(6, 4)), (torch.randn(4, 6).T, torch.randn(4, 6).bfloat16().T)]


def test_copies_are_those_of_one_call_each():
    together, alone = pairs_of(0), pairs_of(0)
    versions = [written._version for written, _ in together]
    copy_all(together)
    for (found, _), (expected, read) in zip(together, alone, strict=True):
        assert torch.equal(found, expected.copy_(read)) and found.dtype == expected.dtype
    assert all(written._version > version for (written, _), version in zip(together, versions, strict=True))


def test_sums_are_those_of_one_call_each():
    together, alone = pairs_of(1), pairs_of(1)
    add_all(together)
    for (found, _), (expected, read) in zip(together, alone, strict=True):
        assert torch.equal(found, expected.add_(read)) and found.dtype == expected.dtype


def test_a_sum_in_pieces_is_that_of_the_whole(monkeypatch):
    monkeypatch.setattr(module, "PIECE_ELEMENTS", 4)
    for (found, read), (expected, _) in zip(pairs_of(2), pairs_of(2), strict=True):
        version = found._version
        add_converted(found, read)
        assert torch.equal(found, expected.add_(read)) and found.dtype == expected.dtype
        assert found._version > version


def test_products_are_those_of_one_call_each():
    together, alone = ([written for written, _ in pairs_of(4)] for _ in range(2))
    for each in together, alone:
        each.append(torch.eye(3).to_sparse().coalesce())
    scale_all(together, 0.3)
    for found, expected in zip(together, alone, strict=True):
        expected.mul_(0.3)
        assert torch.equal(found.to_dense(), expected.to_dense()) and found.dtype == expected.dtype


def test_nothing_is_nothing():
    copy_all([])
    add_all([])


def test_what_was_noted_is_done_whatever_is_raised():
    written, sums = torch.zeros(3), torch.ones(2)
    with pytest.raises(ZeroDivisionError), Together() as together:
        together.copy(written, torch.ones(3).bfloat16())
        together.add(sums, torch.ones(2))
        assert not written.any()
        raise ZeroDivisionError
    assert written.tolist() == [1, 1, 1] and sums.tolist() == [2, 2]


def test_sums_into_one_tensor_are_made_one_behind_the_other(monkeypatch):
    monkeypatch.setattr(module, "PIECE_ELEMENTS", 2)
    calls, really_add = [], torch._foreach_add_
    monkeypatch.setattr(torch, "_foreach_add_", lambda *given: (calls.append(1), really_add(*given)))
    written, read = torch.ones(3).bfloat16(), torch.full((3,), 2.0**-8).bfloat16()
    with Together() as together:
        for _ in range(3):
            together.add(written, read)
        together.finish()
        together.add(written, read)
    expected = torch.ones(3).bfloat16()
    for _ in range(4):
        expected.add_(read)
    assert torch.equal(written, expected) and len(calls) == 2


def test_what_was_noted_is_what_one_call_each_does(monkeypatch):
    monkeypatch.setattr(module, "PIECE_ELEMENTS", 10)
    found, expected = pairs_of(3), pairs_of(3)
    with Together() as together:
        for position, (written, read) in enumerate(found):
            (together.add if position % 2 else together.copy)(written, read)
    for position, ((now, _), (written, read)) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(now, written.add_(read) if position % 2 else written.copy_(read))
