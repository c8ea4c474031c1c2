"""Calls of modules that are alike, while a model's own code runs on fakes: one of them runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.contexts import contextmanager

LeafKey = Callable[[Any], Hashable]


@contextmanager
def alike_calls_shared(modules: Mapping[nn.Module, Hashable], key_of: LeafKey) -> Iterator[None]:
    """For the duration, a module whose kind was called before with such arguments gives copies of what that one gave.

    A call runs by itself if it takes what is neither a tensor nor plain, which it could change, or changes a tensor.

    Args:
        modules: their kinds, equal for those that are alike.
        key_of: a key of a leaf of the arguments; those of equal ones are interchangeable.
    """
    given: dict[Hashable, Any] = {}

    def sharing(kind: Hashable, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            leaves = trees.leaves((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            if not all(isinstance(leaf, (torch.Tensor, *trees.PLAIN)) for leaf in leaves):
                return forward(*args, **kwargs)
            key = kind, len(args), tuple(kwargs), tuple(map(key_of, leaves))
            if key in given:
                return trees.map_tensors(given[key], torch.clone)
            versions = [tensor._version for tensor in tensors]
            out = forward(*args, **kwargs)
            if versions == [tensor._version for tensor in tensors]:
                given[key] = out
            return out

        return call

    own = {module: module.__dict__.get("forward") for module in modules}
    try:
        for module, kind in modules.items():
            module.__dict__["forward"] = sharing(kind, module.forward)
        yield
    finally:
        for module, forward in own.items():
            if forward is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = forward
