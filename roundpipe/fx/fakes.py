"""The world a model is traced in: fake tensors, symbolic sizes, and a twin of the model that holds them.

Invariant: fakes hold no memory; the real model and its tensors are only read.
This file is the only user of torch's fake tensors, and the only importer of its dispatch mode, which sees every
operator below autograd.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.fx.experimental.symbolic_shapes import DimDynamic, GuardOnDataDependentSymNode, StatelessSymbolicContext

from roundpipe.core import trees
from roundpipe.core.compiled_modules import nothing_compiled
from roundpipe.core.contexts import contextmanager
from roundpipe.core.errors import TraceError
from roundpipe.core.modes import Modes
from roundpipe.core.module_tree import buffers_at, modules_in, named_modules_in, parameters_at
from roundpipe.core.storages import quant_state_of, without_memory
from roundpipe.core.watched import is_transformed, unseen
from roundpipe.fx.fake_kernels import TAKEN, dropout_as_compiled, dtype_refused
from roundpipe.fx.recall import Form, OperatorMemo, is_recalled
from roundpipe.fx.sizes import ShapeWorld, SizeSystem, equates_with, expression_of, flat_tensors
from roundpipe.fx.twin import make_twin

NO_FAKE_KERNEL = (DynamicOutputShapeException, UnsupportedOperatorException, NotImplementedError)
DATA_DEPENDENT = (DataDependentOutputException, GuardOnDataDependentSymNode)

_NOISY_LOGGERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")

FAKE: type[torch.Tensor] = FakeTensor
Dimension = tuple[trees.Path, int]
"""A dimension of an input: the path to its tensor, and which one."""


@contextmanager
def code_on_fakes() -> Iterator[None]:
    """Around code that runs on fakes: torch compiles none of it, and does not log what fails.

    That is handled, and reported in words.
    """
    with ExitStack() as stack:
        for name in _NOISY_LOGGERS:
            log = logging.getLogger(name)
            stack.callback(setattr, log, "disabled", log.disabled)
            log.disabled = True  # a change of level would empty the caches of all loggers
        stack.enter_context(nothing_compiled())
        if torch.is_anomaly_enabled():  # it prints what fails
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
        yield


@contextmanager
def code_at_other_sizes() -> Iterator[None]:
    """Around code that runs at sizes, or on numbers, that are not the user's, who need not see what it warns of."""
    with code_on_fakes(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def is_fake(value: Any) -> bool:
    """Whether a value is a fake tensor or one wrapped by a function transform."""
    return isinstance(value, FakeTensor) or (isinstance(value, torch.Tensor) and is_transformed(value))


_NORMS = {
    torch.nn.functional.batch_norm: inspect.signature(torch.nn.functional.batch_norm),
    torch.nn.functional.instance_norm: inspect.signature(torch.nn.functional.instance_norm),
    torch.batch_norm: inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
            for name in "input weight bias running_mean running_var training momentum eps cudnn_enabled".split()
        ]
    ),
}


