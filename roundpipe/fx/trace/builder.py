"""Writes the graph: which node stands for which Python value, with which data, and how values become arguments.

Every tensor that traced code can get hold of is here with its node. Sizes aren't recorded as they are
computed: when one is an argument, one node evaluates its expression from the sizes of the inputs.

Invariant: a fake tensor without a node is never let into the graph.
"""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import sympy
import torch
import torch.fx
from torch.fx import Node
from torch.nn.utils.rnn import PackedSequence

from roundpipe.core import trees
from roundpipe.core.attributes import stored_attribute
from roundpipe.core.errors import TraceCause
from roundpipe.fx.fakes import is_fake
from roundpipe.fx.graph.nodes import hint, mutated_by, number_of_input
from roundpipe.fx.graph.traced import OutputValue
from roundpipe.fx.guards.guards import GuardedGraph
from roundpipe.fx.guards.piece_numbers import NumberOfPiece
from roundpipe.fx.operations import Build, Hole, number_of, set_item, set_property, take
from roundpipe.fx.sizes import (
    Symbolic,
    expression_of,
    flat_tensors,
    flat_values,
    size_function,
)
from roundpipe.fx.trace.progress import advance
from roundpipe.fx.trace.recomputed import Recipe
from roundpipe.fx.varying import NUMBER, FoundName, is_found, tensor_of_kind
from roundpipe.fx.world import FakeWorld, InputNumber

DATA_READS = frozenset(
    "__bool__ __int__ __float__ __complex__ __index__ item tolist equal is_nonzero allclose numpy __array__"
    " __contains__".split()
)
"""Names of functions that turn a tensor's data into a Python value."""

_INPUTS = (torch.Tensor, *Symbolic)

Meta = Callable[[], dict[str, Any]]
Untraced = Callable[..., BaseException]
"""The exception to raise for a value that no node makes, given in words, with the tensor if it is one; and a cause."""


