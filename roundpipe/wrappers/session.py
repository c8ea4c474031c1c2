"""What everything inside one wrapper shares: workers, host weights, the optimizer's side, checkpoints, counts.

    RoundPipe ---- Session             opened with the wrapper, closed with it
      `- runner ------'  |- RunLog     what calls bring: `roundpipe.wrappers.run_log`
                         `- BackgroundWriter

A model in parts has a runner for each of them, all on one session.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from roundpipe.core import trees
from roundpipe.core.caller import caller_name, warn
from roundpipe.core.checks import check_type
from roundpipe.core.contexts import contextmanager, garbage_kept
from roundpipe.core.errors import ClosedError, ConfigError
from roundpipe.core.inventory import kept
from roundpipe.core.module_tree import has_attention
from roundpipe.core.options import check_passed_on
from roundpipe.core.watched import is_watched
from roundpipe.effects.uses import asks_for_inference_mode, compares_arguments
from roundpipe.runtime.config import OPTIONS, ResolvedConfig, RoundPipeRunConfig, resolve
from roundpipe.runtime.device.resolve import DeviceLike, open_backends, open_registrar, resolve_devices
from roundpipe.runtime.engine.engine import Engine
from roundpipe.runtime.microbatch.split import batch_size
from roundpipe.runtime.optimizer.loading import LoadWatch
from roundpipe.runtime.optimizer.optimizer import OptimizerSide
from roundpipe.runtime.optimizer.reads import ReadWatch
from roundpipe.runtime.ranks.group import ProcessGroupLike
from roundpipe.runtime.ranks.other_wrappers import refuse_averaging_around, refuse_parallelism_inside
from roundpipe.runtime.ranks.turns import Ranks
from roundpipe.runtime.weights.gate import Gates
from roundpipe.runtime.weights.gradient_counts import GradientCounts
from roundpipe.runtime.weights.host_weights import HostWeights, PinMode
from roundpipe.wrappers.background_writer import BackgroundWriter
from roundpipe.wrappers.run_log import RunLog
from roundpipe.wrappers.streamed import StreamedModel
from roundpipe.wrappers.training_arguments import TrainingCall

logger = logging.getLogger(__name__)

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


class Session:
    """The workers of one model, and what they work on."""

    def __init__(
        self,
        model: nn.Module,
        optim_dtype: torch.dtype | None,
        name: str | None,
        config: RoundPipeRunConfig,
        pin_model: PinMode,
        devices: Sequence[DeviceLike] | DeviceLike | None,
        process_group: ProcessGroupLike | None = None,
        shard_optimizer: bool = False,
        *,
        widens_half: bool = False,
    ) -> None:
        """Start the workers; see `RoundPipe` for the options and what is raised."""
        if pin_model not in ("alloc", "double", "register", "off"):
            raise ConfigError(f"pin_model={pin_model!r}; allowed are 'double', 'alloc', 'register' and 'off'")
        if optim_dtype is not None and not (isinstance(optim_dtype, torch.dtype) and optim_dtype.is_floating_point):
            raise ConfigError(f"optim_dtype={optim_dtype!r}; give a floating-point torch.dtype, or None")
        check_type("model_run_config", config, RoundPipeRunConfig, "a RoundPipeRunConfig")
        check_type("name", name, str | None, "a string, or None for the caller's line")
        if not isinstance(shard_optimizer, bool) or (shard_optimizer and process_group is None):
            raise ConfigError(
                f"shard_optimizer={shard_optimizer!r} with process_group={process_group!r}; True divides the "
                "optimizer's side among the ranks of a process_group; without one, leave it out"
            )
        self.model = model
        """The user's; it keeps the parameters."""
        self.shown = model
        """The model that attribute access is answered by, until the user sets another."""
        self.name = name = name or caller_name()
        self.config = config
        """Defaults for every call."""
        entries = resolve_devices(devices)
        self.settings: dict[str, Any] = {
            "optim_dtype": optim_dtype,
            "name": name,
            "model_run_config": config,
            "pin_model": pin_model,
            "devices": entries,
        }
        """The options, for a copy, which trains alone."""
        backends = open_backends(entries)
        registrar = open_registrar(backends) if pin_model == "register" else None
        self.gates = Gates()
        options, board = (optim_dtype, widens_half, shard_optimizer), self.gates.board
        refuse_parallelism_inside(model)
        self.ranks = None
        if process_group is not None:
            self.ranks = Ranks(process_group, model, name, options, board, shard_optimizer)
        """The others that train this model, each on its part of every batch."""
        self.engine = Engine(backends, name, self.gates, has_attention=has_attention(model))
        inventory = self.inventory = kept(model)
        self.host = HostWeights(pin_model, backends[0].host_buffer, registrar, model)
        self.optimizer = OptimizerSide(
            lambda: inventory().named_parameters,
            optim_dtype,
            widens_half=widens_half,
            name=name,
            gates=self.gates,
            steps=self.engine,
            ranks=self.ranks,
            second_memory=self.host.add_second_banks,
            twins=self.engine.twins,
            begin_thread=self.engine.begin_host_work,
        )
        self.engine.before_packing = self.optimizer.come_home
        with garbage_kept():  # hooks by the thousand, none of them garbage
            self.watch = LoadWatch(model, self.optimizer)
            self.reads = ReadWatch(model, self.optimizer)
        self.writer = BackgroundWriter()
        self.log = RunLog()
        self.gradient_counts = GradientCounts()
        """Of tensors of the host that losses reach."""
        self.closed = False
        self._is_released = self._noted_hooks = False
        self._streamed: StreamedModel | None = None
        """For the model's own code on a device, until the next call of a layer."""
        self._is_streaming = False
        for other in list(_OPEN):  # before the script gives other objects the names that a step_fn reads
            if other.gates.board.is_here and not other.engine.is_inside:
                other.optimizer.wait_update("compile()")
        _OPEN.add(self)

    def check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"{self.name} was closed; compile the model again to go on")

    def wait_idle(self) -> None:
        """Return when no step and no update is running; inside one, those that are not it."""
        self.engine.steps.wait_idle()
        self.optimizer.wait_update("a call")

    @contextmanager
    def call(self, *, reads: bool = False) -> Iterator[None]:
        """Around a call, after those of other threads; one that only ``reads`` the weights waits for the latest."""
        self.check_callable()
        with self.optimizer.turn():
            self.reads.settle_others()
            if reads:
                self.optimizer.settle()
            self.reads.close_forward()
            self.optimizer.is_calling = True
            try:
                yield
            finally:
                self.optimizer.is_calling = False
                self.reads.open_forward()

    def only_reads(self, options: RoundPipeRunConfig) -> bool:
        """Whether a ``forward`` with these options lacks the latest weights and is no part of training."""
        check_type("roundpipe_run_config", options, RoundPipeRunConfig | None, "a RoundPipeRunConfig")
        if not self.optimizer.is_stale:
            return False
        config = resolve(options, self.config, num_devices=self.engine.num_workers)
        return not (self.model.training and config.requires_grad)

    def check_callable(self) -> None:
        """Raise if the wrapper is closed, torch caches parametrized weights, or the model itself makes the call."""
        self.check_open()
        self.engine.refuse_inside(f"{self.name}(...)")
        self._warn_of_global_hooks()
        if getattr(parametrize, "_cache_enabled", False):
            raise ConfigError(
                f"{self.name} was called inside torch.nn.utils.parametrize.cached(), which keeps weights from one run "
                "of a layer for the next, and a recomputation needs its own; call it outside"
            )

    def check_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise if arguments are options of ours, or code asks for what only the caller's thread knows: identities of
        arguments, the inference mode.
        """
        refuse_averaging_around(self.name)
        first: Any = self.model
        while type(first).forward is nn.Sequential.forward and len(first):  # which hands all arguments on
            first = first[0]
        place = "model(..., roundpipe_run_config=RoundPipeRunConfig(...)), or forward_backward(run_config=...)"
        check_passed_on(first.forward, kwargs, OPTIONS, f"the forward of {type(self.model).__name__}", place)
        tensors = trees.checked_tensors((args, kwargs))
        has_same = len({id(tensor) for tensor in tensors}) < len(tensors)
        for kind in self.inventory().kinds if has_same else ():
            if compares_arguments(kind):
                raise ConfigError(
                    f"two arguments are the same tensor, and the forward of {kind.__name__} asks whether two of its "
                    "arguments are one object (`a is b`): each is split and moved by itself, so they would not be. "
                    "Compare with None, or give it a flag"
                )
        for kind in self.inventory().kinds if torch.is_inference_mode_enabled() else ():
            if asks_for_inference_mode(kind):
                raise ConfigError(
                    f"the forward of {kind.__name__} asks whether torch.inference_mode is on, which it is not where "
                    "its layers run. Call it under torch.no_grad(), or have it ask self.training"
                )

    def _warn_of_global_hooks(self) -> None:
        if not self._noted_hooks and torch.nn.modules.module._has_any_global_hook():
            self._noted_hooks = True
            warn(
                "global module hooks are on (torch.nn.modules.module.register_module_forward_hook and the like): they "
                "see the modules that a wrapper calls, which are other ones, and more or fewer calls; results that "
                "depend on them may differ from eager mode. Put hooks on modules instead"
            )

    def begin_call(self, adds_gradients: bool = True, has_backward_later: bool = False) -> None:
        """Prepare for a call of the model, or of a part of it; raises what went wrong in the background."""
        if self._is_streaming:
            raise ConfigError(f"{self.name} was called inside streamed(); call the model that streamed() gives")
        self._end_streamed()
        self.engine.begin_call()
        self.optimizer.note_round(adds_gradients)
        self.optimizer.begin_call(adds_gradients, has_backward_later)
        self.writer.raise_pending()

    @contextmanager
    def streaming(self) -> Iterator[StreamedModel]:
        """Around code of the model's own that runs on a device and reads the latest weights."""
        with self.call(reads=True):
            self.optimizer.come_home()
            if self._is_streaming:
                raise ConfigError(f"{self.name}: generate() and streamed() can't be used inside streamed()")
            if self._streamed is None or not self._streamed.is_of(self.shown):
                self._end_streamed()  # so that the engine forgets the groups of the one before
                self._streamed = StreamedModel(self.shown, self.name, self.engine, self.host)
            self._is_streaming = True
            try:
                yield self._streamed
            finally:
                self._is_streaming = False

    def _end_streamed(self) -> None:
        streamed, self._streamed = self._streamed, None
        if streamed is not None:
            streamed.close()

    def run_on_device(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the model on a device; its results come to the output device."""
        config = resolve(RoundPipeRunConfig(), self.config, num_devices=self.engine.num_workers)
        with self.streaming() as streamed:
            return streamed.call(name, args, kwargs, config.output_device)

    def note_call(self, options: RoundPipeRunConfig, *batches: tuple[tuple[Any, ...], Mapping[str, Any]]) -> None:
        """Count a call that is over, its samples and its tokens; of several batches if they are its microbatches."""
        config = resolve(options, self.config, num_devices=self.engine.num_workers)
        self.log.num_calls += 1
        for args, kwargs in batches:
            self._note_batch(args, kwargs, config)

    def _note_batch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], config: ResolvedConfig) -> None:
        log, num_samples = self.log, batch_size(args, kwargs, config)
        log.num_samples = None if num_samples is None or log.num_samples is None else log.num_samples + num_samples
        for name, value in (*((f"argument {index}", value) for index, value in enumerate(args)), *kwargs.items()):
            for tensor in trees.tensors(value):
                if tensor.ndim == 2 and tensor.dtype in _INTEGERS:
                    log.num_tokens += tensor.numel()
                    log.tokens_of = name
                    return

    @contextmanager
    def training_call(self, training: TrainingCall, config: RoundPipeRunConfig) -> Iterator[TrainingCall]:
        """Around a call of ``forward_backward``, with what its mean counts for among the ranks."""
        share = None
        if self.ranks is not None and training.has_backward:
            self.ranks.num_calls += 1
            resolved = resolve(training.options, config, num_devices=self.engine.num_workers)
            if resolved.loss_reduction == "mean":
                share = self.ranks.share(batch_size(training.args, training.kwargs, resolved))
        with contextlib.nullcontext() if share is None else share:
            yield replace(training, share=share)

    def close(self) -> None:
        """Wait for what is running and `release` everything; safe to call twice, also if interrupted."""
        if self.gates.board.is_here:
            self.engine.refuse_inside("close()")
            self.closed = True
            try:
                self.engine.steps.wait_idle()
            finally:
                try:
                    self.release()
                finally:
                    self.writer.wait()
        self.closed = True

    def release(self) -> None:
        """End all threads and give memory back; then raise what the last step or update raised, unless it was seen."""
        if self._is_released or not self.gates.board.is_here:
            return
        try:  # nested, so that an error has the one before as its context
            self._end_streamed()
            self.gradient_counts.end()
            self.watch.end()
            self.reads.end()
            self.optimizer.close()
        finally:
            try:
                if self.ranks is not None:
                    self.ranks.close()
            finally:
                try:
                    self.engine.close()
                finally:
                    if self.host.registrar is not None:
                        self.host.registrar.close()
        self._is_released = True

    def __del__(self) -> None:
        """The wrapper is gone. Whoever drops it waits for nothing; what is raised here, Python prints."""
        if self.__dict__.get("_is_released", True):
            return
        is_in_use = self.engine.is_inside or self.optimizer.is_current or self.engine.running()
        if is_in_use or not self.optimizer.is_idle or is_watched():  # a thread has no modes
            threading.Thread(target=self.release, name=f"roundpipe-end {self.name}").start()
        else:
            self.release()


_OPEN: weakref.WeakSet[Session] = weakref.WeakSet()


@atexit.register
def _release_all() -> None:
    """Before the program ends: Python would stop threads in the middle of torch's code, which may end in a crash."""
    for session in list(_OPEN):
        for _ in range(2):  # once more after an interrupt
            try:
                session.release()
            except Exception as error:  # too late to be raised
                logger.error("%s: the last round or update failed", session.name, exc_info=error)
            except BaseException:
                continue


class Runner(ABC):
    """Runs the calls of one model; see `RoundPipe` for what its methods do."""

    config: RoundPipeRunConfig
    """Defaults of its calls."""

    @property
    def trace_count(self) -> int:
        return 0

    @abstractmethod
    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], options: RoundPipeRunConfig) -> Any: ...

    @abstractmethod
    def forward_backward(self, training: TrainingCall) -> Any: ...

    @abstractmethod
    def partition_table(self) -> str: ...

    def update_begun(self) -> None:  # noqa: B027 - nothing, where there is no plan for the whole
        """The optimizer was given an update."""


@dataclass(slots=True)
class Program(ABC):
    """A model and how its calls are run; given to a wrapper's class in place of a model."""

    model: nn.Module
    widens_half: bool = field(default=True, kw_only=True)
    """Whether the optimizer's copies of half-precision parameters are float32, unless their dtype is given."""

    @abstractmethod
    def start(self, session: Session) -> Runner:
        """Make what runs the calls, on the session's workers."""
