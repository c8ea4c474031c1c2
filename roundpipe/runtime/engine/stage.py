"""One stage times one microbatch on the device: forward, fused, recompute and backward.

Nothing here knows of threads, schedules or transfers: a stage gets a carry of device tensors, calls the bound layers
one after the other and returns device tensors.

Invariants: layers are called, so hooks fire; recomputation repeats the draws of random numbers and sees the buffers as
the forward saw them; an exception of the user's code keeps its type and gains a note that says where it was raised.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import Node

from roundpipe.core import trees
from roundpipe.core.backward import backward_from
from roundpipe.core.contexts import contextmanager
from roundpipe.core.errors import RaisedIn, innermost, note_cut, note_place
from roundpipe.core.layers import Carry, LayerSpec, is_differentiable
from roundpipe.core.random_state import SeededPython, generator_held, torch_random_states
from roundpipe.core.term_shares import with_shares
from roundpipe.core.tiling import in_tiles
from roundpipe.runtime.device.backend import Backend, is_profiled
from roundpipe.runtime.engine import finite
from roundpipe.runtime.engine.host_values import Gradients
from roundpipe.runtime.engine.loss_divisors import ends_of
from roundpipe.runtime.engine.losses import Losses, LossWeights, in_small_memory, place_of, read_losses
from roundpipe.runtime.engine.recompute import ForwardRecord, LayerScope, layer_seed, learn_writes
from roundpipe.runtime.engine.shared_glue import SharedGlue
from roundpipe.runtime.engine.shared_values import SharedValues
from roundpipe.runtime.engine.spec import Segment, StepSpec
from roundpipe.runtime.engine.stage_layers import StageLayers
from roundpipe.runtime.profiling.layer_times import Kind
from roundpipe.runtime.weights.replica import BoundLayer

_NOTHING = contextlib.nullcontext()


@dataclass(slots=True)
class RecordedSegment:
    """A segment that ran with autograd on, before its backward."""

    layers: tuple[int, ...]
    leaves: dict[str, Any]
    """Taken values as autograd leaves."""
    outputs: Any = None
    """The values that it made; of a fused stage the model's outputs."""
    losses: Losses | None = None
    """Of a fused stage."""


