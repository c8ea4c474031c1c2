"""What a loss function leaves behind in Python, as far as a graph can give it: tensors, sizes and plain values.

They are found after a run on fakes. A second run starts from what the first has left, with `Unreadable` in place of the
values, and must do the very same: then nothing that is left there is read.
"""

from __future__ import annotations

import copy
import functools
import math
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.effects.kept import Kept, KeptHolder
from roundpipe.effects.places import CONTAINER, REGISTERED, Place, contents
from roundpipe.effects.snapshot import ModuleSnapshot, PythonSnapshot
from roundpipe.fx.graph.nodes import hint
from roundpipe.fx.sizes import Symbolic
from roundpipe.fx.world import FakeWorld

MOST_ELEMENTS = 1 << 16
"""Of a tensor that is kept: it stays in memory until the call ends, and no plan counts on it."""
_MAX_DEPTH = 3
"""Of containers in a module's attributes, of which a twin has copies."""


class Unreadable:
    """Stands for a value that may be handed on, and that nobody may look at.

    Args:
        refuse: raises for whatever else is done with it.
    """

    __slots__ = ("_refuse",)  # without attributes of its own it is a leaf of any structure

    def __init__(self, refuse: Callable[[], NoReturn]) -> None:
        self._refuse = refuse

    def _is_asked(self, *_: Any) -> NoReturn:
        self._refuse()

    __bool__ = __int__ = __float__ = __index__ = __complex__ = __round__ = __format__ = __str__ = __repr__ = _is_asked
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __len__ = __iter__ = __getitem__ = _is_asked
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _is_asked
    __pow__ = __rpow__ = __neg__ = __abs__ = __contains__ = _is_asked

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()


class NumberOfTensor(Unreadable):
    """What ``item()`` gives for an activation while a loss is traced; arithmetic with it is that of tensors."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor, refuse: Callable[[], NoReturn]) -> None:
        super().__init__(refuse)
        self.tensor = tensor

    def _computed(self, function: Callable[..., torch.Tensor], *operands: Any) -> Any:
        values = [each._as_wide() if isinstance(each, NumberOfTensor) else each for each in operands]
        if not all(isinstance(each, (torch.Tensor, int, float, *Symbolic)) for each in values):
            self._refuse()
        tensor = next((each for each in operands if isinstance(each, torch.Tensor)), None)
        if tensor is None:
            return NumberOfTensor(function(*values), self._refuse)
        made = function(*(_widened(each) if each is tensor else each for each in values))
        return made.to(tensor.dtype) if tensor.is_floating_point() else made  # which a number does not change

    def _as_wide(self) -> torch.Tensor:
        tensor = _widened(self.tensor.detach())
        return tensor.long() if tensor.dtype == torch.bool else tensor

    @staticmethod
    def _both_ways(function: Callable[..., torch.Tensor]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Methods that compute something with the number on the left, and on the right."""
        return (
            lambda number, other: number._computed(function, number, other),
            lambda number, other: number._computed(function, other, number),
        )

    def __neg__(self) -> Any:
        return self._computed(operator.neg, self)

    def __abs__(self) -> Any:
        return self._computed(operator.abs, self)

    __add__, __radd__ = _both_ways(operator.add)
    __sub__, __rsub__ = _both_ways(operator.sub)
    __mul__, __rmul__ = _both_ways(operator.mul)
    __truediv__, __rtruediv__ = _both_ways(operator.truediv)
    __pow__, __rpow__ = _both_ways(operator.pow)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """In a dtype in which sums and products are about those of Python's numbers."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


KeptHolders = dict[int, KeptHolder]
"""By identity of a container that a run sees, the user's own."""


class KeptOnFakes:
    """One value that a run on fakes left in what it saw as the holder."""

    def __init__(self, place: Kept, seen: Any, value: Any) -> None:
        self.place = place
        self.value = value
        self._seen = seen

    def is_in(self, holder: Any, key: Any) -> bool:
        """Whether it is left under a key of this dict."""
        place = self.place
        return place.view is None and not place.is_appended and self._seen is holder and place.key == key

    def put_unread(self, refuse: Callable[[], NoReturn]) -> KeptHolders:
        """Put what nobody may look at where the run has left values; gives the containers for them."""
        value = trees.map_leaves(self.value, lambda _: Unreadable(refuse))
        replace(self.place, holder=KeptHolder(lambda: self._seen)).put(value)
        if self.place.is_appended or self.place.view is not None:
            return {}
        return {id(each): self.place.inside(path, _emptied(self.value)) for path, each in _containers(value)}

    def form(self) -> Any:
        """Equal for what another run leaves in its place."""
        return trees.map_leaves(self.value, _form)


