"""What tells that somebody else has written a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from roundpipe.core.storages import is_plain

SAMPLED = 128
"""Elements of each parameter that are compared before an update."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What tells that a parameter was written: its version, its memory and a sample of its values."""

    parameter: torch.Tensor
    version: int
    address: int
    sample: torch.Tensor | None
    """Bits of some elements: a write through ``.data`` leaves no other mark."""

    @classmethod
    def of(cls, parameter: torch.Tensor, *, with_sample: bool = True) -> Fingerprint:
        sample = _sample(parameter) if with_sample else None
        return cls(parameter, *_marks(parameter), None if sample is None else sample.clone())

    @property
    def is_marked(self) -> bool:
        """Whether version or memory tell that the parameter was written since."""
        return _marks(self.parameter) != (self.version, self.address)

    @property
    def has_other_values(self) -> bool:
        """Whether the sample holds something else by now."""
        if self.sample is None:
            return False
        now = _sample(self.parameter)
        return now is not None and now.dtype == self.sample.dtype and not torch.equal(now, self.sample)


def _marks(parameter: torch.Tensor) -> tuple[int, int]:
    version = 0 if parameter.is_inference() else parameter._version
    return version, parameter.data_ptr() if is_plain(parameter) else 0


def _sample(parameter: torch.Tensor) -> torch.Tensor | None:
    """The bits of about `SAMPLED` elements all over a parameter, as a view; None if not one piece of memory here."""
    bits = _BITS.get(parameter.element_size())
    if bits is None or not is_plain(parameter) or parameter.device.type != "cpu" or not parameter.is_contiguous():
        return None
    stride = parameter.numel() // SAMPLED | 1  # odd: not always the same column
    return parameter.detach().view(-1)[::stride].view(bits)
