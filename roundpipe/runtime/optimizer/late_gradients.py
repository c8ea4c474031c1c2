"""Gradients that an update reads in the model's dtype, and converts piece by piece while caches hold them.

Converted as a whole they would be written to memory and read again, and take as much of it as the weights' copies.
That is for nothing as long as updates only clip them by their norm and step torch's optimizers. So they are left as
they are, which is called late, until somebody looks at one. The copies tell before: then those of this update are
converted where they are looked at, and later ones as they come home.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

from roundpipe.core.watched import LateGradientParameter, unseen, unwatch, watch
from roundpipe.runtime.weights.banks import LateGradient
from roundpipe.runtime.weights.parameter_pair import ParameterPair

LEAST_ELEMENTS = 2**22
"""Of a parameter whose gradient may be late."""
PIECE_ELEMENTS = 2**19
"""Of what is converted at once, per thread."""


class LateGradients:
    """Those of one model; one thread at a time is in an update, from `begin` to `end`, and others may look meanwhile.

    Invariant: with the lock held, a gradient is late, taken by the optimizer that steps, or converted.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._late: dict[int, ParameterPair] = {}
        """By a copy's identity, those whose gradients are late in this update."""
        self._were_seen = False
        """Whether an update has looked at one."""

    def choose(self, pairs: Sequence[ParameterPair]) -> None:
        """Say of which the next gradients may be late."""
        for pair in pairs:
            pair.may_be_late = _is_large(pair) and not self._were_seen

    def begin(self, pairs: Sequence[ParameterPair]) -> None:
        """An update of these begins."""
        with self._lock:
            for pair in pairs:
                if pair.late is not None and pair.copy is not None:
                    self._late[id(pair.copy)] = pair
                    self._show(pair)

    def end(self) -> None:
        """It is over, however it has ended: what is still late is converted, as whoever looks from now on expects."""
        with self._lock:
            for pair in self._late.values():
                self._look(pair)
            self._late.clear()

    def of(self, parameter: torch.Tensor) -> LateGradient | None:
        """A parameter's gradient, if it is late."""
        if (pair := self._late.get(id(parameter))) is None:
            return None
        with self._lock, unseen():
            if pair.late is not None and parameter.grad is not None:  # of a graph, which tells nobody
                self._look(pair)
            return pair.late

    def take(self, parameter: torch.Tensor) -> LateGradient | None:
        """Likewise; then it has none, whoever looks, until `put_back`."""
        with self._lock:
            if (late := self.of(parameter)) is not None:
                unwatch([parameter])
                self._late[id(parameter)].late = None
            return late

    def put_back(self, parameter: torch.Tensor, late: LateGradient) -> None:
        """End `take`."""
        with self._lock:
            if (pair := self._late.get(id(parameter))) is not None:
                pair.late = late
                self._show(pair)

    def look(self, parameters: Iterable[int]) -> None:
        """Somebody is about to look at gradients of these, by identity."""
        with self._lock:
            for key in self._late.keys() & parameters:
                self._look(self._late[key])

    def convert(self, parameter: torch.Tensor) -> None:
        """Let a parameter have its gradient in its own dtype, for this update."""
        with self._lock:
            if (pair := self._late.get(id(parameter))) is not None:
                self._convert(pair)

    def drop(self, parameters: Collection[int]) -> None:
        """Let these, by identity, have no gradient any more."""
        with self._lock:
            for key in self._late.keys() & parameters:
                pair = self._late.pop(key)
                pair.late = None
                unwatch([pair.copy])

    def clip(
        self,
        parameters: Sequence[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """``torch.nn.utils.clip_grad_norm_``, by which late gradients stay late; ``foreach`` is a matter of speed."""
        total = self.total_norm(parameters, float(norm_type))
        if error_if_nonfinite:
            check_norm(total)
        self.scale_to(parameters, float(max_norm), total)
        return total

    @torch.no_grad()
    def total_norm(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """The norm of all gradients of these, each a tensor's as it would be converted."""
        norms: list[torch.Tensor] = []
        for parameter in parameters:
            if (late := self.of(parameter)) is not None:
                norm = _norm_of_converted(late.gradient, norm_type, parameter.dtype)
                norms.append(norm if late.factor is None else norm * late.factor)
            elif parameter.grad is not None and parameter.grad.numel():
                norms.append(torch.linalg.vector_norm(parameter.grad, norm_type))
        return torch.linalg.vector_norm(torch.stack(norms), norm_type)

    @torch.no_grad()
    def scale_to(self, parameters: Sequence[torch.Tensor], max_norm: float, total: torch.Tensor) -> None:
        """Multiply gradients, whose norm is ``total``, so that it is ``max_norm`` at most."""
        clip_grads_with_norm_([each for each in parameters if self.of(each) is None], max_norm, total)
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        if factor == 1:
            return
        for late in filter(None, map(self.of, parameters)):
            late.factor = factor if late.factor is None else late.factor * factor

    def has(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether any of these has a late gradient."""
        return any(self.of(each) is not None for each in parameters)

    def _show(self, pair: ParameterPair) -> None:
        copy = pair.copy
        assert copy is not None
        watch([copy], functools.partial(self._look, pair), LateGradientParameter)
        if not isinstance(copy, LateGradientParameter):  # of a class of its own
            self._look(pair)

    def _look(self, pair: ParameterPair) -> None:
        """Somebody looks, in any thread: nothing is late in later updates."""
        with self._lock:
            self._were_seen |= pair.late is not None
            self._convert(pair)

    def _convert(self, pair: ParameterPair) -> None:
        with unseen(), torch.no_grad():
            pair.convert_late()
        unwatch([pair.copy])  # behind it: who looks in another thread waits at the lock till then


def piece_elements() -> int:
    """Of what is converted at once."""
    return PIECE_ELEMENTS * torch.get_num_threads()


def _is_large(pair: ParameterPair) -> bool:
    return pair.copy is not None and pair.copy.numel() >= LEAST_ELEMENTS


def _norm_of_converted(gradient: torch.Tensor, norm_type: float, dtype: torch.dtype) -> torch.Tensor:
    """In pieces: torch's own way from another dtype takes four times as long."""
    pieces = gradient.view(-1).split(piece_elements())
    memory = gradient.new_empty(pieces[0].numel(), dtype=dtype)
    norms = torch.stack([torch.linalg.vector_norm(memory[: each.numel()].copy_(each), norm_type) for each in pieces])
    return torch.linalg.vector_norm(norms, norm_type or 1)  # 0 counts elements


class FirstGradients:
    """Gradients before the first step, when it is not known whether the loop looks at the copies': if so, they come."""

    def __init__(self) -> None:
        self._copies: list[nn.Parameter] = []

    def await_look(self, pairs: Sequence[ParameterPair], bring: Callable[[], None]) -> bool:
        """Have ``bring``, a method held weakly, called before anybody looks; False: they had better be brought now."""
        if self._copies:
            return True
        copies = [copy for pair in pairs if (copy := pair.copy) is not None]
        are_any_converted = any(_is_large(pair) and not pair.passes_gradient_on for pair in pairs)
        if not are_any_converted or any(type(each) is not nn.Parameter or each.grad is not None for each in copies):
            return False
        method = weakref.WeakMethod(bring)

        def before_look() -> None:
            if (found := method()) is not None:
                found()

        watch(copies, before_look, LateGradientParameter)
        self._copies = copies
        return True

    def end(self) -> bool:
        """Nobody is told any more; whether somebody would have been."""
        copies, self._copies = self._copies, []
        unwatch(copies)
        return bool(copies)


def check_norm(total: torch.Tensor) -> None:
    """Raise a `RuntimeError` if gradients can't be clipped by their norm."""
    if not total.isfinite():
        raise RuntimeError(f"clip_grad_norm_: the norm of the gradients is {float(total)}; they can't be clipped by it")