def written_unseen(function: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that a call writes although their versions stay the same: running statistics, lists of tensors."""
    name = getattr(function, "__name__", "")
    if name.startswith("_foreach_") and name.endswith("_"):
        return flat_tensors(args[:1])
    signature = _NORMS.get(function)
    if signature is None:
        return []
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    writes = arguments["use_input_stats"] if "use_input_stats" in arguments else arguments["training"]
    statistics = [arguments["running_mean"], arguments["running_var"]]
    return [tensor for tensor in statistics if writes and isinstance(tensor, torch.Tensor)]


_RECURRENT = (torch.gru, torch.lstm, torch.rnn_tanh, torch.rnn_relu)


def draws_unseen(function: Any, args: Any) -> bool:
    """Whether a call draws random numbers although no operator on fakes does: dropout between recurrent layers."""
    if function not in _RECURRENT:
        return False
    has_biases = next(index for index, value in enumerate(args) if type(value) is bool)
    num_layers, dropout, is_training = args[has_biases + 1 : has_biases + 4]
    return bool(num_layers > 1 and dropout and is_training)


@contextmanager
def real_world() -> Iterator[None]:
    """Inside, tensors are real although a world is entered, and no mode sees functions of them."""
    with unset_fake_temporarily(), no_python_dispatcher(), unseen():
        yield


def is_of_no_world(tensor: torch.Tensor) -> bool:
    """Whether a tensor has data of its own, while what is computed is fake."""
    if is_fake(tensor) or tensor.is_meta or is_transformed(tensor) or tensor.layout is not torch.strided:
        return False
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


@dataclass(frozen=True, slots=True)
class InputSizes:
    """One tensor input as the world has it."""

    path: trees.Path
    dtype: torch.dtype
    requires_grad: bool
    sizes: tuple[Any, ...]
    """Per dimension: an int, or the symbol that is this dimension and nothing else."""


class LenientMode(FakeTensorMode):
    """Runs what the kernels for fakes refuse and those for data take."""

    def __init__(self, shape_env: ShapeWorld | None = None) -> None:
        super().__init__(shape_env=shape_env, allow_non_fake_inputs=True)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtype = dtype_refused(func, args)
        if dtype is None:
            return super().dispatch(func, types, args, kwargs)
        with self:
            taken = [arg.to(TAKEN) if isinstance(arg, torch.Tensor) and arg.dtype is dtype else arg for arg in args]
        result: Any = super().dispatch(func, types, taken, kwargs)
        with self:
            return result.to(dtype)


class RecallingMode(LenientMode):
    """Infers an operator once for fakes of the same symbolic sizes."""

    def __init__(self, shapes: ShapeWorld) -> None:
        super().__init__(shapes)
        self._memo = OperatorMemo(shapes, self._device_of, self._make)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def infer() -> Any:
            return super(RecallingMode, self).dispatch(func, types, args, kwargs)

        if not is_recalled(func):
            return infer()
        keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        modes = Modes.current(), torch.get_default_dtype(), *(key.raw_repr() for key in keys)
        return self._memo.call(func, args, kwargs or {}, modes, infer)

    def _device_of(self, tensor: torch.Tensor) -> torch.device | None:
        """The device of a fake of this mode that is nothing beside its form; None for another tensor."""
        is_plain = (
            type(tensor) is FakeTensor
            and tensor.fake_mode is self
            and tensor.constant is None
            and tensor.layout is torch.strided
            and not (tensor.is_complex() or tensor.is_neg() or tensor.is_inference())
        )
        return tensor.fake_device if is_plain else None  # type: ignore[attr-defined]

    def _make(self, form: Form, source: torch.Tensor | None) -> torch.Tensor:
        """A fake of a form, in the memory of another if there is one."""
        if source is None:  # memory is made with it, of which torch would compute how large it is
            source = without_memory(
                FakeTensor,
                form.shape,
                form.stride,
                dtype=form.dtype,
                device=torch.device("meta"),
                offset=form.offset,
                num_bytes=form.num_bytes,
            )
            with in_kernel_invocation_manager(self):
                meta = source.detach()
        else:
            with in_kernel_invocation_manager(self):
                meta = torch.as_strided(source, form.shape, form.stride, form.offset)
        return FakeTensor(self, meta, form.device)


class FakeWorld:
    """Fakes of a model and of its inputs.

    Args:
        model: the user's model, on any device, ``meta`` included.
        arguments: ``(args, kwargs)`` in normal form, real.
        dynamic: dimensions that are symbols although the rule says they are not.
        also: further arguments that the graph has to serve, which differ in sizes only; None = any.
        batch: those of the batch that ``arguments`` are a piece of, real; None: they are no piece.
    """

    def __init__(
        self,
        model: nn.Module,
        arguments: Any,
        dynamic: Collection[Dimension] = (),
        also: Any = None,
        batch: Any = None,
    ) -> None:
        self.model = model
        self._also = also
        self.shapes = ShapeWorld()
        self.mode = RecallingMode(self.shapes)
        self.mode.cache_enabled = False  # keys with symbolic sizes cost more than running the operator again
        self.real_arguments = arguments
        self.batch = batch
        self._dynamic = frozenset(dynamic)
        self.real: dict[str, torch.Tensor] = {}
        """Parameters and buffers by name."""
        self.name_of: dict[torch.Tensor, str] = {}
        """Name of a parameter or buffer, real or fake; the first if it has several."""
        self._fake_of: dict[torch.Tensor, torch.Tensor] = {}
        self._make_fakes()
        parameters = [tensor for tensor in self.real.values() if isinstance(tensor, nn.Parameter)]
        self.parameter_at = {self._fake_of[tensor].untyped_storage()._cdata: tensor for tensor in parameters}
        """Storage of each fake parameter, and the real one."""
        self.twin, self.name_of_module = make_twin(model, self._fake_of)
        self.real_module = dict(zip(modules_in(self.twin), modules_in(model), strict=True))
        """The user's module of each of the twin's."""
        self.inputs: list[InputSizes] = []
        self._num_inputs = 0
        self.arguments = self._fake_arguments(arguments)
        self.has_data = not any(tensor.is_meta for tensor in trees.tensors(arguments))
        """Whether the example's inputs have data that traced code may ask for."""

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Runs torch in this world."""
        with ExitStack() as stack:
            stack.callback(self.shapes.forget_listeners)
            stack.enter_context(code_on_fakes())
            stack.enter_context(self.mode)
            stack.enter_context(enable_python_dispatcher())
            stack.enter_context(dropout_as_compiled())
            yield

    def symbols(self) -> dict[sympy.Symbol, tuple[int, int]]:
        """Each size symbol with the index of its input and its dimension."""
        return {
            size: (index, dim)
            for index, item in enumerate(self.inputs)
            for dim, size in enumerate(item.sizes)
            if isinstance(size, sympy.Symbol)
        }

    def decisions(self, read: Collection[float] = ()) -> SizeSystem:
        """What code decided by numbers of samples alone, which dimension 0 counts.

        Whether there are as many as data say, which gave the numbers that were ``read``, each piece of a batch decides.
        """
        numbers = {symbol: place for symbol, place in self.symbols().items() if not place[1]}
        asked = self.shapes.decisions.items()
        return SizeSystem(numbers, {holds: place for holds, place in asked if not equates_with(holds, read)})

    def serves_too(self, assumption: sympy.Basic) -> bool:
        """Whether an assumption holds at the sizes of those other arguments that the graph has to serve."""
        if self._also is None:
            return True
        shapes = [tensor.shape for tensor in trees.tensors(self._also)]
        return SizeSystem(self.symbols(), {assumption: ""}).first_failure(shapes) is None

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
        self.real.update(parameters_at(self.model))
        self.real.update(buffers_at(self.model))
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
        return (
            tuple(trees.map_tensors(value, lambda _: next(fakes)) for value in args),
            {name: trees.map_tensors(value, lambda _: next(fakes)) for name, value in kwargs.items()},
        )

    def _check_layout(self, tensor: torch.Tensor, where: str) -> None:
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else f"a sparse one ({tensor.layout})"
            raise TraceError(
                f"can't trace {type(self.model).__name__}: {where} is {kind}, and graphs take dense ones only"
            )

    def _fake_input(self, path: trees.Path, leaf: torch.Tensor) -> torch.Tensor:
        self._check_layout(leaf, f"the tensor at {trees.path_string(path)} of its arguments")
        is_float = leaf.is_floating_point() or leaf.is_complex()
        is_dynamic = [dim == 0 or not is_float or (path, dim) in self._dynamic for dim in range(leaf.dim())]
        kinds = [DimDynamic.DYNAMIC if dynamic else DimDynamic.STATIC for dynamic in is_dynamic]
        self._num_inputs += 1
        from torch._dynamo.source import ConstantSource  # takes seconds, which torch takes when operators run on fakes

        on_meta = self.mode.from_tensor(
            torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"),  # also where the leaf was made for inference
            source=ConstantSource(f"input_{self._num_inputs}"),
            symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds, constraint_sizes=[None] * leaf.dim()),
        )
        with in_kernel_invocation_manager(self.mode):
            meta = on_meta.detach()
        fake = FakeTensor(self.mode, meta, torch.device("cpu"))  # those on meta are dispatched otherwise
        if leaf.requires_grad:
            fake.requires_grad_()
        sizes = tuple(expression_of(size) for size in fake.shape)
        self.inputs.append(InputSizes(path, leaf.dtype, leaf.requires_grad, sizes))
        return fake


def static_mode() -> FakeTensorMode:
    """Where fakes have plain numbers as sizes."""
    return LenientMode()


@contextmanager
def recalled(mode: FakeTensorMode) -> Iterator[None]:
    """Inside, an operator on fakes of the same plain sizes is inferred once."""
    before, mode.cache_enabled = mode.cache_enabled, True
    try:
        yield
    finally:
        mode.cache_enabled = before


def fake_of(mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A fake on a device of the size and kind of a tensor, wherever that is; a leaf of autograd.

    Made by hand: a large model has thousands, and making them through dispatch takes seconds.
    """
    with torch.no_grad():
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    fake = FakeTensor(mode, meta, device)
    if tensor.requires_grad:
        fake.requires_grad_()
    if isinstance(tensor, nn.Parameter):
        fake._is_param = True  # what isinstance(fake, nn.Parameter) asks
    if (state := quant_state_of(tensor)) is not None:
        fake.quant_state = state  # type: ignore[attr-defined]
    return fake
