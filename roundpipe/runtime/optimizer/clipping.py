"""Clipping by the norm of all gradients, of which a rank may have a part."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from roundpipe.core.checks import check_flag, check_type, is_number, items_of
from roundpipe.core.errors import ConfigError, shown
from roundpipe.runtime.optimizer.late_gradients import check_norm
from roundpipe.runtime.optimizer.update import UpdateRunner


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` by the norm of whole gradients, also where each rank has a part of them.

    For ``step_fn`` with ``shard_optimizer=True``. Torch's own function does the same there if it is called as
    ``torch.nn.utils.clip_grad_norm_``; imported under a name of its own, it takes the norm of this rank's part.
    All ranks call it, with the same parameters and in the same order. Elsewhere it is torch's.

    Args:
        parameters: those of the optimizer, or some of them.
        max_norm: the norm that gradients have at most afterwards.
        norm_type: the exponent, such as 1, 2 or ``math.inf``; more than 0.
        error_if_nonfinite: raise a `RuntimeError` if the norm is no finite number, on all ranks.

    Returns:
        The norm before, the same on all ranks.
    """
    if not (is_number(norm_type) and norm_type > 0):
        raise ConfigError(f"norm_type={shown(norm_type)}; give a number above 0, such as 2 or math.inf")
    limit: Any = max_norm
    if isinstance(limit, torch.Tensor) and limit.numel() == 1:
        limit = limit.item()
    if not (is_number(limit) and limit >= 0):
        raise ConfigError(f"max_norm={shown(max_norm)}; give a number of at least 0")
    check_flag("error_if_nonfinite", error_if_nonfinite)
    advice = "parameters, such as optimizer.param_groups[0]['params']"
    given = [parameters] if isinstance(parameters, torch.Tensor) else items_of("parameters", parameters, advice)
    for each in given:
        check_type("an item of parameters", each, torch.Tensor, advice)
    runner = UpdateRunner.running()
    late = None if runner is None else runner.late_of(given)
    if late is None:
        gradients = [each.grad for each in given if each.grad is not None and each.grad.numel()]
        own = get_total_norm(gradients, norm_type)
    else:
        own = late.total_norm(given, norm_type)
    norms = [float(own)] if runner is None or runner.ranks is None else runner.ranks.agree(float(own))
    total = own if len(norms) == 1 else own.new_tensor(_joined(norms, norm_type))
    if error_if_nonfinite:
        check_norm(total)
    if late is None:
        clip_grads_with_norm_(given, max_norm, total)
    else:
        late.scale_to(given, max_norm, total)
    return total


def _joined(norms: list[float], norm_type: float) -> float:
    """The norm of what has these norms in its parts."""
    largest = max(norms)
    if any(math.isnan(norm) for norm in norms):
        return math.nan
    if not 0.0 < largest < math.inf or math.isinf(norm_type):
        return largest
    return largest * math.fsum((norm / largest) ** norm_type for norm in norms) ** (1 / norm_type)
