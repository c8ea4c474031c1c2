"""The two sides of a case: eager PyTorch with the staleness of asynchronous steps, and a wrapper."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec

from roundpipe import RoundPipeRunConfig
from tests.actions.models import Setup, wrap

LossFunction = Callable[[Any, Any], Any]


@dataclass
class Batch:
    """What one call is given."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    label: torch.Tensor | None
    num_microbatches: int
    grain: Any = None
    splitting: Literal["function", "specs"] | None = None
    tiles: Any = None
    reduction: Any = None
    scope: Any = None

    def pieces(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], Any]]:
        number = min(self.num_microbatches, len(self.args[0]))
        args = zip(*(torch.tensor_split(each, number) for each in self.args), strict=True)
        kwargs = {name: torch.tensor_split(each, number) for name, each in self.kwargs.items()}
        labels = [None] * number if self.label is None else torch.tensor_split(self.label, number)
        for index, each in enumerate(args):
            yield each, {name: parts[index] for name, parts in kwargs.items()}, labels[index]

    def config(self) -> RoundPipeRunConfig:
        rules: dict[str, Any] = {}
        if self.splitting == "function":
            rules = {"split_input": _split_by_function, "split_label": _split_label, "merge_output": torch.cat}
        elif self.splitting == "specs":
            args, kwargs = (TensorChunkSpec(0),) * len(self.args), dict.fromkeys(self.kwargs, TensorChunkSpec(0))
            rules = {"split_input": (args, kwargs or None), "split_label": TensorChunkSpec(0)}
        return RoundPipeRunConfig(
            num_microbatch=self.num_microbatches,
            recompute_grain=self.grain,
            **rules,
            tiles=self.tiles,
            loss_reduction=self.reduction,
            loss_scope=self.scope,
        )


def _split_by_function(args: tuple[Any, ...], kwargs: dict[str, Any], number: int) -> Any:
    number = min(number, len(args[0]))
    pieces = list(zip(*(torch.tensor_split(each, number) for each in args), strict=True))
    named = {name: torch.tensor_split(each, number) for name, each in kwargs.items()}
    return pieces, [{name: parts[index] for name, parts in named.items()} for index in range(number)]


def _split_label(label: torch.Tensor, number: int) -> list[torch.Tensor]:
    return list(torch.tensor_split(label, min(number, len(label))))


def _weighted(batch: Batch, loss: Any, label: Any) -> tuple[Any, float]:
    """A loss, and what it counts for in the mean: the weight that came with it, else its samples."""
    if isinstance(loss, tuple):
        assert batch.label is not None
        total = float(counted(batch.label))
        return loss[0], float(loss[1]) / total
    return loss, len(label) / len(batch.args[0])


def counted(label: torch.Tensor) -> torch.Tensor:
    """A weight for the loss of some samples."""
    return (label.detach() > -1).sum()


def _list(losses: Any) -> list[Any]:
    return [losses] if isinstance(losses, torch.Tensor) else list(losses)


def _scaled(losses: Any, weight: float) -> Any:
    return losses * weight if isinstance(losses, torch.Tensor) else [loss * weight for loss in losses]


def _sum(losses: list[Any]) -> Any:
    if isinstance(losses[0], torch.Tensor):
        return torch.stack([loss.detach() for loss in losses]).sum()
    return [_sum(list(position)) for position in zip(*losses, strict=True)]


