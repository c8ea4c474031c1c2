"""`RoundPipe`, the module that a user holds: calls go to its runner, everything else to its session."""

from __future__ import annotations

import copy
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Self

import torch
from torch import nn

from roundpipe.core.checks import check_flag
from roundpipe.core.errors import NotCopyableError, add_note
from roundpipe.core.options import with_options
from roundpipe.runtime.config import LossReduction, LossScope, RoundPipeRunConfig
from roundpipe.runtime.device.resolve import DeviceLike
from roundpipe.runtime.engine.spec import LossFunction
from roundpipe.runtime.optimizer.adoption import adopt
from roundpipe.runtime.optimizer.update import StepHandle
from roundpipe.runtime.ranks.group import ProcessGroupLike
from roundpipe.runtime.weights.host_weights import PinMode
from roundpipe.wrappers import checkpoint
from roundpipe.wrappers.calls import ChainProgram
from roundpipe.wrappers.given import given_microbatches
from roundpipe.wrappers.model_reports import ModelReports
from roundpipe.wrappers.model_view import ForwardOfModel, check_wrappable
from roundpipe.wrappers.module_layers import ModuleSource
from roundpipe.wrappers.session import Program, Session
from roundpipe.wrappers.training_arguments import TrainingCall, check_training_call, pass_outputs, with_loss_options


