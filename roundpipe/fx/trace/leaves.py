"""What leaf modules do in a call beside what they return: to arguments, attributes, weights and other state.

`LeafWatch` sees a call on fakes. Invariant: an activation that a leaf uses is one of its arguments, and one that it
makes and that is used outside is in what it returns.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from roundpipe.core import trees
from roundpipe.core.contexts import contextmanager
from roundpipe.core.errors import TraceCause, TraceError, TraceFacts
from roundpipe.effects.bytecode import names_in
from roundpipe.effects.snapshot import AttributeChange, ModuleSnapshot, PythonSnapshot
from roundpipe.effects.uses import GRADIENT_ATTRIBUTES, attributes_read, reads_before_it_sets
from roundpipe.fx.fakes import draws_unseen, written_unseen
from roundpipe.fx.guards.model_guard import Write
from roundpipe.fx.locations import is_model_file, model_location
from roundpipe.fx.sizes import flat_tensors
from roundpipe.fx.trace.builder import GraphBuilder
from roundpipe.fx.trace.decisions import is_of_torch
from roundpipe.fx.trace.operator_watch import OperatorWatch


@dataclass(slots=True)
class LeafRun:
    """What a run of a leaf showed, on fakes or on random data."""

    out: Any = None
    """Its tensors are fakes."""
    random: bool = False
    buffers_written: bool = False
    written: tuple[torch.Tensor, ...] = ()
    """Arguments that it wrote in place."""
    side_effects: dict[str, None] = field(default_factory=dict)
    """What it remembers for later calls, in words."""
    sets: dict[tuple[type, str], None] = field(default_factory=dict)
    """Attributes that it set: the owner's class and the name."""
    not_kept: dict[str, None] = field(default_factory=dict)
    """Those that hold activations, in words."""
    left_behind: dict[tuple[type, str], None] = field(default_factory=dict)
    """Those that hold activations with a gradient."""
    unread: frozenset[int] = frozenset()
    """Values of its module that it was shown not to depend on (see `ModuleKey` in `siblings`)."""

    def note_python(
        self,
        modules: ModuleSnapshot,
        python: PythonSnapshot,
        call: Callable[[], Any],
        computed: Set[torch.Tensor] | None = None,
    ) -> None:
        """Notes what ``call``, which has just run, changed since the snapshots, and what a further one makes of that.

        Args:
            computed: tensors that count as activations; None = all but leaves of autograd's.
        """
        for owner, attribute, _, value, _ in modules.diff():
            self.sets[type(owner), attribute] = None
            tensors = [tensor for tensor in flat_tensors(value) if computed is None or tensor in computed]
            if tensors:
                self.not_kept[f"{type(owner).__name__}.{attribute}"] = None
            has_grad = any(tensor.requires_grad and (computed is not None or not tensor.is_leaf) for tensor in tensors)
            if has_grad and not is_put_by_hooks(owner, attribute):
                self.left_behind[type(owner), attribute] = None
        side_effects, changes = python.side_effects(), _remembered(modules, computed)
        # attributes that each call sets anew don't count
        if changes and (side_effects or not _sets_before_reading(changes, call)):
            side_effects += [f"{type(change.module).__name__}.{change.name}" for change in changes]
        self.side_effects.update(dict.fromkeys(side_effects))


