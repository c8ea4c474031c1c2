"""A driver that pins memory and checks copies as CUDA's does, and an allocator's heap, on which tensors share pages."""

import ctypes
import math
import mmap

import torch
from torch import nn

PAGE = mmap.PAGESIZE
WIDTH = 160
"""A square weight of this width is above `MIN_REGISTERED_BYTES`, and no multiple of a page."""


def wide_model(layers=3):
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def is_mapped(address, num_bytes):
    """Whether the process has all of these pages, asked in one call: a listing of its mappings is not read at once."""
    pages = (ctypes.c_ubyte * (num_bytes // PAGE))()
    mincore = ctypes.CDLL(None).mincore
    return mincore(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), pages) == 0


class Driver:
    """Pins memory to the byte, each byte once, and copies what is pinned as a whole or not at all, as CUDA's does.

    ``refused`` are the numbers of the calls that it refuses for no reason of ours.
    """

    def __init__(self, refused=()):
        self.ranges = {}
        self.refused = refused
        self.num_calls = 0
        self.gone = []

    def pin(self, address, num_bytes):
        assert num_bytes > 0
        self.num_calls += 1
        if self.num_calls - 1 in self.refused:
            return "out of locked memory"
        if self._shared(address, num_bytes):
            return "already registered"
        self.ranges[address] = num_bytes
        return None

    def unpin(self, address):
        first, stop = address // PAGE, -(-(address + self.ranges.pop(address)) // PAGE)
        self.gone.append(is_mapped(first * PAGE, (stop - first) * PAGE))

    def _shared(self, address, num_bytes):
        """Of each registration that a range has bytes of, how many."""
        ends = ((max(one, address), min(one + size, address + num_bytes)) for one, size in self.ranges.items())
        return [stop - start for start, stop in ends if start < stop]

    def covers(self, tensor):
        return self._shared(tensor.data_ptr(), tensor.nbytes) == [tensor.nbytes]

    def check_copy(self, tensor):
        assert self._shared(tensor.data_ptr(), tensor.nbytes) in ([], [tensor.nbytes]), "cudaErrorInvalidValue"


class Heap:
    """Memory that is given out as an allocator does: pages are shared, bytes are not."""

    def __init__(self, num_bytes=2**20):
        self._memory = mmap.mmap(-1, num_bytes)
        self._used = 48
        self.given = []

    def empty(self, *shape):
        num_elements = math.prod(shape)
        self.given.append(torch.frombuffer(self._memory, dtype=torch.float32, count=num_elements, offset=self._used))
        self._used += -(-(4 * num_elements + 16) // 16) * 16
        return self.given[-1].view(shape)

    def model(self, layers=4):
        """Layers whose parameters lie side by side, an input behind each."""
        model = wide_model(layers)
        for layer in model:
            for parameter in layer.parameters():
                parameter.data = self.empty(*parameter.shape).copy_(parameter)
            self.empty(WIDTH)
        return model
