"""Which modules stay whole in the graph (leaves) and which are looked into: by a rule, and by what attempts find out.

Leaves run their author's Python, which is safe, but are never cut, so they must be small. For a module that isn't a
container, the rule is:

    its class says so        torch's own layers are leaves, torch's own stacks are not
    it has a user's hook     leaf, so that the hook fires at run time, unless it holds a stack
    torch has compiled it    leaf, so that it runs compiled, unless it holds a stack or is larger than
                             the caller's limit
    it has no parameters     look inside (masks, rotary tables: glue that can be recomputed)
    it is of a loss          look inside, so that the graph shows what the loss is made of
    it holds a stack         look inside; a stack is a list of two or more modules that have
                             parameters and children with parameters themselves (blocks). One of
                             12 or more like blocks may hold a stack of its own (experts)
    it is large              more than 1/6 of the model, or than the caller's limit: look inside
    otherwise                leaf

What attempts find out overrides the rule, by module or by class. One that fails ends with a `Retry` and is never
repaired midway: Python state that it left behind could not be taken back.

Invariant: the answer for a module depends on the model's structure and the decisions only.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from roundpipe.core.compiled_modules import is_compiled
from roundpipe.core.errors import TraceCause, TraceError, TraceFacts, said
from roundpipe.core.module_tree import modules_in, parameters_in, training_bytes_of
from roundpipe.effects.run_once import holders_of
from roundpipe.fx.locations import model_location, raised_at, source_at, with_source
from roundpipe.fx.trace.advice import advice
from roundpipe.fx.varying import Varying

logger = logging.getLogger(__name__)

LARGEST_SHARE = 1 / 6
"""Largest part of the model's parameters that one leaf may hold."""
MANY_BLOCKS = 12
"""From this number of equal blocks on, a block is a leaf whatever it holds."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_TORCH_STACKS = (
    nn.Sequential,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)


class Decision(enum.Enum):
    """What tracing learned about a module."""

    LEAF = "leaf"
    """Its own Python can't be traced: keep it whole."""
    DESCEND = "descend"
    """It can't be a leaf (it hides or leaks an activation, say): look inside."""
    PROBE = "probe"
    """It can't run on fakes either: keep it whole, its output sizes found by running a copy."""


class Need(enum.Enum):
    """What the next attempt must do in all of the model."""

    SPECIALIZED_SIZES = "take sizes that the inputs' data determine from the example"
    LAYOUTS = "log what makes each tensor, since code asks how one lies in memory"
    PLAIN_LENGTHS = "let len(tensor) give a plain number, since code does with it what only that can do"
    PLAIN_NUMBERS = (
        "let item() give a plain number where arguments tell it, since code does with it what only that can do"
    )
    OWN_RATIOS = "let data of a piece of a batch give the piece's numbers, since code divides them by the piece's sizes"
    OWN_NUMBERS = "let data of a piece of a batch give the piece's numbers, since not everything goes sample by sample"


