"""Master weights: the optimizer's copies of the model's parameters; new weights in, gradients out, many at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from roundpipe.core.errors import ConfigError
from roundpipe.runtime.device.host_memory import convert, is_plain, on_huge_pages

HAND_OVER_BYTES = 16 * 1024**2
"""Parameters are handed over in groups of this size: few calls for small ones, early uploads of first layers."""

SAMPLED = 128
"""Elements of each parameter that are compared before an update."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What tells that a parameter was written: its version, its memory and a sample of its values."""

    parameter: torch.Tensor
    version: int
    address: int
    sample: torch.Tensor | None
    """Bits of some elements: a write through ``.data`` leaves no other mark."""

    @classmethod
    def of(cls, parameter: torch.Tensor) -> Fingerprint:
        sample = _sample(parameter)
        return cls(parameter, *_marks(parameter), None if sample is None else sample.clone())

    @property
    def is_marked(self) -> bool:
        """Whether version or memory tell that the parameter was written since."""
        return _marks(self.parameter) != (self.version, self.address)

    @property
    def has_other_values(self) -> bool:
        """Whether the sample holds something else by now."""
        if self.sample is None:
            return False
        now = _sample(self.parameter)
        return now is not None and now.dtype == self.sample.dtype and not torch.equal(now, self.sample)


def _marks(parameter: torch.Tensor) -> tuple[int, int]:
    version = 0 if parameter.is_inference() else parameter._version
    return version, parameter.data_ptr() if is_plain(parameter) else 0


def _sample(parameter: torch.Tensor) -> torch.Tensor | None:
    """The bits of about `SAMPLED` elements all over a parameter, as a view; None if not one piece of memory here."""
    bits = _BITS.get(parameter.element_size())
    if bits is None or not is_plain(parameter) or parameter.device.type != "cpu" or not parameter.is_contiguous():
        return None
    stride = parameter.numel() // SAMPLED | 1  # odd: not always the same column
    return parameter.detach().view(-1)[::stride].view(bits)


