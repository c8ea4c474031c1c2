"""The world a model is traced in: fakes of its weights and arguments, symbolic sizes and numbers, and a twin of it.

Invariant: fakes hold no memory; the real model and its tensors are only read, but for numbers that vary, in whose place
code finds symbols while it runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sympy
import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.contexts import contextmanager
from roundpipe.core.errors import TraceError
from roundpipe.core.module_tree import buffers_at, modules_in, named_modules_in, parameters_at, places_in
from roundpipe.fx.fakes import RecallingMode, fake_input, fake_of, is_fake, running_on_fakes
from roundpipe.fx.sizes import ShapeWorld, SizeSystem, equates_with, expression_of
from roundpipe.fx.twin import make_twin, users_own
from roundpipe.fx.varying import NUMBER, FoundName, Varying, is_found, may_vary, named_places


@dataclass(frozen=True, slots=True)
class InputSizes:
    """One tensor input as the world has it."""

    path: trees.Path
    dtype: torch.dtype
    requires_grad: bool
    sizes: tuple[Any, ...]
    """Per dimension: an int, or the symbol that is this dimension and nothing else."""


class InputNumber(NamedTuple):
    """One number input as the world has it."""

    path: trees.Path
    symbol: sympy.Symbol
    number: torch.SymInt | torch.SymFloat


@dataclass(frozen=True, slots=True)
class TensorHook:
    """A hook of a tensor that belongs to a module: it runs on the user's, where it may leave what it is given."""

    of_twin: Any
    own: Any

    def __call__(self, *tensors: torch.Tensor) -> Any:
        return (self.of_twin if any(map(is_fake, tensors)) else self.own)(*tensors)


