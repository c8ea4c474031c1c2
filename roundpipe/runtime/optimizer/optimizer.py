"""The optimizer's side of a model: its parameters, and the thread that updates them one step behind.

The model side (host weights, gradients in ``.grad``) and the optimizer side (copies in ``optim_dtype`` with gradients
of their own) meet in two places only:

    update k   waits for update k-1
               per parameter, once step k has uploaded it for the last time: weights W[k-1] into the model,
               once step k has added to it for the last time: gradients out of it      `HandOver.exchange`
               runs step_fn, which makes W[k] from W[k-1]; gets W[k] ready             `HandOver.stage`
    step k+1   trains on W[k-1] meanwhile; after an update that is not asynchronous, on W[k]

so that for SGD ``W[k] = W[k-1] - lr * grad(W[max(k-2, 0)])``.

Invariant: a gradient is in one place, the model's ``.grad`` or the copy's, until `synchronize` shows it: then the
model's ``.grad`` is a view of the copy's, taken back at the next call (`begin_call`) with what the user did to it.
A parameter lies in its own memory whenever nothing is under way, else maybe in a second one (`Banks`). What is
converted early is used if it still is what it was made from. The optimizer's thread does all other copying between the
two, also where the caller waits for it: no Ctrl-C, which is raised in the caller, stops it halfway.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn

from roundpipe.core.contexts import contextmanager
from roundpipe.core.errors import ClosedError, DeadlockError
from roundpipe.reports.timeline import OPTIMIZER
from roundpipe.runtime.optimizer import step_hooks
from roundpipe.runtime.optimizer.grad_scaler import ScalerScope
from roundpipe.runtime.optimizer.hand_over import HandOver
from roundpipe.runtime.optimizer.update import StepHandle, Update, UpdateRunner
from roundpipe.runtime.optimizer.update_steps import UpdateSteps
from roundpipe.runtime.optimizer.update_thread import UpdateThread
from roundpipe.runtime.optimizer.update_times import UpdateTimes
from roundpipe.runtime.profiling.host_log import HostLog
from roundpipe.runtime.ranks.exchange import Exchange, begin_exchange
from roundpipe.runtime.ranks.turns import Ranks
from roundpipe.runtime.threads import DEADLINE_S
from roundpipe.runtime.weights.gate import Gates, Steps
from roundpipe.runtime.weights.master_weights import MasterWeights, NamedParameters, take_writes
from roundpipe.runtime.weights.pairs import look
from roundpipe.runtime.weights.parameter_pair import ParameterPair
from roundpipe.runtime.weights.twin_group import TwinGroup

P = ParamSpec("P")
T = TypeVar("T")


def _in_turn(method: Callable[Concatenate[OptimizerSide, P], T]) -> Callable[Concatenate[OptimizerSide, P], T]:
    """A method that exchanges something between model and copies: one thread of the user's at a time.

    A step that is not asynchronous uses the copies in its own thread, while another may call the model.
    """

    @functools.wraps(method)
    def alone(side: OptimizerSide, *args: P.args, **kwargs: P.kwargs) -> T:
        with side.turn():
            return method(side, *args, **kwargs)

    return alone


class OptimizerSide(UpdateSteps):
    """Copies of a model's trainable parameters, and the updates of them; used from the training thread.

    ``step_fn`` may do anything with the copies, and should leave the rest of the model alone; optimizers that evaluate
    the loss themselves (LBFGS) need a step that is not asynchronous: the model runs on the copies' present values.

    ``steps`` are those that use the parameters, and wait at ``gates``; ``ranks`` average the gradients of each update;
    ``second_memory`` gives parameters that have more memory than their own since it was last asked, and that memory.
    """

    def __init__(
        self,
        named_parameters: Callable[[], NamedParameters],
        optim_dtype: torch.dtype | None = None,
        *,
        widens_half: bool = False,
        name: str = "model",
        gates: Gates | None = None,
        steps: Steps | None = None,
        ranks: Ranks | None = None,
        second_memory: Callable[[], Iterable[tuple[torch.Tensor, torch.Tensor]]] = tuple,
        twins: TwinGroup | None = None,
        deadline_s: float = DEADLINE_S,
        begin_thread: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(twins)
        self._shard = None if ranks is None else ranks.shard
        self._pairs = MasterWeights(named_parameters, optim_dtype, widens_half, self._shard)
        self._name = name
        self._gates = gates or Gates(deadline_s)
        self._steps = steps or Steps()
        self._ranks = ranks
        self._scalers = ScalerScope(None if ranks is None else ranks.agree)
        self.log = HostLog(OPTIMIZER)
        self.times = UpdateTimes(self.log, self._steps)
        self._hand_over = HandOver(self._gates, self.log, twins)
        self._runner = UpdateRunner(name, self.log, self._scalers, ranks)
        self._updates = UpdateThread(name, self._gates, self._runner, deadline_s, begin_thread)
        self._second_memory = second_memory
        self._gates.came = self._pairs.gradients_came
        self._weights_changed = False
        """Whether the copies are newer than the model's weights, or were when a hand-over began that is not over."""
        self._trainable: Sequence[ParameterPair] = ()
        """Those of parameters that were trainable when the latest step was asked for."""
        self._gradients_due = False
        self.is_calling = False
        """Whether a call of the model runs."""
        self._is_settled = True
        """Whether nothing was called or stepped since the last `synchronize`."""
        self._closed = False
        self._deadline_s = deadline_s
        self._turn_lock = threading.RLock()
        step_hooks.watch(self)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Around what one thread of the user's does at a time; nothing for code that runs for an update or a step."""
        if self._updates.is_current or self._steps.is_inside or not self._gates.board.is_here:
            yield
            return
        if not self._turn_lock.acquire(timeout=self._deadline_s):
            raise DeadlockError(
                f"{self._name}: another thread has been in a step, or in a call that exchanges weights, for "
                f"{self._deadline_s:.0f} s. A step_fn must not wait for a thread that calls the model"
            )
        try:
            yield
        finally:
            self._turn_lock.release()

    def optim_parameters(self) -> Iterator[nn.Parameter]:
        """The optimizer's copies of the parameters that are trainable now."""
        return (copy for _, copy in self.optim_named_parameters())

    def optim_named_parameters(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The copies with the original names; see `MasterWeights.named_copies`."""
        self._before_look()
        # in step_fn those of the step: beside an update the caller may freeze some for a while
        trainable = self._trainable if self._updates.is_current else None
        return self._pairs.named_copies(prefix, remove_duplicate, trainable)

    def copy_dtypes(self) -> list[torch.dtype]:
        """See `MasterWeights.copy_dtypes`."""
        return self._pairs.copy_dtypes()

    def parameter_pairs(self) -> Sequence[ParameterPair]:
        """Every parameter once, frozen ones too; makes no copies, and shows those that are made later."""
        return self._pairs.with_new()

    @_in_turn
    def step(
        self,
        step_fn: Callable[..., Any],
        is_async: bool = True,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> StepHandle:
        """Hand the gradients to the optimizer and update its parameters by ``step_fn(*args, **kwargs)``.

        An asynchronous step returns at once, and the next step trains on the weights before this update. What the
        previous asynchronous ``step_fn`` raised is raised before anything of this step happens.
        """
        self._runner.check_step(step_fn, is_async, kwargs or {})
        self.times.asked()
        self._ready("step()", finish_steps=not is_async)
        self._runner.options.begin(step_fn if is_async else None)
        self.is_async, self._loop, self._stepping = is_async, "steps", []
        self._trainable = self._pairs.trainable()
        pairs = self._pairs.with_copies()
        take_writes(pairs, has_update=self._weights_changed or self.is_ahead)
        is_early = is_async and self._shard is None  # the first update takes the memory that it needs
        self._runner.late.choose(pairs if self._ranks is None else ())
        self._pairs.convert_early(is_early, self._second_memory() if is_early and self.num_steps else ())
        call = functools.partial(step_fn, *args, **(kwargs or {}))
        num_steps, scales = self.num_steps, self._scalers.state()
        update = Update(f"update {num_steps + 1}", num_steps + 1)
        ranks: Exchange | None = None
        try:
            self._scalers.begin_step()
            self._gradients_due = self._has_new_gradients = False
            self.num_steps = num_steps + 1
            ranks = begin_exchange(
                self._ranks, pairs, self._gates, self._weights_changed, self.log, self.num_steps, is_async
            )
            if is_async:
                running = self._steps.running()
                self._updates.submit(update, self._update_behind, pairs, running, call, self.num_steps, ranks)
            else:
                self._update_now(update, pairs, call, ranks)
        except BaseException:
            if update.take_back():  # interrupted before `step_fn`: no step was made
                if ranks is not None:
                    ranks.change(is_dropped=True)
                self._scalers.restore(scales)
                self._gradients_due = self._has_new_gradients = True
                self.num_steps = num_steps
                self._end_interrupted()
            raise
        self._runner.warn_if_due()
        return StepHandle(update, self._gates.board, self._runner, self._finish_there)

    @_in_turn
    def begin_call(self, adds_gradients: bool = True, has_backward_later: bool = False) -> None:
        """A call into the model begins: raise what ``step_fn`` raised, take back gradients that were shown.

        Gradients stay shown for a call that adds none, and until its backward for one that has it later, if the loop's
        own optimizer has the model's parameters and may clear their gradients in between.
        """
        if self._closed:
            raise ClosedError(f"{self._name} was closed; make a new one to go on")
        self._end_interrupted()
        self._caller = threading.get_ident()
        if adds_gradients and self._first.end():  # the call's are added to them in the copies' dtype
            self._bring_gradients()
        has_update = not self.is_idle
        ahead = [] if has_update or self._weights_changed else self._pairs.ahead()
        if ahead:  # written by the training loop
            self._updates.run(ahead, self._write_now)
        if self._runner.is_inside:  # an optimizer evaluates the loss, on its present weights
            self._runner.check_evaluation(has_update, adds_gradients)
            self._weights_changed = self._evaluates = True
            self._exchange(self._pairs.with_copies())
        self._is_settled = False
        self.raise_pending()
        self._runner.warn_if_due()
        takes_back = adds_gradients and not (has_backward_later and self._loop == "own")
        for pair in [pair for pair in self._pairs if pair.shown is not None] if takes_back else ():
            pair.take_back()
        if not has_update:  # it writes the parameters itself
            look(self._pairs)
        self._begin_there()
        self._has_new_gradients |= adds_gradients

    def weights_moved(self) -> None:
        """The model's weights lie elsewhere now, such as packed; their values are the same."""
        for pair in self._pairs:
            pair.moved()

    def begin_backward(self) -> None:
        """The backward of an earlier call begins."""
        if self._loop == "own":
            for pair in self._pairs:
                pair.take_back()

    @_in_turn
    def end_call(self) -> None:
        """A call or a backward has brought its gradients; an optimizer that is not stepped by `step` sees them now."""
        if self._pairs.is_aside:
            return
        if self._runner.is_inside:
            self._exchange(self._pairs.with_copies())
        elif self._loop != "steps" and self.is_idle:
            is_first = self._loop == "unknown" and self._ranks is None and not self.has_twins
            if not (is_first and self._first.await_look(self._pairs.with_copies(), self._bring_gradients)):
                self._bring_gradients()

    @_in_turn
    def _bring_gradients(self) -> None:
        """Let the copies have the model's gradients."""
        self._first.end()
        pairs = self._pairs.with_copies()
        if self.is_idle and not all(pair.is_shown for pair in pairs):
            for pair in pairs:
                pair.take_back()
            self._gradients_due = True
            self._exchange(pairs, shows_gradients=True)

    @property
    def is_idle(self) -> bool:
        """Whether the optimizer's thread has nothing to do."""
        return self._updates.is_idle

    @property
    def is_current(self) -> bool:
        """Whether the calling code runs in the optimizer's thread."""
        return self._updates.is_current

    def wait_update(self, waiter: str = "a timeline") -> None:
        """Return when no update is running, at once inside one, or after the deadline."""
        self._updates.wait_over(waiter)

    def raise_pending(self) -> None:
        """Raise, once, what the previous asynchronous ``step_fn`` raised or came over; does not wait for it."""
        self._updates.raise_pending()
        self._hand_over.refuse_lost()

    def wait(self, waiter: str = "wait()") -> None:
        """Return when no update is running, or raise a `DeadlockError` after the deadline."""
        self._updates.wait(waiter)
        self._finish_there()

    def _ready(self, waiter: str, finish_steps: bool = True) -> None:
        self._steps.refuse_inside(waiter)
        if not self._closed:
            if not self._runner.is_inside:
                (self._steps.finish if finish_steps else self._steps.raise_pending)()
            self.wait(waiter)
        has_new = self._has_new_gradients
        self._first.end()
        self.begin_call()
        self._has_new_gradients = has_new  # it was no call

    @_in_turn
    def synchronize(self) -> None:
        """Wait for everything; then the model holds the latest weights and shows all gradients in ``.grad``.

        Gradients that no step has seen yet stay due for the next one. Inside a ``step_fn`` that is not
        asynchronous it hands over the copies' present values, so that the model can be called on them.
        """
        self._ready("synchronize()")
        if self._runner.is_inside:
            self._weights_changed = True
        pairs = self._pairs.with_copies()
        self._gradients_due |= any(pair.holder.grad is not None for pair in pairs)
        self._exchange(pairs, shows_gradients=True)
        if not self._gradients_due:
            self._scalers.publish()
        self._is_settled = True

    @_in_turn
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, those on the model's side too; behind the running update if it has all there are."""
        if self._updates.is_current:  # those on the model's side are of the next step
            return self._clear_copies(set_to_none)
        clear = functools.partial(self._clear, set_to_none, of_copies=True)
        if not self._has_new_gradients and not self._runner.is_inside and self._updates.after_update(clear):
            self._steps.raise_pending()
            return self._clear(set_to_none, of_copies=False)
        self._ready("zero_grad()")
        self._clear(set_to_none)
        self._gradients_due = False

    @_in_turn
    def refresh(self) -> None:
        """Start the copies again from the model's weights, as after ``load_state_dict``.

        Call `synchronize` before the weights are changed, or an update that is not in the model is lost.
        """
        self._ready("refresh()")
        for pair in self._pairs:
            pair.start_again()
        self._weights_changed = False

    @property
    def is_stale(self) -> bool:
        """Whether the model lacks an update, or a round is under way."""
        return not self._is_settled and (
            not self.is_idle or self._weights_changed or self.is_ahead or bool(self._steps.running())
        )

    @property
    def _is_behind_copies(self) -> bool:
        """Whether copies were written outside of updates since the model had their values."""
        return self.is_idle and not self._weights_changed and any(pair.is_ahead for pair in self._pairs)

    def settle(self, *, looks: bool = False) -> None:
        """Synchronize before the model is read; for code that a call runs, and in other threads, nothing happens.

        ``looks``: also if the loop has written copies since, which are all looked at for it.
        """
        if self._closed or not self._gates.board.is_here or not (self.is_stale or (looks and self._is_behind_copies)):
            return
        if self._runner.is_inside and not self.is_idle:
            self.wait("a read of the model's state")
        if self.is_callers and not self.is_calling:
            self.synchronize()

    def before_load(self) -> None:
        """Part of the model is about to be loaded: nothing may be on its way into it. Cheap if nothing is."""
        if not self._is_settled and self._gates.board.is_here:
            self.synchronize()

    def after_load(self, named_parameters: NamedParameters) -> None:
        """Start the copies of some parameters again, which may have been replaced by others of the same names."""
        for name, parameter in named_parameters:
            self._pairs.replace(name, parameter)

    def close(self) -> None:
        """Wait for the running update, put it into the model, end the thread, raise what is pending; safe twice."""
        self.wait("close()")
        try:
            if not self._closed and (self._ranks is None or self._ranks.shard is None):  # which waits for others
                behind = self._pairs.with_copies() if self._weights_changed else self._pairs.ahead()
                self._updates.run(behind, self._write_now)
            self.come_home(with_copies=False)
        finally:
            self._closed = True
            step_hooks.unwatch(self)
            self._updates.close()
        self.raise_pending()
