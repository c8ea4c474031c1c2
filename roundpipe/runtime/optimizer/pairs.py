"""All parameters of a model, each with the optimizer's copy of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from roundpipe.core.errors import ConfigError, enumerated
from roundpipe.runtime.device.host_memory import is_plain
from roundpipe.runtime.weights.master_weights import ParameterPair, make_pairs

NamedParameters = Iterable[tuple[str, nn.Parameter]]


class ParameterPairs:
    """The pairs of one model; copies are made when they are first asked for.

    Args:
        named_parameters: of the model, in order; a shared parameter may come under each of its names and has one copy.
            A function is asked again before each step and whenever the copies are asked for, so that parameters that
            were replaced or added since are found.
        optim_dtype: dtype of the copies of floating-point parameters; None keeps each parameter's.
    """

    def __init__(
        self, named_parameters: NamedParameters | Callable[[], NamedParameters], optim_dtype: torch.dtype | None
    ) -> None:
        self._named_parameters = named_parameters if callable(named_parameters) else None
        self._pairs, self._by_name = make_pairs(named_parameters() if callable(named_parameters) else named_parameters)
        self._optim_dtype = optim_dtype

    def __iter__(self) -> Iterator[ParameterPair]:
        return iter(self._pairs)

    def trainable(self) -> list[ParameterPair]:
        """The pairs of parameters that are trainable now; those that had no copy get one."""
        if self._named_parameters is not None:
            now, known = list(self._named_parameters()), self._by_name
            if len(now) != len(known) or any(
                name not in known or known[name].parameter is not parameter for name, parameter in now
            ):
                self._pairs, self._by_name = make_pairs(now, self._pairs)
        trainable = [pair for pair in self._pairs if pair.parameter.requires_grad]
        for pair in trainable:
            if pair.copy is None:
                pair.make_copy(self._optim_dtype)
            elif self._optim_dtype is None:
                pair.follow_dtype()
        return trainable

    def named_copies(self, prefix: str, remove_duplicate: bool) -> Iterator[tuple[str, nn.Parameter]]:
        """The copies of parameters that are trainable now, with the original names, as ``nn.Module`` gives them."""
        if not isinstance(prefix, str):
            raise ConfigError(f"prefix is {type(prefix).__name__}; give a string that is put before each name")
        names = {pair.names[0]: pair for pair in self.trainable()}
        if not remove_duplicate:
            names = {name: pair for name, pair in self._by_name.items() if pair.parameter.requires_grad}
        for name, pair in names.items():
            assert pair.copy is not None
            yield (f"{prefix}.{name}" if prefix else name), pair.copy

    def with_copies(self) -> list[ParameterPair]:
        """The pairs that the optimizer may have updated; of those that are frozen now no gradients are taken."""
        pairs = [pair for pair in self._pairs if pair.copy is not None]
        for pair in pairs:
            pair.is_frozen = not pair.parameter.requires_grad
        return pairs

    @contextlib.contextmanager
    def gradients_aside(self) -> Iterator[None]:
        """While open, the model has no gradients."""
        originals = [(pair.parameter, pair.parameter.grad) for pair in self._pairs]
        for parameter, _ in originals:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in originals:
                parameter.grad = gradient

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool) -> None:
        for pair in self._pairs:
            for holder in (pair.parameter, pair.copy):
                if holder is not None and holder.grad is not None:
                    holder.grad = None if set_to_none else holder.grad.detach().zero_()

    def replace(self, name: str, parameter: nn.Parameter) -> None:
        """A parameter was loaded, and may be another object now: its copy starts again."""
        if (pair := self._by_name.get(name)) is not None:
            if pair.parameter is not parameter:
                pair.parameter, pair.shown = parameter, None
            pair.start_again()


@torch.no_grad()
def take_writes(pairs: Sequence[ParameterPair], *, has_update: bool) -> None:
    """What was written into the model's weights since the last step holds for the copies too.

    Raises:
        ConfigError: an update is on its way into the model, so that both have new values.
    """
    for pair in pairs:
        pair.look()
    unmarked = [pair for pair in pairs if not pair.is_written and pair.has_other_values]
    written = [pair for pair in pairs if pair.is_written] + unmarked
    if written and has_update:
        for pair in written:
            pair.agree()
            pair.is_written = False
        raise ConfigError(
            f"{enumerated([pair.names[0] for pair in written])}: written while an asynchronous update was on its "
            "way, so that one of the two would be lost. Write weights after synchronize(), or take steps that are "
            "not asynchronous: step(..., is_async=False)"
        )
    if unmarked:  # through `.data`: others may have been written where nobody looked
        written = [pair for pair in pairs if pair.is_written or (is_plain(pair.parameter) and pair.is_behind)]
    for pair in written:
        pair.start_again()
