"""Which modules stay whole in the graph (leaves) and which are looked into.

A leaf runs its author's Python at run time, so leaves are safe; a chain can only be cut between
nodes, so leaves must be small. The rule, for a module that isn't a container:

    its class says so        torch's own layers are leaves, torch's own stacks are not
    it has a user's hook     leaf, so that the hook fires at run time, unless it holds a stack
    it has no parameters     look inside (masks, rotary tables: glue that can be recomputed)
    it holds a stack         look inside; a stack is a list of two or more modules that have
                             parameters and children with parameters themselves (blocks). One of
                             12 or more like blocks may hold a stack of its own (experts)
    it is large              more than 1/6 of the model, or than the caller's limit: look inside
    otherwise                leaf

What tracing finds out overrides the rule, by module or by class: see `Decision`.

Invariant: the answer for a module depends on the model's structure and the decisions only.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping

from torch import nn

from roundpipe.core.module_tree import training_bytes_of

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


class LeafPolicy:
    """Decides for every module of one model.

    Args:
        decisions: module name or class -> what tracing learned; names win.
        max_leaf_bytes: a leaf with more bytes of weights and gradients is looked into; None = no such limit.
        hooked: names of modules with forward hooks of the user's, which fire only if the module is called.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Mapping[nn.Module, str],
        decisions: Mapping[str | type, Decision],
        max_leaf_bytes: int | None = None,
        hooked: Collection[str] = (),
    ) -> None:
        self._names = names
        self._decisions = decisions
        self._max_leaf_bytes = max_leaf_bytes
        self._hooked = frozenset(hooked)
        self._total = _num_parameters(model)
        self._equal_blocks = _blocks_of_long_stacks(model)
        self._answers: dict[nn.Module, bool] = {}

    def decision(self, module: nn.Module) -> Decision | None:
        """What tracing learned about the module or its class."""
        return self._decisions.get(self._names[module]) or self._decisions.get(type(module))

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
        return self._max_leaf_bytes is not None and training_bytes_of(module) > self._max_leaf_bytes

    def _decide(self, module: nn.Module) -> bool:
        if not self._names[module] or isinstance(module, _CONTAINERS):
            return False
        decision = self.decision(module)
        if decision is not None:
            return decision is not Decision.DESCEND
        if _is_torch_layer(module) or (self._names[module] in self._hooked and self.may_be_leaf(module)):
            return True
        size = _num_parameters(module)
        if not size:
            return is_of_torch(type(module))
        if not any(_num_parameters(child) for child in module.children()):
            return True
        return self.may_be_leaf(module) and not self.is_too_large(module) and size <= LARGEST_SHARE * self._total


def _is_torch_layer(module: nn.Module) -> bool:
    return is_of_torch(type(module)) and not isinstance(module, _TORCH_STACKS)


def is_of_torch(kind: type) -> bool:
    """Whether a class of modules is torch's own; generated and compiled modules hold a user's code."""
    return kind.__module__.startswith(("torch.nn.", "torch.ao.", "torch.jit."))


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _is_block(module: nn.Module) -> bool:
    """Whether a module has parameters in at least two children, or deeper than its children."""
    with_parameters = [child for child in module.children() if _num_parameters(child)]
    return len(with_parameters) > 1 or any(_is_block(child) for child in with_parameters)


def _stacks_in(module: nn.Module) -> list[list[nn.Module]]:
    """The blocks of every list or sequence in a module, itself included, that has two or more."""
    stacks = (
        [child for child in inner.children() if _is_block(child)]
        for inner in module.modules()
        if isinstance(inner, (*_CONTAINERS, nn.Sequential))
    )
    return [blocks for blocks in stacks if len(blocks) > 1]


def _blocks_of_long_stacks(model: nn.Module) -> set[nn.Module]:
    """The blocks of stacks with many blocks of few kinds; the outermost stacks only."""
    blocks: set[nn.Module] = set()
    inside: set[nn.Module] = set()
    for stack in _stacks_in(model):
        kinds = {(type(block), _num_parameters(block)) for block in stack}
        if len(stack) >= MANY_BLOCKS and len(kinds) <= 3 and stack[0] not in inside:
            blocks.update(stack)
            inside.update(inner for block in stack for inner in block.modules())
    return blocks
