"""Runs the modules of one attempt on fakes: leaves, and glue, whose calls are recorded one by one.

Invariant: a module either runs to an outcome, or ends the attempt with what to try instead.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.errors import TraceCause, TraceError, TraceFacts
from roundpipe.core.module_tree import modules_in, weight_bytes_of
from roundpipe.core.random_state import python_random_state, set_python_random_state
from roundpipe.effects.places import OF_TORCH
from roundpipe.effects.snapshot import ContentsSnapshot, ModuleSnapshot, PythonSnapshot
from roundpipe.effects.uses import GRADIENT_ATTRIBUTES, Readers, asks_for_gradients, attributes_read, uses_of_forward
from roundpipe.fx.fakes import DATA_DEPENDENT, is_fake, real_world
from roundpipe.fx.locations import model_location
from roundpipe.fx.operations import assign_buffer
from roundpipe.fx.sizes import expression_of, flat_tensors, flat_values
from roundpipe.fx.trace.advice import set_at
from roundpipe.fx.trace.decisions import Decision, Knowledge, LeafPolicy, Need, Retry, is_of_torch
from roundpipe.fx.trace.intercept import ORIGINAL_CALL
from roundpipe.fx.trace.leaves import (
    LeafRun,
    LeafWatch,
    containers_mutated,
    contents_of,
    is_put_by_hooks,
    left_behind,
    new_output,
    output_origins,
    set_elsewhere,
)
from roundpipe.fx.trace.probe import probe_module
from roundpipe.fx.trace.recorder import CallRecorder
from roundpipe.fx.trace.siblings import SiblingCache
from roundpipe.fx.world import FakeWorld

MAX_PROBE_BYTES = 1 << 28
"""Largest leaf that is copied and run only to serve more sizes."""


@dataclass(eq=False)
class LeafRunner:
    """Runs leaves."""

    _world: FakeWorld
    _recorder: CallRecorder
    _policy: LeafPolicy
    _knowledge: Knowledge
    _readers: Readers
    _before: ModuleSnapshot
    _outside: ModuleSnapshot
    """The modules before the first run, but for what leaves set themselves."""
    _siblings: SiblingCache = field(default_factory=SiblingCache)
    _leaves: dict[str, nn.Module] = field(default_factory=dict)

    def opaque(self) -> dict[str, str]:
        """Leaves whose inside was not traced, and why."""
        return {
            name: self._knowledge.reason(name, type(module))
            for name, module in self._leaves.items()
            if self._policy.is_opaque(module) or self.is_probed(module)
        }

    def call(self, module: nn.Module, name: str, args: Any, kwargs: Any) -> Any:
        recorder = self._recorder
        node_args, node_kwargs = recorder.builder.arguments(tuple(args), kwargs)
        if any(isinstance(leaf, nn.Module) for leaf in trees.leaves((args, kwargs))):
            # it would be the twin's; in a leaf that is looked into, its weights are the leaf's own affair
            error = TraceError(f"{name} takes a module as an argument")
            is_decided = self._policy.decision(module) is not None
            raise recorder.give_up(error) if is_decided else Retry(error, name, Decision.DESCEND)
        inside = modules_in(module)
        attribute = set_elsewhere(self._outside, inside)
        rebuilt = None if attribute else self._before.rebuilt(inside)
        if rebuilt is not None:  # such as a weight that `torch.func.functional_call` puts there
            attribute = f"{type(rebuilt[0]).__name__}.{rebuilt[1]}"
        if attribute is not None:
            words = f"{attribute} is set by other code in the forward, and would not be when the graph runs"
            raise Retry(TraceError(words), name, Decision.DESCEND)
        self._leaves[name] = module
        python_random = python_random_state()
        with recorder.pause():
            run = self._run(module, name, args, kwargs)
            inside = modules_in(module)  # it may have made some
            self._outside.accept_attributes(inside)
            self._before.accept_buffers(inside)
            draws_python_random = python_random_state() != python_random
            set_python_random_state(python_random)
            if draws_python_random:  # each of its kin runs by itself, and another run may do something else
                self._siblings.forget(module)
                run.out, run.buffers_written = new_output(module, run.out), any(True for _ in module.buffers())
            origins = output_origins(run.out, args, kwargs, self._world.name_of)
        node = recorder.builder.add("call_module", name, node_args, node_kwargs)
        mutates = tuple(dict.fromkeys(map(recorder.builder.tensor_argument, run.written)))
        node.meta.update(
            random=run.random or draws_python_random,
            buffers_written=run.buffers_written,
            mutates=mutates,
            effect=bool(mutates),
        )
        recorder.note_written(node, run.written)
        if run.buffers_written:
            recorder.builder.written_storages.update(buffer.untyped_storage()._cdata for buffer in module.buffers())
        if self.is_probed(module):
            recorder.findings.probed_nodes.add(node)
        if any(origins):
            recorder.findings.origins[node] = origins
        recorder.builder.bind_output(run.out, node)
        return run.out

    def is_probed(self, module: nn.Module) -> bool:
        """Whether a leaf's output sizes are found by running a copy of it."""
        return self._policy.decision(module) is Decision.PROBE or isinstance(module, torch.jit.ScriptModule)

    def _run(self, module: nn.Module, name: str, args: Any, kwargs: Any) -> LeafRun:
        """The outcome of a leaf's call on fakes, and what else it does."""
        if self.is_probed(module):
            run = self._probe(module, name, args, kwargs)
            self._siblings.put(module, run, args, kwargs)
            return run
        if self._recorder.watch.layouts is None:
            sibling = self._sibling(module, args, kwargs)
            if sibling is not None:
                return sibling
        state = ContentsSnapshot(modules_in(module))
        run = self._watched(module, name, args, kwargs, state)
        if not state.holds_new_values():
            self._siblings.put(module, run, args, kwargs)
        return run

    def _sibling(self, module: nn.Module, args: Any, kwargs: Any) -> LeafRun | None:
        """The run of a leaf that can't differ."""
        asks_for_grad = self._recorder.asks_for_grad
        try:
            return self._siblings.find(module, args, kwargs, lambda: ORIGINAL_CALL(module, *args, **kwargs))
        finally:
            self._recorder.asks_for_grad = asks_for_grad

    def _watched(self, module: nn.Module, name: str, args: Any, kwargs: Any, state: ModuleSnapshot) -> LeafRun:
        recorder = self._recorder
        contents = contents_of(args, kwargs)
        fixed = self._world.shapes.num_fixed_sizes()
        inputs = flat_tensors(args, kwargs)
        versions = [(tensor, tensor._version) for tensor in inputs]
        asks_for_grad = recorder.asks_for_grad
        draws, num_originals = recorder.watch.num_random_draws, len(recorder.watch.originals)
        python, python_random = PythonSnapshot(modules_in(module), with_hidden=False), python_random_state()
        call = functools.partial(ORIGINAL_CALL, module, *args, **kwargs)
        watch = self._watch(module, name, inputs)

        def watched() -> Any:
            with watch:
                return call()

        other = self._next_of_class.get(module) if recorder.watch.layouts is None else None
        first = None if other is None else self._siblings.first_run(module, args, kwargs, other, watched)
        if first is None:
            set_python_random_state(python_random)
            recorder.asks_for_grad = asks_for_grad
            watch = self._watch(module, name, inputs)
        try:
            out = watched() if first is None else first.out
        except Exception as error:
            raise self._not_a_leaf(module, name, error, structural=False) from error
        run = LeafRun(
            out,
            recorder.watch.num_random_draws != draws,
            state.buffers_written() or watch.wrote_any(module.buffers()),
            tuple(tensor for tensor, version in versions if tensor._version != version),
            unread=first.unread if first is not None else frozenset(),
        )
        run.note_python(state, python, call, watch.computed)
        if watch.drew_from_kept():
            run.side_effects["the state of a torch.Generator"] = None
        writes = watch.written & self._world.parameter_at.keys() and not self._leaves_weights_alone(module, watch)
        if writes or state.replaced_parameter():
            run.side_effects["a parameter"] = None
        if len(recorder.watch.originals) > num_originals:
            run.side_effects["a tensor that is no part of the model"] = None
        self._refuse_effects(module, name, run)
        if watch.runs_autograd:
            raise self._recorder.give_up(TraceError(f"{name} runs autograd inside its forward"), is_stateful=True)
        self._refuse_asking(module, name, watch.asks_for_grad)
        if self._world.shapes.num_fixed_sizes() > fixed and weight_bytes_of(module) <= MAX_PROBE_BYTES:
            if not {(name, Decision.PROBE), (name, Decision.DESCEND)} & self._knowledge.tried:
                fixed_size = TraceError(f"{name} works at one size only on fakes, such as a loop over a size")
                raise Retry(fixed_size, name, Decision.PROBE)
        if containers_mutated(contents, args, kwargs):
            mutated = TraceError(f"{name} changes a list, dict or object that it takes as an argument")
            raise self._not_a_leaf(module, name, mutated, structural=True)
        return run

    def _watch(self, module: nn.Module, name: str, inputs: list[torch.Tensor]) -> LeafWatch:
        return LeafWatch(
            name,
            self._recorder.builder,
            frozenset(inputs),
            frozenset((*module.parameters(), *module.buffers())),
            lambda error: self._not_a_leaf(module, name, error, structural=True),
            lambda error: self._to_look_into(module, name, error),
            self._recorder.findings.born_in,
            self._recorder.watch,
        )

    @functools.cached_property
    def _next_of_class(self) -> dict[nn.Module, nn.Module]:
        """Per module that has others of its class behind it, the next one."""
        latest: dict[type, nn.Module] = {}
        following = {}
        for module in modules_in(self._world.twin):
            if (before := latest.get(type(module))) is not None:
                following[before] = module
            latest[type(module)] = module
        return following

    def _leaves_weights_alone(self, module: nn.Module, watch: LeafWatch) -> bool:
        """Whether a leaf's writes to its weights change nothing now; the guards look at that again."""
        real = self._world.parameter_at
        places = [write.tensor.untyped_storage()._cdata for write in watch.writes]
        writes = [(write, real[place]) for write, place in zip(watch.writes, places, strict=True) if place in real]
        if watch.written & real.keys() != real.keys() & set(places):  # it also gives a weight other data
            return False
        with real_world():
            if not all(write.leaves_alone(weight) for write, weight in writes):
                return False
        self._siblings.forget(module)  # each of its kin has weights of its own
        self._recorder.findings.weight_writes += writes
        return True

    def _refuse_effects(self, module: nn.Module, name: str, run: LeafRun) -> None:
        """A recomputation would change state once more, and what is left in attributes may be read by others."""
        if run.side_effects:
            error = TraceError(f"it changes {', '.join(run.side_effects)} in its forward", TraceCause.STATE)
            raise self._to_look_into(module, name, error, is_stateful=True)
        for kind, attribute in run.sets:
            if attribute not in OF_TORCH and attribute in self._readers.beside(kind):
                is_left = (kind, attribute) in run.left_behind
                cause, facts = TraceCause.ACTIVATION_LEFT, TraceFacts(attribute=attribute)
                words = f"it sets {kind.__name__}.{attribute}, which other code reads"
                error = TraceError(words, cause, facts) if is_left else TraceError(words, TraceCause.STATE)
                raise self._to_look_into(module, name, error, hands_on=True)
        for kind, attribute in run.left_behind:
            raise self._to_look_into(module, name, left_behind(kind, attribute), is_stateful=True)
        self._recorder.findings.not_kept.update(run.not_kept)

    def _refuse_asking(self, module: nn.Module, name: str, asks_at: str) -> None:
        """A first run of a leaf records no gradients, so that it must not ask."""
        recorder = self._recorder
        asks_at, recorder.asks_for_grad = asks_at or recorder.asks_for_grad, ""
        if asks_at:
            error = TraceError(f"it asks at {asks_at} whether gradients are recorded, which a first run does not do")
            raise self._to_look_into(module, name, error, is_stateful=True)

    def _to_look_into(
        self, module: nn.Module, name: str, error: Exception, is_stateful: bool = False, hands_on: bool = False
    ) -> Retry:
        """What to try for a leaf that is right only as glue."""
        if self._policy.decision(module) is Decision.LEAF or (name, Decision.DESCEND) in self._knowledge.tried:
            return self._recorder.give_up(error, is_stateful)
        return Retry(error, name, Decision.DESCEND, is_stateful=is_stateful, hands_on=hands_on)

    def _not_a_leaf(self, module: nn.Module, name: str, error: Exception, structural: bool) -> Retry:
        """What to try for a leaf that can't be one."""
        if isinstance(error, DATA_DEPENDENT):
            cause, words = error, "a decision depends on the data of an activation"
            error = TraceError(words, TraceCause.ACTIVATION_DATA)
            error.__cause__ = cause
        may_descend = self._policy.decision(module) is not Decision.LEAF and not is_of_torch(type(module))
        # a failure of the module's own code would come again inside
        if may_descend and any(structural or any(True for _ in child.parameters()) for child in module.children()):
            return Retry(error, name, Decision.DESCEND)
        if structural:
            return self._recorder.give_up(error)
        return Retry(error, name, Decision.PROBE)

    def _probe(self, module: nn.Module, name: str, args: Any, kwargs: Any) -> LeafRun:
        try:
            run = probe_module(self._world, name, module, args, kwargs)
        except Exception as error:
            tried = self._knowledge.tried
            if (name, Decision.DESCEND) not in tried and not is_of_torch(type(module)):
                raise Retry(error, name, Decision.DESCEND) from error  # as glue it may serve one size
            if (name, Decision.LEAF) not in tried:
                cause = TraceError(f"{name} works at the example's sizes only")  # as a layer over positions does
                raise Retry(cause, name, Decision.LEAF) from error
            raise self._recorder.give_up(error) from error
        kinds = list(map(type, modules_in(module)))
        unseen = self._knowledge.seen_to_set - run.sets.keys()  # other data may lead to where they are set
        if_data_say_so = [f"{kind.__name__}.{attribute}" for kind, attribute in unseen if kind in kinds]
        run.side_effects.update(dict.fromkeys(sorted(if_data_say_so)))
        self._refuse_effects(module, name, run)
        asking = (kind for kind in kinds if attributes_read(kind) & GRADIENT_ATTRIBUTES or asks_for_gradients(kind))
        self._refuse_asking(module, name, next((kind.__name__ for kind in asking), ""))
        run.buffers_written = any(True for _ in module.buffers())  # other data may take a way that writes them
        return run


