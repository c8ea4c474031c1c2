"""Losses that read what forward hooks collect, such as the features of a layer.

A hook of a layer that runs apart from the loss sees tensors without autograd's history, and those of all microbatches
before any loss. Such layers are planned into the last stage, in which a microbatch runs with autograd up to its loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from roundpipe.core.errors import ConfigError
from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.effects.handing import Places
from roundpipe.runtime.engine.spec import Call


def hooked_for_loss(call: Call) -> Iterator[tuple[int, nn.Module]]:
    """Modules with a forward hook that leaves something where the loss may look for it; and the index of the layer."""
    found: set[Any] | None = None
    for index, module, hook in call.hooks:
        found = Places.of(call.loss_fn).found if found is None else found
        if not found.isdisjoint(Places.of(hook).left):
            yield index, module


def plan_hooks_beside_loss(call: Call) -> None:
    """Have layers with hooks that leave something for the loss run in the last stage.

    Raises:
        ConfigError: the plan that is asked for has another last stage.
    """
    for index, module in hooked_for_loss(call):
        count, asked = len(call.chain), call.config.execute_plan
        if asked is None:
            cuts = list(itertools.pairwise(range(index + 1)))
            call.config = replace(call.config, execute_plan=ExecutePlan(cuts, (index, count), cuts[::-1]))
        elif asked.fused is None or asked.fused[0] > index:
            raise ConfigError(
                f"loss_fn reads what a forward hook of {type(module).__name__} in layer {index} "
                f"({call.chain.specs[index].name}) collects, and the execute_plan runs this layer apart from the loss, "
                f"without autograd and with all microbatches. Begin the fused tail at layer {index} or before, leave "
                "execute_plan out, or return the features from forward"
            )
        return
