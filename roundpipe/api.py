"""`compile` and `wrap_model_to_roundpipe`: any module in, a model that trains in rotation out.

cut            trace the model, as soon as there are arguments, and cut it into layers    `roundpipe.fx.source`
RoundPipe      run the layers                                                             `roundpipe.wrappers.pipe`
PartsChoice    for a model that can't be traced: which modules run on the devices
"""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from roundpipe.core.checks import check_example, check_flag, check_type
from roundpipe.core.options import with_options
from roundpipe.fx.passes.cuts import Balance, check_balance
from roundpipe.fx.passes.lower import LowerOptions
from roundpipe.fx.source import TracedSource, own_example
from roundpipe.runtime.config import RoundPipeRunConfig
from roundpipe.runtime.device.resolve import DeviceLike, largest_layer_bytes
from roundpipe.runtime.optimizer.reads import settle_reads_of
from roundpipe.runtime.ranks.group import ProcessGroupLike
from roundpipe.runtime.weights.host_weights import PinMode
from roundpipe.wrappers.auto import AutoRoundPipe
from roundpipe.wrappers.calls import ChainProgram
from roundpipe.wrappers.model_view import check_wrappable
from roundpipe.wrappers.parts_choice import LOWER_THRESHOLD_BYTES, PartsChoice, Reaction
from roundpipe.wrappers.pipe import RoundPipe

logger = logging.getLogger(__name__)

_SETTINGS = ("optim_dtype", "pin_model", "devices", "process_group", "shard_optimizer")
_TRACING = ("example_args", "example_kwargs", "balance")
_PARTS_OPTIONS = ("lower_threshold", "upper_threshold", "skip_modules", "override_config")


@with_options("compile(model, {0}=...)", *_PARTS_OPTIONS)
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
    process_group: ProcessGroupLike | None = None,
    shard_optimizer: bool = False,
    **wrap_kwargs: Any,
) -> RoundPipe | AutoRoundPipe:
    """Cut a model into layers and make it train in rotation.

    The model is traced with the example, or at the first call with that call's arguments. (For a partition table
    before the first call, its own ``dummy_inputs`` are the example, if it has them.) One trace serves every batch
    size, and every sequence length that the model's code allows.

    Args:
        model: any module that eager PyTorch trains; on the CPU, or on ``meta`` to plan without weights.
        example_args: arguments like those of a call; only shapes and dtypes matter, for most models.
        example_kwargs: keyword arguments like those of a call.
        optim_dtype: dtype of the optimizer's copies of the parameters; None: float32 for parameters of half precision,
            else the parameters' own.
        name: for logs and traces; None: ``filename:line`` of the caller.
        model_run_config: defaults for every call.
        pin_model: how host weights are pinned; see `RoundPipe`.
        devices: the rotation; see `RoundPipe`. Blocks too large for the memory of one of them are cut inside.
        balance: what layers are balanced by: ``"time"`` (FLOPs and bytes), ``"size"`` (weight bytes), or a
            function from a module to a weight.
        fallback: what happens if the model's own forward can't be traced. True: a warning, and an `AutoRoundPipe`
            that runs this forward on the CPU and its modules on the devices; if only a later call shows it, the
            `RoundPipe` does the same for such calls, with the parameters and optimizers that it has. False: an error.
        process_group: the ranks that train this model, each on its part of every batch; see `RoundPipe`.
        shard_optimizer: whether each rank has a part of the optimizer's side alone; see `RoundPipe`.
        **wrap_kwargs: options of the fallback: ``lower_threshold``, ``upper_threshold``, ``skip_modules`` and
            ``override_config``, see `roundpipe.wrap_model_to_roundpipe`.

    Returns:
        A `RoundPipe`; an `AutoRoundPipe` if the model can't be traced.

    Raises:
        ConfigError: an argument can't be used as given.
        TraceError: the model can't be traced, and ``fallback`` is False; at the first call, if there is no example.
    """
    check_wrappable(model, "compile")
    settle_reads_of(model.parameters())
    check_flag("fallback", fallback)
    choice = PartsChoice(model, **wrap_kwargs, reaction="warn" if fallback else "refuse")
    program = cut(model, choice, devices, balance, example_args, example_kwargs)
    settings: dict[str, Any] = {"optim_dtype": optim_dtype, "name": name, "pin_model": pin_model, "devices": devices}
    settings.update(process_group=process_group, shard_optimizer=shard_optimizer)
    if program is None:
        return choice.wrap(model_run_config, **settings)
    pipe = RoundPipe(program, model_run_config=model_run_config, **settings)
    if (example_args or example_kwargs is not None) and logger.isEnabledFor(logging.INFO):
        logger.info("%s", pipe.partition_table())
    return pipe


