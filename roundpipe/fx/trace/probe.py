"""Output sizes of code that can't run on fakes of any size, found by running it at two.

A copy of a module runs twice on random data, a function that loops over a size on fakes of plain sizes: at the
example's sizes and at others. An output dimension that changes is matched with the input dimension, or the product of
two, that changes in the same way.

Invariant: neither the user's module nor any random state changes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import sympy
import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.contexts import contextmanager
from roundpipe.core.errors import TraceError
from roundpipe.effects.snapshot import ModuleSnapshot, PythonSnapshot
from roundpipe.fx.fakes import code_at_other_sizes, real_world, static_mode
from roundpipe.fx.sizes import Symbolic, expression_of, flat_sizes, flat_tensors, flat_values, size_function
from roundpipe.fx.trace.leaves import LeafRun, containers_mutated, contents_of
from roundpipe.fx.world import FakeWorld

Probed = TypeVar("Probed")

MAX_DIVISOR = 64
"""Sizes are looked for up to this part of another size, as pooling and striding make them."""


@contextmanager
def _real_world() -> Iterator[None]:
    """Real tensors; torch's random state as it was afterwards."""
    with real_world(), torch.random.fork_rng(devices=[]):
        yield


_GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of it, without what is before the point, are spread all over and never the same."""


class _Sizes:
    """Numbers for the symbols of some fakes.

    Args:
        enlarged: 0 for those of the example, 1 for larger ones, 2 for others to see whether expressions hold.
        in_steps: larger by a factor, for code that takes only multiples of some number.
    """

    def __init__(self, values: list[Any], enlarged: int, in_steps: bool = False) -> None:
        hints, sizes = _hints_of(values), map(expression_of, flat_sizes(values))
        self._numbers: dict[sympy.Symbol, int] = {}
        for index, symbol in enumerate(sorted({symbol for size in sizes for symbol in _symbols_in(size)}, key=str)):
            number = hints.get(symbol, 2)
            larger = number * (index + 1 + enlarged) if in_steps else number + (1 + enlarged) * index + 7 * enlarged - 4
            self._numbers[symbol] = larger if enlarged else number

    def number(self, size: Any) -> Any:
        expression = expression_of(size)
        if not isinstance(expression, sympy.Basic):
            return size
        return int(size_function(expression, self._numbers)(*self._numbers.values()))

    def tensor(self, fake: torch.Tensor) -> torch.Tensor:
        """Data of a fake's shape that look random; zeros where only numbers make sense as indices.

        They are not drawn, or what runs on them would seem to draw random numbers itself.
        """
        shape = [self.number(size) for size in fake.shape]
        if fake.is_floating_point() or fake.is_complex():
            places = torch.arange(math.prod(shape), dtype=torch.float64)
            real = ((places * _GOLDEN + 0.1) % 1 * 2 - 1).reshape(shape).to(fake.dtype)
            return real.requires_grad_(fake.requires_grad)
        if fake.dtype is torch.bool:
            return torch.ones(shape, dtype=torch.bool)
        return torch.zeros(shape, dtype=fake.dtype)

    def real(self, value: Any) -> Any:
        return self.tensor(value) if isinstance(value, torch.Tensor) else self.number(value)


def _symbols_in(expression: Any) -> set[sympy.Symbol]:
    return getattr(expression, "free_symbols", set())


def _hints_of(values: list[Any]) -> dict[Any, int]:
    """The example's number for every symbol in some sizes."""
    hints: dict[Any, int] = {}
    for size in flat_sizes(values):
        if isinstance(size, torch.SymInt):
            environment = size.node.shape_env
            known = getattr(environment, "backed_var_to_val", None) or environment.var_to_val
            hints.update({symbol: int(known[symbol]) for symbol in _symbols_in(expression_of(size)) if symbol in known})
    return hints


def _map_values(value: Any, function: Callable[[Any], Any]) -> Any:
    """A structure with tensors and symbolic numbers replaced; parts without any stay the same objects."""
    if isinstance(value, (torch.Tensor, *Symbolic)):
        return function(value)
    if not flat_values(value):
        return value
    if isinstance(value, torch.Size):
        return torch.Size([_map_values(size, function) for size in value])
    return trees.with_children(value, [_map_values(child, function) for _, child in trees.children(value) or ()])


def probe_module(world: FakeWorld, name: str, twin: nn.Module, args: Any, kwargs: Any) -> LeafRun:
    """Runs a copy of a module on random data of the arguments' shapes, twice.

    Sizes of the arguments are taken for independent and arbitrary. If the module fails like that, they are enlarged by
    whole factors; if that fails too, sizes that the example has equal (the lengths of hidden states and mask, say) are
    taken for one, which becomes an assumption of the trace.

    Raises:
        TraceError: an output dimension can't be told from the input's dimensions.
        Exception: what the module raised.
    """
    probe = partial(_probe_module, world, name, twin, args, kwargs)
    return _at_sizes_that_fit(flat_values(args, kwargs), (partial(probe, False), partial(probe, True)))


