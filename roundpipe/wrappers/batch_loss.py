"""A loss of the whole batch, such as a contrastive one: ``loss_fn`` runs once, on the outputs of all microbatches.

A step has its first backward before its last microbatch is through, so this takes two: a forward of all microbatches,
then, from what the loss gives each output, their backward. The last stage is recomputed like the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from roundpipe.core import trees
from roundpipe.core.errors import GradientNote, LossError, RaisedIn
from roundpipe.runtime.config import RoundPipeRunConfig, microbatch_count
from roundpipe.runtime.engine.losses import WEIGHTS_UNKNOWN, read_losses
from roundpipe.wrappers.session import Session
from roundpipe.wrappers.training_arguments import TrainingCall


def train_on_batch(
    forward: Callable[[tuple[Any, ...], dict[str, Any], RoundPipeRunConfig], Any],
    session: Session,
    training: TrainingCall,
    *,
    is_mean: bool,
) -> Any:
    """As `RoundPipe.forward_backward`, with a ``forward`` by microbatches; the loss runs on the first device."""
    device, options = session.engine.backends[0].device, replace(training.options, requires_grad=training.has_backward)
    with torch.set_grad_enabled(training.has_backward):
        outputs = forward(training.args, training.kwargs, options)
        on_device, label = trees.map_tensors((outputs, training.label), lambda tensor: tensor.to(device))
        with RaisedIn("the loss of the whole batch, phase loss_fn"), microbatch_count(1):
            losses = read_losses(training.loss_fn(on_device, label), is_mean=is_mean)
        del on_device
        if training.share is not None:
            if isinstance(losses.weight, list):
                raise LossError(WEIGHTS_UNKNOWN)
            training.share.tell(losses.weight)
            factor = training.share.factor()
            losses.values = [tensor.detach() for tensor in losses.tensors]
            losses.tensors = [tensor * factor for tensor in losses.tensors]
        if training.has_backward:
            with GradientNote(), RaisedIn("the loss of the whole batch, phase backward"):
                torch.autograd.backward(losses.tensors)
    loss = trees.map_tensors(losses.detached(), torch.Tensor.cpu)
    return (loss, trees.map_tensors(outputs, torch.Tensor.detach)) if training.return_outputs else loss
