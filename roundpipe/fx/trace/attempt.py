"""One run of a model's Python on fakes, recorded as a graph.

    Attempt
      |- FakeWorld       a twin of the model, fake inputs, symbolic sizes
      |- CallRecorder        a node per torch function call in glue
      |- LeafPolicy      which modules are one node
      `- intercept       sends module calls, autograd functions, ... here

What goes wrong inside a module ends the attempt with a `Restart`, which says what to do otherwise. An attempt is never
repaired midway, since Python state that a failed run left behind could not be taken back.
"""

from __future__ import annotations

import copy
import sys
import types
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from roundpipe.core import trees
from roundpipe.core.errors import TraceError
from roundpipe.core.modes import Modes
from roundpipe.core.random_state import python_random_state, set_python_random_state
from roundpipe.effects.snapshot import AttributeChange, ModuleSnapshot, PlaceValues, PythonSnapshot
from roundpipe.effects.uses import Readers, uses_of_forward
from roundpipe.fx.binding import CallForm
from roundpipe.fx.fakes import DATA_DEPENDENT, Dimension, FakeWorld, is_fake
from roundpipe.fx.flat import flat_values
from roundpipe.fx.graph.grammar import lint
from roundpipe.fx.graph.nodes import mutated_by, storage_key
from roundpipe.fx.graph.traced import OutputValue, TracedGraph
from roundpipe.fx.guards.guards import Flags, Guards
from roundpipe.fx.guards.model_state import ModelState, Own, hooks_by_code, kind_and_value
from roundpipe.fx.guards.values import ValueProgram
from roundpipe.fx.operations import assign_buffer
from roundpipe.fx.sizes import expression_of
from roundpipe.fx.trace.advice import set_at
from roundpipe.fx.trace.builder import UntracedValue
from roundpipe.fx.trace.intercept import ORIGINAL_CALL, intercepting
from roundpipe.fx.trace.leaf_watch import handed_back
from roundpipe.fx.trace.leaves import Contents, contents_of, gained_by, left_behind, set_elsewhere
from roundpipe.fx.trace.policy import Decision, LeafPolicy
from roundpipe.fx.trace.recorder import CallRecorder, Restart, StatefulError
from roundpipe.fx.trace.runner import LeafRunner, is_put_by_hooks
from roundpipe.fx.trace.verify import ShapeVerifier


class PlainLengths(BaseException):
    """Ends an attempt: the model's code does with ``len(tensor)`` what only a plain number can do."""


@dataclass
class Learned:
    """What earlier attempts found out, for the next one."""

    max_leaf_bytes: int | None = None
    dynamic: frozenset[Dimension] = frozenset()
    decisions: dict[str | type, Decision] = field(default_factory=dict)
    reasons: dict[str | type, str] = field(default_factory=dict)
    history: set[tuple[str, Decision]] = field(default_factory=set)
    burn_sizes: bool = False
    log_layouts: bool = False
    plain_lengths: bool = False
    stateful: dict[str | type, None] = field(default_factory=dict)
    """Modules, and their classes, whose forward changes Python state."""
    handing_on: set[str | type] = field(default_factory=set)
    """Modules, and their classes, from whose attributes others take values in the same forward."""
    seen_to_set: set[tuple[type, str]] = field(default_factory=set)
    """Attributes of classes that forwards changed."""


