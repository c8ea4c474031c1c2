"""Which modules of a model become parts, where the model is not cut into layers: see `PartsChoice`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import nn

from roundpipe.core.attributes import given_attribute
from roundpipe.core.caller import warn
from roundpipe.core.checks import check_count, items_of
from roundpipe.core.errors import ConfigError, TraceCause, TraceError, enumerated
from roundpipe.core.module_tree import modules_in, puts_time_first, weight_bytes_of
from roundpipe.core.storages import bytes_of
from roundpipe.effects.places import has_hooks
from roundpipe.effects.run_once import differentiates_gradients, holders_of, holders_of_those, runs_autograd
from roundpipe.fx.passes.lower import LowerOptions
from roundpipe.fx.source import TracedSource
from roundpipe.runtime.config import RoundPipeRunConfig
from roundpipe.runtime.device.resolve import resolve_devices
from roundpipe.wrappers.auto import AutoRoundPipe, HostRunner, PartsProgram
from roundpipe.wrappers.calls import ChainProgram
from roundpipe.wrappers.module_layers import ModuleSource
from roundpipe.wrappers.parts import IN_ONE_PIECE, is_sequential, overlaid
from roundpipe.wrappers.pipe import RoundPipe
from roundpipe.wrappers.session import Runner, Session

logger = logging.getLogger(__name__)

LOWER_THRESHOLD_BYTES = 16 * 1024

Reaction = Literal["warn", "log", "refuse", "not implemented"]
"""To a model that can't be traced: two of them refuse it, the others let it run in parts."""