@dataclass(eq=False)
class LeafWatch(TorchFunctionMode):
    """Sees the calls inside a leaf."""

    _name: str
    _builder: GraphBuilder
    _inputs: Collection[torch.Tensor]
    _weights: Collection[torch.Tensor]
    """Its own parameters and buffers; those of others would not be there when it runs."""
    _refuse_hidden: Callable[[TraceError], BaseException]
    """What to raise if it uses an activation that is not among its arguments."""
    _refuse_foreign: Callable[[TraceError], BaseException]
    """What to raise if it uses a weight that is not its own."""
    _born_in: dict[torch.Tensor, str]
    """Gets every tensor made inside."""
    _operators: OperatorWatch
    """Is told of draws that it can't see."""
    runs_autograd: bool = False
    written: set[int] = field(default_factory=set)
    """Storages of what was written in place, or given other data."""
    writes: list[Write] = field(default_factory=list)
    asks_for_grad: str = ""
    """Where the model's own code asked whether an activation requires grad, if it did."""
    computed: set[torch.Tensor] = field(default_factory=set)
    """Tensors made inside of arguments, parameters or buffers; what is made of sizes alone is not among them."""
    _generators: list[weakref.ref[torch.Generator]] = field(default_factory=list)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._operators.num_random_draws += draws_unseen(func, args)
        inputs = flat_tensors(args, kwargs)
        arguments = (*args, *kwargs.values())
        self._generators += [weakref.ref(value) for value in arguments if isinstance(value, torch.Generator)]
        if func in (torch.Tensor.register_hook, torch.Tensor.retain_grad):  # they raise where it does not
            self.asks_for_grad = self.asks_for_grad or model_location()
        self.runs_autograd |= func in (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
        for tensor in inputs:
            node = self._builder.node_of.get(tensor)
            if node is not None and node.op != "get_attr" and not self._is_known(tensor):
                words = f"{self._name} uses {node.name}, which is not one of its arguments"
                raise self._refuse_hidden(TraceError(words, TraceCause.UNTRACED_VALUE))
        versions = [tensor._version for tensor in inputs]
        name = getattr(func, "__name__", "")
        if name == "__set__" and func.__self__.__name__ == "data":
            self.written.add(args[0].untyped_storage()._cdata)
        out = func(*args, **kwargs)
        for tensor, version in zip(inputs, versions, strict=True):
            if tensor._version != version:
                self.written.add(tensor.untyped_storage()._cdata)
                self.writes.append(Write(tensor, func, args, kwargs))
        self.written.update(tensor.untyped_storage()._cdata for tensor in written_unseen(func, args, kwargs))
        outputs = flat_tensors(out)
        for tensor in inputs if outputs else ():  # whose form it asks for may be anyone's
            weight = self._builder.world.name_of.get(tensor)
            if weight is not None and tensor not in self._weights and tensor not in self._inputs:
                words = f"{self._name} uses {weight}, which is not a weight of its own"
                raise self._refuse_foreign(TraceError(words))
        if not outputs and name == "__get__":
            self._note_attribute(func.__self__.__name__, args[0])
        computed = any(tensor in self.computed or self._is_known(tensor) for tensor in inputs)
        for tensor in outputs:
            if computed:
                self.computed.add(tensor)
            if tensor not in self._builder.node_of:
                self._born_in[tensor] = self._name
        return out

    def _is_known(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is an argument or a weight."""
        return tensor in self._inputs or tensor in self._builder.world.name_of

    def wrote_any(self, tensors: Iterable[torch.Tensor]) -> bool:
        return any(tensor.untyped_storage()._cdata in self.written for tensor in tensors)

    def drew_from_kept(self) -> bool:
        """Whether it drew random numbers from a generator that outlives the call."""
        return any(generator() is not None for generator in self._generators)

    def _note_attribute(self, attribute: str, tensor: torch.Tensor) -> None:
        asks = attribute in GRADIENT_ATTRIBUTES and not getattr(tensor, "_is_param", False)
        if asks and is_model_file(sys._getframe(2).f_code.co_filename):
            self.asks_for_grad = self.asks_for_grad or model_location()


def new_output(module: nn.Module, out: Any) -> Any:
    """What another call of a leaf may return that has drawn: tensors of its own, though it has handed on arguments."""
    is_trained = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters())

    def new(tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.clone()
        return made.requires_grad_() if is_trained and made.dtype.is_floating_point else made

    return trees.map_tensors(out, new)


def output_origins(out: Any, args: Any, kwargs: Any, name_of: Mapping[torch.Tensor, str]) -> tuple[str, ...]:
    """For each tensor that a call returned, the argument or weight that it is or lies in; nothing for a new one."""
    inputs: dict[Any, str] = {}
    for index, tensor in enumerate(flat_tensors(args, kwargs)):
        inputs.setdefault(tensor, f"argument {index}")
        inputs.setdefault(tensor.untyped_storage()._cdata, f"in argument {index}")
    return tuple(
        inputs.get(tensor) or name_of.get(tensor) or inputs.get(tensor.untyped_storage()._cdata, "")
        for tensor in flat_tensors(out)
    )


def left_behind(kind: type, attribute: str) -> TraceError:
    """The error for an activation in an attribute, from where a loss function may take it, or the next call."""
    words = (
        f"{kind.__name__}.{attribute} is set to an activation in the forward, and would not be set when the graph runs"
    )
    cause = TraceCause.STATE if reads_before_it_sets(kind, attribute) else TraceCause.ACTIVATION_LEFT
    return TraceError(words, cause, TraceFacts(attribute=attribute))


def is_put_by_hooks(module: nn.Module, attribute: str) -> bool:
    """Whether an attribute that was set in a call is one that hooks make for the forward, such as a normed weight."""
    return is_of_torch(type(module)) and attribute in names_in(type(module).forward.__code__)


class Unread:
    """Stands in for an attribute's value. Whatever is done with it, ``isinstance`` included, raises and is noted."""

    _used = False

    def is_used(self) -> bool:
        return bool(object.__getattribute__(self, "_used"))

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name) if name == "is_used" else _refuse(self)


def _refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
    object.__setattr__(self, "_used", True)
    raise LookupError("this attribute was to be set first")


_NOT_REFUSED = frozenset(
    "__class__ __new__ __init__ __getattribute__ __init_subclass__ __subclasshook__ __class_getitem__ __doc__".split()
)
_FURTHER = frozenset("__call__ __enter__ __exit__ __next__ __matmul__ __rmatmul__ __complex__ __fspath__".split())
for _name in {name for kind in (int, float, str, list, dict, set, tuple) for name in dir(kind)} | _FURTHER:
    if _name.startswith("__") and _name not in _NOT_REFUSED:
        setattr(Unread, _name, _refuse)


@contextmanager
def unread_in(places: Iterable[tuple[nn.Module, str]]) -> Iterator[list[Unread]]:
    """Inside, attributes are `Unread`, one each; afterwards they are what they were."""
    held = [(owner, name, owner.__dict__[name]) for owner, name in places]
    unread = [Unread() for _ in held]
    for (owner, name, _), value in zip(held, unread, strict=True):
        owner.__dict__[name] = value
    try:
        yield unread
    finally:
        for owner, name, original in held:
            owner.__dict__[name] = original


def _sets_before_reading(changes: list[AttributeChange], call: Callable[[], Any]) -> bool:
    """Whether a second call sets the attributes that a first one changed to the same, before it reads them."""
    try:
        with unread_in([(change.module, change.name) for change in changes]):
            call()
            return all(_is_alike(change.now, change.module.__dict__.get(change.name)) for change in changes)
    except Exception:
        return False


def _is_alike(first: Any, second: Any) -> bool:
    return type(first) is type(second) and (not isinstance(first, trees.PLAIN) or first == second)


def _remembered(snapshot: ModuleSnapshot, computed: Set[torch.Tensor] | None) -> list[AttributeChange]:
    """Attributes set since a snapshot that a later call may read; tensors count only if in ``computed``, None = all."""
    return [
        change
        for change in snapshot.diff()
        if change.name != "training"
        and change.name in attributes_read(type(change.module))
        and (computed is None or not (tensors := flat_tensors(change.now)) or not computed.isdisjoint(tensors))
    ]


def set_elsewhere(snapshot: ModuleSnapshot, inside: Iterable[nn.Module]) -> str | None:
    """An attribute of a leaf's modules that their class reads and that others' code has set since a snapshot."""
    for change in snapshot.diff(inside):
        is_state = change.name == "training" or isinstance(change.now, torch.Tensor)
        if not is_state and change.name in attributes_read(type(change.module)):
            return f"{type(change.module).__name__}.{change.name}"
    return None


Contents = dict[trees.Path, Any]
"""What the arguments of a call hold, by their paths."""


def contents_of(args: Any, kwargs: Any) -> Contents:
    """What arguments hold, in deques and sets too."""
    return dict(_leaves_of((args, kwargs), ()))


def _leaves_of(value: Any, path: trees.Path) -> Iterator[tuple[trees.Path, Any]]:
    if isinstance(value, (deque, set)):
        below = [(trees.Access("item", index), item) for index, item in enumerate(value)]
    else:
        below = trees.children(value) or []
        if not below:
            yield path, value
    if len(path) < trees.MAX_DEPTH:
        for step, child in below:
            yield from _leaves_of(child, (*path, step))


def containers_mutated(before: Contents, args: Any, kwargs: Any) -> bool:
    """Whether a call changed what its arguments hold."""
    after = contents_of(args, kwargs)
    return before.keys() != after.keys() or bool(trees.gained(before, after))


def gained_by(before: Contents, args: Any, kwargs: Any) -> list[trees.Path]:
    """Where a call has put something into its arguments; what it only took out does not count."""
    after = contents_of(args, kwargs)
    return [
        path
        for path in trees.gained(before, after)
        if not (
            isinstance(value := after[path], (Mapping, list, tuple, set, deque))
            and not value
            and any(other[: len(path)] == path for other in before)
        )
    ]
