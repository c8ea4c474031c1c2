"""Captures a model as a graph of modules and glue by running its Python once on fakes.

    trace ---- attempts, until one ends without a Restart
      `- Attempt (one run)
           |- FakeWorld       a twin of the model, fake inputs, symbolic sizes
           |- Recorder        a node per torch function call in glue
           |- LeafPolicy      which modules are one node
           `- intercept       sends module calls, autograd functions, ... here

What goes wrong inside a module teaches the next attempt something: look inside it, keep it whole, or
find its output sizes by running a copy. An attempt is never repaired midway, since Python state that
a failed run left behind could not be taken back. Only the root can't be kept whole: what its own code
does wrong is a `TraceError`.

Invariant: the user's model, and all random state, are after `trace` what they were before it.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from roundpipe import structure
from roundpipe.errors import TraceError
from roundpipe.fx.advice import advice, set_at, where_set
from roundpipe.fx.ambient import Ambient
from roundpipe.fx.binding import Arguments, CallForm
from roundpipe.fx.builder import UntracedValue, flat_values
from roundpipe.fx.fakes import DATA_DEPENDENT, Dimension, FakeWorld, expression_of, is_fake
from roundpipe.fx.graph import OutputValue, TracedGraph, assign_buffer
from roundpipe.fx.guards import Flags, Guards
from roundpipe.fx.intercept import ORIGINAL_CALL, exclusive, intercepting
from roundpipe.fx.leaves import OutsideChanges, TreeState
from roundpipe.fx.policy import Decision, LeafPolicy, is_of_torch
from roundpipe.fx.python_state import PythonState, must_run_once
from roundpipe.fx.recorder import BurnSizes, Recorder, Restart, StatefulError
from roundpipe.fx.runner import LeafRunner
from roundpipe.fx.values import ValueProgram
from roundpipe.fx.verify import ShapeVerifier

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 60
MAX_SETTLING_RUNS = 3
"""Runs until a model that sets plain attributes in its forward must give the same graph twice."""


def trace(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    max_leaf_bytes: int | None = None,
    dynamic: Collection[Dimension] = (),
) -> TracedGraph:
    """The graph that a model's forward records on example arguments.

    Args:
        model: any module; it may be on the ``meta`` device. Its train or eval mode, grad mode and
            autocast are those of the graph.
        args, kwargs: example arguments. Their data answer what the model's code asks of its inputs'
            data; dim 0 of floats and every dimension of integers become symbols.
        max_leaf_bytes: look into modules with more bytes of weights than this; None = no such limit.
        dynamic: further input dimensions that become symbols, as in `Failure.dimensions`.

    Returns:
        The graph, with its guards.

    Raises:
        TraceError: the root's own code can't be captured; says file, line, cause and what to change.
    """
    form = CallForm(model)
    arguments = form.normalise(args, kwargs or {})
    learned = _Learned(max_leaf_bytes=max_leaf_bytes, dynamic=frozenset(dynamic))
    with exclusive(), _random_state_kept():
        doubled = _doubled(arguments)
        if doubled is None:
            return _trace(model, form, arguments, learned)
        try:
            traced = _trace(model, form, doubled, learned)
        except TraceError as error:
            try:
                return _trace(model, form, arguments, learned)
            except TraceError:
                raise error from None
        assert traced.guards is not None
        if traced.guards.check(args, kwargs or {}) is not None:
            return _trace(model, form, arguments, learned)
        return traced


@dataclass
class _Learned:
    """What earlier attempts found out."""

    max_leaf_bytes: int | None = None
    dynamic: frozenset[Dimension] = frozenset()
    decisions: dict[str | type, Decision] = field(default_factory=dict)
    reasons: dict[str | type, str] = field(default_factory=dict)
    history: set[tuple[str, Decision]] = field(default_factory=set)
    burn_sizes: bool = False
    stateful: dict[str | type, None] = field(default_factory=dict)
    """Modules, and their classes, whose forward changes Python state."""
    handing_on: set[str] = field(default_factory=set)
    """Modules from whose attributes others take values in the same forward."""


def _trace(model: nn.Module, form: CallForm, arguments: Arguments, learned: _Learned) -> TracedGraph:
    """Attempts until one succeeds."""
    for _ in range(MAX_ATTEMPTS):
        world = FakeWorld(model, arguments, learned.dynamic)
        try:
            return _settled(world, form, learned)
        except BurnSizes:
            learned.burn_sizes = True
        except Restart as restart:
            _learn(model, learned, restart)
    raise TraceError(
        f"can't trace {type(model).__name__}: no graph after {MAX_ATTEMPTS} attempts; looked into or kept "
        f"whole: {', '.join(str(name) for name in learned.decisions)}"
    )


def _settled(world: FakeWorld, form: CallForm, learned: _Learned) -> TracedGraph:
    """The graph that the model gives again and again, should its forward set attributes of its own."""
    previous: str | None = None
    state = TreeState(list(world.twin.modules()))
    outside = OutsideChanges(world.twin)
    python = PythonState([*world.twin.modules(), *world.model.modules()])
    try:
        for _ in range(MAX_SETTLING_RUNS):
            attempt = _Attempt(world, form, learned, outside)
            traced = attempt.run()
            attempt.refuse_activations(python)
            changed = attempt.changed_attributes()
            words = list(dict.fromkeys([*changed.values(), *python.changed()]))
            printed = "\n".join(node.format_node() or "output" for node in traced.graph.nodes)
            if not words or printed == previous:
                words += attempt.not_kept()
                if words:
                    logger.warning(
                        "%s: its forward sets %s; the compiled model runs as if it had not",
                        type(world.model).__name__,
                        ", ".join(words),
                    )
                return traced
            previous = printed
            state.restore_tensors(keep=set(changed))
            python.restore(tensors_only=True)
    finally:
        python.restore()
    learned.stateful.update(dict.fromkeys(world.name_of_module[module] for module, _ in changed))
    cause = TraceError(f"it sets {', '.join(words)}, and what it computes depends on that")
    raise _root_error(world.model, cause, where_set(world.model, words[0]), learned)


def _learn(model: nn.Module, learned: _Learned, restart: Restart) -> None:
    """Notes what a failed attempt found; raises if it was the root that failed."""
    name, decision = restart.name, restart.decision
    location = restart.where()
    if not name or decision is None:
        raise _root_error(model, restart.cause, location, learned) from restart.cause
    if isinstance(restart.cause, StatefulError):
        learned.stateful.update({name: None, type(model.get_submodule(name)): None})
    if restart.hands_on:
        learned.handing_on.add(name)
    if (name, decision) in learned.history:
        parent = name.rpartition(".")[0]
        while parent and isinstance(model.get_submodule(parent), (nn.ModuleList, nn.ModuleDict)):
            parent = parent.rpartition(".")[0]
        if not parent or (parent, Decision.LEAF) in learned.history:
            raise _root_error(model, restart.cause, location, learned) from restart.cause
        name, decision = parent, Decision.LEAF
    learned.history.add((name, decision))
    keys: list[str | type] = [name]
    module = model.get_submodule(name)
    if not is_of_torch(type(module)):
        keys.append(type(module))
    for key in keys:
        learned.decisions[key] = decision
        learned.reasons[key] = f"{location}: {_first_line(restart.cause)}"
    logger.debug("tracing again: %s is to be %s: %s", name, decision.value, restart.cause)


class _Attempt:
    """One run of the model's Python.

    Args:
        world: where it runs.
        form: the model's signature.
        learned: what earlier attempts found out.
        outside: what is set on leaves by other code.
    """

    def __init__(self, world: FakeWorld, form: CallForm, learned: _Learned, outside: OutsideChanges) -> None:
        self._world = world
        self._form = form
        self._learned = learned
        self._outside = outside
        self._flags = Flags.of(world.model)
        self._recorder = Recorder(world, Ambient.current(), learned.burn_sizes)
        hooked = [
            name for name, module in world.model.named_modules() if module._forward_hooks or module._forward_pre_hooks
        ]
        self._policy = LeafPolicy(world.twin, world.name_of_module, learned.decisions, learned.max_leaf_bytes, hooked)
        self._runner = LeafRunner(world, self._recorder, self._policy, learned.history)
        self._glue_modules: dict[nn.Module, None] = {}
        self._leaves: dict[str, nn.Module] = {}
        self._before = TreeState(list(world.twin.modules()))
        self._python_random = _python_random_state()

    def run(self) -> TracedGraph:
        """Records the forward and closes the graph."""
        recorder, world = self._recorder, self._world
        args, kwargs = world.arguments
        with intercepting(self), world.entered(), recorder.watch, recorder:
            out = world.twin(*_copied(args), **_copied(kwargs))
            recorder.paused += 1
            try:
                template, nodes = self._output(out)
            except UntracedValue as error:
                raise recorder.untraced(error) from error
        self._keep_whole_what_fixes_sizes()
        recorder.builder.graph.output(tuple(nodes))
        return self._traced(template)

    def _keep_whole_what_fixes_sizes(self) -> None:
        """A small module that loops over a size serves every size as a leaf, and one as glue."""
        for name, cause in self._recorder.fixes_sizes.items():
            untried = name not in self._learned.decisions and (name, Decision.LEAF) not in self._learned.history
            if name and untried and self._policy.may_be_leaf(self._world.twin.get_submodule(name)):
                raise Restart(Decision.LEAF, name, cause)

    def changed_attributes(self) -> dict[tuple[nn.Module, str], str]:
        """Attributes of looked-into modules that the forward set, with their qualified names."""
        changed = {}
        for module, name, _ in self._before.changed_attributes():
            if module in self._glue_modules and not self._hands_on(module):
                owner = self._world.name_of_module[module]
                changed[module, name] = f"{owner}.{name}" if owner else name
        return changed

    def not_kept(self) -> list[str]:
        """Attributes that leaves set to activations, in words."""
        return list(self._recorder.not_kept)

    def refuse_activations(self, python: PythonState) -> None:
        """An activation left anywhere else would not be there at run time either."""
        for words, held in python.gained():
            if any(self._is_activation(item) for item in flat_values(held)):
                raise Restart(None, "", TraceError(f"{words} holds an activation after the forward"))

    # ------------------------------------------------------------------ the session of `intercept`

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

    # ------------------------------------------------------------------ modules that are looked into

    def _call_glue(self, module: nn.Module, name: str, args: Any, kwargs: Any) -> Any:
        """Records the forward of a module."""
        recorder = self._recorder
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
            node.meta.update(ambient=None, effect=True, mutates=(target,), value=target.meta["value"])
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
            if any(self._is_activation(item) for item in flat_values(value)):
                restart = self._recorder.give_up(
                    TraceError(
                        f"{type(module).__name__}.{key} is set to an activation in the forward, and would "
                        f"not be set when the graph runs"
                    )
                )
                restart.location = set_at(type(module), key) or restart.location
                raise restart

    def _hands_on(self, module: nn.Module) -> bool:
        """Whether another module takes a value from this one's attributes in the same forward, so that it is glue."""
        name = self._world.name_of_module[module]
        is_stateful = name in self._learned.stateful or type(module) in self._learned.stateful
        return name in self._learned.handing_on and not is_stateful

    def _is_activation(self, value: Any) -> bool:
        """Whether a value is a fake that the parameters have a part in."""
        if not isinstance(value, torch.Tensor) or not is_fake(value) or value in self._world.name_of:
            return False
        node = self._recorder.builder.node_of.get(value)
        return node is None or not self._recorder.reader.depends_on_inputs_only(node)

    # ------------------------------------------------------------------ leaves

    def _call_leaf(self, module: nn.Module, name: str, args: Any, kwargs: Any) -> Any:
        """One node for the call of a module."""
        recorder = self._recorder
        try:
            node_args, node_kwargs = recorder.builder.arguments(tuple(args), kwargs)
        except UntracedValue as error:
            raise recorder.untraced(error) from error
        self._refuse_modules_as_arguments(module, name, args, kwargs)
        set_elsewhere = self._outside.on(module)
        if set_elsewhere is not None:
            cause = TraceError(
                f"{set_elsewhere} is set by other code in the forward, and would not be when the graph runs"
            )
            raise Restart(Decision.DESCEND, name, cause)
        self._leaves[name] = module
        python_random = _python_random_state()
        with recorder.pause():
            run = self._runner.run(module, name, args, kwargs)
            self._outside.note_own(module)
        draws_python_random = _python_random_state() != python_random
        _set_python_random_state(python_random)
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
        recorder.builder.bind_output(run.out, node)
        return run.out

    def _refuse_modules_as_arguments(self, module: nn.Module, name: str, args: Any, kwargs: Any) -> None:
        """A module that a leaf would be given is the twin's; looked into, its weights are the leaf's own affair."""
        if not any(isinstance(leaf, nn.Module) for leaf in structure.leaves((args, kwargs))):
            return
        cause = TraceError(f"{name} takes a module as an argument")
        if self._policy.decision(module) is None:
            raise Restart(Decision.DESCEND, name, cause)
        raise self._recorder.give_up(cause)

    # ------------------------------------------------------------------ the end

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
        return structure.map_leaves(out, place), nodes

    def _traced(self, template: Any) -> TracedGraph:
        builder, recorder, world = self._recorder.builder, self._recorder, self._world
        if _python_random_state() != self._python_random:
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
            example_elements=sum(t.numel() for t in structure.tensors(world.real_arguments)),
            opaque={
                name: self._reason(name)
                for name, module in self._leaves.items()
                if self._policy.decision(module) is not None or name in recorder.probed_nodes.values()
            },
        )
        verifier = ShapeVerifier(traced, world, self._form, set(recorder.probed_nodes), self._learned.dynamic)
        glue = [world.model.get_submodule(world.name_of_module[module]) for module in self._glue_modules]
        held = {str(node.target) for node in traced.graph.nodes if node.op == "get_attr"} - set(traced.constants)
        flags = self._flags.with_attributes(glue).with_weights(sorted(held))
        traced.guards = Guards(self._form, world, flags, values, verifier, recorder.input_grad_matters)
        traced.lint()
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