@with_options("wrap_model_to_roundpipe(model, {0}=...)", *_SETTINGS, *_TRACING)
def wrap_model_to_roundpipe(
    model: nn.Module,
    use_sequential_preset: bool | None = None,
    lower_threshold: int = LOWER_THRESHOLD_BYTES,
    upper_threshold: int | None = None,
    skip_modules: Container[nn.Module] = [],
    override_config: Mapping[nn.Module, RoundPipeRunConfig] = {},
    model_run_config: RoundPipeRunConfig = RoundPipeRunConfig(),  # noqa: B008 - frozen
    name: str | None = None,
    **roundpipe_kwargs: Any,
) -> RoundPipe | AutoRoundPipe:
    """Wrap a model: cut by the graph compiler if it can be traced, otherwise module by module.

    Module by module means that the first of these rules that holds decides for the model, and then for what is below:

    1. A module in ``skip_modules`` is left as it is, on the CPU.
    2. One that must run once, or has such a module in it, is treated as in 5: its code remembers something from call to
       call (a counter, a list, a generator of its own), writes its weights or asks whether gradients are recorded.
    3. An ``nn.Sequential`` becomes a pipeline with one layer per child.
    4. A module with a forward becomes a pipeline of one layer if its own parameters have at least ``lower_threshold``
       bytes, or all in it at most ``upper_threshold``. It is not split into microbatches if it is smaller than
       ``lower_threshold`` or if the batch is not its first dimension (``batch_first=False`` somewhere in it). An
       activation with ``inplace=True`` is left on the CPU.
    5. Any other module runs its own forward on the CPU, and the rules decide for each of its children, or for each
       element of an ``nn.ModuleList``.

    The loss function of a Hugging Face model runs on the device. A module that does more than return a value (writes
    into its arguments, changes attributes, lists or globals, is given objects such as caches) moves back to the CPU
    once this shows, with a warning. If its first call in a mode shows it, everything is put back before it runs again;
    if only a later one does, what that call changed stays. The model itself is not changed and keeps the parameters.

    Each pipeline splits its inputs on dim 0, unless ``override_config`` says otherwise: ``num_microbatch=1``, say, for
    a module whose inputs have no batch there. All elements of an ``nn.ModuleList`` but the last pass on their outputs
    in pieces, which the next pipeline takes without a copy; the code around them sees tensors, merged when it first
    uses their data. With ``merge_output=True`` an element's outputs are merged at once; with ``merge_output=False``
    that code gets `RoundPipePackedData`.

    Args:
        model: any module; on the CPU.
        use_sequential_preset: the graph compiler: None tries it, True requires it, False leaves it out. It traces at
            once if there is an example or the model has ``dummy_inputs`` that can be traced, otherwise at the first
            call, which then raises the errors below.
        lower_threshold: bytes; see above.
        upper_threshold: bytes; None: those of the whole model // (number of devices + 1).
        skip_modules: modules that stay on the CPU; the model itself is returned as it is.
        override_config: options of single modules that become pipelines.
        model_run_config: defaults for every call.
        name: for logs and traces; None: ``filename:line`` of the caller.
        **roundpipe_kwargs: ``optim_dtype``, ``pin_model``, ``devices``, ``process_group``, ``shard_optimizer`` as for
            `RoundPipe`; ``example_args``, ``example_kwargs``, ``balance`` as for `roundpipe.compile`.

    Returns:
        A `RoundPipe` if the model is cut by the graph compiler or is an ``nn.Sequential``, else an `AutoRoundPipe`.

    Raises:
        ConfigError: an argument can't be used as given.
        NotImplementedError: ``use_sequential_preset=True``, and the model can't be traced.
    """
    check_wrappable(model, "wrap_model_to_roundpipe")
    settle_reads_of(model.parameters())
    check_type("use_sequential_preset", use_sequential_preset, bool | None, "True, False or None")
    settings = {"name": name, **{key: value for key, value in roundpipe_kwargs.items() if key in _SETTINGS}}
    tracing = {key: value for key, value in roundpipe_kwargs.items() if key in _TRACING}
    reaction: Reaction = "not implemented" if use_sequential_preset else "log"
    thresholds = lower_threshold, upper_threshold
    choice = PartsChoice(model, *thresholds, skip_modules, override_config, splits_inside=True, reaction=reaction)
    if model in skip_modules:
        return model  # type: ignore[return-value]
    program = None
    if use_sequential_preset is not False:
        program = cut(model, choice, settings.get("devices"), **tracing)
    if program is None:
        return choice.wrap(model_run_config, **settings)
    kind = type(model).__name__
    if program.source.latest is not None:
        logger.info("%s is cut by the graph compiler; use_sequential_preset=False wraps its modules instead", kind)
    else:
        logger.info("%s will be cut by the graph compiler at its first call", kind)
    return RoundPipe(program, model_run_config=model_run_config, **settings)


def cut(
    model: nn.Module,
    choice: PartsChoice,
    devices: Sequence[DeviceLike] | DeviceLike | None = None,
    balance: Balance = "time",
    example_args: tuple[Any, ...] = (),
    example_kwargs: dict[str, Any] | None = None,
) -> ChainProgram | None:
    """The model as layers, traced now if there is an example, else at the first call; None if it runs in parts."""
    check_example(example_args, example_kwargs)
    check_balance(balance)
    has_example = bool(example_args) or example_kwargs is not None
    preview = None if has_example else own_example(model)
    options = choice.lower_options = LowerOptions(balance, largest_layer_bytes(devices))
    source = TracedSource(model, options, choice.on_failure, preview)
    if has_example and source.chain_for(example_args, example_kwargs or {}) is None:
        return None
    return ChainProgram(model, source, choice.make_fallback)
