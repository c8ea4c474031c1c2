"""How an update is made: an exchange between the model and the optimizer, ``step_fn``, and maybe another exchange.

Asynchronous ones are made in the optimizer's thread, others in the caller's, whose exchanges that thread makes, too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

from roundpipe.runtime.optimizer.hand_over import HandOver
from roundpipe.runtime.optimizer.unasked import UnaskedSteps
from roundpipe.runtime.optimizer.update import NOT_MADE, Update
from roundpipe.runtime.profiling.host_log import HostLog
from roundpipe.runtime.ranks.exchange import Exchange, begin_exchange
from roundpipe.runtime.weights.gate import ParameterUse
from roundpipe.runtime.weights.pairs import watch_copies
from roundpipe.runtime.weights.parameter_pair import ParameterPair
from roundpipe.runtime.weights.shard import Shard

MOST_WAIT_S = 0.5
"""For a round to begin. One that takes longer is kept by more than Python."""


class UpdateSteps(UnaskedSteps):
    """What an `OptimizerSide` does to make one."""

    log: HostLog
    _hand_over: HandOver
    _shard: Shard | None

    def _update_now(
        self,
        update: Update,
        pairs: Sequence[ParameterPair],
        step_fn: Callable[[], object],
        ranks: Exchange | None,
    ) -> None:
        """An update in the calling thread."""
        self.times.begin()
        self._exchange(pairs, late=True, ranks=ranks)
        self.times.exchanged()
        try:
            update.claim.acquire()
            update.result = self._call(step_fn, update.number)
        finally:
            self._weights_changed = True
            if self._shard is None:
                self._updates.run(pairs, self._write_now)
            else:
                self._exchange(pairs, shows_gradients=True)
            self._scalers.publish()
        self.times.end(pairs)
        update.is_done = True

    def _update_behind(
        self,
        pairs: Sequence[ParameterPair],
        steps: Sequence[ParameterUse],
        step_fn: Callable[[], object],
        number: int,
        ranks: Exchange | None,
    ) -> Any:
        """An asynchronous update, in the optimizer's thread; none on the gradients of a step that failed."""
        self.times.begin()
        self._exchange_now(pairs, steps, ranks=ranks, swaps=True, late=True)
        self.times.exchanged()
        if any(step.failed for step in steps):
            for pair in pairs:
                pair.convert_late()
            return NOT_MADE
        result = self._call(step_fn, number)
        if result is not NOT_MADE:
            self._hand_over.stage(pairs)
            self.times.end(pairs)
        return result

    def _end_interrupted(self) -> None:
        """Return when nothing is left of an exchange whose caller was interrupted, nor of gradients that it took."""
        self._updates.wait_interrupted()
        if self._updates.is_idle:
            for pair in [pair for pair in self._pairs if pair.late is not None]:
                pair.convert_late()

    def _clear_copies(self, set_to_none: bool) -> None:
        """In an asynchronous ``step_fn``: clear the gradients that it has."""
        copies = frozenset(id(pair.copy) for pair in self._pairs)
        (self._runner.late.drop if set_to_none else self._runner.late.look)(copies)
        self._clear(set_to_none, of_copies=True)

    def _call(self, step_fn: Callable[[], object], number: int) -> Any:
        self._weights_changed = True
        return self._run_there(functools.partial(self._runner.run, step_fn, number, tuple(self._pairs)))

    def _exchange(
        self,
        pairs: Sequence[ParameterPair],
        shows_gradients: bool = False,
        ranks: Exchange | None = None,
        late: bool = False,
    ) -> None:
        """Latest weights into the model, gradients out of it, or into it again to be shown."""
        ranks = ranks or begin_exchange(self._ranks, pairs, self._gates, self._weights_changed, self.log)
        # inside step_fn a loss of two forwards is evaluated on weights that stay as they are
        self._updates.run(pairs, self._exchange_now, (), self._runner.is_inside, shows_gradients, ranks, False, late)

    def _exchange_now(
        self,
        pairs: Sequence[ParameterPair],
        steps: Sequence[ParameterUse] = (),
        only_behind: bool = False,
        shows_gradients: bool = False,
        ranks: Exchange | None = None,
        swaps: bool = False,
        late: bool = False,
    ) -> None:
        """The same in the optimizer's thread, once the steps are done with the parameters."""
        changed = self._weights_changed
        with contextlib.nullcontext() if ranks is None else ranks, self._on_device():
            self._take_copies(pairs)
            self._hand_over.exchange(
                pairs, steps, changed, only_behind=only_behind, swaps=swaps, late=late, ranks=ranks
            )
            if swaps:
                self._let_begin(steps)
            self._hand_over.follow(pairs)
        self._weights_changed = False
        if shows_gradients:
            watch_copies(pairs)
            self._show(pairs)

    def _let_begin(self, steps: Sequence[ParameterUse]) -> None:
        """Return when a round behind those of ``steps`` has given a device a first microbatch, if one is there.

        What an update does then keeps that device from nothing; but its Python, beside that of the forward, would have
        the device wait for both. So would it beside the backward, where autograd's thread needs the interpreter to let
        go of tensors, and gets it late where another thread has it: a small model's took three times as long.
        """
        if self._twins is None or not self._twins.are_apart:
            return
        following = next((step for step in self._steps.running() if step not in steps), None)
        if following is None:
            return
        begins = lambda: following.is_under_way  # noqa: E731
        with self.log.doing("waits", "wait for the next round to begin"):
            self._gates.board.wait(begins, "the optimizer's thread", "the next round's first microbatch", MOST_WAIT_S)

    def _write_now(self, pairs: Sequence[ParameterPair]) -> None:
        with self._on_device():
            self._hand_over.write_weights(pairs)
            self._hand_over.follow(pairs)
            self._settle_home(pairs)
        watch_copies(pairs)
        self._weights_changed = False
