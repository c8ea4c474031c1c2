"""Updates of large parameters in pieces that caches hold, which torch's own functions for the optimizer are run on.

Optimizers that are not fused go over whole tensors once per operation, and make whole tensors for what they compute in
between: for those of a large layer the system gives new pages at each update. In pieces they read and write memory once
and need next to none. The values are the same bit by bit, since every element is updated by itself.

It is done before torch's own step, which gets no gradients of these parameters then, but has them back behind it. So
step functions, clipping, scalers and schedulers see no difference; an optimizer with hooks, whose code would, is left
alone. So are fused ones, which read and write once by themselves, and those with tensors among their options.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from roundpipe.core import trees
from roundpipe.core.storages import is_plain
from roundpipe.core.watched import unseen
from roundpipe.runtime.optimizer import temporaries
from roundpipe.runtime.optimizer.late_gradients import LateGradients, piece_elements
from roundpipe.runtime.weights.banks import LateGradient

logger = logging.getLogger(__name__)

LEAST_ELEMENTS = 2**22
"""Of a parameter that is updated in pieces: memory of its size is given back to the system, and asked for again."""
PIECE_ELEMENTS = 2**19
"""Of a piece, at least."""
ELEMENTS_PER_THREAD = 2**17
"""Of a piece, where several threads share it."""

_OF_ALL = ("lr", "weight_decay", "maximize", "foreach")
_OF_ADAM = (*_OF_ALL, "eps", "amsgrad", "decoupled_weight_decay")
_OTHERS = {"betas", "fused", "capturable", "differentiable"}
_OPTIONS: dict[type, tuple[str, ...]] = {
    torch.optim.Adam: _OF_ADAM,
    torch.optim.AdamW: _OF_ADAM,
    torch.optim.SGD: (*_OF_ALL, "momentum", "dampening", "nesterov"),
}

States = dict[str, torch.Tensor]
Update = Callable[[list[torch.Tensor], list[torch.Tensor], Sequence[States]], None]
"""``f(values, gradients, states)``: torch's own, of parameters or parts of them."""
_Part = tuple[torch.Tensor, torch.Tensor, States]
"""A parameter, its gradient and its states."""


