"""Where torch's kernels for fakes do other than those for data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from roundpipe.core.contexts import contextmanager

TAKEN = torch.bfloat16
"""What kernels for fakes take that refuse other floating-point types."""


@functools.cache
def _strict() -> frozenset[Any]:
    """Operators whose kernels for fakes take one type only, and those for data others too."""
    grouped = getattr(torch.ops.aten, "_grouped_mm", None)
    return frozenset() if grouped is None else frozenset({grouped.default})


def dtype_refused(func: Any, args: Sequence[Any]) -> torch.dtype | None:
    """The type of an operator's floating-point arguments if its kernel for fakes refuses it; else None."""
    if func not in _strict():
        return None
    dtypes = {arg.dtype for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point()}
    (dtype,) = dtypes if len(dtypes) == 1 else (TAKEN,)
    return None if dtype is TAKEN else dtype


def _dropout(torchs: Any, input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Dropout that drops nothing returns its input, as it does on real tensors; torch's Python returns a copy.

    Who writes the result in place writes the input.
    """
    return torch.ops.aten.native_dropout(input, p, train)[0] if train and p != 0 else input


Cell = Callable[..., list[torch.Tensor]]
"""The states behind all steps, of what inputs and states add to the gates, and of the states before each step."""


def _recurrent(
    cell: Cell,
    input: torch.Tensor,
    states: torch.Tensor | Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """Recurrent layers that make all steps in time at once, as large as one by one, and each of all before it."""
    first = [states] if isinstance(states, torch.Tensor) else states
    steps = input.transpose(0, 1) if batch_first else input
    num_weights, num_directions = len(params) // len(first[0]), 1 + bidirectional
    last: list[list[torch.Tensor]] = []
    for layer in range(num_layers):
        outputs = []
        for index in range(layer * num_directions, (layer + 1) * num_directions):
            of_input, of_state, *rest = params[index * num_weights : (index + 1) * num_weights]
            biases = rest[:2] if has_biases else [None, None]
            gates = linear(steps, of_input, biases[0])
            before = [(gates[..., : state.shape[-1]] + state[index]).cumsum(0) for state in first]
            behind = cell(gates, linear(before[0], of_state, biases[1]), *before)
            if len(rest) % 2:  # a projection
                behind[0] = linear(behind[0], rest[-1])
            outputs.append(behind[0])
            last.append([state[-1] for state in behind])
        steps = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and layer + 1 < num_layers:
            steps = torch.dropout(steps, dropout, train)
    output = steps.transpose(0, 1) if batch_first else steps
    return output, *map(torch.stack, zip(*last, strict=True))


def _tanh_cell(gates: torch.Tensor, of_state: torch.Tensor, hidden: torch.Tensor) -> list[torch.Tensor]:
    return [(gates + of_state).tanh()]


def _relu_cell(gates: torch.Tensor, of_state: torch.Tensor, hidden: torch.Tensor) -> list[torch.Tensor]:
    return [(gates + of_state).relu()]


def _gru_cell(gates: torch.Tensor, of_state: torch.Tensor, hidden: torch.Tensor) -> list[torch.Tensor]:
    (reset, update, new), of_states = gates.chunk(3, -1), of_state.chunk(3, -1)
    reset, update = (reset + of_states[0]).sigmoid(), (update + of_states[1]).sigmoid()
    new = (new + reset * of_states[2]).tanh()
    return [(hidden - new) * update + new]


def _lstm_cell(
    gates: torch.Tensor, of_state: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor
) -> list[torch.Tensor]:
    inner, forget, new, out = (gates + of_state).chunk(4, -1)
    cell = forget.sigmoid() * cell + inner.sigmoid() * new.tanh()
    return [out.sigmoid() * cell.tanh(), cell]


_CELLS: dict[Any, Cell] = {
    torch.rnn_tanh: _tanh_cell,
    torch.rnn_relu: _relu_cell,
    torch.gru: _gru_cell,
    torch.lstm: _lstm_cell,
}


class RecurrentAtOnce(TorchFunctionMode):
    """Recurrent layers on fakes make all steps in time at once.

    Torch's code goes from step to step, which takes seconds for each layer, and serves one number of steps.
    """

    def __init__(self, is_fake: Callable[[Any], bool]) -> None:
        super().__init__()
        self._is_fake = is_fake

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cell = _CELLS.get(func)
        if cell is None or isinstance(args[2], torch.Tensor) or not self._is_fake(args[0]):  # the former: packed
            return func(*args, **(kwargs or {}))
        return _recurrent(cell, *args)


@functools.cache
def _kernels() -> list[tuple[Any, dict[Any, Any], dict[Any, Any]]]:
    """Operators with torch's own Python for them by dispatch key, and with what takes its place."""
    ours: dict[Any, Any] = {torch.ops.aten.dropout.default: _dropout}
    return [
        (each, dict(each.py_kernels), {key: functools.partial(own, torchs) for key, torchs in each.py_kernels.items()})
        for each, own in ours.items()
    ]


@contextmanager
def kernels_as_compiled() -> Iterator[None]:
    """Inside, these operators do on fakes what torch's compiled code does on real tensors."""
    try:
        for operator, _, own in _kernels():
            operator.py_kernels.update(own)
            operator._dispatch_cache.clear()
        yield
    finally:
        for operator, torchs, _ in _kernels():
            operator.py_kernels.update(torchs)
            operator._dispatch_cache.clear()