def _at_sizes_that_fit(values: list[Any], probes: Sequence[Callable[[], Probed]]) -> Probed:
    """What the first probe that does not fail finds; at sizes that are alike in the example, if need be."""
    while True:
        errors: list[Exception] = []
        for probe in probes:
            try:
                return probe()
            except Exception as error:
                errors.append(error)
        if not _equate(values):
            raise errors[0]


def _equate(values: list[Any]) -> bool:
    """Takes symbols for equal that have one number in the example; whether there were any."""
    environments = [size.node.shape_env for size in flat_sizes(values) if isinstance(size, torch.SymInt)]
    known: dict[int, sympy.Symbol] = {}
    has_equal = False
    for symbol, number in sorted(_hints_of(values).items(), key=str):
        first = known.setdefault(number, symbol)
        has_equal |= first != symbol and bool(environments[0].evaluate_expr(sympy.Eq(first, symbol)))
    return has_equal


def _probe_module(world: FakeWorld, name: str, twin: nn.Module, args: Any, kwargs: Any, in_steps: bool) -> LeafRun:
    run = LeafRun()
    original, values = world.model.get_submodule(name), flat_values(args, kwargs)
    sizes = [_Sizes(values, enlarged, in_steps) for enlarged in (0, 1)]
    with _real_world():
        results = [_observed_call(run, _real_copy(original, twin.training), args, kwargs, numbers) for numbers in sizes]
    has_grad = any(tensor.requires_grad for tensor in (*flat_tensors(values), *twin.parameters()))
    run.out = _fit(results, sizes, values, has_grad)
    if _needs_check(run.out, values):
        numbers = _Sizes(values, 2, in_steps)
        with _real_world():
            _check(run.out, _call(_real_copy(original, twin.training), args, kwargs, numbers), numbers)
    return run


def _observed_call(run: LeafRun, module: nn.Module, args: Any, kwargs: Any, numbers: _Sizes) -> Any:
    """The output of a module on random data; ``run`` gets what else the call does."""
    weights = [(parameter, parameter.detach().clone()) for parameter in module.parameters()]
    state = torch.random.get_rng_state()
    tree, python = ModuleSnapshot(module.modules()), PythonSnapshot(module.modules())
    out = _call(module, args, kwargs, numbers)
    run.random |= not torch.equal(state, torch.random.get_rng_state())
    if tree.replaced_parameter() or not all(torch.equal(parameter, before) for parameter, before in weights):
        run.side_effects["a parameter"] = None
    run.note_python(tree, python, lambda: _call(module, args, kwargs, numbers))
    if python.restore_generators():
        run.side_effects["the state of a torch.Generator"] = None
    python.restore()
    return out


def _needs_check(out: Any, values: list[Any]) -> bool:
    """Whether sizes of an output are made of those of the inputs by more than copying and multiplying."""
    known = set(map(expression_of, flat_sizes(values)))
    return any(
        isinstance(expression, sympy.Basic) and expression not in known and not expression.is_Mul
        for expression in map(expression_of, flat_sizes(trees.tensors(out)))
    )


def _check(out: Any, real: Any, numbers: _Sizes) -> None:
    """Raises if a result at further sizes is not what the fitted sizes say."""
    for fake, tensor in zip(trees.tensors(out), trees.tensors(real), strict=True):
        expected = [numbers.number(size) for size in fake.shape]
        if expected != list(tensor.shape):
            raise TraceError(f"the sizes of an output can't be told: expected {expected}, found {list(tensor.shape)}")


def _call(module: nn.Module, args: Any, kwargs: Any, numbers: _Sizes) -> Any:
    """The output of a module on random data.

    Raises:
        TraceError: it changes one of its arguments.
    """
    positional, keywords = _map_values(args, numbers.real), _map_values(kwargs, numbers.real)
    before = contents_of(positional, keywords)
    versions = [(tensor, tensor._version) for tensor in trees.tensors([positional, keywords])]
    with code_at_other_sizes():
        out = module(*positional, **keywords)
    is_written = any(tensor._version != version for tensor, version in versions)
    if is_written or containers_mutated(before, positional, keywords):
        raise TraceError("it changes a tensor, list, dict or object that it takes as an argument")
    return out


