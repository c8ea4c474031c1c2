"""What the nodes of a traced graph are and say of themselves, what they need, and how they are run.

Each key of a node's ``meta`` that the compiler uses has its function here, which also says what its absence means.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from roundpipe.core.modes import Modes
from roundpipe.fx.operations import take

FakeValue = torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool | None

UNKNOWN_SIZE = 16
"""Stands for a size that depends on data, such as the number of true elements of a mask."""


def value_of(node: Node) -> FakeValue:
    """The fake tensor or symbolic number that a node stands for; None for structures and objects."""
    return node.meta.get("value")


def modes_of(node: Node) -> Modes | None:
    """The modes to enter around the node's call; None = those around the whole model."""
    return node.meta.get("modes")


def entered_modes(node: Node) -> AbstractContextManager[None]:
    """The node's modes as a context."""
    modes = modes_of(node)
    return nullcontext() if modes is None else modes.enter()


def number_of_input(node: Node) -> torch.SymInt | torch.SymFloat | None:
    """The symbolic number that an input stands for; None if it is a tensor."""
    number: torch.SymInt | torch.SymFloat | None = node.meta.get("number")
    return number


def draws_random(node: Node) -> bool:
    """Whether the node may draw random numbers."""
    return bool(node.meta.get("random", False))


def has_effect(node: Node) -> bool:
    """Whether the node does more than return a value: writes in place, installs a hook, sets a buffer."""
    return bool(node.meta.get("effect", False))


def mutated_by(node: Node) -> tuple[Node, ...]:
    """The values that the node writes in place."""
    return tuple(node.meta.get("mutates", ()))


def writes_buffers(node: Node) -> bool:
    """Whether the node is a leaf that changes buffers of its own."""
    return bool(node.meta.get("buffers_written", False))


def module_of(node: Node) -> str:
    """Qualified name of the module whose forward the node belongs to; the root is ``""``."""
    return str(node.meta.get("module", ""))


def covered_module(node: Node) -> str:
    """Qualified name of the module that a node is part of: a leaf's own, or that of glue."""
    return str(node.target) if node.op == "call_module" else module_of(node)


# ---------------------------------------------------------------------------------- kinds

HOOK_METHODS = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad"})
"""Methods that hang something on a tensor, which must happen where the tensor is made."""


def installs_hook(node: Node) -> bool:
    """Whether the node hangs something on the tensor that is its first operand."""
    return node.op == "call_method" and node.target in HOOK_METHODS


def is_accessor(node: Node) -> bool:
    """Whether the node only takes a part out of a structure made by another node."""
    if node.op != "call_function" or node.target not in (operator.getitem, getattr, take) or not node.args:
        return False
    source = node.args[0]
    return isinstance(source, Node) and source.op.startswith("call_") and value_of(source) is None


def called_name(node: Node) -> str:
    """The name of what a node calls, such as ``add`` for ``+``."""
    return str(getattr(node.target, "__name__", node.target)).strip("_")


PRODUCTS = frozenset(
    "mul rmul imul multiply div rdiv idiv truediv rtruediv itruediv true_divide divide pow rpow ipow".split()
)
"""Names of what multiplies or divides its operands by each other, or takes their power."""


def past_calls(node: Node, names: Collection[str]) -> Node:
    """Where a value comes from, past calls of some names."""
    while called_name(node) in names and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


_POSITIONS_OF_DIM = {
    "select": 1, "narrow": 1, "index_select": 1, "gather": 1, "unbind": 1, "split": 2, "chunk": 2, "tensor_split": 2,
}  # fmt: skip
"""Where these have the dimension of which they take a part; the default is the first."""


def picks_samples(node: Node) -> bool:
    """Whether a node takes a part of the first dimension, by its places: in a piece of a batch those have others."""
    name, args = called_name(node), node.args
    source = args[0] if args else None
    value = value_of(source) if isinstance(source, Node) else None
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return False
    if name == "getitem":
        first = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
        return not (isinstance(first, Node) or first is None or first is Ellipsis or first == slice(None))
    position = _POSITIONS_OF_DIM.get(name)
    if position is None:
        return name == "take"
    dim = node.kwargs.get("dim", args[position] if len(args) > position else 0)
    return not isinstance(dim, int) or dim % value.ndim == 0


def producer_of(node: Node) -> Node:
    """The node that computes a value: the node itself, or what an accessor takes a part of."""
    while is_accessor(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


# ---------------------------------------------------------------------------------- sizes and memory


def hint(size: int | torch.SymInt) -> int:
    """The example's value of a size that may be symbolic; `UNKNOWN_SIZE` if the example has none."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    known = size.node.hint
    return UNKNOWN_SIZE if known is None else int(known)


def value_bytes(node: Node) -> int:
    """Bytes of a node's tensor at the example's sizes; 0 for anything else."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return 0
    return value.element_size() * math.prod(map(hint, value.shape))


def storage_key(node: Node) -> int | None:
    """Equal for values that share memory; None for values that are no plain tensors."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return value.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # layouts without a storage
        return None


# ---------------------------------------------------------------------------------- data flow


def live_before(
    order: Sequence[Node],
    outputs: Iterable[Node],
    reads: Callable[[Node], Iterable[Node]] = lambda node: node.all_input_nodes,
) -> list[frozenset[Node]]:
    """The values live in front of each node of ``order``: made earlier, read by it or later.

    Nodes outside ``order`` that are read (placeholders, attributes) count as made before the first. The last of the
    ``len(order) + 1`` sets is the outputs, which are read behind the last node.
    """
    live = set(outputs)
    sets = [frozenset(live)]
    for node in reversed(order):
        live.discard(node)
        live.update(reads(node))
        sets.append(frozenset(live))
    sets.reverse()
    return sets


def needed_for(order: Sequence[Node], targets: Iterable[Node]) -> list[Node]:
    """The nodes, in order, that determine the targets: these, what they read, and earlier writes to memory of both."""
    needed = set(targets)
    storages = {storage_key(node) for node in needed} - {None}
    result = []
    for node in reversed(order):
        writes = any(storage_key(value) in storages for value in mutated_by(node))
        if node in needed or writes:
            result.append(node)
            needed.update(node.all_input_nodes)
            storages.update(key for key in map(storage_key, node.all_input_nodes) if key is not None)
    return result[::-1]


class GraphInterpreter:
    """Calls nodes with the values of their operands, in their modes; subclasses say on what.

    `torch.fx.Interpreter` knows no modes of nodes, hands `torch.fx`'s immutable containers to what it calls, and needs
    a module in which it looks everything up.
    """

    def __init__(self) -> None:
        self.values: dict[Node, Any] = {}
        """What the nodes gave so far; for the subclass to fill."""

    def run_node(self, node: Node) -> Any:
        if node.op == "placeholder":
            return self.placeholder(node)
        if node.op == "get_attr":
            return self.get_attr(node)
        args, kwargs = self.operands(node.args, node.kwargs)
        with entered_modes(node):
            if node.op == "call_module":
                return self.call_module(node, args, kwargs)
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            assert callable(node.target)
            return node.target(*args, **kwargs)

    def operands(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return plain(map_arg((args, kwargs), self.value))

    def value(self, node: Node) -> Any:
        return self.values[node]

    def placeholder(self, node: Node) -> Any:
        raise NotImplementedError

    def get_attr(self, node: Node) -> Any:
        raise NotImplementedError

    def call_module(self, node: Node, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


def plain(value: Any) -> Any:
    """Arguments as they were given: `torch.fx` stores lists and dicts as immutable ones."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if type(value) is tuple:
        return tuple(plain(item) for item in value)
    return value