@dataclass(eq=False)
class GlueRunner:
    """Runs modules whose calls are recorded one by one."""

    _world: FakeWorld
    _recorder: CallRecorder
    _knowledge: Knowledge
    modules: dict[nn.Module, None] = field(default_factory=dict)
    """Those that ran."""
    _gave_lengths: bool = False

    def call(self, module: nn.Module, name: str, args: Any, kwargs: Any) -> Any:
        recorder = self._recorder
        if module._backward_hooks or module._backward_pre_hooks:
            raise Retry(TraceError(f"{name or 'the model'} has backward hooks"), name, Decision.LEAF)
        self.modules[module] = None
        buffers = dict(module._buffers)
        attributes = dict(module.__dict__)
        recorder.modules.append(name)
        try:
            out = ORIGINAL_CALL(module, *args, **kwargs)
            self._record_assignments(module, name, buffers)
            self._refuse_kept_activations(module, name, attributes)
        except DATA_DEPENDENT as error:
            raise recorder.needs_data(error) from error
        except Exception as error:
            if self._gave_lengths and isinstance(error, TypeError):
                raise Retry(need=Need.PLAIN_LENGTHS) from error
            raise Retry(error, name, Decision.LEAF, function=recorder.raised_by(error)) from error
        finally:
            recorder.modules.pop()
        return out

    def length_of(self, tensor: torch.Tensor) -> Any:
        """What ``len(tensor)`` gives: a symbol, which only a few things can't be done with."""
        if Need.PLAIN_LENGTHS in self._knowledge.needs or not tensor.dim():
            return len(tensor)
        self._gave_lengths = True
        return tensor.shape[0]

    def _record_assignments(self, module: nn.Module, name: str, before: dict[str, Any]) -> None:
        """One effect node per buffer that a forward replaced by another tensor."""
        builder = self._recorder.builder
        for key, buffer in module._buffers.items():
            if buffer is before.get(key):
                continue
            full_name = f"{name}.{key}" if name else key
            if buffer is None:
                raise self._recorder.give_up(TraceError(f"buffer {full_name} is set to None in the forward"))
            if full_name not in self._world.real:
                words = f"buffer {full_name}, which did not exist or was None, is set in the forward"
                raise self._recorder.give_up(TraceError(words, TraceCause.BUFFER_CREATED))
            target = builder.attribute(full_name, self._world.fake(full_name))
            shapes = [list(map(expression_of, tensor.shape)) for tensor in (buffer, target.meta["value"])]
            if shapes[0] != shapes[1] or buffer.dtype != target.meta["value"].dtype:
                words = f"buffer {full_name} is set to a tensor of another shape or dtype in the forward"
                raise self._recorder.give_up(TraceError(words))
            node = builder.add("call_function", assign_buffer, (target, builder.tensor_argument(buffer)))
            node.meta.update(modes=None, effect=True, mutates=(target,), value=target.meta["value"])
            builder.written_storages.add(target.meta["value"].untyped_storage()._cdata)

    def _refuse_kept_activations(self, module: nn.Module, name: str, before: dict[str, Any]) -> None:
        """An activation left in an attribute would not be there at run time."""
        if self.hands_on(module) or self._knowledge.is_pure:  # what is left is looked at in the end
            return
        for key, value in module.__dict__.items():
            if key in ("_buffers", "_parameters", "_modules"):
                continue
            original = before.get(key, before)
            if original is value and not isinstance(value, (list, dict)):
                continue
            if original is None and self._is_reset(module, key):
                continue
            if any(self.is_activation(item) for item in flat_values(value)) and not is_put_by_hooks(module, key):
                location = set_at(type(module), key) or model_location()
                raise Retry(left_behind(type(module), key), name, Decision.LEAF, location)

    def _is_reset(self, module: nn.Module, attribute: str) -> bool:
        """Whether an attribute, None when a module is called, is state for the module's own forward, which reads it,
        and which code of another module sets anew in each forward, as recurrent states between tokens.
        """
        kinds = {type(inner) for inner in modules_in(self._world.twin)} - {type(module)}
        return attribute in uses_of_forward(type(module)).reads and any(
            attribute in uses_of_forward(kind).sets for kind in kinds
        )

    def hands_on(self, module: nn.Module) -> bool:
        """Whether another module takes a value from this one's attributes in the same forward, so that it is glue."""
        keys = {self._world.name_of_module[module], type(module)}
        return bool(keys & self._knowledge.handing_on) and not keys & self._knowledge.stateful

    def is_activation(self, value: Any) -> bool:
        """Whether a value is a fake that the parameters have a part in."""
        is_new = isinstance(value, torch.Tensor) and is_fake(value) and value not in self._world.name_of
        return is_new and not self._recorder.data.determines(value)
