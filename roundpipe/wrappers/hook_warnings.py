"""Warnings of hooks that make something else of microbatches than of the whole batch.

Hooks of parameters, where what they make of parts of a gradient does not add up; and hooks of modules and activations,
where the last microbatch's tensors take the place of those before, as they do in a loss function that runs as it is.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.caller import warn
from roundpipe.effects.handing import Places
from roundpipe.effects.places import Place, package_of
from roundpipe.effects.snapshot import PythonSnapshot, snapshot_of_hooks
from roundpipe.effects.uses import forward_hooks, function_of, hooked_modules
from roundpipe.fx.passes.gradient_hooks import adds_up
from roundpipe.fx.world import TensorHook
from roundpipe.runtime.engine.chain_record import code_of
from roundpipe.runtime.engine.spec import Call
from roundpipe.runtime.microbatch.leaves import batched_leaf
from roundpipe.runtime.weights.frozen_layers import hooks_of

_BY_OUTPUT = (
    "retain_grad() of an output: its .grad gets what comes to this output itself, and not what comes to other outputs, "
    "which the model may have computed from it. Take such gradients by a hook inside the model, or run the layers "
    "behind it outside of the compiled model"
)
MOST_LOOKS = 4
"""At what a hook leaves, in each mode: to find what it can reach takes a while."""
_OF_INTEGRATIONS = frozenset({"accelerate", "peft", "roundpipe", "torch", "transformers"})
"""Packages whose own hooks keep nothing for the user."""
_BY_HOOK = (
    "a forward hook left tensors of the last of {number} microbatches there, not those of the batch. Return them from "
    "forward, or set RoundPipeRunConfig(num_microbatch=1)"
)
_BY_BACKWARD_HOOK = (
    "a hook of the backward left tensors of the last of {number} microbatches there, not those of the batch. Append "
    "them to a list, which gets those of all, or set RoundPipeRunConfig(num_microbatch=1)"
)
_BY_LOSS = (
    "loss_fn left the value of the last of {number} microbatches, not that of the batch. Append to a list, which gets "
    "the values of all, or set RoundPipeRunConfig(num_microbatch=1)"
)
"""Of one that has run as it is. What one leaves whose graph has run is put there later, and looked at there."""


class HookWarnings:
    """Of one model; each hook of a parameter is looked at once, and of these one is told of."""

    looks_at_kept = True
    """Whether what forward hooks leave is looked at, unless somebody else does that."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen: dict[int, Any] = {}
        self._is_over = self._has_told_of_outputs = False
        self._looks: Counter[tuple[Any, int, bool, bool]] = Counter()
        """How often a forward hook or a loss was looked at: by its code, its place among those of it, and mode."""
        self._num_looks_at_backward = 0
        self._look_behind_backward: Callable[[], None] | None = None
        """The backward of a ``forward`` comes later: before the next call it is over."""
        self._told: dict[tuple[str, int, Any], Place] = {}
        """By identity."""

    def look_at_outputs(self, outputs: Any) -> Callable[[], None] | None:
        """What to call when a backward begins, which warns, once, of outputs that keep their gradients."""
        tensors = [tensor for tensor in trees.tensors(outputs) if tensor.requires_grad]
        if self._has_told_of_outputs or len(tensors) < 2:
            return None
        given = [weakref.ref(tensor) for tensor in tensors]

        def look() -> None:
            kept = any(tensor.retains_grad for tensor in (each() for each in given) if tensor is not None)
            if kept and not self._has_told_of_outputs:
                self._has_told_of_outputs = True
                warn(_BY_OUTPUT)

        return look

    def begin_calls(self, calls: Sequence[Call], *, has_backward: bool) -> Callable[[], None]:
        """Look at the layers of calls whose microbatches are those of one batch; gives what is called behind them."""
        if has_backward:
            parameters = itertools.chain.from_iterable(calls[0].parameters)
            self.look(parameters, sum(call.num_microbatches for call in calls))
        self._end_backward()
        arguments = [pair for call in calls for pair in zip(call.args, call.kwargs, strict=True)]
        if has_backward and self._num_looks_at_backward < MOST_LOOKS:
            self._num_looks_at_backward += 1
            own = itertools.chain.from_iterable(backward_hooks(call.chain) for call in calls)
            self._look_behind_backward = self.begin(own, arguments, None, text=_BY_BACKWARD_HOOK)
        look = self.begin((hook for call in calls for _, _, hook in call.hooks), arguments, calls[0].loss_fn)

        def look_at_all() -> None:
            look()
            if calls[0].loss_fn is not None:
                self._end_backward()

        return look_at_all

    def _end_backward(self) -> None:
        look, self._look_behind_backward = self._look_behind_backward, None
        if look is not None:
            look()

    def begin_on_host(self, arguments: Sequence[Any], loss_fn: Any = None) -> Callable[[], None]:
        """The same of a whole model that runs on the host, given the arguments of microbatches."""
        hooks = (hook for module in hooked_modules(self._model) for hook in forward_hooks(module))
        return self.begin(hooks, arguments, loss_fn)

    def begin(
        self, hooks: Iterable[Any], arguments: Sequence[Any], loss_fn: Any, text: str = _BY_HOOK
    ) -> Callable[[], None]:
        """Look at what hooks and a loss function have; what it gives warns of what they have left since, in a text.

        Args:
            arguments: of each microbatch.
            loss_fn: is looked at, too. It gets what hooks have left of each microbatch, so that this counts as used.
        """
        last = batched_leaf(arguments[-1]) if len(arguments) > 1 and self.looks_at_kept else None
        if not isinstance(last, torch.Tensor):
            return lambda: None
        hooks, losses = list(hooks), [] if loss_fn is None else [loss_fn]
        new, losses = self._to_look_at(hooks), self._to_look_at(losses)
        if not new and not losses:
            return lambda: None
        if loss_fn is not None:
            own = _not_read_by([loss_fn], hooks)
            if len(own) < len(hooks) or not Places.of(loss_fn).left:  # what it gets of hooks is not its own
                losses = []
            new = [hook for hook in new if any(hook is each for each in own)]
        kept = _KeptSamples(last, arguments)
        before = [(text, own, snapshot_of_hooks(own)) for text, own in ((text, new), (_BY_LOSS, losses)) if own]

        def look() -> None:
            for text, own, snapshot in before:
                self._look_at_kept(text, own, snapshot, kept)

        return look

    def _to_look_at(self, functions: Iterable[Any]) -> list[Any]:
        """Those of the user's that were not looked at often enough in this mode; each call may make them anew."""
        same = Counter[Any]()
        found = []
        for function in functions:
            code = code_of(function)
            key = code, same[code], self._model.training, torch.is_grad_enabled()
            same[code] += 1
            self._looks[key] += 1
            if self._looks[key] <= MOST_LOOKS and package_of(function_of(function)) not in _OF_INTEGRATIONS:
                found.append(function)
        return found

    def _look_at_kept(self, text: str, hooks: Sequence[Any], before: PythonSnapshot, kept: _KeptSamples) -> None:
        found = [place for place in before.diff() if place.identity not in self._told and kept.is_last_in(place)]
        own = _not_read_by(self._model.modules(), hooks) if found and text is not _BY_BACKWARD_HOOK else hooks
        if len(own) < len(hooks):  # a forward takes it there
            places = {place.identity for place in snapshot_of_hooks(own).reach.places}
            found = [place for place in found if place.identity in places]
        if not found:
            return
        self._told.update((place.identity, place) for place in found)
        words = list(dict.fromkeys(map(_words_of, found)))
        more = f" and {len(words) - 3} more places" if len(words) > 3 else ""
        warn(f"{', '.join(words[:3])}{more}: {text.format(number=kept.num_microbatches)}")

    def look(self, parameters: Iterable[torch.Tensor], num_microbatches: int) -> None:
        """Warn of those that these parameters have, in a call of so many microbatches."""
        if num_microbatches < 2 or self._is_over:
            return
        for parameter in parameters:
            if not (parameter.requires_grad and parameter._backward_hooks):
                continue
            new = [hook for hook in hooks_of(parameter) if id(hook) not in self._seen]
            self._seen.update((id(hook), hook) for hook in new)
            if any(adds_up(hook, parameter) is False for hook in new):
                self._is_over = True
                self._warn(parameter, num_microbatches)
                return

    def _warn(self, parameter: torch.Tensor, num_microbatches: int) -> None:
        name = next((name for name, each in self._model.named_parameters() if each is parameter), "a parameter")
        warn(
            f"a hook of {name} runs on the gradient of each of {num_microbatches} microbatches. The results do not add "
            "up to what it would make of the whole batch's gradient, for example because it clamps or normalises. Clip "
            "in step_fn instead, with torch.nn.utils.clip_grad_value_(model.optim_parameters(), 0.1), or set "
            "RoundPipeRunConfig(num_microbatch=1)"
        )


