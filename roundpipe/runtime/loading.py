"""Loads into the user's own model, behind the wrapper: the optimizer's copies must not bring the old weights back.

The model gets a hook before its ``load_state_dict`` (wait for the running update, which writes into the model) and
one after (start the copies again from what was loaded, which with ``assign=True`` are new parameter objects).
Invariant: copies and pickles of the model carry hooks that do nothing, and a model whose wrapper is gone or closed
has none.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from roundpipe.runtime.optimizer import OptimizerSide


class _Hook:
    """Called by torch with the module that loads; does nothing in a copy, which has no optimizer's side."""

    def __init__(self, optimizer: OptimizerSide) -> None:
        self._optimizer: weakref.ref[OptimizerSide] | None = weakref.ref(optimizer)

    def __getstate__(self) -> dict[str, Any]:
        return {"_optimizer": None}

    @property
    def optimizer(self) -> OptimizerSide | None:
        return None if self._optimizer is None else self._optimizer()


class _Before(_Hook):
    def __call__(self, module: nn.Module, *arguments: Any) -> None:
        if self.optimizer is not None:
            self.optimizer.synchronize()


class _After(_Hook):
    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        if self.optimizer is not None:
            self.optimizer.rebind(module.named_parameters(remove_duplicate=False))
            self.optimizer.refresh()


class LoadWatch:
    """Watches the ``load_state_dict`` of one model.

    Args:
        model: the user's model.
        optimizer: whose copies follow; held weakly.
    """

    def __init__(self, model: nn.Module, optimizer: OptimizerSide) -> None:
        self._handles = [
            model.register_load_state_dict_pre_hook(_Before(optimizer)),
            model.register_load_state_dict_post_hook(_After(optimizer)),
        ]

    def end(self) -> None:
        """Take the hooks off the model; safe to call twice."""
        for handle in self._handles:
            handle.remove()
