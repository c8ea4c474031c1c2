"""Memory of the states that an optimizer makes at its first step: on huge pages.

They are most of what the host holds, and are taken page by page: on ordinary ones that takes longer than the update.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from roundpipe.core.storages import is_plain
from roundpipe.runtime.device.host_memory import HUGE_PAGE_BYTES, on_huge_pages

NUM_UPDATES = 2
"""In which optimizers are taken to make their states."""


class StatesOnHugePages(TorchFunctionMode):
    """A context in which zeros that are made like a large tensor of the host ask for huge pages before."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros_like and len(args) == 1 and is_plain(args[0]) and args[0].nbytes >= HUGE_PAGE_BYTES:
            with torch.no_grad():
                return on_huge_pages(torch.empty_like(args[0], **kwargs)).zero_()
        return func(*args, **kwargs)