@dataclass
class Side(ABC):
    """A model, how it is called, and what the user holds beside it."""

    setup: Setup
    model: nn.Module
    optimizer: Any = None
    scheduler: Any = None
    handles: dict[str, Any] = field(default_factory=dict)
    """Hooks that are on, by name."""
    kept: dict[str, Any] = field(default_factory=dict)
    """What actions keep for later ones."""

    @property
    @abstractmethod
    def handle(self) -> Any:
        """What the user calls: the wrapper, or the model itself."""

    @abstractmethod
    def train(self, batch: Batch, loss_fn: LossFunction, return_outputs: bool) -> tuple[Any, Any]: ...

    @abstractmethod
    def evaluate(self, batch: Batch, loss_fn: LossFunction) -> Any:
        """The loss without gradients."""

    @abstractmethod
    def forward(self, batch: Batch) -> torch.Tensor: ...

    @abstractmethod
    def collect(self) -> None:
        """A backward of the user's is over."""

    @abstractmethod
    def step(self, step_fn: Callable[[], Any], is_async: bool) -> None: ...

    @abstractmethod
    def step_plainly(self) -> None:
        """The loop steps its optimizer itself."""

    @abstractmethod
    def settle(self, explicit: bool = True) -> None:
        """The model holds the latest weights, and ``.grad``; unless ``explicit``, what follows sees to that itself."""

    @abstractmethod
    def edited(self) -> None:
        """Weights or gradients of the model were written after `settle`."""

    def edited_gradients(self) -> None:  # noqa: B027 - nothing, where gradients are the model's own
        """Gradients of the model were written after `settle`."""

    @abstractmethod
    def optim_parameters(self) -> dict[str, nn.Parameter]: ...

    @abstractmethod
    def copy(self) -> Side:
        """The side of a deep copy of the handle; this one is closed."""

    def _kept_by_copy(self) -> dict[str, Any]:
        return {name: value for name, value in self.kept.items() if name in ("is coarse", "is single")}

    @abstractmethod
    def rewrap(self, kind: str, close_first: bool) -> None: ...

    @abstractmethod
    def save(self) -> None: ...

    @abstractmethod
    def load(self) -> None: ...

    def close(self) -> None:  # noqa: B027 - nothing, where there are no workers
        """Give everything back."""

    def observe(self) -> dict[str, torch.Tensor | None]:
        """All state by name; waits for it."""
        self.settle()
        seen: dict[str, torch.Tensor | None] = {}
        copies = self.optim_parameters()
        for name, parameter in self.model.named_parameters():
            seen[f"weight {name}"] = parameter.detach().clone()
            seen[f"gradient of {name}"] = None if parameter.grad is None else parameter.grad.clone()
            if self.optimizer is not None and name in copies:
                for key, value in self.optimizer.state.get(copies[name], {}).items():
                    if isinstance(value, torch.Tensor):
                        seen[f"state {key} of {name}"] = value.clone()
        seen.update((f"buffer {name}", buffer.clone()) for name, buffer in self.model.named_buffers())
        for name, value in self.kept.items():
            if name.startswith("count") or isinstance(value, torch.Tensor):
                grad = value.grad if isinstance(value, torch.Tensor) else torch.tensor(float(value))
                seen[f"kept {name}"] = None if grad is None else grad.clone()
        return seen


@dataclass
class Eager(Side):
    """PyTorch as it is, with copies for the optimizer that the model follows one step behind."""

    copies: dict[str, nn.Parameter] = field(default_factory=dict)
    is_behind: bool = False

    def __post_init__(self) -> None:
        self.copies = {name: nn.Parameter(p.detach().clone()) for name, p in self.model.named_parameters()}

    @property
    def handle(self) -> Any:
        return self.model

    def _write(self) -> None:
        if self.is_behind:
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    parameter.copy_(self.copies[name])
            self.is_behind = False

    def collect(self) -> None:
        for name, parameter in self.model.named_parameters():
            copy, gradient, parameter.grad = self.copies[name], parameter.grad, None
            if gradient is not None:
                copy.grad = gradient if copy.grad is None else copy.grad + gradient

    def _hide(self) -> None:
        """Gradients that `settle` showed are the copies' again, with what the user did to them."""
        if self.kept.pop("is shown", False):
            for name, parameter in self.model.named_parameters():
                self.copies[name].grad, parameter.grad = parameter.grad, None

    def train(self, batch: Batch, loss_fn: LossFunction, return_outputs: bool) -> tuple[Any, Any]:
        self._hide()
        losses, outputs = [], []
        for given, label in self._outputs(batch):
            output, weight = given, 1.0
            loss = loss_fn(output, label)
            if batch.reduction == "mean":
                loss, weight = _weighted(batch, loss, label)
            # pieces share what made the batch
            torch.autograd.backward([each * weight for each in _list(loss)], retain_graph=True)
            losses.append(_scaled(loss, weight))
            outputs.append(output.detach())
        self.collect()
        return _sum(losses), torch.cat(outputs) if return_outputs else None

    def _outputs(self, batch: Batch) -> Iterator[tuple[Any, Any]]:
        """What the loss function sees, one after the other."""
        outputs = ((self.model(*args, **kwargs), label) for args, kwargs, label in batch.pieces())
        if batch.scope == "batch":
            outputs = iter([(torch.cat([output for output, _ in outputs]), batch.label)])
        return outputs

    @torch.no_grad()
    def evaluate(self, batch: Batch, loss_fn: LossFunction) -> Any:
        losses = []
        for output, label in self._outputs(batch):
            loss, weight = loss_fn(output, label), 1.0
            if batch.reduction == "mean":
                loss, weight = _weighted(batch, loss, label)
            losses.append(_scaled(loss, weight))
        return _sum(losses)

    def forward(self, batch: Batch) -> torch.Tensor:
        if not self.model.training:  # a call that only reads waits for the latest weights
            self._write()
        self._hide()
        return torch.cat([self.model(*args, **kwargs) for args, kwargs, _ in batch.pieces()])

    def step(self, step_fn: Callable[[], Any], is_async: bool) -> None:
        self._hide()
        self._write()
        step_fn()
        self.is_behind = True
        if not is_async:
            self._write()

    def step_plainly(self) -> None:
        self.step(lambda: (self.optimizer.step(), self.optimizer.zero_grad()), is_async=False)

    def settle(self, explicit: bool = True) -> None:
        self._write()
        self._hide()
        for name, parameter in self.model.named_parameters():
            parameter.grad = self.copies[name].grad
        self.kept["is shown"] = True

    def edited(self) -> None:
        for name, parameter in self.model.named_parameters():
            if name not in self.copies or self.copies[name].shape != parameter.shape:
                self.copies[name] = nn.Parameter(parameter.detach().clone())
            self.copies[name].data = parameter.detach().clone()

    def optim_parameters(self) -> dict[str, nn.Parameter]:
        return {name: self.copies[name] for name, p in self.model.named_parameters() if p.requires_grad}

    def copy(self) -> Side:
        self._write()
        self._hide()
        return Eager(self.setup, copy.deepcopy(self.model), kept=self._kept_by_copy())

    def rewrap(self, kind: str, close_first: bool) -> None:
        self._write()
        self.optimizer = self.scheduler = None
        self.settle()

    def save(self) -> None:
        self._write()
        self._hide()
        values = [self.model.state_dict(), self.optimizer and self.optimizer.state_dict()]
        self.kept["saved"] = copy.deepcopy(values)

    def load(self) -> None:
        self._write()
        model, optimizer = copy.deepcopy(self.kept["saved"])
        self.model.load_state_dict(model)
        self.edited()
        for parameter in (*self.model.parameters(), *self.copies.values()):
            parameter.grad = None
        if optimizer is not None:
            self.optimizer.load_state_dict(optimizer)


