"""Which modules run on the devices: `wrap_model_to_roundpipe`, and the recursion that `compile` falls back to.

wrap_model_to_roundpipe ---- the graph compiler, unless refused; a `RoundPipe` if it can trace the model
  `- PartsChoice ----------- otherwise a choice module by module, from the root down: at once, or at the first call
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from roundpipe.core.caller import caller_name, warn
from roundpipe.core.errors import ConfigError, TraceError, enumerated
from roundpipe.core.module_tree import weight_bytes_of
from roundpipe.effects.run_once import differentiates_gradients, holders_of, holders_of_those, runs_autograd
from roundpipe.fx.passes.lower import LowerOptions
from roundpipe.fx.source import TracedSource, own_example
from roundpipe.runtime.config import RoundPipeRunConfig
from roundpipe.runtime.device.resolve import largest_layer_bytes, resolve_devices
from roundpipe.wrappers.auto import AutoRoundPipe, HostRunner, Parts, PartsProgram
from roundpipe.wrappers.model_view import check_parts_unwrapped
from roundpipe.wrappers.part import IN_ONE_PIECE, is_sequential, overlaid
from roundpipe.wrappers.pipe import ChainProgram, RoundPipe
from roundpipe.wrappers.session import Session

logger = logging.getLogger(__name__)

LOWER_THRESHOLD_BYTES = 16 * 1024

_SETTINGS = ("optim_dtype", "pin_model", "devices")
_TRACING = ("example_args", "example_kwargs", "balance")


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

    Module by module means, for the model and then for what is below it, the first of these that holds:

    1. in ``skip_modules``: left as it is, on the CPU;
    2. it, or a module in it, must run once, since its code remembers something from call to call (a counter, a list,
       a generator of its own), writes its weights or asks whether gradients are recorded: as 5;
    3. a ``nn.Sequential``: a pipeline with one layer per child;
    4. parameters of its own of at least ``lower_threshold`` bytes, or at most ``upper_threshold`` bytes in all, and
       a forward: a pipeline of one layer. It is not split into microbatches if it is smaller than ``lower_threshold``
       or has the batch in another dimension than the first (``batch_first=False`` somewhere in it); an activation
       with ``inplace=True`` is left on the CPU;
    5. anything else runs its own forward on the CPU, and the choice is made for each of its children, or for each
       element of a ``nn.ModuleList``.

    The loss function of a Hugging Face model runs on the device. A module that does more than return a value (writes
    into its arguments, changes attributes, lists or globals, is given objects such as caches) goes back to the CPU
    when it is found out, with a warning. If its first call in a mode shows it, all of that is put back before it runs
    again; if only a later one does, what that call had changed by then stays. The model itself is not changed and
    keeps the parameters.

    Each pipeline splits what it is given on dim 0, or gets other options from ``override_config``: say
    ``num_microbatch=1`` for a module whose inputs have something else than the batch there. Elements of a
    ``nn.ModuleList``, all but the last, hand on their outputs in pieces, which the next pipeline takes as they are,
    without a copy; to the code around them they are tensors, put together when it first uses their data. With
    ``merge_output=True`` for an element they are put together at once; with ``merge_output=False`` that code gets
    `RoundPipePackedData`.

    Args:
        model: any module; on the CPU.
        use_sequential_preset: the graph compiler: None tries it, True requires it, False leaves it out. It traces at
            once if there is an example, or if the model's own ``dummy_inputs`` can be traced; otherwise at the first
            call, which then raises what is said below.
        lower_threshold: bytes; see above.
        upper_threshold: bytes; None: those of the whole model // (number of devices + 1).
        skip_modules: modules that stay on the CPU; the model itself is given back as it is.
        override_config: options of single modules that become pipelines.
        model_run_config: defaults for every call.
        name: for logs and traces; None: ``filename:line`` of the caller.
        **roundpipe_kwargs: ``optim_dtype``, ``pin_model``, ``devices`` as for `RoundPipe`; ``example_args``,
            ``example_kwargs``, ``balance`` as for `roundpipe.compile`.

    Returns:
        A `RoundPipe` if the model is cut by the graph compiler or is an ``nn.Sequential``, else an `AutoRoundPipe`.

    Raises:
        ConfigError: an argument can't be used as given.
        NotImplementedError: ``use_sequential_preset=True``, and the model can't be traced.
    """
    unknown = [repr(one) for one in roundpipe_kwargs if one not in (*_SETTINGS, *_TRACING)]
    if unknown:
        allowed = ", ".join((*_SETTINGS, *_TRACING))
        raise ConfigError(f"wrap_model_to_roundpipe has no option {', '.join(unknown)}; further ones are {allowed}")
    check_model(model, "wrap_model_to_roundpipe")
    settings = {key: value for key, value in roundpipe_kwargs.items() if key in _SETTINGS}
    settings |= {"name": name or caller_name(), "model_run_config": model_run_config}
    choice = PartsChoice(model, lower_threshold, upper_threshold, skip_modules, override_config, splits_inside=True)
    if model in skip_modules:
        return model  # type: ignore[return-value]
    if use_sequential_preset is not False:
        tracing = {key: value for key, value in roundpipe_kwargs.items() if key in _TRACING}
        pipe = _traced(model, settings, choice, required=bool(use_sequential_preset), **tracing)
        if pipe is not None:
            return pipe
    return choice.wrap(settings)


