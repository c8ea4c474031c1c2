"""Models that can't be cut: the whole model as one layer, with the same calls around it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from roundpipe.layers import FixedChain, chain_of_modules
from roundpipe.runtime.config import RoundPipeRunConfig
from roundpipe.runtime.devices import DeviceLike
from roundpipe.runtime.pipe import RoundPipe, caller_name
from roundpipe.runtime.residency import PinMode


class AutoRoundPipe(RoundPipe):
    """A model whose own forward can't be traced, run whole, microbatch by microbatch.

    It has everything that `RoundPipe` has (forward, ``forward_backward``, the optimizer's side), but one
    layer: all of it must fit on a device at once, and nothing overlaps between layers.
    """

    def __init__(
        self,
        model: nn.Module,
        optim_dtype: torch.dtype | None = None,
        name: str | None = None,
        model_run_config: RoundPipeRunConfig = RoundPipeRunConfig(),  # noqa: B008 - frozen
        pin_model: PinMode = "alloc",
        *,
        devices: Sequence[DeviceLike] | DeviceLike | None = None,
    ) -> None:
        nn.Module.__init__(self)
        source = FixedChain(chain_of_modules([("", model)]))
        self._set_up(model, source, optim_dtype, name or caller_name(), model_run_config, pin_model, devices)

    def forward_backward(self, *args: Any, **kwargs: Any) -> Any:
        """See `RoundPipe.forward_backward`; warns once that nothing overlaps between layers."""
        if not self.__dict__.get("_warned"):
            self.__dict__["_warned"] = True
            warnings.warn(
                "forward_backward of an AutoRoundPipe runs the whole model microbatch by microbatch: "
                "nothing overlaps between layers",
                stacklevel=2,
            )
        return super().forward_backward(*args, **kwargs)
