"""What a ``step_fn`` does with tensors of the host works on as if the optimizer's copies were there, too.

It was written for copies on the host and may keep averages of them, or noise to add, in tensors of its own. Operations
that have tensors of several places run in one of them, with the results, and the writes, that they have on the host.

To look at each of them, and at each attribute of a tensor, takes longer than a small model's update. While torch's own
optimizers are at it nobody looks: what they are given is where the copies are.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from roundpipe.core import trees
from roundpipe.core.allocations import TorchDispatchMode
from roundpipe.core.contexts import contextmanager
from roundpipe.core.watched import unseen

_BETWEEN = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default, torch.ops.aten._foreach_copy_.default)
"""Operators that take tensors of two places as they are."""
_TENSOR: Any = torch.Tensor
_SETTERS: frozenset[Any] = frozenset((_TENSOR.grad.__set__, _TENSOR.data.__set__))
_OF_THE_HOST: frozenset[Any] = frozenset((torch.Tensor.numpy, torch.Tensor.__array__))
_LOOKED_AT = _SETTERS | _OF_THE_HOST


class HostMix(TorchDispatchMode):
    """Sees operators with tensors of a device and of the host, or of several devices."""

    def __init__(self, devices: Collection[torch.device]) -> None:
        super().__init__()
        self.devices = devices
        self.has_mixed = False
        """Whether tensors of the host were used with those of a device, other than scalars."""
        self.looks = True
        """Whether operators may have tensors of several places."""
        self.step = contextlib.ExitStack()
        """What ends with the step of an optimizer."""

    def is_there(self, tensor: torch.Tensor) -> bool:
        return tensor.device in self.devices

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.to(device)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.looks or func in _BETWEEN:
            return func(*args, **kwargs)
        tensors = trees.tensors((args, kwargs))
        there = [tensor for tensor in tensors if self.is_there(tensor)]
        here = [tensor for tensor in tensors if tensor.is_cpu and not self.is_there(tensor)]
        is_apart = len({tensor.device for tensor in there}) > 1 and not _is_each_by_itself(func, args, kwargs)
        if not there or not (here or is_apart):
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        in_list = {id(tensor) for tensor in _listed(func, args, kwargs)}
        has_mixed = any(tensor.ndim or id(tensor) in written for tensor in here)  # a scalar goes with any tensor
        joins = not in_list.isdisjoint(map(id, here))  # but for where it is joined with others, such as norms
        if not (has_mixed or joins or is_apart):
            return func(*args, **kwargs)
        self.has_mixed |= has_mixed
        written_there = [tensor.device for tensor in there if id(tensor) in written]
        on_host = (has_mixed or joins) and not written_there
        return self._run(func, args, kwargs, written, None if on_host else (*written_there, there[0].device)[0])

    def _run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: set[int], device: torch.device | None
    ) -> Any:
        """Run an operator on a device, or on the host."""
        moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def move(tensor: torch.Tensor) -> torch.Tensor:
            is_there = self.is_there(tensor)
            if not is_there if device is None else is_there and tensor.device == device:
                return tensor
            other = self.to_host(tensor) if device is None else self.to_device(tensor, device)
            return moved.setdefault(id(tensor), (tensor, other))[1]

        result = func(*trees.map_tensors(args, move), **trees.map_tensors(kwargs, move))
        originals = {id(other): tensor for tensor, other in moved.values()}
        for tensor, other in moved.values():
            if id(tensor) in written:
                tensor.copy_(other)
        return trees.map_tensors(result, lambda tensor: originals.get(id(tensor), tensor))


def _is_each_by_itself(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator takes lists of tensors one by one, each with those at its place in other lists."""
    values = (*args, *kwargs.values())
    return func.name().startswith("aten::_foreach_") and not any(isinstance(each, torch.Tensor) for each in values)


def _listed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operator joins, as it has them in a list."""
    values = () if _is_each_by_itself(func, args, kwargs) else (*args, *kwargs.values())
    return trees.tensors([each for each in values if isinstance(each, list | tuple)])


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """The identities of tensors that an operator writes."""
    schema = func._schema.arguments
    given = {argument.name: value for argument, value in zip(schema, args, strict=False)} | kwargs
    names = [argument.name for argument in schema if argument.alias_info and argument.alias_info.is_write]
    return {id(tensor) for name in names for tensor in trees.tensors(given.get(name))}


class _HostOnly(TorchFunctionMode):
    """What torch does with tensors of the host alone, done with those of a device."""

    def __init__(self, mix: HostMix) -> None:
        super().__init__()
        self._mix = mix

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _LOOKED_AT:  # an update asks for thousands of attributes
            return func(*args, **kwargs) if kwargs else func(*args)
        mix = self._mix
        if func in _OF_THE_HOST and mix.is_there(args[0]):
            mix.has_mixed = True
            args = (mix.to_host(args[0].detach()), *args[1:])
        elif func in _SETTERS and isinstance(args[1], torch.Tensor) and mix.is_there(args[0]):
            if not mix.is_there(args[1]):
                mix.has_mixed = True
                args = (args[0], mix.to_device(args[1], args[0].device))
        return func(*args, **(kwargs or {}))


class _Open(threading.local):
    mix: HostMix | None = None
    """What a thread is in."""


_OPEN = _Open()


@contextmanager
def as_on_host(devices: Collection[torch.device]) -> Iterator[HostMix]:
    """While open, tensors of some devices may be used with each other and with those of the host."""
    mix = _OPEN.mix = HostMix(devices)
    with contextlib.ExitStack() as stack:
        stack.callback(delattr, _OPEN, "mix")
        stack.enter_context(mix)
        stack.enter_context(_HostOnly(mix))
        stack.enter_context(mix.step)  # one that raised has not come to its end
        yield mix


@contextmanager
def torchs_own() -> Iterator[None]:
    """While open, what runs in this thread is torch's, of tensors of one place, and is not looked at."""
    mix = _OPEN.mix
    if mix is None or not mix.looks:
        yield
        return
    mix.looks = False
    try:
        with unseen():
            yield
    finally:
        mix.looks = True


def begin_torchs_own() -> None:
    """Open `torchs_own` up to `end_torchs_own`."""
    if (mix := _OPEN.mix) is not None:
        mix.step.enter_context(torchs_own())


def end_torchs_own() -> None:
    """Close what `begin_torchs_own` has opened, if it has."""
    if (mix := _OPEN.mix) is not None:
        mix.step.close()