def check_model(model: Any, caller: str) -> None:
    """Raise `ConfigError` for what is no model, or one that is wrapped already, or has a part that is."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{caller} takes an nn.Module, got {type(model).__name__}")
    if isinstance(model, RoundPipe):
        done = "compiled" if caller == "compile" else "wrapped"
        raise ConfigError(f"the model is {done} already; pass the original, which {caller} left as it was")
    check_parts_unwrapped(model)


def _traced(
    model: nn.Module,
    settings: Mapping[str, Any],
    choice: PartsChoice,
    *,
    required: bool,
    example_args: tuple[Any, ...] = (),
    example_kwargs: dict[str, Any] | None = None,
    balance: Any = "time",
) -> RoundPipe | None:
    """The model as the graph compiler cuts it; None if its forward can't be traced."""
    kind = type(model).__name__

    def on_failure(error: TraceError) -> None:
        if required:
            raise NotImplementedError(f"use_sequential_preset=True, but {kind} can't be traced: {error}") from error
        choice.hold(error.facts.stateful)
        logger.info("%s can't be traced, so it is not cut by the graph compiler: %s", kind, error)

    options = LowerOptions(balance, largest_layer_bytes(settings.get("devices")))
    has_example = bool(example_args) or example_kwargs is not None
    preview = None if has_example else own_example(model)
    source = TracedSource(model, options, on_failure, preview)
    if has_example and source.chain_for(example_args, example_kwargs or {}) is None:
        return None
    if source.latest is not None:
        logger.info("%s is cut by the graph compiler; use_sequential_preset=False wraps its modules instead", kind)
    else:
        logger.info("%s will be cut by the graph compiler at its first call", kind)
    return RoundPipe(ChainProgram(model, source, choice.fallback), **settings)


@dataclass(slots=True)
class PartsChoice:
    """How a model is wrapped module by module, should it have to be; see `wrap_model_to_roundpipe` for the options.

    Raises:
        ConfigError: an option can't be used as given.
    """

    model: nn.Module
    lower_threshold: int = LOWER_THRESHOLD_BYTES
    upper_threshold: int | None = None
    skip_modules: Container[nn.Module] = ()
    override_config: Mapping[nn.Module, RoundPipeRunConfig] = field(default_factory=dict)
    splits_inside: bool = False
    """See `roundpipe.wrappers.auto.Parts`."""
    held: set[nn.Module] = field(default_factory=set)
    """Run their own forward on the CPU, since it must not run twice; see `hold`."""

    def __post_init__(self) -> None:
        _check_options(self.model, self.lower_threshold, self.upper_threshold, self.override_config)
        _check_skipped(self.skip_modules)

    def hold(self, names: Iterable[str]) -> None:
        """Runs the forwards of modules that must run once, and of those that hold them, on the CPU."""
        for name in names:
            self.held.update(self.model.get_submodule(one) for one in (name, *holders_of(name)))

    def wrap(self, settings: Mapping[str, Any]) -> RoundPipe | AutoRoundPipe:
        """A wrapper with these settings: name, devices and so on."""
        choice = self._choose(len(resolve_devices(settings.get("devices"))))
        settings = {**settings, "model_run_config": self._config(choice, settings["model_run_config"])}
        if self.model in choice.parts and is_sequential(self.model):
            return RoundPipe(self.model, **settings)
        parts = self._parts(choice)
        return AutoRoundPipe(PartsProgram(self.model, parts), **settings)

    def fallback(self, session: Session) -> HostRunner:
        """What runs the calls of a session's model for which it turned out to have no layers."""
        choice = self._choose(session.engine.num_workers)
        return HostRunner(session, self._parts(choice), self._config(choice, session.config))

    def _choose(self, num_devices: int) -> _Choice:
        upper_threshold = self.upper_threshold
        if upper_threshold is None:
            upper_threshold = weight_bytes_of(self.model) // (num_devices + 1)
        held = self.held | holders_of_those(self.model)
        stays_on_host = differentiates_gradients(self.model)
        if stays_on_host:
            held.add(self.model)
        thresholds = (self.lower_threshold, upper_threshold)
        choice = _Choice(self.model, *thresholds, self.skip_modules, held, self.override_config)
        if stays_on_host:
            choice.leave_all()
        else:
            choice.visit(self.model)
        choice.warn_of_ignored()
        return choice

    def _config(self, choice: _Choice, of_model: RoundPipeRunConfig) -> RoundPipeRunConfig:
        return overlaid(choice.parts.get(self.model) or choice.override.get(self.model) or of_model, of_model)

    def _parts(self, choice: _Choice) -> Parts:
        nothing_chosen = not choice.parts and self.model not in choice.held
        if self.model in choice.parts or nothing_chosen and not any(one in self.skip_modules for one in choice.left):
            return Parts.whole(self.model, splits_inside=self.splits_inside)
        return Parts(choice.parts, tuple(choice.left), self.splits_inside)


