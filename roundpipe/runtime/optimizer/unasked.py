"""With ``residency="auto"`` weights may live on a device without that anyone has asked for it.

Then no code may see a difference. The host's parameters follow those on the device after each update, as they would
follow the copies. The optimizer's copies come home before code outside of ``step_fn`` looks at one of them
(`roundpipe.core.watched`), and after a ``step_fn`` that has used them with tensors of the host (`as_on_host`); for good
then, since it would again. They never leave if somebody has looked in the steps before, while updates were measured,
or if something else is not known to stand the move: `suits`.
Where all has room by far they are there from the first step on (`roundpipe.runtime.engine.full_plans`), if torch's own
optimizers have been made of them before: `foresees`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from roundpipe.core import trees
from roundpipe.core.storages import is_plain
from roundpipe.core.watched import has_views, unwatch, watch
from roundpipe.runtime.optimizer.as_on_host import as_on_host
from roundpipe.runtime.optimizer.device_side import DeviceSteps
from roundpipe.runtime.optimizer.foreseen import optimizers_of
from roundpipe.runtime.optimizer.update_times import UpdateTimes
from roundpipe.runtime.weights.twin_group import Tenants, TwinGroup

logger = logging.getLogger(__name__)

LEAST_UPDATES = 2
"""Updates before it is watched whether anybody looks, and while it is, before anything is decided."""


class UnaskedSteps(DeviceSteps):
    """What an `OptimizerSide` does so that nobody notices where its copies are."""

    times: UpdateTimes

    def __init__(self, twins: TwinGroup | None) -> None:
        super().__init__(twins)
        self._over = ""
        """Why copies stay on the host from now on."""
        self._noted: int | None = None
        """Updates when it began to be watched whether anybody looks."""
        self._has_foreseen = False

    @property
    def is_unasked(self) -> bool:
        """Whether copies are on a device without that anyone has asked for it."""
        return self._twins is not None and bool(self._twins) and self._twins.is_unasked

    def on_host_s(self) -> tuple[float, float] | None:
        """Seconds of an update on the host, its hand-over among them, and of a step; None: not known, or of no use."""
        if self._over or self.num_steps < LEAST_UPDATES or not self._runner.options.optimizers or self.has_twins:
            return None
        if self._noted is None:
            self._noted = self.num_steps
            self._watch()  # whether there is code that looks
        return self.times.on_host_s() if self.num_steps >= self._noted + LEAST_UPDATES else None

    def end_measuring(self) -> None:
        """It was decided that nothing leaves the host; for other calls it may be measured again."""
        self._noted = None
        self._unwatch()

    @property
    def is_over(self) -> bool:
        """Whether copies stay on the host from now on, unless somebody asks."""
        return bool(self._over)

    @property
    def may_stay_unasked(self) -> bool:
        """Whether copies are on a device, and nothing has shown that they had better not be."""
        return self.is_unasked and not self._over

    def foresees(self) -> bool:
        """Whether it is known before the first step which optimizers make it, and nothing speaks against a move.

        It is looked at once.
        """
        if self._has_foreseen or self.num_steps or self._over or self._loop != "unknown":
            return False
        self._has_foreseen = True
        self.rest()
        copies = [pair.copy for pair in self._pairs if pair.parameter.requires_grad]
        found = optimizers_of([copy for copy in copies if copy is not None]) if None not in copies else []
        for optimizer in found:
            self._know(optimizer)
        self._is_foreseen = bool(found) and not self._reason(is_packed=False)
        return self._is_foreseen

    def suits(self) -> bool:
        """Whether copies may go to a device without that anyone has asked for it."""
        self.rest()
        if not self._over:
            self._end_unasked(self._reason())
        return not self._over

    def _reason(self, is_packed: bool = True) -> str:
        """Why that would show; empty if it would not. ``is_packed``: whether weights lie where they will by now."""
        copies = {id(pair.copy): pair for pair in self._pairs if pair.copy is not None}
        for optimizer in self._runner.options.optimizers:
            kind = type(optimizer)
            if not kind.__module__.startswith("torch.optim"):
                return f"{kind.__name__} is not one of torch's optimizers"
            for group in optimizer.param_groups:
                if not all(id(parameter) in copies for parameter in group["params"]):
                    return f"{kind.__name__} has other parameters, too"
                if trees.tensors({name: value for name, value in group.items() if name != "params"}):
                    return f"{kind.__name__} has options that are tensors"
        for pair in copies.values():
            if pair.copy is None or not is_plain(pair.copy) or has_views(pair.copy):
                return f"other tensors lie in the memory of the optimizer's copy of {pair.names[0]}"
            is_there = self._twins is not None and self._twins.are_on_host
            if is_packed and not (is_there or pair.parameter.is_pinned()):
                return f"{pair.names[0]} is not in pinned memory"
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return "torch.distributed is in use"
        if torch.are_deterministic_algorithms_enabled():
            return "deterministic algorithms were asked for"
        return ""

    def _end_unasked(self, reason: str) -> None:
        if reason and not self._over:
            self._over = reason
            if self._noted is not None:  # else nothing was about to leave
                logger.info("weights are streamed, and the optimizer's side is on the host: %s", reason)
            if not self.has_twins:
                self._unwatch()

    def begin_unasked(self, tenants: Mapping[int, Tenants]) -> None:
        """`begin_twins`, if all `suits`."""
        assert self._twins is not None
        self._twins.is_unasked = True
        self._noted = self.num_steps if self._noted is None else self._noted
        try:
            self.begin_twins(tenants)
        except BaseException:
            self._twins.is_unasked = False
            raise
        self._watch()

    def come_home(self, *, with_copies: bool = True) -> None:
        was_unasked = self.is_unasked
        super().come_home(with_copies=with_copies or was_unasked)
        if was_unasked or not with_copies:
            self._unwatch()

    def _before_look(self) -> None:
        super()._before_look()
        if self.num_steps or self.is_unasked:
            self._looked("optim_parameters() was called after the first step")

    def _looked(self, what: str = "code outside of step_fn looked at the optimizer's copies") -> None:
        if self._runner.is_inside:
            return
        self._end_unasked(what)
        if self.is_unasked and self.is_callers and not self.is_calling:
            self.come_home()

    def _watch(self) -> None:
        looked = weakref.WeakMethod(self._looked)

        def before_look() -> None:
            if (method := looked()) is not None:
                method()

        watch([pair.copy for pair in self._pairs if pair.copy is not None], before_look)

    def _unwatch(self) -> None:
        unwatch([pair.copy for pair in self._pairs if pair.copy is not None])

    def _run_there(self, update: Callable[[], Any]) -> Any:
        devices = frozenset() if self._twins is None else self._twins.devices
        if not (self.is_unasked or self._is_split or len(devices) > 1):
            return super()._run_there(update)

        def on_both() -> Any:
            with as_on_host(devices):
                return update()

        if not self.is_unasked:
            return super()._run_there(on_both)

        def unnoticed() -> Any:
            self._unwatch()  # optimizers ask for the class of parameters
            try:
                with as_on_host(devices) as mix:
                    result = update()
                return trees.map_tensors(result, torch.Tensor.cpu) if trees.tensors(result) else result
            finally:
                if mix.has_mixed:
                    self._end_unasked("step_fn used the optimizer's copies with tensors of the host")
                self._watch()

        return super()._run_there(unnoticed)
