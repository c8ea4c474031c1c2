"""One stage times one microbatch on the device: forward, fused, recompute and backward.

Nothing here knows of threads, schedules or transfers: it is given a carry of device tensors, calls the bound
layers one after the other and returns device tensors.

Rules it keeps: layers are called (hooks fire); a layer that draws random numbers draws from a seed of
its own, so recomputation repeats the draws; recomputation sees the buffers as the forward saw them;
an exception of the user's code keeps its type and gains a note that says where it was raised.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from roundpipe.core import trees
from roundpipe.core.errors import LossError
from roundpipe.core.layers import Carry, Exit, LayerSpec, is_differentiable
from roundpipe.core.random_state import SeededPython
from roundpipe.runtime.device.backend import Backend, Lane, is_profiled
from roundpipe.runtime.engine.flow import Segment
from roundpipe.runtime.engine.recompute import BufferHistory, SavedData, layer_seed, recomputing
from roundpipe.runtime.profiling.layer_times import Kind, StepTimes
from roundpipe.runtime.weights.bound_layer import BoundLayer

Gradients = list[torch.Tensor | None]
"""One entry per tensor of a carried value."""
LossFunction = Callable[[Any, Any], Any]


@dataclass(slots=True)
class StageLayer:
    """One layer of a stage in one visit."""

    index: int
    spec: LayerSpec
    bound: BoundLayer


@dataclass(slots=True)
class Surroundings:
    """What holds for a whole round, wherever its stages run."""

    base_seed: int
    """Random numbers of layer L and microbatch m derive from it, L and m."""
    preserve_rng_state: bool
    with_gradient: frozenset[str]
    """Names whose tensors take part in autograd."""
    plain: dict[tuple[int, str], frozenset[int]]
    """By microbatch and name of those, the tensors that don't, such as a mask beside the hidden state."""
    buffers: BufferHistory
    saved: SavedData
    keep_history: bool
    """Whether a backward will recompute this forward, so that what it saw and saved must be kept."""
    ambient: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """Re-enters the caller's autocast state."""
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    """The caller's context variables, as they were when the round was made, or the round of the forward."""
    times: StepTimes | None = None
    """Where to note what calls take; None: the round is not measured."""


@dataclass(slots=True)
class Recorded:
    """A segment that ran with autograd on, before its backward."""

    layers: tuple[int, ...]
    leaves: dict[str, Any]
    """Taken values as autograd leaves."""
    made: Carry = field(default_factory=dict)


