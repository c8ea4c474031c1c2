"""Weights and an optimizer's states of the stages of a rank, for ``torch.distributed.checkpoint``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from roundpipe.core.checks import check_type
from roundpipe.core.errors import ConfigError, enumerated
from roundpipe.distributed.stage import ModelStage, stages_of_this_rank

_FROM = "what state_dict() of a StageState gave"
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
"""With a key for each state of each parameter, so that ranks with other parameters can read them."""


class StageState(Stateful):
    """What a rank gives to ``torch.distributed.checkpoint``, to save and to load: all keys are the model's.

        state = {"training": StageState(stages, optimizer), "step": step}
        torch.distributed.checkpoint.save(state, checkpoint_id=folder)

    Called on every rank of the pipeline. What is saved can be loaded with any number of stages, on any number of ranks.

    Args:
        stages: all of this rank: one, or a list.
        optimizer: of the parameters of all these stages; None if this rank trains none of its own.
    """

    def __init__(self, stages: ModelStage | Sequence[ModelStage], optimizer: torch.optim.Optimizer | None) -> None:
        advice = "the optimizer of the stages' parameters, or None"
        check_type("optimizer", optimizer, torch.optim.Optimizer | None, advice)
        self._modules = nn.ModuleList(stage.submod for stage in stages_of_this_rank(stages))
        self._optimizers = () if optimizer is None else (optimizer,)

    def state_dict(self) -> dict[str, Any]:
        """The keys of all stages; a weight that several of them use is there once."""
        model, optimizer = get_state_dict(self._modules, self._optimizers, options=_FLAT)
        return {
            "model": {_in_model(key): value for key, value in model.items()},
            "optimizer": {_in_optimizer(key): value for key, value in optimizer.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Each copy of a weight gets states of its own."""
        check_type("state_dict", state_dict, dict, _FROM)
        if lacking := {"model", "optimizer"} - state_dict.keys():
            raise ConfigError(f"state_dict lacks {enumerated(sorted(lacking))}; give {_FROM}")
        model, optimizer = get_state_dict(self._modules, self._optimizers, options=_FLAT)
        set_state_dict(
            self._modules,
            self._optimizers,
            model_state_dict={key: state_dict["model"][_in_model(key)] for key in model},
            optim_state_dict={key: _own(state_dict["optimizer"][_in_optimizer(key)]) for key in optimizer},
            options=_FLAT,
        )


def _in_model(key: str) -> str:
    """``0.head.weight``, of the list of stages, as ``head.weight``."""
    return key.partition(".")[2]


def _in_optimizer(key: str) -> str:
    """``state.0.head.weight.exp_avg`` as ``state.head.weight.exp_avg``."""
    kind, _, rest = key.partition(".")
    return f"{kind}.{_in_model(rest)}"


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
