"""What tells that somebody else has written a tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
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
    """Some elements: a write through ``.data`` leaves no other mark."""

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
        return has_other_values([self])


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


@torch.no_grad()
def has_other_values(prints: Sequence[Fingerprint]) -> bool:
    """Whether the sample of one of these holds something else by now; a few operators for all."""
    of_dtype: defaultdict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    for each in prints:
        if (before := each.sample) is not None and (now := _sample(each.parameter)) is not None:
            if now.dtype == before.dtype:
                if now.shape != before.shape:
                    return True
                of_dtype[now.dtype].append((now, before))
    return any(not torch.equal(*map(_bits, zip(*pairs, strict=True))) for pairs in of_dtype.values())


def _bits(samples: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of many samples of one dtype: what is no number is equal to itself, too."""
    joined = torch.cat(list(samples))
    return joined.view(_BITS[joined.element_size()])


def _marks(parameter: torch.Tensor) -> tuple[int, int]:
    version = 0 if parameter.is_inference() else parameter._version
    return version, parameter.data_ptr() if is_plain(parameter) else 0


def _sample(parameter: torch.Tensor) -> torch.Tensor | None:
    """About `SAMPLED` elements all over a parameter, as a view; None if not one piece of memory here."""
    suits = is_plain(parameter) and parameter.is_cpu and parameter.is_contiguous()
    if not suits or parameter.element_size() not in _BITS:
        return None
    stride = (size := parameter.numel()) // SAMPLED | 1  # odd: not always the same column
    return parameter.detach().as_strided((-(-size // stride),), (stride,))
