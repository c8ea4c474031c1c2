"""Loss functions that can't run the pieces of a batch, and run the whole: their batches are not cut by default.

Such as one whose label has targets of all samples one behind the other, so that it is not cut. The round of the pieces
has failed before it added gradients; what its code may have changed is put back, and the whole batch runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from torch import nn

from roundpipe.core.errors import GRADIENTS_ADDED, RoundPipeError, add_note, is_of_loss
from roundpipe.core.module_tree import modules_in
from roundpipe.core.random_state import python_random_state, set_python_random_state
from roundpipe.effects.run_once import FirstCall
from roundpipe.effects.uses import reached_by
from roundpipe.runtime.config import ResolvedConfig
from roundpipe.runtime.device.backend import OUT_OF_MEMORY
from roundpipe.runtime.engine.chain_record import code_of
from roundpipe.runtime.engine.spec import Call
from roundpipe.runtime.microbatch.split import batch_size
from roundpipe.wrappers.host_gradients import HostGradients, reaches
from roundpipe.wrappers.model_view import ModelView
from roundpipe.wrappers.recovery import CallSnapshot
from roundpipe.wrappers.session import Session
from roundpipe.wrappers.tails import samples_of
from roundpipe.wrappers.training_arguments import TrainingCall
from roundpipe.wrappers.whole_warnings import warn_of_loss

NOT_OF_PIECES = (RoundPipeError, MemoryError, *OUT_OF_MEMORY)
"""Errors that the whole batch would raise, too."""


@dataclass(slots=True)
class KnownLoss:
    """What is known of a loss function."""

    sizes: set[tuple[int, ...]] = field(default_factory=set)
    """Of microbatches that it has run."""
    runs_whole: bool = False
    """Whether it could not run a piece, whatever its size."""
    too_few: int = 0
    """Samples of the largest piece that was too small to run."""


class LossesByPieces:
    """The loss functions of one model's calls."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: dict[Any, KnownLoss] = {}
        """By code of a loss."""

    def config_for(
        self, config: ResolvedConfig, args: tuple[Any, ...], kwargs: dict[str, Any], loss_fn: Any
    ) -> ResolvedConfig:
        """The config for a call, which by default cuts no batch whose pieces its loss can't run."""
        known = self._of(loss_fn)
        if not may_choose(config) or not (known.runs_whole or known.too_few):
            return config
        size = batch_size(args, kwargs, config)
        is_small = size is not None and size // min(config.num_microbatch, size) <= known.too_few
        return config.in_one_piece() if known.runs_whole or is_small else config

    def run(
        self,
        session: Session,
        calls: list[Call],
        training: TrainingCall,
        config: ResolvedConfig,
        train: Callable[[list[Call], TrainingCall, ResolvedConfig], Any],
        again: Callable[[], Any],
    ) -> Any:
        """What ``train`` gives for the microbatches of a call, or ``again`` for the batch, if its loss takes no piece.

        Raises:
            Exception: what the loss raises for a piece, if it does for the whole batch, too.
        """
        sizes = tuple(each for call in calls for each in samples_of(call))
        known, number = self._of(training.loss_fn), sum(call.num_microbatches for call in calls)
        is_new = number > 1 and sizes not in known.sizes and may_choose(config)
        # other ranks wait for this one's part of the batch
        before = BeforeRound(session, self._model, calls) if is_new and training.share is None else None
        try:
            result = train(calls, training, config)
        except Exception as error:
            if before is None or not is_of_piece(error) or not before.can_restore(error):
                raise
            before.restore()
            return self.run_whole(again, error, training.loss_fn, sizes)
        if number > 1:
            known.sizes.add(sizes)
        return result

    def has_run(self, loss_fn: Any, sizes: Sequence[int]) -> bool:
        """Whether a loss has run pieces of such sizes; from now on it has."""
        known = self._of(loss_fn)
        is_known = tuple(sizes) in known.sizes
        known.sizes.add(tuple(sizes))
        return is_known

    def run_whole(self, run: Callable[[], Any], error: Exception, loss_fn: Any, sizes: Sequence[int]) -> Any:
        """What ``run`` gives for a whole batch, a piece of which has raised this; raises it if the whole does, too."""
        try:
            result = run()
        except Exception as of_whole:
            if GRADIENTS_ADDED in getattr(of_whole, "__notes__", ()):
                add_note(error, GRADIENTS_ADDED)
            raise error from None
        known, least = self._of(loss_fn), min(sizes, default=0)
        is_small = least == 1 or least > 0 and any(each and min(each) > least for each in known.sizes)
        if is_small:
            known.too_few = max(known.too_few, least)
        else:
            known.runs_whole = True
        warn_of_loss(type(self._model).__name__, error, least if is_small else None)
        return result

    def _of(self, loss_fn: Any) -> KnownLoss:
        function = loss_fn.__func__ if isinstance(loss_fn, MethodType) else loss_fn
        return self._known.setdefault(code_of(function), KnownLoss())


class BeforeRound:
    """What the microbatches of a call may change, gradients of the model left out."""

    def __init__(self, session: Session, model: nn.Module, calls: Sequence[Call]) -> None:
        if any(call.inventory.buffers for call in calls):
            session.engine.wait_idle()  # an earlier round may still write them
        self._python_random = python_random_state()
        loss_fn = calls[0].loss_fn
        self._code: list[CallSnapshot | FirstCall] = [CallSnapshot(call, thorough=True) for call in calls]
        self._code += map(FirstCall, modules_of_loss(loss_fn, model))
        self._gradients: HostGradients | None = None
        if not reaches(loss_fn, model):  # else it would wait for the update, which calls don't
            self._gradients = HostGradients(loss_fn, session.gradient_counts, session.wait_idle)
            self._gradients.note(keeps_values=True)

    def can_restore(self, error: Exception) -> bool:
        """Whether nothing is left of the microbatches, one of which has raised this, once `restore` is called."""
        if GRADIENTS_ADDED in getattr(error, "__notes__", ()):
            return False
        return self._gradients is not None or is_of_loss(error, microbatch=0)  # before any backward

    def restore(self) -> None:
        for each in reversed(self._code):
            each.restore()
        if self._gradients is not None and self._gradients.have_come:
            self._gradients.restore()
        set_python_random_state(self._python_random)


def modules_of_loss(loss_fn: Any, model: nn.Module) -> list[nn.Module]:
    """A loss function and modules that it reaches, such as a criterion, without those of the model."""
    reached = [value for value in (loss_fn, *reached_by(loss_fn)) if isinstance(value, nn.Module)]
    own = set(modules_in(model))
    own.update(inner for each in reached for inner in each.modules() if inner is not each)
    return [each for each in dict.fromkeys(reached) if each not in own and not isinstance(each, ModelView)]


def is_of_piece(error: Exception) -> bool:
    """Whether a loss function has raised this, and may do so for a piece alone."""
    return is_of_loss(error) and not isinstance(error, NOT_OF_PIECES)


def may_choose(config: ResolvedConfig) -> bool:
    """Whether nobody has said how inputs and labels are cut, or into how many pieces."""
    return config.leaves_cut_open and config.split_label is None
