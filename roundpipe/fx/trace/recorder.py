"""Records what traced Python does to tensors, call by call.

    CallRecorder (torch functions)   one node per call that returns or changes tensors
      `- OperatorWatch (operators)   what the recorder can't see: random draws inside a call, and the
                                     operators below a function transform such as vmap

Both see calls before the fake tensors do. Control flow that ends an attempt (`Restart`) derives from
BaseException, so that ``except Exception`` in a model's code does not take it.

Invariant: a call that changes the graph's meaning is either recorded or ends the attempt.
"""

from __future__ import annotations

import linecache
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.overrides import TorchFunctionMode

from roundpipe.core import trees
from roundpipe.core.errors import TraceError
from roundpipe.core.modes import Modes
from roundpipe.effects.uses import GRADIENT_ATTRIBUTES
from roundpipe.fx.fakes import (
    DATA_DEPENDENT,
    NO_FAKE_KERNEL,
    FakeWorld,
    is_fake,
    is_transformed,
    real_world,
    written_unseen,
)
from roundpipe.fx.flat import flat_tensors, flat_values
from roundpipe.fx.guards.values import UNKNOWN, ValueReader
from roundpipe.fx.guards.writes import Write
from roundpipe.fx.locations import asked_by_operator, model_location, raised_at
from roundpipe.fx.operations import ApplyFunction, as_traced, set_item, set_property, with_requires_grad
from roundpipe.fx.sizes import Symbolic, expression_of, is_data_dependent
from roundpipe.fx.trace.builder import GraphBuilder, UntracedValue
from roundpipe.fx.trace.layout import PLACES, QUESTIONS, LayoutLog, dense_strides
from roundpipe.fx.trace.operator_watch import OperatorWatch
from roundpipe.fx.trace.policy import Decision
from roundpipe.fx.trace.probe import probe_function

DATA_READS = frozenset(
    "__bool__ __int__ __float__ __complex__ __index__ item tolist equal is_nonzero allclose numpy __array__"
    " __contains__".split()
)
"""Names of functions that turn a tensor's data into a Python value."""
HOOKS = frozenset("register_hook register_post_accumulate_grad_hook retain_grad backward".split())
"""Names of methods that act later or elsewhere: they count as effects."""


AUTOGRAD = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
GRAPH_CHANGES: dict[str, Callable[..., Any]] = {"detach_": torch.Tensor.detach, "requires_grad_": with_requires_grad}
"""Methods that change a tensor's place in the autograd graph, with what gives a changed one instead."""


class StatefulError(TraceError):
    """A module's forward must run just once, and with autograd: it changes Python state, say."""


class Restart(BaseException):
    """Ends an attempt to trace: something was learned that the next attempt must know.

    Args:
        decision: what was learned about the module; None for something else.
        name: the module's qualified name.
        cause: what went wrong.
    """

    def __init__(self, decision: Decision | None, name: str, cause: BaseException) -> None:
        super().__init__(decision, name, cause)
        self.location = model_location()
        self.decision = decision
        self.name = name
        self.cause = cause
        self.hands_on = False
        """Whether the module leaves values in its attributes that others take in the same forward."""

    def where(self) -> str:
        """The line of the model's code that raised the cause; if it was ours, that ran when it was raised."""
        raised = raised_at(self.cause)
        filename, _, line = (raised or self.location).rpartition(":")
        source = linecache.getline(filename, int(line)).strip() if line.isdigit() else ""
        return f"{filename}:{line} ({source})" if source else f"{filename}:{line}"


class BurnSizes(BaseException):
    """Ends an attempt: sizes that the inputs' data determine must be taken from the example."""


class LogLayouts(BaseException):
    """Ends an attempt: how tensors lie in memory is asked for, so that what makes them must be logged."""