# ---------------------------------------------------------------------------------- example arguments


def _doubled(arguments: Arguments) -> Arguments | None:
    """The example with every sample twice if it has one; a size of 1 could mean too many things."""
    batch = next((t.shape[0] for t in structure.tensors(arguments) if t.dim()), None)
    if batch != 1:
        return None
    args, kwargs = arguments

    def twice(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[0] != 1:
            return tensor
        with torch.no_grad():
            doubled = torch.cat([tensor, tensor])
        return doubled.requires_grad_(tensor.requires_grad)

    return (
        tuple(structure.map_tensors(value, twice) for value in args),
        {name: structure.map_tensors(value, twice) for name, value in kwargs.items()},
    )


def _copied(value: Any) -> Any:
    """Arguments in containers of their own, so that a forward which changes one changes no input."""
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return value


# ---------------------------------------------------------------------------------- random state


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, for every size of the inputs, and dtype."""
    sizes = [list(map(expression_of, tensor.shape)) for tensor in (one, other)]
    return one.dtype == other.dtype and sizes[0] == sizes[1]


def _python_random_state() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate(), None
    kind, keys, *rest = numpy.random.get_state()
    return random.getstate(), (kind, keys.tobytes(), *rest)


def _set_python_random_state(state: tuple[Any, ...]) -> None:
    python, numpy_state = state
    random.setstate(python)
    if numpy_state is not None:
        numpy: Any = sys.modules["numpy"]
        kind, keys, *rest = numpy_state
        numpy.random.set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Puts back Python's, NumPy's and torch's random state."""
    python, cpu = _python_random_state(), torch.random.get_rng_state()
    try:
        yield
    finally:
        torch.random.set_rng_state(cpu)
        _set_python_random_state(python)


# ---------------------------------------------------------------------------------- errors


def _first_line(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0][:300]
    return text if isinstance(error, TraceError) else f"{type(error).__name__}: {text}"


def _root_error(model: nn.Module, cause: BaseException, location: str, learned: _Learned) -> TraceError:
    what, line = _first_line(cause).rstrip("."), location.partition(" (")[2].removesuffix(")")
    error = TraceError(f"can't trace {type(model).__name__}: at {location}: {what}. {advice(what, line)}")
    unseen = [name for name, module in model.named_modules() if must_run_once(module)]
    error.stateful = tuple(
        name for name in dict.fromkeys([*learned.stateful, *unseen]) if name and isinstance(name, str)
    )
    return error
