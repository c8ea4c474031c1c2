"""With how many samples a model is tried out, so that sizes tell which dimensions count samples.

See `sample_dependence`. A buffer that has rows for so many samples at most is made longer, if nothing else helps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import Node

from roundpipe.core.module_tree import named_modules_in
from roundpipe.fx.graph.nodes import hint, value_of
from roundpipe.fx.graph.traced import TracedGraph

PER_PRIME = 4
"""How many times a prime the samples are, so that halves and quarters of a batch can be told from the whole."""
WITH_THIRDS = 12
"""The same where code can't run on so many, such as one that takes a batch of three parts."""
_PRIMES = (61, 67, 71, 73, 79, 83, 89, 97, 101, 103)
_SMALL_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59)
"""For code that can't run on many more samples than the example's, such as with a table for so many at most."""
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d)
_LONGER = ((0, 1), (0, 2), (1, 2), (2, 3))
"""Dimensions in which what modules keep is made longer, one after the other, and how many these have at least."""


@dataclass(frozen=True, slots=True)
class Trial:
    """So many samples: ``per_prime`` times a prime that divides no other size."""

    prime: int
    per_prime: int = PER_PRIME
    longer: tuple[int, int] | None = None
    """The dimension in which `kept_tensors` are longer than that, and how many these have at least."""
    least: int = 0
    """How long they are at least, since the example's samples fit in."""

    @property
    def number(self) -> int:
        return self.prime * self.per_prime

    def shape(self, tensor: torch.Tensor) -> list[int]:
        """That of one of the `kept_tensors`."""
        shape = [*tensor.shape]
        dim, num_dims = self.longer or (0, len(shape) + 1)
        if len(shape) >= num_dims and shape[dim] >= self.least:
            shape[dim] = self.number + self.prime // 2  # this counts no samples
        return shape


Pair = tuple[Trial, Trial]
"""What is found with both numbers is no chance."""


def trials(traced: TracedGraph, samples: Collection[Node], per_prime: Iterable[int]) -> Iterator[Pair]:
    """In the order in which they are made, as long as none has run; ``per_prime`` are those of large primes."""
    large, small = usable_primes(traced, samples), _small_primes(traced, samples)
    for times in per_prime:
        yield from _pair(Trial(prime, times) for prime in large)
    yield from _pair(Trial(prime, 1) for prime in small)
    least = max(2, *numbers_of(samples))
    kept = [*kept_tensors(traced.model).values()]
    shapes = [[[*tensor.shape] for tensor in kept]]
    for longer in _LONGER:
        for pair in _pair(Trial(prime, longer=longer, least=least) for prime in large):
            if (made := [*map(pair[0].shape, kept)]) not in shapes:
                shapes.append(made)
                yield pair


def kept_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers of the model's own modules, and other tensors that these have as attributes, by name."""
    found: dict[str, torch.Tensor] = {}
    for path, module in named_modules_in(model).items():
        if not is_torchs_own(module):
            held = {**vars(module), **module._buffers}
            tensors = {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}
            found.update({f"{path}.{name}".removeprefix("."): value for name, value in tensors.items()})
    return found


def is_torchs_own(module: nn.Module) -> bool:
    """Whether a module is of torch's own, or a norm that was made of one."""
    return type(module).__module__.startswith("torch.nn.") or isinstance(module, _NORMS)


def _pair(found: Iterable[Trial]) -> Iterator[Pair]:
    first, second, *_ = *found, None, None
    if first is not None and second is not None:
        yield first, second


def numbers_of(samples: Iterable[Node]) -> set[int]:
    """How many samples arguments of the example have, which is one number."""
    return {hint(value.shape[0]) for node in samples if isinstance(value := value_of(node), torch.Tensor)}


def _small_primes(traced: TracedGraph, samples: Collection[Node]) -> list[int]:
    """Usable ones, those up to the example's number of samples first, the largest of them in front."""
    number = max(numbers_of(samples))
    usable = usable_primes(traced, samples, _SMALL_PRIMES)
    return sorted(usable, key=lambda prime: (prime > number, abs(prime - number)))


def usable_primes(traced: TracedGraph, samples: Iterable[Node], primes: Iterable[int] = _PRIMES) -> list[int]:
    """Those that divide no size beside the number of samples."""
    stored = (*traced.model.parameters(), *traced.model.buffers(), *traced.constants.values())
    sizes = {size for tensor in stored if isinstance(tensor, torch.Tensor) for size in tensor.shape}
    for node in traced.placeholders:
        if isinstance(value := value_of(node), torch.Tensor):
            sizes.update(map(hint, value.shape[1:] if node in samples else value.shape))
    return [prime for prime in primes if all(size % prime or not size for size in sizes)]
