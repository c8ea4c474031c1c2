"""Traces a loss function, as a model whose arguments are outputs and a label.

A loss is traced only if it does nothing but compute: it prints nothing, counts nothing, and draws no random numbers.
One that is made anew for each call, such as a lambda in a loop, is the same as long as it holds the same.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.attributes import stored_attribute
from roundpipe.core.contexts import contextmanager
from roundpipe.core.errors import TraceCause, TraceError, enumerated
from roundpipe.core.module_tree import modules_in
from roundpipe.core.storages import is_plain
from roundpipe.effects.bytecode import names_in
from roundpipe.effects.kept import UNMOVED, Moved
from roundpipe.effects.outside import refused_outside
from roundpipe.effects.places import are_other_numbers
from roundpipe.effects.snapshot import ModuleSnapshot, python_restored
from roundpipe.effects.uses import filled_cells, reached_by
from roundpipe.fx.graph.nodes import draws_random
from roundpipe.fx.guards.failure import OF_LOSS, Failure
from roundpipe.fx.guards.guards import GuardedGraph, Guards
from roundpipe.fx.trace.tracer import trace
from roundpipe.fx.varying import Varying

LossFunction = Callable[[Any, Any], Any]
_MAX_DEPTH = 12
MOST_COPIED = 1024**2
"""Elements of a tensor that a loss function may write, such as a confusion matrix."""
MOST_LOOKED_AT = 2000
"""Objects that are looked at for such tensors, those that a loss function names first."""


class LossCall(nn.Module):
    """A loss function as a module, which has the modules and trainable tensors that the function reaches.

    Args:
        model: the one whose outputs it gets. A function may look at it, and compute with weights that its code names.
    """

    def __init__(self, function: LossFunction, model: nn.Module | None = None) -> None:
        super().__init__()
        self.function = function
        parts = set() if model is None else set(model.modules())
        reached = list({id(value): value for value in reached_by(function)}.values())
        modules = [value for value in reached if isinstance(value, nn.Module)]
        parts.update(module for module in modules if type(module).__module__.startswith("roundpipe."))
        self.looked_at = [] if parts.isdisjoint(modules) else [model]  # in a list, it is no submodule
        self.reached = nn.ModuleList(module for module in modules if module not in parts)
        reached += _named_weights((module for module in modules if module in parts), reached)
        weights = {id(weight) for module in self.modules() for weight in module.parameters()}
        for index, value in enumerate(reached):
            if isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf and id(value) not in weights:
                self.register_buffer(f"weight_{index}", value)

    def forward(self, outputs: Any, label: Any) -> Any:
        function, _ = self.function, self.looked_at  # what a forward reads is guarded
        with refused_outside():
            return function(outputs, label)


def _named_weights(modules: Iterable[nn.Module], reached: Iterable[Any]) -> Iterator[nn.Parameter]:
    """The weights of modules whose names are all in the code of functions, such as ``model.head.scale``."""
    codes = [each.__code__ for each in reached if isinstance(each, types.FunctionType)]
    names = {name for code in codes for name in names_in(code)}
    for module in modules:
        for path, weight in module.named_parameters():
            if all(name in names or name.isdigit() for name in path.split(".")):
                yield weight


def trace_loss(
    function: LossFunction,
    outputs: Any,
    label: Any,
    *,
    model: nn.Module | None = None,
    dynamic: Collection[Varying] = (),
) -> GuardedGraph:
    """The graph of a loss function, on outputs whose tensors may be on the meta device.

    Raises:
        TraceError: it can't be traced, or does more than compute.
    """
    with _python_kept(function, model) as call, torch.enable_grad():
        traced = trace(call, (outputs, label), dynamic=dynamic, is_pure=True)
    if any(map(draws_random, traced.graph.nodes)):
        raise TraceError("it draws random numbers, which would not be those of the loss by itself", TraceCause.RANDOM)
    return traced


def loss_tracer(function: LossFunction, model: nn.Module | None) -> Callable[[tuple[Any, Any]], GuardedGraph]:
    """Gives the graph of a loss function for outputs and a label: one that was made before, if it serves them."""
    graphs: list[GuardedGraph] = []

    def graph_for(arguments: tuple[Any, Any]) -> GuardedGraph:
        traced = next((each for each in graphs if each.guards.check(arguments, {}) is None), None)
        if traced is None:
            graphs.append(traced := trace_loss(function, *arguments, model=model))
        return traced

    return graph_for


def call_loss(function: LossFunction, outputs: Any, label: Any, *, model: nn.Module | None = None) -> float:
    """What a loss function that can't be traced gives for data; what it changes is taken back.

    Raises:
        TraceError: it draws random numbers, or gives no scalar.
    """
    with values_kept(function, model) as call, torch.random.fork_rng(devices=[]):
        random_state = torch.get_rng_state()
        loss = call(outputs, label)
        if not torch.equal(random_state, torch.get_rng_state()):
            raise TraceError("it draws random numbers", TraceCause.RANDOM)
    if not isinstance(loss, torch.Tensor) or loss.ndim:
        raise TraceError("it gives no scalar")
    return float(loss)


def is_other_when_repeated(function: LossFunction, outputs: Any, label: Any, *, model: nn.Module | None = None) -> bool:
    """Whether a loss function gives another loss when it is called with the same data again; what it changes is taken
    back.
    """
    with values_kept(function, model) as call, torch.random.fork_rng(devices=[]):
        random_state = torch.get_rng_state()
        first = trees.tensors(call(outputs, label))
        torch.set_rng_state(random_state)
        second = trees.tensors(call(outputs, label))
    return not all(map(functools.partial(torch.allclose, equal_nan=True), first, second))


@contextmanager
def values_kept(function: LossFunction, model: nn.Module | None = None) -> Iterator[LossCall]:
    """What a loss function, or a graph of it, changes inside is taken back; gives the function as a module.

    What is trained is left alone: others may update it meanwhile.
    """
    with _python_kept(function, model) as call:
        kept = [tensor for tensor in _written_by(call, function) if is_plain(tensor) and not tensor.is_meta]
        before = [(tensor, tensor.clone()) for tensor in kept if not tensor.requires_grad]
        try:
            yield call
        finally:
            for tensor, value in before:
                if not torch.equal(tensor, value):
                    tensor.data.copy_(value)


@contextmanager
def _python_kept(function: LossFunction, model: nn.Module | None) -> Iterator[LossCall]:
    """The same for all but what is in tensors."""
    call = LossCall(function, model)
    state = ModuleSnapshot(modules_in(call))
    parameters = [*call.parameters(), *(() if model is None else model.parameters())]
    with python_restored(modules_in(call), function), _trained_as_before(parameters):
        try:
            yield call
        finally:
            state.restore()


def _written_by(call: LossCall, function: LossFunction) -> Iterator[torch.Tensor]:
    """What a loss function may write in place: buffers, and tensors in objects that it reaches, such as sums.

    Tensors larger than `MOST_COPIED` are data, and so is what lies behind `MOST_LOOKED_AT` objects.
    """
    yield from call.buffers()
    pending = deque([*modules_in(call), *reached_by(function)])
    seen: set[int] = set()
    while pending and len(seen) < MOST_LOOKED_AT:
        value = pending.popleft()
        if id(value) in seen or isinstance(value, (type, types.ModuleType)):
            continue
        seen.add(id(value))
        if type(value) is torch.Tensor and value.numel() <= MOST_COPIED:
            yield value
        elif isinstance(value, (dict, list, tuple)):
            pending.extend(value.values() if isinstance(value, dict) else value)
        elif not isinstance(value, torch.Tensor):
            pending.extend(stored_attribute(value, "__dict__", {}).values())


@contextmanager
def _trained_as_before(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Parameters are trained afterwards as they were before, also if a function ended that froze some for a while."""
    before = [parameter.requires_grad for parameter in parameters]
    try:
        yield
    finally:
        for parameter, is_trained in zip(parameters, before, strict=True):
            if parameter.requires_grad != is_trained:
                parameter.requires_grad_(is_trained)