def _check_skipped(modules: Any) -> None:
    given = type(modules).__name__
    if isinstance(modules, (str, Iterator)) or not isinstance(modules, (Container, Iterable)):
        shown = f"the name {modules!r}" if isinstance(modules, str) else f"of type {given}"
        raise ConfigError(f"skip_modules is {shown}; give a list of modules, such as [model.head]")
    wrong = [one for one in modules if not isinstance(one, nn.Module)] if isinstance(modules, Iterable) else []
    if wrong:
        raise ConfigError(
            f"skip_modules has {wrong[0]!r}, a {type(wrong[0]).__name__}; give the modules themselves, such as "
            "[model.head], or [model.get_submodule(name)]"
        )


def _check_options(model: nn.Module, lower: Any, upper: Any, overrides: Any) -> None:
    for name, value in (("lower_threshold", lower), ("upper_threshold", upper)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            if name == "upper_threshold" and value is None:
                continue
            raise ConfigError(f"{name}={value!r}; give a number of bytes")
    known = set(model.modules())
    for module, config in overrides.items():
        if module not in known:
            raise ConfigError(f"override_config has a {type(module).__name__} that is no module of the model")
        if not isinstance(config, RoundPipeRunConfig):
            raise ConfigError(f"override_config has a {type(config).__name__}; give RoundPipeRunConfig objects")


@dataclass(slots=True)
class _Choice:
    """The choice for each module, made from the root down."""

    model: nn.Module
    lower_threshold: int
    upper_threshold: int
    skip: Container[nn.Module]
    """Left as they are by the user's wish."""
    held: Container[nn.Module]
    """Must be opened."""
    override: Mapping[nn.Module, RoundPipeRunConfig]
    parts: dict[nn.Module, RoundPipeRunConfig] = field(default_factory=dict)
    """Become pipelines."""
    left: dict[nn.Module, None] = field(default_factory=dict)
    """Are called as they are."""
    opened: dict[nn.Module, None] = field(default_factory=dict)
    """Run their own forward on the CPU, around what was chosen for their children."""

    def visit(self, module: nn.Module) -> None:
        """Choose for a module and what is below it."""
        if module in self.parts or module in self.left or module in self.opened:
            return
        runs_gradients = module is not self.model and module in self.held and runs_autograd(module)
        if module in self.skip or _is_inplace_activation(module) or runs_gradients:
            self.left[module] = None
        elif module not in self.held and (is_sequential(module) or self._is_one_layer(module)):
            given = self.override.get(module, RoundPipeRunConfig())
            stays_whole = not is_sequential(module) and weight_bytes_of(module) < self.lower_threshold
            if stays_whole or _has_batch_elsewhere(module):
                given = overlaid(given, IN_ONE_PIECE)
            self.parts[module] = given
        else:
            self.opened[module] = None
            for child in module.children():
                self.visit(child)

    def leave_all(self) -> None:
        """Choose the host for all of a model that makes gradients of gradients."""
        self.opened[self.model] = None
        self.left.update(dict.fromkeys(self.model.children()))
        warn(
            f"the forward of {type(self.model).__name__} makes gradients that the loss goes through, which can't be "
            "done with layers on devices: all of it runs on the CPU"
        )

    def _is_one_layer(self, module: nn.Module) -> bool:
        if type(module).forward is nn.Module.forward:
            return False
        own_bytes = sum(one.numel() * one.element_size() for one in module.parameters(recurse=False))
        return own_bytes >= self.lower_threshold or weight_bytes_of(module) <= self.upper_threshold

    def warn_of_ignored(self) -> None:
        """Warn of options for modules that are inside a pipeline or around one."""
        names = {module: name for name, module in self.model.named_modules()}
        chosen = {*self.parts, *self.left, *self.opened}
        inside = [name for module, name in names.items() if module not in chosen and module in self.skip]
        if inside:
            verb = "is" if len(inside) == 1 else "are"
            warn(
                f"skip_modules: {enumerated(inside)} {verb} inside a module that becomes one pipeline, and with it on "
                "the devices; skip that one, or lower the thresholds"
            )
        unused = [names[one] for one in self.override if one not in self.parts and one is not self.model]
        if unused:
            why = "since it is no pipeline of its own" if len(unused) == 1 else "since none is a pipeline of its own"
            warn(f"override_config: the options of {enumerated(unused)} have no effect, {why}")


def _is_inplace_activation(module: nn.Module) -> bool:
    return getattr(module, "inplace", False) is True and next(module.parameters(), None) is None


def _has_batch_elsewhere(module: nn.Module) -> bool:
    return any(getattr(one, "batch_first", True) is False for one in module.modules())