@dataclass(slots=True)
class Stage:
    """The layers of one visit, ready to run microbatches."""

    name: str
    """For messages, such as ``B1[3:5]``."""
    backend: Backend
    layers: StageLayers
    spec: StepSpec
    record: ForwardRecord
    weights: LossWeights
    loss_turn: Callable[[int], contextlib.AbstractContextManager[None]]
    """Entered around the ``loss_fn`` of a microbatch."""
    shared: SharedValues
    glue: SharedGlue = field(init=False)

    def __post_init__(self) -> None:
        self.glue = SharedGlue(self.shared.stays)

    def forward(self, segment: Segment, index: int, carry: Carry, microbatch: int) -> Carry:
        """Run one layer without autograd, which the caller has turned off; returns all values that it makes.

        A layer that asks whether gradients are recorded has autograd on where a backward follows.

        What later layers of the segment read is added to the carry, what none of them reads is taken out.
        """
        spec = self.spec.chain.specs[index]
        if spec.asks_for_gradients and self.spec.keeps_history:
            with torch.enable_grad():
                recorded = {**carry, **_as_made(self._leaves(spec.reads, carry, microbatch))}
                outputs = self._first_call(index, recorded, microbatch)
        else:
            outputs = self._first_call(index, carry, microbatch)
        if any(tensor.requires_grad for tensor in trees.tensors(outputs)):  # autograd was on
            outputs = trees.map_tensors(outputs, lambda tensor: tensor.detach() if tensor.requires_grad else tensor)
        self._note_plain(spec, carry, outputs, microbatch)
        _pass_on(spec, index, segment.last_reader, carry, outputs)
        return outputs

    def forward_to_loss(self, segment: Segment, carry: Carry, microbatch: int, label: Any) -> RecordedSegment:
        """Run with autograd, up to the loss; `backward` follows."""
        spec, chain = self.spec, self.spec.chain
        recorded = RecordedSegment(segment.layers, self._leaves(segment.takes, carry, microbatch))
        with spec.autocast(), torch.enable_grad():
            values = _as_made(recorded.leaves)
            found: Any = None
            ends: frozenset[Node] = frozenset()
            for index in segment.layers:
                bound, is_tail = self.layers[index], spec.tail is not None and index == segment.layers[-1]
                with learn_writes(bound) if bound.has_buffers else _NOTHING:
                    if is_tail:
                        ends = ends_of(values)
                        found = self._run_tail(index, values, microbatch, label)
                        break
                    outputs = self._call(index, values, microbatch, "forward")
                _pass_on(chain.specs[index], index, segment.last_reader, values, outputs)
                del outputs
            with self._timed("loss", segment.layers[-1:]):
                if spec.tail is None:
                    recorded.outputs, recorded.losses = self.loss(values, microbatch, label)
                else:
                    recorded.losses = self._read_losses(lambda: found, microbatch, ends)
        return recorded

    def loss(self, values: Carry, microbatch: int, label: Any) -> tuple[Any, Losses]:
        """The model's outputs and the losses, as they count in the step; the values are used up."""
        loss_fn, counted = self.spec.loss_fn, self.spec.counted
        if counted is not None:
            loss_fn = counted.functions[microbatch]
        assert loss_fn is not None
        with RaisedIn(self._place(microbatch, "outputs")):
            outputs = self.spec.chain.exit(values)
        values.clear()
        with self._shares(microbatch):
            return outputs, self._read_losses(partial(loss_fn, outputs, label), microbatch, ends_of(outputs), outputs)

    def _read_losses(
        self, loss_fn: Callable[[], Any], microbatch: int, ends: frozenset[Node], outputs: Any = None
    ) -> Losses:
        """What a loss function returns, as it counts in the step."""
        tail, counted = self.spec.tail, self.spec.counted
        has_gradient = counted is None or counted.all_count(microbatch)
        number, where = self.spec.schedule.num_microbatches, self._place(microbatch, "loss_fn")
        draws_apart = self.spec.drawing and self.spec.schedule.num_workers > 1  # loss_fn draws as the caller would
        held = generator_held(self.backend.device) if draws_apart else _NOTHING
        with self.loss_turn(microbatch), held, RaisedIn(where, num_pieces=number):
            losses = read_losses(loss_fn(), is_mean=self.spec.mean is not None, has_gradient=has_gradient)
            place = None
            if counted is None:
                place = next(iter(tail.first_loss), None) if tail else place_of(losses.tensors[0], outputs)
            losses.tensors = [*map(in_small_memory, losses.tensors)]
            kind = None if place is None else self.spec.chain.kind_of_loss(place)
            own_mean = None if place is None else self.spec.own_means.get(place)
            self.weights.apply(losses, microbatch, kind, own_mean, ends if place is None else frozenset())
        if self.spec.check_finite:
            finite.check_losses(losses.tensors, where)
        return losses

    def recompute(self, segment: Segment, carry: Carry, microbatch: int) -> RecordedSegment:
        record = self.record
        recorded = RecordedSegment(segment.layers, self._leaves(segment.takes, carry, microbatch), outputs={})
        with self.spec.autocast(), torch.enable_grad():
            values = _as_made(recorded.leaves)
            for index in segment.layers:
                bound, key = self.layers[index], (index, microbatch)
                scope = LayerScope(record, key, self.backend, is_recomputation=True)
                with scope, record.use_buffers(bound, key, self.backend) if bound.has_buffers else _NOTHING:
                    outputs = self._call(index, values, microbatch, "recomputation")
                values.update(outputs)
                recorded.outputs.update(outputs)
        return recorded

    def has_backward(self, segment: Segment) -> bool:
        """Whether a gradient flows to any weight or taken value of a segment; else it need not run again."""
        return any(self.layers[index].parameters for index in segment.layers) or any(
            name in self.spec.with_gradient for name in segment.takes
        )

    def backward(
        self, recorded: RecordedSegment, gradients: Mapping[str, Gradients], microbatch: int
    ) -> dict[str, Gradients]:
        """Backward from the losses, or from gradients of what a segment made; lets go of what it made.

        Returns the gradients of the values it took, those without any left out.
        """
        roots: list[torch.Tensor] = [] if recorded.losses is None else list(recorded.losses.tensors)
        root_gradients: list[torch.Tensor] = []
        for name, incoming in gradients.items():
            for tensor, gradient in zip(trees.tensors(recorded.outputs[name]), incoming, strict=True):
                if gradient is not None and tensor.requires_grad:
                    roots.append(tensor)
                    root_gradients.append(gradient)
                del tensor
        recorded.outputs = None
        if roots:
            first, last = recorded.layers[0], recorded.layers[-1]
            names = [self.spec.chain.specs[index].name for index in (first, last)]
            which = f"layer {first} ({names[0]})"
            if first != last:
                which = f"layers {first} to {last} ({names[0]} .. {names[1]})"
            annotation = self._annotation(f"{which} m{microbatch} backward")
            noted = RaisedIn(f"{which}, {self._place(microbatch, 'backward')}")
            with self._timed("backward", recorded.layers), noted, annotation:
                if recorded.losses is not None:
                    torch.autograd.backward(roots)
                else:
                    backward_from(roots, root_gradients)
            if self.spec.check_finite:
                bound = [(index, self.layers[index]) for index in recorded.layers]
                finite.check_weights(self.spec, bound, self._place(microbatch, "backward"))
        result = {}
        for name, value in recorded.leaves.items():
            found = [tensor.grad if tensor.is_leaf else None for tensor in trees.tensors(value)]
            if any(gradient is not None for gradient in found):
                result[name] = found
        recorded.leaves.clear()
        return result

    def end_microbatch(self) -> list[torch.Tensor]:
        """Let go of what the layers of one microbatch share; returns what must live until the device is past it."""
        self.glue.end_microbatch()
        return self.shared.end_microbatch()

    # Calls

    def _leaves(self, names: Iterable[str], carry: Carry, microbatch: int) -> dict[str, Any]:
        """The taken values with autograd leaves where a gradient flows."""
        leaves = {name: carry[name] for name in names}
        for name in self.spec.with_gradient.intersection(leaves):
            leaves[name] = _as_leaf(carry[name], self.record.plain.get((microbatch, name), frozenset()))
        if self.spec.check_finite:
            finite.watch_gradients(self.spec, leaves, self._place(microbatch, "backward"))
        return leaves

    def _note_plain(self, spec: LayerSpec, inputs: Carry, outputs: Carry, microbatch: int) -> None:
        """A tensor without gradient that a layer hands on as it is stays one; that of a traced layer is known."""
        if spec.differentiable is not None:
            return
        with_gradient, plain = self.spec.with_gradient, self.record.plain
        handed_on = {
            id(tensor)
            for name in spec.reads
            for position, tensor in enumerate(trees.tensors(inputs[name]))
            if name not in with_gradient or position in plain.get((microbatch, name), ())
        }
        for name in spec.makes if handed_on else ():
            tensors = enumerate(trees.tensors(outputs[name]))
            plain[microbatch, name] = frozenset(position for position, tensor in tensors if id(tensor) in handed_on)

    def _first_call(self, index: int, values: Carry, microbatch: int) -> Carry:
        """A layer's call in forward, with a record of what its recomputation needs."""
        bound, record, key = self.layers[index], self.record, (index, microbatch)
        if not self.spec.keeps_history:
            with learn_writes(bound) if bound.has_buffers else _NOTHING:
                return self._call(index, values, microbatch, "forward")
        scope = LayerScope(record, key, self.backend, is_recomputation=False)
        with scope, record.keep_buffers(bound, key, self.backend) if bound.has_buffers else _NOTHING:
            return self._call(index, values, microbatch, "forward")

    def _call(self, index: int, values: Carry, microbatch: int, phase: str) -> Carry:
        """A layer's outputs.

        What is run is no function of its own here or below: one would keep its values as long as an error that it
        raised.
        """
        bound, spec = self.layers[index], self.spec.chain.specs[index]
        carry = {name: values[name] for name in spec.reads}
        outputs = self._run(index, partial(self._outputs, bound, spec, carry), microbatch, phase)
        made = {name: outputs[name] for name in spec.makes}
        if self.spec.check_finite:
            self._check_finite(index, carry, made, microbatch, phase)
        return made

    def _outputs(self, bound: BoundLayer, spec: LayerSpec, carry: Carry) -> Carry:
        outputs: Carry = bound.module(self.glue.given(bound.module, spec, carry) if spec.glue else carry)
        return outputs

    def _run_tail(self, index: int, values: Carry, microbatch: int, label: Any) -> Any:
        """The losses, of the last layer and the loss function as one."""
        return self._run(index, partial(self._tail_losses, index, values, microbatch, label), microbatch, "forward")

    def _tail_losses(self, index: int, values: Carry, microbatch: int, label: Any) -> Any:
        tail = self.spec.tail
        assert tail is not None
        try:
            return tail(self.layers[index].module, values, label, microbatch)
        except BaseException as error:
            if tail.is_of_loss(error):
                note_place(error, self._place(microbatch, "loss_fn"))
            raise

    def _run(self, index: int, function: Callable[[], Any], microbatch: int, phase: str) -> Any:
        """What a function that runs a layer returns; seeded, timed and annotated."""
        bound, spec, times = self.layers[index], self.spec.chain.specs[index], self.spec.times
        num_tiles = self.spec.tiles_of(index)
        tiling = in_tiles(num_tiles, at_once=self.spec.tiles.at_once) if num_tiles > 1 else _NOTHING
        with self._annotation(f"layer {index} ({spec.name}) m{microbatch} {phase}"), tiling, self._shares(microbatch):
            began = None if times is None else self.backend.moment()
            try:
                if index in self.spec.drawing:
                    result = self._seeded(bound, function, layer_seed(self.spec.base_seed, index, microbatch))
                else:
                    result = function()
            except BaseException as error:
                names = {id(module): name for name, module in bound.module.named_modules() if name}
                module = innermost(error, names) or ", ".join(spec.module_names) or spec.name
                where = self._place(microbatch, phase)
                note_place(error, f"layer {index} ({spec.name}), module {module}, {where}")
                if (number := self.spec.schedule.num_microbatches) > 1 and isinstance(error, Exception):
                    note_cut(error, number)
                raise
            if times is not None and began is not None:
                times.add("forward", (index,), began, self.backend.moment())
        return result

    def _shares(self, microbatch: int) -> contextlib.AbstractContextManager[None]:
        """Around what may weigh terms of a loss."""
        counted = self.spec.counted
        return _NOTHING if counted is None else with_shares(counted.shares[microbatch])

    def _check_finite(self, index: int, reads: Carry, made: Carry, microbatch: int, phase: str) -> None:
        """Look at what a layer made, and at what the backward gives for it."""
        if phase == "forward":
            finite.check_made(self.spec, index, self.layers[index], reads, made, self._place(microbatch, phase))
        if torch.is_grad_enabled():
            finite.watch_gradients(self.spec, made, self._place(microbatch, "backward"))

    def _annotation(self, what: str) -> contextlib.AbstractContextManager[Any]:
        return self.backend.annotate(f"roundpipe {what}") if is_profiled() else _NOTHING

    def _seeded(self, bound: BoundLayer, function: Callable[[], Any], seed: int) -> Any:
        """The result of a function that runs a layer, with everything it draws drawn from a seed."""
        habits, device = bound.habits, self.backend.device
        with self.backend.random(seed):
            before = () if habits.draws else torch_random_states(device)
            with contextlib.nullcontext() if habits.draws_python is False else SeededPython(seed) as drawing:
                result = function()
            if drawing is not None:
                habits.draws_python = habits.draws_python or drawing.drew
            if before:
                has_drawn = not all(map(torch.equal, before, torch_random_states(device)))
                habits.draws = has_drawn or bool(habits.draws_python)
            return result

    def _place(self, microbatch: int, phase: str) -> str:
        return f"stage {self.name}, microbatch {self.spec.first_microbatch + microbatch}, phase {phase}"

    @contextmanager
    def _timed(self, kind: Kind, layers: Sequence[int]) -> Iterator[None]:
        times = self.spec.times
        if times is None:
            yield
            return
        began = self.backend.moment()
        yield
        times.add(kind, layers, began, self.backend.moment())


