"""Warnings of hooks of parameters that make something else of parts of a gradient than of the whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from roundpipe.core.caller import warn
from roundpipe.fx.passes.gradient_hooks import adds_up
from roundpipe.runtime.engine.spec import Call
from roundpipe.runtime.weights.frozen_layers import hooks_of


class HookWarnings:
    """Of one model, which is told of once; each hook is looked at once until then."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen: dict[int, Any] = {}
        self._is_over = False

    def look_at_calls(self, calls: Sequence[Call]) -> None:
        """Warn of those of the layers of calls whose microbatches are those of one batch."""
        parameters = itertools.chain.from_iterable(calls[0].parameters)
        self.look(parameters, sum(call.num_microbatches for call in calls))

    def look(self, parameters: Iterable[torch.Tensor], num_microbatches: int) -> None:
        """Warn of those that these parameters have, in a call of so many microbatches."""
        if num_microbatches < 2 or self._is_over:
            return
        for parameter in parameters:
            if not (parameter.requires_grad and parameter._backward_hooks):
                continue
            new = [hook for hook in hooks_of(parameter) if id(hook) not in self._seen]
            self._seen.update((id(hook), hook) for hook in new)
            if any(adds_up(hook, parameter) is False for hook in new):
                self._is_over = True
                self._warn(parameter, num_microbatches)
                return

    def _warn(self, parameter: torch.Tensor, num_microbatches: int) -> None:
        name = next((name for name, each in self._model.named_parameters() if each is parameter), "a parameter")
        warn(
            f"a hook of {name} runs on the gradient of each of {num_microbatches} microbatches. The results do not add "
            "up to what it would make of the whole batch's gradient, for example because it clamps or normalises. Clip "
            "in step_fn instead, with torch.nn.utils.clip_grad_value_(model.optim_parameters(), 0.1), or set "
            "RoundPipeRunConfig(num_microbatch=1)"
        )
