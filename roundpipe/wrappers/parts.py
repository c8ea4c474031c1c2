"""What an `AutoRoundPipe` is made of: parts that run on the devices, and the tree around them that runs on the host.

    HostTree   the user's model with other objects in place of some modules; its own forwards run as they are
      `- Part  one module of the model as a `RoundPipe`, on the workers of the whole

A module that is run apart from the rest gets copies of its arguments and runs on a copy of itself, so only what
it returns reaches the others. `_Watched` finds the modules that also hand on something another way.

Invariant: a part gives what its module would give where it stands; one that can't runs on the host.
"""

from __future__ import annotations

import contextvars
import copy
import dataclasses
import enum
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.aliasing import overlapping
from roundpipe.core.caller import warn
from roundpipe.core.errors import ConfigError
from roundpipe.core.layers import Carry, FixedChain
from roundpipe.core.module_tree import weight_bytes_of
from roundpipe.effects.places import CONTAINER, HOOKS, REGISTERED, same_contents
from roundpipe.effects.run_once import FirstCall, first_to_run_once, hooks_run_around
from roundpipe.effects.snapshot import AttributeChange, ModuleSnapshot, WeightSnapshot
from roundpipe.effects.uses import attributes_read, uses_of_forward
from roundpipe.runtime.config import RoundPipeRunConfig, resolve
from roundpipe.runtime.engine.recompute import doing_recompute
from roundpipe.runtime.microbatch import split as microbatch
from roundpipe.runtime.weights.replica import Replica
from roundpipe.wrappers.lazy_outputs import all_settled, holds_later, merged_later, packed_again
from roundpipe.wrappers.module_layers import chain_of_modules
from roundpipe.wrappers.pipe import RoundPipe
from roundpipe.wrappers.session import Session

IN_ONE_PIECE = RoundPipeRunConfig(num_microbatch=1)
_AS_IT_IS = RoundPipeRunConfig(num_microbatch=1, split_input=lambda args, kwargs, number: ([args], [kwargs]))
"""For a call without samples, such as that of an expert that no token goes to."""

_RETURNS_GIVEN = "it returns memory of a tensor that it is given"

_IMMUTABLE = (
    *(bool, int, float, complex, str, bytes, type, type(None), slice, range, frozenset, enum.Enum),
    *(torch.Tensor, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.EllipsisType),
)


def overlaid(*configs: RoundPipeRunConfig) -> RoundPipeRunConfig:
    """One config of several: the first that gives a field wins."""
    given: dict[str, Any] = {}
    for config in configs:
        for one in fields(RoundPipeRunConfig):
            value = getattr(config, one.name)
            if value is not None:
                given.setdefault(one.name, value)
    return RoundPipeRunConfig(**given)


class _HandsOnOtherwise(Exception):
    """A module did something for others beside returning a value; says what."""


class _Same:
    """Stands in an output for a tensor of the arguments, or of the output itself, that is there once more."""

    __slots__ = ("is_given", "index")

    def __init__(self, is_given: bool, index: int) -> None:
        self.is_given = is_given
        self.index = index
        """Among the tensors of the arguments, or of the output."""


class _GiveSame:
    """Makes the output of a part that is one module, with the same tensors at the places of `_Same`.

    Args:
        output: name of what the module made.
        arguments: name of what it was given.
    """

    def __init__(self, output: str, arguments: str) -> None:
        self._output = output
        self._arguments = arguments
        self._found: list[dict[int, tuple[bool, int]]] = []
        """Per microbatch: what each `_Same` says, by its position among the output's leaves."""

    @property
    def reads(self) -> tuple[str, ...]:
        return self._output, self._arguments

    def begin(self) -> None:
        """A call begins."""
        self._found.clear()

    def __call__(self, carry: Carry) -> Any:
        output = carry[self._output]
        leaves = enumerate(trees.leaves(output))
        same = {position: (leaf.is_given, leaf.index) for position, leaf in leaves if isinstance(leaf, _Same)}
        self._found.append(same)
        return _with_same(output, same, carry[self._arguments])

    def merged(self, output: Any, arguments: Any) -> Any:
        """The output of the whole batch, with the same tensors where all microbatches agree on them.

        Args:
            output: put together from those of the microbatches.
            arguments: of the whole batch.
        """
        first = self._found[0] if self._found else {}
        return _with_same(output, first, arguments) if all(one == first for one in self._found) else output