class CallRecorder(TorchFunctionMode):
    """Turns the calls of one attempt into a graph.

    Args:
        world: the model's twin and the fake inputs.
        base: the state around the whole model.
        burn_sizes: whether sizes that depend on the inputs' data are taken from the example.
        log_layouts: whether to keep what makes each tensor, for code that asks how one lies in memory.
    """

    def __init__(self, world: FakeWorld, base: Modes, burn_sizes: bool = False, log_layouts: bool = False) -> None:
        super().__init__()
        self.world = world
        self.base = base
        self.modules: list[str] = []
        """Names of the modules whose forwards are being recorded, outermost first."""
        self.paused = 0
        self.builder = GraphBuilder(world, self._common_meta)
        self.watch = OperatorWatch(self._record_operator, LayoutLog() if log_layouts else None)
        self.born_in: dict[torch.Tensor, str] = {}
        """Tensors made inside leaves, with the leaf's name."""
        self.probed_nodes: dict[Node, str] = {}
        """Nodes whose output sizes a probe found, with why."""
        self.grad_matters = not torch.is_grad_enabled()  # without, code may skip what it would ask
        self.handed_back: dict[Node, tuple[str, ...]] = {}
        """Leaves that return an argument or a weight itself, with which; at other sizes it may be something new."""
        self.weight_writes: list[tuple[Any, torch.Tensor]] = []
        """Writes of leaves to weights, with the weight, that change nothing of it now."""
        self.not_kept: dict[str, None] = {}
        """Attributes that leaves set to activations, which nobody reads."""
        self.asks_for_grad = ""
        """Where the code of a leaf asked whether gradients are recorded, if it did."""
        self._burn_sizes = burn_sizes
        self._transformed = 0
        self.fixes_sizes: dict[str, TraceError] = {}
        """Modules whose glue turns sizes into plain numbers, with where."""
        world.shapes.in_glue = self._asked_in_glue
        world.shapes.on_fixed_size = self._note_fixed_size
        self.builder.add_inputs()
        self.reader = ValueReader(
            self.builder.graph,
            world.model,
            self.builder.constants,
            world.real_arguments,
            self.builder.input_paths,
        )

    # ------------------------------------------------------------------ state

    def in_glue(self) -> bool:
        """Whether the model's own Python is running, rather than an operator or a leaf."""
        return not self.paused

    def _asked_in_glue(self) -> bool:
        """Whether it is the model's own Python that asks about a size."""
        return not self.paused and not (self.watch.below_transform and asked_by_operator())

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Records nothing inside."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    @contextmanager
    def transform(self) -> Iterator[None]:
        """Inside, operators are recorded below function transforms instead of torch functions."""
        self._transformed += 1
        self.watch.below_transform += not self.paused
        counted = not self.paused
        try:
            yield
        finally:
            self._transformed -= 1
            self.watch.below_transform -= counted

    @property
    def module(self) -> str:
        """Name of the module whose forward is being recorded."""
        return self.modules[-1] if self.modules else ""

    def give_up(self, cause: BaseException) -> Restart:
        """The module being recorded can't be: the next attempt keeps it whole."""
        return Restart(Decision.LEAF, self.module, cause)

    def _note_fixed_size(self) -> None:
        cause = TraceError(f"a size is turned into a plain number at {model_location()}")
        self.fixes_sizes.setdefault(self.module, cause)

    def _common_meta(self) -> dict[str, Any]:
        return {
            "modes": Modes.current().changes_from(self.base),
            "module": self.module,
        }

    # ------------------------------------------------------------------ torch functions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused or self._transformed:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in DATA_READS:
            answer = self._read_data(func, args, kwargs)
            if answer is not UNKNOWN:
                return answer
        if func in AUTOGRAD:
            raise self.give_up(
                StatefulError(f"{name} runs autograd inside the forward, which a first run does without")
            )
        if name == "__set__" and args[0] in self.world.name_of:
            raise self.give_up(TraceError(f"{func.__self__.__name__} of a parameter or buffer is set in the forward"))
        if name in GRAPH_CHANGES and args[0] in self.world.name_of:
            raise self.give_up(TraceError(f"{name} changes a parameter or buffer in the forward"))
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
        self.world.shapes.recent.clear()
        with self.pause():
            out, why_probed = self._call(func, args, kwargs)
        written = [tensor for tensor, version in versions if tensor._version != version]
        written += written_unseen(func, args, kwargs)
        produced = flat_values(out)
        if (out is not None or name == "__get__") and not any(isinstance(value, torch.Tensor) for value in produced):
            self._note_python_result(func, name, args)
        if not produced and not written and name not in HOOKS:
            return out
        if out is not None and not written and any(out is t and t in self.world.name_of for t in tensors):
            return out  # a parameter or buffer in the form it already has
        if written and self._leaves_weights_alone(Write(written[0], func, args, kwargs), written):
            return out
        node = self.record(func, args, kwargs, out, written)
        node.meta["random"] = self.watch.num_random_draws != draws
        if why_probed is not None:
            self.probed_nodes[node] = why_probed
        return out

    def _leaves_weights_alone(self, write: Write, written: list[torch.Tensor]) -> bool:
        """Whether a call in glue writes nothing but a weight, and changes nothing of it now; the guards look again."""
        place = write.tensor.untyped_storage()._cdata
        weight = self.world.parameter_at.get(place)
        if len(written) > 1 or weight is None:
            return False
        with self.pause(), real_world():
            if not write.leaves_alone(weight):
                return False
        self.weight_writes.append((write, weight))
        return True

    def _layout(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """How a tensor lies in memory: known of weights and inputs, of activations where kernels have no choice."""
        tensor = args[0]
        if name != "data_ptr":
            answer = func(*args, **kwargs) if tensor in self.world.name_of else self._read_data(func, args, kwargs)
            if answer is not UNKNOWN:
                return answer
        if name in QUESTIONS and tensor in self.builder.node_of and not is_transformed(tensor):
            if self.watch.layouts is None:
                raise LogLayouts()
            if self.watch.layouts.is_settled(tensor, self._of_known_layout()):
                return self._settled_layout(func, args, kwargs)
        raise self.give_up(TraceError(f"{name} asks how an activation lies in memory, which is known when it is run"))

    def _of_known_layout(self) -> set[torch.Tensor]:
        """Weights, and inputs that are contiguous now and at every call of the graph."""
        known = {tensor for tensor in self.world.name_of if is_fake(tensor) and dense_strides(tensor) is not None}
        for tensor, node in list(self.builder.node_of.items()):
            if node.op == "placeholder" and self._read_data(torch.Tensor.is_contiguous, (tensor,), {}) is True:
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
                raise self.give_up(TraceError("it asks for the strides of a part of a tensor, which a copy changes"))
            return answer  # what has gaps is contiguous nowhere
        if self.builder.node_of[tensor].target is as_traced:
            return answer
        try:
            node_args, _ = self.builder.arguments((tensor, strides, model_location()), {})
        except UntracedValue as error:
            raise self.untraced(error) from error
        node = self.builder.add("call_function", as_traced, node_args)
        node.meta["effect"] = True  # it stays where nothing reads the tensor any more
        self.builder.bind(tensor, node)
        return answer

    def _note_python_result(self, func: Any, name: str, args: Any) -> None:
        """A call gave the model's code a Python value: what that took for granted must hold."""
        if self.world.shapes.recent:
            self.world.shapes.promote_recent()
        if name != "__get__" or not args or func.__self__.__name__ not in GRADIENT_ATTRIBUTES:
            return
        self.grad_matters = True  # what is computed of an input requires grad if that one does
        node = self.builder.node_of.get(args[0])
        if func.__self__.__name__ != "requires_grad" and node is not None and node.op == "placeholder":
            if args[0].requires_grad:
                raise self.give_up(TraceError(f"{func.__self__.__name__} of an input depends on how batches are split"))

    def _call(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, str | None]:
        """The result on fakes; if fakes can't tell, of the example's data or of a probe, and why."""
        if func is torch.tensor and flat_values(args):
            if not flat_tensors(args):
                return _tensor_of_sizes(*args, **kwargs), None
            real = self._read_data(func, args, kwargs)
            if isinstance(real, torch.Tensor):
                return self.world.static_fake(real), None
        try:
            out = func(*args, **kwargs)
        except Exception as error:
            if isinstance(error, (TraceError, UntracedValue)):
                raise
            return self._call_without_fakes(func, args, kwargs, error)
        if self._burn_sizes and any(_has_data_size(tensor) for tensor in flat_tensors(out)):
            real = self._read_data(func, args, kwargs)
            if isinstance(real, torch.Tensor):
                return self.world.static_fake(real), None
        return out, None

    def _call_without_fakes(self, func: Any, args: Any, kwargs: Any, error: Exception) -> tuple[Any, Any]:
        name = getattr(func, "__name__", str(func))
        data_dependent = isinstance(error, DATA_DEPENDENT)
        if not data_dependent or name not in DATA_READS:
            real = self._read_data(func, args, kwargs)
            if isinstance(real, torch.Tensor):
                return self.world.static_fake(real), None
        if isinstance(error, NO_FAKE_KERNEL):
            try:
                return self._probe(func, args, kwargs), f"{name} has no fake kernel: {error}"
            except Exception as second:
                raise error from second
        if data_dependent:
            raise self.data_dependent(error, name) from error
        raise error

    def _probe(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The output of a function by running it, on the inputs' own data where that is known."""

        def data_of(tensor: torch.Tensor) -> torch.Tensor | None:
            node = self.builder.node_of.get(tensor)
            known = node is not None and self.reader.depends_on_inputs_only(node)
            return self.reader.value(node) if node is not None and known else None

        return probe_function(func, args, kwargs, data_of)

    def data_dependent(self, error: BaseException, name: str = "") -> BaseException:
        """What ends the attempt when glue asks for data that only running the model gives."""
        if not self._burn_sizes and any(
            is_data_dependent(expression_of(size))
            for tensor, node in self.builder.node_of.items()
            for size in tensor.shape
            if self.reader.depends_on_inputs_only(node)
        ):
            return BurnSizes()
        what = f"{name} asks for" if name in DATA_READS else f"{name or 'an operator'} needs"
        cause = TraceError(f"{what} the data of an activation, which is only known when the model runs")
        cause.__cause__ = error
        return self.give_up(cause)

    def _read_data(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The answer for the example if only inputs and buffers determine it, else `UNKNOWN`."""
        tensors = flat_tensors(args, kwargs)
        nodes = [self.builder.node_of.get(t) or self._known_attribute(t) for t in tensors]
        if not nodes or not all(node and self.reader.depends_on_inputs_only(node) for node in nodes):
            return UNKNOWN
        with self.pause(), real_world():
            node_args, node_kwargs = self.builder.arguments(tuple(args), kwargs)
            return self.reader.read(func, node_args, node_kwargs, model_location())

    def _known_attribute(self, tensor: torch.Tensor) -> Node | None:
        name = self.world.name_of.get(tensor)
        return None if name is None else self.builder.attribute(name, tensor)

    # ------------------------------------------------------------------ nodes

    def record(self, func: Any, args: Any, kwargs: Any, out: Any, written: list[torch.Tensor]) -> Node:
        """The node of one torch function call."""
        try:
            node_args, node_kwargs = self.builder.arguments(tuple(args), kwargs)
        except UntracedValue as error:
            raise self.untraced(error) from error
        name = getattr(func, "__name__", "")
        op, target, node_args, node_kwargs = _form(GRAPH_CHANGES.get(name, func), node_args, node_kwargs)
        mutates = tuple(dict.fromkeys(self.builder.tensor_argument(tensor) for tensor in written))
        node = self.builder.add(op, target, node_args, node_kwargs)
        self._note_effects(node, mutates, written, target, name)
        if target in (set_item, set_property):
            self.builder.bind(args[0], node)
        else:
            self.builder.bind_output(out, node)
        return node

    def _note_effects(
        self, node: Node, mutates: tuple[Node, ...], written: list[torch.Tensor], target: Any, name: str
    ) -> None:
        if target is set_property and not mutates:
            source = node.args[0]
            mutates = (source,) if isinstance(source, Node) and node.args[1] == "data" else ()
        node.meta["mutates"] = mutates
        node.meta["effect"] = bool(mutates) or name in (*HOOKS, *GRAPH_CHANGES) or target is set_property
        self.note_written(node, written)

    def note_grad_mode_asked(self) -> None:
        """The model's code asks whether gradients are recorded."""
        if not self.paused:
            self.grad_matters = True
        elif not self.asks_for_grad:
            self.asks_for_grad = model_location()

    def note_written(self, node: Node, written: Sequence[torch.Tensor]) -> None:
        """A node writes these tensors in place."""
        storages = {tensor.untyped_storage()._cdata for tensor in written}
        if storages & self.world.parameter_at.keys() or not all(map(is_fake, written)):
            raise self.give_up(TraceError("it writes a parameter, or a tensor that is no part of the model, in place"))
        self.builder.written_storages.update(storages)
        if not self.reader.depends_on_inputs_only(node):
            self.reader.taint(written)

    def record_function(self, function: type[torch.autograd.Function], args: Any, kwargs: Any) -> Any:
        """One node for the call of a custom autograd function."""
        tensors = flat_tensors(args, kwargs)
        if any(isinstance(arg, nn.Module) for arg in (*args, *kwargs.values())):
            raise self.give_up(TraceError(f"{function.__name__}.apply takes a module as an argument"))
        versions = [(tensor, tensor._version) for tensor in tensors]
        draws = self.watch.num_random_draws
        apply = ApplyFunction(function)
        with self.pause():
            out = apply(*args, **kwargs)
        written = [tensor for tensor, version in versions if tensor._version != version]
        node = self.record(apply, args, kwargs, out, written)
        node.meta["random"] = self.watch.num_random_draws != draws
        return out

    def _record_operator(self, func: Any, args: Any, kwargs: Any, out: Any, random: bool) -> None:
        """One node for an operator below a function transform."""
        if self.paused or not flat_values(out):
            return
        with self.pause():
            try:
                node_args, node_kwargs = self.builder.arguments(tuple(args), kwargs)
            except UntracedValue as error:
                raise self.untraced(error) from error
            written = [
                value
                for value, argument in zip(args, func._schema.arguments, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            mutates = tuple(self.builder.tensor_argument(t) for t in written if isinstance(t, torch.Tensor))
            node = self.builder.add("call_function", func, node_args, node_kwargs)
            self._note_effects(node, mutates, flat_tensors(written), func, "")
            node.meta["random"] = random
            self.builder.bind_output(out, node)

    def untraced(self, error: UntracedValue) -> Restart:
        """What ends the attempt when a value is used that nothing recorded made."""
        leaf = self.born_in.get(error.tensor) if error.tensor is not None else None
        if leaf is None:
            return self.give_up(TraceError(str(error)))
        cause = TraceError(f"a tensor made inside {leaf} is used outside, but {leaf} did not return it")
        restart = Restart(Decision.DESCEND, leaf, cause)
        restart.hands_on = True
        return restart


def _tensor_of_sizes(data: Any, **options: Any) -> torch.Tensor:
    """The fake of ``torch.tensor(sizes)``; torch itself would fix the sizes, and remember them."""
    numbers = trees.map_leaves(data, lambda leaf: 2 if isinstance(leaf, Symbolic) else leaf)
    like = torch.tensor(numbers, **options)
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _has_data_size(tensor: torch.Tensor) -> bool:
    return any(is_data_dependent(expression_of(size)) for size in tensor.shape)


def _form(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Any, Any, Any]:
    """The kind of node and the target for a call as torch reports it."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__") and hasattr(func, "__self__"):
        attribute = func.__self__.__name__
        if name == "__get__":
            return "call_function", getattr, (args[0], attribute), {}
        return "call_function", set_property, (args[0], attribute, args[1]), {}
    if func is torch.Tensor.__setitem__:
        return "call_function", set_item, args, kwargs
    if name == "__getitem__":
        return "call_function", operator.getitem, args, kwargs
    is_method = getattr(func, "__objclass__", None) is torch._C.TensorBase
    if (is_method or getattr(torch.Tensor, name, None) is func) and isinstance(args[0], Node):
        return "call_method", name, args, kwargs
    return "call_function", func, args, kwargs
