"""Operators on fakes of one form are inferred once: what a call gave, by all of it that can change the outcome.

Torch infers an operator on symbolic sizes for milliseconds, and its own cache asks about each size. The blocks of a
model call the same operators on fakes of the same sizes.

Invariant: what a recalled call took for granted about sizes is heard of as if it were inferred again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from roundpipe.core.watched import unseen
from roundpipe.fx.sizes import Noted, ShapeWorld, Symbolic, expression_of, expressions_of, is_data_dependent

_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class Form(NamedTuple):
    """What a fake is beside its memory."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    """Of its first element in its memory."""
    num_bytes: Any
    """Of its memory."""
    dtype: torch.dtype
    device: torch.device


class Output(NamedTuple):
    """A tensor that an operator gives."""

    form: Form
    source: int | None
    """Which of the tensors among its arguments it lies in; None: in memory of its own."""


@dataclass(slots=True)
class _Inferred:
    """What a call gave, and what it asked about sizes."""

    outputs: tuple[Output, ...]
    kind: type
    """A tensor, or a tuple or list of them."""
    noted: Collection[Noted]


@dataclass(slots=True)
class OperatorMemo:
    """Calls of operators in one world.

    Args:
        device_of: the device of a fake of this world that is nothing beside its form; None for another tensor.
        make: a fake of a form, in new memory or in that of another.
    """

    _shapes: ShapeWorld
    _device_of: Callable[[torch.Tensor], torch.device | None]
    _make: Callable[[Form, torch.Tensor | None], torch.Tensor]
    _known: dict[Hashable, _Inferred | None] = field(default_factory=dict)
    """None: its outputs can't be made anew."""
    _is_inferring: bool = False

    def call(self, operator: Any, args: Any, kwargs: Any, modes: Hashable, infer: Callable[[], Any]) -> Any:
        """What ``infer`` gives, or what an equal call has given.

        Args:
            modes: what else an outcome may depend on.
        """
        if self._is_inferring or self._shapes.keeps_open:
            return infer()
        tensors: list[torch.Tensor] = []
        try:
            with unseen():
                key = operator, modes, *self._key((*args, *kwargs.items()), tensors)
        except _NotPlain:
            return infer()
        known = self._known.get(key, self)
        if known is self:
            self._is_inferring = True
            try:
                with self._shapes.notes() as noted:
                    out = infer()
            finally:
                self._is_inferring = False
            with unseen():
                self._known[key] = self._inferred(out, tensors, noted)
            return out
        if not isinstance(known, _Inferred):
            return infer()
        self._shapes.note_again(known.noted)
        with unseen():
            made = [self._make(form, None if at is None else tensors[at]) for form, at in known.outputs]
        return made[0] if known.kind is torch.Tensor else known.kind(made)

    def _key(self, value: Any, tensors: list[torch.Tensor]) -> Iterator[Hashable]:
        """What of an argument can change the outcome.

        Args:
            tensors: gets those in it.

        Raises:
            _NotPlain: it may be more than that.
        """
        kind = type(value)
        if kind is tuple or kind is list:
            yield kind, len(value)
            for item in value:
                yield from self._key(item, tensors)
        elif isinstance(value, torch.Tensor):
            device = self._device_of(value)
            if device is None:
                raise _NotPlain
            for index, other in enumerate(tensors):
                if other is value:
                    yield torch.Tensor, index
                    return
            tensors.append(value)
            yield expressions_of(value.shape), expressions_of(value.stride())
            yield expression_of(value.storage_offset()), value.dtype, device, value.requires_grad
        elif isinstance(value, Symbolic):
            yield kind, expression_of(value)
        elif isinstance(value, _CONSTANTS):
            yield kind, value
        else:
            raise _NotPlain

    def _inferred(self, out: Any, inputs: list[torch.Tensor], noted: Collection[Noted]) -> _Inferred | None:
        """What a call gave, if that is fakes whose sizes follow from the arguments', in new memory or an argument's."""
        kind = torch.Tensor if isinstance(out, torch.Tensor) else type(out)
        if kind not in (torch.Tensor, tuple, list):
            return None
        places = [tensor.untyped_storage()._cdata for tensor in inputs]
        own, outputs = [], []
        for tensor in [out] if kind is torch.Tensor else out:
            device = self._device_of(tensor) if isinstance(tensor, torch.Tensor) else None
            if device is None or tensor.requires_grad:
                return None
            memory = tensor.untyped_storage()
            sizes = tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), memory.nbytes()
            form = Form(*sizes, tensor.dtype, device)
            if any(map(is_data_dependent, expressions_of((*form.shape, *form.stride, form.offset)))):
                return None
            source = places.index(memory._cdata) if memory._cdata in places else None
            if source is None:
                own.append(memory._cdata)
            elif tensor.dtype != inputs[source].dtype or any(tensor is other for other in inputs):
                return None
            outputs.append(Output(form, source))
        return _Inferred(tuple(outputs), kind, noted) if len({*own}) == len(own) else None


class _NotPlain(Exception):
    """An argument that a key can't tell."""


@functools.cache
def is_recalled(operator: Any) -> bool:
    """Whether an operator is torch's own, writes nothing, and gives what the forms of its arguments determine."""
    schema = getattr(operator, "_schema", None)
    return (
        schema is not None
        and operator.namespace in ("aten", "prims")
        and not schema.is_mutable
        and torch.Tag.dynamic_output_shape not in operator.tags
        and torch.Tag.data_dependent_output not in operator.tags
    )
