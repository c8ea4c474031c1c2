"""The module of one stage: some of a model's layers, from the stage before to the stage behind.

As an ``nn.Module`` it is the part of the user's model that its layers use, under the model's own names, so that
``state_dict()`` has the original keys. The layers themselves are not in the module tree: they hold the same modules,
and single parameters and buffers, which are handed to them before each run.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.checks import check_type, items_of
from roundpipe.core.errors import ConfigError
from roundpipe.core.layers import EXECUTION_DEVICE, Entry, Exit
from roundpipe.distributed.boundary import Boundary, joined
from roundpipe.fx.guards.guards import GuardedGraph
from roundpipe.fx.passes.codegen import Layer
from roundpipe.fx.source import misfit

_CONSTANTS = "_constants"
"""Child of a stage's module with the tensors of its layers that are not the model's."""


@dataclass(frozen=True, slots=True)
class Tie:
    """A trained parameter that several stages use."""

    name: str
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PartitionedModel:
    """What all stages of a model have in common."""

    traced: GuardedGraph
    entry: Entry
    exit: Exit
    outputs: Boundary
    """The values that the model's outputs are made of."""
    num_stages: int
    training: bool
    """Mode that the model was traced in."""
    ties: tuple[Tie, ...]
    spare: frozenset[int]
    """Identities of the model's tensors that no layer uses; the first stage has them in its state."""

    def make_outputs(self, tensors: torch.Tensor | Sequence[torch.Tensor]) -> Any:
        """The model's own outputs of the tensors that the last stage gives."""
        values = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        return self.exit(self.outputs.unpack(values))


class BareTensor(NamedTuple):
    """A parameter or buffer that a layer uses by itself, and where it is in the module tree."""

    holder: dict[str, Any]
    name: str
    source: dict[str, Any]
    source_name: str


@dataclass(slots=True)
class StageProgram:
    """What a stage runs."""

    whole: PartitionedModel
    index: int
    layers: tuple[nn.Module, ...]
    module_names: tuple[str, ...]
    """Modules of the model that the layers cover."""
    before: Boundary
    after: Boundary
    is_copy: bool = False
    """Whether it runs copies of the model's modules, which later changes to the model don't reach."""
    slots: list[BareTensor] = field(default_factory=list)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.whole.num_stages - 1

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first stage takes the model's arguments, others what the one before gave."""
        if self.is_first:
            if (failure := misfit(self.whole.traced, args, kwargs, knows_model=self.is_copy)) is not None:
                raise ConfigError(
                    f"the stages were traced for other arguments: {failure}. Partition the model with an example like "
                    "those of the call"
                )
            carry = self.whole.entry(args, kwargs)
        else:
            carry = self.before.unpack(joined(args))  # gradients are sent, so they must be contiguous
        for slot in self.slots:
            slot.holder[slot.name] = slot.source[slot.source_name]
        device = next((tensor.device for tensor in trees.tensors(carry)), torch.device("cpu"))
        for layer in self.layers:
            if hasattr(layer, EXECUTION_DEVICE):
                setattr(layer, EXECUTION_DEVICE, device)
            carry = layer(carry)
        if not self.is_last:
            return self.after.pack(carry, device)
        tensors = tuple(carry[name] for name in self.after.tensors)
        return tensors[0] if len(tensors) == 1 else tensors


class StageModule(nn.Module):
    """Some consecutive layers of a model, made by `partition_stages`.

    The first stage takes the model's own arguments. Others take the tensors that the stage before gave; keyword
    arguments, which schedules hand to all stages of a rank, are ignored. The last stage gives the tensors in the
    model's outputs, one alone or a tuple, of which `model_outputs` makes the outputs.
    """

    stage_program: StageProgram

    def __init__(self, program: StageProgram, twins: Mapping[int, Any] | None = None) -> None:
        """``twins``: copies of the model's modules and tensors, by the identity of the original."""
        super().__init__()
        self.__dict__["stage_program"] = program
        tree = _Tree(program, twins or {})
        tree.fill(self, program.whole.traced.model)
        program.slots = list(tree.slots(self))
        self.training = program.whole.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        whole = self.stage_program.whole
        if self.training is not whole.training:
            mode = "train" if whole.training else "eval"
            raise ConfigError(
                f"the stages were traced in {mode} mode; partition the model in the mode they are to run in"
            )
        return self.stage_program.run(args, kwargs)

    def copy_with(self, tensors: Mapping[int, torch.Tensor]) -> StageModule:
        """The stage over other tensors, by the identity of the model's own, and copies of the user's modules."""
        program = self.stage_program
        if (now := program.whole.traced.model.training) is not program.whole.training:
            traced, other = ("eval", "train") if now else ("train", "eval")
            raise ConfigError(
                f"the model is in {other} mode now; its stages were cut in {traced} mode: call model.{traced}() first"
            )
        memo: dict[int, Any] = dict(tensors)
        layers = tuple(copy.deepcopy(list(program.layers), memo))
        own = (program.index, layers, program.module_names, program.before, program.after)
        twin = StageProgram(program.whole, *own, is_copy=True)
        return StageModule(twin, memo)