class Stage:
    """The layers of one visit, ready to run microbatches.

    Args:
        name: for messages, such as ``B1[3:5]``.
        backend: where it runs.
        layers: in order.
        around: what holds for the round.
    """

    def __init__(self, name: str, backend: Backend, layers: Sequence[StageLayer], around: Surroundings) -> None:
        self.name = name
        self.backend = backend
        self.layers = {layer.index: layer for layer in layers}
        self.around = around

    # Phases

    def forward(
        self, segment: Segment, carry: Carry, microbatch: int, keep: Iterable[str], give: Callable[[Carry], None]
    ) -> None:
        """Run without autograd; hands each layer's kept values to ``give`` as soon as they are made."""
        keep = frozenset(keep)
        backend = self.backend
        last = {name: i for i in segment.layers for name in self.layers[i].spec.reads}
        given = False
        with torch.no_grad(), self.around.ambient():
            for index in segment.layers:
                if given and self.layers[index].spec.may_write_reads:  # what is being copied must not change
                    backend.wait(Lane.COMPUTE, backend.record(Lane.DOWNLOAD))
                made = self._first_call(self.layers[index], carry, microbatch, "forward")
                if any(tensor.requires_grad for tensor in trees.tensors(made)):  # the model turned autograd on
                    made = trees.map_tensors(made, torch.Tensor.detach)
                self._note_plain(self.layers[index].spec, carry, made, microbatch)
                kept = {name: value for name, value in made.items() if name in keep}
                given = bool(kept)
                if kept:
                    give(kept)
                carry.update((name, value) for name, value in made.items() if last.get(name, -1) > index)
                for name in self.layers[index].spec.reads:
                    if last[name] == index:
                        carry.pop(name, None)

    def fused(
        self,
        segment: Segment,
        carry: Carry,
        microbatch: int,
        exit: Exit,
        loss_fn: LossFunction,
        label: Any,
        give: Callable[[Any, Any], None],
    ) -> dict[str, Gradients]:
        """Run forward, loss and backward.

        Args:
            segment: the layers, and what they take.
            carry: taken values.
            microbatch: its index.
            exit: makes the model's outputs.
            loss_fn: the user's.
            label: for it.
            give: gets the detached loss (a tensor or a list of them) and the outputs as soon as they are known.

        Returns:
            gradients of the taken values.
        """
        around = self.around
        recorded = Recorded(segment.layers, self._leaves(segment, carry, microbatch))
        with around.ambient(), torch.enable_grad():
            values = dict(recorded.leaves)
            last = {name: i for i in segment.layers for name in self.layers[i].spec.reads}
            last.update((name, len(self.layers) + segment.layers[-1]) for name in exit.reads)
            for index in segment.layers:
                layer = self.layers[index]
                with around.buffers.learning(layer.bound):
                    made = self._call(layer, values, microbatch, "forward")
                values.update((name, value) for name, value in made.items() if last.get(name, -1) > index)
                for name in self.layers[index].spec.reads:
                    if last[name] == index:
                        values.pop(name, None)
                del made
            with self._timed("loss", segment.layers[-1:]):
                with self._noted(microbatch, "outputs"):
                    outputs = exit(values)
                del values
                with self._noted(microbatch, "loss_fn"):
                    loss = loss_fn(outputs, label)
                    losses = _as_losses(loss)
        plain = [one.detach() for one in losses]
        give(plain[0] if isinstance(loss, torch.Tensor) else plain, outputs)
        del outputs
        with self._timed("backward", segment.layers), self._noted(microbatch, "backward"):
            self._backward(losses, None, segment.layers, microbatch)
        return _leaf_gradients(recorded)

    def recompute(self, segment: Segment, carry: Carry, microbatch: int) -> Recorded:
        """Run a segment's forward again, with autograd."""
        around = self.around
        recorded = Recorded(segment.layers, self._leaves(segment, carry, microbatch))
        values = dict(recorded.leaves)
        with around.ambient(), torch.enable_grad(), recomputing():
            for index in segment.layers:
                layer = self.layers[index]
                with around.saved.layer(index, microbatch, self.backend):
                    if layer.bound.has_buffers:
                        with around.buffers.as_forward_saw(layer.bound, index, microbatch, self.backend):
                            made = self._call(layer, values, microbatch, "recomputation")
                    else:
                        made = self._call(layer, values, microbatch, "recomputation")
                values.update(made)
                recorded.made.update(made)
        return recorded

    def has_backward(self, segment: Segment) -> bool:
        """Whether a gradient flows to any weight or taken value of a segment; else it need not run again."""
        return any(self.layers[index].bound.parameters for index in segment.layers) or any(
            name in self.around.with_gradient for name in segment.takes
        )

    def backward(self, recorded: Recorded, gradients: dict[str, Gradients], microbatch: int) -> dict[str, Gradients]:
        """Backward of a recomputed segment; returns the gradients of the values it took."""
        roots: list[torch.Tensor] = []
        root_gradients: list[torch.Tensor] = []
        for name, incoming in gradients.items():
            for tensor, gradient in zip(trees.tensors(recorded.made[name]), incoming, strict=True):
                if gradient is not None and tensor.requires_grad:
                    roots.append(tensor)
                    root_gradients.append(gradient)
        recorded.made.clear()
        if roots:
            with self._timed("backward", recorded.layers), self._noted(microbatch, "backward"):
                self._backward(roots, root_gradients, recorded.layers, microbatch)
        return _leaf_gradients(recorded)

    def _backward(
        self,
        roots: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor] | None,
        layers: Sequence[int],
        microbatch: int,
    ) -> None:
        """Autograd's backward of some layers."""
        if not is_profiled():
            torch.autograd.backward(roots, gradients)
            return
        names = [self.layers[index].spec.name for index in layers]
        which = f"layer {layers[0]} ({names[0]})"
        if len(layers) > 1:
            which = f"layers {layers[0]} to {layers[-1]} ({names[0]} .. {names[-1]})"
        with self.backend.annotate(f"roundpipe {which} m{microbatch} backward"):
            torch.autograd.backward(roots, gradients)

    # Calls

    def _leaves(self, segment: Segment, carry: Carry, microbatch: int) -> dict[str, Any]:
        """The taken values with autograd leaves where a gradient flows."""
        flowing = self.around.with_gradient
        return {
            name: _as_leaf(carry[name], self.around.plain.get((microbatch, name), frozenset()))
            if name in flowing
            else carry[name]
            for name in segment.takes
        }

    def _note_plain(self, spec: LayerSpec, given: Carry, made: Carry, microbatch: int) -> None:
        """A tensor without gradient that a layer hands on as it is stays one; that of a traced layer is known."""
        if spec.differentiable is not None:
            return
        around, plain = self.around, self.around.plain
        handed_on = {
            id(tensor)
            for name in spec.reads
            for position, tensor in enumerate(trees.tensors(given[name]))
            if name not in around.with_gradient or position in plain.get((microbatch, name), ())
        }
        for name in spec.makes if handed_on else ():
            tensors = enumerate(trees.tensors(made[name]))
            plain[microbatch, name] = frozenset(position for position, one in tensors if id(one) in handed_on)

    def _first_call(self, layer: StageLayer, values: Carry, microbatch: int, phase: str) -> Carry:
        """A layer's call in forward, with a record of what its recomputation needs."""
        around, backend = self.around, self.backend
        if not around.keep_history:
            return self._call(layer, values, microbatch, phase)
        with around.saved.layer(layer.index, microbatch, backend):
            if not layer.bound.has_buffers:
                return self._call(layer, values, microbatch, phase)
            with around.buffers.recording(layer.bound, layer.index, microbatch, backend):
                return self._call(layer, values, microbatch, phase)

    def _call(self, layer: StageLayer, values: Carry, microbatch: int, phase: str) -> Carry:
        spec = layer.spec
        carry = {name: values[name] for name in spec.reads}
        if is_profiled():
            with self.backend.annotate(f"roundpipe layer {layer.index} ({spec.name}) m{microbatch} {phase}"):
                return self._timed_call(layer, carry, microbatch, phase)
        return self._timed_call(layer, carry, microbatch, phase)

    def _timed_call(self, layer: StageLayer, carry: Carry, microbatch: int, phase: str) -> Carry:
        spec, around = layer.spec, self.around
        times = around.times
        began = None if times is None else self.backend.moment()
        try:
            if spec.draws_random and around.preserve_rng_state:
                made = self._seeded(layer.bound, carry, layer_seed(around.base_seed, layer.index, microbatch))
            else:
                made = layer.bound.module(carry)
        except Exception as error:
            module = _failing_module(error, layer.bound) or ", ".join(layer.spec.module_names) or layer.spec.name
            self._note(error, microbatch, phase, f"layer {layer.index} ({layer.spec.name}), module {module}, ")
            raise
        if times is not None and began is not None:
            times.add("forward", (layer.index,), began, self.backend.moment())
        return {name: made[name] for name in spec.makes}

    def _seeded(self, bound: BoundLayer, carry: Carry, seed: int) -> Carry:
        """A layer's result with everything it draws drawn from a seed."""
        with self.backend.random(seed):
            if bound.habits.draws_python is False:
                return bound.module(carry)
            with SeededPython(seed) as drawing:
                made = bound.module(carry)
            bound.habits.draws_python = bound.habits.draws_python or drawing.drew
            return made

    def _note(self, error: Exception, microbatch: int, phase: str, layer: str = "") -> None:
        """Adds to an exception where in the pipeline it was raised."""
        error.add_note(f"roundpipe: raised in {layer}stage {self.name}, microbatch {microbatch}, phase {phase}")

    @contextlib.contextmanager
    def _timed(self, kind: Kind, layers: Sequence[int]) -> Iterator[None]:
        times = self.around.times
        if times is None:
            yield
            return
        began = self.backend.moment()
        yield
        times.add(kind, layers, began, self.backend.moment())

    @contextlib.contextmanager
    def _noted(self, microbatch: int, phase: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._note(error, microbatch, phase)
            raise


def _as_losses(loss: Any) -> list[torch.Tensor]:
    losses = [loss] if isinstance(loss, torch.Tensor) else loss
    if not isinstance(losses, Sequence) or not losses or not all(isinstance(one, torch.Tensor) for one in losses):
        raise LossError(
            f"loss_fn returned {type(loss).__name__}; it must return a tensor or a non-empty sequence of tensors. "
            "A model that computes its own loss needs loss_fn=lambda outputs, label: outputs.loss"
        )
    for one in losses:
        if one.numel() != 1:
            raise LossError(
                f"loss_fn returned a tensor of shape {list(one.shape)}; a loss has one element. Reduce it, for example "
                "with .mean() or .sum()"
            )
        if not one.requires_grad:
            raise LossError(
                "loss_fn returned a loss that does not depend on anything that requires grad: it was detached, or made "
                "of numbers (.item()), or every parameter is frozen and no input requires grad. Without training, call "
                "model(...) under torch.no_grad()"
            )
    return list(losses)


def _as_leaf(value: Any, plain: Container[int]) -> Any:
    """A carried value with autograd leaves, but for the tensors at some positions."""

    def replaced(position: int, tensor: torch.Tensor) -> torch.Tensor:
        takes_part = position not in plain and is_differentiable(tensor)
        return tensor.detach().requires_grad_() if takes_part else tensor

    return trees.map_numbered(value, replaced)


def _leaf_gradients(recorded: Recorded) -> dict[str, Gradients]:
    """Gradients of the leaves, those without any left out."""
    found = {}
    for name, value in recorded.leaves.items():
        gradients = [tensor.grad if tensor.is_leaf else None for tensor in trees.tensors(value)]
        if any(gradient is not None for gradient in gradients):
            found[name] = gradients
    recorded.leaves.clear()
    return found


def _failing_module(error: BaseException, bound: BoundLayer) -> str | None:
    """Qualified name of the innermost module whose code raised, from the traceback."""
    names = {id(module): name for name, module in bound.module.named_modules() if name}
    found = None
    # Not the caller's own frame: reading its variables would make a cycle of frame and error.
    trace = error.__traceback__ and error.__traceback__.tb_next
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        found = names.get(id(owner), found)
        trace = trace.tb_next
    return found
