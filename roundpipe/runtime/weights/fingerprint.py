"""What tells that somebody else has written a tensor."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from roundpipe.core.storages import is_plain

SAMPLED = 128
"""Elements of each parameter that are compared before an update."""
_Format = Literal["B", "H", "I", "Q"]
_FORMATS: dict[int, _Format] = {1: "B", 2: "H", 4: "I", 8: "Q"}
"""Of elements as bits, by their bytes, in memory views."""


class _Sample(NamedTuple):
    """About `SAMPLED` elements all over a tensor's memory: a write through ``.data`` leaves no other mark.

    They are read without torch, whose every call lets other threads go first: hundreds of parameters are looked at.
    """

    memory: memoryview
    """Where they are; read only while the tensor has its memory there."""
    storage: tuple[int, int]
    """Its bytes, and the element of it that the tensor begins at."""
    bits: bytes

    @classmethod
    def of(cls, parameter: torch.Tensor) -> _Sample | None:
        """None if it is not one piece of memory here."""
        size, num = parameter.element_size(), parameter.numel()
        kind = _FORMATS.get(size)
        if kind is None or not is_plain(parameter) or not parameter.is_cpu or not parameter.is_contiguous():
            return None
        storage = _storage_of(parameter)
        if not num or storage[0] < (storage[1] + num) * size:
            return None  # its memory was taken away
        whole = memoryview(_bytes_type(num * size).from_address(parameter.data_ptr()))
        memory = whole.cast("B").cast(kind)[:: num // SAMPLED | 1]  # odd: not always the same column
        return cls(memory, storage, memory.tobytes())

    def is_other(self, parameter: torch.Tensor) -> bool:
        """Whether a tensor that has its memory where it had it holds something else by now."""
        return _storage_of(parameter) == self.storage and self.memory.tobytes() != self.bits


def _storage_of(parameter: torch.Tensor) -> tuple[int, int]:
    return parameter.untyped_storage().nbytes(), int(parameter.storage_offset())


@dataclass(slots=True, eq=False)
class Fingerprint:
    """What tells that a parameter was written: its version, its memory and a sample of its values."""

    parameter: torch.Tensor
    version: int
    address: int
    sample: _Sample | None

    @classmethod
    def of(cls, parameter: torch.Tensor, *, with_sample: bool = True) -> Fingerprint:
        return cls(parameter, *_marks(parameter), _Sample.of(parameter) if with_sample else None)

    def moved(self) -> Fingerprint:
        """The same of a parameter that has other memory now."""
        address, sample = _marks(self.parameter)[1], self.sample and _Sample.of(self.parameter)
        if self.sample is not None and sample is not None:
            sample = sample._replace(bits=self.sample.bits)
        return Fingerprint(self.parameter, self.version, address, sample)

    @property
    def is_marked(self) -> bool:
        """Whether version or memory tell that the parameter was written since."""
        return _marks(self.parameter) != (self.version, self.address)

    @property
    def has_other_values(self) -> bool:
        """Whether the sample holds something else by now; where the memory is another, `is_marked` tells."""
        parameter, sample = self.parameter, self.sample
        if sample is None or parameter.data_ptr() != self.address:
            return False
        return sample.is_other(parameter)


def any_marked(prints: Sequence[Fingerprint]) -> bool:
    """Whether `Fingerprint.is_marked` holds for one of many, which a call asks of all parameters."""
    plain = [each for each in prints if each.address]
    try:
        versions = [each.parameter._version for each in plain]
    except RuntimeError:  # tensors of the inference mode have none
        return any(each.is_marked for each in prints)
    if versions != [each.version for each in plain]:
        return True
    if [each.parameter.data_ptr() for each in plain] != [each.address for each in plain]:
        return True
    return len(plain) < len(prints) and any(each.is_marked for each in prints if not each.address)


def _marks(parameter: torch.Tensor) -> tuple[int, int]:
    version = 0 if parameter.is_inference() else parameter._version
    return version, parameter.data_ptr() if is_plain(parameter) else 0


@functools.cache
def _bytes_type(num_bytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * num_bytes  # a new class each time, says ctypes, unless somebody keeps it