@dataclass(eq=False)
class Retry(BaseException):
    """Ends an attempt to trace: why it failed, and what the next one does otherwise about one module, or everywhere.

    It derives from BaseException so that ``except Exception`` in a model's code does not take it.
    """

    error: BaseException | None = None
    module: str = ""
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
    need: Need | None = None
    """What to do everywhere, in place of all of these."""
    seen_to_set: frozenset[tuple[type, str]] = frozenset()
    """Attributes of classes that a forward changed, beside those that were known."""

    def place(self) -> str:
        """``file:line`` that raised the error; if it was raised here, of the code that ran."""
        return raised_at(self.error) or self.location

    def summary(self) -> str:
        """The error in a line."""
        text = said(self.error or Exception()).strip().split("\n")[0][:300]
        return text if isinstance(self.error, TraceError) else f"{type(self.error).__name__}: {text}"


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What earlier attempts found out."""

    max_leaf_bytes: int | None = None
    """Modules with more bytes of weights and gradients are looked into; None = no such limit."""
    dynamic: frozenset[Varying] = frozenset()
    is_pure: bool = False
    """Whether code that changes anything in Python is refused."""
    needs: frozenset[Need] = frozenset()
    decisions: Mapping[str | type, Decision] = field(default_factory=dict)
    """By module or class; modules win."""
    reasons: Mapping[str | type, str] = field(default_factory=dict)
    tried: frozenset[tuple[str, Decision]] = frozenset()
    stateful: frozenset[str | type] = frozenset()
    """Modules, and their classes, whose forward changes Python state."""
    handing_on: frozenset[str | type] = frozenset()
    """Modules, and their classes, from whose attributes others take values in the same forward."""
    seen_to_set: frozenset[tuple[type, str]] = frozenset()

    def after(self, retry: Retry, model: nn.Module) -> Knowledge:
        """What is known after an attempt that failed.

        Raises:
            TraceError: nothing is left to try.
        """
        known = replace(self, seen_to_set=self.seen_to_set | retry.seen_to_set)
        if retry.need is not None:
            return replace(known, needs=self.needs | {retry.need})
        name, decision = retry.module, retry.decision
        if not name or decision is None:
            raise known.root_error(retry, model) from retry.error
        keys: set[str | type] = {name, type(model.get_submodule(name))}
        if retry.is_stateful:
            known = replace(known, stateful=self.stateful | keys)
        if retry.hands_on:
            known = replace(known, handing_on=self.handing_on | keys)
        if (name, decision) in self.tried:
            name, decision = _parent(model, name), Decision.LEAF
            if not name or (name, decision) in self.tried:
                raise known.root_error(retry, model) from retry.error
        kind = type(model.get_submodule(name))
        logger.debug("tracing again: %s is to be %s: %s", name, decision.value, retry.error)
        deciding: list[str | type] = [name] if is_of_torch(kind) else [name, kind]
        reason = f"{with_source(retry.place())}: {retry.summary()}"
        return replace(
            known,
            tried=self.tried | {(name, decision)},
            decisions={**self.decisions, **dict.fromkeys(deciding, decision)},
            reasons={**self.reasons, **dict.fromkeys(deciding, reason)},
        )

    def root_error(self, retry: Retry, model: nn.Module) -> TraceError:
        """The error of a model that can't be traced because of what ended an attempt."""
        location, error = retry.place(), retry.error
        cause = error.cause if isinstance(error, TraceError) else TraceCause.FORWARD_RAISES
        facts = error.facts if isinstance(error, TraceError) else TraceFacts(function=retry.function)
        file, _, line = location.rpartition(":")
        stateful = [name for name, module in model.named_modules() if {name, type(module)} & self.stateful]
        facts = replace(
            facts,
            file=file,
            line=int(line) if line.isdigit() else 0,
            source=source_at(location),
            module=retry.module,
            stateful=tuple(dict.fromkeys((*facts.stateful, *stateful, *[retry.module] * retry.is_stateful))),
        )
        words = f"at {with_source(location)}: {retry.summary().rstrip('.')}. {advice(cause, facts)}"
        return TraceError(f"can't trace {type(model).__name__}: {words}", cause, facts)

    def reason(self, name: str, kind: type) -> str:
        """Why the inside of a leaf was not traced."""
        return self.reasons.get(name) or self.reasons.get(kind) or "scripted code can't be looked into"


class Learned:
    """What the traces of one model have found out, with which the next begins."""

    def __init__(self) -> None:
        self.forget()

    def note(self, knowledge: Knowledge) -> None:
        """An attempt that knew this has succeeded."""
        self._latest = knowledge

    def forget(self) -> None:
        """From now on it is another model."""
        self._latest = Knowledge()

    def added_to(self, knowledge: Knowledge) -> Knowledge:
        """What is known before the first attempt of another trace of the same model: what to look into, and to do.

        What was kept whole may have been so for the sake of other arguments, as whose numbers data give.
        """
        latest = self._latest
        looked_into = {key: each for key, each in latest.decisions.items() if each is Decision.DESCEND}
        return replace(
            knowledge,
            needs=knowledge.needs | latest.needs - {Need.OWN_NUMBERS, Need.OWN_RATIOS},
            decisions=looked_into,
            reasons={key: latest.reasons[key] for key in looked_into},
            seen_to_set=latest.seen_to_set,
        )


def _parent(model: nn.Module, name: str) -> str:
    """The module around one, lists left out; empty if that is the root."""
    return next((above for above in holders_of(name) if not isinstance(model.get_submodule(above), _CONTAINERS)), "")


