"""When a trace serves a call: what was assumed while tracing, checked for other arguments.

A check goes from cheap to dear: the model's flags, the structure and plain values of the arguments,
the sizes of its tensors (cached by shapes), the data that traced code read (`ValueProgram`).

Assumptions about sizes are of two kinds. What the model's own Python asked (``if x.shape[0] == 1``)
must hold, and so must sizes be equal that were taken for one. What operators asked to infer a shape
only matters through the shape: if such an assumption fails, the graph is run once on fakes of the new
sizes, and if every node has the shape that the trace says, the assumptions made in that run are a
second sufficient set (a *variant*).

Invariant: `Guards.check` returns None only if running the model's Python again would record this graph.
"""

from __future__ import annotations

import operator
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import sympy
import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.aliasing import overlapping
from roundpipe.core.modes import Modes
from roundpipe.effects.places import view_of
from roundpipe.fx.binding import CallForm
from roundpipe.fx.fakes import Dimension, FakeWorld, InputSizes
from roundpipe.fx.guards.model_state import ModelState, WeightForms
from roundpipe.fx.guards.values import ValueProgram
from roundpipe.fx.guards.writes import Write
from roundpipe.fx.sizes import compiled, expression_source

MAX_CACHED_SHAPES = 4096
MAX_VARIANTS = 16


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a trace does not serve a call."""

    message: str
    """Which guard failed and which input varied, in words."""
    dimensions: tuple[Dimension, ...] = ()
    """Dimensions of float inputs that the trace has as plain numbers and that vary."""

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class SizeGuard:
    """One assumption about sizes."""

    source: str
    """The assumption as Python."""
    holds: Callable[..., Any]
    location: str = ""
    """Where the model's code asked; empty for what an operator asked."""


class SizeSystem:
    """Assumptions over the sizes of one world's inputs.

    Args:
        world: whose symbols the expressions are in.
        expressions: what must hold, with where it was asked.
    """

    def __init__(self, world: FakeWorld, expressions: dict[sympy.Basic, str]) -> None:
        symbols = world.symbols()
        self.positions = list(symbols.values())
        self.symbols = list(symbols)
        self.guards: list[SizeGuard] = []
        for expression, location in expressions.items():
            if not expression.free_symbols or not expression.free_symbols <= set(symbols):
                continue  # about numbers, or about a size that only data determine: no input decides it
            self.guards.append(SizeGuard(expression_source(expression), compiled(expression, self.symbols), location))

    def first_failure(self, shapes: Sequence[torch.Size]) -> SizeGuard | None:
        """The first assumption that tensors of these shapes break."""
        sizes = [shapes[index][dim] for index, dim in self.positions]
        for guard in self.guards:
            try:
                if not guard.holds(*sizes):
                    return guard
            except ZeroDivisionError:
                return guard
        return None


def equalities(world: FakeWorld) -> dict[sympy.Basic, str]:
    """The sizes that a world took for equal to another or to a number."""
    return {
        sympy.Eq(symbol, value, evaluate=False): ""
        for symbol, value in world.shapes.replacements.items()
        if isinstance(symbol, sympy.Symbol)
    }


def size_assumptions(world: FakeWorld) -> dict[sympy.Basic, str]:
    """All that a world assumed about sizes, whoever asked."""
    return {**dict.fromkeys(world.shapes.size_guards(), ""), **equalities(world)}


class Verifier(Protocol):
    """Runs the traced graph on fakes of other sizes."""

    def __call__(self, arguments: Any) -> SizeSystem | str:
        """What the run assumed if every shape is the traced one, otherwise which one is not."""
        ...