class FakeWorld:
    """Fakes of a model and of its inputs.

    Args:
        model: the user's model, on any device, ``meta`` included.
        arguments: ``(args, kwargs)`` in normal form, real.
        dynamic: dimensions that are symbols although the rule says they are not, and numbers that are.
        also: further arguments that the graph has to serve, which differ in sizes only; None = any.
        batch: those of the batch that ``arguments`` are a piece of, real; None: they are no piece.
        has_one_sample: first dimensions of size 1 are no symbols, since the graph is for one sample alone.
    """

    def __init__(
        self,
        model: nn.Module,
        arguments: Any,
        dynamic: Collection[Varying] = (),
        also: Any = None,
        batch: Any = None,
        *,
        has_one_sample: bool = False,
    ) -> None:
        self.model = model
        self._also = also
        self._has_one_sample = has_one_sample
        self.shapes = ShapeWorld()
        self.mode = RecallingMode(self.shapes)
        self.mode.cache_enabled = False  # keys with symbolic sizes cost more than running the operator again
        self.real_arguments = arguments
        self.batch = batch
        self.dynamic = frozenset(dynamic)
        self.real: dict[str, torch.Tensor] = {}
        """Parameters and buffers by name."""
        self.name_of: dict[torch.Tensor, str] = {}
        """Name of a parameter or buffer, real or fake; the first if it has several."""
        self._fake_of: dict[torch.Tensor, torch.Tensor] = {}
        self._places = named_places(dynamic)
        self._make_fakes()
        parameters = [tensor for tensor in self.real.values() if isinstance(tensor, nn.Parameter)]
        self.parameter_at = {self._fake_of[tensor].untyped_storage()._cdata: tensor for tensor in parameters}
        """Storage of each fake parameter, and the real one."""
        self.inputs: list[InputSizes] = []
        self.numbers: list[InputNumber] = []
        """Of the arguments, those that vary."""
        self.recipes: dict[torch.Tensor, Any] = {}
        """By the fake that a run has left on the model, how it is made of sizes alone."""
        self.has_numpy_numbers = False
        """Whether some of them are NumPy's."""
        self.arguments = self._fake_arguments(arguments)
        with self.numbers_opened():
            self.twin, self.name_of_module = make_twin(model, self._fake_of)
        self.real_module = dict(zip(modules_in(self.twin), modules_in(model), strict=True))
        """The user's module of each of the twin's."""
        self.has_data = not any(tensor.is_meta for tensor in trees.tensors(arguments))
        """Whether the example's inputs have data that traced code may ask for."""

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Runs torch in this world."""
        try:
            with running_on_fakes(self.mode):
                yield
        finally:
            self.shapes.forget_listeners()

    @contextmanager
    def numbers_opened(self) -> Iterator[None]:
        """Inside, the model's code finds symbolic numbers where it has numbers that vary, and fakes of such tensors."""
        held = [(place, place.held()) for place in self._places.values()]
        try:
            for name, place in self._places.items():
                place.put(trees.get(self.arguments, name.path))
            yield
        finally:
            for place, value in held:
                place.restore(value)

    def hook_with_own(self, hook: Any) -> Any:
        """A hook of a tensor, as the user's modules have it; anything else is itself."""
        if isinstance(hook, torch.Tensor) or (own := users_own(hook, self.real_module)) is hook:
            return hook
        return TensorHook(hook, own)

    def symbols(self) -> dict[sympy.Symbol, tuple[int, int]]:
        """Each size symbol with the index of its input and its dimension; numbers come behind the tensors."""
        sizes = [*(item.sizes for item in self.inputs), *((each.symbol,) for each in self.numbers)]
        return {
            size: (index, dim)
            for index, own in enumerate(sizes)
            for dim, size in enumerate(own)
            if isinstance(size, sympy.Symbol)
        }

    def example_sizes(self) -> dict[sympy.Symbol, int]:
        """Each size of the arguments that is a symbol, with the example's."""
        shapes = [tensor.shape for tensor in trees.tensors(self.real_arguments)]
        return {symbol: shapes[index][dim] for symbol, (index, dim) in self.symbols().items() if index < len(shapes)}

    def decisions(self, read: Collection[float] = ()) -> SizeSystem:
        """What code decided by numbers of samples alone, which dimension 0 counts.

        Whether there are as many as data say, which gave the numbers that were ``read``, each piece of a batch decides.
        """
        symbols = self.symbols().items()
        numbers = {symbol: place for symbol, place in symbols if not place[1] and place[0] < len(self.inputs)}
        asked = self.shapes.decisions.items()
        return SizeSystem(numbers, {holds: place for holds, place in asked if not equates_with(holds, read)})

    def serves_too(self, assumption: sympy.Basic) -> bool:
        """Whether an assumption holds at the sizes of those other arguments that the graph has to serve."""
        if self._also is None:
            return True
        places = dict(trees.walk(self._also))  # numbers that code has read from data are those of these arguments alone
        known = [each.path for each in self.numbers if each.path in places]
        symbols = {symbol: at for symbol, at in self.symbols().items() if at[0] < len(self.inputs) + len(known)}
        return SizeSystem(symbols, {assumption: ""}).first_failure(sizes_in(self._also, known)) is None

    def fake(self, name: str) -> torch.Tensor:
        """The fake of a parameter or buffer."""
        return self._fake_of[self.real[name]]

    def replaced(self) -> frozenset[str]:
        """Names of parameters and buffers in whose place a forward has put something else."""
        modules = named_modules_in(self.twin)
        return frozenset(name for name in self.real if not self.has_in_place(name, modules))

    def has_in_place(self, name: str, modules: Mapping[str, nn.Module] | None = None) -> bool:
        """Whether the twin has its fake of a parameter or buffer in place, not what a forward put there.

        ``modules``: those of the twin by name, as far as they are known.
        """
        owner, _, attribute = name.rpartition(".")
        module = (modules or {}).get(owner) or self.twin.get_submodule(owner)
        if isinstance(module, torch.jit.ScriptModule):  # it is its own twin, with the real tensors
            return getattr(module, attribute) is self.real[name]
        tensors = module._parameters if attribute in module._parameters else module._buffers
        return tensors.get(attribute) is self.fake(name)

    def static_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake of a real tensor, every size a plain number."""
        return self.mode.from_tensor(tensor.detach(), static_shapes=True)

    def _make_fakes(self) -> None:
        inputs = {place.identity for place in self._places.values()}
        self.real.update(parameters_at(self.model))
        modules = dict(places_in(self.model)) if inputs else {}  # one module may have several names
        for path, buffer in buffers_at(self.model):
            owner, _, name = path.rpartition(".")
            if not inputs or (id(modules[owner]._buffers), name) not in inputs:
                self.real[path] = buffer
        host = torch.device("cpu")
        for name, tensor in self.real.items():
            if tensor not in self._fake_of:
                self._check_layout(tensor, name)
                fake = self._fake_of[tensor] = fake_of(self.mode, tensor, host)
                self.name_of[tensor] = self.name_of[fake] = name

    def _fake_arguments(self, arguments: Any) -> Any:
        leaves = [(path, leaf) for path, leaf in trees.walk(arguments) if isinstance(leaf, torch.Tensor)]
        fakes = iter([self._fake_input(path, leaf) for path, leaf in leaves])
        args, kwargs = arguments
        faked = (
            tuple(trees.map_tensors(value, lambda _: next(fakes)) for value in args),
            {name: trees.map_tensors(value, lambda _: next(fakes)) for name, value in kwargs.items()},
        )
        is_open = {path for path, leaf in trees.walk(faked) if self._is_open(path) and may_vary(leaf)}
        if not is_open:
            return faked
        opened = [self._number(path, leaf) if path in is_open else leaf for path, leaf in trees.walk(faked)]
        return trees.rebuild(faked, opened)

    def _is_open(self, path: trees.Path) -> bool:
        return is_found(path) or (path, NUMBER) in self.dynamic

    def open_argument(self, name: FoundName, value: Any, *, is_own: bool) -> tuple[Any, list[InputNumber]]:
        """A number, or a list of them, as one more argument; what code gets, and what is new.

        ``is_own``: whether each piece of a batch has its own.
        """
        kwargs, known = self.arguments[1], len(self.numbers)
        if name not in kwargs:  # in an earlier run, it is
            opened = [self._number((*name.path, *path), leaf, is_own=is_own) for path, leaf in trees.walk(value)]
            kwargs[name] = trees.rebuild(value, opened)
        return kwargs[name], self.numbers[known:]

    def _number(self, path: trees.Path, number: Any, *, is_own: bool = False) -> Any:
        """A symbolic number, as long as code asks it for nothing that only this one tells."""
        kind = trees.number_kind(number)
        assert kind is not None
        self.has_numpy_numbers |= type(number) is not kind
        symbol, opened = self.shapes.open_number(kind(number), f"number_{len(self.numbers)}", is_own=is_own)
        self.numbers.append(InputNumber(path, symbol, opened))
        return opened

    def _check_layout(self, tensor: torch.Tensor, where: str) -> None:
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else f"a sparse one ({tensor.layout})"
            raise TraceError(
                f"can't trace {type(self.model).__name__}: {where} is {kind}, and graphs take dense ones only"
            )

    def _fake_input(self, path: trees.Path, leaf: torch.Tensor) -> torch.Tensor:
        self._check_layout(leaf, f"the tensor at {trees.path_string(path)} of its arguments")
        is_float, is_given = leaf.is_floating_point() or leaf.is_complex(), not is_found(path)
        is_open = [is_given and (dim == 0 or not is_float) for dim in range(leaf.dim())]
        is_dynamic = [is_open[dim] or (path, dim) in self.dynamic for dim in range(leaf.dim())]
        if self._has_one_sample and leaf.dim() and leaf.shape[0] == 1:
            is_dynamic[0] = False
        fake = fake_input(self.mode, leaf, f"input_{len(self.inputs) + 1}", is_dynamic)
        sizes = tuple(expression_of(size) for size in fake.shape)
        self.inputs.append(InputSizes(path, leaf.dtype, leaf.requires_grad, sizes))
        return fake


def sizes_in(arguments: Any, numbers: Iterable[trees.Path]) -> list[Sequence[Any]]:
    """The sizes of tensors in some arguments, and the numbers at these paths, as `FakeWorld.symbols` counts them."""
    shapes: list[Sequence[Any]] = [tensor.shape for tensor in trees.tensors(arguments)]
    return [*shapes, *((trees.get(arguments, path),) for path in numbers)]