class Attempt:
    """One run of the model's Python.

    Args:
        world: where it runs.
        form: the model's signature.
        learned: what earlier attempts found out.
        outside: what is set on leaves by other code.
        functions: code that the model's code calls, beside methods of modules.
        cells: of its closures.
    """

    def __init__(
        self,
        world: FakeWorld,
        form: CallForm,
        learned: Learned,
        outside: ModuleSnapshot,
        functions: Collection[types.CodeType] = (),
        cells: Collection[types.CellType] = (),
    ) -> None:
        self._world = world
        self._form = form
        self._learned = learned
        self._outside = outside
        self._cells = cells
        self._flags = Flags.of(world.model)
        self._recorder = CallRecorder(world, Modes.current(), learned.burn_sizes, learned.log_layouts)
        hooked = [
            name
            for name, module in world.model.named_modules()
            if module._forward_hooks or module._forward_pre_hooks or _has_backward_hooks(module)
        ]
        self._policy = LeafPolicy(world.twin, world.name_of_module, learned.decisions, learned.max_leaf_bytes, hooked)
        readers = Readers([type(module) for module in world.twin.modules()], functions)
        self._runner = LeafRunner(world, self._recorder, self._policy, learned.history, learned.seen_to_set, readers)
        self._gave_lengths = False
        self._glue_modules: dict[nn.Module, None] = {}
        self._leaves: dict[str, nn.Module] = {}
        self._before = ModuleSnapshot(world.twin.modules())
        self._before_hooks = {module: hooks_by_code(real) for module, real in self._pairs()}
        self._python_random = python_random_state()

    def _pairs(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        """Each module of the twin with the user's; one that an earlier forward put there has none."""
        names = self._world.name_of_module
        for module in self._world.twin.modules():
            if module in names:
                yield module, self._world.model.get_submodule(names[module])

    def run(self) -> TracedGraph:
        """Records the forward and closes the graph."""
        try:
            return self._run()
        finally:
            self._recorder.watch.undo_real_writes()

    def _run(self) -> TracedGraph:
        recorder, world = self._recorder, self._world
        args, kwargs = world.arguments
        with intercepting(self, _files_of(world.model), self._cells), world.entered(), recorder.watch, recorder:
            given = _copied(args), _copied(kwargs)
            before = contents_of(*given)
            out = world.twin(*given[0], **given[1])
            recorder.paused += 1
            self._refuse_changed_arguments(before, given, out)
            try:
                template, nodes = self._output(out)
            except UntracedValue as error:
                raise recorder.untraced(error) from error
        self._keep_whole_what_fixes_sizes()
        self._refuse_changed_modules()
        recorder.builder.graph.output(tuple(nodes))
        return self._traced(template)

    def _refuse_changed_arguments(self, before: Contents, given: tuple[Any, Any], out: Any) -> None:
        """A caller may look into the containers that it gave; one that is returned is looked at there."""
        for path in gained_by(before, *given):
            holders = trees.above(given, path, 2)
            objects = [one for one in holders if not isinstance(one, (list, tuple, Mapping, deque, set))]
            if trees.holds_any(out, holders) or objects and not self._is_activation(trees.get(given, path)):
                continue
            words = trees.path_string(path[2:-1] if path[-1].kind == "item" else path[2:])
            raise Restart(None, "", TraceError(f"the forward puts something into its argument {path[1].key}{words}"))

    def _keep_whole_what_fixes_sizes(self) -> None:
        """A small module that loops over a size serves every size as a leaf, and one as glue."""
        for name, cause in self._recorder.fixes_sizes.items():
            untried = name not in self._learned.decisions and (name, Decision.LEAF) not in self._learned.history
            module = self._world.twin.get_submodule(name)
            if name and untried and self._policy.may_be_leaf(module) and not self._policy.is_too_large(module):
                raise Restart(Decision.LEAF, name, cause)

    def _refuse_changed_modules(self) -> None:
        """The next call would run in another mode or with other parameters, which no graph sets."""
        replaced = self._before.replaced_parameter()
        if replaced is not None:
            module, parameter = replaced
            name = self._world.name_of_module[module]
            self._learned.stateful[name] = None
            words = f"{name}.{parameter}".lstrip(".")
            restart = Restart(None, "", StatefulError(f"the forward puts another parameter in the place of {words}"))
            restart.location = set_at(type(module), parameter) or restart.location
            raise restart
        other = self._before.changed_mode()
        if other is not None:
            name = self._world.name_of_module[other] or type(other).__name__
            raise Restart(None, "", StatefulError(f"the forward leaves {name} in another mode of training"))

    def changed_attributes(self) -> dict[tuple[nn.Module, str], str]:
        """Attributes of looked-into modules that the forward set, with their qualified names."""
        return {
            (change.module, change.name): self._qualified(change.module, change.name)
            for change in self._before.diff()
            if change.module in self._glue_modules
        }

    def handed_on(self, changed: dict[tuple[nn.Module, str], str]) -> set[str]:
        """Those of the changed attributes that others take in the same forward."""
        return {words for (module, _), words in changed.items() if self._hands_on(module)}

    def _qualified(self, module: nn.Module, name: str) -> str:
        owner = self._world.name_of_module[module]
        return f"{owner}.{name}" if owner else name

    def model_state(self, changed: list[AttributeChange], places: PlaceValues, counts: list[str]) -> ModelState:
        """What the user's model holds in Python now.

        Args:
            changed: the attributes that the forward set.
            places: what it put into containers, closures and globals.
            counts: what it changes at every call, in words.
        """
        names = self._world.name_of_module
        real = {module: self._world.model.get_submodule(names[module]) for module in self._before_hooks}
        glue = {real[module] for module in self._glue_modules}
        leaves = [self._world.twin.get_submodule(str(node.target)) for node in self._recorder.handed_back]
        passing = {real[inner] for leaf in leaves for inner in leaf.modules() if inner in real}
        own = Own(places=places, counts=counts)
        for module, name, _, value, _ in changed:
            if module in self._glue_modules:
                own.values[real[module], name] = kind_and_value(value)
            else:
                own.attributes.add(name)
        own.hooks.update(
            (real[module], now)
            for module, was in self._before_hooks.items()
            for now in [hooks_by_code(module)]
            if now != was
        )
        return ModelState(self._world.model, glue, passing, own)

    def not_kept(self) -> list[str]:
        """Attributes that leaves set to activations, in words."""
        return list(self._recorder.not_kept)

    def refuse_activations(self, python: PythonSnapshot) -> None:
        """An activation left anywhere else would not be there at run time either, one that a hook keeps no part of a
        graph.
        """
        for place in sorted(python.diff(), key=lambda place: place.by_hooks):
            activations = [item for item in flat_values(place.now()) if self._is_activation(item)]
            if activations and not place.by_hooks:
                raise Restart(None, "", TraceError(f"{place.words} holds an activation after the forward"))
            if any(activation.requires_grad for activation in activations):
                cause = "a forward hook keeps an activation in {}, and a loss may send gradients back through it"
                raise Restart(None, "", TraceError(cause.format(place.words)))

    # the session of `intercept`

    def in_glue(self) -> bool:
        return self._recorder.in_glue()

    def in_transform(self) -> bool:
        return bool(self._recorder.watch.below_transform)

    def transform(self) -> AbstractContextManager[None]:
        return self._recorder.transform()

    def apply_function(self, function: type[torch.autograd.Function], args: Any, kwargs: Any) -> Any:
        return self._recorder.record_function(function, args, kwargs)

    def draw_random(self, what: str) -> BaseException:
        return self._recorder.give_up(
            TraceError(f"{what} is called, and its result would be the same at every call of the graph")
        )

    def note_grad_mode_asked(self) -> None:
        self._recorder.note_grad_mode_asked()

    def length_of(self, tensor: torch.Tensor) -> Any:
        if self._learned.plain_lengths or not tensor.dim():
            return len(tensor)
        self._gave_lengths = True
        return tensor.shape[0]

    def has_readable_data(self, tensor: Any) -> bool:
        if not self.in_glue() or not isinstance(tensor, torch.Tensor) or not self._world.has_data:
            return False
        node = self._recorder.builder.node_of.get(tensor)
        return node is not None and self._recorder.reader.depends_on_inputs_only(node)

    def call_module(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        name = self._world.name_of_module.get(module)
        if not self.in_glue() or name is None:
            return ORIGINAL_CALL(module, *args, **kwargs)
        if not isinstance(module, torch.jit.ScriptModule):
            module = self._twin_of(module, name)
        if self.in_transform():
            raise self._recorder.give_up(TraceError(f"{name} is called inside a function transform"))
        if self._policy.is_leaf(module):
            return self._call_leaf(module, name, args, kwargs)
        return self._call_glue(module, name, args, kwargs)

    def _twin_of(self, module: nn.Module, name: str) -> nn.Module:
        return self._world.twin.get_submodule(name) if name else self._world.twin

    # modules that are looked into

    def _call_glue(self, module: nn.Module, name: str, args: Any, kwargs: Any) -> Any:
        """Records the forward of a module."""
        recorder = self._recorder
        if _has_backward_hooks(module):
            raise Restart(Decision.LEAF, name, TraceError(f"{name or 'the model'} has backward hooks"))
        self._glue_modules[module] = None
        buffers = dict(module._buffers)
        attributes = dict(module.__dict__)
        recorder.modules.append(name)
        try:
            out = ORIGINAL_CALL(module, *args, **kwargs)
            self._record_assignments(module, name, buffers)
            self._refuse_kept_activations(module, name, attributes)
        except UntracedValue as error:
            raise recorder.untraced(error) from error
        except DATA_DEPENDENT as error:
            raise recorder.data_dependent(error) from error
        except Exception as error:
            if self._gave_lengths and isinstance(error, TypeError):
                raise PlainLengths() from error
            raise Restart(Decision.LEAF, name, error) from error
        finally:
            recorder.modules.pop()
        return out

    def _record_assignments(self, module: nn.Module, name: str, before: dict[str, Any]) -> None:
        """One effect node per buffer that a forward replaced by another tensor."""
        builder = self._recorder.builder
        for key, buffer in module._buffers.items():
            old = before.get(key)
            if buffer is old:
                continue
            full_name = f"{name}.{key}" if name else key
            if buffer is None:
                raise self._recorder.give_up(TraceError(f"buffer {full_name} is set to None in the forward"))
            if full_name not in self._world.real:
                raise self._recorder.give_up(
                    TraceError(f"buffer {full_name}, which did not exist or was None, is set in the forward")
                )
            target = builder.attribute(full_name, self._world.fake(full_name))
            if not _alike(buffer, target.meta["value"]):
                raise self._recorder.give_up(
                    TraceError(f"buffer {full_name} is set to a tensor of another shape or dtype in the forward")
                )
            node = builder.add("call_function", assign_buffer, (target, builder.tensor_argument(buffer)))
            node.meta.update(modes=None, effect=True, mutates=(target,), value=target.meta["value"])
            builder.written_storages.add(target.meta["value"].untyped_storage()._cdata)

    def _refuse_kept_activations(self, module: nn.Module, name: str, before: dict[str, Any]) -> None:
        """An activation left in an attribute would not be there at run time."""
        if self._hands_on(module):
            return
        for key, value in module.__dict__.items():
            if key in ("_buffers", "_parameters", "_modules"):
                continue
            if before.get(key, before) is value and not isinstance(value, (list, dict)):
                continue
            if before.get(key, before) is None and self._is_reset(module, key):
                continue
            if any(self._is_activation(item) for item in flat_values(value)) and not is_put_by_hooks(module, key):
                restart = self._recorder.give_up(TraceError(left_behind(f"{type(module).__name__}.{key}")))
                restart.location = set_at(type(module), key) or restart.location
                raise restart

    def _is_reset(self, module: nn.Module, attribute: str) -> bool:
        """Whether an attribute, None when a module is called, is state for the module's own forward, which reads it,
        and which code of another module sets anew in each forward, as recurrent states between tokens.
        """
        kinds = {type(one) for one in self._world.twin.modules()} - {type(module)}
        return attribute in uses_of_forward(type(module)).reads and any(
            attribute in uses_of_forward(kind).sets for kind in kinds
        )

    def _hands_on(self, module: nn.Module) -> bool:
        """Whether another module takes a value from this one's attributes in the same forward, so that it is glue."""
        name = self._world.name_of_module[module]
        is_stateful = name in self._learned.stateful or type(module) in self._learned.stateful
        return bool({name, type(module)} & self._learned.handing_on) and not is_stateful

    def _is_activation(self, value: Any) -> bool:
        """Whether a value is a fake that the parameters have a part in."""
        if not isinstance(value, torch.Tensor) or not is_fake(value) or value in self._world.name_of:
            return False
        node = self._recorder.builder.node_of.get(value)
        return node is None or not self._recorder.reader.depends_on_inputs_only(node)

    # leaves

    def _call_leaf(self, module: nn.Module, name: str, args: Any, kwargs: Any) -> Any:
        """One node for the call of a module."""
        recorder = self._recorder
        try:
            node_args, node_kwargs = recorder.builder.arguments(tuple(args), kwargs)
        except UntracedValue as error:
            raise recorder.untraced(error) from error
        self._refuse_modules_as_arguments(module, name, args, kwargs)
        words = set_elsewhere(self._outside, module) or self._rebuilt(module)
        if words is not None:
            cause = TraceError(f"{words} is set by other code in the forward, and would not be when the graph runs")
            raise Restart(Decision.DESCEND, name, cause)
        self._leaves[name] = module
        python_random = python_random_state()
        with recorder.pause():
            run = self._runner.run(module, name, args, kwargs)
            self._outside.accept_attributes(module.modules())
            self._before.accept_buffers(module.modules())
            returned = handed_back(run.out, args, kwargs, self._world.name_of)
        draws_python_random = python_random_state() != python_random
        set_python_random_state(python_random)
        if draws_python_random:
            self._runner.forget(module)
        node = recorder.builder.add("call_module", name, node_args, node_kwargs)
        mutates = tuple(dict.fromkeys(recorder.builder.tensor_argument(tensor) for tensor in run.written))
        node.meta.update(
            random=run.random or draws_python_random,
            buffers_written=run.buffers_written,
            mutates=mutates,
            effect=bool(mutates),
        )
        recorder.note_written(node, run.written)
        if run.buffers_written:
            recorder.builder.written_storages.update(buffer.untyped_storage()._cdata for buffer in module.buffers())
        if self._runner.is_probed(module):
            recorder.probed_nodes[node] = self._reason(name)
        if any(returned):
            recorder.handed_back[node] = returned
        recorder.builder.bind_output(run.out, node)
        return run.out

    def _rebuilt(self, module: nn.Module) -> str | None:
        """What of a leaf is not as the model has it, such as weights that `torch.func.functional_call` puts there."""
        rebuilt = self._before.rebuilt(module.modules())
        return None if rebuilt is None else f"{type(rebuilt[0]).__name__}.{rebuilt[1]}"

    def _refuse_modules_as_arguments(self, module: nn.Module, name: str, args: Any, kwargs: Any) -> None:
        """A module that a leaf would be given is the twin's; looked into, its weights are the leaf's own affair."""
        if not any(isinstance(leaf, nn.Module) for leaf in trees.leaves((args, kwargs))):
            return
        cause = TraceError(f"{name} takes a module as an argument")
        if self._policy.decision(module) is None:
            raise Restart(Decision.DESCEND, name, cause)
        raise self._recorder.give_up(cause)

    # the end

    def _output(self, out: Any) -> tuple[Any, list[Node]]:
        """The output template, and the nodes it names, in order."""
        builder = self._recorder.builder
        nodes: list[Node] = []

        def place(leaf: Any) -> Any:
            if not flat_values(leaf):
                return leaf
            if isinstance(leaf, torch.Size):
                return tuple(place(size) for size in leaf)
            argument = builder.argument(leaf)
            if not isinstance(argument, Node):
                return argument
            nodes.append(argument)
            return OutputValue(argument.name)

        if not flat_values(out):
            return out, nodes
        return trees.map_leaves(out, place), nodes

    def _traced(self, template: Any) -> TracedGraph:
        builder, recorder, world = self._recorder.builder, self._recorder, self._world
        if python_random_state() != self._python_random:
            raise Restart(None, "", TraceError("its forward draws from Python's or NumPy's random numbers"))
        values = ValueProgram(builder.graph, recorder.reader.reads, world.model, builder.constants, builder.input_paths)
        self._refuse_moving_reads(values)
        self._remove_unused()
        traced = TracedGraph(
            graph=builder.graph,
            model=world.model,
            constants=builder.constants,
            input_paths=builder.input_paths,
            output=template,
            example_elements=sum(t.numel() for t in trees.tensors(world.real_arguments)),
            opaque={
                name: self._reason(name)
                for name, module in self._leaves.items()
                if self._policy.is_opaque(module) or name in recorder.probed_nodes.values()
            },
        )
        verifier = ShapeVerifier(
            traced, world, self._form, set(recorder.probed_nodes), self._learned.dynamic, recorder.handed_back
        )
        held = {str(node.target) for node in traced.graph.nodes if node.op == "get_attr"} - set(traced.constants)
        flags = self._flags.with_weights(sorted(held))
        flags.forms.leave_out([name for name in world.real if not world.has_in_place(name)])
        written = {storage_key(target) for node in traced.graph.nodes for target in mutated_by(node)} - {None}
        into = frozenset(index for index, node in enumerate(traced.placeholders) if storage_key(node) in written)
        guards = traced.guards = Guards(
            self._form, world, flags, values, verifier, recorder.grad_matters, recorder.weight_writes, into
        )
        shared = guards.shared_write(trees.tensors(world.real_arguments))
        if shared:
            raise Restart(None, "", TraceError(shared))
        lint(traced)
        return traced

    def _reason(self, name: str) -> str:
        """Why a leaf is opaque."""
        module = self._leaves[name]
        reasons = self._learned.reasons
        return reasons.get(name) or reasons.get(type(module)) or "scripted code can't be looked into"

    def _refuse_moving_reads(self, values: ValueProgram) -> None:
        """Data of a buffer that the same forward changes is another in the next microbatch."""
        for name in values.buffers:
            fake = self._world.fake(name)
            if fake.untyped_storage()._cdata in self._recorder.builder.written_storages:
                cause = TraceError(f"the forward takes a decision on buffer {name}, which it also changes")
                raise Restart(None, "", cause)

    def _remove_unused(self) -> None:
        """Drops glue that nothing reads."""
        graph = self._recorder.builder.graph
        for node in reversed(list(graph.nodes)):
            kept = node.op in ("placeholder", "output", "call_module")
            if not kept and not node.users and not node.meta.get("effect") and not node.meta.get("random"):
                graph.erase_node(node)


def _files_of(model: nn.Module) -> list[types.ModuleType]:
    """The Python modules that the classes of a model are from, but for torch's."""
    kinds = dict.fromkeys(kind for module in model.modules() for kind in type(module).__mro__)
    names = dict.fromkeys(kind.__module__ for kind in kinds if kind.__module__.partition(".")[0] != "torch")
    return [sys.modules[name] for name in names if name != "builtins" and name in sys.modules]


def _copied(value: Any) -> Any:
    """Arguments in containers of their own, so that a forward which changes one changes no input."""
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (deque, set):
        return copy.copy(value)
    return value


def _has_backward_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, for every size of the inputs, and dtype."""
    sizes = [list(map(expression_of, tensor.shape)) for tensor in (one, other)]
    return one.dtype == other.dtype and sizes[0] == sizes[1]
