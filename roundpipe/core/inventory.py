"""What trees of modules hold: walked once, and again only when they hold something else.

A call asks for the modules, parameters and hooks that the call before asked for. To compare what is there with what was
there, whole lists at a time, takes a small part of a walk, and hardly any Python.
"""

from __future__ import annotations

import functools
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn

from roundpipe.core.module_tree import buffers_in, is_in_torchs_order, modules_in, parameters_at, parameters_in

_TABLES = operator.itemgetter("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks")
_FORM = operator.attrgetter("shape", "dtype", "requires_grad")
_VALUES = operator.methodcaller("values")
_TRAINING = operator.itemgetter("training")
_OF_TORCH = nn.Module.named_parameters, nn.Module.named_buffers


class Inventory:
    """What some trees of modules hold now, each of which begins at one of ``roots``."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self._roots = tuple(roots)
        self.modules = list(dict.fromkeys(chain.from_iterable(map(modules_in, self._roots))))
        """Of all trees, each once."""
        self._own = [module.__dict__ for module in self.modules]
        self._kinds = list(map(type, self.modules))
        self.kinds = frozenset(self._kinds)
        """Classes of the modules."""
        self._is_plain = all(map(_is_plain, self.modules))
        if self._is_plain:
            self._note_tables()

    def _note_tables(self) -> None:
        tables = list(map(_TABLES, self._own))
        self._tables = list(chain.from_iterable(tables))
        held = [table for own in tables for table in own[:3]]
        self._hooks = [table for own in tables for table in own[3:]]
        self._empty = [table for table in held if not table]
        self._full = [table for table in held if table]
        self._lengths = list(map(len, self._full))
        self._names = list(chain.from_iterable(self._full))
        self._held = list(chain.from_iterable(map(_VALUES, self._full)))

    def is_current(self) -> bool:
        """Whether the trees still have these modules, of these classes, with these parameters and buffers in order.

        Values and forms of tensors may differ, and so may hooks.
        """
        if not self._is_plain:
            return False
        try:
            tables = chain.from_iterable(map(_TABLES, self._own))
            return (
                not any(self._empty)
                and list(map(len, self._full)) == self._lengths
                and all(map(operator.is_, chain.from_iterable(map(_VALUES, self._full)), self._held))
                and list(chain.from_iterable(self._full)) == self._names
                and list(map(type, self.modules)) == self._kinds
                and all(map(operator.is_, tables, self._tables))
            )
        except KeyError:  # a module has lost one of its tables
            return False

    def now(self) -> Inventory:
        """This one if it is current, else another."""
        return self if self.is_current() else Inventory(self._roots)

    def has_hooks(self) -> bool:
        """Whether a module may have forward hooks now."""
        return not self._is_plain or any(self._hooks)

    def modes(self) -> list[bool]:
        """Of each module, whether it is in training mode now."""
        return list(map(_TRAINING, self._own)) if self._is_plain else [module.training for module in self.modules]

    def forms(self) -> list[Any]:
        """Shape, dtype and ``requires_grad`` of each tensor now."""
        return list(map(_FORM, self.tensors))

    @functools.cached_property
    def tensors(self) -> list[torch.Tensor]:
        """All parameters and buffers, shared ones at least once."""
        return [*chain.from_iterable(self.parameters), *chain.from_iterable(map(buffers_in, self._roots))]

    @functools.cached_property
    def parameters(self) -> list[list[nn.Parameter]]:
        """Those of each tree, shared ones once in each."""
        return list(map(parameters_in, self._roots))

    @functools.cached_property
    def named_parameters(self) -> tuple[tuple[str, nn.Parameter], ...]:
        """Those of all trees, shared ones at each of their names."""
        return tuple(chain.from_iterable(map(parameters_at, self._roots)))

    @functools.cached_property
    def buffers(self) -> list[torch.Tensor]:
        """Those of all trees, shared ones once."""
        found = {id(each): each for root in self._roots for each in buffers_in(root)}
        return list(found.values())


def _is_plain(module: nn.Module) -> bool:
    """Whether a module's tables and mode are torch's own, which tell everything, and its class walks as torch does."""
    tables = [module.__dict__.get(name) for name in ("_modules", "_parameters", "_buffers")]
    kind = type(module)
    walks_as_torch = is_in_torchs_order(kind) and (kind.named_parameters, kind.named_buffers) == _OF_TORCH
    has_own = "training" in module.__dict__  # one that torch has compiled asks another
    return has_own and all(type(table) in (dict, OrderedDict) for table in tables) and walks_as_torch


def kept(root: nn.Module) -> Callable[[], Inventory]:
    """Asks what a tree holds now, from one time to the next."""
    known = Inventory([root])

    def now() -> Inventory:
        nonlocal known
        known = known.now()
        return known

    return now


_OF_CHILDREN = "_roundpipe_inventory"
"""An attribute. In a table by owner it would keep an owner that a hook of its children refers to."""


def of_children(owner: nn.Sequential) -> Inventory:
    """The inventory of the children's trees as they are now; the owner keeps it."""
    children, known = list(owner), owner.__dict__.get(_OF_CHILDREN)
    if known is None or not _is_of(known, children) or not known.is_current():
        known = owner.__dict__[_OF_CHILDREN] = Inventory(children)
    return known


def _is_of(inventory: Inventory, roots: list[nn.Module]) -> bool:
    return len(inventory._roots) == len(roots) and all(map(operator.is_, inventory._roots, roots))
