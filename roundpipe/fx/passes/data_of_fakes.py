"""What code gets that asks fakes for data outside of torch, so that it goes on: NumPy's arrays, and texts for a log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from roundpipe.fx.fakes import real_world


class DataOfFakes(TorchFunctionMode):
    """Gives ones in place of data; ``note`` is told of each tensor of which code has an array."""

    def __init__(self, note: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.numpy, torch.Tensor.__array__):
            self._note(args[0])
            with real_world():
                return torch.ones(tuple(args[0].shape), dtype=args[0].dtype).numpy()
        if func is torch.Tensor.__format__ and not args[0].ndim:
            return format(1.0 if args[0].is_floating_point() else 1, args[1])
        return func(*args, **(kwargs or {}))
