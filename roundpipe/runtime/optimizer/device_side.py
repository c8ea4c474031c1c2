"""The optimizer's side on a device, while the weights of a model live there (`roundpipe.runtime.weights.twins`).

The copies stay the same objects, since the user's optimizer has them: only their memory moves, and the states that
torch's optimizers have of them follow. An update then gives its work to the device, behind the round's; the next
weights are written into the twins between two rounds, as they are into the host's weights otherwise, so that staleness
is the same. The host's weights follow when somebody is about to read them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from roundpipe.core import trees
from roundpipe.core.contexts import contextmanager
from roundpipe.core.errors import ConfigError, enumerated
from roundpipe.core.watched import unseen
from roundpipe.runtime.device.backend import Event, Move, moved_at_once
from roundpipe.runtime.optimizer.foreseen import num_states
from roundpipe.runtime.optimizer.plain_loop import PlainSteps
from roundpipe.runtime.optimizer.temporaries import bytes_of_unknown, temporary_bytes
from roundpipe.runtime.weights.parameter_pair import ParameterPair
from roundpipe.runtime.weights.shard import OF_THE_WHOLE
from roundpipe.runtime.weights.twin_group import Tenants, TwinGroup


class DeviceSteps(PlainSteps):
    """What an `OptimizerSide` does to bring its copies to a device, and home."""

    _twins: TwinGroup | None

    def __init__(self, twins: TwinGroup | None) -> None:
        super().__init__()
        self._twins = twins
        self._given: Sequence[Event] = ()
        """After what the latest update gave to devices."""
        self._is_foreseen = False
        """Whether it was known before the first step which optimizers make it."""
        self._moved: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[Any, int]] = weakref.WeakKeyDictionary()
        """Of optimizers, the states that were brought to where their copies are, and how many."""

    @property
    def has_twins(self) -> bool:
        """Whether the model's weights live on a device."""
        return self._twins is not None and bool(self._twins)

    @property
    def may_have_twins(self) -> bool:
        """Whether they could: the loop updates by `RoundPipe.step`, by optimizers that leave the model alone."""
        is_stepped = self._loop == "steps" or (self._loop == "unknown" and self._is_foreseen)
        is_plain = self._twins is not None and self._ranks is None and is_stepped
        return is_plain and not (self._closed or self._evaluates or self._runner.is_inside or self._pairs.is_aside)

    @property
    def is_ahead(self) -> bool:
        """Whether the host's weights are behind those on the device."""
        return any(pair.twin is not None and pair.twin.is_ahead for pair in self._pairs)

    def lives_there(self, parameter: torch.Tensor) -> bool:
        """Whether one of the model's parameters lives on a device."""
        return self._twins is not None and self._twins.get(parameter) is not None

    @property
    def homes(self) -> Mapping[int, int]:
        """The model's parameters that live on a device, by their identities, and the worker whose it is."""
        return {} if self._twins is None else self._twins.homes

    @property
    def _is_split(self) -> bool:
        """Whether some copies are on the device and some on the host."""
        return self.has_twins and any(pair.copy is not None and not pair.is_away for pair in self._pairs)

    def device_bytes(self, parameters: Collection[torch.Tensor]) -> int:
        """What copies of these with their gradients and states would take of a device, and an update besides; or do."""
        self.rest()
        pairs = [pair for pair in self._pairs if pair.parameter in parameters]
        copies = {id(pair.copy): pair.copy for pair in pairs if pair.copy is not None}
        others, num_bytes, temporaries_bytes = dict(copies), 2 * sum(copy.nbytes for copy in copies.values()), 0
        for optimizer in self._runner.options.optimizers:
            of_it = [each for group in optimizer.param_groups for each in group["params"] if id(each) in copies]
            in_pieces = self._runner.pieces.suit(optimizer)
            num_bytes += _states_bytes(optimizer, of_it) if optimizer.state else _foreseen_bytes(optimizer, copies)
            temporaries_bytes = max(temporaries_bytes, temporary_bytes(optimizer, of_it, in_pieces=in_pieces))
            for each in of_it:
                others.pop(id(each), None)
        unknown_bytes = bytes_of_unknown([copy.nbytes for copy in others.values()])
        return num_bytes + max(temporaries_bytes, unknown_bytes)  # which are made one after the other

    def begin_twins(self, tenants: Mapping[int, Tenants]) -> None:
        """Let these live on the devices of workers from now on, beside whose weights are their `device_bytes`.

        What is raised changes nothing.

        Raises:
            DeviceMemoryError: there is no room, also a `torch.OutOfMemoryError`.
        """
        assert self._twins is not None
        self._rest("a step")
        pairs = self._pairs.with_new()
        self._pairs.make_copies(pairs)  # or nobody shows the gradients of those that have none
        pair_of = {id(pair.parameter): pair for pair in pairs}
        rooms: dict[int, Tenants] = {}
        for worker, (parameters, beside_bytes) in tenants.items():
            passed_on = [pair.copy for each in parameters if (pair := pair_of[id(each)]).passes_gradient_on]
            # gradients that are the copies' as they are count as the model's already
            beside_bytes -= sum(copy.nbytes for copy in passed_on if copy is not None)
            rooms[worker] = Tenants(parameters, beside_bytes)
        self._twins.begin(rooms)
        try:
            self._updates.run(pairs, self._begin_now)
        except BaseException:
            self.come_home()
            raise

    def _begin_now(self, pairs: Sequence[ParameterPair]) -> None:
        assert self._twins is not None
        with self._twins.activate(), torch.no_grad(), self._twins.moving() as move:
            self._take_copies(pairs, move)
            for pair in pairs:
                pair.begin_twin(self._twins.get(pair.parameter))
            for optimizer in self._runner.options.optimizers:
                self._move_states(optimizer, move)

    def _take_copies(self, pairs: Sequence[ParameterPair], move: Move = moved_at_once) -> None:
        """Bring the copies to the device of parameters that live there, if they are not there yet."""
        if self._twins is not None and self._twins:
            for pair in pairs:
                if not pair.is_away and (twin := self._twins.get(pair.parameter)) is not None:
                    pair.move_copy(twin.weights.device, move, is_away=True)

    def come_home(self, *, with_copies: bool = True) -> None:
        """Let the host have everything again: the weights of the last round, gradients, the copies and their states."""
        if self.has_twins:
            self._rest("a step on the host")
            self._updates.run(list(self._pairs), self._come_home_now, with_copies)

    def _come_home_now(self, pairs: Sequence[ParameterPair], with_copies: bool) -> None:
        assert self._twins is not None
        with self._twins.activate(), torch.no_grad(), self._twins.moving() as move:
            self._settle_home(pairs)
            for pair in pairs:
                pair.end_twin()
                if with_copies:
                    pair.move_copy(pair.parameter.device, move, is_away=False)
            for optimizer in self._runner.options.optimizers:
                self._move_states(optimizer, move)
        self._twins.end()

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """A context for work on copies and twins.

        Where one worker of a device gets all the work, the others' streams wait for it at the end. What is let go of
        inside may be theirs, and must not be given to what they do next before they wait.
        """
        if self._twins is None:
            yield
            return
        held = self._gradients_there() if self._twins.share_devices else []
        with self._twins.activate():
            yield
        held.clear()

    def _gradients_there(self) -> list[torch.Tensor | None]:
        """Those of twins, and of copies."""
        with unseen():
            copies = [pair.copy.grad for pair in self._pairs if pair.copy is not None and pair.is_away]
            return [*copies, *(pair.twin.weights.grad for pair in self._pairs if pair.twin is not None)]

    def _run_there(self, update: Callable[[], Any]) -> Any:
        """Run an update; its work is given to the device, and not waited for.

        What the caller gives to a stream of its own later runs behind that. Others wait: `_finish_there`.
        """
        try:
            with self._on_device():
                return update()
        finally:
            if self._twins is not None:
                self._given = self._twins.record()
                if not self._updates.is_current:
                    self._twins.precede_caller()

    def _finish_there(self) -> None:
        """Return when devices have done what updates gave to them."""
        for given in self._given:
            given.synchronize()

    def _show(self, pairs: Sequence[ParameterPair]) -> None:
        """Let the host's parameters have the latest weights and show gradients, once the device has done its work."""
        with self._on_device(), torch.no_grad():
            self._settle_home(pairs)
            for pair in pairs:
                pair.write_host()
                pair.show_gradient()
        for given in self._twins.record() if self._twins is not None else ():
            given.synchronize()

    def _settle_home(self, pairs: Sequence[ParameterPair]) -> None:
        """Return when the host's parameters have followed those on the device, if they do."""
        if self._twins is not None and self._twins.finish_following():
            for pair in pairs:
                pair.has_followed()

    def _clear(self, set_to_none: bool, of_copies: bool | None = None) -> None:
        with self._on_device():
            self._pairs.zero_grad(set_to_none, of_copies)

    def rest(self) -> None:
        """Return when no round and no update is under way, for a plan."""
        self._rest("a plan")

    def _rest(self, waiter: str) -> None:
        """Return when no round and no update is under way."""
        self._steps.wait_idle()
        self._updates.wait(waiter)

    def before_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """It is about to step; its states may have been loaded or made where its parameters are no more."""
        if self._runner.is_inside:
            self._know(optimizer)
            known, number = self._moved.get(optimizer, (None, 0))
            if self.has_twins and not (known is optimizer.state and number == len(optimizer.state)):
                self._move_states(optimizer)
            self._runner.pieces.away = {id(pair.copy) for pair in self._pairs if pair.is_away}

    def _know(self, optimizer: torch.optim.Optimizer) -> None:
        """It steps in ``step_fn``, or will."""
        if self._runner.options.steps(optimizer):
            on_host = weakref.WeakMethod(self._state_on_host)
            optimizer.register_state_dict_post_hook(
                lambda optimizer, state: None if (method := on_host()) is None else method(state)
            )

    def _state_on_host(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """What ``state_dict()`` gives, in tensors of the host: it may be loaded where there is no such device."""
        if not self.has_twins or self._runner.is_inside:
            return None
        assert self._twins is not None
        with self._twins.moving() as move:
            host = torch.device("cpu")
            return {**state, "state": {key: _moved(value, host, move) for key, value in state["state"].items()}}

    def _move_states(self, optimizer: torch.optim.Optimizer, move: Move = moved_at_once) -> None:
        """Bring an optimizer's states of copies to where these are."""
        copies, host = {id(pair.copy) for pair in self._pairs if pair.copy is not None}, torch.device("cpu")
        for group in optimizer.param_groups:
            counts_there = bool(group.get("fused") or group.get("capturable"))
            for parameter in group["params"]:
                if id(parameter) in copies and (state := optimizer.state.get(parameter)):
                    device = parameter.device
                    for name, value in state.items():
                        target = host if name in OF_THE_WHOLE and not counts_there else device
                        if not isinstance(value, torch.Tensor) or value.device != target:
                            state[name] = _moved(value, target, move)
        self._moved[optimizer] = optimizer.state, len(optimizer.state)

    def gradients_aside(self) -> AbstractContextManager[None]:
        """A context in which gradients that come home are thrown away; those that are there stay as they are."""
        self._wait_for_gradients("a backward for inputs alone")
        return self._pairs.gradients_aside()

    def gradients_scaled(self, scale: Callable[[], float]) -> AbstractContextManager[None]:
        """A context whose gradients are multiplied by ``scale()`` at its end, when they join those that are there."""
        self._wait_for_gradients("a mean over several rounds")
        return self._pairs.gradients_scaled(scale)

    def _wait_for_gradients(self, who: str) -> None:
        self._steps.finish()
        self.come_home()
        self._gates.gradients.wait([pair.parameter for pair in self._pairs], who)

    def _begin_there(self) -> None:
        """A call begins: what it gives to the device runs behind what the caller's thread has given, such as clipping.

        Raises a `ConfigError` if the host's weights were written while they were behind.
        """
        if self.has_twins:
            assert self._twins is not None
            self._twins.follow_caller()
        written = [pair for pair in self._pairs if pair.is_written] if self.is_ahead else []
        for pair in written:
            pair.is_written = False
        if written:
            raise ConfigError(
                f"{enumerated([pair.names[0] for pair in written])}: written while the latest weights were on the "
                "device, with residency='full'. Call synchronize() before weights are read or written one by one"
            )


def _states_bytes(optimizer: torch.optim.Optimizer, copies: Sequence[torch.Tensor]) -> int:
    """Of an optimizer's states of copies; those that have none yet will get as much as any parameter has."""
    states = optimizer.state
    sizes_bytes = {each: sum(tensor.nbytes for tensor in trees.tensors(state)) for each, state in states.items()}
    share = max((size / max(each.nbytes, 1) for each, size in sizes_bytes.items()), default=0.0)
    return sum(sizes_bytes[each] if each in sizes_bytes else math.ceil(share * each.nbytes) for each in copies)


def _foreseen_bytes(optimizer: torch.optim.Optimizer, copies: Collection[int]) -> int:
    """The states of copies, given by their ids, that an optimizer will make in its first step, as far as is known."""
    return sum(
        (num_states(optimizer, group) or 0) * each.nbytes
        for group in optimizer.param_groups
        for each in group["params"]
        if id(each) in copies
    )


def _moved(value: Any, device: torch.device, move: Move) -> Any:
    """A state with its tensors on a device."""
    if isinstance(value, torch.Tensor):  # looked at for each parameter before each step
        return value if value.device == device else move(value, device)
    if not any(tensor.device != device for tensor in trees.tensors(value)):
        return value
    return trees.map_tensors(value, lambda tensor: tensor if tensor.device == device else move(tensor, device))