def are_alike(first: Sequence[KeptOnFakes], second: Sequence[KeptOnFakes]) -> bool:
    """Whether two runs have left values of the same forms at the same places.

    Where the first has put a container with values, the second may have left them in that.
    """
    others = iter([each for each in second if each.place.holder.around is None])
    for each in first:
        own = [other for other in second if other.place.holder.around is each.place]
        form = None
        if own:
            form = _filled(_emptied(each.value), own)
        elif (other := next(others, None)) is not None and each.place.has_same_place(other.place):
            form = other.form()
        if not _are_same(form, each.form()):
            return False
    return next(others, None) is None


def _filled(value: Any, parts: Sequence[KeptOnFakes]) -> Any:
    """A container with what a run has left in it, and in containers inside it."""
    with suppress(LookupError):
        for each in parts:
            holder = KeptHolder(partial(functools.reduce, operator.getitem, each.place.holder.path, value))
            replace(each.place, holder=holder).put(each.form())
    return value


def _are_same(form: Any, other: Any) -> bool:
    return type(form) is type(other) and dict(trees.walk(form)) == dict(trees.walk(other))


def _emptied(value: Any) -> Any:
    """Containers without the values in them; None for a value."""
    if not isinstance(value, (dict, list, deque)):
        return None
    empty: Any = copy.copy(value)
    empty.clear()
    if isinstance(value, dict):
        empty.update({key: inside for key, item in value.items() if (inside := _emptied(item)) is not None})
    else:
        empty.extend(inside for inside in map(_emptied, value) if inside is not None)
    return empty


def find_kept(
    world: FakeWorld, modules: ModuleSnapshot, python: PythonSnapshot, left: KeptHolders
) -> tuple[list[KeptOnFakes], list[str]]:
    """What a run has left since modules and Python were looked at, and in words what else it has changed.

    Args:
        left: containers that an earlier run has left.
    """
    found: list[KeptOnFakes] = []
    lost: list[str] = []
    holders = _copies(world) | left
    for change in modules.diff():
        words = f"{type(change.module).__name__}.{change.name}"
        if _may_be_kept(change.now):
            at = Kept(words, _holder(change.module.__dict__, holders), change.name)
            found.append(KeptOnFakes(at, change.module.__dict__, change.now))
        else:
            lost.append(words)
    for place in python.diff():
        if place.by_hooks:
            continue
        values = list(_values(place, holders))
        if values and all(_may_be_kept(each.value) for each in values):
            found += values
        else:
            lost.append(place.words)
    return found, lost


def _values(place: Place, holders: KeptHolders) -> Iterator[KeptOnFakes]:
    """What a place has got; nothing if it has changed otherwise."""
    owner, held, words = place.owner, place.held, place.words
    if place.view.kind in ("cell", "global"):
        yield KeptOnFakes(Kept(words, KeptHolder(lambda: owner), place.key, place.view), owner, place.now())
    elif place.view is CONTAINER:
        now, holder = contents(owner), _holder(owner, holders)
        if isinstance(now, dict) and held.keys() <= now.keys():
            for key, value in now.items():
                if key not in held or not trees.same(held[key], value):
                    yield KeptOnFakes(Kept(f"{words}[{key!r}]", holder, key), owner, value)
        elif isinstance(now, (list, deque)) and len(now) > len(held) and all(map(trees.same, held, now)):
            for value in list(now)[len(held) :]:
                yield KeptOnFakes(Kept(words, holder, is_appended=True), owner, value)


def _holder(seen: Any, holders: KeptHolders) -> KeptHolder:
    return holders.get(id(seen)) or KeptHolder(lambda: seen)


def _copies(world: FakeWorld) -> KeptHolders:
    """Containers that the world's twin has copies of."""
    found: KeptHolders = {}
    for twin, module in world.real_module.items():
        found[id(twin.__dict__)] = KeptHolder(partial(getattr, module, "__dict__"))
        for name, value in twin.__dict__.items():
            if name not in REGISTERED and value is not module.__dict__.get(name):
                for path, container in _containers(value):
                    found[id(container)] = KeptHolder(partial(_at, module, (name, *path)))
    return found


def _containers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, (dict, list, deque)):
        yield path, value
        items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in list(items) if len(path) < _MAX_DEPTH else ():
            yield from _containers(item, (*path, key))


def _at(module: nn.Module, path: tuple[Any, ...]) -> Any:
    return functools.reduce(operator.getitem, path, module.__dict__)


def _may_be_kept(value: Any) -> bool:
    leaves = trees.leaves(value)
    return all(isinstance(leaf, (torch.Tensor, NumberOfTensor, *Symbolic, *trees.PLAIN)) for leaf in leaves) and all(
        math.prod(map(hint, tensor.shape)) <= MOST_ELEMENTS for tensor in trees.tensors(value)
    )


def _form(leaf: Any) -> Any:
    """Equal for what a second run leaves in place of a leaf."""
    return type(leaf).__name__ if isinstance(leaf, (torch.Tensor, NumberOfTensor, *Symbolic)) else leaf
