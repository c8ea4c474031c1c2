"""For each kind of operator, the rule by which rows of its inputs become rows of its results; see `rows`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch

from roundpipe.core.tiling import Axes, Rows
from roundpipe.fx.sizes import flat_tensors

Sum = str
"""``"sum"`` or ``"mean"``: of a result without rows, how it comes from all rows."""
Found = Rows | Sum | None
"""What is known about one result; None: nothing."""


class NotRowwise(Exception):
    """Why an operator, as it was called, mixes rows, or is not known not to."""


class AlongRows(NotRowwise):
    """It works along rows."""

    def __init__(self) -> None:
        super().__init__("it works along rows")


class Watch(Protocol):
    """What a rule asks of the run that it is part of."""

    sizes: Sequence[int]
    is_outermost: bool
    """Whether rows may count a dimension as its outer part alone: what one row has of it lies together."""

    def found(self, tensor: torch.Tensor) -> Found: ...

    def rows(self, tensor: torch.Tensor) -> Rows: ...

    def take_in_rows(self, tensor: torch.Tensor, rows: Rows) -> None: ...

    def check(self, rows: Rows) -> None: ...


class OperatorArguments:
    """Those of one call of an operator, by name."""

    def __init__(self, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
        self.func = func
        arguments = func._schema.arguments
        self.values = {
            argument.name: args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
            for index, argument in enumerate(arguments)
        }
        self.first: Any = args[0] if args else None
        self.inputs = flat_tensors(args, kwargs)
        self.output = outputs[0]

    def dims(self, name: str = "dim") -> list[int]:
        """An argument that names dimensions of the first; all if it names none."""
        value, number = self.values[name], self.first.dim()
        if value is None or value == []:
            return list(range(number))
        return [dim % max(number, 1) for dim in (value if isinstance(value, (list, tuple)) else [value])]


class OperatorCall(OperatorArguments):
    """One call of an operator on rows."""

    def __init__(self, watch: Watch, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
        super().__init__(func, args, kwargs, outputs)
        self.watch = watch

    def rows(self) -> Rows:
        """Of the first argument."""
        if not isinstance(self.first, torch.Tensor):
            raise NotRowwise("its first argument is no tensor")
        return self.watch.rows(self.first)

    def only_first(self) -> Rows:
        """The same; no other argument may have rows."""
        if any(isinstance(self.watch.found(tensor), tuple) for tensor in self.inputs if tensor is not self.first):
            raise NotRowwise("its other arguments have rows")
        return self.rows()

    def aligned(self, tensors: Sequence[torch.Tensor], rows: Rows) -> Rows:
        """The rows of a result that some tensors, and a part with known rows, are broadcast to."""
        result: list[Axes | None] = list(rows)
        for tensor in tensors:
            offset = len(result) - tensor.dim()
            for dim, axes in enumerate(self.watch.rows(tensor), offset):
                if axes is not None and result[dim] not in (None, axes):
                    raise NotRowwise("it combines different rows")
                result[dim] = axes if axes is not None else result[dim]
        for tensor in tensors:
            wanted = tuple(result[len(result) - tensor.dim() :])
            own = self.watch.rows(tensor)
            expected = tuple(axes if size != 1 else None for axes, size in zip(wanted, tensor.shape, strict=True))
            if own != expected:
                if any(own):
                    raise NotRowwise("it combines rows with other dimensions")
                self.watch.take_in_rows(tensor, expected)
        return tuple(result)


Rule = Callable[[OperatorCall], Found | list[Found]]


def _without(rows: Rows, dims: Collection[int]) -> Rows:
    """The same rows; none of these dimensions may count them."""
    if any(rows[dim] is not None for dim in dims):
        raise AlongRows
    return rows


def pointwise(call: OperatorCall) -> Found:
    """Elements of the same place after broadcasting."""
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in call.inputs))
    if shape != call.output.shape:
        raise NotRowwise("its result is no broadcast of its inputs")
    return call.aligned(call.inputs, (None,) * len(shape))


def _keeping(call: OperatorCall) -> Found:
    return call.only_first()


def _along(call: OperatorCall) -> Found:
    """Keeps the shape; works along some dimensions."""
    return _without(call.only_first(), call.dims())


def _reduction(call: OperatorCall) -> Found:
    if "other" in call.values:
        return pointwise(call)
    rows = call.only_first()
    dims = call.dims() if "dim" in call.values else list(range(len(rows)))
    keeps = bool(call.values.get("keepdim", False))
    left = tuple(axes if dim not in dims else None for dim, axes in enumerate(rows))
    if any(rows[dim] is not None for dim in dims):
        if call.func._opname not in ("sum", "mean") or any(left):
            raise AlongRows
        call.watch.check(rows)
        return str(call.func._opname)
    return left if keeps else tuple(axes for dim, axes in enumerate(rows) if dim not in dims)


def _product(call: OperatorCall) -> Found:
    *bias, left, right = call.inputs
    a, b = call.watch.rows(left), call.watch.rows(right)
    if a[-1] is not None or b[-2] is not None:
        raise NotRowwise("it sums over rows")
    if a[-2] is not None and b[-1] is not None:
        raise NotRowwise("it combines every row with every other")
    if len(a) == 3:
        pair = [(left, a), (right, b)]
        batch = a[0] or b[0]
        for tensor, rows in pair:
            if rows[0] != batch:
                if any(rows):
                    raise NotRowwise("it combines different rows")
                call.watch.take_in_rows(tensor, (batch, None, None))
        return call.aligned(bias, (batch, a[-2], b[-1]))
    return call.aligned(bias, (a[-2], b[-1]))


def _linear(call: OperatorCall) -> Found:
    return (*_without(call.only_first(), [call.first.dim() - 1])[:-1], None)


def _norm(call: OperatorCall) -> list[Found]:
    rows, number = call.only_first(), len(call.values["normalized_shape"])
    _without(rows, range(len(rows) - number, len(rows)))
    return [rows] * (3 if "layer" in call.func._opname else 2)


def _view(call: OperatorCall) -> Found:
    """Each dimension of the result must be one of the input, a split of one, or all of the rows.

    Where rows are outermost it may also be all rows with dimensions behind them.
    """
    rows, sizes, is_outermost = call.only_first(), call.watch.sizes, call.watch.is_outermost
    atoms: list[tuple[int, Axes | None]] = []
    for size, axes in zip(call.first.shape, rows, strict=True):
        if axes is not None:
            atoms += [(sizes[axis], (axis, axis + 1)) for axis in range(*axes)]
            if is_outermost and (inner := size // math.prod(sizes[slice(*axes)])) > 1:
                atoms.append((inner, None))
        elif size != 1:
            atoms.append((size, None))
    atoms.reverse()
    result: list[Axes | None] = []
    for size in call.output.shape:
        taken: Axes | None = None
        left = size
        while left > 1:
            if not atoms or (taken is not None and atoms[-1][1] is None and not is_outermost):
                raise NotRowwise("it merges rows with other dimensions")
            atom, axes = atoms.pop()
            if axes is not None:
                is_next = taken is None and left == size or taken is not None and taken[1] == axes[0]
                if not is_next or left % atom:
                    raise NotRowwise("it splits or reorders rows")
                taken = (taken[0] if taken is not None else axes[0], axes[1])
                left //= atom
            elif left % atom == 0:
                left //= atom
            elif atom % left == 0:
                atoms.append((atom // left, None))
                left = 1
            else:
                raise NotRowwise("it regroups dimensions")
        result.append(taken)
    return tuple(result)


def _expand(call: OperatorCall) -> Found:
    rows = call.only_first()
    return (None,) * (call.output.dim() - len(rows)) + rows


def _repeat(call: OperatorCall) -> Found:
    rows, repeats = call.only_first(), call.values["repeats"]
    offset = len(repeats) - len(rows)
    return (None,) * offset + _without(rows, [dim for dim in range(len(rows)) if repeats[offset + dim] != 1])


def _permute(call: OperatorCall) -> Found:
    rows = call.rows()
    return tuple(rows[dim % len(rows)] for dim in call.values["dims"])


def _transpose(call: OperatorCall) -> Found:
    rows = list(call.rows())
    first, second = (call.values["dim0"], call.values["dim1"]) if "dim0" in call.values else (0, len(rows) - 1)
    rows[first], rows[second] = rows[second], rows[first]
    return tuple(rows)


def _unsqueeze(call: OperatorCall) -> Found:
    rows = list(call.rows())
    rows.insert(call.values["dim"] % (len(rows) + 1), None)
    return tuple(rows)


def _squeeze(call: OperatorCall) -> Found:
    if "dim" not in call.values:
        raise NotRowwise("which dimensions it drops depends on the number of rows")
    rows, dims = call.rows(), call.dims()
    _without(rows, dims)
    return tuple(axes for dim, axes in enumerate(rows) if dim not in dims or call.first.shape[dim] != 1)


def _slice(call: OperatorCall) -> Found:
    rows, dim = call.rows(), call.dims()[0]
    size, start, end = call.first.shape[dim], call.values["start"] or 0, call.values["end"]
    if start == 0 and (end is None or end >= size) and call.values["step"] == 1:
        return rows
    return _without(rows, [dim])


def _select(call: OperatorCall) -> Found:
    dim = call.dims()[0]
    rows = _without(call.rows(), [dim])
    return rows[:dim] + rows[dim + 1 :]


def _concatenation(call: OperatorCall) -> Found:
    number = call.output.dim()
    dim = call.values["dim"] % number
    if call.func._opname == "stack":
        rows = call.aligned(call.inputs, (None,) * (number - 1))
        return (*rows[:dim], None, *rows[dim:])
    return _without(call.aligned(call.inputs, (None,) * number), [dim])


def _gather(call: OperatorCall) -> Found:
    """Also scatter: all tensors have the same rows, at dimensions of the same size."""
    others = [tensor for tensor in call.inputs if tensor is not call.first]
    dim = call.dims()[0]
    for tensor in others:
        sizes = zip(tensor.shape, call.first.shape, strict=True)
        if any(a != b for each, (a, b) in enumerate(sizes) if each != dim):
            raise NotRowwise("its index has another size")
    return _without(call.aligned(call.inputs, (None,) * call.first.dim()), [dim])


def _embedding(call: OperatorCall) -> Found:
    weight, indices = call.inputs
    if any(call.watch.rows(weight)) or weight.requires_grad:  # a gradient as large as the table, for each tile
        raise NotRowwise("its table has rows, or a gradient")
    return (*call.watch.rows(indices), None)


def _nll(call: OperatorCall) -> list[Found]:
    if call.values["reduction"] != 0:
        raise NotRowwise("it reduces rows")
    rows = call.rows()
    class_dim = 1 if len(rows) > 1 else 0
    _without(rows, [class_dim])
    return [call.aligned([call.values["target"]], rows[:class_dim] + rows[class_dim + 1 :]), None]


def _pad(call: OperatorCall) -> Found:
    rows, pad = call.rows(), call.values["pad"]
    padded = [len(rows) - 1 - index // 2 for index, size in enumerate(pad) if size != 0]
    return _without(rows, padded)


def _flip(call: OperatorCall) -> Found:
    return _without(call.rows(), call.dims("dims"))


def _loss(call: OperatorCall) -> Found:
    if call.values["reduction"] != 0:
        raise NotRowwise("it reduces rows")
    return pointwise(call)


def _by_samples(call: OperatorCall) -> Found:
    """Convolutions, pooling and resizing: of each sample by itself, in the first dimension."""
    rows = call.only_first()
    if not call.watch.is_outermost or any(rows[1:]):
        raise NotRowwise("it takes each sample as a whole")
    return (rows[0], *(None,) * (call.output.dim() - 1))


def _named(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: dict[str, Rule] = {
    **_named(pointwise, "where masked_fill copy addcmul addcdiv lerp"),
    **_named(
        _keeping,
        "_to_copy clone detach alias lift_fresh native_dropout bernoulli fill zero normal uniform exponential "
        "empty_like zeros_like ones_like full_like rand_like randn_like",
    ),
    **_named(_along, "_softmax _log_softmax cumsum cumprod logcumsumexp sort topk glu"),
    **_named(
        _reduction,
        "sum mean amax amin max min prod any all argmax argmin logsumexp var std var_mean linalg_vector_norm norm "
        "nansum median",
    ),
    **_named(_product, "mm bmm addmm baddbmm"),
    **_named(_linear, "linear"),
    **_named(_norm, "native_layer_norm _fused_rms_norm"),
    **_named(_view, "view _unsafe_view reshape _reshape_alias"),
    **_named(_expand, "expand"),
    **_named(_repeat, "repeat"),
    **_named(_permute, "permute"),
    **_named(_transpose, "transpose t"),
    **_named(_unsqueeze, "unsqueeze"),
    **_named(_squeeze, "squeeze"),
    **_named(_slice, "slice"),
    **_named(_select, "select unbind"),
    **_named(_along, "split split_with_sizes"),
    **_named(_concatenation, "cat stack"),
    **_named(_gather, "gather scatter scatter_add"),
    **_named(_embedding, "embedding"),
    **_named(_nll, "nll_loss_forward nll_loss2d_forward"),
    **_named(_pad, "constant_pad_nd"),
    **_named(_flip, "flip roll"),
    **_named(
        _by_samples,
        "convolution max_pool2d_with_indices avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d "
        "upsample_nearest1d upsample_nearest2d upsample_linear1d upsample_bilinear2d upsample_bicubic2d "
        "reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d",
    ),
    **_named(_loss, "mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits"),
}
