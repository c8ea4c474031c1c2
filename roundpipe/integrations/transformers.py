"""The Trainer of Hugging Face transformers, with a rotation in the place of the model on a device.

    class MyTrainer(RoundPipeTrainerMixin, Trainer): ...

``trainer.model`` stays the plain model on the host; what runs is ``trainer.model_wrapped``, a `RoundPipe`. All batches
of an accumulation are microbatches of one round:

    training_step, but the last   keeps its batch; its loss is 0
    training_step, the last       compute_loss tells what it calls the model with        `stand_in.arguments_for_model`
                                  batches are cut, if there are too few of them          `microbatches.LossKind.cut`
                                  one forward_backward, in which compute_loss gets the outputs of each microbatch

The optimizer has the model's own parameters, or the rotation's copies of them where these differ from the parameters:
float32 copies of half precision, or the updates of asynchronous steps, which run in `optimizers.LateOptimizer`.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import convert_to_fp32
from torch import nn
from transformers import Trainer

from roundpipe.api import compile
from roundpipe.core.caller import warn
from roundpipe.core.errors import ConfigError, LossError, OnlyWholeError
from roundpipe.integrations.arguments import RoundPipeArguments, check_training_arguments
from roundpipe.integrations.microbatches import HALF_TOLERANCE, TOLERANCE, Batch, LossKind, Weighing, cut
from roundpipe.integrations.optimizers import LateOptimizer, prepare_scaler
from roundpipe.integrations.stand_in import (
    CalledAgain,
    ModelStandIn,
    answer_once,
    arguments_for_model,
    attributes_kept,
    model_of,
)
from roundpipe.integrations.training_step import step_around
from roundpipe.runtime.config import AUTO, RoundPipeRunConfig
from roundpipe.runtime.microbatch.pieces import BatchPieces
from roundpipe.wrappers.model_view import ModelView
from roundpipe.wrappers.pipe import RoundPipe
from roundpipe.wrappers.whole_warnings import warn_of_whole

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The label of a microbatch."""

    inputs: dict[str, Any]
    """For the loss code; empty if the model's own loss is all."""
    num_items: Any
    factor: float
    """What its loss counts for."""


def own_loss(outputs: Any, label: LossInputs) -> torch.Tensor:
    """The loss that the model has computed."""
    if isinstance(outputs, dict) and "loss" not in outputs:
        raise LossError(f"the model returned no loss, only {', '.join(outputs)}: its batches need labels")
    loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
    return loss * label.factor


Microbatch = tuple[Batch, LossInputs]


