"""Records what traced Python does to tensors, call by call.

`CallRecorder` sees torch functions: one node per call that returns or changes tensors. Its `OperatorWatch` sees
operators: random draws inside a call, and what runs below a function transform such as vmap.

Invariant: a call that changes the graph's meaning is either recorded or ends the attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.fx import Node
from torch.overrides import TorchFunctionMode

from roundpipe.core.contexts import contextmanager
from roundpipe.core.errors import TraceCause, TraceError, TraceFacts
from roundpipe.core.interrupts import safe_point
from roundpipe.core.modes import Modes
from roundpipe.core.watched import is_transformed
from roundpipe.effects.outside import nobody_watched
from roundpipe.effects.uses import GRADIENT_ATTRIBUTES
from roundpipe.fx.fakes import DATA_DEPENDENT, NO_FAKE_KERNEL, draws_unseen, is_in_fake, real_world, written_unseen
from roundpipe.fx.graph.nodes import HOOK_METHODS
from roundpipe.fx.guards.model_guard import Write
from roundpipe.fx.guards.piece_numbers import whole_operands
from roundpipe.fx.guards.value_reader import UNKNOWN
from roundpipe.fx.locations import asked_by_operator, model_location
from roundpipe.fx.operations import NamedCall, as_traced, call_method, set_item, set_property, with_requires_grad
from roundpipe.fx.sizes import (
    SizeFixed,
    expression_of,
    flat_sizes,
    flat_tensors,
    flat_values,
    is_data_dependent,
    tensor_of_sizes,
)
from roundpipe.fx.trace.builder import DATA_READS, GraphBuilder, node_form
from roundpipe.fx.trace.decisions import Decision, Need, Retry
from roundpipe.fx.trace.draws import known_of_draws
from roundpipe.fx.trace.example_data import ExampleData
from roundpipe.fx.trace.kept import NumberOfTensor
from roundpipe.fx.trace.operator_watch import PLACES, QUESTIONS, LayoutLog, OperatorWatch, dense_strides, written_by
from roundpipe.fx.trace.probe import probe_function, probe_sizes
from roundpipe.fx.world import FakeWorld

AUTOGRAD = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
GRAPH_CHANGES: dict[str, Callable[..., Any]] = {"detach_": torch.Tensor.detach, "requires_grad_": with_requires_grad}
"""Methods that change a tensor's place in the autograd graph, with what gives a changed one instead."""


@dataclass(slots=True)
class Findings:
    """What one attempt finds out beside the graph."""

    grad_matters: bool
    """Whether the code asks for what only a forward with autograd tells."""
    gave_numbers: bool = False
    """Whether ``item()`` gave what only a few things can be done with, though arguments may tell the number."""
    born_in: dict[torch.Tensor, str] = field(default_factory=dict)
    """Tensors made inside leaves, with the leaf's name."""
    probed_nodes: set[Node] = field(default_factory=set)
    asked_of_numbers: dict[Node, list[Any]] = field(default_factory=dict)
    """By node, what held when its call asked about numbers that are inputs."""
    origins: dict[Node, tuple[str, ...]] = field(default_factory=dict)
    """Leaves that return an argument or a weight itself, with which; at other sizes it may be something new."""
    weight_writes: list[tuple[Write, torch.Tensor]] = field(default_factory=list)
    """Writes to weights, with the weight, that change nothing of it now."""
    not_kept: dict[str, None] = field(default_factory=dict)
    """Attributes that leaves set to activations, which nobody reads."""
    fixes_sizes: dict[str, TraceError] = field(default_factory=dict)
    """Modules whose glue turns sizes into plain numbers, with where."""


