"""What attempts to trace a model find out, and how one tells the next.

    Retry       ends an attempt, with a lesson
    Lesson      what to do otherwise about one module, and why
    Need        what to do otherwise everywhere
    Knowledge   the lessons so far; attempts only read it
    Findings    what one attempt finds out beside the graph

An attempt is never repaired midway: Python state that it left behind could not be taken back.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.fx import Node

from roundpipe.core.errors import TraceCause, TraceError, TraceFacts
from roundpipe.fx.fakes import Dimension
from roundpipe.fx.guards.model_guard import Write
from roundpipe.fx.locations import model_location, raised_at, source_at, with_source
from roundpipe.fx.trace.advice import advice
from roundpipe.fx.trace.policy import Decision, is_of_torch

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Findings:
    """What one attempt finds out beside the graph."""

    grad_matters: bool
    """Whether the code asks for what only a forward with autograd tells."""
    born_in: dict[torch.Tensor, str] = field(default_factory=dict)
    """Tensors made inside leaves, with the leaf's name."""
    probed_nodes: set[Node] = field(default_factory=set)
    """Nodes whose output sizes a probe found."""
    origins: dict[Node, tuple[str, ...]] = field(default_factory=dict)
    """Leaves that return an argument or a weight itself, with which; at other sizes it may be something new."""
    weight_writes: list[tuple[Write, torch.Tensor]] = field(default_factory=list)
    """Writes to weights, with the weight, that change nothing of it now."""
    not_kept: dict[str, None] = field(default_factory=dict)
    """Attributes that leaves set to activations, which nobody reads."""
    fixes_sizes: dict[str, TraceError] = field(default_factory=dict)
    """Modules whose glue turns sizes into plain numbers, with where."""


class Need(enum.Enum):
    """What the next attempt must do in all of the model."""

    SPECIALIZED_SIZES = "take sizes that the inputs' data determine from the example"
    LAYOUTS = "log what makes each tensor, since code asks how one lies in memory"
    PLAIN_LENGTHS = "let len(tensor) give a plain number, since code does with it what only that can do"


@dataclass(frozen=True, slots=True)
class Lesson:
    """Why an attempt failed, and what to do otherwise about one module."""

    error: BaseException
    module: str = ""
    """Its qualified name."""
    decision: Decision | None = None
    """None if there is nothing to do, so that the model can't be traced."""
    location: str = field(default_factory=model_location)
    """``file:line`` of the model's code that ran."""
    function: str = ""
    """Name of the torch function that raised the error."""
    is_stateful: bool = False
    """Whether the module's forward must run just once, and with autograd: it changes Python state, say."""
    hands_on: bool = False
    """Whether the module leaves values in its attributes that others take in the same forward."""

    def place(self) -> str:
        """``file:line`` that raised the error; if it was raised here, of the code that ran."""
        return raised_at(self.error) or self.location

    def summary(self) -> str:
        """The error in a line."""
        text = str(self.error).strip().split("\n")[0][:300]
        return text if isinstance(self.error, TraceError) else f"{type(self.error).__name__}: {text}"


class Retry(BaseException):
    """Ends an attempt to trace: the next one must know something.

    It derives from BaseException so that ``except Exception`` in a model's code does not take it.
    """

    def __init__(self, lesson: Lesson | Need) -> None:
        super().__init__(lesson)
        self.lesson = lesson
        self.seen_to_set: frozenset[tuple[type, str]] = frozenset()
        """Attributes of classes that a forward changed, beside those that were known."""


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What earlier attempts found out."""

    max_leaf_bytes: int | None = None
    """Modules with more bytes of weights and gradients are looked into; None = no such limit."""
    dynamic: frozenset[Dimension] = frozenset()
    """Input dimensions that are symbols although the rule says they are not."""
    needs: frozenset[Need] = frozenset()
    decisions: Mapping[str | type, Decision] = field(default_factory=dict)
    """By module or class."""
    reasons: Mapping[str | type, str] = field(default_factory=dict)
    """Why, in words."""
    tried: frozenset[tuple[str, Decision]] = frozenset()
    stateful: frozenset[str | type] = frozenset()
    """Modules, and their classes, whose forward changes Python state."""
    handing_on: frozenset[str | type] = frozenset()
    """Modules, and their classes, from whose attributes others take values in the same forward."""
    seen_to_set: frozenset[tuple[type, str]] = frozenset()
    """Attributes of classes that forwards changed."""

    def after(self, retry: Retry, model: nn.Module) -> Knowledge:
        """What is known with the lesson of an attempt that failed.

        Raises:
            TraceError: nothing is left to try.
        """
        lesson = retry.lesson
        known = replace(self, seen_to_set=self.seen_to_set | retry.seen_to_set)
        if isinstance(lesson, Need):
            return replace(known, needs=self.needs | {lesson})
        if not lesson.module or lesson.decision is None:
            raise known.root_error(lesson, model) from lesson.error
        keys: set[str | type] = {lesson.module, type(model.get_submodule(lesson.module))}
        if lesson.is_stateful:
            known = replace(known, stateful=self.stateful | keys)
        if lesson.hands_on:
            known = replace(known, handing_on=self.handing_on | keys)
        name, decision = lesson.module, lesson.decision
        if (name, decision) in self.tried:
            name, decision = _parent(model, name), Decision.LEAF
            if not name or (name, decision) in self.tried:
                raise known.root_error(lesson, model) from lesson.error
        kind = type(model.get_submodule(name))
        logger.debug("tracing again: %s is to be %s: %s", name, decision.value, lesson.error)
        deciding: list[str | type] = [name] if is_of_torch(kind) else [name, kind]
        reason = f"{with_source(lesson.place())}: {lesson.summary()}"
        return replace(
            known,
            tried=self.tried | {(name, decision)},
            decisions={**self.decisions, **dict.fromkeys(deciding, decision)},
            reasons={**self.reasons, **dict.fromkeys(deciding, reason)},
        )

    def root_error(self, lesson: Lesson, model: nn.Module) -> TraceError:
        """The error of a model that can't be traced because of a lesson."""
        location, error = lesson.place(), lesson.error
        cause = error.cause if isinstance(error, TraceError) else TraceCause.FORWARD_RAISES
        facts = error.facts if isinstance(error, TraceError) else TraceFacts(function=lesson.function)
        file, _, line = location.rpartition(":")
        stateful = [name for name, module in model.named_modules() if {name, type(module)} & self.stateful]
        facts = replace(
            facts,
            file=file,
            line=int(line) if line.isdigit() else 0,
            source=source_at(location),
            module=lesson.module,
            stateful=tuple(dict.fromkeys((*facts.stateful, *stateful))),
        )
        what = lesson.summary().rstrip(".")
        words = f"at {with_source(location)}: {what}. {advice(cause, facts)}"
        return TraceError(f"can't trace {type(model).__name__}: {words}", cause, facts)

    def reason(self, name: str, kind: type) -> str:
        """Why the inside of a leaf was not traced."""
        return self.reasons.get(name) or self.reasons.get(kind) or "scripted code can't be looked into"


def _parent(model: nn.Module, name: str) -> str:
    """The module around one, lists left out; empty if that is the root."""
    parent = name.rpartition(".")[0]
    while parent and isinstance(model.get_submodule(parent), (nn.ModuleList, nn.ModuleDict)):
        parent = parent.rpartition(".")[0]
    return parent