def is_same(first: Any, second: Any, moved: Moved = UNMOVED, *, with_modules: bool = True, depth: int = 0) -> bool:
    """Whether two functions, or values that functions hold, are one, or do and hold the same.

    A container that has ``moved`` is the same. ``with_modules``: whether modules may be, which have no weights of their
    own; if not, they may be where values are left.
    """
    if first is second or moved.get(id(first), first) is second:
        return True
    if type(first) is not type(second) or depth > _MAX_DEPTH:
        return False
    inside = functools.partial(is_same, moved=moved, with_modules=with_modules, depth=depth + 1)
    if isinstance(first, types.FunctionType):
        is_code = first.__code__ == second.__code__ and first.__globals__ is second.__globals__
        return is_code and not first.__dict__ and not second.__dict__ and inside(_held_by(first), _held_by(second))
    if isinstance(first, types.MethodType):
        return first.__func__ is second.__func__ and first.__self__ is second.__self__
    if type(first) is functools.partial:
        return inside((first.func, first.args, first.keywords), (second.func, second.args, second.keywords))
    if type(first) in (list, tuple):
        return len(first) == len(second) and all(map(inside, first, second))
    if isinstance(first, nn.Module):  # the weights of another one are others
        return with_modules and inside(first.__dict__, second.__dict__)
    if type(first) in (dict, OrderedDict):
        return list(first) == list(second) and all(map(inside, first.values(), second.values()))
    if type(first) is set:
        return bool(first == second)
    return trees.same(first, second)


