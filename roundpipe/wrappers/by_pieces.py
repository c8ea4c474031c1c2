"""Batches of a model in parts, by pieces; whole where the model can't run a piece, as if none had run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.errors import OnlyWholeError, note_cut, said
from roundpipe.core.random_state import python_random_state, set_python_random_state
from roundpipe.effects.run_once import FirstCall
from roundpipe.effects.snapshot import CodeSnapshot
from roundpipe.runtime.config import ResolvedConfig
from roundpipe.runtime.microbatch.split import EarlierCalls, Split, split
from roundpipe.wrappers.batch_warnings import BatchWarnings
from roundpipe.wrappers.host_gradients import HostGradients
from roundpipe.wrappers.losses_by_pieces import NOT_OF_PIECES, LossesByPieces, is_of_piece, may_choose, modules_of_loss
from roundpipe.wrappers.session import Session


@dataclass(eq=False)
class ByPieces:
    """Runs the batches of one model, and looks at how they are cut."""

    session: Session
    model: nn.Module
    warnings: BatchWarnings
    forward: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    """Runs a whole batch."""
    has_added: bool = field(init=False, default=False)
    """Whether gradients of the running call may be there that can't be taken back."""
    _failed: tuple[Exception, int] | None = field(init=False, default=None)
    """What a piece has raised in its forward, and which."""

    def __post_init__(self) -> None:
        self._earlier = EarlierCalls()
        self._losses = LossesByPieces(self.model)
        self._smallest: dict[tuple[bool, bool], int] = {}
        """Samples of the smallest piece that has run, by whether in training, and with gradients."""

    def note_failed(self, error: Exception, piece: int) -> None:
        """The forward of a piece has raised this."""
        if not isinstance(error, NOT_OF_PIECES):
            self._failed = error, piece

    def run(
        self,
        run: Callable[[Split, bool], Any],
        config: ResolvedConfig,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        label: Any = None,
        loss_fn: Callable[..., Any] | None = None,
    ) -> Any:
        """What ``run`` gives for the pieces of a batch, or by default for the whole, if one can't run.

        ``run`` is also told to keep gradients apart until all of them have run: sizes are new.
        """
        config = self.warnings.whole_if_small(self.warnings.in_one_piece(config, None), args, kwargs)
        if loss_fn is not None:
            config = self._losses.config_for(config, args, kwargs, loss_fn)
        cut = functools.partial(split, args, kwargs, label, earlier=self._earlier, warns=False)
        pieces, self.has_added = cut(config=config), False
        if self.warnings.whole_if_listed(config, pieces):
            pieces = cut(config=config.in_one_piece())
        if pieces.num_microbatches == 1 or not config.leaves_cut_open:
            pieces.warn()
            try:
                return run(pieces, False)
            except Exception as error:
                self._note(error, args, kwargs, pieces)
                raise
        mode, smallest = (self.model.training, torch.is_grad_enabled()), min(pieces.sizes or [0])
        is_new = smallest < self._smallest.get(mode, smallest + 1)
        has_loss = loss_fn is not None and may_choose(config)
        may_be_whole = has_loss and not self._losses.has_run(loss_fn, pieces.sizes or ())
        is_new = is_new or may_be_whole
        before = _Before(self.session, self.model, loss_fn if is_new else None)
        try:
            result = run(pieces, is_new)
        except Exception as error:
            if may_be_whole and not self.has_added and is_of_piece(error):
                before.restore()
                whole = functools.partial(run, cut(config=config.in_one_piece()), False)
                return self._losses.run_whole(whole, error, loss_fn, pieces.sizes or ())
            if self.has_added or self._failed is None or error is not self._failed[0]:
                self._note(error, args, kwargs, pieces)
                raise
            refused = OnlyWholeError(said(error))
            refused.num_samples = None if pieces.sizes is None else pieces.sizes[self._failed[1]]
            self._failed = None
        else:
            pieces.warn()
            self.warnings.look_at_norms(self.model, config, pieces.num_microbatches)
            self.warnings.note_cut(pieces.sizes)
            self._smallest[mode] = min(smallest, self._smallest.get(mode, smallest))
            return result
        before.restore()
        result = run(cut(config=config.in_one_piece()), False)
        self.warnings.run_whole(refused, pieces.sizes)
        return result

    def _note(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any], pieces: Split) -> None:
        """Say of what the forward of a piece has raised that the batch was cut, and whether the whole runs."""
        failed, self._failed = self._failed, None
        if failed is None or error is not failed[0]:
            return
        before, runs_whole = _Before(self.session, self.model, None), True
        try:
            with torch.no_grad():
                self.forward(*trees.map_tensors((args, kwargs), lambda tensor: tensor.detach().clone()))
        except Exception:
            runs_whole = False
        finally:
            before.restore()
        note_cut(error, pieces.num_microbatches, runs_whole=runs_whole)


class _Before:
    """What pieces may change: random state, all of the model but its weights, and what a loss function reaches."""

    def __init__(self, session: Session, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self._random = torch.get_rng_state(), python_random_state()
        self._code: list[FirstCall | CodeSnapshot | HostGradients] = [FirstCall(model)]
        if loss_fn is not None:
            gradients = HostGradients(loss_fn, session.gradient_counts, session.wait_idle)
            gradients.note(keeps_values=True)
            self._code += [*map(FirstCall, modules_of_loss(loss_fn, model)), CodeSnapshot([], loss_fn), gradients]

    def restore(self) -> None:
        for each in self._code:
            if not isinstance(each, HostGradients) or each.have_come:
                each.restore()
        torch.set_rng_state(self._random[0])
        set_python_random_state(self._random[1])