@dataclass(frozen=True, slots=True)
class Flags:
    """Switches of a model that its code may look at."""

    modules: tuple[nn.Module, ...]
    training: list[bool]
    modes: Modes
    forms: WeightForms
    settings: tuple[torch.dtype, bool]
    """Torch's default dtype, and whether its algorithms must be deterministic."""
    weights: tuple[tuple[nn.Module, str, torch.Tensor], ...] = ()
    """Parameters and buffers that traced code used itself, with the module and the name that they had there."""

    @staticmethod
    def of(model: nn.Module) -> Flags:
        """The switches as they are now."""
        modules = tuple(model.modules())
        return Flags(modules, list(map(_TRAINING, modules)), Modes.current(), WeightForms(model), _settings())

    def with_weights(self, names: Iterable[str]) -> Flags:
        """The same with the parameters and buffers of these qualified names, which must stay the same objects."""
        places = [name.rpartition(".") for name in names]
        owners = [(self.modules[0].get_submodule(path), name) for path, _, name in places]
        return replace(self, weights=tuple((owner, name, getattr(owner, name)) for owner, name in owners))

    def failure(self, grad_matters: bool) -> Failure | None:
        """Which switch is set otherwise now.

        Args:
            grad_matters: whether it makes a difference that gradients are recorded.
        """
        if list(map(_TRAINING, self.modules)) != self.training:
            changed = [m for m, was in zip(self.modules, self.training, strict=True) if m.training != was]
            mode = "train" if changed[0].training else "eval"
            return Failure(
                f"{len(changed)} of {len(self.modules)} modules are now in {mode} mode, a "
                f"{type(changed[0]).__name__} first"
            )
        change = self.forms.change()
        if change is not None:
            return Failure(change)
        for module, name, tensor in self.weights:
            if module._buffers.get(name) is not tensor and module._parameters.get(name) is not tensor:
                return Failure(f"{type(module).__name__}.{name} is another tensor now")
        now = Modes.current()
        other = now.changes_from(self.modes if grad_matters else replace(self.modes, grad=now.grad))
        if other is not None:
            return Failure(f"the model is now called with {other.describe()}")
        dtype, deterministic = settings = _settings()
        if settings != self.settings:
            kind = "deterministic" if deterministic else "any"
            return Failure(f"the model is now called with default dtype {dtype} and {kind} algorithms")
        return None


def _settings() -> tuple[torch.dtype, bool]:
    return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()


_TRAINING = operator.attrgetter("training")


