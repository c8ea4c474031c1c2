"""Tensors that move between the host and a device by way of pinned pieces: every value arrives, no buffer too early."""

import pytest
import torch

from roundpipe.runtime.device import pieces_across
from roundpipe.runtime.device.accelerator import AcceleratorBackend
from roundpipe.runtime.device.backend import Device
from roundpipe.runtime.device.cpu import CpuBackend
from roundpipe.runtime.device.pieces_across import NUM_BUFFERS, PiecesAcross
from tests.runtime import test_twins

CPU, PIECE = torch.device("cpu"), 64


class Stream:
    """Events of a stream that has done nothing until somebody waits; buffers that hold what is under way."""

    def __init__(self):
        self.buffers, self.events, self.num_waits = [], [], 0

    def host_buffer(self, num_bytes):
        self.buffers.append(torch.empty(num_bytes, dtype=torch.uint8))
        return self.buffers[-1]

    def record(self):
        self.events.append(Event(self))
        return self.events[-1]


class Event:
    def __init__(self, stream):
        self.stream, self.is_over = stream, False

    def synchronize(self):
        assert not self.is_over
        self.is_over = True
        self.stream.num_waits += 1


@pytest.fixture(autouse=True)
def small_tensors_too(monkeypatch):
    monkeypatch.setattr(pieces_across, "LEAST_BYTES", 1)


@pytest.mark.parametrize("numel", [1, 15, 16, 17, 16 * NUM_BUFFERS, 1000])
def test_every_value_arrives_by_a_few_buffers(numel):
    stream, given = Stream(), torch.randn(numel)
    with PiecesAcross(stream.host_buffer, stream.record, PIECE) as pieces:
        moved = [pieces.move(given, CPU) for _ in range(3)]
    number = 3 * -(-4 * numel // PIECE)
    assert len(stream.events) == number and all(event.is_over for event in stream.events)
    assert len(stream.buffers) == min(NUM_BUFFERS, number) and {each.nbytes for each in stream.buffers} == {PIECE}
    for each in moved:
        assert each is not given and each.data_ptr() != given.data_ptr()
        assert torch.equal(each, given)


def test_a_buffer_is_taken_again_once_its_piece_has_arrived():
    stream = Stream()
    with PiecesAcross(stream.host_buffer, stream.record, PIECE) as pieces:
        for number in range(1, 10):
            pieces.move(torch.randn(16), CPU)
            assert stream.num_waits == max(number - NUM_BUFFERS, 0)
            assert [event.is_over for event in stream.events[: stream.num_waits]] == [True] * stream.num_waits


def test_what_is_under_way_arrives_behind_an_error():
    stream = Stream()
    with pytest.raises(KeyError), PiecesAcross(stream.host_buffer, stream.record, PIECE) as pieces:
        pieces.move(torch.randn(20), CPU)
        raise KeyError
    assert stream.num_waits == len(stream.events) == 2


@pytest.mark.parametrize(
    "given",
    [
        torch.randn(6, 7).t(),
        torch.randn(4, 6)[:, ::2],
        torch.randn(3, 4).to_sparse(),
        torch.tensor(2.5),
        torch.empty(0),
        torch.randn(9, dtype=torch.complex64),
        torch.randn(5, 7).bfloat16(),
        torch.nn.Parameter(torch.randn(5, 7)),
    ],
    ids=["transposed", "strided", "sparse", "scalar", "empty", "complex", "half", "parameter"],
)
def test_of_whatever_form(given):
    stream = Stream()
    with torch.no_grad(), PiecesAcross(stream.host_buffer, stream.record, PIECE) as pieces:
        moved = pieces.move(given, CPU)
    assert moved.dtype == given.dtype and moved.shape == given.shape and moved.layout == given.layout
    assert torch.equal(moved.to_dense() if moved.is_sparse else moved, given.to_dense() if given.is_sparse else given)


@pytest.mark.parametrize("is_async", [False, True])
def test_training_is_the_same(monkeypatch, tmp_path, is_async):
    streams = []

    def moving(self):
        streams.append(Stream())
        return Moves(streams[-1].host_buffer, streams[-1].record, PIECE)

    class Moves(PiecesAcross):
        def __enter__(self):
            super().__enter__()
            return self.move

    monkeypatch.setattr(CpuBackend, "moving", moving)
    test_twins.test_whatever_happens_between_steps(is_async, tmp_path)
    assert any(len(stream.events) > NUM_BUFFERS for stream in streams)
    assert all(event.is_over for stream in streams for event in stream.events)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none")
@pytest.mark.parametrize("numel", [3, 2**18, 2**26 + 17])
def test_what_moves_by_way_of_pinned_pieces_arrives(numel):
    backend = AcceleratorBackend(Device("cuda:0"), "worker 0")
    given = [torch.randn(numel), torch.arange(numel), torch.randn(numel).bfloat16().t()]
    with backend.moving() as move:
        there = [move(each, backend.device) for each in given]
    with backend.moving() as move:
        home = [move(each, torch.device("cpu")) for each in there]
    for each, moved in zip(given, home, strict=True):
        assert moved.device.type == "cpu" and torch.equal(moved, each)
