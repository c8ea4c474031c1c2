"""Master weights: all parameters of a model, each with the optimizer's copy of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from roundpipe.core.caller import warn
from roundpipe.core.contexts import contextmanager
from roundpipe.core.errors import ConfigError, enumerated
from roundpipe.runtime.device.host_limit import HOST_LIMIT
from roundpipe.runtime.device.host_memory import convert, is_plain, on_huge_pages

NamedParameters = Iterable[tuple[str, nn.Parameter]]

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
    shown: tuple[torch.Tensor, int, torch.Tensor, int] | None = None
    """What `show_gradient` put into the model's ``.grad``, and the copy's gradient then, each with its version."""
    copy_version: int = 0
    """The copy's when it and the model's parameter last agreed."""
    fingerprint: Fingerprint | None = None
    """The model's parameter when the copy and it last agreed, or the copy was newer."""
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
            self.copy_version = self.copy._version

    @property
    def is_ahead(self) -> bool:
        """Whether the copy was written since it and the model's parameter agreed."""
        return self.copy is not None and self.copy._version != self.copy_version

    def moved(self) -> None:
        """The model's parameter has other memory now, with the same values."""
        if self.fingerprint is not None:
            self.fingerprint = replace(self.fingerprint, address=_marks(self.parameter)[1])

    @torch.no_grad()
    def start_again(self) -> None:
        """The copy takes the model's values."""
        if self.copy is not None:
            self.copy.copy_(self.parameter)
        self.is_written = False
        self.agree()

    def make_copy(self, dtype: torch.dtype) -> None:
        source = self.parameter.detach()
        if source.is_meta:
            raise ConfigError(
                f"parameter {self.names[0]} is on the meta device, so the optimizer can't start from it; "
                "load the model's weights (model.to_empty, from_pretrained) before"
            )
        if is_plain(source):
            copy = on_huge_pages(torch.empty_like(source, device="cpu", dtype=dtype)).copy_(source)
        else:
            copy = source.to("cpu", dtype, copy=True)
        self.copy = nn.Parameter(copy)
        self.agree()

    def follow_dtype(self, dtype: torch.dtype) -> None:
        """Convert the copy if the model's parameter was converted, by ``model.to`` or in a forward."""
        copy = self.copy
        if copy is not None and copy.dtype != dtype and is_plain(copy) and is_plain(self.parameter):
            convert(copy, dtype)
            self.spare = None

    @property
    def is_behind(self) -> bool:
        """Whether the model's weights are not the copy's, in the model's precision."""
        copy, now = self.copy, self.parameter
        if copy is None or not is_plain(copy) or not is_plain(now):
            return copy is not None
        return not torch.equal(now, copy.to(now.device, now.dtype))

    def write_weights(self) -> None:
        """Write the copy into the model's parameter."""
        if self.copy is not None:
            self.parameter.copy_(self.copy)
        self.agree()

    def take_gradient(self) -> None:
        """Add the model's gradient to the copy's."""
        copy, gradient, self.parameter.grad = self.copy, self.parameter.grad, None
        if gradient is None or copy is None:
            return
        if copy.grad is None:
            copy.grad = self._converted(gradient)
        elif copy.grad.layout is torch.strided:
            copy.grad.add_(gradient.to(copy.device))
        else:
            copy.grad = copy.grad + gradient.to(copy.device, copy.dtype)

    def _converted(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient of the model as the copy's: itself if it can be, else in the spare memory."""
        assert self.copy is not None
        gradient = gradient.detach()
        if gradient.dtype == self.copy.dtype and gradient.device == self.copy.device:
            return gradient
        if gradient.layout is not torch.strided:
            return gradient.to(self.copy.device, self.copy.dtype)
        if self.spare is None:
            HOST_LIMIT.check({"gradients in the optimizer's dtype": self.copy.nbytes})
            self.spare = on_huge_pages(torch.empty_like(self.copy.detach()))
        return self.spare.copy_(gradient)

    def show_gradient(self) -> None:
        """Let the model's ``.grad`` be the copy's."""
        if self.copy is None or self.copy.grad is None:
            return
        self.parameter.grad = shown = self.copy.grad.to(self.parameter.device, self.parameter.dtype)
        self.shown = shown, shown._version, self.copy.grad, self.copy.grad._version

    @property
    def is_shown(self) -> bool:
        """Whether the model and the copy have the same gradient, or none."""
        if self.copy is None:
            return True
        if self.shown is None:
            return self.parameter.grad is None and self.copy.grad is None
        shown, version, of_copy, version_of_copy = self.shown
        is_same = self.parameter.grad is shown and self.copy.grad is of_copy
        return is_same and (shown is of_copy or (shown._version, of_copy._version) == (version, version_of_copy))

    def take_back(self) -> None:
        """End `show_gradient`; the user's changes of the model's ``.grad`` hold for the copy's."""
        if self.shown is None or self.copy is None:
            return
        shown, version, of_copy, _ = self.shown
        given, gradient = self.parameter.grad, self.copy.grad
        is_written = gradient is of_copy and shown is not of_copy and shown._version != version
        if given is None:
            gradient = None
        elif given is not shown or is_written:
            gradient = self._converted(given)
        self.copy.grad, self.parameter.grad, self.shown = gradient, None, None  # at once: calls may be interrupted


def copy_dtype(dtype: torch.dtype, optim_dtype: torch.dtype | None, *, widens_half: bool = True) -> torch.dtype:
    """The dtype of the optimizer's copy of a parameter of some dtype; ``optim_dtype`` is what the user has given."""
    if not dtype.is_floating_point:
        return dtype
    if optim_dtype is None and widens_half and _is_half(dtype):
        return torch.float32
    return optim_dtype or dtype


def _is_half(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize


class MasterWeights:
    """The pairs of one model; copies are made when they are first asked for.

    Args:
        named_parameters: gives those of the model, in order; a shared parameter may come under each of its names and
            has one copy. Asked again before each step and whenever the copies are asked for, so that parameters that
            were replaced or added since are found.
        optim_dtype: dtype of the copies of floating-point parameters; None keeps each parameter's.
        widens_half: None gives float32 copies to parameters of half precision; else there is a warning of them.
    """

    def __init__(
        self,
        named_parameters: Callable[[], NamedParameters],
        optim_dtype: torch.dtype | None,
        widens_half: bool = False,
    ) -> None:
        self._named_parameters = named_parameters
        self._optim_dtype = optim_dtype
        self._widens_half = widens_half
        self._has_warned = False
        self.is_aside = False
        """Whether the gradients that the model has now are not to be taken: see `gradients_aside`."""
        self._pairs: list[ParameterPair] = []
        self._by_name: dict[str, ParameterPair] = {}
        self._find()

    def __iter__(self) -> Iterator[ParameterPair]:
        return iter(self._pairs)

    def _find(self) -> None:
        """One pair per parameter object that the model has now; pairs go on for those that it had before."""
        now, known = list(self._named_parameters()), self._by_name
        if len(now) == len(known) and all(name in known and known[name].parameter is each for name, each in now):
            return
        before = {pair.parameter: pair for pair in self._pairs}
        pairs: dict[nn.Parameter, ParameterPair] = {}
        for name, parameter in now:
            if parameter not in pairs:
                pairs[parameter] = before.get(parameter) or ParameterPair([], parameter)
                pairs[parameter].names = []
            pairs[parameter].names.append(name)
        self._pairs = list(pairs.values())
        self._by_name = {name: pairs[parameter] for name, parameter in now}

    def trainable(self) -> list[ParameterPair]:
        """The pairs of parameters that are trainable now; those that had no copy get one."""
        self._find()
        trainable = [pair for pair in self._pairs if pair.parameter.requires_grad]
        new = [pair for pair in trainable if pair.copy is None]
        copies_bytes = sum(pair.parameter.numel() * self._dtype_of_copy(pair).itemsize for pair in new)
        HOST_LIMIT.check({"the optimizer's copies of weights": copies_bytes})
        for pair in trainable:
            if pair.copy is None:
                pair.make_copy(self._dtype_of_copy(pair))
            elif self._optim_dtype is None:
                pair.follow_dtype(self._dtype_of_copy(pair))
        self._warn_of_half(trainable)
        return trainable

    def _dtype_of_copy(self, pair: ParameterPair) -> torch.dtype:
        return copy_dtype(pair.parameter.dtype, self._optim_dtype, widens_half=self._widens_half)

    def copy_dtypes(self) -> list[torch.dtype]:
        """The dtypes of the copies, made or to be made, of parameters that are trainable now."""
        return list(dict.fromkeys(self._dtype_of_copy(pair) for pair in self._pairs if pair.parameter.requires_grad))

    def _warn_of_half(self, trainable: Sequence[ParameterPair]) -> None:
        """Warn, once, of copies in half precision that nobody asked for."""
        if self._has_warned or self._optim_dtype is not None:
            return
        half = [pair for pair in trainable if pair.copy is not None and _is_half(pair.copy.dtype)]
        if half:
            self._has_warned = True
            names = enumerated([pair.names[0] for pair in half])
            warn(
                f"the optimizer's copies of {names} have the parameters' own dtype, {half[0].parameter.dtype}, in "
                "which small updates are lost. Give optim_dtype=torch.float32, as compile() does by itself, or this "
                "dtype if it is meant"
            )

    def named_copies(self, prefix: str, remove_duplicate: bool) -> Iterator[tuple[str, nn.Parameter]]:
        """The copies of parameters that are trainable now, with the original names, as ``nn.Module`` gives them."""
        if not isinstance(prefix, str):
            raise ConfigError(f"prefix is {type(prefix).__name__}; give a string that is put before each name")
        trainable = self.trainable()
        names = {pair.names[0]: pair for pair in trainable} if remove_duplicate else self._by_name
        for name, pair in names.items():
            if pair.copy is not None and pair.parameter.requires_grad:
                yield (f"{prefix}.{name}" if prefix else name), pair.copy

    def with_copies(self) -> list[ParameterPair]:
        """The pairs that the optimizer may have updated; those that are frozen now may have gradients from before."""
        return [pair for pair in self._pairs if pair.copy is not None]

    @contextmanager
    def gradients_aside(self) -> Iterator[None]:
        """While open, the model has no gradients."""
        originals = [(pair.parameter, pair.parameter.grad) for pair in self._pairs]
        try:
            for parameter, _ in originals:
                parameter.grad = None
            self.is_aside = True
            yield
        finally:
            self.is_aside = False
            for parameter, gradient in originals:
                parameter.grad = gradient

    @contextmanager
    def gradients_scaled(self, scale: Callable[[], float]) -> Iterator[None]:
        """While open, the model has no gradients; then it has those of before, plus ``scale()`` times what came.

        If the code inside raises, what came is dropped.
        """
        originals = [(pair.parameter, pair.parameter.grad) for pair in self._pairs]
        with self.gradients_aside():
            yield
            factor, came = scale(), [parameter.grad for parameter, _ in originals]
        with torch.no_grad():
            for (parameter, gradient), new in zip(originals, came, strict=True):
                if new is not None:
                    parameter.grad = new.mul_(factor) if gradient is None else gradient + new.mul_(factor)

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool, of_copies: bool | None = None) -> None:
        """Clear all gradients, or those of copies, or those that no update takes from the model."""
        holders: list[nn.Parameter | None] = []
        if of_copies is not True:
            self._find()
        if of_copies is not False:
            holders += [pair.copy for pair in self._pairs]
        if of_copies is not True:
            stays = of_copies is None
            holders += [pair.parameter for pair in self._pairs if stays or pair.copy is None]
        for holder in holders:
            if holder is not None and holder.grad is not None:
                holder.grad = None if set_to_none else holder.grad.detach().zero_()

    def replace(self, name: str, parameter: nn.Parameter) -> None:
        """A parameter was loaded, and may be another object now: its copy starts again."""
        if (pair := self._by_name.get(name)) is not None:
            if pair.parameter is not parameter:
                pair.parameter, pair.shown = parameter, None
                if pair.copy is not None:
                    pair.copy.grad = None  # that of the other one
            pair.start_again()


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