def _with_same(output: Any, same: Mapping[int, tuple[bool, int]], arguments: Any) -> Any:
    if not same:
        return output
    given, leaves = trees.tensors(arguments), trees.leaves(output)
    made = [leaf for place, leaf in enumerate(leaves) if place not in same and isinstance(leaf, torch.Tensor)]
    for place, (is_given, index) in same.items():
        leaves[place] = (given if is_given else made)[index]
    return trees.rebuild(output, leaves)


class _Watched(nn.Module):
    """A module of a part, which refuses to go on where running it apart would differ.

    Args:
        module: runs.
        index: its place in the part. The first gets the part's arguments, not what one before it made for it alone.
        handing_on: gets the index if the module returned memory of a tensor that it was given. Where all modules of
            a part do, code around it may write into what it returned and read what it was given. None: there is no
            other module in the part; its output has a `_Same` for each tensor that is an argument, or there twice.
    """

    def __init__(self, module: nn.Module, index: int, handing_on: set[int] | None) -> None:
        super().__init__()
        self.module = module
        self._index = index
        self._handing_on = handing_on
        self._has_weights = weight_bytes_of(module) > 0
        kinds = {type(one) for one in module.modules()}
        self._read = frozenset().union(*map(attributes_read, kinds))
        """Names of attributes that its code reads."""
        self._reads_any_name = any(uses_of_forward(kind).reads_any_name for kind in kinds)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output.

        Raises:
            _HandsOnOtherwise: running it apart differs.
            ConfigError: the same in a recomputation, when it is too late to run the module on the host.
        """
        try:
            return self._run(args, kwargs)
        except _HandsOnOtherwise as error:
            if not doing_recompute():
                raise
            kind = type(self.module).__name__
            raise ConfigError(
                f"the forward of a {kind}, run again for the backward, did what it had not done before: {error}. The "
                f"gradients would not be eager's. Keep the {kind} on the CPU with skip_modules, see "
                "wrap_model_to_roundpipe and compile"
            ) from None

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outside = (args, kwargs) if self._index == 0 else ((), {})
        given = [(tensor, tensor._version) for tensor in trees.tensors(outside)]
        containers = [(one, copy.copy(one)) for one in _containers(outside)]
        collectors = [(one, copy.copy(one)) for one in _containers((tuple(contextvars.copy_context().values()), {}))]
        snapshot = ModuleSnapshot(self.module.modules())
        weights = WeightSnapshot(self.module)
        run = self.module.forward if self._handing_on is None and hooks_run_around(self.module) else self.module
        result = run(*args, **kwargs)
        if any(tensor._version != version for tensor, version in given):
            raise _HandsOnOtherwise("it writes into a tensor that it is given")
        if not all(same_contents(was, one) for one, was in containers):
            raise _HandsOnOtherwise("it changes a list or dict that it is given")
        changed_collectors = [(one, was) for one, was in collectors if not same_contents(was, one)]
        for one, was in changed_collectors:
            CONTAINER.write(one, None, was)
        if changed_collectors:
            raise _HandsOnOtherwise("it changes a list or dict that a context variable holds")
        collection = snapshot.changed_container(restore=True)
        if collection is not None:
            name, value = collection
            raise _HandsOnOtherwise(f"its forward changes the {type(value).__name__} in attribute {name!r}")
        written = weights.diff()
        if written is not None:
            raise _HandsOnOtherwise(f"its forward writes its parameter {written!r}")
        for changed in snapshot.diff():
            if trees.tensors(changed.now):
                raise _HandsOnOtherwise(f"its forward stores tensors in attribute {changed.name!r}")
            if self._is_kept(changed):
                raise _HandsOnOtherwise(f"its forward changes attribute {changed.name!r}")
        if self._handing_on is None:
            return self._referring(result, [tensor for tensor, _ in given])
        if not _memory(trees.tensors((args, kwargs))).isdisjoint(_memory(trees.tensors(result))):
            self._handing_on.add(self._index)
        return result

    def _is_kept(self, changed: AttributeChange) -> bool:
        """Whether an attribute holds something else that a later call could find, or that would not reach others."""
        was, now = changed.before, changed.now
        if type(was) is type(now) and isinstance(now, tuple) and was == now:
            return False
        if changed.is_cached_property:
            return False
        return not isinstance(now, trees.PLAIN) or self.may_read(changed.name)

    def may_read(self, name: str) -> bool:
        """Whether the module's code may read an attribute of a name."""
        return name in self._read or self._reads_any_name

    def _referring(self, result: Any, given: list[torch.Tensor]) -> Any:
        """The output with a `_Same` for each tensor that it need not bring."""
        made = trees.tensors(result)
        known = {id(tensor): _Same(True, index) for index, tensor in reversed(list(enumerate(given)))}
        own = list({id(tensor): tensor for tensor in made if id(tensor) not in known}.values())
        if not _memory(given).isdisjoint(_memory(own if self._has_weights else made)):
            raise _HandsOnOtherwise(_RETURNS_GIVEN)
        if any(True for _ in overlapping([tensor for tensor in own if tensor.layout is torch.strided])):
            raise _HandsOnOtherwise("it returns tensors that share memory")
        if len({id(tensor) for tensor in made} - known.keys()) == len(made):
            return result
        num_made = 0

        def referred(tensor: torch.Tensor) -> Any:
            nonlocal num_made
            if id(tensor) in known:
                return known[id(tensor)]
            known[id(tensor)] = _Same(False, num_made)
            num_made += 1
            return tensor

        return trees.map_tensors(result, referred)