@dataclass(slots=True, eq=False)
class ParameterPair:
    """A parameter of the model and the optimizer's copy of it."""

    names: list[str]
    parameter: nn.Parameter
    copy: nn.Parameter | None = None
    spare: torch.Tensor | None = None
    """Memory for the copy's gradient, used at each update where dtypes differ."""
    shown: tuple[torch.Tensor, int, torch.Tensor] | None = None
    """What `show_gradient` put into the model's ``.grad``, its version, and the copy's gradient then."""
    fingerprint: Fingerprint | None = None
    """The model's parameter when the copy and it last agreed, or the copy was newer."""
    is_frozen: bool = False
    """Whether the model's parameter required no grad at the last update or `synchronize`."""
    is_written: bool = False
    """Whether anybody else has written the model's parameter since; see `look`."""

    def look(self) -> None:
        """Notice whether anybody else has written the model's parameter or given it other memory."""
        if self.fingerprint is not None and self.fingerprint.is_marked:
            self.is_written = True
            self.agree()

    @property
    def has_other_values(self) -> bool:
        """Whether the model's parameter was written without a mark, as far as the sample shows."""
        return self.fingerprint is not None and self.fingerprint.has_other_values

    def agree(self) -> None:
        """The copy's side, if there is a copy, knows what the model's parameter holds now."""
        if self.copy is not None:
            self.fingerprint = Fingerprint.of(self.parameter)

    def moved(self) -> None:
        """The model's parameter has other memory now, with the same values."""
        if self.fingerprint is not None:
            self.fingerprint = replace(self.fingerprint, address=_marks(self.parameter)[1])

    def start_again(self) -> None:
        if self.copy is not None:
            self.copy.copy_(self.parameter)
        self.is_written = False
        self.agree()

    def make_copy(self, optim_dtype: torch.dtype | None) -> None:
        source = self.parameter.detach()
        if source.is_meta:
            raise ConfigError(
                f"parameter {self.names[0]} is on the meta device, so the optimizer can't start from it; "
                "load the model's weights (model.to_empty, from_pretrained) before"
            )
        dtype = source.dtype if optim_dtype is None or not source.is_floating_point() else optim_dtype
        if is_plain(source):
            copy = on_huge_pages(torch.empty_like(source, device="cpu", dtype=dtype)).copy_(source)
        else:
            copy = source.to("cpu", dtype, copy=True)
        self.copy = nn.Parameter(copy)
        self.agree()

    def follow_dtype(self) -> None:
        """Convert the copy if the model's parameter was converted, by ``model.to`` or in a forward."""
        copy = self.copy
        if copy is not None and copy.dtype != self.parameter.dtype and is_plain(copy) and is_plain(self.parameter):
            convert(copy, self.parameter.dtype)
            self.spare = None

    @property
    def is_behind(self) -> bool:
        """Whether the model's weights are not the copy's, in the model's precision."""
        copy, now = self.copy, self.parameter
        if copy is None or not is_plain(copy) or not is_plain(now):
            return copy is not None
        return not torch.equal(now, copy.to(now.device, now.dtype))

    def needs_conversion(self) -> bool:
        """Whether the model's gradient is to be written into the spare memory, as it is the first of an update."""
        copy, gradient = self.copy, self.parameter.grad
        if copy is None or copy.grad is not None or gradient is None or not is_plain(gradient):
            return False
        return gradient.dtype != copy.dtype or gradient.device != copy.device

    def take_gradient(self) -> None:
        """Add the model's gradient to the copy's."""
        gradient, self.parameter.grad = self.parameter.grad, None
        if gradient is None or self.copy is None:
            return
        if self.copy.grad is None:
            self.copy.grad = self._converted(gradient)
        elif self.copy.grad.layout is torch.strided:
            self.copy.grad.add_(gradient.to(self.copy.device))
        else:
            self.copy.grad = self.copy.grad + gradient.to(self.copy.device, self.copy.dtype)

    def _converted(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient of the model as the copy's: itself if it can be, else in the spare memory."""
        assert self.copy is not None
        gradient = gradient.detach()
        if gradient.dtype == self.copy.dtype and gradient.device == self.copy.device:
            return gradient
        if gradient.layout is not torch.strided:
            return gradient.to(self.copy.device, self.copy.dtype)
        return self.spare_memory().copy_(gradient)

    def spare_memory(self) -> torch.Tensor:
        assert self.copy is not None
        if self.spare is None:
            self.spare = on_huge_pages(torch.empty_like(self.copy.detach()))
        return self.spare

    def show_gradient(self) -> None:
        """Let the model's ``.grad`` be the copy's."""
        if self.copy is None or self.copy.grad is None:
            return
        self.parameter.grad = shown = self.copy.grad.to(self.parameter.device, self.parameter.dtype)
        self.shown = shown, shown._version, self.copy.grad

    def take_back(self) -> None:
        """End `show_gradient`; the user's changes of the model's ``.grad`` hold for the copy's."""
        if self.shown is None or self.copy is None:
            return
        (shown, version, of_copy), self.shown = self.shown, None
        gradient, self.parameter.grad = self.parameter.grad, None
        is_written = self.copy.grad is of_copy and shown is not of_copy and shown._version != version
        if gradient is None:
            self.copy.grad = None
        elif gradient is not shown or is_written:
            self.copy.grad = self._converted(gradient)


def groups_of(
    pairs: Iterable[ParameterPair], turns: Callable[[ParameterPair], tuple[int, int]] = lambda pair: (0, 0)
) -> Iterator[tuple[tuple[int, int], list[ParameterPair]]]:
    """The pairs that have copies and the same turns, in order, in groups of about `HAND_OVER_BYTES`."""
    by_turn: dict[tuple[int, int], list[ParameterPair]] = {}
    for pair in pairs:
        if pair.copy is not None:
            by_turn.setdefault(turns(pair), []).append(pair)
    for turn, alike in by_turn.items():
        group: list[ParameterPair] = []
        group_bytes = 0
        for pair in alike:
            group.append(pair)
            group_bytes += 0 if pair.copy is None else pair.copy.nbytes
            if group_bytes >= HAND_OVER_BYTES:
                yield turn, group
                group, group_bytes = [], 0
        if group:
            yield turn, group


def num_bytes(group: list[ParameterPair]) -> int:
    """Bytes of the model's parameters."""
    return sum(pair.parameter.nbytes for pair in group)


def copy_in(group: list[ParameterPair]) -> None:
    """Write the optimizer's weights into the model's."""
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for pair in group:
        assert pair.copy is not None
        if is_plain(pair.parameter) and is_plain(pair.copy):
            targets.append(pair.parameter)
            sources.append(pair.copy)
        else:
            pair.parameter.copy_(pair.copy)
    if targets:
        torch._foreach_copy_(targets, sources)
    for pair in group:
        pair.agree()


def take_gradients(group: list[ParameterPair]) -> None:
    """Add the model's gradients to the copies', those of other dtypes in one go."""
    converted: list[ParameterPair] = []
    for pair in group:
        if pair.is_frozen:
            continue
        if pair.needs_conversion():
            converted.append(pair)
        else:
            pair.take_gradient()
    if converted:
        spares = [pair.spare_memory() for pair in converted]
        torch._foreach_copy_(spares, [pair.parameter.grad for pair in converted if pair.parameter.grad is not None])
        for pair, spare in zip(converted, spares, strict=True):
            assert pair.copy is not None
            pair.copy.grad, pair.parameter.grad = spare, None


def make_pairs(
    named_parameters: Iterable[tuple[str, nn.Parameter]], before: Iterable[ParameterPair] = ()
) -> tuple[list[ParameterPair], dict[str, ParameterPair]]:
    """One pair per parameter object, and the pair of each name; pairs of ``before`` go on for their parameters."""
    pair_of = {pair.parameter: pair for pair in before}
    pairs: dict[nn.Parameter, ParameterPair] = {}
    by_name: dict[str, ParameterPair] = {}
    for name, parameter in named_parameters:
        if parameter not in pairs:
            pairs[parameter] = pair_of.get(parameter) or ParameterPair([], parameter)
            pairs[parameter].names = []
        by_name[name] = pairs[parameter]
        by_name[name].names.append(name)
    return list(pairs.values()), by_name