def backward_hooks(chain: nn.Module) -> Iterator[Any]:
    """The hooks that run in the backward of a chain's modules, and those that their forwards put onto activations."""
    for module in chain.modules():
        if module._backward_hooks or module._backward_pre_hooks:
            yield from (*module._backward_hooks.values(), *module._backward_pre_hooks.values())
        yield from (value.own for value in vars(module).values() if isinstance(value, TensorHook))


def _words_of(place: Place) -> str:
    """A place that `snapshot_of_hooks` has found; of the attributes of an object that is called, which have changed."""
    if place.words == "a hook of Module":
        return f"its {', '.join(place.changed_items())}"
    return place.words.removeprefix("a hook of Module.")


def _not_read_by(functions: Iterable[Any], hooks: Sequence[Any]) -> list[Any]:
    """Those hooks that leave nothing where functions or modules may look for it."""
    left = [(hook, Places.of(hook).left) for hook in hooks]
    read = set().union(*(Places.of(function).found for function in functions))
    return [hook for hook, places in left if read.isdisjoint(places)]


class _KeptSamples:
    """Tells which places have tensors with the rows of the last microbatch.

    Args:
        last: the tensor that tells its number of samples.
        arguments: of each microbatch.
    """

    def __init__(self, last: torch.Tensor, arguments: Sequence[Any]) -> None:
        self.num_microbatches = len(arguments)
        self._number = last.shape[0]
        self._rows = {self._number, self._number * (last.shape[1] if last.ndim > 1 else 1)}
        """Of one tensor: samples, or for example tokens."""
        firsts = map(batched_leaf, arguments)
        self._total = sum(first.shape[0] for first in firsts if isinstance(first, torch.Tensor))

    def is_last_in(self, place: Place) -> bool:
        """Whether a place that has changed got such a tensor, other than beside those of all microbatches."""
        held, now = place.held, place.now()
        if isinstance(now, dict) and isinstance(held, dict):
            new = [value for key, value in now.items() if held.get(key) is not value]
        elif isinstance(now, Iterable) and isinstance(held, Sequence) and not isinstance(now, torch.Tensor):
            before = {id(value) for value in held}
            new = [[value for value in now if id(value) not in before]]
        else:
            new = [now]
        return any(map(self._is_last, new))

    def _is_last(self, value: Any, depth: int = 0) -> bool:
        if isinstance(value, torch.Tensor):
            return bool(value.ndim) and (
                value.shape[0] in self._rows or value.ndim > 2 and value.shape[1] == self._number
            )
        if depth > 2 or not isinstance(value, (dict, list, tuple, set, deque)):
            return False
        items = list(value.values() if isinstance(value, dict) else value)
        rows = [item.shape[0] for item in items if isinstance(item, torch.Tensor) and item.ndim]
        is_of_all = not isinstance(value, dict) and sum(rows) >= self._total  # each was appended
        return not is_of_all and any(self._is_last(item, depth + 1) for item in items)
