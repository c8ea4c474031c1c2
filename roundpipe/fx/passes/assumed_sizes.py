"""Results whose sizes only data tell, on fakes: as large as if something were found for each sample."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

_aten = torch.ops.aten


def with_assumed_size(func: Any, args: Any, counts_samples: Callable[[int], bool]) -> Any:
    """The result of an operator on fakes if its size depends on their data; else None.

    Args:
        func, args: the call.
        counts_samples: whether a size counts samples, or samples and something else.
    """

    def number_of(mask: torch.Tensor) -> int:
        """As many as there are samples; where there are none, all."""
        of_samples = [size for size in mask.shape if counts_samples(size)]
        return math.prod(of_samples) if of_samples else mask.numel()

    if func is _aten.nonzero.default:
        (mask,) = args
        return mask.new_empty((number_of(mask), mask.dim()), dtype=torch.long)
    if func is _aten.masked_select.default:
        return args[0].new_empty(number_of(args[1]))
    if func is _aten._unique2.default:
        tensor, options = args[0], (*args[1:], *(True, False, False)[len(args) - 1 :])
        places = tensor.shape if any(options[1:]) else (0,)
        counts = number_of(tensor) if options[2] else 0
        made = (tensor.new_empty(size, dtype=torch.long) for size in (places, counts))
        return tensor.new_empty(number_of(tensor)), *made
    if func is _aten.bincount.default:
        counted, weights, length = (*args, None, 0)[:3]
        return counted.new_empty(max(length, 1), dtype=torch.long if weights is None else weights.dtype)
    if func is _aten.index.Tensor:
        tensor, places = args
        if len(places) == 1 and places[0] is not None and places[0].dtype is torch.bool:
            return tensor.new_empty((number_of(places[0]), *tensor.shape[places[0].dim() :]))
    return None
