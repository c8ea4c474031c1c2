"""What everything inside one wrapper shares: workers, host weights, the optimizer's side, checkpoints, counts.

    RoundPipe ---- Session      opened with the wrapper, closed with it
      `- runner ------'         `roundpipe.wrappers.calls`: runs calls, on the session's workers

A model in parts has a runner for each of them, all on one session.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch
from torch import nn
from torch.nn.utils import parametrize

from roundpipe.core.caller import caller_name
from roundpipe.core.errors import ClosedError, ConfigError
from roundpipe.runtime.config import RoundPipeRunConfig
from roundpipe.runtime.device.resolve import DeviceLike, open_backends, open_registrar, resolve_devices
from roundpipe.runtime.engine.engine import Engine
from roundpipe.runtime.engine.spec import LossFunction
from roundpipe.runtime.optimizer.loading import LoadWatch
from roundpipe.runtime.optimizer.optimizer import OptimizerSide
from roundpipe.runtime.weights.gate import Gates
from roundpipe.runtime.weights.host_weights import HostWeights, PinMode
from roundpipe.wrappers.checkpoint_writer import BackgroundWriter
from roundpipe.wrappers.run_log import RunLog


@dataclass(slots=True)
class Session:
    """The workers of one model, and what they work on."""

    model: nn.Module
    """The user's; it keeps the parameters."""
    shown: nn.Module
    """The model that attribute access is answered by: ``model``, unless the user has set another."""
    name: str
    config: RoundPipeRunConfig
    """Defaults for every call."""
    settings: Mapping[str, Any]
    """The options that it was opened with, for a copy."""
    engine: Engine
    host: HostWeights
    gates: Gates
    optimizer: OptimizerSide
    watch: LoadWatch
    writer: BackgroundWriter = field(default_factory=BackgroundWriter)
    log: RunLog = field(default_factory=RunLog)
    closed: bool = False

    @classmethod
    def open(
        cls,
        model: nn.Module,
        optim_dtype: torch.dtype | None,
        name: str | None,
        config: RoundPipeRunConfig,
        pin_model: PinMode,
        devices: Sequence[DeviceLike] | DeviceLike | None,
    ) -> Self:
        """Start the workers; see `RoundPipe` for the options and what is raised."""
        if pin_model not in ("alloc", "register", "off"):
            raise ConfigError(f"pin_model={pin_model!r}; allowed are 'alloc', 'register' and 'off'")
        if optim_dtype is not None and not (isinstance(optim_dtype, torch.dtype) and optim_dtype.is_floating_point):
            raise ConfigError(f"optim_dtype={optim_dtype!r}; give a floating-point torch.dtype, or None")
        if not isinstance(config, RoundPipeRunConfig):
            raise ConfigError(f"model_run_config is {type(config).__name__}; give a RoundPipeRunConfig")
        if not isinstance(name, str | None):
            raise ConfigError(f"name is {type(name).__name__}; give a string, or None for the caller's line")
        name = name or caller_name()
        entries = resolve_devices(devices)
        backends = open_backends(entries)
        registrar = open_registrar(backends) if pin_model == "register" else None
        gates = Gates()
        engine = Engine(backends, name, gates)
        parameters = functools.partial(model.named_parameters, remove_duplicate=False)
        optimizer = OptimizerSide(parameters, optim_dtype, name=name, gates=gates, steps=engine)
        host = HostWeights(pin_model, backends[0].host_buffer, registrar, model)
        settings = {
            "optim_dtype": optim_dtype,
            "name": name,
            "model_run_config": config,
            "pin_model": pin_model,
            "devices": entries,
        }
        watch = LoadWatch(model, optimizer)
        return cls(model, model, name, config, settings, engine, host, gates, optimizer, watch)

    def check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"{self.name} was closed; compile the model again to go on")

    def check_callable(self) -> None:
        """Raise if the wrapper is closed, torch caches parametrized weights, or the model itself makes the call."""
        self.check_open()
        self.engine.refuse_inside(f"{self.name}(...)")
        if getattr(parametrize, "_cache_enabled", False):
            raise ConfigError(
                f"{self.name} was called inside torch.nn.utils.parametrize.cached(), which keeps weights from one run "
                "of a layer for the next, and a recomputation needs its own; call it outside"
            )

    def begin_call(self, adds_gradients: bool = True) -> None:
        """Prepare for a call of the model, or of a part of it; raises what went wrong in the background."""
        self.engine.raise_pending()
        self.optimizer.begin_call(adds_gradients)
        self.writer.raise_pending()

    def close(self) -> None:
        """Wait for what is running and `release` everything; safe to call twice."""
        if not self.closed:
            self.engine.refuse_inside("close()")
            self.closed = True
            try:
                self.release()
            finally:
                self.writer.wait()

    def release(self) -> None:
        """End all threads and give memory back, at the latest when the wrapper is collected."""
        self.watch.end()
        try:
            self.optimizer.close()
        finally:  # it raises what an update raised that nobody has seen
            self.engine.close()
            if self.host.registrar is not None:
                self.host.registrar.close()


@dataclass(frozen=True, slots=True)
class TrainingCall:
    """The arguments of a `RoundPipe.forward_backward`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    label: Any
    loss_fn: LossFunction
    return_outputs: bool
    options: RoundPipeRunConfig


class Runner(Protocol):
    """Runs the calls of one model; see `RoundPipe` for what its methods do."""

    @property
    def trace_count(self) -> int: ...

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], options: RoundPipeRunConfig) -> Any: ...

    def forward_backward(self, training: TrainingCall) -> Any: ...

    def update_begun(self) -> None:
        """The optimizer was given an update."""

    def partition_table(self) -> str: ...


class Program:
    """A model and how its calls are run; given to a wrapper's class in place of a model."""

    model: nn.Module

    def start(self, session: Session) -> Runner:
        """Make what runs the calls, on the session's workers."""
        raise NotImplementedError
