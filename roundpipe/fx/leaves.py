"""Runs leaf modules on fakes, for the shapes of their outputs, and watches what they do.

Models repeat one block many times. A leaf that equals one that ran before (class, attributes, shapes
of its weights, arguments) gets copies of that one's outputs instead of a run of its own.

Invariant: an activation that a leaf uses is one of its arguments, and one that it makes and that is
used outside is in what it returns.
"""

from __future__ import annotations

import re
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.overrides import TorchFunctionMode

from roundpipe import structure
from roundpipe.errors import TraceError
from roundpipe.fx.ambient import Ambient
from roundpipe.fx.builder import flat_tensors, flat_values
from roundpipe.fx.fakes import Symbolic, expression_of, is_data_dependent, is_model_file, model_location
from roundpipe.fx.python_state import attributes_read

_COUNTING_NAME = re.compile(r"(idx|index|layer_?id|number)$")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_CONTAINERS = (list, tuple, set, dict, OrderedDict, deque)


class HiddenInput(BaseException):
    """A leaf used an activation that is not among its arguments."""


class LeafWatch(TorchFunctionMode):
    """Sees the calls inside a leaf.

    Args:
        name: the leaf's.
        node_of: the tensors that have nodes.
        allowed: tensors that the leaf may use: its arguments, parameters and buffers.
        born_in: gets every tensor made inside.
    """

    def __init__(
        self,
        name: str,
        node_of: dict[torch.Tensor, Node],
        allowed: Callable[[torch.Tensor], bool],
        born_in: dict[torch.Tensor, str],
    ) -> None:
        super().__init__()
        self._name = name
        self._node_of = node_of
        self._allowed = allowed
        self._born_in = born_in
        self.runs_autograd = False
        self.asks_for_grad = ""
        """Where the model's own code asked whether an activation requires grad, if it did."""
        self.computed: set[torch.Tensor] = set()
        """Tensors made inside of arguments, parameters or buffers; what is made of sizes alone is not among them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = flat_tensors(args, kwargs)
        self.runs_autograd |= func in (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
        for tensor in given:
            node = self._node_of.get(tensor)
            if node is not None and node.op != "get_attr" and not self._allowed(tensor):
                raise HiddenInput(f"{self._name} uses {node.name}, which is not one of its arguments")
        out = func(*args, **kwargs)
        made = flat_tensors(out)
        if not made and getattr(func, "__name__", "") == "__get__":
            self._note_attribute(func.__self__.__name__, args[0])
        computed = any(tensor in self.computed or self._allowed(tensor) for tensor in given)
        for tensor in made:
            if computed:
                self.computed.add(tensor)
            if tensor not in self._node_of:
                self._born_in[tensor] = self._name
        return out

    def _note_attribute(self, attribute: str, tensor: torch.Tensor) -> None:
        asks = attribute in ("requires_grad", "is_leaf", "grad_fn") and not getattr(tensor, "_is_param", False)
        if asks and is_model_file(sys._getframe(2).f_code.co_filename):
            self.asks_for_grad = self.asks_for_grad or model_location()


@dataclass(frozen=True, slots=True)
class LeafRun:
    """What a run of a leaf on fakes showed."""

    out: Any
    random: bool
    buffers_written: bool
    written: tuple[torch.Tensor, ...]
    """Arguments that it wrote in place."""


class Same:
    """An object by identity, as part of a key."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return object.__hash__(self.value)


