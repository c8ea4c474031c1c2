"""Which operators compute every row of their results from the same row of their inputs, and where the rows then are.

Judged by what an operator is, on fakes of real sizes: `RowWatch` sees the operators below the calls of one node. A rule
says for given dimensions of rows (`Rows`, see `roundpipe.core.tiling`) which dimensions of the result count them.

Invariant: an operator without a rule, or whose rule does not hold, is not row-wise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from roundpipe.core.allocations import TorchDispatchMode
from roundpipe.core.tiling import Rows
from roundpipe.fx.passes.row_rules import RULES, Found, NotRowwise, OperatorCall, pointwise
from roundpipe.fx.sizes import flat_tensors


class RowWatch(TorchDispatchMode):
    """Follows rows through the operators of one node.

    Args:
        sizes: of the row axes, each larger than one.
        rows: the inputs with rows.
        free: inputs that may be taken whole, or where they meet rows element by element, in rows too.
        is_outermost: whether the rows, of one axis, may count a dimension as its outer part alone, as samples do where
            they are flattened with their tokens.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        sizes: Sequence[int],
        rows: Iterable[tuple[torch.Tensor, Rows]],
        free: Iterable[torch.Tensor],
        *,
        is_outermost: bool = False,
    ) -> None:
        super().__init__()
        assert not is_outermost or len(sizes) == 1
        self.sizes, self.is_outermost = sizes, is_outermost
        self.why_not = ""
        """The first reason why the node is not row-wise."""
        self.taken_in_rows: dict[int, Rows] = {}
        """By identity, the free inputs that turned out to be taken in rows."""
        self.made_bytes = 0
        self.draws_random = False
        self._found: dict[int, Found] = {id(tensor): found for tensor, found in rows}
        self._alive: list[torch.Tensor] = []
        self._free = {id(tensor) for tensor in free} - self._found.keys()
        self._taken_whole: set[int] = set()
        self._foreign = {tensor.untyped_storage()._cdata for tensor in self._inputs(rows, free)}

    @staticmethod
    def _inputs(rows: Iterable[tuple[torch.Tensor, Rows]], free: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        return [*(tensor for tensor, _ in rows), *free]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        tensors = flat_tensors(out)
        if tensors:
            self._note(func, args, kwargs, tensors)
        return out

    def found(self, tensor: torch.Tensor) -> Found:
        """What is known about a result of the node."""
        return self._found.get(id(tensor))

    def rows(self, tensor: torch.Tensor) -> Rows:
        """Where a tensor's rows are; all None if it has none."""
        found = self._found.get(id(tensor))
        return found if isinstance(found, tuple) else (None,) * tensor.dim()

    def take_in_rows(self, tensor: torch.Tensor, rows: Rows) -> None:
        """A tensor without rows meets some element by element."""
        if id(tensor) not in self._free or id(tensor) in self._taken_whole:
            raise NotRowwise("it combines rows with a tensor of the same size that has none")
        self.taken_in_rows[id(tensor)] = rows
        self._found[id(tensor)] = rows

    def _note(self, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
        inputs = flat_tensors(args, kwargs)
        self.draws_random = self.draws_random or torch.Tag.nondeterministic_seeded in func.tags
        self._alive += outputs
        storages = {tensor.untyped_storage()._cdata for tensor in inputs}
        for tensor in outputs:
            if tensor.untyped_storage()._cdata not in storages:
                self.made_bytes += tensor.nbytes
        found: Sequence[Found] = (None,) * len(outputs)
        if any(isinstance(self.found(tensor), tuple) for tensor in inputs):
            try:
                found = self._rule(func, args, kwargs, outputs)
            except NotRowwise as error:
                self.why_not = self.why_not or f"{func}: {error}"
        self._taken_whole.update(id(tensor) for tensor in inputs if self.found(tensor) is None)
        for tensor, each in zip(outputs, found, strict=True):
            before = self.found(tensor)
            if before is not None and each != before and any(tensor is value for value in inputs):
                self.why_not = self.why_not or f"{func} writes rows into what had others"
            self._found[id(tensor)] = each if each is not None else before

    def _rule(self, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> Sequence[Found]:
        call = OperatorCall(self, func, args, kwargs, outputs)
        if any(isinstance(self.found(tensor), str) for tensor in call.inputs):
            raise NotRowwise("it combines rows with a sum over all of them")
        name = func._opname if func.namespace == "aten" else str(func)
        if func._schema.is_mutable:
            self._check_writes(call)
            name = name.removesuffix("_")
        rule = RULES.get(name)
        if rule is None and torch.Tag.pointwise in func.tags:
            rule = pointwise
        if rule is None:
            raise NotRowwise("no rule for this operator")
        found = rule(call)
        result = found if isinstance(found, list) else [found] * len(outputs)
        for tensor, rows in zip(outputs, result, strict=True):
            if isinstance(rows, tuple):
                self._check(tensor, rows)
        return result

    def _check_writes(self, call: OperatorCall) -> None:
        for argument in call.func._schema.arguments:
            value = call.values[argument.name]
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor):
                if value.untyped_storage()._cdata in self._foreign:
                    raise NotRowwise("it writes into a value made elsewhere")
                if not isinstance(self.found(value), tuple):
                    raise NotRowwise("it writes rows into a tensor without")

    def check(self, rows: Rows) -> None:
        """Raise `NotRowwise` if some axis of rows is not among them, or is so twice."""
        axes = sorted(axes for axes in rows if axes is not None)
        if [axis for first, end in axes for axis in range(first, end)] != list(range(len(self.sizes))):
            raise NotRowwise("its result does not have every axis of rows once")

    def _check(self, tensor: torch.Tensor, rows: Rows) -> None:
        self.check(rows)
        for size, dim in zip(tensor.shape, rows, strict=True):
            number = size if dim is None else math.prod(self.sizes[slice(*dim)])
            if size % number if self.is_outermost else size != number:
                raise NotRowwise("its result has another number of rows")