class _Tree:
    """The part of a model's module tree that some layers use, over copies if there are any."""

    def __init__(self, program: StageProgram, twins: Mapping[int, Any]) -> None:
        self.layers = program.layers
        self.twins = twins
        modules = [module for layer in self.layers for module in layer.modules()]
        self.used_modules = {id(module) for module in modules if not _is_holder(module)}
        tensors = [tensor for layer in self.layers for tensor in (*layer.parameters(), *layer.buffers())]
        self.used_tensors = {id(tensor) for tensor in tensors}
        self.spare = program.whole.spare if program.is_first else frozenset()
        self.made: dict[int, nn.Module] = {}

    def fill(self, target: nn.Module, source: nn.Module) -> None:
        """Give a module what the layers use of a module of the model, and of what is below."""
        for kind in ("_parameters", "_buffers"):
            for name, tensor in getattr(source, kind).items():
                if tensor is not None and self._is_used(tensor):
                    getattr(target, kind)[name] = self.twins.get(id(tensor), tensor)
                    if name in source._non_persistent_buffers_set:
                        target._non_persistent_buffers_set.add(name)
        for name, child in source._modules.items():
            if child is not None and (below := self._below(child)) is not None:
                target._modules[name] = below

    def _is_used(self, tensor: torch.Tensor) -> bool:
        return id(self.twins.get(id(tensor), tensor)) in self.used_tensors or id(tensor) in self.spare

    def _below(self, child: nn.Module) -> nn.Module | None:
        twin = self.twins.get(id(child), child)
        if id(twin) in self.used_modules:
            return twin
        if id(child) not in self.made:
            holder = self.made[id(child)] = nn.Module()
            holder.training = child.training
            self.fill(holder, child)
        holder = self.made[id(child)]
        return holder if holder._parameters or holder._buffers or holder._modules else None

    def slots(self, stage: nn.Module) -> Iterator[BareTensor]:
        """The tensors that layers use by themselves; those that are not the model's become the stage's."""
        places = {
            id(tensor): (table, name)
            for module in stage.modules()
            for table in (module._parameters, module._buffers)
            for name, tensor in table.items()
        }
        constants = nn.Module()
        for layer in self.layers:
            for holder in filter(_is_holder, layer.modules()):
                for table in (holder._parameters, holder._buffers):
                    for name, tensor in table.items():
                        if tensor is None:
                            continue
                        if id(tensor) not in places:
                            constant = f"constant_{len(constants._buffers)}"
                            constants.register_buffer(constant, tensor, persistent=False)
                            places[id(tensor)] = constants._buffers, constant
                        yield BareTensor(table, name, *places[id(tensor)])
        if constants._buffers:
            stage._modules[_CONSTANTS] = constants


def _is_holder(module: nn.Module) -> bool:
    """Whether a module of a layer's tree is the compiler's, not the user's."""
    return type(module) is nn.Module or isinstance(module, Layer)


def model_outputs(stage: Any, tensors: torch.Tensor | Sequence[torch.Tensor]) -> Any:
    """The model's own outputs, such as a Hugging Face ``ModelOutput``.

    Args:
        stage: any stage of the model, as a module or a ``PipelineStage``.
        tensors: what the last stage gave: the argument of a schedule's ``loss_fn``, or what its ``step`` returned.
    """
    module = getattr(stage, "submod", stage)
    check_type("stage", module, StageModule, "a stage of the model, as a module or a PipelineStage")
    advice = "what the last stage gave"
    for each in [tensors] if isinstance(tensors, torch.Tensor) else items_of("tensors", tensors, advice):
        check_type("an item of tensors", each, torch.Tensor, advice)
    return module.stage_program.whole.make_outputs(tensors)
