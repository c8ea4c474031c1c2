"""The form of a traced model: a `torch.fx.Graph` of modules and glue, with its inputs, outputs and guards.

The tracer writes it; the cost model, the partition and the code generator read it. Grammar (checked by `grammar.lint`):

    placeholder     one per tensor leaf of the arguments, first; target and name are the input's name
    get_attr        a parameter or buffer of the model, or a constant; anywhere before its readers
    call_module     a leaf: a module of the model that runs as its author wrote it
    call_function   glue; also accessors (`getitem` / `getattr` of a value that is not a tensor)
    call_method     glue
    output          last; its argument is the tuple of the nodes that the output template names

Every node but the output has a ``value``: the fake tensor or symbolic number it stands for, or None
(a structure whose parts are taken out by accessors, an arbitrary object, or nothing).

Invariant: values are in single assignment form and nodes in order of execution. A node that writes
one of its operands in place has it in ``mutates``; what eager code reads afterwards through the same
Python object is the writing node's result, so only true views ever name an older value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.fx
from torch import nn
from torch.fx import Node

from roundpipe.core import trees


class CallCheck(Protocol):
    """Tells for which calls a trace is valid."""

    @property
    def grad_matters(self) -> bool:
        """Whether traced code asked if something requires grad, or if gradients are recorded."""

    @property
    def written(self) -> list[str]:
        """Arguments that the graph writes into, in words."""

    @property
    def not_kept(self) -> list[str]:
        """What the forward changes in Python at every call, and the graph does not, in words."""

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """None if the trace serves these arguments, otherwise what fails."""


class OutputValue:
    """A leaf of an output template: the value of the node of that name. (`trees` looks into dataclasses.)"""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"OutputValue({self.name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OutputValue) and other.name == self.name

    def __hash__(self) -> int:
        return hash((OutputValue, self.name))


def output_names(template: Any) -> list[str]:
    """The names in an output template, in the order of `roundpipe.core.trees.walk`."""
    return [leaf.name for leaf in trees.leaves(template) if isinstance(leaf, OutputValue)]


@dataclass
class TracedGraph:
    """A model as a graph, with what turns arguments into its inputs and its values into outputs."""

    graph: torch.fx.Graph
    model: nn.Module
    """Where the targets of call_module and get_attr are looked up; the user's own object."""
    constants: dict[str, Any] = field(default_factory=dict)
    """Targets of get_attr that are not attributes of the model, such as ``_constant_0``."""
    input_paths: dict[str, trees.Path] = field(default_factory=dict)
    """Placeholder name -> path into ``(args, kwargs)`` normalised to the forward's signature."""
    output: Any = None
    """The model's output with an `OutputValue` in place of every tensor and symbolic number."""
    example_elements: int = 0
    """Number of elements of the example's tensor inputs, at the sizes the values are hinted at."""
    opaque: dict[str, str] = field(default_factory=dict)
    """Module name -> why its inside was not traced."""
    guards: CallCheck | None = None

    @property
    def placeholders(self) -> list[Node]:
        """The input nodes, in order."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def body(self) -> list[Node]:
        """The nodes that compute something, in order of execution."""
        return [node for node in self.graph.nodes if node.op.startswith("call_")]

    @property
    def outputs(self) -> list[Node]:
        """The nodes that the output template names, each once, in the template's order."""
        by_name = {node.name: node for node in self.graph.nodes}
        return list(dict.fromkeys(by_name[name] for name in output_names(self.output)))

    def attribute(self, target: str) -> Any:
        """What a get_attr or call_module target stands for; `AttributeError` if nothing."""
        if target in self.constants:
            return self.constants[target]
        value: Any = self.model
        for part in target.split("."):
            value = getattr(value, part)
        return value

    def parameters_of(self, node: Node) -> list[nn.Parameter]:
        """The parameters that a node uses by itself: a leaf's, or the one a get_attr names; each once."""
        if node.op == "call_module":
            return list(self.attribute(str(node.target)).parameters())
        if node.op == "get_attr":
            value = self.attribute(str(node.target))
            return [value] if isinstance(value, nn.Parameter) else []
        return []
