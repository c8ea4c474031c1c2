"""A model whose own forwards run on the host, around parts that run on the devices of the model's session.

    HostTree   copies of the modules around the parts; their forwards run as they are
      `- stand-in -> Part -> ChainRunner            the module on the devices, watched
                       `--> the module itself       on the CPU, from the first call on that can't run apart

Invariant: a part gives what its module would give where it stands; one that can't runs on the host.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.attributes import given_attribute
from roundpipe.core.caller import warn
from roundpipe.core.compiled_modules import COMPILED_CALL, never_compiled
from roundpipe.core.errors import ConfigError, NotCopyableError
from roundpipe.core.layers import FixedChain
from roundpipe.core.watched import is_transformed_here
from roundpipe.effects.places import REGISTERED, has_hooks
from roundpipe.effects.run_once import FirstCall, first_to_run_once, hooks_run_around
from roundpipe.effects.uses import hooked_modules
from roundpipe.runtime.config import RoundPipeRunConfig, resolve
from roundpipe.runtime.microbatch.split import automatic_sizes, is_empty
from roundpipe.runtime.weights.module_copy import redirect
from roundpipe.runtime.weights.replica import Replica
from roundpipe.wrappers.calls import ChainRunner
from roundpipe.wrappers.lazy_outputs import holds_lazy, materialize_all, merge_lazily, repack
from roundpipe.wrappers.module_layers import chain_of_modules
from roundpipe.wrappers.session import Runner, Session
from roundpipe.wrappers.watched import RETURNS_ARGUMENTS, SharingExit, SideEffect, WatchedModule, why_unfit

IN_ONE_PIECE = RoundPipeRunConfig(num_microbatch=1)
_UNSPLIT = RoundPipeRunConfig(num_microbatch=1, split_input=lambda args, kwargs, number: ([args], [kwargs]))
"""For a call without samples, such as that of an expert that no token goes to."""


def overlaid(*configs: RoundPipeRunConfig | None) -> RoundPipeRunConfig:
    """One config of several, those at None left out: the first that gives a field wins."""
    names = [option.name for option in fields(RoundPipeRunConfig)]
    given = {name: [each for config in configs if (each := getattr(config, name, None)) is not None] for name in names}
    return RoundPipeRunConfig(**{name: values[0] for name, values in given.items() if values})


@dataclass(slots=True)
class CallOptions:
    """What a call of the whole asks of its parts; one object for all parts, set for a call.

    It holds on after the call: a reentrant `torch.utils.checkpoint` around a part calls it again in the backward.
    """

    forced: RoundPipeRunConfig = RoundPipeRunConfig()
    """Wins over a part's own options."""
    default: RoundPipeRunConfig = RoundPipeRunConfig()
    """For fields that neither the call nor the part gives."""
    first_microbatch: int = 0
    """Position of the parts' first one in the call of the whole."""