def _held_by(function: types.FunctionType) -> tuple[Any, ...]:
    cells = [cell.cell_contents for cell in filled_cells(function)]
    return len(function.__closure__ or ()) - len(cells), cells, function.__defaults__, function.__kwdefaults__


def change_of(guards: Guards, before: Any, now: Any) -> Failure | None:
    """Why a function is not the same as one that was traced before, but for what values are left in; None if it is."""
    pairs = [*_held_pairs(before, now)] if now is not before else []
    if failure := guards.follow(pairs):
        return failure
    same = functools.partial(is_same, moved=guards.moved, with_modules=not guards.leaves_values)
    if same(before, now):
        return None
    for name, one, other in pairs:
        if are_other_numbers(one, other):
            return Failure(f"{name} is {other!r}, traced with {one!r}", number=name)
    names = enumerated([name for name, one, other in pairs if not same(one, other)], most=3)
    what = f"{names}: not the same as when it was traced" if names else "it is another function, or of another object"
    return Failure(what, to_fix=OF_LOSS)


def _held_pairs(before: Any, now: Any, depth: int = 0) -> Iterator[tuple[str, Any, Any]]:
    """What two functions hold under the same names, and the functions among that in turn."""
    held = _held_by_name(now)
    for name, one in _held_by_name(before).items() if depth <= _MAX_DEPTH else ():
        if name in held:
            yield name, one, held[name]
            yield from _held_pairs(one, held[name], depth + 1)


def _held_by_name(function: Any) -> dict[str, Any]:
    """What a function has in its closure and as defaults, or a `functools.partial` as arguments."""
    if isinstance(function, functools.partial):
        given = {f"argument {index}": value for index, value in enumerate(function.args)}
        return {"the function": function.func, **given, **function.keywords}
    if not isinstance(function, types.FunctionType):
        return {}
    code, defaults = function.__code__, function.__defaults__ or ()
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    filled = set(map(id, filled_cells(function)))
    held = {name: cell.cell_contents for name, cell in cells if id(cell) in filled}
    with_default = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    return held | dict(zip(with_default, defaults, strict=True)) | (function.__kwdefaults__ or {})