def _pass_on(spec: LayerSpec, index: int, last_reader: Mapping[str, int], carry: Carry, outputs: Carry) -> None:
    """Add to a carry what later layers of the segment read, and take out what this layer was the last to read."""
    carry.update((name, value) for name, value in outputs.items() if last_reader.get(name, -1) > index)
    for name in spec.reads:
        if last_reader[name] == index:
            carry.pop(name, None)


class _AsMade(torch.autograd.Function):
    """The same memory as an autograd non-leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def _as_made(leaves: Carry) -> Carry:
    """Taken values as layers in front would have made them: none is a leaf.

    So a layer may write into them, and autocast keeps no casts of them, in whose low precision it would add the
    gradients of several uses.
    """

    def made(tensor: torch.Tensor) -> Any:
        return _AsMade.apply(tensor) if tensor.requires_grad and tensor.is_leaf else tensor

    return trees.map_tensors(dict(leaves), made)


def _as_leaf(value: Any, plain: Container[int]) -> Any:
    """A carried value with autograd leaves, but for the tensors at some positions."""

    def leaf(position: int, tensor: torch.Tensor) -> torch.Tensor:
        takes_part = position not in plain and is_differentiable(tensor)
        return tensor.detach().requires_grad_() if takes_part else tensor

    return trees.map_numbered(value, leaf)
