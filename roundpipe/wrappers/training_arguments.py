"""A call that trains: its arguments, and what is said of those that can't be meant."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from roundpipe.core.checks import check_flag, check_keywords, check_type, positional
from roundpipe.core.errors import ConfigError
from roundpipe.runtime.config import LossReduction, LossScope, RoundPipeRunConfig
from roundpipe.runtime.engine.spec import LossFunction
from roundpipe.runtime.ranks.turns import CallShare


@dataclass(frozen=True, slots=True)
class TrainingCall:
    """The arguments of a `RoundPipe.forward_backward`, or of a `RoundPipe.forward_loss`, which has no backward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    label: Any
    loss_fn: LossFunction
    return_outputs: bool
    options: RoundPipeRunConfig
    has_backward: bool = True
    share: CallShare | None = None
    """With other ranks, and a loss that is a mean over the batches of all: what this one counts for."""

    @property
    def num_ranks(self) -> int:
        """Whose losses make up one mean."""
        return 1 if self.share is None else self.share.num_ranks


def pass_outputs(outputs: Any, labels: Any) -> Any:
    """The loss of a model that returns its loss."""
    return outputs


def with_loss_options(
    options: RoundPipeRunConfig | None, loss_reduction: LossReduction | None, loss_scope: LossScope | None
) -> RoundPipeRunConfig:
    """A call's options with those that it gave beside them, which win; None: it gave no others."""
    options = RoundPipeRunConfig() if options is None else options
    given = {"loss_reduction": loss_reduction, "loss_scope": loss_scope}
    given = {name: value for name, value in given.items() if value is not None}
    return replace(options, **given) if given and isinstance(options, RoundPipeRunConfig) else options  # type: ignore[arg-type]


def check_training_call(
    input_args: Any, input_kwargs: Any, loss_fn: Any, return_outputs: Any = False, has_backward: bool = False
) -> None:
    """Raise `ConfigError` for arguments of ``forward_backward`` that can't be meant, or where it can't."""
    if has_backward and not torch.is_grad_enabled():  # as in a copied evaluation, which would be trained on
        raise ConfigError(
            "forward_backward was called where gradients are off, by torch.no_grad() or inference_mode(), and it makes "
            "gradients: to evaluate a loss, call forward_loss with the same arguments"
        )
    check_type("input_args", input_args, tuple | list, positional("input_kwargs"))
    check_keywords("input_kwargs", input_kwargs)
    if not callable(loss_fn):
        raise ConfigError(f"loss_fn is {type(loss_fn).__name__}; give a function (outputs, label) -> loss")
    check_flag("return_outputs", return_outputs)
