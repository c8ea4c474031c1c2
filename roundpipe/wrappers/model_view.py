"""The user's model seen through a wrapper: attributes, parameters, buffers, state and modules are the model's own.

What torch.nn.Module's own methods would do to a wrapper is done to the model, after what is running on its weights is
done, or is refused where it can't be meant.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from roundpipe.core.compiled_modules import never_compiled
from roundpipe.core.contexts import contextmanager
from roundpipe.core.errors import ConfigError
from roundpipe.core.module_tree import named_modules_in
from roundpipe.runtime.optimizer.update import inside_optimizer
from roundpipe.wrappers.session import Session

_OWN_ATTRIBUTES = ("training", "forward", "_original_forward", "_is_accelerate_prepared")
"""Set on the wrapper, not on the model: a forward that is put in the place of its own, as `accelerate` does."""
_ON_DEVICE = frozenset({"generate"})
"""Methods of models that run on a device when the wrapper is asked for them."""


class _BoundForward(functools.partial[Any]):
    """A wrapper's ``forward``, of which `inspect.signature` tells the model's."""

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.args[0].model.forward)


class ForwardOfModel:
    """Makes a ``forward`` that takes anything show the signature of the wrapped model's.

    Torch compiles none of it: a call is the work of many threads.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = never_compiled(function)
        self.__doc__ = function.__doc__

    def __get__(self, wrapper: ModelView | None, owner: type) -> Callable[..., Any]:
        return self._function if wrapper is None else _BoundForward(self._function, wrapper)