class PiecewiseUpdates:
    """Those of one model's ``step_fn``, which one thread at a time runs."""

    def __init__(self, late: LateGradients | None = None) -> None:
        self._late = late or LateGradients()
        self.away: Collection[int] = ()
        """Parameters on a device, by their ids: small ones are updated together, as many as make a piece."""
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Parameters that are updated, whose gradients torch's step is not to find."""
        self._taken: list[tuple[torch.Tensor, LateGradient]] = []
        """Those whose gradients were late, with these."""
        self._has_closures = False
        """Whether an optimizer was given a closure, behind which gradients are made."""
        self._logged: set[str] = set()

    def suit(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer's updates on a device are made in pieces."""
        return not (self._has_closures or _unsuited(optimizer) or _unneeded(optimizer))

    @torch.no_grad()
    def before_step(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        """An optimizer is about to step: update what can be in pieces."""
        self._has_closures |= has_closure
        with unseen():
            found = [
                (group, parameter)
                for group in optimizer.param_groups
                for parameter in group["params"]
                if self._late.of(parameter) is not None
                or parameter.grad is not None
                and (parameter.numel() >= LEAST_ELEMENTS or id(parameter) in self.away)
            ]
            if not found:
                return
            reason = "a closure makes the gradients" if has_closure else _unsuited(optimizer)
            unneeded = "" if reason else _unneeded(optimizer)
            is_any_late = self._late.has(parameter for _, parameter in found)
        self._log(type(optimizer).__name__, reason or ("" if is_any_late else unneeded))
        if reason:
            self._late.look(id(parameter) for _, parameter in found)
            return
        there: dict[int, tuple[Update, list[_Part]]] = {}
        for group, parameter in found:
            update, names = _update_of(optimizer, group)
            states = {name: each for name, each in optimizer.state.get(parameter, {}).items() if name in names}
            if not states and self._late.of(parameter):
                states = _first_states(optimizer, group, parameter, self._late)
            if len(states) < len(names) or not _is_divisible(parameter, states):
                self._late.convert(parameter)
                continue
            if (late := self._late.take(parameter)) is not None:
                self._taken.append((parameter, late))
                _update_in_pieces(update, parameter, late.gradient, states, piece_elements(), late.factor)
                continue
            gradient = parameter.grad
            if gradient is None or unneeded or not _is_divisible(parameter, {"gradient": gradient}):
                continue
            if id(parameter) not in self.away:
                _update_in_pieces(update, parameter, gradient, states, _piece_elements())
            elif parameter.numel() > temporaries.PIECE_ELEMENTS:
                _update_in_pieces(update, parameter, gradient, states, temporaries.PIECE_ELEMENTS)
            else:
                there.setdefault(id(group), (update, []))[1].append((parameter, gradient, states))
            self._hidden.append((parameter, gradient))
        for update, parts in there.values():
            for together in _together(parts):
                update(*map(list, zip(*together, strict=True)))
        for parameter, _ in self._hidden:
            parameter.grad = None

    def after_step(self) -> None:
        """It has stepped, or raised."""
        while self._hidden:
            parameter, gradient = self._hidden.pop()
            parameter.grad = gradient
        while self._taken:
            self._late.put_back(*self._taken.pop())

    def _log(self, kind: str, reason: str) -> None:
        """Say which way is taken, once for each."""
        text = (
            f"{kind} goes over whole parameters: {reason}" if reason else f"{kind} updates large parameters in pieces"
        )
        if text not in self._logged:
            self._logged.add(text)
            logger.debug("%s", text)


def _unsuited(optimizer: torch.optim.Optimizer) -> str:
    """Why an optimizer's updates are not made in pieces; empty: they are."""
    names = _OPTIONS.get(type(optimizer))
    if names is None:
        return "it is not known to update each element by itself"
    if set(optimizer.defaults) - _OTHERS != set(names):
        return "this version of torch has other options"
    if has_hooks(optimizer):
        return "it has hooks, which may look at gradients"
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if len({id(parameter) for parameter in parameters}) < len(parameters):
        return "it has a parameter twice"
    if any(each.grad is not None and each.grad.layout is not torch.strided for each in parameters):
        return "it has sparse gradients"
    for group in optimizer.param_groups:
        if group.get("capturable") or group["differentiable"]:
            return "it is capturable or differentiable"
        if trees.tensors({name: value for name, value in group.items() if name != "params"}):
            return "it has options that are tensors"
    return ""


def _unneeded(optimizer: torch.optim.Optimizer) -> str:
    """Why nothing is gained in pieces, unless gradients are late; empty: something is."""
    groups = optimizer.param_groups
    if type(optimizer) is torch.optim.SGD and not any(
        group["weight_decay"] or group["nesterov"] or group["maximize"] for group in groups
    ):
        return "it makes no tensors in between"
    return "it is fused" if any(group["fused"] for group in groups) else ""


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether others than this library hear of its steps; true if torch keeps them elsewhere by now."""
    own = [getattr(optimizer, f"_optimizer_step_{when}_hooks", [None]) for when in ("pre", "post")]
    shared = [getattr(torch_optimizer, f"_global_optimizer_{when}_hooks", ()) for when in ("pre", "post")]
    return any(own) or any(len(hooks) != 1 for hooks in shared)


def _update_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> tuple[Update, set[str]]:
    """What updates parameters of a group, and the states that it needs: a parameter has them after its first update."""
    options = {name: group[name] for name in (*_OPTIONS[type(optimizer)], "fused")}
    if isinstance(optimizer, torch.optim.SGD):
        run_sgd: Callable[..., None] = functools.partial(sgd, **options)

        def update_sgd(values: list[torch.Tensor], gradients: list[torch.Tensor], states: Sequence[States]) -> None:
            run_sgd(values, gradients, [each.get("momentum_buffer") for each in states])

        return update_sgd, {"momentum_buffer"} if group["momentum"] else set()
    beta1, beta2 = group["betas"]
    run_adam: Callable[..., None] = functools.partial(adam, beta1=beta1, beta2=beta2, **options)

    def update_adam(values: list[torch.Tensor], gradients: list[torch.Tensor], states: Sequence[States]) -> None:
        means, squares, steps = ([each[name] for each in states] for name in ("exp_avg", "exp_avg_sq", "step"))
        largest = [each["max_exp_avg_sq"] for each in states] if group["amsgrad"] else []
        run_adam(values, gradients, means, squares, largest, steps)

    return update_adam, {"step", "exp_avg", "exp_avg_sq"} | ({"max_exp_avg_sq"} if group["amsgrad"] else set())


def _first_states(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor, gradients: LateGradients
) -> States:
    """What torch makes for a parameter in its first step, without that step; empty: it does so in another way."""
    if isinstance(optimizer, torch.optim.SGD) or not hasattr(optimizer, "_init_group"):
        return {}
    if (late := gradients.take(parameter)) is None:
        return {}
    parameter.grad = torch.zeros((), dtype=parameter.dtype).expand_as(parameter)  # it asks whether there is one
    try:
        optimizer._init_group({**group, "params": [parameter]}, [], [], [], [], [], [])
    except TypeError:  # it takes something else by now
        return {}
    finally:
        parameter.grad = None
        gradients.put_back(parameter, late)
    return dict(optimizer.state.get(parameter, {}))


def _is_divisible(parameter: torch.Tensor, states: dict[str, Any]) -> bool:
    """Whether a parameter and its states lie alike in one place, so that pieces belong together."""
    tensors = [parameter, *(state for name, state in states.items() if name != "step")]
    return isinstance(states.get("step", parameter), torch.Tensor) and all(
        isinstance(each, torch.Tensor)
        and is_plain(each)
        and each.is_contiguous()
        and each.shape == parameter.shape
        and each.dtype == parameter.dtype
        and each.dtype.is_floating_point
        and each.device == parameter.device
        for each in tensors
    )


def _piece_elements() -> int:
    """Of a piece on the host."""
    return max(PIECE_ELEMENTS, ELEMENTS_PER_THREAD * torch.get_num_threads())


def _update_in_pieces(
    update: Update,
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    states: States,
    num_elements: int,
    factor: torch.Tensor | None = None,
) -> None:
    """A gradient in another dtype is converted, and multiplied by ``factor``, in pieces, too."""
    step = states.pop("step", None)
    tensors = (parameter, gradient, *states.values())
    pieces = list(zip(*(each.detach().view(-1).split(num_elements) for each in tensors), strict=True))
    is_late = gradient.dtype != parameter.dtype
    memory = parameter.new_empty(min(num_elements, parameter.numel())) if is_late else None
    for index, (values, of_gradient, *of_states) in enumerate(pieces):
        parts = dict(zip(states, of_states, strict=True))
        if memory is not None:
            of_gradient = memory[: of_gradient.numel()].copy_(of_gradient)
            if factor is not None:
                of_gradient.mul_(factor)
        if step is not None:  # each counts it
            parts["step"] = step if index + 1 == len(pieces) else step.clone()
        update([values], [of_gradient], [parts])


def _together(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """Parameters in order, in groups that are no larger than a piece."""
    group: list[_Part] = []
    num_elements = 0
    for part in parts:
        num_elements += part[0].numel()
        if group and num_elements > temporaries.PIECE_ELEMENTS:
            yield group
            group, num_elements = [], part[0].numel()
        group.append(part)
    if group:
        yield group
