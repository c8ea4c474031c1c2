"""`RoundPipe`, the module that a user holds: calls in, losses, outputs and gradients out.

    forward_backward:  split -> chain_for each microbatch -> round -> engine -> sum of losses, merged outputs
    forward:           the same without loss; with grad, as one node of the caller's autograd graph
    step, synchronize: the optimizer's side, see `roundpipe.runtime.optimizer.optimizer`

The wrapper has no parameters, buffers or submodules of its own: everything that asks for them is answered by
the original model, whose objects they stay.

Where a source has no chain for a call, another wrapper of the same model, with the same workers, weights and
optimizer's side, runs it: `from_source` is told how to make it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import nn
from torch.nn.utils import parametrize

from roundpipe.core import trees
from roundpipe.core.caller import caller_name, warn
from roundpipe.core.errors import ClosedError, ConfigError, DeviceMemoryError, NotCopyableError
from roundpipe.core.layers import ChainSource, LayerChain
from roundpipe.effects.user_code import HOOKS, reached_by
from roundpipe.reports.tables import partition_table
from roundpipe.reports.timeline import Timeline, check_path
from roundpipe.runtime.config import ResolvedConfig, RoundPipeRunConfig, resolve
from roundpipe.runtime.device.pinning import Registrar
from roundpipe.runtime.device.resolve import DeviceLike, open_backends, open_registrar, resolve_devices
from roundpipe.runtime.engine.builder import (
    StepBuilder,
    finished,
    input_gradients,
    input_tensors,
    label_tensors,
    sum_losses,
)
from roundpipe.runtime.engine.engine import Engine
from roundpipe.runtime.engine.plan_choice import Call
from roundpipe.runtime.engine.stage import LossFunction
from roundpipe.runtime.engine.step import HostValue, Round
from roundpipe.runtime.microbatch import split as microbatch
from roundpipe.runtime.optimizer.loading import LoadWatch
from roundpipe.runtime.optimizer.optimizer import OptimizerSide
from roundpipe.runtime.weights.gate import Gates
from roundpipe.runtime.weights.host_weights import HostWeights, PinMode
from roundpipe.runtime.weights.replica import FrozenLayers
from roundpipe.wrappers import autograd, checkpoint
from roundpipe.wrappers.model_view import ModelView, check_parts_unwrapped
from roundpipe.wrappers.module_layers import ModuleSource, chain_of_modules
from roundpipe.wrappers.run_report import LatestRound, RunLog, RunReport, make_report


def check_training_call(input_args: Any, input_kwargs: Any, loss_fn: Any) -> None:
    """Raise `ConfigError` for arguments of ``forward_backward`` that can't be meant."""
    if not isinstance(input_args, (tuple, list)):
        raise ConfigError(
            f"input_args is {type(input_args).__name__}; give a tuple of the model's arguments, such as (x,)"
        )
    if not isinstance(input_kwargs, dict):
        raise ConfigError(f"input_kwargs is {type(input_kwargs).__name__}; give a dict of keyword arguments")
    for key in input_kwargs:
        if not isinstance(key, str):
            raise ConfigError(f"input_kwargs: the keyword {key!r} is {type(key).__name__}; keywords are strings")
    if not callable(loss_fn):
        raise ConfigError(f"loss_fn is {type(loss_fn).__name__}; give a function (outputs, label) -> loss")


def pass_outputs(outputs: Any, labels: Any) -> Any:
    """The loss of a model that returns its loss."""
    return outputs


