"""Code that is generated from graphs: modules, functions that serve all copies of a module, and sizes as keys."""

from __future__ import annotations

import copy
import linecache
import threading
import weakref
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.fx import Graph, GraphModule
from torch.fx.graph_module import _loader

from roundpipe.core import trees

_WRITING = threading.Lock()
"""Held while code is written: torch.fx gives sources their names without one, and workers write some when they run."""


class Generated(GraphModule):
    """Code generated from a graph; exceptions pass through as they are, copies share it."""

    def recompile(self) -> Any:
        """Writes ``forward`` from the graph."""
        with _WRITING:
            code = super().recompile()
        # torch.fx wraps calls to print errors and cut their tracebacks; a user's error must stay whole.
        del type(self).__call__
        # which keeps its source for ever
        weakref.finalize(type(self), _forget_source, type(self).forward.__code__.co_filename).atexit = False
        return code

    def __copy__(self) -> Self:
        clone: Self = object.__new__(type(self))
        clone.__dict__ = dict(self.__dict__)
        for kind in ("_parameters", "_buffers", "_modules"):
            clone.__dict__[kind] = dict(self.__dict__[kind])
        return clone

    def __deepcopy__(self, memo: dict[int, Any] | None) -> Self:
        memo = {} if memo is None else memo
        clone: Self = object.__new__(type(self))
        memo[id(self)] = clone
        memo[id(self._graph)] = self._graph
        clone.__dict__ = copy.deepcopy(self.__dict__, memo)
        return clone


def _forget_source(name: str) -> None:
    _loader.eval_cache.pop(name, None)
    linecache.cache.pop(name, None)


@dataclass(frozen=True, slots=True)
class GeneratedFunction:
    """The code of a generated class, whose source is known as long as the class is there."""

    kind: type[Generated]

    @classmethod
    def of(cls, root: nn.Module, graph: Graph) -> Self:
        """The function that a graph is the code of, whose first argument is the module that has its targets."""
        made = Generated(root, graph, class_name="Program")
        graph.owning_module = None  # else they keep each other alive, and what the root has on a device
        return cls(type(made))

    def __call__(self, root: nn.Module, *values: Any) -> Any:
        return self.kind.forward(root, *values)


def sizes_key(values: Iterable[Any]) -> Hashable:
    """Equal for values whose tensors have the same sizes and types, and all else that sizes are made of is the same."""
    return tuple(
        (tuple(leaf.shape), leaf.dtype)
        if isinstance(leaf, torch.Tensor)
        else leaf
        if type(leaf) in trees.PLAIN
        else type(leaf)
        for value in values
        for leaf in trees.leaves(value)
    )
