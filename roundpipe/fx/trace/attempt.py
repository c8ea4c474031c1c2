"""One run of a model's Python on fakes, recorded as a graph.

`intercept` sends the model's module calls here; `LeafPolicy` tells which modules are one node, which `LeafRunner` runs;
`GlueRunner` runs the others, whose torch function calls `CallRecorder` records. In the end the graph gets its guards.

What goes wrong inside a module ends the attempt with a `Retry`, which says what to do otherwise.
"""

from __future__ import annotations

import copy
import operator
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import nn
from torch.fx import Node

from roundpipe.core import trees
from roundpipe.core.compiled_modules import is_compiled
from roundpipe.core.errors import TraceCause, TraceError, TraceFacts
from roundpipe.core.modes import Modes
from roundpipe.core.module_tree import modules_in, named_modules_in
from roundpipe.core.random_state import python_random_state
from roundpipe.effects.places import has_hooks
from roundpipe.effects.snapshot import AttributeChange, ModuleSnapshot, PlaceValues, PythonSnapshot
from roundpipe.effects.uses import Readers, asks_for_types
from roundpipe.fx.arguments import CallForm, place_words, without_found
from roundpipe.fx.fakes import real_world
from roundpipe.fx.graph.nodes import mutated_by, storage_key
from roundpipe.fx.graph.traced import KeptValue, OutputNumber, OutputValue, lint
from roundpipe.fx.guards.guards import CallModes, GuardedGraph, Guards
from roundpipe.fx.guards.model_guard import OwnChanges, hooks_by_code, kind_and_value
from roundpipe.fx.guards.piece_numbers import NumberOfPiece
from roundpipe.fx.guards.value_reader import UNKNOWN
from roundpipe.fx.guards.values import ValueProgram
from roundpipe.fx.locations import model_location
from roundpipe.fx.sizes import SizeSystem, flat_tensors, flat_values
from roundpipe.fx.trace.advice import set_at
from roundpipe.fx.trace.decisions import Decision, Knowledge, LeafPolicy, Need, Retry
from roundpipe.fx.trace.intercept import ORIGINAL_CALL, intercepting
from roundpipe.fx.trace.kept import KeptHolders, KeptOnFakes, NumberOfTensor, find_kept
from roundpipe.fx.trace.leaves import Contents, contents_of, gained_by
from roundpipe.fx.trace.recomputed import recipe_of
from roundpipe.fx.trace.recorder import CallRecorder
from roundpipe.fx.trace.runner import GlueRunner, LeafRunner
from roundpipe.fx.trace.verify import ShapeVerifier
from roundpipe.fx.varying import NumberRead, is_found
from roundpipe.fx.world import FakeWorld


class OtherSizes(BaseException):
    """The model's own code does something else at sizes that the graph has to serve, too.

    Args:
        decisions: what it has decided, the last of them otherwise there.
    """

    def __init__(self, decisions: SizeSystem) -> None:
        self.decisions = decisions


