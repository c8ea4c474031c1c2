"""Training steps of trainers that have one of their own, as those of reinforcement learning do, behind a mixin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import Trainer

from roundpipe.core.errors import ConfigError


def step_around(own: Callable[..., Any], step: Callable[..., Any], *args: Any) -> Any:
    """A training step as a trainer's class has it: what it does before and after that of transformers is done.

    Args:
        own: the method of the class.
        step: what takes the place of transformers' own.

    Raises:
        ConfigError: the method does all of a step itself.
    """
    original, calls = Trainer.training_step, 0
    if getattr(own, "__func__", None) is original:
        return step(*args)

    def counted(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return step(*args, **kwargs)

    Trainer.training_step = counted  # where the super() of a class leads
    try:
        result = own(*args)
    finally:
        Trainer.training_step = original
    if not calls:
        raise ConfigError(
            f"{own.__qualname__} does not call Trainer.training_step, so that its steps did not run in rotation; let "
            "it call super().training_step(model, inputs, num_items_in_batch), or train without the mixin"
        )
    return result
