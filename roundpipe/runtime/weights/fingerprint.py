"""What tells that somebody else has written a tensor."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from roundpipe.core.storages import is_plain

SAMPLED = 128
"""Elements of each parameter that are compared before an update."""
_Format = Literal["B", "H", "I", "Q"]
_FORMATS: dict[int, _Format] = {1: "B", 2: "H", 4: "I", 8: "Q"}
"""Of elements as bits, by their bytes, in memory views."""


@dataclass(slots=True, eq=False)
class Fingerprint:
    """What tells that a parameter was written: its version, its memory and a sample of its values."""

    parameter: torch.Tensor
    version: int
    address: int
    sample: tuple[_Format, bytes] | None
    """The bits of some elements: a write through ``.data`` leaves no other mark."""

    @classmethod
    def of(cls, parameter: torch.Tensor, *, with_sample: bool = True) -> Fingerprint:
        return cls(parameter, *_marks(parameter), _sample(parameter) if with_sample else None)

    @property
    def is_marked(self) -> bool:
        """Whether version or memory tell that the parameter was written since."""
        return _marks(self.parameter) != (self.version, self.address)

    @property
    def has_other_values(self) -> bool:
        """Whether the sample holds something else by now."""
        if self.sample is None or (now := _sample(self.parameter)) is None:
            return False
        return now[0] == self.sample[0] and now[1] != self.sample[1]


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


def _sample(parameter: torch.Tensor) -> tuple[_Format, bytes] | None:
    """The bits of about `SAMPLED` elements all over a parameter; None if it is not one piece of memory here.

    They are read without torch, whose every call lets other threads go first: hundreds of parameters are looked at.
    """
    size, num = parameter.element_size(), parameter.numel()
    kind = _FORMATS.get(size)
    if kind is None or not is_plain(parameter) or not parameter.is_cpu or not parameter.is_contiguous():
        return None
    if not num or parameter.untyped_storage().nbytes() < (parameter.storage_offset() + num) * size:
        return None  # its memory was taken away
    memory = _bytes_type(num * size).from_address(parameter.data_ptr())
    stride = num // SAMPLED | 1  # odd: not always the same column
    return kind, memoryview(memory).cast("B").cast(kind)[::stride].tobytes()


@functools.cache
def _bytes_type(num_bytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * num_bytes  # a new class each time, says ctypes, unless somebody keeps it