class GraphBuilder:
    """The graph under construction; every new node's ``meta`` holds what ``common_meta`` gives."""

    def __init__(self, world: FakeWorld, common_meta: Meta, untraced: Untraced) -> None:
        self.world = world
        self.traced = GuardedGraph(torch.fx.Graph(), world.model)
        self.node_of: dict[torch.Tensor, Node] = {}
        """Node that holds a tensor's present value; tensors hash by identity."""
        self.written_storages: set[int] = set()
        self.made_anew: list[torch.Tensor] = []
        """Tensors that an earlier run has left on the model, and that are made once more."""
        self._common_meta = common_meta
        self._untraced = untraced
        self._attributes: dict[str, Node] = {}
        self._sizes: dict[sympy.Basic, Node] = {}
        self._size_sources: dict[sympy.Basic, tuple[Node, int]] = {}
        self._objects: list[tuple[Any, Node, list[Any]]] = []
        self._constant_names: dict[torch.Tensor, str] = {}
        self._last_input: Node | None = None

    def add_inputs(self) -> None:
        """One placeholder per tensor of the arguments."""
        for path, leaf in trees.walk(self.world.arguments):
            if not isinstance(leaf, torch.Tensor):
                continue
            node = self._input(path)
            item = self.world.inputs[len(self.traced.input_paths) - 1]
            self._size_sources.update({size: (node, dim) for dim, size in enumerate(item.sizes)})
            self.bind(leaf, node)
        self._add_numbers(self.world.numbers)
        self.traced.uncut = self._uncut()
        self.traced.arguments = self._named_arguments()

    def open_number(self, name: FoundName, value: Any, is_own: bool) -> Any:
        """A number, or a list of them, that code reads from data, as one more input; gives what code gets."""
        opened, new = self.world.open_argument(name, value, is_own=is_own)
        self._add_numbers(new)
        return opened

    def _add_numbers(self, numbers: Iterable[InputNumber]) -> None:
        """One placeholder per number that varies, behind those there are."""
        for path, symbol, number in numbers:
            node = self._input(path)
            with self.world.mode:
                node.meta.update(value=tensor_of_kind(number), number=number)
            self._size_sources[symbol] = node, NUMBER

    def _input(self, path: trees.Path) -> Node:
        graph = self.traced.graph
        first: Any = next(iter(graph.nodes), None)
        behind = self._last_input
        with graph.inserting_before(first) if behind is None else graph.inserting_after(behind):
            node = self._last_input = graph.placeholder(_input_name(path))
        node.target = node.name
        node.meta.update(self._common_meta())
        self.traced.input_paths[node.name] = path
        return node

    def _named_arguments(self) -> Any:
        """The arguments with names of placeholders in place of tensors and numbers that vary."""
        args, kwargs = self.world.arguments
        names = {path: name for name, path in self.traced.input_paths.items()}
        inputs = iter([OutputValue(names[path]) for path, _ in trees.walk((args, kwargs)) if path in names])

        def named(value: Any) -> Any:
            if not flat_values(value):
                return value
            return trees.map_leaves(value, lambda leaf: next(inputs) if isinstance(leaf, _INPUTS) else leaf)

        return tuple(map(named, args)), {name: named(value) for name, value in kwargs.items()}

    def _uncut(self) -> frozenset[str]:
        """Inputs that are as long in the batch of which the example is a piece, if others are not."""
        batch, piece = self.world.batch, self.world.real_arguments
        paths = self.traced.input_paths if batch is not None else {}
        lengths = {name: (_length_at(batch, path), _length_at(piece, path)) for name, path in paths.items()}
        known = {name: whole == own for name, (whole, own) in lengths.items() if whole and own}
        uncut = frozenset(name for name, is_whole in known.items() if is_whole)
        found = frozenset(name for name, path in self.traced.input_paths.items() if is_found(path))
        return found | uncut if len(uncut) < len(known) else found

    def add(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Node:
        advance()
        node = self.traced.graph.create_node(op, target, args, kwargs or {})
        node.meta.update(self._common_meta())
        node.meta["value"] = None
        return node

    def _add_modeless(self, op: str, target: Any, args: tuple[Any, ...]) -> Node:
        """A new node that is the same in every mode."""
        node = self.add(op, target, args)
        node.meta["modes"] = None
        return node

    def bind(self, tensor: torch.Tensor, node: Node) -> None:
        """From now on ``tensor`` is the value of ``node``."""
        self.node_of[tensor] = node
        node.meta["value"] = tensor
        for dim, size in enumerate(tensor.shape):
            expression = expression_of(size)
            if isinstance(expression, sympy.Symbol):
                self._size_sources.setdefault(expression, (node, dim))

    def bind_output(self, value: Any, node: Node) -> None:
        """From now on what ``node`` returned has nodes, accessors, for the tensors and symbolic numbers in it."""
        nodes: dict[trees.Path, Node] = {(): node}
        leaves = []
        for path, leaf in trees.walk(value):
            if not isinstance(leaf, (torch.Tensor, *Symbolic)):
                continue
            leaves.append(leaf)
            for end in range(1, len(path) + 1):
                if path[:end] not in nodes:
                    nodes[path[:end]] = self._accessor(nodes[path[: end - 1]], path[end - 1])
            accessor = nodes[path]
            if isinstance(leaf, torch.Tensor):
                self.bind(leaf, accessor)
            else:
                accessor.meta["value"] = leaf
                if not self._is_of_inputs(expression_of(leaf)):  # or guards and layers would need what has it
                    self._sizes.setdefault(expression_of(leaf), accessor)
        if not isinstance(value, (torch.Tensor, tuple, list, dict, *trees.ATOMS)):
            self._objects.append((value, node, leaves))

    def _accessor(self, source: Node, step: trees.Access) -> Node:
        function = {"item": operator.getitem, "attribute": getattr}.get(step.kind)
        arguments = (source, step.kind, step.key) if function is None else (source, step.key)
        return self._add_modeless("call_function", function or take, arguments)

    def argument(self, value: Any) -> Any:
        """A Python value as a node's argument."""
        if isinstance(value, torch.Tensor):
            return self.tensor_argument(value)
        if isinstance(value, Symbolic):
            return self.size_argument(value)
        if isinstance(value, PackedSequence):
            words = "a module is given a PackedSequence, whose sizes are data: how many sequences go on at each step"
            raise self._untraced(words, None, TraceCause.PACKED_SEQUENCE)
        if isinstance(value, tuple):
            items = [self.argument(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if type(value) is list:
            return [self.argument(item) for item in value]
        if isinstance(value, slice):
            return slice(*map(self.argument, (value.start, value.stop, value.step)))
        if type(value) is dict and all(isinstance(key, str) for key in value):
            return {key: self.argument(item) for key, item in value.items()}
        if isinstance(value, torch.Generator):
            words = "a torch.Generator is an argument, and each call of the graph would find it further on"
            raise self._untraced(words, None)
        if type(value) is NumberOfPiece:
            return int(value)
        if value is None or isinstance(value, trees.ATOMS):
            return value
        return self._object_argument(value)

    def arguments(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, installs_hook: bool = False
    ) -> tuple[Any, dict[str, Any]]:
        if installs_hook:
            args = tuple(map(self.world.hook_with_own, args))
            kwargs = {name: self.world.hook_with_own(value) for name, value in kwargs.items()}
        return tuple(map(self.argument, args)), {k: self.argument(v) for k, v in kwargs.items()}

    def tensor_argument(self, tensor: torch.Tensor) -> Node:
        """The node of a tensor; a parameter, a buffer and a constant get theirs at first use."""
        node = self.node_of.get(tensor)
        if node is not None:
            return node
        name = self.world.name_of.get(tensor)
        if name is not None:
            if not is_fake(tensor) and not self.world.has_in_place(name):
                raise self._untraced(f"{name} is read, in whose place another tensor is for now", tensor)
            return self.attribute(name, tensor)
        if (recipe := self.world.recipes.get(tensor)) is not None:
            return self._made_anew(recipe, tensor)
        if is_fake(tensor):
            if place := self._place_of(tensor):
                raise self._untraced(f"{place} is used, which an earlier call of the forward has left there", tensor)
            shape = ", ".join(str(hint(size)) for size in tensor.shape)
            form = f"a tensor of shape ({shape}) and dtype {tensor.dtype}"
            raise self._untraced(f"{form} is used, but nothing that was recorded made it", tensor)
        if tensor.requires_grad:
            raise self._untraced(
                f"a tensor of shape {tuple(tensor.shape)} that requires grad is neither a parameter of the "
                f"model nor an input; register it as an nn.Parameter",
                None,
            )
        if tensor not in self._constant_names:
            name = f"_constant_{len(self.traced.constants)}"
            self._constant_names[tensor] = name
            self.traced.constants[name] = tensor
        return self.attribute(self._constant_names[tensor], tensor)

    def _made_anew(self, recipe: Recipe, tensor: torch.Tensor) -> Node:
        """The node of what an earlier run has left."""
        copies: dict[Node, Any] = {node: self.size_argument(size) for node, size in recipe.sizes.items()}
        for node in recipe.nodes:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
            new = copies[node] = self.add(node.op, node.target, args, kwargs)
            new.meta.update(node.meta, mutates=tuple(copies[value] for value in mutated_by(node)))
        self.made_anew.append(tensor)
        self.bind(tensor, copies[recipe.last])
        return self.node_of[tensor]

    def _place_of(self, tensor: torch.Tensor) -> str:
        """The attribute of a module that holds a tensor, in words; empty if none does."""
        held = ((module, name) for module in self.world.twin.modules() for name in vars(module))
        places = (f"{type(module).__name__}.{name}" for module, name in held if vars(module)[name] is tensor)
        return next(places, "")

    def attribute(self, name: str, tensor: torch.Tensor) -> Node:
        if name not in self._attributes:
            if not is_fake(tensor):
                tensor = self.world.fake(name) if name in self.world.real else self.world.static_fake(tensor)
            self._attributes[name] = self._add_modeless("get_attr", name, ())
            self._attributes[name].meta["value"] = tensor
        return self._attributes[name]

    def size_argument(self, size: Any) -> Any:
        """A plain number, or the node that computes a symbolic one."""
        expression = expression_of(size)
        if not isinstance(expression, sympy.Basic):
            return expression
        if expression.is_number or expression in (sympy.true, sympy.false):
            return size.node.pytype(expression)
        if expression not in self._sizes:
            self._size_node(expression).meta["value"] = size
        return self._sizes[expression]

    def _size_node(self, expression: sympy.Basic) -> Node:
        if expression not in self._sizes:
            if isinstance(expression, sympy.Symbol):
                node = self._dimension_node(expression)
            else:
                symbols = sorted(expression.free_symbols, key=str)
                sizes = tuple(map(self._size_node, symbols))
                node = self._add_modeless("call_function", size_function(expression, symbols), sizes)
            self._sizes[expression] = node
        return self._sizes[expression]

    def _is_of_inputs(self, expression: sympy.Basic) -> bool:
        """Whether sizes of inputs determine a size."""
        sources = [self._size_sources.get(symbol) for symbol in expression.free_symbols]
        return all(source is not None and source[0].op == "placeholder" for source in sources)

    def _dimension_node(self, symbol: sympy.Symbol) -> Node:
        if symbol not in self._size_sources:
            raise self._untraced(f"a size ({symbol}) is used that no recorded tensor has", None)
        source, dim = self._size_sources[symbol]
        after = self._last_input if source.op == "placeholder" else source
        assert after is not None
        with self.traced.graph.inserting_after(after):
            if dim == NUMBER:
                number: Any = number_of_input(source)
                node = self._add_modeless("call_function", number_of, (source, number.node.hint))
                node.meta["value"] = number
            else:
                node = self._add_modeless("call_method", "size", (source, dim))
                node.meta["value"] = source.meta["value"].shape[dim]
        return node

    def _object_argument(self, value: Any) -> Any:
        now = flat_values(value)
        for other, node, leaves in reversed(self._objects):
            if other is value and len(leaves) == len(now) and all(map(operator.is_, leaves, now)):
                return node
        if now:
            template = trees.map_leaves(
                value, lambda leaf: Hole() if isinstance(leaf, (torch.Tensor, *Symbolic)) else leaf
            )
            return self._add_modeless("call_function", Build(template), tuple(map(self.argument, now)))
        for tensor in _captured_tensors(value):
            raise self._untraced(
                f"the function {stored_attribute(value, '__qualname__', value)!r} is an argument and holds a tensor "
                f"in its closure; pass the tensor as an argument of its own",
                tensor,
            )
        return value


def _captured_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in the closure of a function."""
    for cell in stored_attribute(value, "__closure__") or ():
        try:
            yield from flat_tensors(cell.cell_contents)
        except ValueError:  # an empty cell
            continue


def _length_at(arguments: Any, path: trees.Path) -> int | None:
    """How long a tensor is along its first dimension; None if it has none, or there is no tensor."""
    with suppress(LookupError, AttributeError, TypeError):
        value = trees.get(arguments, path)
        return len(value) if isinstance(value, torch.Tensor) and value.ndim else None
    return None


def _input_name(path: trees.Path) -> str:
    """A readable name for an input: its keyword, or its position, then the steps inside it."""
    (_, half), *steps = path
    name = re.sub(r"\W+", "_", "_".join(str(step.key) for step in steps)).strip("_")
    if half == 0 or not name.isidentifier() or keyword.iskeyword(name):
        name = f"input_{name}"
    return name


def node_form(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Any, Any, Any]:
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