class Guards:
    """All that one trace assumed.

    Args:
        form: brings arguments into normal form.
        world: the traced world.
        flags: the model's switches as traced.
        values: the data that traced code read.
        verifier: for sizes that break what operators assumed.
        grad_matters: whether traced code asked if something requires grad, or if gradients are recorded.
        weight_writes: what leaves do to weights, which must change nothing of them.
        written: positions among the tensors of the arguments of those that the graph writes into.
    """

    def __init__(
        self,
        form: CallForm,
        world: FakeWorld,
        flags: Flags,
        values: ValueProgram,
        verifier: Verifier,
        grad_matters: bool = False,
        weight_writes: Sequence[tuple[Write, torch.Tensor]] = (),
        written: frozenset[int] = frozenset(),
    ) -> None:
        self.values = values
        self._form = form
        self._flags = flags
        self._verifier = verifier
        self.grad_matters = grad_matters
        self._inputs: list[InputSizes] = list(world.inputs)
        self._plain: list[tuple[trees.Path, Any]] = []
        self._held: list[tuple[trees.Path, Any, Any]] = []
        self._paths: list[trees.Path] = []
        self._containers: list[trees.Container] = []
        for path, leaf in trees.walk(world.arguments, (), self._containers):
            self._paths.append(path)
            if not isinstance(leaf, torch.Tensor):
                self._plain.append((path, leaf))
                if (contents := _contents(leaf)) is not None:
                    self._held.append((path, leaf, contents))
        self._glue = SizeSystem(world, {**equalities(world), **world.shapes.glue_guards})
        self._operators = [SizeSystem(world, size_assumptions(world))]
        self._by_shapes: dict[Any, Failure | None] = {}
        self._state: ModelState | None = None
        self._weight_writes = list(weight_writes)
        self._written = written

    def remember(self, state: ModelState) -> None:
        """From now on, what code of the model may find in Python must be what it is in this state."""
        self._state = state

    @property
    def not_kept(self) -> list[str]:
        """What the forward changes in Python at every call, and the graph does not, in words."""
        return [] if self._state is None else self._state.counts

    @property
    def written(self) -> list[str]:
        """Arguments that the graph writes into, in words."""
        return [_words(self._inputs[position].path) for position in sorted(self._written)]

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Failure | None:
        """None if the trace serves a call with these arguments, otherwise why not."""
        failure = self._flags.failure(self.grad_matters)
        if failure is not None:
            return failure
        change = self._state.change() if self._state is not None else None
        if change is not None:
            return Failure(change)
        if not all(write.leaves_alone(weight) for write, weight in self._weight_writes):
            return Failure("the forward now changes a weight in place, which it left alone when it was traced")
        arguments = self._form.normalise(args, kwargs)
        tensors: list[torch.Tensor] = []
        failure = self._structure_failure(arguments, tensors)
        if failure is not None:
            return failure
        key = tuple([(tensor.shape, tensor.dtype) for tensor in tensors])
        if key not in self._by_shapes:
            if len(self._by_shapes) >= MAX_CACHED_SHAPES:
                self._by_shapes.clear()
            failure = self._size_failure(arguments, tensors)
            self._by_shapes[key] = failure or self._value_failure(arguments, of_sizes_only=True)
        return self._by_shapes[key] or self._value_failure(arguments, of_sizes_only=False)

    @property
    def num_variants(self) -> int:
        """Number of sets of operators' assumptions found so far."""
        return len(self._operators)

    def describe(self) -> list[str]:
        """Every assumption that must hold, in words."""
        sizes = [
            f"{self._in_words(guard.source)} (asked at {guard.location or 'an operator'})"
            for guard in self._glue.guards
        ]
        reads = [
            f"{getattr(read.function, '__name__', read.function)} of data gives {read.expected!r} "
            f"(asked at {read.location})"
            for read in self.values.reads
        ]
        return sizes + reads

    def _structure_failure(self, arguments: Any, tensors: list[torch.Tensor]) -> Failure | None:
        position = 0
        paths: list[trees.Path] = []
        plain: list[tuple[trees.Path, Any]] = []
        containers: list[trees.Container] = []
        for path, leaf in trees.walk(arguments, (), containers):
            paths.append(path)
            if isinstance(leaf, torch.Tensor):
                tensors.append(leaf)
                position += 1
            else:
                plain.append((path, leaf))
        if paths != self._paths or len(plain) != len(self._plain):
            return Failure(_structure_message(self._paths, paths))
        if containers != self._containers:
            return Failure(_containers_message(self._containers, containers))
        for (path, was), (other, now) in zip(self._plain, plain, strict=True):
            if path != other or not _same_plain(was, now):
                return Failure(f"argument {_words(path)} is {now!r}, traced with {was!r}")
        for path, leaf, contents in self._held:  # the graph has the very object
            if _contents(leaf) != contents:
                return Failure(f"argument {_words(path)} was written in place since it was traced")
        if self.grad_matters:
            for item, tensor in zip(self._inputs, tensors, strict=True):
                if tensor.requires_grad is not item.requires_grad:
                    return Failure(f"input {_words(item.path)} now has requires_grad={tensor.requires_grad}")
        shared = self.shared_write(tensors)
        return Failure(shared) if shared else None

    def shared_write(self, tensors: Sequence[torch.Tensor]) -> str:
        """Which argument would see a write into another one, as a graph, whose inputs are copies, does not show it.

        Args:
            tensors: of the arguments.
        """
        if self._written:
            strided = [position for position, tensor in enumerate(tensors) if tensor.layout is torch.strided]
            for pair in overlapping([tensors[position] for position in strided]):
                one, other = (_words(self._inputs[strided[index]].path) for index in pair)
                if not self._written.isdisjoint(strided[index] for index in pair):
                    return f"its forward writes into an argument, and {one} and {other} share memory"
        return ""

    def _size_failure(self, arguments: Any, tensors: list[torch.Tensor]) -> Failure | None:
        for item, tensor in zip(self._inputs, tensors, strict=True):
            if tensor.dtype != item.dtype or tensor.dim() != len(item.sizes):
                return Failure(
                    f"input {_words(item.path)} is {tensor.dtype} with {tensor.dim()} dimensions, traced "
                    f"with {item.dtype} and {len(item.sizes)}"
                )
        shapes = [tensor.shape for tensor in tensors]
        failure = self._number_failure(shapes)
        if failure is not None:
            return failure
        broken = self._glue.first_failure(shapes)
        if broken is not None:
            where = f"the model's code at {broken.location}" if broken.location else "an operator"
            return Failure(
                f"{where} took a decision that holds only if "
                f"{self._in_words(broken.source)}; now {self._sizes_in_words(broken.source, shapes)}"
            )
        if any(system.first_failure(shapes) is None for system in self._operators):
            return None
        return self._verified(arguments, shapes)

    def _number_failure(self, shapes: list[torch.Size]) -> Failure | None:
        """Sizes that the trace has as plain numbers, and sizes of 0."""
        varied: list[Dimension] = []
        words: list[str] = []
        for item, shape in zip(self._inputs, shapes, strict=True):
            for dim, (was, now) in enumerate(zip(item.sizes, shape, strict=True)):
                if isinstance(was, sympy.Symbol):
                    if now == 0:
                        return Failure(f"input {_words(item.path)} is empty: dimension {dim} has size 0")
                elif int(was) != now:
                    varied.append((item.path, dim))
                    words.append(f"dimension {dim} of {_words(item.path)} is {now}, traced with {was}")
        return Failure("; ".join(words), tuple(varied)) if varied else None

    def _verified(self, arguments: Any, shapes: list[torch.Size]) -> Failure | None:
        first = self._operators[0].first_failure(shapes)
        asked = self._in_words(first.source) if first is not None else "other sizes"
        if len(self._operators) >= MAX_VARIANTS:
            return Failure(f"an operator assumed {asked}, and {MAX_VARIANTS} other sets were tried already")
        with torch.set_grad_enabled(self._flags.modes.grad is not False):
            found = self._verifier(arguments)
        if isinstance(found, str):
            return Failure(f"an operator assumed {asked}, and without that {found}")
        self._operators.append(found)
        return None

    def _value_failure(self, arguments: Any, of_sizes_only: bool) -> Failure | None:
        found = self.values.first_failure(arguments, of_sizes_only)
        if found is None:
            return None
        read, now = found
        name = getattr(read.function, "__name__", str(read.function))
        inputs = ", ".join(self.values.inputs_of(read)) or "a buffer"
        given = tuple(now.shape) if isinstance(now, torch.Tensor) else now
        return Failure(
            f"the model's code at {read.location} read data of {inputs}: {name} gave {read.expected!r} "
            f"when traced and gives {given!r} now"
        )

    def _in_words(self, source: str) -> str:
        for symbol, (index, dim) in zip(self._glue.symbols, self._glue.positions, strict=True):
            source = _replace_word(source, str(symbol), f"{_words(self._inputs[index].path)}.size({dim})")
        return source

    def _sizes_in_words(self, source: str, shapes: list[torch.Size]) -> str:
        return ", ".join(
            f"{_words(self._inputs[index].path)}.size({dim}) is {shapes[index][dim]}"
            for symbol, (index, dim) in zip(self._glue.symbols, self._glue.positions, strict=True)
            if _replace_word(source, str(symbol), "") != source
        )