class LeafPolicy:
    """Decides for every module of one model.

    Args:
        hooked: names of modules with hooks of the user's, which fire only if the module is called.
    """

    def __init__(
        self, model: nn.Module, names: Mapping[nn.Module, str], knowledge: Knowledge, hooked: Collection[str] = ()
    ) -> None:
        self._names = names
        self._knowledge = knowledge
        self._hooked = frozenset(hooked)
        self._sizes: dict[nn.Module, int] = {}
        self._num_elements = {parameter: parameter.numel() for parameter in parameters_in(model)}
        """Asked for here, not in a run, where each call on a fake is looked at."""
        self._total = self._size(model)
        self._equal_blocks = self._blocks_of_long_stacks(model)
        self._answers: dict[nn.Module, bool] = {}

    def decision(self, module: nn.Module) -> Decision | None:
        """What tracing learned about the module or its class."""
        decisions = self._knowledge.decisions
        return decisions.get(self._names[module]) or decisions.get(type(module))

    def is_opaque(self, module: nn.Module) -> bool:
        """Whether what tracing learned, and not the rule, decides about a module that is kept whole."""
        decision = self.decision(module)
        return decision is not None and not (decision is Decision.LEAF and _is_torch_layer(module))

    def is_leaf(self, module: nn.Module) -> bool:
        if module not in self._answers:
            self._answers[module] = self._decide(module)
        return self._answers[module]

    def may_be_leaf(self, module: nn.Module) -> bool:
        """Whether a module could be kept whole although it is large: it holds no stack."""
        return module in self._equal_blocks or not _stacks_in(module)

    def is_too_large(self, module: nn.Module) -> bool:
        """Whether a module is larger than the caller's limit."""
        limit = self._knowledge.max_leaf_bytes
        return limit is not None and training_bytes_of(module) > limit

    def _decide(self, module: nn.Module) -> bool:
        name = self._names[module]
        if not name or isinstance(module, _CONTAINERS):
            return False
        decision = self.decision(module)
        if decision is not None:
            return decision is not Decision.DESCEND
        if _is_torch_layer(module) or (name in self._hooked and self.may_be_leaf(module)):
            return True
        if is_compiled(module) and self.may_be_leaf(module) and not self.is_too_large(module):
            return True
        size = self._size(module)
        if not size:
            return is_of_torch(type(module))
        if self._knowledge.is_pure:
            return False
        if not any(map(_has_parameters, module.children())):
            return True
        return size <= LARGEST_SHARE * self._total and not self.is_too_large(module) and self.may_be_leaf(module)

    def _size(self, module: nn.Module) -> int:
        if module not in self._sizes:
            known, parameters = self._num_elements, parameters_in(module)
            self._sizes[module] = sum(known[each] if each in known else each.numel() for each in parameters)
        return self._sizes[module]

    def _blocks_of_long_stacks(self, model: nn.Module) -> set[nn.Module]:
        """The blocks of stacks with many blocks of few kinds; the outermost stacks only."""
        blocks: set[nn.Module] = set()
        inside: set[nn.Module] = set()
        for stack in _stacks_in(model):
            kinds = {(type(block), self._size(block)) for block in stack}
            if len(stack) >= MANY_BLOCKS and len(kinds) <= 3 and stack[0] not in inside:
                blocks.update(stack)
                inside.update(inner for block in stack for inner in modules_in(block))
        return blocks


def _is_torch_layer(module: nn.Module) -> bool:
    return is_of_torch(type(module)) and not isinstance(module, _TORCH_STACKS)


def is_of_torch(kind: type) -> bool:
    """Whether a class of modules is torch's own; generated and compiled modules hold a user's code."""
    return kind.__module__.startswith(("torch.nn.", "torch.ao.", "torch.jit."))


def _has_parameters(module: nn.Module) -> bool:
    return any(parameter.numel() for parameter in module.parameters())


def _is_block(module: nn.Module) -> bool:
    """Whether a module has parameters in at least two children, or deeper than its children."""
    with_parameters = list(filter(_has_parameters, module.children()))
    return len(with_parameters) > 1 or any(_is_block(child) for child in with_parameters)


def _stacks_in(module: nn.Module) -> list[list[nn.Module]]:
    """The blocks of every list or sequence in a module, itself included, that has two or more."""
    stacks = (
        [child for child in inner.children() if _is_block(child)]
        for inner in modules_in(module)
        if isinstance(inner, (*_CONTAINERS, nn.Sequential)) and len(inner._modules) > 1
    )
    return [blocks for blocks in stacks if len(blocks) > 1]