@dataclass(slots=True)
class PartsChoice:
    """How a model runs in parts, if it has to; for options and errors see `roundpipe.wrap_model_to_roundpipe`."""

    model: nn.Module
    lower_threshold: int = LOWER_THRESHOLD_BYTES
    upper_threshold: int | None = None
    skip_modules: Container[nn.Module] = ()
    override_config: Mapping[nn.Module, RoundPipeRunConfig] = field(default_factory=dict)
    splits_inside: bool = False
    """See `PartsProgram`."""
    reaction: Reaction = "warn"
    host_modules: set[nn.Module] = field(init=False, default_factory=set)
    """Modules whose own forward must run on the CPU, once, and those that hold them."""
    cause: TraceCause | None = field(init=False, default=None)
    """Why it can't be traced."""
    lower_options: LowerOptions | None = None
    """How modules are cut into layers that can be traced where the whole can't; None: none is."""
    reading: tuple[nn.Module, ...] = field(init=False, default=())
    """Modules whose code does something else for each batch's data."""

    def __post_init__(self) -> None:
        thresholds = self.lower_threshold, self.upper_threshold
        _check_options(self.model, *thresholds, self.override_config, self.skip_modules)

    def on_failure(self, error: TraceError) -> None:
        """React to an error of the tracer; returns if the model runs in parts from now on."""
        kind = type(self.model).__name__
        self.cause = error.cause
        if self.reaction == "refuse":
            raise error
        if self.reaction == "not implemented":
            raise NotImplementedError(f"use_sequential_preset=True, but {kind} can't be traced: {error}") from error
        for name in error.facts.stateful:
            self.host_modules.update(self.model.get_submodule(module) for module in (name, *holders_of(name)))
        self.reading = tuple(map(self.model.get_submodule, error.facts.reading))
        if error.cause is TraceCause.ARGUMENT_DATA:
            warn(f"{kind} runs module by module, as an AutoRoundPipe, where no trace serves a batch: {error}")
        elif self.reaction == "log":
            logger.info("%s can't be traced, so it is not cut by the graph compiler: %s", kind, error)
        else:
            warn(f"{kind} runs module by module, as an AutoRoundPipe, because its forward can't be traced: {error}")

    def wrap(self, config: RoundPipeRunConfig, **settings: Any) -> RoundPipe:
        """A wrapper of the model in parts, with these settings: name, devices and so on."""
        walk = self._walk(len(resolve_devices(settings.get("devices"))))
        is_chain = self.model in walk.parts and is_sequential(self.model)
        config = self._config(walk, config)
        if is_chain:
            return RoundPipe(ChainProgram(self.model, ModuleSource(self.model)), model_run_config=config, **settings)
        return AutoRoundPipe(self._program(walk), model_run_config=config, **settings)

    def make_fallback(self, session: Session) -> HostRunner:
        """What runs the calls of a session's model for which there are no layers."""
        walk = self._walk(session.engine.num_workers)
        return HostRunner(session, self._program(walk), self._config(walk, session.config))

    def _walk(self, num_devices: int) -> _Walk:
        upper_threshold = self.upper_threshold
        if upper_threshold is None:
            upper_threshold = weight_bytes_of(self.model) // (num_devices + 1)
        on_host = self.host_modules | holders_of_those(self.model)
        all_on_host = differentiates_gradients(self.model)
        if all_on_host:
            on_host.add(self.model)
        walk = _Walk(self, upper_threshold, on_host)
        (walk.leave_all if all_on_host else walk.visit)(self.model)
        walk.warn_of_unused_options()
        return walk

    def _config(self, walk: _Walk, of_model: RoundPipeRunConfig) -> RoundPipeRunConfig:
        return overlaid(walk.parts.get(self.model) or self.override_config.get(self.model) or of_model, of_model)

    def _program(self, walk: _Walk) -> PartsProgram:
        nothing_chosen = not walk.parts and self.model not in walk.on_host
        is_whole = nothing_chosen and not any(module in self.skip_modules for module in walk.left)
        if self.model in walk.parts or is_whole:
            parts, left = {self.model: RoundPipeRunConfig()}, []
        else:
            parts, left = walk.parts, list(walk.left)
        traced = {module: self._source_of(module) for module in walk.traced}
        kept = tuple(left), self.splits_inside, self.cause
        return PartsProgram(self.model, parts, *kept, traced=traced, make_inner=self._run_inner)

    def _run_inner(self, module: nn.Module, session: Session) -> Runner:
        """What runs a module in parts of its own."""
        return self._choice_of(module).make_fallback(session)

    def _source_of(self, module: nn.Module) -> tuple[TracedSource, Callable[[Session], Runner]]:
        """Layers of a module, traced at its first call, and what runs it in parts of its own if it can't be traced."""
        assert self.lower_options is not None
        choice = self._choice_of(module)
        return TracedSource(module, self.lower_options, choice.on_failure), choice.make_fallback

    def _choice_of(self, module: nn.Module) -> PartsChoice:
        """How a module of the model runs in parts."""
        return replace(self, model=module, override_config={}, reaction="log")


def _check_options(model: nn.Module, lower: Any, upper: Any, overrides: Any, skipped: Any) -> None:
    for name, value in (("lower_threshold", lower), ("upper_threshold", upper)):
        if name == "lower_threshold" or value is not None:
            check_count(name, value, "a number of bytes", least=0)
    known = set(modules_in(model))
    if not isinstance(overrides, Mapping):
        raise ConfigError(
            f"override_config is {type(overrides).__name__}; give a dict from modules to RoundPipeRunConfig"
        )
    for module, config in overrides.items():
        if module not in known:
            raise ConfigError(f"override_config has a {type(module).__name__} that is not a module of the model")
        if not isinstance(config, RoundPipeRunConfig):
            raise ConfigError(f"override_config has a {type(config).__name__}; give RoundPipeRunConfig objects")
    if isinstance(skipped, (str, Iterator)) or not isinstance(skipped, (Container, Iterable)):
        shown = f"the name {skipped!r}" if isinstance(skipped, str) else f"of type {type(skipped).__name__}"
        raise ConfigError(f"skip_modules is {shown}; give a list of modules, such as [model.head]")
    for entry in items_of("skip_modules", skipped, "a list of modules") if isinstance(skipped, Iterable) else ():
        if not isinstance(entry, nn.Module):
            raise ConfigError(
                f"skip_modules has {entry!r}, a {type(entry).__name__}; give the modules themselves, such as "
                "[model.head], or [model.get_submodule(name)]"
            )