@dataclass(eq=False)
class Part:
    """One module of a larger model as a chain of its own; an ``nn.Sequential`` has one layer per child.

    ``options`` are those of the whole's running call. With ``merges_lazily``, outputs are put together only when host
    code looks at them, unless ``merge_output`` is given.
    """

    session: Session
    name: str
    module: nn.Module
    own_options: RoundPipeRunConfig
    options: CallOptions
    merges_lazily: bool = False
    make_inner: Callable[[], Runner] | None = None
    """Makes what runs the module in parts of its own."""
    why_on_host: str | None = field(init=False, default=None)
    _inner: Runner | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._proven_modes: dict[tuple[bool, bool], frozenset[int]] = {}
        """In which modes it ran on the devices, whether training and whether gradients were recorded; with which hooks,
        by torch's numbers of them."""
        self._is_split = is_sequential(self.module)
        """Whether its children are its layers, and it itself is never called."""
        modules = {self.name or type(self.module).__name__: self.module}
        if self._is_split:
            children = self.module._modules.items()
            modules = {f"{self.name}.{key}".lstrip("."): child for key, child in children if child is not None}
        self._passing_on: set[int] | None = set() if len(modules) > 1 else None
        """Of several modules, those that returned memory of their arguments in the running call."""
        self._watched = [WatchedModule(part, i, self._passing_on) for i, part in enumerate(modules.values())]
        chain = chain_of_modules(list(zip(modules, self._watched, strict=True)), watched=False)  # they do it themselves
        self._exit: SharingExit | None = None
        if self._passing_on is None:
            chain.exit = self._exit = SharingExit(*chain.specs[0].makes, *chain.specs[0].reads)
        self.name = self.name or self.session.name
        self.runner = ChainRunner(self.session, self.module, FixedChain(chain), self.name, RoundPipeRunConfig())
        self.runner.hook_warnings.looks_at_kept = False  # a module whose hooks keep tensors leaves the devices
        self.stand_in = StandIn(self.module, self)

    @never_compiled  # it is the work of many threads
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's outputs, from the devices if they can be had there."""
        why = self.stand_in.give_back()
        try:
            has_nested = any(tensor.is_nested for tensor in trees.tensors((args, kwargs)))
            if has_nested or is_transformed_here():  # there is no batch that could be split
                return self.module(*args, **kwargs)
            why = self.why_on_host or why or why_unfit(args, kwargs)
            if self._is_split and not is_sequential(self.module):
                why = why or "it got hooks or a forward of its own"
            if why is None:
                try:
                    return self._run_apart(args, kwargs)
                except SideEffect as error:
                    why = str(error)
            self._leave_devices(why)
            if self._inner is not None:
                return self._inner.forward(args, kwargs, overlaid(self.options.forced, self.options.default))
            return self.module(*args, **kwargs)
        finally:
            self.stand_in.take_over()

    def _run_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's outputs, with hooks that run once around what the devices do."""
        if self._exit is None or not hooks_run_around(self.module):
            return self._run_or_undo(args, kwargs)

        def run(set_by_hooks: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            (watched,) = self._watched
            try:
                for name, value in set_by_hooks.items():
                    if trees.tensors(value) or watched.may_read(name):
                        raise SideEffect(f"a hook sets its attribute {name!r}, which its forward may read")
                return self._run_or_undo(args, kwargs)
            except SideEffect as error:  # here, since its hooks must run once, too
                self._leave_devices(str(error))
                self.module.__dict__.update(set_by_hooks)
                return self.module.forward(*args, **kwargs)

        return _between_hooks(self.module, run, args, kwargs)

    def _run_or_undo(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's outputs; in a mode that is new, or with new hooks, all is as it was if they can't be had."""
        mode = (self.module.training, torch.is_grad_enabled())
        hooked = hooked_modules(self.module)
        hooks = frozenset(key for inner in hooked for key in (*inner._forward_hooks, *inner._forward_pre_hooks))
        if mode in self._proven_modes and hooks <= self._proven_modes[mode]:
            return self._run_on_devices(args, kwargs)
        if kind := first_to_run_once(self.module):
            raise SideEffect(f"{kind}'s code remembers something, writes weights or asks for the grad mode")
        before = FirstCall(self.module)
        if before.closed is not None:
            raise SideEffect(f"it uses {before.closed}, and nothing tells how that changes")
        try:
            outputs = self._run_on_devices(args, kwargs)
            if changed := before.diff():
                raise SideEffect(f"its forward changes {changed}")
        except SideEffect:
            before.restore()
            raise
        self._proven_modes[mode] = hooks
        return outputs

    def _run_on_devices(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's outputs; a neighbour's pieces are taken, and the own ones given, as they are."""
        config = overlaid(self.options.forced, self.own_options, self.options.default)
        engine = self.session.engine
        resolved = resolve(config, RoundPipeRunConfig(), num_devices=engine.num_workers)
        arguments = args, kwargs
        if holds_lazy(arguments):
            args, kwargs = repack(arguments, automatic_sizes(args, kwargs, resolved))
        if is_empty(args, kwargs):
            config = overlaid(_UNSPLIT, config)
        later = self.merges_lazily and config.merge_output is None
        if later:
            config = overlaid(RoundPipeRunConfig(merge_output=False), config)
        if self._exit is not None:
            self._exit.places.clear()
        if self._passing_on is not None:
            self._passing_on.clear()
        engine.refuse_inside(f"{self.name}(...)")
        outputs = self.runner.forward(args, kwargs, config, self.options.first_microbatch)
        if self._passing_on is not None and len(self._passing_on) == len(self._watched):
            raise SideEffect(RETURNS_ARGUMENTS)
        if later:
            outputs = merge_lazily(outputs)
        is_merged = later or resolved.merge_output is True
        return self._exit.restore_same(outputs, arguments) if self._exit is not None and is_merged else outputs

    def _leave_devices(self, why: str) -> None:
        if self.why_on_host is not None:
            return
        self.why_on_host = why
        if self.make_inner is not None and any(inner is not self.module for inner in hooked_modules(self.module)):
            self._inner = self.make_inner()  # since it was chosen, modules in it have got hooks, which run around parts
        elif why != RETURNS_ARGUMENTS or next(self.module.parameters(), None) is not None:  # else it computes nothing
            warn(f"{self.name} runs on the CPU from now on: {why}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotCopyableError(
            f"{self.name} is part of another wrapper and lives by its workers; copy that one, or the module that it "
            "was made of"
        )


_HOOKS = tuple(name for name in nn.Module().__dict__ if name.startswith(("_forward_", "_backward_")))
_OWN = frozenset((*_HOOKS, "_is_full_backward_hook", COMPILED_CALL, "forward"))
"""Attributes that a stand-in has of its own: what is called is the part, whose module has its hooks with it."""


class StandIn:
    """What code around a part finds in the module's place: another object of its class, which calls the part.

    It shares the module's parameters, buffers and submodules; other attributes are copied to it when the part begins
    or ends, and back from it.
    """

    def __init__(self, module: nn.Module, part: Callable[..., Any]) -> None:
        self._original = module
        self.module: nn.Module = object.__new__(_class_of(type(module)))  # type: ignore[arg-type]
        attributes = self.module.__dict__
        attributes.update({name: OrderedDict() for name in _HOOKS}, forward=part)
        attributes.update({"_is_full_backward_hook": None, COMPILED_CALL: None})
        self._seen: dict[str, Any] = {}
        self.take_over()

    def take_over(self) -> None:
        attributes = self.module.__dict__
        self._seen = {name: value for name, value in self._original.__dict__.items() if name not in _OWN}
        attributes.update(self._seen)
        if len(attributes) > len(self._seen) + len(_OWN):
            for name in attributes.keys() - self._seen.keys() - _OWN:
                del attributes[name]

    def give_back(self) -> str | None:
        """Copy the attributes that code around the part has set to the module; says what can't be done on devices."""
        attributes, seen = self.module.__dict__, self._seen
        mode_is_set = attributes.get("training") != seen.get("training")
        for name, value in attributes.items():
            if name not in _OWN and seen.get(name, seen) is not value:
                self._original.__dict__[name] = value
        for name in seen.keys() - attributes.keys():
            self._original.__dict__.pop(name, None)
        for name, weight in self._original._parameters.items():  # `torch.func.functional_call` puts tensors there
            if weight is not None and not isinstance(weight, nn.Parameter):
                return f"another tensor is put in the place of its parameter {name!r}"
        # a recomputation would find buffers of other calls
        return "its mode of training is set in the forward" if mode_is_set else None


@functools.cache
def _class_of(kind: type[nn.Module]) -> type[nn.Module]:
    """The class itself, unless it changes what a call is: that is done on the devices."""
    if kind.__call__ is nn.Module.__call__:
        return kind
    return type(kind.__name__, (kind,), {"__call__": nn.Module.__call__, "__module__": kind.__module__})


def _between_hooks(module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module whose forward is ``run``, which gets what the hooks in front of it set on the module, by name."""
    twin = object.__new__(type(module))

    def set_by_hooks() -> dict[str, Any]:
        return {name: value for name, value in twin.__dict__.items() if value is not before.get(name, before)}

    forward = lambda *args, **kwargs: run(set_by_hooks(), *args, **kwargs)  # noqa: E731
    before = {**module.__dict__, "forward": forward, COMPILED_CALL: None}
    twin.__dict__.update(before)
    result = twin(*args, **kwargs)
    module.__dict__.update(set_by_hooks())
    return result


def is_sequential(module: nn.Module) -> bool:
    """Whether calling a module is calling its children in turn, and nothing else."""
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return False
    return len(module) > 0 and "forward" not in module.__dict__ and not has_hooks(module)


class _LossFunction(nn.Module):
    """The loss function of a Hugging Face model, looked up when it is called."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.__dict__["owner"] = owner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["owner"].loss_function(*args, **kwargs)


class _PartOfTree(Protocol):
    """A `Part`, or another object that runs a module."""

    name: str
    module: nn.Module
    runner: ChainRunner
    stand_in: StandIn


class HostTree(Replica):
    """Copies of a model's modules, with stand-ins for those that are parts, and those that are ``left`` themselves.

    Parameters and buffers are the model's own, so gradients arrive in their ``.grad`` by plain autograd.
    """

    _compiles = False  # torch can't compile the call of a part

    def __init__(self, model: nn.Module, parts: Mapping[nn.Module, _PartOfTree], left: Iterable[nn.Module]) -> None:
        self.parts = tuple(parts.values())
        self._in_place_of = {id(module): module for module in left}
        self._in_place_of.update((id(module), part.stand_in.module) for module, part in parts.items())
        self._loss_functions: dict[int, Part] = {}
        super().__init__(model, torch.device("cpu"))
        self._children = [list(original._modules.items()) for original in self._originals]
        self._attributes: list[dict[str, Any]] = []
        """Those of each of its modules when a call began."""

    def _copy(self, original: nn.Module) -> nn.Module:
        other = self._in_place_of.get(id(original))
        if other is None and isinstance(original, torch.jit.ScriptModule):
            other = original  # a copy would have other parameters
        if other is None:
            return super()._copy(original)
        self._twins[id(original)] = other
        return other

    def attach_loss_functions(self, session: Session, options: CallOptions) -> None:
        """Send the loss functions of Hugging Face models to the devices: in one piece, a mean over all."""
        base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
        for original in self._originals:
            if base is not None and isinstance(original, base):
                name = f"loss function of {type(original).__name__}"
                part = Part(session, name, _LossFunction(original), IN_ONE_PIECE, options)
                self._loss_functions[id(original)] = part

    def names_of(self, model: nn.Module) -> dict[int, str]:
        """By id, the qualified names of a model's modules and of what is in their places; its own is its class's."""
        names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
        return names | {id(twin): names[original] for original, twin in self._twins.items() if original in names}

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's outputs; what its forwards leave in attributes and buffers is left in the model."""
        self._take_over()
        try:
            return materialize_all(self.module(*args, **kwargs))
        finally:
            self._hand_back()

    def _take_over(self) -> None:
        self.refresh({})
        for part in self.parts:
            part.stand_in.take_over()
        configs: dict[int, Any] = {}
        for original, names in zip(self._originals, self._children, strict=True):
            if names != list(original._modules.items()):
                raise ConfigError(
                    f"submodules of a {type(original).__name__} were replaced, added or removed since the model was "
                    "wrapped; wrap it again"
                )
            state = self.twin(original).__dict__
            state["_parameters"] = dict(original._parameters)
            state["_buffers"] = dict(original._buffers)
            config = state.get("config")
            if given_attribute(config, "use_cache"):  # a cache that layers fill must not be filled by recomputation
                if id(config) not in configs:
                    configs[id(config)] = copy.copy(config)
                    configs[id(config)].use_cache = False
                state["config"] = configs[id(config)]
            if id(original) in self._loss_functions:
                state["_loss_function"] = self._loss_functions[id(original)]
        self._attributes = [dict(self.twin(original).__dict__) for original in self._originals]

    def _hand_back(self) -> None:
        for part in self.parts:
            part.stand_in.give_back()
        originals = {id(self.twin(original)): original for original in self._originals}
        originals |= {id(part.stand_in.module): part.module for part in self.parts}
        for original, before in zip(self._originals, self._attributes, strict=True):
            twin = self.twin(original)
            original._buffers.update(twin._buffers)
            for name, weight in twin._parameters.items():
                if original._parameters.get(name, before) is not weight:
                    original._parameters[name] = weight
            for name, value in twin.__dict__.items():
                if name not in REGISTERED and value is not before.get(name, before):
                    original.__dict__[name] = redirect(materialize_all(value), originals, {})
            for name in before.keys() - twin.__dict__.keys():
                original.__dict__.pop(name, None)
