"""`RoundPipe`, the module that a user holds: calls in, losses, outputs and gradients out.

    forward_backward:  split -> chain_for each microbatch -> round -> engine -> sum of losses, merged outputs
    forward:           the same without loss; with grad, as one node of the caller's autograd graph
    step, synchronize: the optimizer's side, see `roundpipe.runtime.optimizer`

The wrapper has no parameters, buffers or submodules of its own: everything that asks for them is answered by
the original model, whose objects they stay.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import nn

from roundpipe import checkpoint, structure
from roundpipe.errors import ClosedError, ConfigError, DeviceMemoryError
from roundpipe.layers import ChainSource, FixedChain, LayerChain, chain_of_modules
from roundpipe.report import partition_table
from roundpipe.runtime import autograd, microbatch
from roundpipe.runtime.config import ResolvedConfig, RoundPipeRunConfig, resolve
from roundpipe.runtime.devices import DeviceLike, open_backends, resolve_devices
from roundpipe.runtime.engine import Engine, HostValue, Round
from roundpipe.runtime.gate import WeightGate
from roundpipe.runtime.loading import LoadWatch
from roundpipe.runtime.optimizer import OptimizerSide, inside_optimizer
from roundpipe.runtime.residency import HostWeights, PinMode
from roundpipe.runtime.rounds import Call, RoundMaker, finished, input_gradients, input_tensors, sum_losses
from roundpipe.runtime.stage import LossFunction

_PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def caller_name() -> str:
    """``filename:line`` of the code outside the package that called into it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE_FOLDER):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def check_training_call(input_args: Any, input_kwargs: Any, loss_fn: Any) -> None:
    """Raise `ConfigError` for arguments of ``forward_backward`` that can't be meant."""
    if not isinstance(input_args, (tuple, list)):
        raise ConfigError(
            f"input_args is {type(input_args).__name__}; give a tuple of the model's arguments, such as (x,)"
        )
    if not isinstance(input_kwargs, dict):
        raise ConfigError(f"input_kwargs is {type(input_kwargs).__name__}; give a dict of keyword arguments")
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
    maker: RoundMaker
    optimizer: OptimizerSide
    gate: WeightGate
    writer: checkpoint.BackgroundWriter = field(default_factory=checkpoint.BackgroundWriter)
    watch: LoadWatch | None = None
    """None: part of another wrapper, which has it."""
    last_chain: LayerChain | None = None
    closed: bool = False


