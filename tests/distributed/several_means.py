"""Losses that add up several means, on the ranks of the default group and in one process on what all have together."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig
from tests import test_several_means as one
from tests.runtime.models import gradients


def quotients(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Sums over targets, divided by their number and by what is made of it."""
    mask = label != -100
    losses = F.cross_entropy(logits.flatten(0, 1), label.clamp(0).flatten(), reduction="none").view(label.shape) * mask
    return losses.sum() / mask.sum().clamp(min=1) + losses.square().sum() / (0.5 * mask.sum() + 3)


CASES: dict[str, tuple[Callable[[], Any], Callable[..., Any], Callable[..., Any]]] = {
    "pretraining": (one.pretraining, one.own, one.own),
    "penalised": (one.penalised, one.own, one.own),
    "list": (one.of_tokens, *one.LOSSES["a list"]),
    "weights": (one.of_tokens, *one.LOSSES["weights"]),
    "quotients": (one.of_tokens, quotients, quotients),
    "one mean": (one.of_tokens, *one.LOSSES["one mean"]),
}


@dataclass(frozen=True)
class Case:
    """How a step goes."""

    name: str
    cuts: Sequence[int] = (5,)
    """Per call, how many samples of the seven are those of rank 0."""
    microbatches: int = 2
    is_async: bool = False
    returns: bool = False
    options: Sequence[tuple[str, Any]] = ()

    def parts(self, call: int) -> tuple[Any, dict[str, Any], list[slice]]:
        """The model, all arguments of a call, and what of them each rank has."""
        torch.manual_seed(0)
        model, given = CASES[self.name][0]()
        given = {name: value.roll(call, 0) for name, value in given.items()}  # other targets
        return model, given, [slice(0, self.cuts[call]), slice(self.cuts[call], None)]


def prepared(case: Case, given: dict[str, Any], part: slice) -> tuple[dict[str, Any], Any]:
    """The model's arguments, and the label of ``loss_fn`` if that computes the loss."""
    piece = {name: value[part] for name, value in given.items()}
    is_own = CASES[case.name][2] is one.own
    return (piece, None) if is_own else (piece, piece["labels"])


def logits_of(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """A loss of logits for a model that also has its own."""
    return loss_fn if loss_fn is one.own else lambda outputs, label: loss_fn(outputs["logits"], label)


def joined(case: Case) -> tuple[list[Any], list[torch.Tensor]]:
    """Losses of each call on the batches of all ranks, and gradients of all calls."""
    model, losses = copy.deepcopy(case.parts(0)[0]), []
    for call in range(len(case.cuts)):
        arguments, label = prepared(case, case.parts(call)[1], slice(None))
        loss = logits_of(CASES[case.name][1])(model(**arguments), label)
        torch.autograd.backward(loss)
        losses.append(one.detached(loss))
    return losses, list(gradients(model).values())


def steps(cases: Sequence[Case]) -> list[tuple[list[Any], list[list[torch.Tensor]], Any]]:
    """Of each case: this rank's losses, the gradients that its optimizer sees, and the loss among the last outputs.

    A case has two steps if they are asynchronous, so that the second one's calls run beside the first one's averages;
    they have the weights of the first.
    """
    results = []
    for case in cases:
        model = case.parts(0)[0]
        config = RoundPipeRunConfig(case.microbatches, loss_reduction="mean", **dict(case.options))
        devices, losses, found, outputs = ["cpu"] * (1 + dist.get_rank()), [], [], {}
        loss_fn = logits_of(CASES[case.name][2])
        with (
            roundpipe.compile(model, devices=devices, model_run_config=config, process_group="world") as pipe,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "the batch has")  # fewer samples than microbatches
            optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
            for _ in range(2 if case.is_async else 1):
                losses.clear()
                for call in range(len(case.cuts)):
                    _, given, parts = case.parts(call)
                    arguments, label = prepared(case, given, parts[dist.get_rank()])
                    loss = pipe.forward_backward(
                        input_kwargs=arguments, label=label, loss_fn=loss_fn, return_outputs=case.returns
                    )
                    loss, outputs = loss if case.returns else (loss, outputs)
                    losses.append(loss)
                pipe.step(partial(_update, optimizer, found), is_async=case.is_async)
            pipe.synchronize()
        results.append((losses, found, outputs.get("loss")))
    return results


def _update(optimizer: torch.optim.Optimizer, found: list[list[torch.Tensor]]) -> None:
    copies = optimizer.param_groups[0]["params"]
    found.append([torch.zeros_like(each) if each.grad is None else each.grad.clone() for each in copies])
    optimizer.step()
    optimizer.zero_grad()