class SiblingCache:
    """Runs of leaves in one world, shared by leaves that can't differ."""

    def __init__(self) -> None:
        self._modules: dict[nn.Module, Any] = {}
        self._runs: dict[Any, LeafRun] = {}

    def key(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Equal for calls with equal outcome; None for a call that must run by itself."""
        if module not in self._modules:
            self._modules[module] = module_key(module)
        if self._modules[module] is None:
            return None
        return self._modules[module], arguments_key(args, kwargs), Ambient.current()

    def get(self, key: Any) -> LeafRun | None:
        """A run under that key, with outputs of its own."""
        run = self._runs.get(key) if key is not None else None
        if run is None:
            return None
        out = structure.map_tensors(run.out, _like)
        return LeafRun(out, run.random, run.buffers_written, ())

    def put(self, key: Any, run: LeafRun, args: Any, kwargs: Any) -> None:
        """Keeps a run, unless its outputs share memory with its arguments or each other, or have sizes of their own.

        A size that data determine (how many tokens go to an expert) is another one in every call.
        """
        outs = flat_tensors(run.out)
        if any(is_data_dependent(expression_of(size)) for size in _sizes(run.out)):
            return
        storages = [tensor.untyped_storage()._cdata for tensor in (*outs, *flat_tensors(args, kwargs))]
        outside = set(storages[len(outs) :])
        inside = storages[: len(outs)]
        if key is None or run.written or len(set(inside)) < len(inside) or outside & set(inside):
            return
        self._runs[key] = run


def _sizes(value: Any) -> Iterator[Any]:
    """Every size in a value: symbolic numbers, and dimensions of tensors."""
    for item in flat_values(value):
        yield from item.shape if isinstance(item, torch.Tensor) else (item,)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """A fake of the same form, made by an operation if the other one was."""
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return fake.requires_grad_().clone() if tensor.requires_grad else fake


def arguments_key(args: Any, kwargs: Any) -> Any:
    """What of a call's arguments can change its outcome on fakes."""
    key: list[Any] = []
    seen: dict[torch.Tensor, int] = {}
    for path, leaf in structure.walk((args, kwargs)):
        if isinstance(leaf, torch.Tensor):
            shape = tuple(expression_of(size) for size in leaf.shape)
            stride = tuple(expression_of(step) for step in leaf.stride())
            first = seen.setdefault(leaf, len(key))
            key.append((path, shape, stride, leaf.dtype, leaf.requires_grad, first))
        elif isinstance(leaf, Symbolic):
            key.append((path, expression_of(leaf)))
        else:
            key.append((path, _value_key(leaf)))
    return tuple(key)


def module_key(module: nn.Module) -> Any:
    """What of a module can change the outcome of a call on fakes; None if hooks can."""
    key: list[Any] = []
    for name, inner in module.named_modules(remove_duplicate=False):
        if isinstance(inner, torch.jit.ScriptModule) or inner._forward_hooks or inner._forward_pre_hooks:
            return None
        attributes = [
            (attribute, _value_key(value))
            for attribute, value in inner.__dict__.items()
            if attribute not in ("_modules", "_parameters", "_buffers")
            and not (isinstance(value, int) and _COUNTING_NAME.search(attribute))
        ]
        tensors = [
            (attribute, None if t is None else (tuple(t.shape), t.dtype, t.requires_grad))
            for attribute, t in (*inner._parameters.items(), *inner._buffers.items())
        ]
        key.append((name, type(inner), tuple(attributes), tuple(tensors)))
    return tuple(key)


def _value_key(value: Any, depth: int = 0) -> Any:
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, torch.Tensor):
        return tuple(expression_of(size) for size in value.shape), value.dtype
    if isinstance(value, torch.Size):
        return torch.Size, tuple(expression_of(size) for size in value)
    if type(value) in _CONTAINERS and depth < 3:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return type(value), tuple((_value_key(k, depth + 1), _value_key(item, depth + 1)) for k, item in items)
    if isinstance(value, nn.Module):
        return type(value)
    return Same(value)


