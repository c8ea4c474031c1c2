"""An optimizer whose steps run beside the next step of the model, and the scaler of its gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from roundpipe.runtime.optimizer.grad_scaler import GradScaler
from roundpipe.wrappers.pipe import RoundPipe


class LateOptimizer(torch.optim.Optimizer):
    """Steps ``optimizer``, of a rotation's copies, by `RoundPipe.step`; a scheduler may change the options meanwhile.

    It has the options (``param_groups``) that the training loop sees; an update takes those of the moment of `step`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, pipe: RoundPipe) -> None:
        self.inner = optimizer
        self.pipe = pipe
        self._clip: Callable[..., Any] | None = None
        self._norm: Any = None
        super().__init__([dict(group) for group in optimizer.param_groups], optimizer.defaults)
        self.state = optimizer.state

    def clip_later(self, clip: Callable[..., Any], max_norm: float, norm_type: float) -> Any:
        """Have the next update clip its gradients; returns the norm of the latest update that is over, if one is.

        An infinite ``max_norm``, by which a trainer asks for the norm alone, leaves what was asked for before.
        """
        if self._clip is None or not math.isinf(max_norm):
            self._clip = functools.partial(clip, max_norm=max_norm, norm_type=norm_type)
        return self._norm

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Ask for an update."""
        options = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        clip, self._clip = self._clip, None
        self.pipe.step(self._update, True, options, clip)

    step.hooked = True  # type: ignore[attr-defined]  # torch adds no hooks: it is no update, but asks for one

    def _update(self, options: list[dict[str, Any]], clip: Callable[..., Any] | None) -> None:
        for group, values in zip(self.inner.param_groups, options, strict=True):
            group.update(values)
        if clip is not None:
            self._norm = clip(self.pipe.optim_parameters())
        self.inner.step()
        self.inner.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.pipe.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's, after the latest update."""
        self.pipe.synchronize()
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.pipe.synchronize()
        self.inner.load_state_dict(state_dict)
        self.state = self.inner.state
        for group, loaded in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})


def prepare_scaler(accelerator: Any, has_copies: bool) -> None:
    """Have the scale where gradients are: torch's unscales them before a scale has come from another device.

    ``has_copies``: whether those of parameters are updated, of which some may be on devices.
    """
    scaler = getattr(accelerator, "scaler", None)
    if not isinstance(scaler, torch.amp.GradScaler) or not scaler.is_enabled():
        return
    if has_copies:
        accelerator.scaler = GradScaler()
        accelerator.scaler.load_state_dict(scaler.state_dict())
    else:
        scaler.scale(torch.zeros(()))  # which makes the scale, here
