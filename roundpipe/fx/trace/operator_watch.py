"""Sees the operators below the torch functions of one attempt: random draws, writes, and what runs below transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from roundpipe.fx.dispatch import TorchDispatchMode
from roundpipe.fx.fakes import is_of_no_world, real_world
from roundpipe.fx.flat import flat_tensors
from roundpipe.fx.trace.layout import LayoutLog


class OperatorWatch(TorchDispatchMode):
    """Sees every operator that runs; ``on_transformed`` is called with those below a function transform in glue."""

    def __init__(self, on_transformed: Callable[..., None], layouts: LayoutLog | None = None) -> None:
        super().__init__()
        self.layouts = layouts
        self.num_random_draws = 0
        self.below_transform = 0
        self.originals: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        """What tensors with data, which are no part of the model, held before the forward wrote them."""
        self._on_transformed = on_transformed

    def undo_real_writes(self) -> None:
        for storage, original in self.originals.values():
            storage.copy_(original)

    def _keep_what_is_written(self, func: Any, args: Any, kwargs: Any) -> None:
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                for tensor in filter(is_of_no_world, flat_tensors(value)):
                    storage = tensor.untyped_storage()
                    if storage._cdata not in self.originals:
                        with real_world():
                            self.originals[storage._cdata] = storage, storage.clone()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        random = _draws(func, args, kwargs)
        self.num_random_draws += random
        if func._schema.is_mutable:
            self._keep_what_is_written(func, args, kwargs)
        out = func(*args, **kwargs)
        if self.below_transform:
            self._on_transformed(func, args, kwargs, out, random)
        if self.layouts is not None:
            self.layouts.note(func, flat_tensors(args, kwargs), flat_tensors(out))
        return out


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator draws random numbers when called like this."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
        if argument.name in ("dropout_p", "dropout", "p") and value == 0:
            return False
        if argument.name in ("train", "training") and value is False:
            return False
    return True