class ModelView(nn.Module):
    """A module without parameters, buffers or submodules of its own: the original model answers for it."""

    _session: Session

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The model's, for those who ask what it is: whether it is a `PreTrainedModel`, what its ``forward`` takes."""
        session = self.__dict__.get("_session")
        return type(self) if session is None else type(session.shown)

    @property
    def model(self) -> nn.Module:
        """The wrapped module."""
        return self._session.model

    def set_original_model(self, original_model: nn.Module) -> None:
        """Answer attribute access with another model than the wrapped one."""
        if not isinstance(original_model, nn.Module):
            raise ConfigError(f"original_model must be an nn.Module, got {type(original_model).__name__}")
        self._session.shown = original_model

    @property
    def _target(self) -> nn.Module:
        return self._session.shown

    def __getattr__(self, name: str) -> Any:
        session = self.__dict__.get("_session")
        if session is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        value = getattr(session.shown, name)
        if name in _ON_DEVICE and callable(value) and not session.closed:
            return functools.update_wrapper(functools.partial(session.run_on_device, name), value)
        return value

    @contextmanager
    def streamed(self) -> Iterator[nn.Module]:
        """The model's own code on the first device, without gradients, as ``generate`` runs: for loops of your own.

        ::

            with model.streamed() as on_device:
                outputs = on_device(tokens.to(on_device.device), past_key_values=cache)

        What the context gives is a copy of the model whose weights come to the device as its code reads them, and stay
        there as far as memory allows. It takes tensors on the device and gives such; the device is current inside.

        Raises:
            ConfigError: the wrapper is called inside.
            DeviceMemoryError: what the code makes does not fit beside the largest of its weights.
        """
        with self._session.streaming() as streamed, streamed.open() as model:
            yield model

    def __setattr__(self, name: str, value: Any) -> None:
        if "_session" not in self.__dict__:
            super().__setattr__(name, value)
        elif name in _OWN_ATTRIBUTES:
            self.__dict__[name] = value
        else:
            setattr(self._target, name, value)

    def __delattr__(self, name: str) -> None:
        if name in _OWN_ATTRIBUTES and name in self.__dict__:
            del self.__dict__[name]
        else:
            delattr(self._target, name)

    def __getitem__(self, index: Any) -> Any:
        model: Any = self._target
        return model[index]

    def __len__(self) -> int:
        model: Any = self._target
        return len(model)

    def __iter__(self) -> Iterator[Any]:
        model: Any = self._target
        return iter(model)

    def __bool__(self) -> bool:  # which would ask __len__, and most models have none
        return bool(self._target)

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *self.__dict__, *dir(self._target)})

    def train(self, mode: bool = True) -> Self:
        """Set training mode on the wrapper and the model."""
        self._target.train(mode)
        self.model.train(mode)
        self.__dict__["training"] = mode
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters; inside ``step_fn``, the optimizer's copies."""
        if inside_optimizer():
            return self.optim_named_parameters(prefix, remove_duplicate)
        if not self._session.engine.is_inside:
            self._session.engine.finish()  # whoever asks may read gradients
        return self._target.named_parameters(prefix, recurse, remove_duplicate)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters(recurse=recurse))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self._target.named_buffers(*args, **kwargs)

    # `buffers`, `children`, `modules` and `get_buffer` go by these

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        return self._target.named_children()

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        return self._target.named_modules(*args, **kwargs)

    def get_submodule(self, target: str) -> nn.Module:
        return self._target.get_submodule(target)

    def get_parameter(self, target: str) -> nn.Parameter:
        named = dict(self.named_parameters(remove_duplicate=False))
        return named[target] if target in named else self._target.get_parameter(target)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's state with its own keys, after the latest update."""
        self._session.optimizer.settle(looks=True)
        return self._target.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load the model's state and take it over into the optimizer's copies."""
        session = self._session
        session.optimizer.synchronize()
        result = self._target.load_state_dict(state_dict, strict=strict, assign=assign)
        session.optimizer.refresh()
        return result

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """What torch calls where the wrapper is a submodule of what loads."""
        own = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        try:
            result = self.load_state_dict(own, False, bool(local_metadata.get("assign_to_params_buffers")))
        except RuntimeError as error:  # sizes
            error_msgs.append(str(error))
            return
        missing_keys += [prefix + key for key in result.missing_keys]
        unexpected_keys += [prefix + key for key in result.unexpected_keys]

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        self._target.register_buffer(name, tensor, persistent)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter with the model; the optimizer's side has those that were there when it was wrapped."""
        if param is not None:
            raise ConfigError(
                f"parameter {name!r} would have no copy on the optimizer's side, which was made with the wrapper; "
                "register it with the model before wrapping it"
            )
        self._target.register_parameter(name, param)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Refused if the module has parameters; see `register_parameter`."""
        if module is not None and next(module.parameters(), None) is not None:
            raise ConfigError(
                f"the parameters of module {name!r} would have no copies on the optimizer's side, which was made with "
                "the wrapper; add the module to the model before wrapping it"
            )
        self._target.add_module(name, module)

    register_module = add_module

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop accumulated gradients, on the model's side and on the optimizer's."""
        self._session.optimizer.zero_grad(set_to_none)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        self._target.requires_grad_(requires_grad)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        self._session.engine.refuse_inside("apply()")
        self._session.engine.finish()
        self._target.apply(fn)
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Refused: a call is the work of many threads, which no graph of torch.compile holds.

        ``torch.compile(pipe)``, and a compiled function that calls the wrapper, run it as it is.
        """
        raise ConfigError(
            "torch can't compile a wrapper; compile modules of the model before it is wrapped (module.compile()), or "
            "the model itself for use without the wrapper (torch.compile(model.model))"
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        try:
            device, problem = str(fn(torch.empty(0)).device), None
        except (RuntimeError, AssertionError, NotImplementedError) as error:  # a device that torch does not have
            device, problem = "another device", error
        if device != "cpu":
            example = "cuda:0" if problem is not None else device
            raise ConfigError(
                f"the model's weights stay in host memory and are streamed to the devices; moving them to {device} "
                f"is not possible. Choose devices with compile(model, devices=[{example!r}])"
            ) from problem
        self._session.optimizer.synchronize()
        self._target._apply(fn, recurse)
        self._session.optimizer.refresh()
        return self


def check_wrappable(model: Any, wrapper: str) -> None:
    """Raise `ConfigError` for what is no module, is wrapped already or has a part that is, or has lazy parameters.

    The layers of a wrapper inside would run in two pipelines at once.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{wrapper}: model must be an nn.Module, got {type(model).__name__}")
    if isinstance(model, ModelView):
        raise ConfigError(f"the model is a {type(model).__name__} already; pass the original, which is its .model")
    for prefix, module in named_modules_in(model).items():
        if lazy := [name for name, each in module._parameters.items() if isinstance(each, UninitializedParameter)]:
            where = f"{prefix}.{lazy[0]}".lstrip(".")
            raise ConfigError(
                f"{where} of the {type(model).__name__} has no shape yet, since a {type(module).__name__} makes it in "
                f"its first call. Call the model once on an example before {wrapper}"
            )
        for name, child in module._modules.items():
            if isinstance(child, ModelView):
                outer, where = type(model).__name__, f"{prefix}.{name}".lstrip(".")
                raise ConfigError(
                    f"{where} of the {outer} is a {type(child).__name__} already, and there is no pipeline inside a "
                    f"pipeline. Wrap the {outer} alone, made of the original modules ({where}.model is one), or leave "
                    "it as it is: a plain module may have wrapped ones inside"
                )
