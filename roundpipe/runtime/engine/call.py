"""The microbatches of one call that share a chain and run as one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from roundpipe.core import trees
from roundpipe.core.layers import LayerChain
from roundpipe.runtime.config import ResolvedConfig
from roundpipe.runtime.device.host_memory import bytes_of


@dataclass(slots=True)
class Call:
    """The microbatches of one call that share a chain."""

    chain: LayerChain
    config: ResolvedConfig
    args: list[tuple[Any, ...]]
    kwargs: list[dict[str, Any]]
    labels: list[Any]
    total_microbatches: int
    """Of the whole call, for `num_microbatches`."""

    @classmethod
    def like_example(cls, chain: LayerChain, config: ResolvedConfig) -> Call:
        """A call that is only planned: the example's elements, split evenly."""
        number = config.num_microbatch
        piece = torch.empty(-(-chain.example_elements // number), device="meta")
        return cls(chain, config, [(piece,)] * number, [{}] * number, [None] * number, number)

    @property
    def num_microbatches(self) -> int:
        return len(self.args)

    def elements(self) -> int:
        """Tensor elements of the largest microbatch's arguments."""
        return max(
            sum(tensor.numel() for tensor in trees.tensors(each)) for each in zip(self.args, self.kwargs, strict=True)
        )

    def argument_bytes(self) -> int:
        """Bytes of the tensors in the largest microbatch's arguments."""
        return max(sum(map(bytes_of, trees.tensors(each))) for each in zip(self.args, self.kwargs, strict=True))
