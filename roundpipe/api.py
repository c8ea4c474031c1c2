"""`compile`: any module in, a model that trains in rotation out.

trace -> measure -> partition -> generate      roundpipe.fx, through its `TracedSource`
      -> RoundPipe                             roundpipe.runtime
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from roundpipe.core.caller import caller_name, warn
from roundpipe.core.errors import ConfigError, TraceError
from roundpipe.fx.passes.lower import LowerOptions
from roundpipe.fx.passes.partition import Balance
from roundpipe.fx.source import TracedSource, own_example
from roundpipe.runtime.config import RoundPipeRunConfig
from roundpipe.runtime.device.resolve import DeviceLike, largest_layer_bytes
from roundpipe.runtime.weights.host_weights import PinMode
from roundpipe.wrappers.auto import AutoRoundPipe
from roundpipe.wrappers.pipe import ChainProgram, RoundPipe
from roundpipe.wrappers.wrap import PartsChoice, check_model

logger = logging.getLogger(__name__)

_WRAP_OPTIONS = ("lower_threshold", "upper_threshold", "skip_modules", "override_config")


def compile(
    model: nn.Module,
    *,
    example_args: tuple[Any, ...] = (),
    example_kwargs: dict[str, Any] | None = None,
    optim_dtype: torch.dtype | None = None,
    name: str | None = None,
    model_run_config: RoundPipeRunConfig = RoundPipeRunConfig(),  # noqa: B008 - frozen
    pin_model: PinMode = "alloc",
    devices: Sequence[DeviceLike] | DeviceLike | None = None,
    balance: Balance = "time",
    fallback: bool = True,
    **wrap_kwargs: Any,
) -> RoundPipe | AutoRoundPipe:
    """Cut a model into layers and make it train in rotation.

    The model is traced from the example, else at the first call from the real arguments; asked for the partition
    before that, from its own ``dummy_inputs`` if it has them.
    One trace serves every batch size, and every length where the model's code allows it.

    Args:
        model: any module that eager PyTorch trains; on the CPU, or on ``meta`` to plan without weights.
        example_args: arguments like those of a call; only shapes and dtypes matter, for most models.
        example_kwargs: keyword arguments like those of a call.
        optim_dtype: dtype of the optimizer's copies of the parameters; None: the parameters' own.
        name: for logs and traces; None: ``filename:line`` of the caller.
        model_run_config: defaults for every call.
        pin_model: how host weights are pinned; see `RoundPipe`.
        devices: the rotation; see `RoundPipe`. Blocks too large for the memory of one of them are cut inside.
        balance: what layers are balanced by: ``"time"`` (FLOPs and bytes), ``"size"`` (weight bytes), or a
            function from a module to a weight.
        fallback: what to do when the model's own forward can't be traced: True warns and returns an
            `AutoRoundPipe`, which runs that forward on the CPU and its modules on the devices; found out at a later
            call, the `RoundPipe` does the same for that call and those like it, with the parameters and optimizers
            it has. False raises.
        **wrap_kwargs: options of the fallback: ``lower_threshold``, ``upper_threshold``, ``skip_modules`` and
            ``override_config``, see `roundpipe.wrap_model_to_roundpipe`.

    Returns:
        A `RoundPipe`; an `AutoRoundPipe` if the model can't be traced.

    Raises:
        ConfigError: an argument can't be used as given.
        TraceError: the model can't be traced, and ``fallback`` is False; at the first call, if there is no example.
    """
    check_model(model, "compile")
    if not (balance in ("time", "size") if isinstance(balance, str) else callable(balance)):
        raise ConfigError(f"balance={balance!r}; allowed are 'time', 'size' or a function from a module to a weight")
    if not isinstance(example_args, tuple):
        raise ConfigError(f"example_args is {type(example_args).__name__}; give a tuple, such as (x,)")
    unknown = [repr(option) for option in wrap_kwargs if option not in _WRAP_OPTIONS]
    if unknown:
        raise ConfigError(f"compile has no option {', '.join(unknown)}; see help(roundpipe.compile)")
    name = name or caller_name()
    settings: dict[str, Any] = {
        "optim_dtype": optim_dtype,
        "name": name,
        "model_run_config": model_run_config,
        "pin_model": pin_model,
        "devices": devices,
    }

    choice = PartsChoice(model, **wrap_kwargs)
    kind = type(model).__name__

    def on_failure(error: TraceError) -> None:
        if not fallback:
            raise error
        choice.hold(error.facts.stateful)
        warn(f"{kind} runs module by module, as an AutoRoundPipe, because its forward can't be traced: {error}")

    has_example = bool(example_args) or example_kwargs is not None
    preview = None if has_example else own_example(model)
    source = TracedSource(model, LowerOptions(balance, largest_layer_bytes(devices)), on_failure, preview)
    if has_example and source.chain_for(example_args, example_kwargs or {}) is None:
        return choice.wrap(settings)
    pipe = RoundPipe(ChainProgram(model, source, choice.fallback), **settings)
    if has_example:
        logger.info("%s", pipe.partition_table())
    return pipe
