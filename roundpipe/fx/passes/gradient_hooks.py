"""Whether what a hook makes of a gradient adds up over microbatches: whether it is a linear function of the gradient.

A hook of a parameter runs for each microbatch, on its part of the gradient. What clamps or normalises then makes
something else of the parts than of the whole.

The hook runs on a fake of the gradient, if it does nothing but compute with tensors and numbers. Operators that are
not known here, and those that take the gradient twice or add to it, are not linear.
"""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Mapping
from typing import Any

import torch

from roundpipe.core.allocations import TorchDispatchMode
from roundpipe.core.trees import PLAIN
from roundpipe.effects.uses import function_of
from roundpipe.fx.fakes import code_at_other_sizes, fake_of, is_fake, static_mode
from roundpipe.fx.sizes import flat_tensors

_OF_ONE = frozenset(
    (
        "neg neg_ clone detach _to_copy alias lift_fresh contiguous view _unsafe_view reshape t transpose permute "
        "expand squeeze unsqueeze slice select index index_select gather narrow split chunk unbind flip roll tril triu "
        "diagonal sum mean cumsum real imag conj"
    ).split()
)
"""Operators that are linear in their first tensor, with the others as they are."""
_PRODUCTS = frozenset("mul mul_ mm bmm matmul mv dot outer einsum".split())
"""Those that are linear in each of two tensors."""
_QUOTIENTS = frozenset(("div", "div_"))
_SUMS = frozenset("add add_ sub sub_ cat stack".split())
"""Of tensors that are all linear."""
_FILLS = frozenset("fill_ masked_fill masked_fill_ index_fill index_fill_".split())
"""With a number behind all else."""
_UNCLEAR = frozenset(
    "index_put index_put_ scatter scatter_ masked_scatter masked_scatter_ index_copy index_copy_".split()
)
"""Linear if what is written is zero."""
_ZEROS = frozenset("zeros_like new_zeros zero_".split())
_HARMLESS = (abs, bool, float, int, len, max, min, pow, range, round, sum, tuple, isinstance, slice)
_MAX_DEPTH = 3


def adds_up(hook: Any, parameter: torch.Tensor) -> bool | None:
    """Whether the sum of what a hook makes of parts of a gradient is what it makes of their sum; None: not known.

    Args:
        hook: takes a gradient, and returns another one, or None: that of before, with what was written into it.
        parameter: whose gradients it gets.
    """
    mode = static_mode()
    try:
        if not _only_computes(hook):
            return None
        with code_at_other_sizes(), torch.no_grad(), mode:
            gradient = fake_of(mode, parameter.detach(), torch.device("cpu"))
            watch = _LinearWatch(gradient)
            with watch:
                made = hook(gradient)
    except Exception:  # such as of data that a fake lacks, or a variable that has no value yet
        return None
    return None if watch.is_unclear else watch.is_linear(gradient if made is None else made)


class _LinearWatch(TorchDispatchMode):
    """Follows what is a linear function of one tensor."""

    def __init__(self, gradient: torch.Tensor) -> None:
        super().__init__()
        self._linear = {id(gradient): True}
        """Of tensors that the gradient is in, by identity: whether they are."""
        self._alive = [gradient]
        self.is_unclear = False
        """Whether it has run an operator of which this does not tell."""

    def is_linear(self, made: Any) -> bool:
        """Whether a result is; one that the gradient is not in is none."""
        return isinstance(made, torch.Tensor) and self._linear.get(id(made), False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable and not all(map(is_fake, flat_tensors(kwargs.get("out", args[:1])))):
            self.is_unclear = True
            raise ValueError("it writes what is the user's, such as an average of gradients")
        out = func(*args, **kwargs)
        name, inputs = func._schema.name.partition("::")[2], flat_tensors(args, kwargs)
        known = [self._linear.get(id(tensor)) for tensor in inputs]
        if any(each is not None for each in known):
            linear = self._keeps(name, args, known)
            for tensor in (*flat_tensors(out), *(inputs[:1] if func._schema.is_mutable else ())):
                self._linear[id(tensor)] = linear
                self._alive.append(tensor)
                if func._schema.is_mutable and tensor._base is not None:
                    self._linear[id(tensor._base)] = linear and self._linear.get(id(tensor._base), True)
        return out

    def _keeps(self, name: str, args: Any, known: list[bool | None]) -> bool:
        """Whether an operator's result is linear, given what is known of its tensors."""
        if False in known:
            return False
        if name in _ZEROS:
            return True
        self.is_unclear |= name in _UNCLEAR or name == "where" and known[1:] != [True, True]
        if name in _FILLS:
            return known[0] is True and known.count(True) == 1 and args[-1] == 0
        if name in _SUMS:
            return all(known) and (len(known) > 1 or name in ("cat", "stack"))
        if name in _PRODUCTS:
            return known.count(True) == 1
        if name in _QUOTIENTS:
            return known[0] is True and known.count(True) == 1
        if name == "where":
            return len(known) == 3 and known[0] is None and known[1:] == [True, True]
        return name in _OF_ONE and known[0] is True and known.count(True) == 1


def _only_computes(hook: Any, depth: int = 0) -> bool:
    """Whether a function names nothing but numbers, tensors, torch, and functions of that kind."""
    if inspect.ismethod(hook) or not isinstance(function := function_of(hook), types.FunctionType):
        return False
    named = inspect.getclosurevars(function)
    if named.unbound - _METHODS or not all(each in _HARMLESS for each in named.builtins.values()):
        return False
    values: Mapping[str, Any] = {**named.nonlocals, **named.globals}
    return all(_is_plain(value, depth) for value in values.values())


_MODULES = (torch, math, torch.nn.functional, torch.linalg)
_METHODS = frozenset(name for owner in (torch.Tensor, *_MODULES) for name in dir(owner))
"""What code may name that is no variable: attributes."""


def _is_plain(value: Any, depth: int) -> bool:
    if isinstance(value, (torch.Tensor, *PLAIN)) or any(value is each for each in _MODULES):
        return True
    if callable(value) and _is_torchs(value):
        return True
    return depth < _MAX_DEPTH and isinstance(value, types.FunctionType) and _only_computes(value, depth + 1)


def _is_torchs(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] in ("torch", "math")
