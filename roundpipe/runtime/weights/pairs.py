"""Parameters of the model and their copies, many at once: mostly nothing was written, or all are, in a few calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.autograd.graph import increment_version

from roundpipe.core.together import Together, copy_all
from roundpipe.runtime.weights.fingerprint import Fingerprint, any_marked
from roundpipe.runtime.weights.parameter_pair import ParameterPair
from roundpipe.runtime.weights.twin_group import TwinGroup


def look(pairs: Iterable[ParameterPair]) -> None:
    """`ParameterPair.look` of many, which are compared together, since most often nobody has written one."""
    known = [(pair, print) for pair in pairs if (print := pair.fingerprint) is not None]
    if any_marked([print for _, print in known]):
        for pair, _ in known:
            pair.look()


def watch_copies(pairs: Iterable[ParameterPair]) -> None:
    """From now on, until an update is asked for, `ParameterPair.is_ahead` tells of writes without a mark, too."""
    for pair in pairs:
        if pair.copy is not None and pair.copy_print is None and not pair.is_away:
            pair.copy_print = Fingerprint.of(pair.copy)


def with_other_values(pairs: Iterable[ParameterPair]) -> list[ParameterPair]:
    """Those whose parameters were written without a mark, as far as samples show."""
    return [pair for pair in pairs if pair.fingerprint is not None and pair.fingerprint.has_other_values]


def write_twins(pairs: Sequence[ParameterPair], *, with_samples: bool = True) -> None:
    """Write the copies into the twins of these, which are ahead of the host's parameters then.

    ``with_samples``: by which writes into these through ``.data`` show as long as they are behind.
    """
    written = [(pair, twin, copy) for pair in pairs if (twin := pair.twin) and (copy := pair.copy) is not None]
    behind = [(pair, twin) for pair, twin, _ in written if not twin.is_ahead]
    if behind:
        increment_version([pair.parameter for pair, _ in behind])  # for the backward of a forward before
    for pair, twin in behind:
        twin.is_ahead = True
        pair.fingerprint = Fingerprint.of(pair.parameter, with_sample=with_samples)
    for pair, _, copy in written:
        pair.copy_version, pair.copy_print = copy._version, None
    copy_all((twin.weights, copy) for _, twin, copy in written)


def follow_twins(pairs: Sequence[ParameterPair], twins: TwinGroup) -> None:
    """Have the parameters of these follow their twins, while the device goes on."""
    ahead = [(pair, twin) for pair in pairs if (twin := pair.twin) is not None and twin.is_ahead]
    if not ahead:
        return
    for pair, _ in ahead:
        if pair.banks is not None:
            pair.banks.go_home(keeps_values=False)
    twins.follow([(twin.weights, pair.parameter) for pair, twin in ahead])
    for pair, twin in ahead:
        pair.fingerprint = twin.print = Fingerprint.of(pair.parameter, with_sample=False)
        twin.is_ahead = False


def write_all(pairs: Iterable[ParameterPair]) -> None:
    """Write the copies into the model's parameters."""
    written: list[ParameterPair] = []
    try:
        with Together() as together:
            for pair in pairs:
                pair.write_weights(together)
                written.append(pair)
    finally:
        for pair in written:
            pair.agree()


def stage_all(pairs: Iterable[ParameterPair]) -> None:
    """Write the copies where `ParameterPair.swap_weights` will find them, if there is memory for them."""
    staged = [(pair.banks, pair.copy) for pair in pairs if pair.banks and pair.copy is not None and pair.twin is None]
    with Together() as together:
        for banks, copy in staged:
            banks.stage(copy, together)
    for banks, copy in staged:
        banks.has_staged(copy)


def clear_gradients(holders: Iterable[torch.Tensor | None], set_to_none: bool) -> None:
    """As ``zero_grad`` does."""
    for holder in holders:
        if holder is not None and holder.grad is not None:
            holder.grad = None if set_to_none else holder.grad.detach().zero_()


def take_gradients(pairs: Iterable[ParameterPair], *, late: bool = False) -> None:
    """Add the model's gradients to the copies'; ``late``: see `ParameterPair.take_gradient`."""
    with Together() as together:
        for pair in pairs:
            pair.take_gradient(together, late=late)


def convert_gradients(pairs: Iterable[ParameterPair]) -> None:
    """Something was added to the model's gradients of these: convert those that seem to be all."""
    with Together() as together:
        converted = [(pair.early, gradient) for pair in pairs if (gradient := pair.gradient_came(together)) is not None]
    for early, gradient in converted:
        early.converted(gradient)