def _replace_word(text: str, word: str, by: str) -> str:

    return re.sub(rf"\b{re.escape(word)}\b", by, text)


def _words(path: trees.Path) -> str:
    """A path into normal-form arguments as the user would write it."""
    (_, half), *steps = path
    if half == 1 and steps:
        return str(steps[0].key) + trees.path_string(tuple(steps[1:]))
    return "args" + trees.path_string(tuple(steps))


def _structure_message(was: list[trees.Path], now: list[trees.Path]) -> str:
    gone = [_words(path) for path in was if path not in now]
    new = [_words(path) for path in now if path not in was]
    parts = [f"without {', '.join(gone)}"] if gone else []
    parts += [f"with {', '.join(new)}"] if new else []
    return f"the arguments are now {' and '.join(parts) or 'in another order'}"


def _containers_message(was: list[trees.Container], now: list[trees.Container]) -> str:
    """Which container differs, for arguments with the same leaves."""
    before, after = ({one.path: one for one in containers} for containers in (was, now))
    for path in dict.fromkeys((*after, *before)):
        if len(path) > 1 and before.get(path) != after.get(path):
            kinds = [
                "not given" if one is None else "empty" * (not one.length) + f" {one.kind.removeprefix('builtins.')}"
                for one in (after.get(path), before.get(path))
            ]
            return f"argument {_words(path)} is {kinds[0].strip()}, traced with {kinds[1].strip()}"
    return "the arguments are now in other containers"


def _contents(value: Any) -> Any:
    """What an array, a set or a deque of plain values holds, to compare it later; None for other values."""
    if isinstance(value, (set, deque)):
        items = [(type(item), item) for item in value]
        if not all(isinstance(item, trees.PLAIN) for item in value):
            return None
        return set(items) if isinstance(value, set) else items
    view = view_of(value, sys.maxsize)
    return (type(value), view.read(value, None)) if view is not None and view.kind == "array" else None


def _same_plain(was: Any, now: Any) -> bool:
    if was is now:
        return True
    if type(was) is not type(now):
        return False
    try:
        return bool(was == now)
    except Exception:  # an object whose comparison fails is another object
        return False