def probe_sizes(func: Any, args: Any, kwargs: Any) -> Any:
    """The output, with fakes, of a function that runs on fakes whose sizes are plain numbers; nothing is computed.

    Raises:
        TraceError: an output dimension can't be told from the input's, or it changes or returns an argument.
        Exception: what the function raised.
    """
    values = flat_values(args, kwargs)

    def result(numbers: _Sizes) -> Any:
        positional, keywords = _map_values(args, numbers.real), _map_values(kwargs, numbers.real)
        given = flat_tensors(positional, keywords)
        versions = [tensor._version for tensor in given]
        out = func(*positional, **keywords)
        places = {tensor.untyped_storage()._cdata for tensor in given}
        if versions != [tensor._version for tensor in given] or any(
            tensor.untyped_storage()._cdata in places for tensor in flat_tensors(out)
        ):
            raise TraceError("it changes a tensor that it takes as an argument, or returns one")
        return out

    def probe() -> Any:
        sizes = [_Sizes(values, enlarged) for enlarged in (0, 1, 2)]
        with _real_world(), static_mode():
            *results, last = map(result, sizes)
        has_grad = any(tensor.requires_grad for tensor in flat_tensors(values))
        out = _fit(results, sizes[:2], values, has_grad)
        _check(out, last, sizes[2])
        return out

    return _at_sizes_that_fit(values, [probe])


def probe_function(func: Any, args: Any, kwargs: Any, data_of: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:
    """The output, with fakes, of a function without a fake kernel.

    Args:
        func, args, kwargs: the call, on fakes.
        data_of: the example's data of a fake, if they are known.
    """
    values = flat_values(args, kwargs)
    exact, larger = _Sizes(values, 0), _Sizes(values, 1)

    def example(value: Any) -> Any:
        known = data_of(value) if isinstance(value, torch.Tensor) else None
        return exact.real(value) if known is None else known

    def result(real: Callable[[Any], Any]) -> Any:
        return func(*_map_values(args, real), **_map_values(kwargs, real))

    with _real_world():
        first = result(example)
        try:
            second = result(larger.real)
        except Exception:
            if any(tensor.dim() for tensor in trees.tensors(first)):
                raise
            second = first  # numbers have no sizes to be told
    has_grad = any(tensor.requires_grad for tensor in flat_tensors(values))
    return _fit([first, second], [exact, larger], values, has_grad)


def _fit(results: list[Any], sizes: list[_Sizes], values: list[Any], has_grad: bool) -> Any:
    """The first result with fakes whose sizes are expressions that fit both results."""
    symbolic = [size for size in flat_sizes(values) if isinstance(size, torch.SymInt)]
    candidates = [(sizes[0].number(size), sizes[1].number(size), size) for size in symbolic]
    numbers_out = [leaf for leaf in trees.leaves(results[0]) if isinstance(leaf, (int, float, complex))]
    if numbers_out:
        raise TraceError(
            f"it returns {numbers_out[0]!r}, a plain number that may be another for other data; return a tensor"
        )
    others = iter(trees.tensors(results[1]))

    def fake(first: torch.Tensor) -> torch.Tensor:
        second = next(others)
        shape = [_size_for(a, b, candidates) for a, b in zip(first.shape, second.shape, strict=True)]
        result = torch.empty(shape, dtype=first.dtype)
        return result.requires_grad_().clone() if has_grad and first.requires_grad else result

    return trees.map_tensors(results[0], fake)


def _size_for(first: int, second: int, candidates: list[tuple[int, int, Any]]) -> Any:
    if first == second:
        return first
    for c, d, factor in [(1, 1, 1), *candidates]:
        for a, b, size in candidates:
            if (a * c, b * d) == (first, second):
                return size * factor
    for a, b, size in candidates:
        if a - first == b - second:
            return size - (a - first)
        for part in range(2, MAX_DIVISOR + 1):
            if (a // part, b // part) == (first, second):
                return size // part
            if (-(-a // part), -(-b // part)) == (first, second):
                return (size + part - 1) // part
    raise TraceError(
        f"an output dimension is {first} at the example's sizes and {second} at others, which matches no "
        f"dimension of the inputs"
    )


def _real_copy(module: nn.Module, training: bool) -> nn.Module:
    """A deep copy with real data, random where the original is on the meta device, and without hooks."""
    if isinstance(module, torch.jit.ScriptModule):
        module.train(training)
        return module
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        data = tensor.detach()
        if data.is_meta:
            data = torch.randn(data.shape) * 0.02 if data.is_floating_point() else torch.zeros(data.shape)
            data = data.to(tensor.dtype)
        data = data.cpu().clone()
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(data, requires_grad=tensor.requires_grad) if is_parameter else data
    clone = copy.deepcopy(module, memo)
    for inner in clone.modules():
        inner._forward_hooks.clear()
        inner._forward_pre_hooks.clear()
    clone.train(training)
    return clone