@dataclass
class Piped(Side):
    """The model in a wrapper."""

    pipe: Any = None
    others: list[Any] = field(default_factory=list)
    """Earlier wrappers that are still open."""
    folder: Any = None

    def __post_init__(self) -> None:
        self.pipe = self.pipe or wrap(self.setup.kind, self.model, self.setup)

    @property
    def handle(self) -> Any:
        return self.pipe

    def train(self, batch: Batch, loss_fn: LossFunction, return_outputs: bool) -> tuple[Any, Any]:
        result = self.pipe.forward_backward(
            batch.args, batch.kwargs, batch.label, loss_fn, return_outputs=return_outputs, run_config=batch.config()
        )
        return result if return_outputs else (result, None)

    def evaluate(self, batch: Batch, loss_fn: LossFunction) -> Any:
        return self.pipe.forward_loss(batch.args, batch.kwargs, batch.label, loss_fn, run_config=batch.config())

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.pipe(*batch.args, **batch.kwargs, roundpipe_run_config=batch.config())

    def collect(self) -> None: ...

    def step(self, step_fn: Callable[[], Any], is_async: bool) -> None:
        self.pipe.step(step_fn, is_async)

    def step_plainly(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def settle(self, explicit: bool = True) -> None:
        if explicit:
            self.pipe.synchronize()

    def edited(self) -> None: ...

    def optim_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.pipe.optim_named_parameters())

    def copy(self) -> Side:
        other = copy.deepcopy(self.pipe)
        self.close()
        return Piped(self.setup, other.model, pipe=other, kept=self._kept_by_copy())

    def rewrap(self, kind: str, close_first: bool) -> None:
        self.pipe.synchronize()
        self.optimizer = self.scheduler = None
        if close_first:
            self.pipe.close()
        else:
            self.others.append(self.pipe)
        self.pipe = wrap(kind, self.model, self.setup)
        self.pipe.synchronize()

    def save(self) -> None:
        self.folder = self.folder or tempfile.TemporaryDirectory()
        self.pipe.save_checkpoint(self.folder.name, optimizer=self.optimizer)

    def load(self) -> None:
        self.pipe.load_checkpoint(self.folder.name, optimizer=self.optimizer)

    def close(self) -> None:
        for pipe in (self.pipe, *self.others):
            with contextlib.suppress(Exception):
                pipe.close()
        if self.folder is not None:
            self.folder.cleanup()