def _memory(tensors: list[torch.Tensor]) -> set[int]:
    """Where the memory of tensors begins."""
    return {one.untyped_storage().data_ptr() for one in tensors if one.layout is torch.strided and one.numel()}


def _containers(value: tuple[tuple[Any, ...], dict[str, Any]]) -> Iterator[Any]:
    """What can be changed in arguments beside tensors; not the tuple and dict that hold the arguments themselves."""
    args, kwargs = value
    pending = [*args, *kwargs.values()]
    while pending:
        one = pending.pop()
        if isinstance(one, (list, dict)):
            yield one
        elif dataclasses.is_dataclass(one) and hasattr(one, "__dict__"):
            yield one.__dict__
        pending += [child for _, child in trees.children(one) or ()]


def _between_hooks(module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a module whose forward is ``run``; what its hooks leave in attributes is left in the module.

    ``run`` gets a dict of what the hooks in front of it have set, then the arguments.
    """
    twin = object.__new__(type(module))

    def set_by_hooks() -> dict[str, Any]:
        return {name: value for name, value in twin.__dict__.items() if value is not before.get(name, before)}

    before = dict(module.__dict__, forward=lambda *args, **kwargs: run(set_by_hooks(), *args, **kwargs))
    twin.__dict__.update(before)
    result = twin(*args, **kwargs)
    module.__dict__.update(set_by_hooks())
    return result


def _unfit(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why arguments can't be sent to a device, if they can't."""
    pending: list[Any] = [*args, *kwargs.values()]
    while pending:
        one = pending.pop()
        kind = type(one)
        is_config = kind.__module__.startswith("transformers.") and kind.__name__.endswith("Config")
        if isinstance(one, _IMMUTABLE) or is_config:
            continue
        if not (isinstance(one, (list, tuple, Mapping)) or dataclasses.is_dataclass(one)):
            return f"it is given a {kind.__name__}, which it may change"
        pending += [child for _, child in trees.children(one) or ()]
    return None


@dataclass(slots=True)
class CallOptions:
    """What a call of the whole asks of its parts; one object for all parts, set for a call.

    It holds on after the call: a reentrant `torch.utils.checkpoint` around a part calls it again in the backward.
    """

    forced: RoundPipeRunConfig = RoundPipeRunConfig()
    """Wins over what a part was given."""
    default: RoundPipeRunConfig = RoundPipeRunConfig()
    """For what nobody gave."""


@dataclass(slots=True)
class _PartState:
    given: RoundPipeRunConfig
    options: CallOptions
    merges_later: bool
    """Whether its outputs are put together only when host code looks at them."""
    watched: list[_Watched]
    """Its modules."""
    same: _GiveSame | None
    """For a part of one module."""
    handing_on: set[int] | None
    """For one of several: which of them returned memory of what they were given, in the running call."""
    why_on_host: str | None = None
    proven: set[tuple[bool, bool]] = field(default_factory=set)
    """In which modes it ran on the devices: whether training, and whether gradients were recorded."""
    is_split: bool = False
    """Whether its children are its layers, and it itself is never called."""
    in_forward: bool = False
    """Whether a forward around it is running."""


class Part(RoundPipe):
    """One module of a larger model as a pipeline of its own.

    It belongs to the whole: workers, weights and the optimizer's side are the whole's, and so is their end.
    """

    @classmethod
    def of(
        cls,
        session: Session,
        name: str,
        module: nn.Module,
        given: RoundPipeRunConfig,
        options: CallOptions,
        *,
        merges_later: bool = False,
    ) -> Part:
        """The part of a whole.

        Args:
            session: has the workers.
            name: qualified, of the module; empty for the whole's model itself.
            module: a `nn.Sequential` has one layer per child.
            given: options of this part alone.
            options: those of the whole's running call.
            merges_later: whether its outputs, unless ``merge_output`` is given, are put together only when host code
                looks at them.
        """
        modules = [(name or type(module).__name__, module)]
        is_split = is_sequential(module)
        if is_split:
            prefix = f"{name}." if name else ""
            modules = [(f"{prefix}{key}", child) for key, child in module._modules.items() if child is not None]
        handing_on: set[int] | None = set() if len(modules) > 1 else None
        watched = [_Watched(one, index, handing_on) for index, (_, one) in enumerate(modules)]
        named = [(key, one) for (key, _), one in zip(modules, watched, strict=True)]
        chain = chain_of_modules(named, watched=False)  # they do it themselves
        same = None
        if handing_on is None:
            chain.exit = same = _GiveSame(*chain.specs[0].makes, *chain.specs[0].reads)
        kind: type[Part] = SequencePart if isinstance(module, nn.Sequential) else cls
        part = kind.inside(session, module, FixedChain(chain), name or session.name)
        part.__dict__["_part"] = _PartState(given, options, merges_later, watched, same, handing_on, is_split=is_split)
        return part

    def forward(
        self,
        *args: Any,
        roundpipe_run_config: RoundPipeRunConfig = RoundPipeRunConfig(),  # noqa: B008 - frozen
        **kwargs: Any,
    ) -> Any:
        """See `RoundPipe.forward`."""
        part: _PartState = self.__dict__["_part"]
        if any(tensor.is_nested for tensor in trees.tensors((args, kwargs))):  # has no batch that could be split
            return self.model(*args, **kwargs)
        why = part.why_on_host or _unfit(args, kwargs)
        if part.is_split and not is_sequential(self.model):
            why = why or "it got hooks or a forward of its own"
        if why is None:
            options = part.options
            config = overlaid(roundpipe_run_config, options.forced, part.given, options.default)
            try:
                return self._run_apart(args, kwargs, config)
            except _HandsOnOtherwise as error:
                why = str(error)
        self._leave_devices(why)
        return self.model(*args, **kwargs)

    def _run_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any], config: RoundPipeRunConfig) -> Any:
        """The module's outputs, with its hooks as where it stands."""
        part: _PartState = self.__dict__["_part"]
        if part.same is None or not hooks_run_around(self.model):
            return self._run_or_undo(args, kwargs, config)

        def run(set_by_hooks: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            (watched,) = part.watched
            try:
                for name, value in set_by_hooks.items():
                    if trees.tensors(value) or watched.may_read(name):
                        raise _HandsOnOtherwise(f"a hook sets its attribute {name!r}, which its forward may read")
                return self._run_or_undo(args, kwargs, config)
            except _HandsOnOtherwise as error:  # here, since its hooks must run once, too
                self._leave_devices(str(error))
                self.model.__dict__.update(set_by_hooks)
                return self.model.forward(*args, **kwargs)

        return _between_hooks(self.model, run, args, kwargs)

    def _run_or_undo(self, args: tuple[Any, ...], kwargs: dict[str, Any], config: RoundPipeRunConfig) -> Any:
        """The module's outputs; in a mode in which it never ran, everything is as it was if they can't be had."""
        part: _PartState = self.__dict__["_part"]
        mode = (self.model.training, torch.is_grad_enabled())
        if mode in part.proven:
            return self._run_on_devices(args, kwargs, config)
        kind = first_to_run_once(self.model)
        if kind is not None:
            raise _HandsOnOtherwise(f"{kind}'s code remembers something, writes weights or asks for the grad mode")
        before = FirstCall(self.model)
        if before.closed is not None:
            raise _HandsOnOtherwise(f"it uses {before.closed}, and nothing tells how that changes")
        try:
            outputs = self._run_on_devices(args, kwargs, config)
            changed = before.diff()
            if changed is not None:
                raise _HandsOnOtherwise(f"its forward changes {changed}")
        except _HandsOnOtherwise:
            before.restore()
            raise
        part.proven.add(mode)
        return outputs

    def _run_on_devices(self, args: tuple[Any, ...], kwargs: dict[str, Any], config: RoundPipeRunConfig) -> Any:
        """The module's outputs; a neighbour's pieces are taken, and the own ones given, as they are."""
        resolved = resolve(config, RoundPipeRunConfig(), num_devices=self._session.engine.num_workers)
        part: _PartState = self.__dict__["_part"]
        whole = args, kwargs
        if holds_later(whole):
            args, kwargs = packed_again((args, kwargs), microbatch.automatic_sizes(args, kwargs, resolved))
        if microbatch.is_empty(args, kwargs):
            config = overlaid(_AS_IT_IS, config)
        later = part.merges_later and config.merge_output is None
        if later:
            config = overlaid(RoundPipeRunConfig(merge_output=False), config)
        if part.same is not None:
            part.same.begin()
        if part.handing_on is not None:
            part.handing_on.clear()
        self._session.engine.refuse_inside(f"{self._session.name}(...)")
        outputs = self._runner.forward(args, kwargs, config)
        if part.handing_on is not None and len(part.handing_on) == len(part.watched):
            raise _HandsOnOtherwise(_RETURNS_GIVEN)
        if later:
            outputs = merged_later(outputs)
        is_merged = later or resolved.merge_output is True
        return part.same.merged(outputs, whole) if part.same is not None and is_merged else outputs

    def __setattr__(self, name: str, value: Any) -> None:
        """A tensor in a parameter's place, as `torch.func.functional_call` sets one, is there on the host only."""
        part: _PartState | None = self.__dict__.get("_part")
        is_weight = part is not None and isinstance(self.model._parameters.get(name), torch.Tensor)
        if part is None or not is_weight or not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
            super().__setattr__(name, value)
            return
        self._leave_devices(f"another tensor is put in the place of its parameter {name!r}")
        self.model._parameters[name] = value  # type: ignore[assignment]

    def train(self, mode: bool = True) -> Self:
        """Sets the mode; in a forward, on the host only, since a recomputation would find buffers of other calls."""
        part: _PartState = self.__dict__["_part"]
        if part.in_forward and mode is not self.model.training:
            self._leave_devices("its mode of training is set in the forward")
        return super().train(mode)

    def _leave_devices(self, why: str) -> None:
        """Runs on the host from now on."""
        part: _PartState = self.__dict__["_part"]
        if part.why_on_host is None:
            part.why_on_host = why
            warn(f"{self._session.name or 'the model'} runs on the CPU from now on: {why}")

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The module's own, so that code around it which asks ``isinstance`` decides as it would in eager."""
        session = self.__dict__.get("_session")
        return Part if session is None else type(session.model)

    def close(self) -> None:
        """Nothing: the whole is closed."""


class SequencePart(Part):
    """A part that forwards may also take the children of, as `nn.Sequential` lets them; those run on the host."""

    def __getitem__(self, index: int | slice) -> Any:
        return self._sequence[index]

    def __len__(self) -> int:
        return len(self._sequence)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._sequence)

    @property
    def _sequence(self) -> nn.Sequential:
        assert isinstance(self.model, nn.Sequential)
        return self.model


