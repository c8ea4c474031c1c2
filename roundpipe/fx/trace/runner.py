"""Runs the leaves of one attempt on fakes, and finds out which modules can't be leaves.

Invariant: a leaf either runs to an outcome, or ends the attempt with what to try instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from roundpipe.core.errors import TraceError
from roundpipe.core.module_tree import weight_bytes_of
from roundpipe.effects.places import OF_TORCH
from roundpipe.effects.snapshot import ModuleSnapshot, PythonSnapshot
from roundpipe.effects.user_code import names_in
from roundpipe.effects.uses import GRADIENT_ATTRIBUTES, Readers, asks_for_gradients, attributes_read
from roundpipe.fx.fakes import DATA_DEPENDENT, FakeWorld, real_world
from roundpipe.fx.flat import flat_tensors
from roundpipe.fx.trace.intercept import ORIGINAL_CALL
from roundpipe.fx.trace.leaf_watch import ForeignWeight, HiddenInput, LeafRun, LeafWatch
from roundpipe.fx.trace.leaves import (
    containers_mutated,
    contents_of,
    left_behind,
    refuse_mutated,
    remembered,
    sets_before_reading,
)
from roundpipe.fx.trace.policy import Decision, LeafPolicy, is_of_torch
from roundpipe.fx.trace.probe import probe_module
from roundpipe.fx.trace.recorder import CallRecorder, Restart, StatefulError
from roundpipe.fx.trace.siblings import SiblingCache

MAX_PROBE_BYTES = 1 << 28
"""Largest leaf that is copied and run only to serve more sizes."""


class LeafRunner:
    """Runs leaves.

    Args:
        world: where they run.
        recorder: what records the attempt.
        policy: what is known about the modules.
        history: what was tried in earlier attempts.
        seen_to_set: attributes of classes that earlier attempts saw a forward change.
        readers: who reads what.
    """

    def __init__(
        self,
        world: FakeWorld,
        recorder: CallRecorder,
        policy: LeafPolicy,
        history: set[tuple[str, Decision]],
        seen_to_set: set[tuple[type, str]],
        readers: Readers,
    ) -> None:
        self._world = world
        self._recorder = recorder
        self._policy = policy
        self._history = history
        self._seen_to_set = seen_to_set
        self._readers = readers
        self._siblings = SiblingCache()

    def is_probed(self, module: nn.Module) -> bool:
        """Whether a leaf's output sizes are found by running a copy of it."""
        return self._policy.decision(module) is Decision.PROBE or isinstance(module, torch.jit.ScriptModule)

    def run(self, module: nn.Module, name: str, args: Any, kwargs: Any) -> LeafRun:
        """The outcome of a leaf's call on fakes, and what else it does."""
        logs_layouts = self._recorder.watch.layouts is not None
        if not self.is_probed(module) and not logs_layouts:
            known = self._known(module, args, kwargs)
            if known is not None:
                return known
        if self.is_probed(module):
            run = self._probe(module, name, args, kwargs)
            state = None
        else:
            state = ModuleSnapshot(module.modules())
            run = self._watched(module, name, args, kwargs, state)
        if state is None or not state.holds_new_values():
            self._siblings.put(module, run, args, kwargs)
        return run

    def forget(self, module: nn.Module) -> None:
        """Runs each of a module's kin by itself from now on."""
        self._siblings.forget(module)

    def _known(self, module: nn.Module, args: Any, kwargs: Any) -> LeafRun | None:
        """The run of a leaf that can't differ."""
        asks_for_grad = self._recorder.asks_for_grad
        try:
            return self._siblings.find(module, args, kwargs, lambda: ORIGINAL_CALL(module, *args, **kwargs))
        finally:
            self._recorder.asks_for_grad = asks_for_grad

    def _watched(self, module: nn.Module, name: str, args: Any, kwargs: Any, state: ModuleSnapshot) -> LeafRun:
        """Runs a leaf on fakes."""
        recorder = self._recorder
        before = contents_of(args, kwargs)
        fixed = self._world.shapes.num_fixed_sizes()
        given = flat_tensors(args, kwargs)
        versions = [(tensor, tensor._version) for tensor in given]
        draws = recorder.watch.num_random_draws
        allowed = set(given)
        own = {*given, *module.parameters(), *module.buffers()}
        real_writes = len(recorder.watch.real_written)
        python = PythonSnapshot(module.modules(), with_hidden=False)
        watch = LeafWatch(
            name,
            recorder.builder.node_of,
            lambda tensor: tensor in allowed or tensor in self._world.name_of,
            lambda tensor: None if tensor in own else self._world.name_of.get(tensor),
            recorder.born_in,
        )
        try:
            with watch:
                out = ORIGINAL_CALL(module, *args, **kwargs)
        except ForeignWeight as error:
            raise self._to_look_into(module, name, TraceError(str(error))) from error
        except HiddenInput as error:
            raise self._not_a_leaf(module, name, TraceError(str(error)), structural=True) from error
        except Exception as error:
            raise self._not_a_leaf(module, name, error, structural=False) from error
        changed = python.side_effects()
        findings = remembered(state, watch.computed)
        if findings and (changed or not sets_before_reading(findings, lambda: ORIGINAL_CALL(module, *args, **kwargs))):
            changed += [f"{type(change.module).__name__}.{change.name}" for change in findings]
        if watch.drew_from_kept():
            changed.append("the state of a torch.Generator")
        writes = watch.written & self._world.parameter_at.keys() and not self._leaves_weights_alone(module, watch)
        if writes or state.replaced_parameter():
            changed.append("a parameter")
        if len(recorder.watch.real_written) > real_writes:
            changed.append("a tensor that is no part of the model")
        self._refuse_state(module, name, changed)
        for owner, attribute, _, value, _ in state.diff():
            if attribute not in OF_TORCH and attribute in self._readers.beside(type(owner)):
                self._look_into_for_others(module, name, f"{type(owner).__name__}.{attribute}")
            computed = [tensor for tensor in flat_tensors(value) if tensor in watch.computed]
            if any(tensor.requires_grad for tensor in computed) and not is_put_by_hooks(owner, attribute):
                raise self._to_look_into(
                    module, name, StatefulError(left_behind(f"{type(owner).__name__}.{attribute}"))
                )
            if computed:
                recorder.not_kept[f"{type(owner).__name__}.{attribute}"] = None
        if watch.runs_autograd:
            raise self._recorder.give_up(StatefulError(f"{name} runs autograd inside its forward"))
        self._refuse_asking(module, name, watch.asks_for_grad)
        if self._world.shapes.num_fixed_sizes() > fixed and self._may_probe(module, name):
            cause = TraceError(f"{name} works at one size only on fakes, such as a loop over a size")
            raise Restart(Decision.PROBE, name, cause)
        if containers_mutated(before, args, kwargs):
            raise self._not_a_leaf(module, name, refuse_mutated(name), structural=True)
        return LeafRun(
            out,
            recorder.watch.num_random_draws != draws,
            state.buffers_written() or any(one.untyped_storage()._cdata in watch.written for one in module.buffers()),
            tuple(tensor for tensor, version in versions if tensor._version != version),
        )

    def _leaves_weights_alone(self, module: nn.Module, watch: LeafWatch) -> bool:
        """Whether a leaf's writes to its weights change nothing now; the guards look at that again."""
        real = self._world.parameter_at
        places = [one.tensor.untyped_storage()._cdata for one in watch.writes]
        writes = [one for one, place in zip(watch.writes, places, strict=True) if place in real]
        weights = [real[place] for place in places if place in real]
        if watch.written & real.keys() != real.keys() & set(places):  # given other data
            return False
        with real_world():
            if not all(one.leaves_alone(weight) for one, weight in zip(writes, weights, strict=True)):
                return False
        self._siblings.forget(module)  # each of its kin has weights of its own
        self._recorder.weight_writes += zip(writes, weights, strict=True)
        return True

    def _refuse_state(self, module: nn.Module, name: str, changed: list[str]) -> None:
        """A recomputation would change once more what a leaf's Python remembers."""
        if changed:
            raise self._to_look_into(module, name, StatefulError(f"it changes {', '.join(changed)} in its forward"))

    def _look_into_for_others(self, module: nn.Module, name: str, attribute: str) -> None:
        """What a leaf leaves in an attribute may be read elsewhere, before or after."""
        restart = self._to_look_into(module, name, TraceError(f"it sets {attribute}, which other code reads"))
        restart.hands_on = restart.decision is Decision.DESCEND
        raise restart

    def _refuse_asking(self, module: nn.Module, name: str, asks_at: str) -> None:
        """A first run of a leaf records no gradients, so that it must not ask."""
        recorder = self._recorder
        asks_at, recorder.asks_for_grad = asks_at or recorder.asks_for_grad, ""
        if asks_at:
            cause = StatefulError(f"it asks at {asks_at} whether gradients are recorded, which a first run does not do")
            raise self._to_look_into(module, name, cause)

    def _to_look_into(self, module: nn.Module, name: str, cause: Exception) -> Restart:
        """What to try for a leaf that is right only as glue."""
        if self._policy.decision(module) is Decision.LEAF or (name, Decision.DESCEND) in self._history:
            return self._recorder.give_up(cause)
        return Restart(Decision.DESCEND, name, cause)

    def _not_a_leaf(self, module: nn.Module, name: str, cause: Exception, structural: bool) -> Restart:
        """What to try for a leaf that can't be one."""
        if isinstance(cause, DATA_DEPENDENT):
            error = TraceError("a decision depends on the data of an activation")
            error.__cause__ = cause
            cause = error
        decision = self._policy.decision(module)
        is_torch = is_of_torch(type(module))
        if self._has_inside(module, structural) and not is_torch and decision is not Decision.LEAF:
            return Restart(Decision.DESCEND, name, cause)
        if structural:
            return self._recorder.give_up(cause)
        return Restart(Decision.PROBE, name, cause)

    @staticmethod
    def _has_inside(module: nn.Module, structural: bool) -> bool:
        """Whether looking inside can help; a failure of the module's own code would come again there."""
        return any(structural or any(True for _ in child.parameters()) for child in module.children())

    def _may_probe(self, module: nn.Module, name: str) -> bool:
        """Whether to try a probe of a leaf that works on fakes."""
        tried = {(name, Decision.PROBE), (name, Decision.DESCEND)} & self._history
        return not tried and weight_bytes_of(module) <= MAX_PROBE_BYTES

    def _probe(self, module: nn.Module, name: str, args: Any, kwargs: Any) -> LeafRun:
        try:
            probe = probe_module(self._world, name, module, args, kwargs)
        except Exception as error:
            if (name, Decision.DESCEND) not in self._history and not is_of_torch(type(module)):
                raise Restart(Decision.DESCEND, name, error) from error  # as glue it may serve one size
            if (name, Decision.LEAF) not in self._history:
                cause = TraceError(f"{name} works at the example's sizes only")  # as a layer over positions does
                raise Restart(Decision.LEAF, name, cause) from error
            raise self._recorder.give_up(error) from error
        kinds = set(map(type, module.modules()))
        if_data_say_so = [
            f"{kind.__name__}.{attribute}" for kind, attribute in self._seen_to_set - probe.sets if kind in kinds
        ]
        self._refuse_state(module, name, [*probe.changed, *sorted(if_data_say_so)])
        for words in probe.left_behind:
            raise self._to_look_into(module, name, StatefulError(left_behind(words)))
        self._recorder.not_kept.update(dict.fromkeys(probe.not_kept))
        for owner, attribute in sorted(probe.sets, key=str):
            if attribute not in OF_TORCH and attribute in self._readers.beside(owner):
                self._look_into_for_others(module, name, f"{owner.__name__}.{attribute}")
        asking = [
            kind.__name__
            for kind in map(type, module.modules())
            if attributes_read(kind) & GRADIENT_ATTRIBUTES or asks_for_gradients(kind)
        ]
        self._refuse_asking(module, name, asking[0] if asking else "")
        may_write = any(True for _ in module.buffers())  # other data may take a way that writes them
        return LeafRun(probe.out, probe.random, may_write, ())


def is_put_by_hooks(module: nn.Module, attribute: str) -> bool:
    """Whether an attribute that was set in a call is one that hooks make for the forward, such as a normed weight."""
    return is_of_torch(type(module)) and attribute in names_in(type(module).forward.__code__)