class Attempt:
    """One run of the model's Python.

    Args:
        outside: the modules before the first run, but for what leaves set themselves.
        python: what the model's code reaches, beside methods of modules.
        keeping: of a forward that should be pure, the modules and containers in which this run may leave values.
    """

    def __init__(
        self,
        world: FakeWorld,
        form: CallForm,
        knowledge: Knowledge,
        outside: ModuleSnapshot,
        python: PythonSnapshot,
        keeping: tuple[ModuleSnapshot, KeptHolders] | None = None,
    ) -> None:
        self._world = world
        self._form = form
        self._knowledge = knowledge
        self._python = python
        self._keeping = keeping
        self._call_modes = CallModes.current()
        self.recorder = CallRecorder(world, Modes.current(), knowledge.needs, keeps_numbers=knowledge.is_pure)
        modules = named_modules_in(world.model)
        hooked = [name for name, module in modules.items() if has_hooks(module)]
        names = world.name_of_module
        self._policy = LeafPolicy(world.twin, names, knowledge, hooked)
        inside = modules_in(world.twin)
        self._before = ModuleSnapshot(inside)
        opens = bool(world.numbers) or any(isinstance(each, NumberRead) for each in world.dynamic)
        asked = python.reach.functions
        if opens and asks_for_types(map(type, inside), asked, of_numpy=world.has_numpy_numbers):
            raise TraceError("its code asks for the types of values, and symbols for numbers are of others")
        readers = Readers(map(type, inside), [each.__code__ for each in python.reach.functions])
        self._leaves = LeafRunner(world, self.recorder, self._policy, knowledge, readers, self._before, outside)
        self.glue = GlueRunner(world, self.recorder, knowledge)
        self._before_hooks = {  # a module that an earlier forward put into the twin is no module of the user's
            module: hooks_by_code(world.real_module[module]) for module in inside if module in world.real_module
        }
        world.shapes.on_assumption = self._refuse_other_sizes
        self._python_random = python_random_state()
        self.kept: list[KeptOnFakes] = []
        """What a forward that should be pure leaves in Python."""
        self.lost: list[str] = []
        """What it changes otherwise."""

    def run(self) -> GuardedGraph:
        recorder, world = self.recorder, self._world
        args, kwargs = without_found(world.arguments)
        try:
            with intercepting(self, world.model, self._python.reach), world.entered(), recorder.watch, recorder:
                arguments = _copy_of(args), _copy_of(kwargs)
                before = contents_of(*arguments)
                out = world.twin(*arguments[0], **arguments[1])
                recorder.paused += 1
                self._refuse_changed_arguments(before, arguments, out)
                template, nodes = self._output_template(out)
            if self._keeping is not None:
                modules, left = self._keeping
                self.kept, self.lost = find_kept(world, modules, self._python, left)
            kept, kept_nodes = self._output_template([each.value for each in self.kept], is_kept=True)
            nodes += kept_nodes
            self._keep_whole_what_fixes_sizes()
            self._refuse_changed_modules()
            recorder.builder.traced.graph.output(tuple(nodes))
            if python_random_state() != self._python_random:
                words = "its forward draws from Python's or NumPy's random numbers"
                raise Retry(TraceError(words, TraceCause.RANDOM))
            self._note_left()
            return self._closed_graph(template, kept)
        except Retry as retry:
            if recorder.findings.gave_numbers and retry.need is None:
                raise Retry(need=Need.PLAIN_NUMBERS) from retry
            raise
        finally:
            recorder.watch.undo_real_writes()

    def _output_template(self, out: Any, *, is_kept: bool = False) -> tuple[Any, list[Node]]:
        """What a forward returned with names of nodes in place of tensors and sizes, and these nodes, in order."""
        nodes: list[Node] = []

        def place(leaf: Any) -> Any:
            if isinstance(leaf, NumberOfTensor):
                nodes.append(self.recorder.builder.tensor_argument(leaf.tensor))
                return OutputNumber(nodes[-1].name)
            if not flat_values(leaf):
                return int(leaf) if isinstance(leaf, NumberOfPiece) else leaf
            if isinstance(leaf, torch.Size):
                return tuple(map(place, leaf))
            argument = self.recorder.builder.argument(leaf)
            if not isinstance(argument, Node):
                return argument
            nodes.append(argument)
            return OutputValue(argument.name)

        has_values = is_kept or flat_values(out) or any(isinstance(each, NumberOfTensor) for each in trees.leaves(out))
        return trees.map_leaves(out, place) if has_values else out, nodes

    def _closed_graph(self, template: Any, kept: list[Any]) -> GuardedGraph:
        """The graph with its guards, and without glue that nothing reads."""
        world, builder, findings = self._world, self.recorder.builder, self.recorder.findings
        traced = builder.traced
        graph = traced.graph
        reader = self.recorder.data.reader
        values = ValueProgram(traced, reader.reads, reader.inputs)
        self._form.reads = values.read_inputs if values.inputs else None
        traced.own_numbers = values.own_inputs(traced.input_paths)
        traced.read_numbers, traced.has_own_numbers = values.numbers, Need.OWN_NUMBERS in self._knowledge.needs
        traced.has_own_ratios = Need.OWN_RATIOS in self._knowledge.needs
        for name, read in values.buffers.items():  # the next microbatch would find other data in it
            if world.fake(name).untyped_storage()._cdata in builder.written_storages:
                words = f"the forward takes a decision on buffer {name}, which it also changes"
                error, is_inside = TraceError(words, TraceCause.BUFFER_DATA), bool(read.module)
                decision = Decision.LEAF if is_inside else None
                raise Retry(error, read.module, decision, location=read.location, is_stateful=is_inside)
        for node in reversed(list(graph.nodes)):
            stays = node.op in ("placeholder", "output", "call_module")
            if not stays and not node.users and not node.meta.get("effect") and not node.meta.get("random"):
                world.shapes.promote(findings.asked_of_numbers.get(node, ()))  # only its shape may have been read
                graph.erase_node(node)
        traced.output, traced.form = template, self._form
        traced.kept = [KeptValue(each.place, value) for each, value in zip(self.kept, kept, strict=True)]
        traced.example_elements = sum(tensor.numel() for tensor in trees.tensors(world.real_arguments))
        traced.opaque = self._leaves.opaque()
        compiled = {world.name_of_module[module]: module for module in filter(is_compiled, self.glue.modules)}
        reasons = self._knowledge.reasons
        traced.compiled_by_torch = {
            name: reasons.get(name) or reasons.get(type(module)) or "" for name, module in compiled.items()
        }
        weights = {str(node.target) for node in graph.nodes if node.op == "get_attr"} - set(traced.constants)
        written = {storage_key(target) for node in graph.nodes for target in mutated_by(node)} - {None}
        if words := next((where for node, where in self._found_inputs() if storage_key(node) in written), ""):
            raise Retry(TraceError(f"the forward writes into {words}, in whose place there was another tensor"))
        traced.guards = Guards(
            self._form,
            world,
            self._call_modes,
            values,
            ShapeVerifier(traced, world.symbols(), findings.probed_nodes, self._knowledge.dynamic, findings.origins),
            grad_matters=findings.grad_matters,
            weight_writes=findings.weight_writes,
            written=frozenset(index for index, node in enumerate(traced.placeholders) if storage_key(node) in written),
            weights=sorted(weights),
            replaced=world.replaced(),
        )
        if shared := traced.guards.shared_write(trees.tensors(world.real_arguments)):
            raise Retry(TraceError(shared))
        lint(traced)
        return traced

    def _note_left(self) -> None:
        """Keeps how tensors that the forward leaves on looked-into modules are made of sizes."""
        builder, world = self.recorder.builder, self._world
        if any(tensor.untyped_storage()._cdata in builder.written_storages for tensor in builder.made_anew):
            words = "the forward writes into a tensor that an earlier call of it has left on the model"
            raise self.recorder.untraced(words)
        symbols, order = world.example_sizes(), list(builder.traced.graph.nodes)
        left = (change.now for change in self._before.diff(self.glue.modules))
        for tensor in (leaf for value in left for leaf in flat_tensors(value)):
            if tensor not in world.recipes and (node := builder.node_of.get(tensor)) is not None:
                if (recipe := recipe_of(order, node, symbols)) is not None:
                    world.recipes[tensor] = recipe

    def _found_inputs(self) -> Iterator[tuple[Node, str]]:
        """Inputs of the graph that are none of a call's arguments, in words."""
        traced = self.recorder.builder.traced
        paths = ((node, traced.input_paths[node.name]) for node in traced.placeholders)
        return ((node, place_words(path)) for node, path in paths if is_found(path))

    def _refuse_changed_arguments(self, before: Contents, arguments: tuple[Any, Any], out: Any) -> None:
        """A caller may look into the containers that it gave; one that is returned is looked at there."""
        for path in gained_by(before, *arguments):
            holders = trees.above(arguments, path, 2)
            objects = [item for item in holders if not isinstance(item, (list, tuple, Mapping, deque, set))]
            is_seen = trees.holds_any(out, holders)
            if is_seen or objects and not self.glue.is_activation(trees.get(arguments, path)):
                continue
            inside = trees.path_string(path[2:-1] if path[-1].kind == "item" else path[2:])
            words = f"the forward puts something into its argument {path[1].key}{inside}"
            raise Retry(TraceError(words, TraceCause.ARGUMENT_CHANGED))

    def _refuse_other_sizes(self, assumption: sympy.Basic) -> None:
        """Ends what can't serve all sizes that it has to, as soon as code asks that is glue in every attempt."""
        asking = map(self._world.twin.get_submodule, filter(None, self.recorder.modules))
        if not self._world.serves_too(assumption) and not any(map(self._policy.may_be_leaf, asking)):
            raise OtherSizes(self._world.decisions())

    def _keep_whole_what_fixes_sizes(self) -> None:
        """A small module that loops over a size serves every size as a leaf, and one as glue."""
        known = self._knowledge
        for name, error in self.recorder.findings.fixes_sizes.items():
            untried = name not in known.decisions and (name, Decision.LEAF) not in known.tried
            module = self._world.twin.get_submodule(name)
            if name and untried and self._policy.may_be_leaf(module) and not self._policy.is_too_large(module):
                raise Retry(error, name, Decision.LEAF)

    def _refuse_changed_modules(self) -> None:
        """The next call would run in another mode or with other parameters, which no graph sets."""
        replaced = self._before.replaced_parameter()
        if replaced is not None:
            module, parameter = replaced
            words = f"the forward puts another parameter in the place of {self._qualified(module, parameter)}"
            facts = TraceFacts(attribute=parameter, stateful=(self._world.name_of_module[module],))
            location = set_at(type(module), parameter) or model_location()
            raise Retry(TraceError(words, TraceCause.PARAMETER_REPLACED, facts), location=location)
        other = self._before.changed_mode()
        if other is not None:
            name = self._world.name_of_module[other] or type(other).__name__
            raise Retry(TraceError(f"the forward leaves {name} in another mode of training"))

    def has_kept(self, change: AttributeChange) -> bool:
        """Whether an attribute has got what is kept."""
        return any(each.is_in(change.module.__dict__, change.name) for each in self.kept)

    def changed_attributes(self) -> dict[tuple[nn.Module, str], str]:
        """Attributes of looked-into modules that the forward set, with their qualified names."""
        changes = sorted(self._before.diff(self.glue.modules), key=operator.attrgetter("position"))
        return {(change.module, change.name): self._qualified(change.module, change.name) for change in changes}

    def _qualified(self, module: nn.Module, name: str) -> str:
        return f"{self._world.name_of_module[module]}.{name}".lstrip(".")

    def traced_parts(
        self, changed: list[AttributeChange], places: PlaceValues, counts: list[str]
    ) -> tuple[set[nn.Module], set[nn.Module], OwnChanges]:
        """The modules of the user's model that were looked into, those that pass on, and what the forward changed.

        Args:
            places: what it put into containers, closures and globals.
            counts: what it changes at every call, in words.
        """
        real = {module: self._world.real_module[module] for module in self._before_hooks}
        glue = {real[module] for module in self.glue.modules}
        leaves = [self._world.twin.get_submodule(str(node.target)) for node in self.recorder.findings.origins]
        passing = {real[inner] for leaf in leaves for inner in modules_in(leaf) if inner in real}
        own = OwnChanges(
            places=places,
            counts=counts,
            kept=[each.place for each in self.kept],
            inputs=[*self._form.places.values()],
        )
        for module, name, _, value, _ in changed:
            if module in self.glue.modules:
                own.values[real[module], name] = kind_and_value(value)
            else:
                own.attributes.add(name)
        for module, hooks in self._before_hooks.items():
            if (now := hooks_by_code(module)) != hooks:
                own.hooks[real[module]] = now
        return glue, passing, own

    def refuse_activations(self, python: PythonSnapshot) -> None:
        """An activation left anywhere else would not be there at run time either, one that a hook keeps no part of a
        graph.
        """
        for place in sorted(python.diff(), key=lambda place: place.by_hooks):
            activations = [item for item in flat_values(place.now()) if self.glue.is_activation(item)]
            if activations and not place.by_hooks and not self._knowledge.is_pure:
                words = f"{place.words} holds an activation after the forward"
                raise Retry(TraceError(words, TraceCause.ACTIVATION_LEFT))
            if any(activation.requires_grad for activation in activations):
                place_words = f"a forward hook keeps an activation in {place.words}"
                words = f"{place_words}, and a loss may send gradients back through it"
                raise Retry(TraceError(words, TraceCause.ACTIVATION_HOOKED))

    def has_readable_data(self, tensor: Any) -> bool:
        """Whether the data of a fake tensor can be read while tracing."""
        return isinstance(tensor, torch.Tensor) and self._world.has_data and self.recorder.data.determines(tensor)

    def list_of(self, tensor: torch.Tensor) -> list[Any] | None:
        """The numbers of a fake that has dimensions, where arguments tell them."""
        if self._knowledge.is_pure or self.recorder.watch.below_transform or not tensor.dim():
            return None
        answer = self.recorder.data.answer(torch.Tensor.tolist, (tensor,), {})
        return None if answer is UNKNOWN else list(answer)

    def number_of(self, tensor: torch.Tensor) -> Any:
        """The example's number of a fake that has one, where arguments tell it; nothing depends on it."""
        if not self.has_readable_data(tensor):
            return None
        with self.recorder.pause(), real_world():
            known = self.recorder.data.of(tensor)
            return None if known is None else known.item()

    def call_module(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """What a module that glue calls returns."""
        name = self._world.name_of_module.get(module)
        if name is None:
            return ORIGINAL_CALL(module, *args, **kwargs)
        if not isinstance(module, torch.jit.ScriptModule):
            module = self._world.twin.get_submodule(name)
        if self.recorder.watch.below_transform:
            raise self.recorder.give_up(TraceError(f"{name} is called inside a function transform"))
        runner = self._leaves if self._policy.is_leaf(module) else self.glue
        return runner.call(module, name, args, kwargs)


def _copy_of(value: Any) -> Any:
    """Arguments in containers of their own, so that a forward which changes one changes no input."""
    if type(value) in (list, tuple):
        return type(value)(map(_copy_of, value))
    if type(value) is dict:
        return {key: _copy_of(item) for key, item in value.items()}
    if type(value) in (deque, set):
        return copy.copy(value)
    return value