class CallRecorder(TorchFunctionMode):
    """Turns the calls of one attempt into a graph; ``base`` are the modes around the whole model."""

    def __init__(
        self, world: FakeWorld, base: Modes, needs: Collection[Need] = (), *, keeps_numbers: bool = False
    ) -> None:
        super().__init__()
        self.world = world
        self.base = base
        self.modules: list[str] = []
        """Names of the modules whose forwards are being recorded, outermost first."""
        self.paused = 0
        self.builder = GraphBuilder(world, self._common_meta, self.untraced)
        self.watch = OperatorWatch(self._record_operator, LayoutLog() if Need.LAYOUTS in needs else None)
        self.findings = Findings(grad_matters=not torch.is_grad_enabled())  # without, code may skip what it would ask
        self.asks_for_grad = ""
        """Where the code of a leaf asked whether gradients are recorded, if it did."""
        self._specializes_sizes = Need.SPECIALIZED_SIZES in needs
        self._keeps_numbers = keeps_numbers
        self._keeps_all_numbers = keeps_numbers and Need.PLAIN_NUMBERS not in needs
        self._raised = (0, "")
        world.shapes.in_glue = self._asked_in_glue
        world.shapes.on_fixed_size = self._note_fixed_size
        self.builder.add_inputs()
        self.data = ExampleData(world, self.builder, self.pause, lambda: self.module, needs)

    def in_glue(self) -> bool:
        """Whether the model's own Python is running, rather than an operator or a leaf."""
        return not self.paused

    def _asked_in_glue(self) -> bool:
        return not self.paused and not (self.watch.below_transform and asked_by_operator())

    @contextmanager
    def pause(self) -> Iterator[None]:
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    @contextmanager
    def transform(self) -> Iterator[None]:
        """Inside, operators are recorded below function transforms instead of torch functions."""
        in_glue = self.in_glue()
        self.watch.below_transform += in_glue
        try:
            yield
        finally:
            self.watch.below_transform -= in_glue

    @property
    def module(self) -> str:
        return self.modules[-1] if self.modules else ""

    def give_up(self, error: BaseException, is_stateful: bool = False) -> Retry:
        """The module being recorded can't be: the next attempt keeps it whole."""
        return Retry(error, self.module, Decision.LEAF, is_stateful=is_stateful)

    def raised_by(self, error: BaseException) -> str:
        """Name of the torch function that raised an error, if one did."""
        return self._raised[1] if self._raised[0] == id(error) else ""

    def _note_fixed_size(self) -> None:
        error = TraceError(f"a size is turned into a plain number at {model_location()}")
        self.findings.fixes_sizes.setdefault(self.module, error)

    def _common_meta(self) -> dict[str, Any]:
        return {"modes": Modes.current().changes_from(self.base), "module": self.module}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused or self.watch.below_transform:
            return func(*args, **kwargs)
        safe_point()
        with nobody_watched((*args, *kwargs.values())):
            return self._called(func, self.data.with_bounds(func, whole_operands(func, args)), kwargs)

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What glue gets from a function of torch's, which is recorded if it computes something."""
        name = getattr(func, "__name__", "")
        if name in DATA_READS:
            is_kept = name == "item" and self._keeps_numbers and args[0] in self.builder.node_of
            is_deferred = is_kept and self._keeps_all_numbers
            self.findings.gave_numbers |= is_deferred
            answer = UNKNOWN if is_deferred else self.data.answer(func, args, kwargs)
            if answer is UNKNOWN and name == "__bool__" and not args[0].dim():
                answer = known_of_draws(self.builder.node_of.get(args[0]))
            if answer is not UNKNOWN:
                return answer
            if is_kept:
                return NumberOfTensor(args[0], self._refuse_number)
        if func in AUTOGRAD:
            error = TraceError(f"{name} runs autograd in the forward, which a trace does without", TraceCause.AUTOGRAD)
            raise self.give_up(error, is_stateful=True)
        if name == "__set__" and args[0] in self.world.name_of:
            raise self._written_weight(f"{func.__self__.__name__} of a parameter or buffer is set in the forward")
        if name in GRAPH_CHANGES and args[0] in self.world.name_of:
            raise self._written_weight(f"{name} changes a parameter or buffer in the forward")
        if name in QUESTIONS or name in PLACES:
            return self._layout(func, name, args, kwargs)
        if func is torch.Tensor.__iter__:
            return iter([args[0][index] for index in range(int(args[0].size(0)))])
        tensors = flat_tensors(args, kwargs)
        if any(is_transformed(tensor) for tensor in tensors):
            with self.transform():
                return func(*args, **kwargs)
        versions = [(t, t._version) for t in tensors if not t.is_inference()]
        draws = self.watch.num_random_draws
        self.watch.num_random_draws += draws_unseen(func, args)
        self.world.shapes.recent.clear()
        with self.pause():
            out, is_probed = self._call(func, args, kwargs)
        written = [tensor for tensor, version in versions if tensor._version != version]
        written += written_unseen(func, args, kwargs)
        values = flat_values(out)
        if (out is not None or name == "__get__") and not any(isinstance(value, torch.Tensor) for value in values):
            self._note_python_result(func, name, args)
        if not values and not written and name not in HOOK_METHODS:
            return out
        if out is not None and not written and any(out is t and t in self.world.name_of for t in tensors):
            return out  # a parameter or buffer in the form it already has
        if written and self._leaves_weights_alone(Write(written[0], func, args, kwargs), written):
            return out
        asked = self.world.shapes.asked_of_numbers()
        node = self.record(func, args, kwargs, out, written, random=self.watch.num_random_draws != draws)
        if asked:
            self.findings.asked_of_numbers[node] = asked
        self.world.shapes.promote(() if isinstance(out, torch.Tensor) else asked)  # it may tell how many there are
        if is_probed:
            self.findings.probed_nodes.add(node)
        return out

    def _written_weight(self, words: str) -> Retry:
        return self.give_up(TraceError(words, TraceCause.WEIGHT_WRITTEN), is_stateful=True)

    def _leaves_weights_alone(self, write: Write, written: list[torch.Tensor]) -> bool:
        """Whether a call in glue writes nothing but a weight, and changes nothing of it now; the guards look again."""
        weight = self.world.parameter_at.get(write.tensor.untyped_storage()._cdata)
        if len(written) > 1 or weight is None:
            return False
        with self.pause(), real_world():
            if not write.leaves_alone(weight):
                return False
        self.findings.weight_writes.append((write, weight))
        return True

    def _layout(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """How a tensor lies in memory: known of weights and inputs, of activations where kernels have no choice."""
        tensor = args[0]
        if name != "data_ptr":
            answer = func(*args, **kwargs) if tensor in self.world.name_of else self.data.answer(func, args, kwargs)
            if answer is not UNKNOWN:
                return answer
        if name in QUESTIONS and tensor in self.builder.node_of and not is_transformed(tensor):
            if self.watch.layouts is None:
                raise Retry(need=Need.LAYOUTS)
            if self.watch.layouts.is_settled(tensor, self._of_known_layout()):
                return self._settled_layout(func, args, kwargs)
        words = f"{name} asks how an activation lies in memory, which is known when it is run"
        raise self.give_up(TraceError(words, TraceCause.LAYOUT))

    def _of_known_layout(self) -> set[torch.Tensor]:
        """Weights, and inputs that are contiguous now and at every call of the graph."""
        known = {tensor for tensor in self.world.name_of if is_in_fake(tensor) and dense_strides(tensor) is not None}
        for tensor, node in list(self.builder.node_of.items()):
            if node.op == "placeholder" and self.data.answer(torch.Tensor.is_contiguous, (tensor,), {}) is True:
                known.add(tensor)
        return known

    def _settled_layout(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The answer for a fake, and a node that makes sure of it."""
        tensor, *rest = args
        self.world.shapes.recent.clear()
        with self.pause():  # of another fake: one that was asked before answers from memory, and assumes nothing
            answer = func(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype), *rest, **kwargs)
        self.world.shapes.promote_recent()
        strides = dense_strides(tensor)
        if strides is None:
            if answer is not False:
                words = "it asks for the strides of a part of a tensor, which a copy changes"
                raise self.give_up(TraceError(words, TraceCause.LAYOUT))
            return answer  # what has gaps is contiguous nowhere
        if self.builder.node_of[tensor].target is as_traced:
            return answer
        node_args, _ = self.builder.arguments((tensor, strides, model_location()), {})
        node = self.builder.add("call_function", as_traced, node_args)
        node.meta["effect"] = True  # it stays where nothing reads the tensor any more
        self.builder.bind(tensor, node)
        return answer

    def _note_python_result(self, func: Any, name: str, args: Any) -> None:
        """A call gave the model's code a Python value: what that took for granted must hold."""
        if self.world.shapes.recent:
            self.world.shapes.promote_recent()
        attribute = func.__self__.__name__ if name == "__get__" and args else ""
        if attribute not in GRADIENT_ATTRIBUTES:
            return
        self.findings.grad_matters = True  # what is computed of an input requires grad if that input does
        node = self.builder.node_of.get(args[0])
        is_input = node is not None and node.op == "placeholder"
        if attribute != "requires_grad" and is_input and args[0].requires_grad:
            raise self.give_up(TraceError(f"{attribute} of an input depends on how batches are split"))

    def _call(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, bool]:
        """The result on fakes, of the example's data or of a probe, and whether it is a probe's."""
        if func is torch.tensor and flat_values(args):
            if not flat_tensors(args):
                return tensor_of_sizes(*args, **kwargs), False
            known = self.data.fake_of_answer(func, args, kwargs)
            if known is not None:
                return known, False
        try:
            out, is_probed = self._call_at_any_size(func, args, kwargs)
        except TraceError:
            raise
        except Exception as error:
            return self._call_without_fakes(func, args, kwargs, error)
        sizes = flat_sizes(flat_tensors(out)) if self._specializes_sizes else ()
        if any(is_data_dependent(expression_of(size)) for size in sizes):
            known = self.data.fake_of_answer(func, args, kwargs)
            if known is not None:
                return known, False
        return out, is_probed

    def _call_without_fakes(self, func: Any, args: Any, kwargs: Any, error: Exception) -> tuple[Any, bool]:
        name = getattr(func, "__name__", str(func))
        is_about_data = isinstance(error, DATA_DEPENDENT)
        if not is_about_data or name not in DATA_READS:
            known = self.data.fake_of_answer(func, args, kwargs)
            if known is not None:
                return known, False
        if isinstance(error, NO_FAKE_KERNEL):
            try:
                return probe_function(func, args, kwargs, self.data.of), True
            except Exception as second:
                raise error from second
        if is_about_data:
            raise self.needs_data(error, name) from error
        self._raised = id(error), name
        raise error

    def _refuse_number(self) -> NoReturn:
        raise self.needs_data(TypeError("a number is asked for"), "item")

    def needs_data(self, error: BaseException, name: str = "") -> Retry:
        """What ends the attempt when glue asks for data that only running the model gives."""
        if not self._specializes_sizes and self.data.determines_sizes():
            return Retry(need=Need.SPECIALIZED_SIZES)
        what = f"{name} asks for" if name in DATA_READS else f"{name or 'an operator'} needs"
        words = f"{what} the data of an activation, which is only known when the model runs"
        cause = TraceError(words, TraceCause.ACTIVATION_DATA, TraceFacts(function=name))
        cause.__cause__ = error
        return self.give_up(cause)

    def record(self, func: Any, args: Any, kwargs: Any, out: Any, written: list[torch.Tensor], random: bool) -> Node:
        """One node for a call that returned ``out`` and wrote some tensors in place."""
        name = getattr(func, "__name__", "")
        node_args, node_kwargs = self.builder.arguments(tuple(args), kwargs, installs_hook=name in HOOK_METHODS)
        op, target, node_args, node_kwargs = node_form(GRAPH_CHANGES.get(name, func), node_args, node_kwargs)
        mutates = tuple(dict.fromkeys(map(self.builder.tensor_argument, written)))
        node = self.builder.add(op, target, node_args, node_kwargs)
        if target is set_property and not mutates and node.args[1] == "data":
            mutates = tuple(source for source in node.args[:1] if isinstance(source, Node))
        has_effect = bool(mutates) or name in (*HOOK_METHODS, *GRAPH_CHANGES) or target is set_property
        node.meta.update(random=random, mutates=mutates, effect=has_effect)
        self.note_written(node, written)
        if target in (set_item, set_property):
            self.builder.bind(args[0], node)
        else:
            self.builder.bind_output(out, node)
        return node

    def note_grad_mode_asked(self) -> None:
        if not self.paused:
            self.findings.grad_matters = True
        elif not self.asks_for_grad:
            self.asks_for_grad = model_location()

    def note_written(self, node: Node, written: Sequence[torch.Tensor]) -> None:
        """A node writes these tensors in place."""
        storages = {tensor.untyped_storage()._cdata for tensor in written}
        if storages & self.world.parameter_at.keys() or not all(map(is_in_fake, written)):
            raise self._written_weight("it writes a parameter, or a tensor that is no part of the model, in place")
        self.builder.written_storages.update(storages)
        if not self.data.reader.depends_on_inputs_only(node):
            self.data.reader.taint(written)

    def record_function(self, function: type[torch.autograd.Function], args: Any, kwargs: Any) -> Any:
        """One node for the call of a custom autograd function."""
        if taken := [arg for arg in (*args, *kwargs.values()) if isinstance(arg, nn.Module)]:
            inside = (self.world.name_of_module.get(module) for arg in taken for module in arg.modules())
            facts = TraceFacts(stateful=tuple(filter(None, inside)))  # its backward may differentiate their parameters
            raise self.give_up(TraceError(f"{function.__name__}.apply takes a module as an argument", facts=facts))
        apply = NamedCall(f"apply_{function.__name__}", partial(call_method, function, "apply"))
        return self.__torch_function__(apply, (), args, kwargs)

    def _call_at_any_size(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, bool]:
        """See `_call`; a custom autograd function may loop over a size, which stays open all the same."""
        if isinstance(func, NamedCall):
            with suppress(SizeFixed), self.world.shapes.kept_open():
                return func(*args, **kwargs), False
            with suppress(Exception):
                return probe_sizes(func, args, kwargs), True
        return func(*args, **kwargs), False

    def _record_operator(self, func: Any, args: Any, kwargs: Any, out: Any, random: bool) -> None:
        """One node for an operator below a function transform."""
        if not self.paused and flat_values(out):
            with self.pause():
                self.record(func, args, kwargs, out, written_by(func, args, kwargs), random)

    def untraced(self, words: str, tensor: Any = None, cause: TraceCause = TraceCause.UNTRACED_VALUE) -> Retry:
        """What ends the attempt when a value is used that nothing recorded made."""
        leaf = None if tensor is None else self.findings.born_in.get(tensor)
        if leaf is None:
            return self.give_up(TraceError(words, cause))
        words = f"a tensor made inside {leaf} is used outside, but {leaf} did not return it"
        return Retry(TraceError(words, TraceCause.UNTRACED_VALUE), leaf, Decision.DESCEND, hands_on=True)