@dataclass(slots=True)
class _State:
    """What a wrapper holds; one attribute, so that every other name can be forwarded to the model."""

    model: nn.Module
    original: nn.Module | None
    name: str
    source: ChainSource
    config: RoundPipeRunConfig
    engine: Engine
    host: HostWeights
    maker: StepBuilder
    optimizer: OptimizerSide
    gates: Gates
    writer: checkpoint.BackgroundWriter = field(default_factory=checkpoint.BackgroundWriter)
    log: RunLog = field(default_factory=RunLog)
    watch: LoadWatch | None = None
    """None: part of another wrapper, which has it."""
    last_chain: LayerChain | None = None
    closed: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What it was made with, for a copy; empty for part of another wrapper."""
    make_instead: MakeInstead | None = None
    instead: RoundPipe | None = None
    """Runs the calls that the source has no chain for; made for the first of them."""


MakeInstead = Callable[["RoundPipe"], "RoundPipe"]
"""Makes, of a wrapper that has no chain for a call, one inside it that runs the call."""


class RoundPipe(ModelView):
    """A model that trains in rotation: weights in host memory, any stage on any device.

    Args:
        model: an ``nn.Sequential`` becomes one layer per child; any other module becomes one layer.
            `roundpipe.compile` cuts any module into layers.
        optim_dtype: dtype of the optimizer's copies of the parameters; None: the parameters' own.
        name: for logs and traces; None: ``filename:line`` of the caller.
        model_run_config: defaults for every call; see `RoundPipeRunConfig`.
        pin_model: how host weights are pinned for fast uploads. ``"alloc"``: in pinned memory of their exact
            size; ``"register"``: registered with the driver where they lie, all but the small ones (CUDA only);
            ``"off"``: they stay where they are, so an mmap-ed checkpoint pages in on demand. Where the system
            refuses to pin, memory stays unpinned, with a warning that names the limit.
        devices: the rotation: None for every accelerator that torch sees, otherwise the CPU; or a list of
            device names and `roundpipe.Device`, in which an entry may be repeated.

    Raises:
        ConfigError: an argument can't be used as given.
    """

    _state: _State

    def __init__(
        self,
        model: nn.Module,
        optim_dtype: torch.dtype | None = None,
        name: str | None = None,
        model_run_config: RoundPipeRunConfig = RoundPipeRunConfig(),  # noqa: B008 - frozen
        pin_model: PinMode = "alloc",
        *,
        devices: Sequence[DeviceLike] | DeviceLike | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise ConfigError(f"{type(self).__name__} wraps an nn.Module, got {type(model).__name__}")
        if isinstance(model, ModelView):
            raise ConfigError(
                f"the model is a {type(model).__name__} already; pass the original, {type(self).__name__}(pipe.model)"
            )
        check_parts_unwrapped(model)
        source = ModuleSource(model, self._layers_of)
        self._set_up(model, source, optim_dtype, name, model_run_config, pin_model, devices)

    @staticmethod
    def _layers_of(model: nn.Module) -> LayerChain:
        """The layers of a model that is given as it is."""
        return _chain_of(model)

    @classmethod
    def from_source(
        cls,
        model: nn.Module,
        source: ChainSource,
        *,
        make_instead: MakeInstead | None = None,
        optim_dtype: torch.dtype | None = None,
        name: str | None = None,
        model_run_config: RoundPipeRunConfig = RoundPipeRunConfig(),  # noqa: B008 - frozen
        pin_model: PinMode = "alloc",
        devices: Sequence[DeviceLike] | DeviceLike | None = None,
    ) -> Self:
        """A wrapper whose layers come from a source, such as the compiler.

        Args:
            model: has the parameters.
            source: gives the layers of each call.
            make_instead: makes what runs the calls for which the source gives none.
            optim_dtype, name, model_run_config, pin_model, devices: as for the class.
        """
        pipe = cls.__new__(cls)
        nn.Module.__init__(pipe)
        pipe._set_up(model, source, optim_dtype, name, model_run_config, pin_model, devices)
        pipe._state.make_instead = make_instead
        return pipe

    @classmethod
    def inside(cls, whole: RoundPipe, model: nn.Module, source: ChainSource, name: str) -> Self:
        """A wrapper of one part of another wrapper's model, with that one's workers, weights and optimizer's side.

        The whole one is closed, stepped and asked for parameters; the part is only called.
        """
        pipe = cls.__new__(cls)
        nn.Module.__init__(pipe)
        all_of = whole._state
        maker = StepBuilder(all_of.engine)
        shared = (all_of.engine, all_of.host, maker, all_of.optimizer, all_of.gates, all_of.writer)
        pipe.__dict__["_state"] = _State(model, None, name, source, RoundPipeRunConfig(), *shared)
        pipe.__dict__["training"] = model.training
        return pipe

    def _set_up(
        self,
        model: nn.Module,
        source: ChainSource,
        optim_dtype: torch.dtype | None,
        name: str | None,
        config: RoundPipeRunConfig,
        pin_model: PinMode,
        devices: Sequence[DeviceLike] | DeviceLike | None,
    ) -> None:
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
        optimizer = OptimizerSide(parameters, optim_dtype, name=name, gates=gates, rounds=engine)
        host = HostWeights(pin_model, backends[0].host_buffer, registrar, model)
        state = _State(model, None, name, source, config, engine, host, StepBuilder(engine), optimizer, gates)
        state.settings = {
            "optim_dtype": optim_dtype,
            "name": name,
            "model_run_config": config,
            "pin_model": pin_model,
            "devices": entries,
        }
        self.__dict__["_state"] = state
        self.__dict__["training"] = model.training
        watch = state.watch = LoadWatch(model, optimizer)
        weakref.finalize(self, _close, engine, optimizer, watch, registrar)

    # Calls

    @torch.compiler.disable(reason="a call of a RoundPipe is the work of many threads")
    def forward(
        self,
        *args: Any,
        roundpipe_run_config: RoundPipeRunConfig = RoundPipeRunConfig(),  # noqa: B008 - frozen
        **kwargs: Any,
    ) -> Any:
        """The model's outputs: split, run as a pipeline, merged.

        With grad mode on, ``backward()`` on the outputs runs the backward stages and gradients flow to the
        arguments that require grad; without, nothing is kept. ``torch.autograd.grad`` gives the gradients of
        arguments, and of what they were made of, but not those of the model's own parameters. The backward runs the
        layers again from the arguments: if one was written in place since, it is a `BackwardError`.

        Args:
            *args: the model's arguments, on any device.
            roundpipe_run_config: options for this call.
            **kwargs: the model's keyword arguments.

        Raises:
            Exception: whatever the model's own code raises, with a note that says where.
        """
        config = resolve(roundpipe_run_config, self._state.config, num_devices=self._state.engine.num_workers)
        state = self._ready(adds_gradients=config.requires_grad)
        calls, pieces = self._calls(args, kwargs, None, config)
        if calls is None:
            options = roundpipe_run_config if pieces is None else pieces.kept_in(roundpipe_run_config, config)
            merged = self._instead().forward(*args, roundpipe_run_config=options, **kwargs)
            self._note_call(args, kwargs, config)
            return merged
        outputs: list[Any] = []
        for call in calls:
            outputs += self._forward_call(call)
        state.optimizer.raise_pending()
        self._note_call(args, kwargs, config)
        return microbatch.merge(outputs, config)

    def forward_backward(
        self,
        input_args: tuple[Any, ...] = (),
        input_kwargs: dict[str, Any] = {},  # noqa: B006 - the contract's default, never changed
        label: Any = None,
        loss_fn: LossFunction = pass_outputs,
        return_outputs: bool = False,
        run_config: RoundPipeRunConfig = RoundPipeRunConfig(),  # noqa: B008 - frozen
    ) -> Any:
        """Forward, loss and backward of every microbatch; gradients add up until they are zeroed.

        Equal to splitting inputs and labels and, for each microbatch, ``loss_fn(model(...), label)``
        followed by ``torch.autograd.backward(loss)``.

        Once steps are asynchronous it returns with the losses: its last backward stages run on while the next
        call's first ones begin. ``.grad`` is then whole after `synchronize`; `step` takes it when it is. What an
        unfinished backward raises is raised at the next call into the model. (Rounds with random numbers, and those
        whose arguments require grad, are always waited for.)

        Args:
            input_args: the model's arguments.
            input_kwargs: the model's keyword arguments.
            label: split like the inputs and given to ``loss_fn``; gradients flow to tensors in it that require grad.
            loss_fn: ``(outputs, label) -> loss``, run on the device; a tensor or a sequence of tensors.
            return_outputs: also return the merged outputs.
            run_config: options for this call.

        Returns:
            The sum of the losses over the microbatches, on the CPU and detached (a list of sums if ``loss_fn``
            returns a sequence); with ``return_outputs``, the pair of it and the merged outputs.

        Raises:
            Exception: whatever the model or ``loss_fn`` raises, with a note that says where.
        """
        state = self._ready()
        check_training_call(input_args, input_kwargs, loss_fn)
        config = resolve(run_config, state.config, num_devices=state.engine.num_workers)
        losses: list[Any] = []
        outputs: list[Any] = []
        arguments: list[tuple[int, str, int, torch.Tensor]] = []
        gradients: list[torch.Tensor | None] = []
        calls, pieces = self._calls(tuple(input_args), input_kwargs, label, config)
        if calls is None:
            options = run_config if pieces is None else pieces.kept_in(run_config, config)
            result = self._instead().forward_backward(input_args, input_kwargs, label, loss_fn, return_outputs, options)
            self._note_call(tuple(input_args), input_kwargs, config)
            return result
        alone = state.optimizer.is_async and self._reads_weights(loss_fn)
        if alone:
            for gate in (state.gates.weights, state.gates.gradients):
                gate.wait(self._target.parameters(), f"a loss_fn that reads weights of {state.name}")
        for call in calls:
            made = state.maker.train_round(call, loss_fn, return_outputs)
            inputs = [*input_tensors(made.values), *label_tensors(made.labels)]
            # generators are shared with the caller, who may draw as soon as the call returns
            draws = made.around.preserve_rng_state
            made.may_outlive_call = state.optimizer.is_async and not (inputs or draws or alone)
            state.log.latest = LatestRound(
                made.schedule, weakref.ref(call.chain), call.elements(), config.recompute_grain, made.may_outlive_call
            )
            self._run(made)
            losses += finished(made.losses)
            outputs += finished(made.outputs)
            arguments += inputs
            gradients += input_gradients(made, inputs)
        state.optimizer.end_call()
        # once, since all rounds' arguments may be pieces of one graph
        flow_back([tensor for *_, tensor in arguments], gradients)
        state.engine.raise_pending()
        state.optimizer.raise_pending()
        total = sum_losses(losses)
        self._note_call(tuple(input_args), input_kwargs, config)
        return (total, microbatch.merge(outputs, config)) if return_outputs else total

    def _calls(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], label: Any, config: ResolvedConfig
    ) -> tuple[list[Call] | None, microbatch.Split | None]:
        """The microbatches, grouped where neighbours share a chain; None if one of them has no chain.

        Beside them the pieces that they were made of, if the call was split.
        """
        state = self._state
        if state.instead is not None and state.source.latest is None:
            return None, None  # there never was one
        if config.auto:
            elements = sum(tensor.numel() for tensor in trees.tensors([args, kwargs]))
            samples = microbatch.batch_size(args, kwargs, config)
            config = state.maker.plans.settle(config, state.last_chain or state.source.latest, samples, elements)
        pieces = microbatch.split(args, kwargs, label, config)
        calls: list[Call] = []
        for one_args, one_kwargs, one_label, events in zip(
            pieces.args, pieces.kwargs, pieces.labels, pieces.events, strict=True
        ):
            for event in events:  # the guards below may read the arguments
                event.synchronize()
            chain = state.source.chain_for(one_args, one_kwargs)
            if chain is None:
                state.last_chain = None
                return None, pieces
            if not calls or calls[-1].chain is not chain:
                calls.append(Call(chain, config, [], [], [], pieces.num_microbatches))
            calls[-1].args.append(one_args)
            calls[-1].kwargs.append(one_kwargs)
            calls[-1].labels.append(one_label)
        state.last_chain = calls[-1].chain
        return calls, pieces

    def _reads_weights(self, function: Any) -> bool:
        """Whether a function may read the model's weights on the host, so that they must stay while it runs."""
        reached = [one._target if isinstance(one, ModelView) else one for one in reached_by(function)]
        tensors = {id(one) for one in reached if isinstance(one, torch.Tensor)}
        tensors |= {id(weight) for one in reached if isinstance(one, nn.Module) for weight in one.parameters()}
        return bool(tensors) and any(id(weight) in tensors for weight in self._target.parameters())

    def _instead(self) -> RoundPipe:
        state = self._state
        if state.instead is None:
            assert state.make_instead is not None, "a source that has no chain for a call"
            state.instead = state.make_instead(self)
        return state.instead

    def _run(self, made: Round) -> None:
        state = self._state
        laid_out = state.host.num_laid_out
        try:
            state.engine.run(made, state.host)
        finally:
            if state.host.num_laid_out != laid_out:
                state.optimizer.weights_moved()

    def _forward_call(self, call: Call) -> list[Any]:
        state = self._state
        maker, exit = state.maker, call.chain.exit
        made = maker.forward_round(call, with_backward=call.config.requires_grad)
        plan = maker.last_plan
        assert plan is not None
        inputs = input_tensors(made.values) if call.config.requires_grad else []
        firsts = [dict(one) for one in made.values]  # arguments may be outputs as they are, with their own graph
        self._run(made)
        device = call.config.output_device

        def collect(one: dict[str, HostValue]) -> dict[str, Any]:
            return {name: one[name].synchronize() for name in exit.reads}

        carries = [collect(one) for one in made.values]
        around = made.around
        outs = {
            (m, name, position): tensor
            for m, carry in enumerate(carries)
            for name in exit.reads
            if name in around.with_gradient and name not in firsts[m]
            for position, tensor in enumerate(trees.tensors(carry[name]))
            if position not in around.plain.get((m, name), ())
        }
        if call.config.requires_grad and outs:
            backward_round = maker.backward_round(made, call, plan)
            backward_round.frozen = FrozenLayers.of(call.chain)  # the caller may set other modes before the backward

            def run_backward(gradients: Sequence[torch.Tensor | None], accumulates: bool) -> list[torch.Tensor | None]:
                for m, carry in enumerate(carries):
                    by_name: dict[str, list[torch.Tensor | None]] = {}
                    for (where, name, position), gradient in zip(outs, gradients, strict=True):
                        if where == m and gradient is not None:
                            found = by_name.setdefault(name, [None] * len(trees.tensors(carry[name])))
                            found[position] = gradient.to("cpu")
                    for name, found in by_name.items():
                        backward_round.gradients[m].setdefault(name, []).append((found, None))
                with contextlib.nullcontext() if accumulates else state.optimizer.gradients_aside():
                    self._run(backward_round)
                state.optimizer.end_call()
                return input_gradients(backward_round, inputs)

            read = [
                *((name, tensor, None) for name, tensor in microbatch.tensors_of_inputs(call.args, call.kwargs)),
                *(one for weights in made.weights for one in weights.read_again()),
            ]
            results = autograd.join(lambda: tuple(outs.values()), run_backward, read, [tensor for *_, tensor in inputs])
            joined = dict(zip(outs, results, strict=True))
            for m, name in dict.fromkeys((m, name) for m, name, _ in outs):

                def in_graph(position: int, tensor: torch.Tensor, m: int = m, name: str = name) -> torch.Tensor:
                    return joined.get((m, name, position), tensor)

                carries[m][name] = trees.map_numbered(carries[m][name], in_graph)
        if device.type != "cpu":
            carries = [trees.map_tensors(carry, lambda tensor: tensor.to(device)) for carry in carries]
        return [exit(carry) for carry in carries]

    # The optimizer's side

    def optim_parameters(self) -> Iterator[nn.Parameter]:
        """The optimizer's copies of the trainable parameters, for any torch optimizer."""
        return (parameter for _, parameter in self.optim_named_parameters())

    def optim_named_parameters(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The optimizer's copies under the original names.

        Args:
            prefix: put before each name, with a dot.
            remove_duplicate: give tied parameters once.
        """
        return self._state.optimizer.optim_named_parameters(prefix, remove_duplicate)

    def step(self, step_fn: Callable[..., Any], is_async: bool = True, *args: Any, **kwargs: Any) -> None:
        """Run one optimizer update.

        Args:
            step_fn: does the update, such as ``optimizer.step(); optimizer.zero_grad()``. Inside it
                ``model.parameters()`` are the optimizer's copies. One that is not asynchronous may call the model,
                as LBFGS does to evaluate the loss; the model then has the copies' present values.
            is_async: True returns at once; the next iteration trains on parameters one update old. False
                waits, and the next iteration sees the update.
            *args: for ``step_fn``.
            **kwargs: for ``step_fn``.

        Raises:
            Exception: what an earlier asynchronous ``step_fn`` raised.
        """
        self._state.optimizer.step(step_fn, is_async, args, kwargs)
        self._state.maker.plans.step_made()

    def synchronize(self) -> None:
        """Wait for everything; parameters then hold the latest update and ``.grad`` what is accumulated."""
        self._state.optimizer.synchronize()
        self._state.writer.wait()

    # Checkpoints

    def save_checkpoint(
        self,
        dir: str | os.PathLike[str],
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        step: int | None = None,
        extra: Any = None,
        is_async: bool = False,
    ) -> None:
        """Save everything that training needs to go on, bit for bit, on any number of devices.

        Begins with `synchronize`: after a save, as after a load, the next iteration trains on the latest
        weights, also between asynchronous steps. Gradients that no step has taken are not saved: call it
        after `step`. A crash or an error at any moment leaves the previous checkpoint in ``dir`` whole.
        Needs the safetensors library (``pip install roundpipe[hf]``). Weights are written in files of up to 2 GiB,
        one after the other; beside them a save takes host memory for at most one such file.

        Args:
            dir: replaced as a whole; what else lies in an earlier checkpoint's folder, such as a tokenizer, stays.
            optimizer: made from `optim_parameters`.
            scheduler: has ``state_dict``, as has ``scaler``.
            scaler: `roundpipe.GradScaler` or torch's.
            step: to be given back by the load.
            extra: likewise; numbers, strings, plain tensors, and dicts, lists, tuples and sets of them.
            is_async: copy all of it in host memory (as many bytes as the checkpoint has), return, and write in
                a thread. What goes wrong there is raised at the next call into the model, or save. The next
                save or load, `synchronize` and `close` wait for it, and so does the interpreter's exit.

        Raises:
            ConfigError: something can't be saved, ``dir`` holds something else than a checkpoint, or the
                safetensors library is missing.
            OSError: no permission, or the disk is full, which may be a `CheckpointError`; nothing is left behind.
        """
        state = self._state
        checkpoint.save(
            self,
            self._target,
            state.optimizer.parameter_pairs(),
            state.writer,
            dir,
            optimizer=optimizer,
            scheduler=scheduler,
            scaler=scaler,
            step=step,
            extra=extra,
            is_async=is_async,
        )

    def load_checkpoint(
        self,
        dir: str | os.PathLike[str],
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        *,
        weights_only: bool = False,
    ) -> checkpoint.Checkpoint:
        """Take over what `save_checkpoint` saved; gradients are dropped and random generators are set.

        Args:
            dir: as given to the save; after a crash in the middle of a save, the latest whole checkpoint.
            optimizer: if one was saved; likewise ``scheduler`` and ``scaler``.
            scheduler: see ``optimizer``.
            scaler: see ``optimizer``.
            weights_only: read the weights and nothing else, also from a folder that `save_pretrained` wrote.

        Returns:
            ``step`` and ``extra`` as saved; None for both with ``weights_only``.

        Raises:
            CheckpointNotFoundError: there is no checkpoint; is a `FileNotFoundError`.
            CheckpointError: it is damaged, or of a newer version.
            ConfigError: the model or the optimizer does not fit, or the safetensors library is missing. Whatever
                is raised, nothing was changed.
        """
        state = self._state
        return checkpoint.load(
            self,
            state.optimizer.parameter_pairs(),
            state.writer,
            dir,
            optimizer=optimizer,
            scheduler=scheduler,
            scaler=scaler,
            weights_only=weights_only,
        )

    # Reports

    @property
    def trace_count(self) -> int:
        """How many times the model was traced."""
        return self._state.source.trace_count

    def partition_table(self) -> str:
        """The layers and the stages as a table: those of the latest call, else those of a call like the example."""
        state = self._state
        chain = state.last_chain or state.source.latest
        if chain is None and state.instead is not None:
            return state.instead.partition_table()
        if chain is None:
            return f"{state.name}: not traced yet; the first call traces it, or give compile(example_kwargs=...)"
        plan = state.maker.last_plan
        if state.last_chain is None:
            config = resolve(None, state.config, num_devices=state.engine.num_workers)
            with contextlib.suppress(DeviceMemoryError):  # the call will say so; the layers can be shown
                plan = state.maker.plans.plan(Call.like_example(chain, config))
        return partition_table(chain, plan, title=state.name, measured=state.maker.plans.measured(chain))

    def peak_device_bytes(self, reset: bool = False) -> int:
        """Largest number of bytes in use at once on any device since the last reset."""
        return max(self._state.engine.peak_bytes(reset))

    @contextlib.contextmanager
    def record_timeline(self, path: str | os.PathLike[str] | None = None) -> Iterator[Timeline]:
        """Record what runs inside: compute, copies and waits of every worker, and the optimizer's thread.

        Recording waits for nothing, so what is recorded runs as it does otherwise; the end of the context waits for
        all that was begun in it. An error inside leaves the timeline of what ran before it.

            with model.record_timeline("run.json") as timeline:
                train_a_few_steps()
            timeline.save("run.png")

        On CPU workers with link speeds, copies take the link's time. On accelerators, spans are those of the device's
        streams, placed on the host's clock by one moment at the beginning.

        Args:
            path: written at the end; ``.json`` for ui.perfetto.dev, ``.png`` for a picture. None: see `Timeline.save`.

        Yields:
            `Timeline`, whose ``spans`` are there once the context has ended.

        Raises:
            ConfigError: a timeline is being recorded already, or the file can't be written; raised at the beginning.
            ClosedError: the model was closed.
        """
        state = self._state
        if state.closed:
            raise ClosedError(f"{state.name} was closed; compile the model again to go on")
        if path is not None:
            check_path(path)
        timeline = Timeline(name=state.name)
        recorder = state.optimizer.log.recorder = state.engine.start_recording()
        try:
            yield timeline
        finally:
            try:
                state.engine.stop_recording()
                state.optimizer.wait_update()
            finally:
                state.optimizer.log.recorder = None
            timeline.fill(recorder.finish())
            if path is not None:
                timeline.save(path)

    def report(self) -> RunReport:
        """What happened since the report before, or since the model was made; waits for nothing.

        Speed in samples and tokens, seconds per round as measured and as predicted, where each worker's time went,
        bytes moved, memory of devices and host. ``print(model.report())`` shows it as a table.
        """
        state = self._state
        return make_report(
            state.name,
            state.log,
            state.maker.plans,
            state.engine,
            state.optimizer,
            self._target,
            time.perf_counter(),
        )

    def _note_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], config: ResolvedConfig) -> None:
        """For `report`."""
        self._state.log.note(args, kwargs, microbatch.batch_size(args, kwargs, config))

    # Life

    def close(self) -> None:
        """Wait for what is running, end all threads and give device memory back; safe to call twice."""
        state = self._state
        if not state.closed:
            state.engine.refuse_inside("close()")
            state.closed = True
            try:
                _close(state.engine, state.optimizer, state.watch, state.host.registrar)
            finally:
                state.writer.wait()

    def __enter__(self) -> RoundPipe:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _ready(self, adds_gradients: bool = True) -> _State:
        state = self._state
        if state.closed:
            raise ClosedError(f"{state.name} was closed; compile the model again to go on")
        state.engine.refuse_inside(f"{state.name}(...)")
        if state.watch is not None and getattr(parametrize, "_cache_enabled", False):
            raise ConfigError(
                f"{state.name} was called inside torch.nn.utils.parametrize.cached(), which keeps weights from one run "
                "of a layer for the next, and a recomputation needs its own; call it outside"
            )
        state.engine.raise_pending()
        state.optimizer.begin_call(adds_gradients)
        state.writer.raise_pending()
        return state

    # Copies

    def __repr__(self) -> str:
        return self.partition_table()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Another wrapper, of a copy of the model, on the same devices with workers of its own.

        The copy starts from the latest weights, without gradients and without anything of an optimizer's: its
        `optim_parameters` are new, for an optimizer of their own. A compiled model is traced anew at its first call.
        """
        if not self._state.settings:
            raise NotCopyableError(
                f"{self._state.name} is part of another wrapper and lives by its workers; copy that one, or the module "
                "that it was made of"
            )
        self._state.optimizer.synchronize()
        pipe = self._copied(memo)
        pipe.__dict__["training"] = self.training
        memo[id(self)] = pipe
        return pipe

    def _copied(self, memo: dict[int, Any]) -> Self:
        state = self._state
        model, original = copy.deepcopy(state.model, memo), copy.deepcopy(state.original, memo)
        source, make_instead = copy.deepcopy(state.source, memo), copy.deepcopy(state.make_instead, memo)
        pipe = type(self).from_source(model, source, make_instead=make_instead, **state.settings)
        pipe._state.original = original
        return pipe

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotCopyableError(
            f"{self._state.name} holds threads and device memory, so it can't be pickled, given to torch.save, sent to "
            "another process or copied with copy.copy. Save the model that it wraps instead: save_checkpoint(dir), "
            "torch.save(model.state_dict(), file) or torch.save(model.model, file) after synchronize(), and compile "
            "that again; copy.deepcopy(model) makes an independent one"
        )


def _chain_of(model: nn.Module) -> LayerChain:
    if isinstance(model, LayerChain):
        return model
    if type(model) is nn.Sequential and len(model):
        # By entry, not by object: a child that is there twice is two layers.
        children = [(name, child) for name, child in model._modules.items() if child is not None]
        _warn_of_shared_buffers(children)
        if any(model.__dict__[name] for name in HOOKS):
            warn(
                "the hooks of the nn.Sequential itself don't run, since its children are the layers: put them on its "
                "first or last child, or use roundpipe.compile"
            )
        return chain_of_modules(children)
    return chain_of_modules([("", model)])


def _warn_of_shared_buffers(children: Sequence[tuple[str, nn.Module]]) -> None:
    holders: dict[int, list[str]] = {}
    for name, child in children:
        for buffer in child.buffers():
            holders.setdefault(id(buffer), []).append(name)
    shared = {tuple(names) for names in holders.values() if len(names) > 1}
    for names in sorted(shared):
        warn(
            f"layers {', '.join(names)} share buffers, but each runs on a copy of its own: if their forward writes "
            "them (BatchNorm in training), what one writes is not seen by the others, and the last one's values stay. "
            "roundpipe.compile keeps such layers together"
        )


def _close(engine: Engine, optimizer: OptimizerSide, watch: LoadWatch | None, registrar: Registrar | None) -> None:
    if watch is not None:
        watch.end()
    try:
        optimizer.close()
    finally:  # it raises what an update raised that nobody has seen
        engine.close()
        if registrar is not None:
            registrar.close()


def flow_back(inputs: Sequence[torch.Tensor], gradients: Iterable[torch.Tensor | None]) -> None:
    """Carry on a backward into whatever produced the arguments."""
    pairs = [(tensor, gradient) for tensor, gradient in zip(inputs, gradients, strict=True) if gradient is not None]
    if pairs:
        torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
