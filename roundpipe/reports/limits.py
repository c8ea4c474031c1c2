"""What a step's seconds are spent on, as one word, and what makes them fewer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from roundpipe.reports.timeline import WaitCause

Limit = Literal["compute", "up", "down", "hand-over", "update", "averaging", "caller", "stages", "overhead"]
LIMITS: tuple[Limit, ...] = get_args(Limit)
SMALL_SHARE = 0.1
"""Idle shares up to this, all causes together, leave compute as the limit."""
LARGE_SHARE = 0.75
"""Share of the time from which on an optimizer at work is what callers wait for."""

_OF_CAUSE: dict[WaitCause, Limit] = {
    "caller": "caller",
    "no_work": "stages",
    "activations": "up",
    "weights": "up",
    "gradients": "down",
    "overhead": "overhead",
}
OF_OPTIMIZER: tuple[Limit, ...] = ("update", "hand-over", "averaging")
"""What its thread does, one behind the other."""
ADVICE: dict[Limit, str] = {
    "compute": "devices compute nearly all the time: more memory for them means less recomputation",
    "up": "weights come up too slowly: give a step more tokens, or the devices more memory to keep weights",
    "down": "gradients go home too slowly: give a step more tokens",
    "hand-over": "devices wait while new weights are converted: pin_model='double' has that done beside the round, in "
    "second host memory; or give a step more tokens, or the host more threads",
    "update": "the optimizer is too slow: fused=True, more threads for the host, or more tokens in a step",
    "averaging": "gradients travel between ranks too slowly: more tokens in a step, or a faster network",
    "caller": "calls come too late: load data beside training, and read losses less often",
    "stages": "stages wait for each other: more microbatches, as many as divide evenly over the devices",
    "overhead": "Python can't keep up: larger microbatches",
}
"""What helps, by limit."""
SHARING = "replicas='auto', by which several devices run one stage"
"""What may help several devices that compute all the time, each its own stages."""
TURNS = "torch.compile'd blocks, or a process per device: the threads of several devices take turns at Python"
"""What helps several devices that wait for Python."""


def limit_of(idle: Mapping[WaitCause, float], optimizer_s: Mapping[str, float], wall_s: float) -> Limit:
    """The limit of training steps.

    Args:
        idle: mean shares of the devices' time, by `WaitCause`.
        optimizer_s: seconds of the optimizer's side; see `RunReport`.
        wall_s: of the same steps; a late caller has waited for an optimizer that is at work nearly always.
    """
    spent_s = {limit: optimizer_s.get(limit, 0.0) for limit in OF_OPTIMIZER}
    is_always_at_work = sum(spent_s.values()) > LARGE_SHARE * wall_s
    # else the update is over before the next round is, and what it has made is waited for
    awaited = OF_OPTIMIZER if is_always_at_work else tuple(limit for limit in OF_OPTIMIZER if limit != "update")
    of_optimizer = max(awaited, key=lambda limit: spent_s[limit])
    shares = dict.fromkeys(LIMITS, 0.0)
    for cause, share in idle.items():
        limit = _OF_CAUSE.get(cause, of_optimizer)
        if cause == "caller" and is_always_at_work:
            limit = of_optimizer
        shares[limit] += share
    if sum(shares.values()) <= SMALL_SHARE:
        return "compute"
    return max(LIMITS, key=lambda limit: shares[limit])