def is_sequential(module: nn.Module) -> bool:
    """Whether calling a module is calling its children in turn, and nothing else."""
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return False
    return len(module) > 0 and "forward" not in module.__dict__ and not any(module.__dict__[name] for name in HOOKS)


class _LossFunction(nn.Module):
    """The loss function of a Hugging Face model, looked up when it is called."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.__dict__["owner"] = owner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["owner"].loss_function(*args, **kwargs)


def _children_of(module: nn.Module) -> list[tuple[str, nn.Module | None]]:
    return list(module._modules.items())


class HostTree(Replica):
    """A model with other objects in place of some of its modules; the forwards around them run on the host.

    Parameters and buffers are the model's own, so gradients arrive in their ``.grad`` by plain autograd.

    Args:
        model: is not changed.
        in_place_of: module of the model -> what stands there in the tree, which may be the module itself.
    """

    def __init__(self, model: nn.Module, in_place_of: Mapping[nn.Module, nn.Module]) -> None:
        self._in_place_of = {id(module): other for module, other in in_place_of.items()}
        self._loss_functions: dict[int, Any] = {}
        super().__init__(model, torch.device("cpu"))
        self._children = [_children_of(original) for original in self._originals]
        self._given: list[dict[str, Any]] = []
        """The attributes of each of its modules when a call began."""

    def _copy(self, original: nn.Module) -> nn.Module:
        other = self._in_place_of.get(id(original))
        if other is None and isinstance(original, torch.jit.ScriptModule):
            other = original  # a copy would have other parameters
        if other is None:
            return super()._copy(original)
        self._twins[id(original)] = other
        return other

    @property
    def parts(self) -> list[Part]:
        """What runs on the devices."""
        return [one for one in self._in_place_of.values() if isinstance(one, Part)]

    def attach_loss_functions(self, session: Session, options: CallOptions) -> None:
        """Send the loss functions of Hugging Face models to the devices: in one piece, a mean over all."""
        base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
        for original in self._originals:
            if base is not None and isinstance(original, base):
                name = f"loss function of {type(original).__name__}"
                part = Part.of(session, name, _LossFunction(original), IN_ONE_PIECE, options)
                self._loss_functions[id(original)] = part

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's outputs; what its forwards leave in attributes and buffers is left in the model."""
        self._take_over()
        for part in self.parts:
            part.__dict__["_part"].in_forward = True
        try:
            return all_settled(self.module(*args, **kwargs))
        finally:
            for part in self.parts:
                part.__dict__["_part"].in_forward = False
            self._hand_back()

    def _take_over(self) -> None:
        self.refresh({})
        for part in self.parts:
            part.__dict__["training"] = part.model.training  # which code around it may ask
        configs: dict[int, Any] = {}
        for original, names in zip(self._originals, self._children, strict=True):
            if names != _children_of(original):
                raise ConfigError(
                    f"submodules of a {type(original).__name__} were replaced, added or removed since the model was "
                    "wrapped; wrap it again"
                )
            state = self.twin(original).__dict__
            state["_parameters"] = dict(original._parameters)
            state["_buffers"] = dict(original._buffers)
            config = state.get("config")
            if getattr(config, "use_cache", None):  # a cache that layers fill must not be filled by recomputation
                if id(config) not in configs:
                    configs[id(config)] = copy.copy(config)
                    configs[id(config)].use_cache = False
                state["config"] = configs[id(config)]
            if id(original) in self._loss_functions:
                state["_loss_function"] = self._loss_functions[id(original)].__call__
        self._given = [dict(self.twin(original).__dict__) for original in self._originals]

    def _hand_back(self) -> None:
        originals = {id(twin): module for module, twin in self._pairs()}
        for original, given in zip(self._originals, self._given, strict=True):
            twin = self.twin(original)
            original._buffers.update(twin._buffers)
            for name, weight in twin._parameters.items():
                if original._parameters.get(name, given) is not weight:
                    original._parameters[name] = weight
            for name, value in twin.__dict__.items():
                if name not in REGISTERED and value is not given.get(name, given):
                    original.__dict__[name] = _pointing(all_settled(value), originals)
            for name in given.keys() - twin.__dict__.keys():
                original.__dict__.pop(name, None)

    def _pairs(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        """Each module of the model, and what stands in its place."""
        for original in self._originals:
            yield original, self.twin(original)
        for other in self._in_place_of.values():
            if isinstance(other, RoundPipe):
                yield other.model, other


def _pointing(value: Any, modules: Mapping[int, nn.Module]) -> Any:
    """A value with other modules in it.

    Args:
        value: any.
        modules: by identity of those to replace.
    """
    if isinstance(value, nn.Module):
        return modules.get(id(value), value)
    if isinstance(value, types.MethodType):
        owner = modules.get(id(value.__self__))
        return value if owner is None else types.MethodType(value.__func__, owner)
    if type(value) in (list, tuple):
        items = [_pointing(item, modules) for item in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
    if type(value) is dict:
        mapped = {key: _pointing(item, modules) for key, item in value.items()}
        return value if all(mapped[key] is value[key] for key in value) else mapped
    return value