class RoundPipe(ModelReports):
    """A model that trains in rotation: its weights stay in host memory, and any stage runs on any device.

    Args:
        model: the module to train. An ``nn.Sequential`` becomes one layer per child, any other module a single
            layer; `roundpipe.compile` cuts any module into layers.
        optim_dtype: dtype of the optimizer's copies of the parameters; None: the parameters' own, with a warning if
            that is half precision, in which small updates are lost. (`roundpipe.compile` then has float32 copies.)
        name: for logs and traces; None: ``filename:line`` of the caller.
        model_run_config: defaults for every call; see `RoundPipeRunConfig`.
        pin_model: how host weights are pinned for fast uploads. ``"alloc"`` moves them to pinned memory of their
            exact size. ``"double"`` gives trained weights a second pinned buffer on top, as far as host memory has
            room, so that the next weights are ready when an asynchronous step is made; parameters then change their
            memory at each step. ``"register"`` registers them with the driver where they lie, except small ones (CUDA
            only). ``"off"`` leaves them as they are, so that an mmap-ed checkpoint is paged in on demand. If the
            system refuses to pin, memory stays unpinned, and a warning names the limit.
        devices: the rotation: a list of device names and `roundpipe.Device` objects, in which an entry may be
            repeated. None: every accelerator that torch sees, or the CPU if there is none.
        process_group: data parallel: every rank of this ``torch.distributed`` group (``"world"``: of all) wraps the
            same model and rotates it on its own part of each batch; `step` averages gradients. See docs/distributed.md.
        shard_optimizer: each rank has and updates a part of the optimizer's side only; see `optim_parameters`.

    Raises:
        ConfigError: an argument can't be used.
    """

    @with_options("compile(model, {0}=...)")
    def __init__(
        self,
        model: nn.Module | Program,
        optim_dtype: torch.dtype | None = None,
        name: str | None = None,
        model_run_config: RoundPipeRunConfig = RoundPipeRunConfig(),  # noqa: B008 - frozen
        pin_model: PinMode = "alloc",
        *,
        devices: Sequence[DeviceLike] | DeviceLike | None = None,
        process_group: ProcessGroupLike | None = None,
        shard_optimizer: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(model, Program):
            check_wrappable(model, type(self).__name__)
            model = self._program_of(model)
        options = optim_dtype, name, model_run_config, pin_model, devices, process_group, shard_optimizer
        session = Session(model.model, *options, widens_half=model.widens_half)
        # past __setattr__, which sets on the model once there is a session
        self.__dict__.update(
            _session=session, _runner=model.start(session), _program=model, training=model.model.training
        )

    @classmethod
    def _program_of(cls, model: nn.Module) -> Program:
        """What a model that is given as it is runs as."""
        return ChainProgram(model, ModuleSource(model), widens_half=False)

    # Calls

    @ForwardOfModel
    def forward(
        self,
        *args: Any,
        roundpipe_run_config: RoundPipeRunConfig = RoundPipeRunConfig(),  # noqa: B008 - frozen
        **kwargs: Any,
    ) -> Any:
        """The model's outputs: split, run as a pipeline, merged.

        With grad mode on, ``backward()`` on the outputs runs the backward stages, and gradients flow on to arguments
        that require grad. With grad mode off, nothing is kept for a backward. ``torch.autograd.grad`` gives gradients
        of the arguments and of what they were computed from, but not of the model's own parameters.

        The backward runs the layers again on the arguments. If an argument was changed in place in between, it raises
        `BackwardError`.

        Args:
            *args: the model's arguments, on any device.
            roundpipe_run_config: options for this call.
            **kwargs: the model's keyword arguments.

        Raises:
            Exception: what the model's own code raises, with a note that says where.
        """
        with self._session.call(reads=self._session.only_reads(roundpipe_run_config)):
            self._session.check_arguments(args, kwargs)
            outputs = self._runner.forward(args, kwargs, roundpipe_run_config)
        self._session.note_call(roundpipe_run_config, (args, kwargs))
        return outputs

    @with_options("forward_backward({0}=...)")
    def forward_backward(
        self,
        input_args: Sequence[Any] = (),
        input_kwargs: dict[str, Any] | list[dict[str, Any]] = {},  # noqa: B006 - the contract's default, never changed
        label: Any = None,
        loss_fn: LossFunction = pass_outputs,
        return_outputs: bool = False,
        run_config: RoundPipeRunConfig = RoundPipeRunConfig(),  # noqa: B008 - frozen
        loss_reduction: LossReduction | None = None,
        loss_scope: LossScope | None = None,
    ) -> Any:
        """Run forward, loss and backward of every microbatch; gradients accumulate until they are zeroed.

        This equals splitting inputs and label, computing ``loss_fn(model(...), label)`` for each microbatch, and
        calling ``torch.autograd.backward(loss)``.

        After the first asynchronous `step`, a call returns as soon as the losses are known: its last backward stages
        run beside the first stages of the next call. ``.grad`` is then complete after `synchronize`; `step` waits
        for it by itself. What such a backward raises is raised at the next call into the model. (Calls that draw
        random numbers, or whose arguments require grad, are always waited for.)

        Args:
            input_args: the model's arguments.
            input_kwargs: the model's keyword arguments. A list of dicts is the microbatches themselves, which may
                differ in length; ``input_args`` and ``label``, if given, are then lists of as many.
            label: split like the inputs and given to ``loss_fn``; gradients flow to tensors in it that require grad.
            loss_fn: ``(outputs, label) -> loss``, run on the device: a tensor of one element, or a sequence of them.
            return_outputs: also return the merged outputs.
            run_config: options for this call.
            loss_reduction: ``"sum"`` (the default) adds the microbatches' losses. ``"mean"`` is for losses that are
                means, and gives that of the batch (with ``process_group``, of all ranks' batches): each counts by its
                weight if ``loss_fn`` returns ``(loss, weight)``, such as the number of target tokens; else by its
                targets, if the graph tells them; else by its samples.
            loss_scope: ``"batch"`` runs ``loss_fn`` once, on the outputs and labels of the whole batch.

        Returns:
            The loss of this rank's batch, on the CPU and detached (a list if ``loss_fn`` returns several); with
            ``return_outputs``, the pair of it and the merged outputs.

        Raises:
            ConfigError: gradients are off where it is called.
            Exception: of the model or ``loss_fn``, with a note of where, and of whether to call ``zero_grad()``.
        """
        options = with_loss_options(run_config, loss_reduction, loss_scope)
        return self._train(input_args, input_kwargs, label, loss_fn, return_outputs, options)

    @with_options("forward_loss({0}=...)")
    def forward_loss(
        self,
        input_args: Sequence[Any] = (),
        input_kwargs: dict[str, Any] | list[dict[str, Any]] = {},  # noqa: B006 - never changed
        label: Any = None,
        loss_fn: LossFunction = pass_outputs,
        return_outputs: bool = False,
        run_config: RoundPipeRunConfig = RoundPipeRunConfig(),  # noqa: B008 - frozen
        loss_reduction: LossReduction | None = None,
        loss_scope: LossScope | None = None,
    ) -> Any:
        """The loss of `forward_backward`, with the same arguments and the same result, without the backward.

        For evaluation: ``loss_fn`` runs on the device behind the last layer, so that outputs (logits) come to the
        host only with ``return_outputs``. Call ``model.eval()`` before it as for any evaluation.

        Raises:
            Exception: what the model or ``loss_fn`` raises, with a note that says where.
        """
        options = with_loss_options(run_config, loss_reduction, loss_scope)
        with torch.no_grad():
            return self._train(input_args, input_kwargs, label, loss_fn, return_outputs, options, has_backward=False)

    def _train(
        self,
        args: Any,
        kwargs: Any,
        label: Any,
        loss_fn: LossFunction,
        return_outputs: bool,
        options: RoundPipeRunConfig,
        has_backward: bool = True,
    ) -> Any:
        with self._session.call(reads=not has_backward):
            microbatches, running = [(args, kwargs)], options
            if isinstance(kwargs, list):
                microbatches, label, running = given_microbatches(args, kwargs, label, options)
            for each in microbatches:
                check_training_call(*each, loss_fn, return_outputs, has_backward)
                self._session.check_arguments(*each)
            (args, kwargs), *_ = microbatches
            training = TrainingCall(tuple(args), kwargs, label, loss_fn, return_outputs, running, has_backward)
            with self._session.training_call(training, self._runner.config) as training:
                result = self._runner.forward_backward(training)
        self._session.note_call(options, *microbatches)
        return result

    # The optimizer's side

    def optim_parameters(self) -> Iterator[nn.Parameter]:
        """The optimizer's copies of the trainable parameters, for any torch optimizer.

        With ``shard_optimizer``, this rank's elements of each, in one dimension, maybe none. docs/distributed.md says
        what that means for optimizers, groups, clipping, scaling and states.
        """
        return (parameter for _, parameter in self.optim_named_parameters())

    def optim_named_parameters(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The optimizer's copies under the original names.

        Args:
            prefix: put before each name, with a dot.
            remove_duplicate: give tied parameters once.
        """
        return self._session.optimizer.optim_named_parameters(prefix, remove_duplicate)

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Have an optimizer that was made from the model's own parameters update the copies instead.

        Its groups keep their options; its state goes on, converted to the copies' dtype.

        Raises:
            ConfigError: it has none of the model's trainable parameters.
        """
        self.synchronize()
        tuple(self.optim_parameters())  # makes them
        adopt(optimizer, self._session.optimizer.parameter_pairs())

    def step(self, step_fn: Callable[..., Any], is_async: bool = True, *args: Any, **kwargs: Any) -> StepHandle:
        """Run one optimizer update.

        Args:
            step_fn: does the update, such as ``optimizer.step(); optimizer.zero_grad()``. Inside it
                ``model.parameters()`` are the optimizer's copies. One that is not asynchronous may call the model,
                as LBFGS does to evaluate the loss; the model then has the copies' present values.
            is_async: True returns at once; the next iteration trains on parameters one update old. False
                waits, and the next iteration sees the update.
            *args: for ``step_fn``.
            **kwargs: for ``step_fn``.

        Returns:
            A handle: ``done()``; ``wait(timeout)``; ``result(timeout)``, what ``step_fn`` returned or raised.

        Raises:
            Exception: what an earlier asynchronous ``step_fn`` raised.
        """
        handle = self._session.optimizer.step(step_fn, is_async, args, kwargs)
        self._runner.update_begun()
        self._session.reads.open_forward()
        return handle

    def synchronize(self) -> None:
        """Wait for everything; parameters then hold the latest update and ``.grad`` what is accumulated."""
        self._session.optimizer.synchronize()
        self._session.writer.wait()

    # Checkpoints

    @with_options("save_checkpoint(dir, {0}=...)")
    def save_checkpoint(
        self,
        dir: str | os.PathLike[str],
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        step: int | None = None,
        extra: Any = None,
        is_async: bool = False,
    ) -> Future[None]:
        """Save everything that training needs to go on, bit for bit, on any number of devices.

        Begins with `synchronize`: after a save, as after a load, the next iteration trains on the latest
        weights, also between asynchronous steps. Gradients that no step has taken are not saved: call it
        after `step`. A crash, an error or Ctrl-C at any moment leaves the previous checkpoint in ``dir`` whole: it
        is replaced once the new one is on the disk, was read again and has the checksums of what was written. A
        save of another process into ``dir`` is waited for. Needs the safetensors library
        (``pip install roundpipe[hf]``), and no host memory to speak of beside the weights. With ``process_group``, call
        it on all ranks; the first one writes.

        Args:
            dir: replaced as a whole; what else lies in an earlier checkpoint's folder, such as a tokenizer, stays.
            optimizer: made from `optim_parameters`.
            scheduler: has ``state_dict``, as has ``scaler``: `roundpipe.GradScaler` or torch's.
            step: to be given back by the load.
            extra: likewise; numbers, strings, plain tensors, and dicts, lists, tuples and sets of them.
            is_async: copy all of it in host memory (as many bytes as the checkpoint has), return, and write in
                a thread. What goes wrong there is raised at the next call into the model, or save, unless the
                future has told it. The next save or load, `synchronize` and `close` wait for it, and so does the
                interpreter's exit.

        Returns:
            A future that is done once the checkpoint is in place; ``result()`` waits and raises what went wrong.

        Raises:
            ConfigError: something can't be saved, ``dir`` holds something else than a checkpoint, or the
                safetensors library is missing.
            CheckpointError: no permission, the disk is full, or another process has been saving to ``dir`` for half an
                hour; nothing is left behind. It is an `OSError`.
        """
        objects = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        check_flag("is_async", is_async)
        return checkpoint.save(self._session, dir, objects, step, extra, is_async)

    @with_options("load_checkpoint(dir, {0}=...)")
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
            weights_only: read the weights and nothing else, also from a folder that ``save_pretrained`` wrote.

        Returns:
            ``step`` and ``extra`` as saved; None for both with ``weights_only``.

        Raises:
            CheckpointNotFoundError: there is no checkpoint; is a `FileNotFoundError`.
            CheckpointError: it is damaged, or of a newer version, or is not one of this model, optimizer, scheduler
                or scaler, which is also a `ConfigError`.
            ConfigError: an argument can't be used, or the safetensors library is missing. Whatever of these is
                raised, nothing was changed.
        """
        objects = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        return checkpoint.load(self._session, dir, objects, weights_only)

    # Life and copies

    def close(self) -> None:
        """Wait for what is running, end all threads and give device memory back; safe to call twice.

        A context that ends does the same. Of a wrapper that is dropped, or open at the end of the program, updates that
        were asked for are made first.

        Raises:
            Exception: what the last round or update raised after its call had returned, once everything is closed. If
                another exception ends the context, that one is raised, with a note of this one. Where nobody closes,
                Python prints it, or it is logged as an error, and the program's exit code does not show it.
        """
        self._session.close()

    def __enter__(self) -> RoundPipe:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception as pending:
            if error is None:
                raise
            add_note(error, "roundpipe: close() raised after it:\n" + "".join(traceback.format_exception(pending)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Another wrapper, of a copy of the model, on the same devices with workers of its own.

        The copy starts from the latest weights, without gradients and without anything of an optimizer's: its
        `optim_parameters` are new, for an optimizer of their own. A compiled model is traced anew at its first call.
        """
        self._session.optimizer.synchronize()
        pipe = type(self)(copy.deepcopy(self._program, memo), **self._session.settings)
        pipe._session.shown = copy.deepcopy(self._session.shown, memo)
        pipe.__dict__["training"] = self.training
        memo[id(self)] = pipe
        return pipe

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotCopyableError(
            f"{self._session.name} holds threads and device memory, so it can't be pickled, given to torch.save, sent "
            "to another process or copied with copy.copy. Save the model that it wraps instead: save_checkpoint(dir), "
            "torch.save(model.state_dict(), file) or torch.save(model.model, file) after synchronize(), and compile "
            "that again; copy.deepcopy(model) makes an independent one"
        )