class RoundPipe(nn.Module):
    """A model that trains in rotation: weights in host memory, any stage on any device.

    Args:
        model: an ``nn.Sequential`` becomes one layer per child; any other module becomes one layer.
            `roundpipe.compile` cuts any module into layers.
        optim_dtype: dtype of the optimizer's copies of the parameters; None: the parameters' own.
        name: for logs and traces; None: ``filename:line`` of the caller.
        model_run_config: defaults for every call; see `RoundPipeRunConfig`.
        pin_model: how host weights are pinned for fast uploads. ``"alloc"``: in pinned memory of their exact
            size; ``"register"``: their memory is registered with the driver (CUDA only); ``"off"``: they stay
            where they are, so an mmap-ed checkpoint pages in on demand.
        devices: the rotation: None for every accelerator that torch sees, otherwise the CPU; or a list of
            device names and `roundpipe.Device`, in which an entry may be repeated.

    Raises:
        ConfigError: an argument can't be used as given.
    """

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
            raise ConfigError(f"RoundPipe wraps an nn.Module, got {type(model).__name__}")
        self._set_up(model, FixedChain(_chain_of(model)), optim_dtype, name, model_run_config, pin_model, devices)

    @classmethod
    def from_source(
        cls,
        model: nn.Module,
        source: ChainSource,
        *,
        optim_dtype: torch.dtype | None = None,
        name: str | None = None,
        model_run_config: RoundPipeRunConfig = RoundPipeRunConfig(),  # noqa: B008 - frozen
        pin_model: PinMode = "alloc",
        devices: Sequence[DeviceLike] | DeviceLike | None = None,
    ) -> RoundPipe:
        """A wrapper whose layers come from a source, such as the compiler."""
        pipe = cls.__new__(cls)
        nn.Module.__init__(pipe)
        pipe._set_up(model, source, optim_dtype, name, model_run_config, pin_model, devices)
        return pipe

    @classmethod
    def inside(cls, whole: RoundPipe, model: nn.Module, source: ChainSource, name: str) -> Self:
        """A wrapper of one part of another wrapper's model, with that one's workers, weights and optimizer's side.

        The whole one is closed, stepped and asked for parameters; the part is only called.
        """
        pipe = cls.__new__(cls)
        nn.Module.__init__(pipe)
        all_of = whole._state
        maker = RoundMaker(all_of.engine)
        shared = (all_of.engine, all_of.host, maker, all_of.optimizer, all_of.gate, all_of.writer)
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
        name = name or caller_name()
        entries = resolve_devices(devices)
        if pin_model == "register" and any(torch.device(one.device).type != "cuda" for one in entries):
            raise ConfigError(
                "pin_model='register' pins existing memory through CUDA, and devices are "
                f"{', '.join(str(one.device) for one in entries)}; use 'alloc' or 'off'"
            )
        backends = open_backends(entries)
        gate = WeightGate()
        engine = Engine(backends, name, gate)
        parameters = model.named_parameters(remove_duplicate=False)
        optimizer = OptimizerSide(parameters, optim_dtype, name=name, gate=gate)
        host = HostWeights(pin_model, backends[0].host_buffer)
        state = _State(model, None, name, source, config, engine, host, RoundMaker(engine), optimizer, gate)
        self.__dict__["_state"] = state
        self.__dict__["training"] = model.training
        watch = state.watch = LoadWatch(model, optimizer)
        weakref.finalize(self, _close, engine, optimizer, watch)

    # Calls

    def forward(
        self,
        *args: Any,
        roundpipe_run_config: RoundPipeRunConfig = RoundPipeRunConfig(),  # noqa: B008 - frozen
        **kwargs: Any,
    ) -> Any:
        """The model's outputs: split, run as a pipeline, merged.

        With grad mode on, ``backward()`` on the outputs runs the backward stages and gradients flow to the
        arguments that require grad; without, nothing is kept.

        Args:
            *args: the model's arguments, on any device.
            roundpipe_run_config: options for this call.
            **kwargs: the model's keyword arguments.

        Raises:
            Exception: whatever the model's own code raises, with a note that says where.
        """
        config = resolve(roundpipe_run_config, self._state.config, num_devices=self._state.engine.num_workers)
        state = self._ready(adds_gradients=config.requires_grad)
        calls = self._calls(args, kwargs, None, config)
        outputs: list[Any] = []
        for call in calls:
            outputs += self._forward_call(call)
        state.optimizer.raise_pending()
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

        Args:
            input_args: the model's arguments.
            input_kwargs: the model's keyword arguments.
            label: split like the inputs and given to ``loss_fn``.
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
        for call in self._calls(tuple(input_args), input_kwargs, label, config):
            made = state.maker.train_round(call, loss_fn, return_outputs)
            inputs = input_tensors(made.values)
            self._run(made)
            losses += finished(made.losses)
            outputs += finished(made.outputs)
            arguments += inputs
            gradients += input_gradients(made, inputs)
        # once, since all rounds' arguments may be pieces of one graph
        flow_back([tensor for *_, tensor in arguments], gradients)
        state.optimizer.raise_pending()
        total = sum_losses(losses)
        return (total, microbatch.merge(outputs, config)) if return_outputs else total

    def _calls(self, args: tuple[Any, ...], kwargs: dict[str, Any], label: Any, config: ResolvedConfig) -> list[Call]:
        """The microbatches, grouped where neighbours share a chain."""
        state = self._state
        pieces = microbatch.split(args, kwargs, label, config)
        calls: list[Call] = []
        for one_args, one_kwargs, one_label, events in zip(
            pieces.args, pieces.kwargs, pieces.labels, pieces.events, strict=True
        ):
            for event in events:  # the guards below may read the arguments
                event.synchronize()
            chain = state.source.chain_for(one_args, one_kwargs)
            if not calls or calls[-1].chain is not chain:
                calls.append(Call(chain, config, [], [], [], pieces.num_microbatches))
            calls[-1].args.append(one_args)
            calls[-1].kwargs.append(one_kwargs)
            calls[-1].labels.append(one_label)
        state.last_chain = calls[-1].chain
        return calls

    def _run(self, made: Round) -> None:
        state = self._state
        state.engine.run(made, state.host)

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
        flowing = made.around.with_gradient
        outs = [
            (m, name, position, tensor)
            for m, carry in enumerate(carries)
            for name in exit.reads
            if name in flowing and name not in firsts[m]
            for position, tensor in enumerate(structure.tensors(carry[name]))
        ]
        if call.config.requires_grad and outs:
            backward_round = maker.backward_round(made, call, plan)

            def run_backward(gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
                for m, carry in enumerate(carries):
                    by_name: dict[str, list[torch.Tensor | None]] = {}
                    for (where, name, position, _), gradient in zip(outs, gradients, strict=True):
                        if where == m and gradient is not None:
                            found = by_name.setdefault(name, [None] * len(structure.tensors(carry[name])))
                            found[position] = gradient.to("cpu")
                    for name, found in by_name.items():
                        backward_round.gradients[m].setdefault(name, []).append((found, None))
                self._run(backward_round)
                return input_gradients(backward_round, inputs)

            joined = iter(
                autograd.join(
                    lambda: tuple(tensor for *_, tensor in outs), run_backward, [tensor for *_, tensor in inputs]
                )
            )
            for m, carry in enumerate(carries):
                for name in exit.reads:
                    if name in flowing and name not in firsts[m]:
                        carry[name] = structure.map_tensors(carry[name], lambda _: next(joined))
        if device.type != "cpu":
            carries = [structure.map_tensors(carry, lambda tensor: tensor.to(device)) for carry in carries]
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
                ``model.parameters()`` are the optimizer's copies.
            is_async: True returns at once; the next iteration trains on parameters one update old. False
                waits, and the next iteration sees the update.
            *args: for ``step_fn``.
            **kwargs: for ``step_fn``.

        Raises:
            Exception: what an earlier asynchronous ``step_fn`` raised.
        """
        self._state.optimizer.step(step_fn, is_async, args, kwargs)

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
        if chain is None:
            return f"{state.name}: not traced yet; the first call traces it, or give compile(example_kwargs=...)"
        plan = state.maker.last_plan
        if state.last_chain is None:
            config = resolve(None, state.config, num_devices=state.engine.num_workers)
            with contextlib.suppress(DeviceMemoryError):  # the call will say so; the layers can be shown
                plan = state.maker.plan(Call.like_example(chain, config))
        return partition_table(chain, plan, title=state.name)

    def peak_device_bytes(self, reset: bool = False) -> int:
        """Largest number of bytes in use at once on any device since the last reset."""
        return max(self._state.engine.peak_bytes(reset))

    # Life

    def close(self) -> None:
        """Wait for what is running, end all threads and give device memory back; safe to call twice."""
        state = self._state
        if not state.closed:
            state.closed = True
            try:
                _close(state.engine, state.optimizer, state.watch)
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
        state.optimizer.begin_call(adds_gradients)
        state.writer.raise_pending()
        return state

    # The original model shines through

    @property
    def model(self) -> nn.Module:
        """The wrapped module."""
        return self._state.model

    def set_original_model(self, original_model: nn.Module) -> None:
        """Answer attribute access with another model than the wrapped one."""
        self._state.original = original_model

    @property
    def _target(self) -> nn.Module:
        state = self._state
        return state.model if state.original is None else state.original

    def __getattr__(self, name: str) -> Any:
        state = self.__dict__.get("_state")
        if state is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        target = state.model if state.original is None else state.original
        return getattr(target, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_state" not in self.__dict__:
            super().__setattr__(name, value)
        elif name == "training":
            self.__dict__["training"] = value
        else:
            setattr(self._target, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._target, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._target)})

    def __repr__(self) -> str:
        return self.partition_table()

    def train(self, mode: bool = True) -> RoundPipe:
        """Set training mode on the wrapper and the model."""
        self._target.train(mode)
        self._state.model.train(mode)
        self.__dict__["training"] = mode
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters; inside ``step_fn``, the optimizer's copies."""
        if inside_optimizer():
            return self.optim_named_parameters(prefix, remove_duplicate)
        return self._target.named_parameters(prefix, recurse, remove_duplicate)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The model's parameters; inside ``step_fn``, the optimizer's copies."""
        return (parameter for _, parameter in self.named_parameters(recurse=recurse))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's buffers."""
        return self._target.named_buffers(*args, **kwargs)

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """The model's buffers."""
        return self._target.buffers(recurse)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The model's children."""
        return self._target.named_children()

    def children(self) -> Iterator[nn.Module]:
        """The model's children."""
        return self._target.children()

    def modules(self, *args: Any, **kwargs: Any) -> Iterator[nn.Module]:
        """The model's modules."""
        return self._target.modules(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """The model's modules by name."""
        return self._target.named_modules(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's state with its own keys; call `synchronize` first for the latest update."""
        return self._target.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load the model's state and take it over into the optimizer's copies."""
        state = self._state
        state.optimizer.synchronize()
        result = self._target.load_state_dict(state_dict, strict=strict, assign=assign)
        state.optimizer.refresh()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop accumulated gradients, on the model's side and on the optimizer's."""
        self._state.optimizer.zero_grad(set_to_none)

    def requires_grad_(self, requires_grad: bool = True) -> RoundPipe:
        """Switch gradients of all parameters on or off."""
        self._target.requires_grad_(requires_grad)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> RoundPipe:
        """Apply a function to every module of the model."""
        self._target.apply(fn)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> RoundPipe:
        device = fn(torch.empty(0)).device
        if device.type != "cpu":
            raise ConfigError(
                f"the model's weights stay in host memory and are streamed to the devices; moving them to {device} "
                f"is not possible. Choose devices with compile(model, devices=[{str(device)!r}])"
            )
        self._target._apply(fn, recurse)
        self._state.optimizer.refresh()
        return self


def _chain_of(model: nn.Module) -> LayerChain:
    if isinstance(model, LayerChain):
        return model
    if type(model) is nn.Sequential and len(model):
        # By entry, not by object: a child that is there twice is two layers.
        children = [(name, child) for name, child in model._modules.items() if child is not None]
        _warn_of_shared_buffers(children)
        return chain_of_modules(children)
    return chain_of_modules([("", model)])


def _warn_of_shared_buffers(children: Sequence[tuple[str, nn.Module]]) -> None:
    holders: dict[int, list[str]] = {}
    for name, child in children:
        for buffer in child.buffers():
            holders.setdefault(id(buffer), []).append(name)
    shared = {tuple(names) for names in holders.values() if len(names) > 1}
    for names in sorted(shared):
        warnings.warn(
            f"layers {', '.join(names)} share buffers, but each runs on a copy of its own: if their forward writes "
            "them (BatchNorm in training), what one writes is not seen by the others, and the last one's values stay. "
            "roundpipe.compile keeps such layers together",
            stacklevel=4,
        )


def _close(engine: Engine, optimizer: OptimizerSide, watch: LoadWatch | None) -> None:
    if watch is not None:
        watch.end()
    try:
        optimizer.close()
    finally:  # it raises what an update raised that nobody has seen
        engine.close()


def flow_back(inputs: Sequence[torch.Tensor], gradients: Iterable[torch.Tensor | None]) -> None:
    """Carry on a backward into whatever produced the arguments."""
    pairs = [(tensor, gradient) for tensor, gradient in zip(inputs, gradients, strict=True) if gradient is not None]
    if pairs:
        torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