class _Unread:
    """Stands in an attribute that must be set before anything is done with it."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise LookupError("this attribute was to be set first")

    __getattr__ = __bool__ = __len__ = __iter__ = __getitem__ = __call__ = __contains__ = __index__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __str__ = __float__ = __int__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __hash__ = object.__hash__


def sets_before_reading(places: list[tuple[nn.Module, str, Any]], call: Callable[[], Any]) -> bool:
    """Whether another call sets some attributes to the same again, and does nothing with what it finds there.

    Args:
        places: the attributes with their values after a first call, which they have afterwards.
        call: calls again.
    """
    for module, name, _ in places:
        module.__dict__[name] = _Unread()
    try:
        call()
        return all(_same_kind(value, module.__dict__.get(name)) for module, name, value in places)
    except Exception:
        return False
    finally:
        for module, name, value in places:
            module.__dict__[name] = value


def _same_kind(was: Any, now: Any) -> bool:
    return type(was) is type(now) and (not isinstance(was, _PLAIN) or was == now)


class TreeState:
    """The attributes of a module tree at one moment.

    Args:
        modules: the modules to look at.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self._attributes = [(module, dict(module.__dict__)) for module in modules]
        self._buffers = [(module, dict(module._buffers)) for module in modules]
        self._lengths = [
            (value, len(value))
            for _, attributes in self._attributes
            for value in attributes.values()
            if type(value) in _CONTAINERS and not isinstance(value, tuple)
        ]
        self._versions = [
            (buffer, buffer._version)
            for _, buffers in self._buffers
            for buffer in buffers.values()
            if buffer is not None
        ]

    def buffers_written(self) -> bool:
        """Whether a buffer was written or replaced since."""
        return any(buffer._version != version for buffer, version in self._versions) or any(
            module._buffers.get(name) is not buffer
            for module, buffers in self._buffers
            for name, buffer in buffers.items()
        )

    def holds_new_values(self) -> bool:
        """Whether an attribute was set, or a container grew, since."""
        return any(len(value) != length for value, length in self._lengths) or any(
            attributes.get(name, attributes) is not value
            for module, attributes in self._attributes
            for name, value in module.__dict__.items()
        )

    def changed_attributes(self) -> list[tuple[nn.Module, str, Any]]:
        """Attributes set to something else since, with their values now."""
        return [
            (module, name, value)
            for module, attributes in self._attributes
            for name, value in module.__dict__.items()
            if attributes.get(name, attributes) is not value and not _equal(attributes.get(name), value)
        ]

    def remembered(self, computed: Collection[torch.Tensor] | None = None) -> list[tuple[nn.Module, str, Any]]:
        """Attributes that were set since to what a later call could find there, with their values.

        Args:
            computed: tensors that are more than tables made of sizes; None = all.
        """
        return [
            (module, name, value)
            for module, name, value in self.changed_attributes()
            if name not in ("_parameters", "_buffers", "_modules", "training")
            and name in attributes_read(type(module))
            and (computed is None or not flat_tensors(value) or any(one in computed for one in flat_tensors(value)))
        ]

    def restore_tensors(self, keep: Collection[tuple[nn.Module, str]] = ()) -> None:
        """Takes back every change that put a tensor into an attribute, but for those to ``keep``."""
        for (module, attributes), (_, buffers) in zip(self._attributes, self._buffers, strict=True):
            for name in list(module.__dict__):
                value = module.__dict__[name]
                if name in ("_parameters", "_buffers", "_modules") or attributes.get(name, module) is value:
                    continue
                if flat_values(value) and (module, name) not in keep:
                    del module.__dict__[name]
                    if name in attributes:
                        module.__dict__[name] = attributes[name]
            module._buffers.clear()
            module._buffers.update(buffers)


class OutsideChanges:
    """Tells what other code sets on a leaf's modules, which the graph would not set, from what the leaf sets itself.

    Args:
        model: the modules before the first run.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held = {module: dict(module.__dict__) for module in model.modules()}

    def on(self, leaf: nn.Module) -> str | None:
        """An attribute of a leaf that its class reads and that other code has set, in words."""
        for module in leaf.modules():
            held = self._held.get(module)
            if held is None:
                continue
            for name, value in module.__dict__.items():
                if held.get(name, held) is value or name in _TORCH_STATE or isinstance(value, torch.Tensor):
                    continue
                if not _equal(held.get(name), value) and name in attributes_read(type(module)):
                    return f"{type(module).__name__}.{name}"
        return None

    def note_own(self, leaf: nn.Module) -> None:
        """Whatever a leaf's modules hold now, it has set itself."""
        for module in leaf.modules():
            held = self._held.get(module)
            if held is not None and len(held) <= len(module.__dict__):
                held.update(module.__dict__)


_TORCH_STATE = ("_parameters", "_buffers", "_modules", "training")


def _equal(was: Any, now: Any) -> bool:
    return isinstance(was, _PLAIN) and type(was) is type(now) and was == now


def containers_mutated(before: list[tuple[structure.Path, Any]], args: Any, kwargs: Any) -> bool:
    """Whether a call changed what its arguments hold."""
    after = list(structure.walk((args, kwargs)))
    return len(before) != len(after) or any(
        path != other or leaf is not now
        for (path, leaf), (other, now) in zip(before, after, strict=True)
        if not isinstance(leaf, _PLAIN)
    )


def refuse_mutated(name: str) -> TraceError:
    """The error for a leaf that changes a container among its arguments."""
    return TraceError(f"{name} changes a list, dict or object that it takes as an argument")
