"""Hooks for what autograd saves, which a caller may have around a call; `torch.utils.checkpoint` works with them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def saved_tensor_hooks_aside(which: Callable[[Any], bool] = lambda _: True) -> Iterator[None]:
    """While open, this thread's innermost hooks for saved tensors, up to the first unpack hook that ``which`` denies,
    are not called.
    """
    autograd = torch._C._autograd
    aside = []
    while (hooks := autograd._top_saved_tensors_default_hooks(True)) is not None and which(hooks[1]):
        autograd._pop_saved_tensors_default_hooks()
        aside.append(hooks)
    try:
        yield
    finally:
        for hooks in reversed(aside):
            autograd._push_saved_tensors_default_hooks(*hooks)
