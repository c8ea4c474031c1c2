"""When a trace serves a call: what was assumed while tracing, checked for other arguments, from cheap to dear.

Assumptions about sizes are of two kinds. What the model's own Python asked (``if x.shape[0] == 1``) must hold, and so
must sizes be equal that were taken for one. What operators asked to infer a shape only matters through the shape: if
such an assumption fails, the graph is run once on fakes of the new sizes, and if every node has the shape that the
trace says, the assumptions made in that run are a second sufficient set (a *variant*).

Invariant: `Guards.check` returns None only if running the model's Python again would record this graph.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.aliasing import overlapping
from roundpipe.core.errors import TraceError
from roundpipe.core.modes import Modes
from roundpipe.effects.kept import UNMOVED, Moved
from roundpipe.effects.reads import Reads
from roundpipe.fx.arguments import ArgumentForm, Arguments, CallForm, argument_words, place_words, without_found
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.guards.failure import OF_MODEL, Failure
from roundpipe.fx.guards.model_guard import ModelGuard, OwnChanges, Write
from roundpipe.fx.guards.values import ValueProgram, ValueRead
from roundpipe.fx.locations import with_source
from roundpipe.fx.operations import SizeExpression
from roundpipe.fx.sizes import SizeGuard, SizeSystem
from roundpipe.fx.varying import NUMBER, Varying, is_found
from roundpipe.fx.world import FakeWorld, InputSizes

MAX_CACHED_SHAPES = 4096
MAX_VARIANTS = 16

Verifier = Callable[[Any], SizeSystem | str]
"""Runs the traced graph on fakes of some arguments' sizes: what it assumed, or which shape is not the traced one."""


