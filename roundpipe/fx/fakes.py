"""Fake tensors: their modes, how they are made, and which calls on them need help.

Invariant: fakes hold no memory; real tensors are only read.
This file is the only user of torch's fake tensors, and the only importer of its dispatch mode, which sees every
operator below autograd.
"""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

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

from roundpipe.core.compiled_modules import nothing_compiled
from roundpipe.core.contexts import contextmanager
from roundpipe.core.modes import Modes
from roundpipe.core.storages import quant_state_of, without_memory
from roundpipe.core.watched import is_transformed, unseen
from roundpipe.fx.fake_kernels import TAKEN, RecurrentAtOnce, dtype_refused, kernels_as_compiled
from roundpipe.fx.recall import Form, OperatorMemo, is_recalled
from roundpipe.fx.sizes import ShapeWorld, flat_tensors, source_named

NO_FAKE_KERNEL = (DynamicOutputShapeException, UnsupportedOperatorException, NotImplementedError)
DATA_DEPENDENT = (DataDependentOutputException, GuardOnDataDependentSymNode)

_NOISY_LOGGERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")

FAKE: type[torch.Tensor] = FakeTensor


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
        stack.enter_context(RecurrentAtOnce(is_fake))
        if torch.is_anomaly_enabled():  # it prints what fails
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
        yield


@contextmanager
def code_at_other_sizes() -> Iterator[None]:
    """Around code that runs at sizes, or on numbers, that are not the user's, who need not see what it warns of."""
    with code_on_fakes(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def symbols_kept_quiet() -> Iterator[None]:
    """Around a trace, without warnings that name a symbol in the place of a size, as torch gives them.

    The graph calls the same functions: where there is something to warn of, that is said with numbers.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*\b[su]\d+\b")
        yield


def is_fake(value: Any) -> bool:
    """Whether a value is a fake tensor or one wrapped by a function transform."""
    return isinstance(value, FakeTensor) or (isinstance(value, torch.Tensor) and is_transformed(value))


def is_in_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is fake and no view of one with data, which operators on fakes take, too."""
    return is_fake(tensor if tensor._base is None else tensor._base)


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


@contextmanager
def running_on_fakes(mode: FakeTensorMode) -> Iterator[None]:
    """Runs torch on fakes, as a trace does."""
    with code_on_fakes(), mode, enable_python_dispatcher(), kernels_as_compiled():
        yield


def fake_input(mode: FakeTensorMode, leaf: torch.Tensor, name: str, is_dynamic: Sequence[bool]) -> torch.Tensor:
    """A fake of an argument; sizes that are dynamic are symbols of their own, known by the ``name``."""
    kinds = [DimDynamic.DYNAMIC if dynamic else DimDynamic.STATIC for dynamic in is_dynamic]
    on_meta = mode.from_tensor(
        torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"),  # also where the leaf was made for inference
        source=source_named(name),
        symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds, constraint_sizes=[None] * leaf.dim()),
    )
    with in_kernel_invocation_manager(mode):
        meta = on_meta.detach()
    fake = FakeTensor(mode, meta, torch.device("cpu"))  # those on meta are dispatched otherwise
    return fake.requires_grad_() if leaf.requires_grad else fake


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
        if type(tensor) is not nn.Parameter and issubclass(type(tensor), nn.Parameter):
            fake.__class__ = _named_as(type(tensor))
    if (state := quant_state_of(tensor)) is not None:
        fake.quant_state = state  # type: ignore[attr-defined]
    return fake


@functools.cache
def _named_as(kind: type[nn.Parameter]) -> type[FakeTensor]:
    """A class of fakes with the name of a class of packed weights, by which code asks what it has."""
    return type(kind.__name__, (FakeTensor,), {"__module__": kind.__module__})