@dataclass(slots=True)
class _Walk:
    """Chooses for each module of a model, from the root down."""

    choice: PartsChoice
    upper_threshold: int
    on_host: Container[nn.Module]
    """Must be opened."""
    parts: dict[nn.Module, RoundPipeRunConfig] = field(default_factory=dict)
    """Become pipelines."""
    left: dict[nn.Module, None] = field(default_factory=dict)
    """Are called as they are."""
    opened: dict[nn.Module, None] = field(default_factory=dict)
    """Run their own forward on the CPU, around what was chosen for their children."""
    traced: dict[nn.Module, None] = field(default_factory=dict)
    """Those of the pipelines that are cut into layers by the graph compiler."""

    def visit(self, module: nn.Module) -> None:
        if module in self.parts or module in self.left or module in self.opened:
            return
        choice = self.choice
        runs_gradients = module is not choice.model and module in self.on_host and runs_autograd(module)
        if module in choice.skip_modules or _is_inplace_activation(module) or runs_gradients:
            self.left[module] = None
        elif module not in self.on_host and (is_sequential(module) or self._is_one_layer(module)):
            options = choice.override_config.get(module, RoundPipeRunConfig())
            stays_whole = not is_sequential(module) and weight_bytes_of(module) < choice.lower_threshold
            if stays_whole or any(map(puts_time_first, modules_in(module))):
                options = overlaid(options, IN_ONE_PIECE)
            self.parts[module] = options
        elif self._may_be_traced(module):
            self.parts[module] = choice.override_config.get(module, RoundPipeRunConfig())
            self.traced[module] = None
        else:
            self.opened[module] = None
            for child in module.children():
                self.visit(child)

    def leave_all(self, model: nn.Module) -> None:
        self.opened[model] = None
        self.left.update(dict.fromkeys(model.children()))
        warn(
            f"the forward of {type(model).__name__} makes gradients that the loss goes through, which can't be "
            "done with layers on devices: all of it runs on the CPU"
        )

    def _may_be_traced(self, module: nn.Module) -> bool:
        """Whether a graph of the module may serve every batch, though none of the whole model does."""
        choice = self.choice
        if choice.lower_options is None or not choice.reading or module is choice.model or not _has_forward(module):
            return False
        return not (self._reads_data(module) or has_hooks(module) or runs_autograd(module))

    def _reads_data(self, module: nn.Module) -> bool:
        return not set(self.choice.reading).isdisjoint(modules_in(module))

    def _is_one_layer(self, module: nn.Module) -> bool:
        if not _has_forward(module):
            return False
        if self._reads_data(module) and any(isinstance(inner, nn.ModuleList) for inner in modules_in(module)):
            return False  # such as a tower of blocks, whose activations are many
        own_bytes = sum(map(bytes_of, module.parameters(recurse=False)))
        return own_bytes >= self.choice.lower_threshold or weight_bytes_of(module) <= self.upper_threshold

    def warn_of_unused_options(self) -> None:
        choice = self.choice
        names = {module: name for name, module in choice.model.named_modules()}
        chosen = {*self.parts, *self.left, *self.opened}
        inside = [name for module, name in names.items() if module not in chosen and module in choice.skip_modules]
        if inside:
            verb = "is" if len(inside) == 1 else "are"
            warn(
                f"skip_modules: {enumerated(inside)} {verb} inside a module that becomes one pipeline, and with it on "
                "the devices; skip that one, or lower the thresholds"
            )
        inner = (module for module in choice.override_config if module is not choice.model)
        unused = [names[module] for module in inner if module not in self.parts]
        if unused:
            why = "since it is not a pipeline of its own" if len(unused) == 1 else "since none is a pipeline of its own"
            warn(f"override_config: the options of {enumerated(unused)} have no effect, {why}")


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def _is_inplace_activation(module: nn.Module) -> bool:
    return given_attribute(module, "inplace") is True and next(module.parameters(), None) is None
