"""Losses over rows, which end a region: as the sum or mean of one value per row.

A mean over elements is that of tiles by their shares of rows. A mean by the weights of classes, in which ignored rows
don't count, is the sum over a tile by the weight of all rows, which is computed from the whole target before.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph, Node

from roundpipe.core.modes import Modes
from roundpipe.fx.operations import NamedCall

BY_WEIGHT = (F.cross_entropy, F.nll_loss)
"""Their mean is by the weights of classes, over the targets that are not ignored."""
_BY_ELEMENT = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.kl_div,
)
OF_MODULES: dict[type[nn.Module], tuple[Any, tuple[str, ...]]] = {
    nn.CrossEntropyLoss: (F.cross_entropy, ("weight", "ignore_index", "label_smoothing")),
    nn.NLLLoss: (F.nll_loss, ("weight", "ignore_index")),
    nn.MSELoss: (F.mse_loss, ()),
    nn.L1Loss: (F.l1_loss, ()),
    nn.SmoothL1Loss: (F.smooth_l1_loss, ("beta",)),
    nn.HuberLoss: (F.huber_loss, ("delta",)),
    nn.KLDivLoss: (F.kl_div, ("log_target",)),
    nn.BCEWithLogitsLoss: (F.binary_cross_entropy_with_logits, ("weight", "pos_weight")),
}
"""The function that a module calls, and its attributes that it gives it."""


@dataclass(frozen=True, slots=True)
class RowLoss:
    """A node that reduces a loss of rows."""

    function: Any
    arguments: dict[str, Any]
    """By name, for one value per row; nodes among them."""
    reduction: str
    """``"sum"``, ``"mean"``, or ``"batchmean"``: the sum over the first dimension's size."""
    modes: Modes | None = None

    @classmethod
    def of(cls, node: Node, module: nn.Module | None, *, may_hold: bool = False) -> RowLoss | None:
        """The loss that a node computes, if it is one that is known.

        Args:
            module: what a ``call_module`` calls.
            may_hold: also if the module has a tensor, such as weights of classes, which is among the arguments then.
        """
        target: Any = node.target
        modes: Modes | None = None
        kwargs: dict[str, Any] = dict(node.kwargs)
        if isinstance(target, NamedCall):
            target, modes = target.function, target.modes
        if module is not None:
            if type(module) not in OF_MODULES:
                return None
            target, names = OF_MODULES[type(module)]
            kwargs.update((name, getattr(module, name)) for name in (*names, "reduction"))
            if not may_hold and any(isinstance(value, torch.Tensor) for value in kwargs.values()):
                return None
        elif node.op != "call_function" or target not in (*BY_WEIGHT, *_BY_ELEMENT):
            return None
        arguments = dict(inspect.signature(target).bind(*node.args, **kwargs).arguments)
        reduction = arguments.pop("reduction", "mean")
        if reduction not in ("sum", "mean", "batchmean") or any(arguments.pop(name, None) is not None for name in _OLD):
            return None
        return cls(target, arguments, reduction, modes)

    def is_by_weight(self, target: Any) -> bool:
        """Whether it is a mean by the weights of classes, given its target's value."""
        is_index = isinstance(target, torch.Tensor) and not target.is_floating_point()
        return self.reduction == "mean" and self.function in BY_WEIGHT and is_index

    @property
    def target(self) -> Any:
        return self.arguments["target"]

    @property
    def per_row(self) -> Any:
        """The function that gives one value per row, of the `arguments`."""
        return NamedCall(self.function.__name__, _Unreduced(self.function), self.modes)

    def kind(self, target: Any) -> str:
        """Whether parts of tiles are added up, or averaged, given the target's value."""
        return "mean" if self.reduction == "mean" and not self.is_by_weight(target) else "sum"

    def write(self, graph: Graph, arguments: dict[str, Any], total: Node | int | None, name: str) -> Node:
        """The nodes of one tile's part; ``total``: what the sum over all rows is divided by."""
        losses = graph.call_function(self.per_row, (), arguments)
        kind = "mean" if self.reduction == "mean" and total is None else "sum"
        return graph.create_node("call_function", end_of, (losses, kind, total), name=name)

    @property
    def weight_arguments(self) -> dict[str, Any]:
        """What `weight_of` takes."""
        names = ("target", "weight", "ignore_index")
        return {name: self.arguments[name] for name in names if name in self.arguments}


def reduction_of_ctc(node: Node, module: nn.Module | None) -> str | None:
    """How a node that computes the CTC loss of samples, which has them in its second dimension, puts these together.

    Args:
        module: what a ``call_module`` calls.
    """
    if module is not None:
        return module.reduction if type(module) is nn.CTCLoss else None
    target: Any = node.target
    target = target.function if isinstance(target, NamedCall) else target
    if node.op != "call_function" or target is not F.ctc_loss:
        return None
    reduction = inspect.signature(target).bind(*node.args, **node.kwargs).arguments.get("reduction", "mean")
    return reduction if reduction in ("sum", "mean") else None


_OLD = ("size_average", "reduce")


@dataclass(frozen=True, slots=True)
class _Unreduced:
    function: Any

    def __call__(self, **arguments: Any) -> torch.Tensor:
        losses: torch.Tensor = self.function(**arguments, reduction="none")
        return losses


def end_of(losses: torch.Tensor, kind: str, total: torch.Tensor | int | None) -> torch.Tensor:
    """The sum or mean of losses in a tile, in at least single precision, or their part of a mean over all rows."""
    dtype = torch.promote_types(losses.dtype, torch.float32)
    if kind == "mean":
        return losses.mean(dtype=dtype)
    part = losses.sum(dtype=dtype)
    return part if total is None else part / total


def weight_of(target: torch.Tensor, weight: torch.Tensor | None = None, ignore_index: int = -100) -> torch.Tensor:
    """The weight by which a mean over all rows is divided: their number, or the sum of their classes' weights."""
    counted = target != ignore_index
    if weight is None:
        return counted.sum()
    return (weight[target.where(counted, 0)] * counted).sum()
