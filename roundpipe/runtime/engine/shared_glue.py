"""Glue on the device that the layers of one stage visit share: masks, rotary tables, positions.

Layers make it of arguments and constants alone, each for itself. Within a visit, what one layer has made is given to
the others, as long as it is made of the same: of sizes, then all microbatches share it, or of values of one microbatch.

Invariant: no layer sees what another one has written into it, and no gradient flows through it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.layers import Carry, Glue, LayerSpec, MakesGlue


@dataclass(frozen=True, slots=True)
class _MadeGlue:
    key: Hashable
    sources: list[Any]
    """What its key has identities of."""
    value: Any
    versions: list[int]
    """How often its tensors had been written."""
    is_shared: bool
    """Whether it can be given: no gradient flows through it."""

    def is_of(self, key: Hashable) -> bool:
        return self.key == key and (not self.is_shared or self.versions == _versions(self.value))


class SharedGlue:
    """That of one visit; ``stays`` says whether a tensor is there for all its microbatches."""

    def __init__(self, stays: Callable[[torch.Tensor], bool]) -> None:
        self._stays = stays
        self._made: dict[str, _MadeGlue] = {}

    def given(self, layer: nn.Module, spec: LayerSpec, carry: Carry) -> Carry:
        """A layer's carry, with its glue."""
        # a microbatch has None for what only others read, those of another trace
        own = (glue for glue in spec.glue if not any(carry[name] is None for name in glue.reads))
        made = {glue.name: self._value(glue, layer, carry) for glue in own}
        return {**carry, **{name: each.value for name, each in made.items() if each.is_shared}}

    def end_microbatch(self) -> None:
        """Let go of what is made of one microbatch's values."""
        self._made = {name: made for name, made in self._made.items() if all(map(self._is_kept, made.sources))}

    def _is_kept(self, source: Any) -> bool:
        return isinstance(source, torch.Tensor) and self._stays(source)

    def _value(self, glue: Glue, layer: nn.Module, carry: Carry) -> _MadeGlue:
        sources: list[Any] = []
        key = tuple(_key(carry[name], name in glue.sizes_of, sources) for name in glue.reads)
        known = self._made.get(glue.name)
        if known is None or not known.is_of(key):
            value = cast(MakesGlue, layer).make_glue(glue.name, carry)
            is_shared = not any(tensor.requires_grad for tensor in trees.tensors(value))
            known = _MadeGlue(key, sources, value if is_shared else None, _versions(value), is_shared)
            self._made[glue.name] = known
        return known


def _key(value: Any, only_sizes: bool, sources: list[Any]) -> Hashable:
    """Equal for values of which glue is the same, as long as those put into ``sources`` live."""
    parts: list[Hashable] = []
    for leaf in trees.leaves(value):
        if isinstance(leaf, trees.PLAIN):
            parts.append((type(leaf), leaf))
        elif only_sizes and isinstance(leaf, torch.Tensor):
            parts.append((tuple(leaf.shape), leaf.dtype))
        else:
            sources.append(leaf)
            parts.append(id(leaf))
    return tuple(parts)


def _versions(value: Any) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in trees.tensors(value)]