class RoundPipeTrainerMixin(Trainer if TYPE_CHECKING else object):  # type: ignore[misc]
    """Has a ``Trainer`` train in rotation; put it in front of ``Trainer``, or of a class made from it.

    Args:
        *args: the trainer's own.
        roundpipe: options of the rotation.
        **kwargs: the trainer's own.

    Raises:
        ConfigError: the training arguments ask for what a rotation can't do, by name.
    """

    model: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if issubclass(cls, Trainer) and cls.__mro__.index(Trainer) < cls.__mro__.index(RoundPipeTrainerMixin):
            raise ConfigError(
                f"{cls.__name__}: RoundPipeTrainerMixin behind the trainer changes nothing; put it in front, as in "
                f"class {cls.__name__}(RoundPipeTrainerMixin, Trainer)"
            )

    def __init__(self, *args: Any, roundpipe: RoundPipeArguments | None = None, **kwargs: Any) -> None:
        if not isinstance(roundpipe, RoundPipeArguments | None):
            raise ConfigError(f"roundpipe= is {type(roundpipe).__name__}; give a RoundPipeArguments, or None")
        self.rotation = roundpipe or RoundPipeArguments()
        self._pipe: RoundPipe | None = None
        self._kept: list[tuple[dict[str, Any], Any]] = []
        self._calls_model_once = True
        self._runs_whole = self._is_told_of_whole = False
        """Whether the model could not run a piece of a batch."""
        self._kinds: dict[tuple[bool, bool], LossKind] = {}
        self._loss_lock = threading.Lock()
        super().__init__(*args, **kwargs)

    # What is prepared

    def create_accelerator_and_postprocess(self) -> None:
        """Refuse what can't be meant; then one rotation is one device, and nothing is moved to it."""
        check_training_arguments(self.args, self.rotation)
        self.args._n_gpu = 1  # several devices are no nn.DataParallel
        super().create_accelerator_and_postprocess()
        accelerator = self.accelerator
        accelerator.device_placement = False
        unwrap, clip = accelerator.unwrap_model, accelerator.clip_grad_norm_
        accelerator.unwrap_model = lambda model, *args, **kwargs: unwrap(self._plain(model), *args, **kwargs)
        accelerator.clip_grad_norm_ = functools.partial(self._clip, clip)

    def _plain(self, model: Any) -> Any:
        return model.model if isinstance(model, ModelView) else model_of(model)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The model stays on the host."""

    def _prepare_input(self, data: Any) -> Any:
        """Batches stay on the host, too."""
        return data

    @property
    def pipe(self) -> RoundPipe:
        """The model in rotation, ``model_wrapped`` while it trains."""
        model = model_of(self.model)
        if self._pipe is None or self._pipe.model is not model:
            if self._pipe is not None:
                self._pipe.close()
            options = self.rotation
            self._pipe = compile(
                model,
                name=type(self).__name__,
                devices=options.devices,
                optim_dtype=options.dtype,
                model_run_config=options.config,
            )
        return self._pipe

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return self.pipe

    # The optimizer

    @property
    def _has_copies(self) -> bool:
        trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        options = self.rotation
        return options.is_async or options.dtype is not None or any(each.dtype in _HALF for each in trainable)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """As the trainer makes it, or as it was given; of the rotation's copies, if it needs them."""
        prepare_scaler(self.accelerator, self._has_copies)
        optimizer = super().create_optimizer(*args, **kwargs)
        if self._has_copies and not hasattr(optimizer, "optimizer"):  # else a second train() has it from the first
            self.pipe.adopt(optimizer)
            if self.rotation.is_async:
                self.optimizer = optimizer = LateOptimizer(optimizer, self.pipe)
        return optimizer

    def _clip(self, clip: Callable[..., Any], parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the gradients that the optimizer has."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        if isinstance(optimizer, LateOptimizer):
            # accelerate's own looks at each gradient before, which has all of them converted
            return optimizer.clip_later(torch.nn.utils.clip_grad_norm_, max_norm, norm_type)
        if self._has_copies:
            parameters = self.pipe.optim_parameters()
        return clip(parameters, max_norm, norm_type=norm_type)

    # Training

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The batches of one accumulation."""
        self._kept = []  # an accumulation may have been broken off
        return super().get_batch_samples(*args, **kwargs)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Keep a batch, or run all of an accumulation; the loss is that of all, at the last of them."""
        return step_around(super().training_step, self._step_in_rotation, model, inputs, num_items_in_batch)

    def _step_in_rotation(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        train_optimizer = getattr(self.optimizer, "train", None)
        if callable(train_optimizer):
            train_optimizer()
        self._kept.append((dict(self._prepare_inputs(inputs)), num_items_in_batch))
        if len(self._kept) < self.current_gradient_accumulation_steps:
            return torch.zeros((), device=self.args.device)
        kept, self._kept = self._kept, []
        with self.compute_loss_context_manager():
            return self._run_all(kept).to(self.args.device)

    def _share_of(self, num_items: Any) -> float:
        """What the loss of one batch counts for in its accumulation."""
        is_scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if is_scaled is None:
            counts = self.model_accepts_loss_kwargs and num_items is not None
            is_scaled = counts or self.compute_loss_func is not None
        return 1.0 if is_scaled else 1.0 / self.current_gradient_accumulation_steps

    def _num_asked(self, batch: Batch, num_batches: int = 1) -> int:
        """Microbatches of a batch, of so many in a round, if it has as many samples."""
        if self._runs_whole:
            return 1
        number = self.pipe.num_microbatches_for(batch.args, batch.kwargs)
        return number if self.rotation.config.num_microbatch == AUTO else math.ceil(number / num_batches)

    def _run_cut(self, run: Callable[[], Any]) -> Any:
        """Do something with microbatches, or with whole batches where the model can't run the pieces of one."""
        try:
            return run()
        except OnlyWholeError as error:
            kind, is_small = type(self).__name__, error.num_samples == 1  # as of the last batch of an epoch
            if not self._is_told_of_whole:
                warn_of_whole(kind, error, "per_device_train_batch_size sets how much runs at once", is_small=is_small)
            self._runs_whole = self._is_told_of_whole = True
            result = run()
            self._runs_whole = not is_small
            return result

    def _run_all(self, kept: Sequence[tuple[dict[str, Any], Any]]) -> torch.Tensor:
        if self._calls_model_once:
            try:
                return self._run_cut(lambda: self._run_round(kept))
            except CalledAgain:
                self._calls_model_once = False
                self.pipe.zero_grad()
                warn(
                    f"{type(self).__name__}.compute_loss does not call the model exactly once: batches run one by "
                    "one, each forward and backward after the other, so that devices wait"
                )
        total, model = torch.zeros(()), ModelStandIn(self.model, self.pipe)
        for inputs, num_items in kept:
            with self.accelerator.autocast():
                loss = self._compute(model, inputs, num_items) * self._share_of(num_items)
            self.accelerator.backward(loss)
            total = total + loss.detach().cpu()
        return total

    def _run_round(self, kept: Sequence[tuple[dict[str, Any], Any]]) -> torch.Tensor:
        scale = self._loss_scale()
        microbatches: list[Microbatch] = []
        for inputs, num_items in kept:
            microbatches += self._pieces_of(inputs, num_items, len(kept), self._share_of(num_items) * scale)
        with self.accelerator.autocast():
            loss = self.pipe.forward_backward(**self._call(microbatches, is_own=self._is_own_loss))
        return loss / scale

    def _loss_scale(self) -> float:
        """By which fp16 multiplies losses."""
        scaler = getattr(self.accelerator, "scaler", None)
        return 1.0 if scaler is None else float(scaler.get_scale())

    # The loss

    @property
    def _is_own_loss(self) -> bool:
        """Whether the loss is what the model computes, and nothing else."""
        is_ours = type(self).compute_loss is Trainer.compute_loss
        return is_ours and self.compute_loss_func is None and self.label_smoother is None

    def _loss_of(self, outputs: Any, label: LossInputs) -> torch.Tensor:
        """The loss code on a microbatch, in a worker's thread; one at a time, since it is not made for threads."""
        with self._loss_lock, torch.autocast(self.accelerator.device.type, enabled=False):
            model = answer_once(self.model, self._in_float32(outputs))
            loss = self._compute(model, label.inputs, label.num_items)
            if (kind := self._kinds.get((False, label.num_items is None))) is not None:
                kind.look_at(loss, outputs)
            return loss * label.factor

    def _in_float32(self, outputs: Any) -> Any:
        """Outputs as `accelerate` gives them where the model runs under autocast."""
        return convert_to_fp32(outputs) if self.accelerator.native_amp else outputs

    def _compute(self, model: Any, inputs: dict[str, Any], num_items: Any) -> Any:
        return self.compute_loss(model, dict(inputs), num_items_in_batch=num_items)

    def _pieces_of(self, inputs: dict[str, Any], num_items: Any, num_batches: int, share: float) -> list[Microbatch]:
        """A batch of the training, of so many in a round, as microbatches."""
        is_own = self._is_own_loss
        with nullcontext() if is_own else attributes_kept(self, model_of(self.model)):
            args, kwargs = arguments_for_model(self.model, lambda model: self._compute(model, inputs, num_items))
        batch = Batch(args, {**self._no_cache, **kwargs} if is_own else kwargs, {} if is_own else inputs)
        return self._cut(batch, num_items, self._num_asked(batch, num_batches), share, is_own)

    @property
    def _no_cache(self) -> dict[str, bool]:
        """Arguments by which a decoder gives no keys and values, where its loss is all that is read."""
        model = model_of(self.model)
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        has_cache = getattr(getattr(model, "config", None), "use_cache", False) is True
        return {"use_cache": False} if has_cache and "use_cache" in signature(model.forward).parameters else {}

    def _cut(self, batch: Batch, num_items: Any, number: int, share: float, is_own: bool) -> list[Microbatch]:
        if min(number, batch.num_samples) <= 1:
            return [(batch, LossInputs(batch.inputs, num_items, share))]
        key = is_own, num_items is None
        if key not in self._kinds:
            known = self._weighing(cut(batch, number)[0]) if is_own else None
            self._kinds[key] = LossKind(self.label_names, known, HALF_TOLERANCE if self._is_rounded else TOLERANCE)
        kind = self._kinds[key]
        pieces = kind.cut(batch, number, functools.partial(self._measure, num_items=num_items, is_own=is_own))
        return [(piece, LossInputs(piece.inputs, num_items, factor * share)) for piece, factor in pieces]

    def _call(self, microbatches: Sequence[Microbatch], *, is_own: bool) -> dict[str, Any]:
        """The arguments of ``forward_backward`` and ``forward_loss``."""
        batches = [batch for batch, _ in microbatches]
        return {
            "input_args": [batch.args for batch in batches],
            "input_kwargs": BatchPieces((batch.kwargs for batch in batches), [batch.decides for batch in batches]),
            "label": [label for _, label in microbatches],
            "loss_fn": own_loss if is_own else self._loss_of,
            "loss_reduction": "sum",  # each is weighed for the batch, and accumulated batches as the trainer has it
        }

    @property
    def _is_rounded(self) -> bool:
        """Whether the model computes in half precision."""
        return self.accelerator.native_amp or any(each.dtype in _HALF for each in self.model.parameters())

    def _weighing(self, piece: Batch) -> Weighing | None:
        """Of the model's own loss, if the graph for such a piece tells it."""
        with self.accelerator.autocast():
            losses = self.pipe.own_losses(piece.args, piece.kwargs, piece.decides)
        own = next((each for each in losses if [access.key for access in each.path] in (["loss"], [0])), None)
        if own is None or own.has_terms:
            return None
        counts = own.counts
        return lambda piece: next(iter(counts(piece.args, piece.kwargs).values()), -1)

    def _measure(self, batches: Sequence[Batch], num_items: Any, is_own: bool) -> list[float]:
        """Losses of batches, each by itself, without dropout; loss code that asks for the mode gets that of before."""
        was_training = self.model.training
        self.pipe.eval()
        try:
            microbatches = [(batch, LossInputs(batch.inputs, num_items, 1.0)) for batch in batches]
            with attributes_kept(self, model_of(self.model), runs=True), self.accelerator.autocast():
                self.__dict__["log"] = lambda *args, **kwargs: None  # it is no step
                self.model = ModelStandIn(self.model, self.model, training=was_training)
                return [float(self.pipe.forward_loss(**self._call([each], is_own=is_own))) for each in microbatches]
        finally:
            self.pipe.train(was_training)

    # Evaluation

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        """The trainer's, with the model in rotation; its own loss is that of the batch, however the batch is cut."""
        run = functools.partial(self._run_forward, prediction_loss_only and self._is_own_loss)

        def evaluate(*args: Any, **kwargs: Any) -> Any:
            return self._run_cut(lambda: run(*args, **kwargs))

        own = self.model
        others = {"generate": self.pipe.generate} if hasattr(own, "generate") else {}
        # also in the place of the trainer's own, which one with `predict_with_generate` asks
        self.model = stand_in = ModelStandIn(own, evaluate, **others)
        try:
            return super().prediction_step(stand_in, inputs, prediction_loss_only, *args, **kwargs)
        finally:
            self.model = own

    def _run_forward(self, needs_only_loss: bool, /, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs; of a loss alone, logits stay on the device."""
        batch = Batch(args, {**self._no_cache, **kwargs} if needs_only_loss else kwargs)
        with self.accelerator.autocast():
            if not any(kwargs.get(name) is not None for name in self.label_names):
                whole = {} if batch.num_samples > 1 else {"roundpipe_run_config": RoundPipeRunConfig(num_microbatch=1)}
                return self._in_float32(self.pipe(*args, **kwargs, **whole))
            number = self._num_asked(batch)
            microbatches = self._cut(batch, kwargs.get("num_items_in_batch"), number, 1.0, is_own=True)
            call = self._call(microbatches, is_own=True)
            if needs_only_loss:
                return {"loss": self.pipe.forward_loss(**call)}
            loss, outputs = self.pipe.forward_loss(**call, return_outputs=True)
            if isinstance(outputs, tuple):
                return (loss, *self._in_float32(outputs[1:]))
            outputs = self._in_float32(outputs)
            outputs["loss"] = loss
            return outputs


class RoundPipeTrainer(RoundPipeTrainerMixin, Trainer):
    """``transformers.Trainer`` in rotation."""
