"""Guards of a model, and why they refuse a call."""

from __future__ import annotations

from typing import Any

from torch import nn

from roundpipe.fx.guards.failure import Failure
from roundpipe.fx.guards.guards import Guards
from roundpipe.fx.trace.tracer import trace


def guards_of(model: nn.Module, inputs: dict[str, Any]) -> Guards:
    guards = trace(model, (), inputs).guards
    assert isinstance(guards, Guards)
    return guards


def failure_of(guards: Guards, inputs: dict[str, Any]) -> Failure:
    failure = guards.check((), inputs)
    assert isinstance(failure, Failure)
    return failure