@dataclass(frozen=True, slots=True)
class CallModes:
    """What code may ask of torch: modes, the default dtype, and whether algorithms must be deterministic."""

    modes: Modes
    dtype: torch.dtype
    deterministic: bool

    @staticmethod
    def current() -> CallModes:
        """As it is now, for this thread."""
        return CallModes(Modes.current(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled())

    def difference(self, now: CallModes, grad_matters: bool) -> str | None:
        """What is otherwise at another moment, in words; whether gradients are recorded only if that matters."""
        if now == self:
            return None
        other = now.modes.changes_from(self.modes if grad_matters else replace(self.modes, grad=now.modes.grad))
        if other is not None:
            return f"the model is now called with {other.describe()}"
        if (now.dtype, now.deterministic) != (self.dtype, self.deterministic):
            kind = "deterministic" if now.deterministic else "any"
            return f"the model is now called with default dtype {now.dtype} and {kind} algorithms"
        return None


@dataclass
class GuardedGraph(TracedGraph):
    """A traced graph with what must hold for it to serve a call."""

    guards: Guards = field(init=False, repr=False)
    fails_for_two: TraceError | None = field(default=None, repr=False)
    """Of a graph for one sample, why the model does not run with two such."""


class Guards:
    """All that one trace assumed.

    Args:
        form, world, call_modes: the model's signature, and the world and modes that it was traced in.
        values: the data that traced code read.
        verifier: for sizes that break what operators assumed.
        grad_matters: whether traced code asked if something requires grad, or if gradients are recorded.
        weight_writes: what leaves do to weights, which must change nothing of them.
        written: positions among the tensors of the arguments of those that the graph writes into.
        weights, replaced: see `ModelGuard`.
    """

    def __init__(
        self,
        form: CallForm,
        world: FakeWorld,
        call_modes: CallModes,
        values: ValueProgram,
        verifier: Verifier,
        grad_matters: bool = False,
        weight_writes: Sequence[tuple[Write, torch.Tensor]] = (),
        written: frozenset[int] = frozenset(),
        weights: Collection[str] = (),
        replaced: Collection[str] = (),
    ) -> None:
        self.values = values
        self._form = form
        self._call_modes = call_modes
        self._verifier = verifier
        self.grad_matters = grad_matters
        self._inputs: list[InputSizes] = list(world.inputs)
        self._arguments = ArgumentForm(world.arguments, takes_numpy=world.has_numpy_numbers)
        self._given = ArgumentForm(without_found(world.arguments))
        self._numbers = [each.path for each in world.numbers]
        self._glue = SizeSystem(world.symbols(), world.shapes.glue_assumptions())
        self.decisions = world.decisions(values.numbers)
        """What the glue decided by numbers of samples alone; of a graph for one sample, what it decides for two."""
        self._operators = [SizeSystem(world.symbols(), world.shapes.size_assumptions())]
        positions = self._glue.positions.items()
        self._size_words = {symbol: self._words_for(*position) for symbol, position in positions}
        self._by_shapes: dict[Any, Failure | None] = {}
        self._model: ModelGuard | None = None
        self._weight_writes = list(weight_writes)
        self._written = written
        self._weights = weights, replaced

    def watch(
        self, model: nn.Module, glue: Collection[nn.Module], passing: Collection[nn.Module], own: OwnChanges
    ) -> None:
        """From now on, the model must be what it is now; see `ModelGuard`."""
        self._model = ModelGuard(model, glue, passing, own, *self._weights)

    def restrict(self, reads: Reads) -> None:
        """See `ModelGuard.restrict`."""
        if self._model is not None:
            self._model.restrict(reads)

    @property
    def moved(self) -> Moved:
        """See `KeptPlaces`."""
        return UNMOVED if self._model is None else self._model.moved

    def follow(self, copy: Iterable[tuple[str, Any, Any]]) -> Failure | None:
        """See `KeptPlaces.follow`."""
        return None if self._model is None else self._model.follow(copy)

    @property
    def not_kept(self) -> list[str]:
        """What the forward changes in Python at every call, and the graph does not, in words."""
        return [] if self._model is None else self._model.own.counts

    @property
    def leaves_values(self) -> bool:
        """Whether calls of the graph leave values in Python, where the forward that was traced did."""
        return self._model is not None and bool(self._model.own.kept)

    @property
    def written(self) -> list[str]:
        """Arguments that the graph writes into, in words."""
        return [argument_words(self._inputs[position].path) for position in sorted(self._written)]

    def describe(self) -> list[str]:
        """Every assumption that must hold, in words."""
        sizes = [
            f"{self._in_words(guard.holds)} (asked at {guard.location or 'an operator'})" for guard in self._glue.guards
        ]
        reads = [
            f"{getattr(read.function, '__name__', read.function)} of data gives {read.expected!r} "
            f"(asked at {read.location})"
            for read in self.values.reads
        ]
        return sizes + reads

    def check(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        knows_model: bool = False,
        batch: Arguments | None = None,
    ) -> Failure | None:
        """None if the trace serves a call with these arguments, otherwise why not.

        ``knows_model``: the model is not looked at, since it was compared with what was traced just before, or since
        copies of what was traced run in its place. ``batch``: the arguments are a piece of these, and decisions are
        those of the whole, if the trace serves its sizes.
        """
        if words := self._call_modes.difference(CallModes.current(), self.grad_matters):
            return Failure(words, is_of_modes=True)
        looks = not knows_model
        if looks and self._model is not None and (failure := self._model.change()):
            return failure
        if looks and not all(write.leaves_alone(weight) for write, weight in self._weight_writes):
            words = "the forward now changes a weight in place, which it left alone when it was traced"
            return Failure(words, to_fix=OF_MODEL)
        arguments = self._form.normalise(args, kwargs, batch)
        tensors: list[torch.Tensor] = []
        if words := self._arguments.difference(arguments, tensors):
            return self._failure_of_number(words, self._arguments.changed_number(arguments))
        if words := self._other_tensors(tensors):
            return Failure(words)
        if failure := self._failure_of_shapes(arguments, tensors):
            return failure
        return self._value_failure(self.values.data_failure(arguments, self._decides(batch)))

    def varying(self, failure: Failure, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Varying, ...]:
        """What varies, if that is why these arguments need another trace.

        With the numbers that code reads from data, if arguments of the same form have others.
        """
        arguments = self._form.normalise(args, kwargs)
        is_other = not self._arguments.difference(arguments, []) and self.values.other_data(arguments) is not None
        return (*failure.varying, *self.values.openable) if is_other else failure.varying

    def reads_other_data(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """What code read from data that are others in arguments of the same form, and where, in words; else empty.

        Decisions are left out, of which there are few.
        """
        arguments = self._form.normalise(args, kwargs)
        if self._given.difference(without_found(arguments), []):
            return ""
        read = self.values.other_data(arguments)
        return "" if read is None else self._read_in_words(read)

    def _read_in_words(self, read: ValueRead) -> str:
        name, inputs = self._words_of(read)
        return f"its code reads data of {inputs} ({name}) at {with_source(read.location)}"

    def _failure_of_number(self, words: str, path: trees.Path | None) -> Failure:
        """Arguments differ; the path is that of a number, if one does."""
        if path is None:
            return Failure(words)
        return Failure(words, ((path, NUMBER),), number=place_words(path))

    def _words_for(self, index: int, dim: int) -> str:
        """A size, or a number that varies, as the user would write it."""
        if index < len(self._inputs):
            return f"{argument_words(self._inputs[index].path)}.size({dim})"
        return argument_words(self._numbers[index - len(self._inputs)])

    def _varying_numbers(self, arguments: Any) -> list[tuple[Any]]:
        """Each as the one size of a shape, as `SizeSystem` takes them."""
        return [(trees.get(arguments, path),) for path in self._numbers]

    def _failure_of_shapes(self, arguments: Any, tensors: list[torch.Tensor]) -> Failure | None:
        key = *((tensor.shape, tensor.dtype) for tensor in tensors), *self._varying_numbers(arguments)
        if key not in self._by_shapes:
            if len(self._by_shapes) >= MAX_CACHED_SHAPES:
                self._by_shapes.clear()
            failure = self._size_failure(arguments, tensors)
            self._by_shapes[key] = failure or self._value_failure(self.values.size_failure(arguments))
        return self._by_shapes[key]

    def _decides(self, batch: Arguments | None) -> Arguments | None:
        """A batch in normal form, if the graph serves its sizes, so that its data may decide for its pieces."""
        if batch is None or not self.values.decides:
            return None
        arguments = self._form.normalise(*batch)
        tensors: list[torch.Tensor] = []
        if self._arguments.difference(arguments, tensors) or self._failure_of_shapes(arguments, tensors):
            return None
        return arguments

    def decided_by_number(self, piece: Arguments, batch: Arguments) -> str:
        """Where code decides by the number of samples, and otherwise for this batch than for a piece of it; in words.

        The graph serves the piece.
        """
        failing: list[set[SizeGuard]] = []
        for args, kwargs in (piece, batch) if self.decisions.guards else ():
            tensors: list[torch.Tensor] = []
            if self._arguments.difference(self._form.normalise(args, kwargs), tensors):
                return ""
            failing.append({*self.decisions.failures([tensor.shape for tensor in tensors])})
        differing = failing[0] ^ failing[1] if failing else ()
        places = (with_source(guard.location) for guard in self.decisions.guards if guard in differing)
        return next((f"a decision by their number, another than for a microbatch, at {place}" for place in places), "")

    def _other_tensors(self, tensors: list[torch.Tensor]) -> str:
        """Which of the arguments' tensors is otherwise, beside its dtype and sizes."""
        for item, tensor in zip(self._inputs, tensors, strict=True):
            if tensor.requires_grad is not item.requires_grad and (self.grad_matters or is_found(item.path)):
                return f"input {argument_words(item.path)} now has requires_grad={tensor.requires_grad}"
        return self.shared_write(tensors)

    def shared_write(self, tensors: Sequence[torch.Tensor]) -> str:
        """Which argument would see a write into another one, as a graph, whose inputs are copies, does not show it."""
        if self._written:
            strided = [position for position, tensor in enumerate(tensors) if tensor.layout is torch.strided]
            for pair in overlapping([tensors[position] for position in strided]):
                first, second = (argument_words(self._inputs[strided[index]].path) for index in pair)
                if not self._written.isdisjoint(strided[index] for index in pair):
                    return f"its forward writes into an argument, and {first} and {second} share memory"
        return ""

    def _size_failure(self, arguments: Any, tensors: list[torch.Tensor]) -> Failure | None:
        for item, tensor in zip(self._inputs, tensors, strict=True):
            if tensor.dtype != item.dtype or tensor.dim() != len(item.sizes):
                return Failure(
                    f"input {argument_words(item.path)} is {tensor.dtype} with {tensor.dim()} dimensions, traced "
                    f"with {item.dtype} and {len(item.sizes)}"
                )
        shapes: list[Sequence[Any]] = [tensor.shape for tensor in tensors]
        if failure := self._number_failure(shapes):
            return failure
        shapes += self._varying_numbers(arguments)
        broken = self._glue.first_failure(shapes)
        if broken is not None:
            where = f"the model's code at {broken.location}" if broken.location else "an operator"
            return Failure(
                f"{where} took a decision that holds only if "
                f"{self._in_words(broken.holds)}; now {self._current_sizes(broken.holds, shapes)}",
                number=self._number_in(broken.holds),
                fixed_read=self._fixed_read_in(broken.holds) if broken.is_equality else "",
            )
        if any(system.first_failure(shapes) is None for system in self._operators):
            return None
        return self._verified(arguments, shapes)

    def _number_failure(self, shapes: list[Sequence[Any]]) -> Failure | None:
        """Sizes that the trace has as plain numbers, and sizes of 0."""
        varied: list[Varying] = []
        words: list[str] = []
        for item, shape in zip(self._inputs, shapes, strict=True):
            for dim, (traced, now) in enumerate(zip(item.sizes, shape, strict=True)):
                if isinstance(traced, sympy.Symbol):
                    if now == 0:
                        return Failure(f"input {argument_words(item.path)} is empty: dimension {dim} has size 0")
                elif int(traced) != now:
                    varied.append((item.path, dim))
                    words.append(f"dimension {dim} of {argument_words(item.path)} is {now}, traced with {traced}")
        return Failure("; ".join(words), tuple(varied)) if varied else None

    def _verified(self, arguments: Any, shapes: list[Sequence[Any]]) -> Failure | None:
        first = self._operators[0].first_failure(shapes)
        asked = self._in_words(first.holds) if first is not None else "other sizes"
        if len(self._operators) >= MAX_VARIANTS:
            return Failure(f"an operator assumed {asked}, and {MAX_VARIANTS} other sets were tried already")
        with torch.set_grad_enabled(self._call_modes.modes.grad is not False):
            variant = self._verifier(arguments)
        if isinstance(variant, str):
            return Failure(f"an operator assumed {asked}, and without that {variant}")
        self._operators.append(variant)
        return None

    def _value_failure(self, failure: tuple[ValueRead, Any] | None) -> Failure | None:
        if failure is None:
            return None
        read, now = failure
        name, inputs = self._words_of(read)
        answer = tuple(now.shape) if isinstance(now, torch.Tensor) else now
        return Failure(
            f"the model's code at {read.location} read data of {inputs}: {name} gave {read.expected!r} "
            f"when traced and gives {answer!r} now"
        )

    def _words_of(self, read: ValueRead) -> tuple[str, str]:
        """What a read calls, and of whose data."""
        name = getattr(read.function, "__name__", str(read.function))
        return name, ", ".join(self.values.inputs_of(read)) or "a buffer"

    def _number_in(self, assumption: SizeExpression) -> str:
        """A number that varies in an assumption, in words; empty if there is none."""
        return next(map(place_words, self._paths_in(assumption)), "")

    def _fixed_read_in(self, assumption: SizeExpression) -> str:
        """What reads a number that an assumption says to be a certain one, or to make one, in words."""
        names = (path[1].key for path in self._paths_in(assumption))
        read = next((read for name in names if (read := self.values.inputs.get(name)) is not None), None)
        return "" if read is None else self._read_in_words(read)

    def _paths_in(self, assumption: SizeExpression) -> list[trees.Path]:
        """Where the numbers that vary in an assumption are among the arguments."""
        names = _names_in(assumption)
        indices = (index for name, (index, _) in self._glue.positions.items() if name in names)
        return [self._numbers[index - len(self._inputs)] for index in indices if index >= len(self._inputs)]

    def _in_words(self, assumption: SizeExpression) -> str:
        """An assumption with the arguments' sizes in place of symbols."""
        return re.sub(r"\w+", lambda match: self._size_words.get(match[0], match[0]), assumption.source)

    def _current_sizes(self, assumption: SizeExpression, shapes: list[Sequence[Any]]) -> str:
        names = _names_in(assumption)
        positions = {name: position for name, position in self._glue.positions.items() if name in names}
        return ", ".join(f"{self._size_words[name]} is {shapes[i][dim]}" for name, (i, dim) in positions.items())


def _names_in(assumption: SizeExpression) -> list[str]:
    return re.findall(r"\w+", assumption.source)
