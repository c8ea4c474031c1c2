"""A parameter of the model and the optimizer's copy of it: weights go one way, gradients the other."""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from roundpipe.core.errors import ConfigError
from roundpipe.core.storages import is_plain
from roundpipe.core.together import Together
from roundpipe.runtime.device.backend import Move
from roundpipe.runtime.device.host_limit import HOST_LIMIT
from roundpipe.runtime.device.host_memory import convert, on_huge_pages
from roundpipe.runtime.weights.banks import Banks, EarlyGradient, LateGradient
from roundpipe.runtime.weights.fingerprint import Fingerprint
from roundpipe.runtime.weights.shard import Shard
from roundpipe.runtime.weights.twins import Twin

_ORIGINALS: MutableMapping[torch.Tensor, weakref.ref[nn.Parameter]] = WeakTensorKeyDictionary()
"""By the copy, the parameter that it is of."""


def original_of(copy: torch.Tensor) -> nn.Parameter | None:
    """The parameter that an optimizer's copy is of, whichever compiled model has made it; None: it is no copy."""
    reference = _ORIGINALS.get(copy)
    return None if reference is None else reference()


@dataclass(slots=True, eq=False)
class ParameterPair:
    """A parameter of the model and the optimizer's copy of it."""

    names: list[str]
    parameter: nn.Parameter
    copy: nn.Parameter | None = None
    """Of all elements, or of those in the ``shard``, in one dimension."""
    shard: Shard | None = None
    whole: torch.Tensor | None = None
    """With a ``shard``: the model's gradient, taken to be averaged over the ranks."""
    spare: torch.Tensor | None = None
    """Memory for the copy's gradient, used at each update where dtypes differ."""
    early: EarlyGradient = field(default_factory=EarlyGradient)
    late: LateGradient | None = None
    """The copy's gradient while an update has not needed it in the copy's dtype."""
    may_be_late: bool = False
    """Whether updates have needed none in the copy's dtype so far."""
    banks: Banks | None = None
    twin: Twin | None = None
    """Where the model's weights and gradient are, if not in the parameter."""
    is_away: bool = False
    """Whether the copy is on the twin's device."""
    adds_up: bool = False
    """Whether the latest gradient was added to one that the copy had."""
    shown: tuple[torch.Tensor, int, torch.Tensor, int] | None = None
    """What `show_gradient` put into the model's ``.grad``, and the copy's gradient then, each with its version."""
    copy_version: int = 0
    """The copy's when it and the model's parameter last agreed."""
    copy_print: Fingerprint | None = None
    """The copy then, if no update was on its way: it shows what the training loop writes through ``.data``."""
    fingerprint: Fingerprint | None = None
    """The model's parameter when the copy and it last agreed, or the copy was newer."""
    is_written: bool = False
    """Whether anybody else has written the model's parameter since; see `look`."""

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the copy is of, in a tensor that has the parameter's shape."""
        return tensor if self.shard is None else self.shard.of(tensor)

    @property
    def holder(self) -> nn.Parameter:
        """What has the model's gradient, and the weights that rounds run on."""
        return self.parameter if self.twin is None else self.twin.weights

    def look(self) -> None:
        """Notice whether anybody else has written the model's parameter or given it other memory."""
        if self.fingerprint is not None and self.fingerprint.is_marked:
            self.is_written = True
            self.agree()

    def agree(self) -> None:
        """The copy's side, if there is a copy, knows what the model's parameter holds now."""
        if self.copy is not None:
            self.fingerprint = Fingerprint.of(self.parameter)
            self.copy_version, self.copy_print = self.copy._version, None

    @property
    def is_ahead(self) -> bool:
        """Whether the copy was written since it and the model's parameter agreed."""
        copy, known = self.copy, self.copy_print
        is_other = known is not None and (known.is_marked or known.has_other_values)
        return copy is not None and (is_other or copy._version != self.copy_version)

    def moved(self) -> None:
        """The model's parameter has other memory now, with the same values."""
        if self.banks is not None and self.banks.other is None:
            self.banks = None
        if self.fingerprint is not None:
            self.fingerprint = self.fingerprint.moved()

    @torch.no_grad()
    def start_again(self) -> None:
        """The copy takes the model's values."""
        if self.copy is not None:
            self.copy.copy_(self.part(self.parameter))
        self.is_written = False
        self.agree()

    @torch.no_grad()
    def take_written(self) -> None:
        """The copy takes those of the model's values that are not its own in the model's precision."""
        copy = self.copy
        if copy is not None and copy.dtype != self.parameter.dtype and is_plain(copy) and is_plain(self.parameter):
            now = self.part(self.parameter).to(copy.device)
            copy.copy_(torch.where(now == copy.to(now.dtype), copy, now.to(copy.dtype)))
            self.is_written = False
            self.agree()
        else:
            self.start_again()

    def make_copy(self, dtype: torch.dtype) -> None:
        source = self.parameter.detach()
        if source.is_meta:
            raise ConfigError(
                f"parameter {self.names[0]} is on the meta device, so the optimizer can't start from it; "
                "load the model's weights (model.to_empty, from_pretrained) before"
            )
        if self.shard is not None and not is_plain(source):
            raise ConfigError(
                f"shard_optimizer=True: parameter {self.names[0]} is a {type(source).__name__} and can't be divided; "
                "freeze it, or train without shard_optimizer"
            )
        source = self.part(source)
        with torch.inference_mode(False), torch.no_grad():  # also if it is first asked for there
            if is_plain(source):
                copy = on_huge_pages(torch.empty_like(source, device="cpu", dtype=dtype)).copy_(source)
            else:
                copy = source.to("cpu", dtype, copy=True)
            self.copy = nn.Parameter(copy)
        _ORIGINALS[self.copy] = weakref.ref(self.parameter)
        self.agree()

    def drop_copy_of_other_size(self) -> None:
        """The copy is gone if the model's parameter has another size by now, as that of an embedding that has grown."""
        if self.copy is not None and self.shard is None and self.copy.shape != self.parameter.shape:
            self.copy = self.spare = self.whole = self.banks = self.shown = self.fingerprint = self.copy_print = None
            self.late = None
            self.early, self.is_written = EarlyGradient(), False

    def follow_dtype(self, dtype: torch.dtype) -> None:
        """Convert the copy if the model's parameter was converted, by ``model.to`` or in a forward."""
        copy = self.copy
        if copy is not None and copy.dtype != dtype and is_plain(copy) and is_plain(self.parameter):
            convert(copy, dtype)
            self.spare, self.early, self.copy_print = None, EarlyGradient(), None

    @property
    def is_behind(self) -> bool:
        """Whether the model's weights are not the copy's, in the model's precision."""
        return self._differs_from(self.holder)

    @property
    def has_written_values(self) -> bool:
        """Whether the user's parameter, which is not behind, does not have the copy's values."""
        return is_plain(self.parameter) and self._differs_from(self.parameter)

    def _differs_from(self, now: torch.Tensor) -> bool:
        copy = self.copy
        if copy is None or not is_plain(copy) or not is_plain(now):
            return copy is not None
        return not torch.equal(self.part(now), copy.to(now.device, now.dtype))

    def write_weights(self, together: Together) -> None:
        """Write the copy into the model's parameter, which lies in its own memory then; they `agree` afterwards."""
        if self.banks is not None:
            self.banks.go_home(keeps_values=self.copy is None)
        if self.copy is not None:
            together.copy(self.parameter, self.copy)

    def write_host(self) -> None:
        """Write the twin into the model's parameter, if that is behind."""
        if self.twin is not None and self.twin.is_ahead:
            if self.banks is not None:
                self.banks.go_home(keeps_values=False)
            self.parameter.copy_(self.twin.weights)
            self.twin.agree(self.parameter)
            self.fingerprint = self.twin.print

    def has_followed(self) -> None:
        """The model's parameter has got its twin's values (`follow_twins`): writes of others show from now on."""
        if self.twin is not None and self.fingerprint is self.twin.print:
            self.twin.agree(self.parameter)
            self.fingerprint = self.twin.print

    def begin_twin(self, twin: Twin | None) -> None:
        """From now on the model's gradient is the twin's, if there is one."""
        if twin is not None:
            self.twin, gradient, self.parameter.grad = twin, self.parameter.grad, None
            twin.weights.grad = None if gradient is None else gradient.to(twin.weights.device, copy=True)

    def end_twin(self) -> None:
        """The model's weights and gradient are those of the parameter again."""
        self.write_host()
        self.join_gradient()
        if self.twin is not None:
            gradient, self.twin = self.twin.weights.grad, None
            if gradient is not None:
                self.parameter.grad = gradient.to(self.parameter.device, self.parameter.dtype)

    def join_gradient(self) -> None:
        """What a graph on the host, such as of a penalty, has given the parameter joins the twin's gradient."""
        own = self.parameter.grad
        if self.twin is not None and self.shown is None and own is not None:
            gradient, self.parameter.grad = self.twin.weights.grad, None
            own = own.to(self.twin.weights.device)
            self.twin.weights.grad = own if gradient is None else gradient + own

    def move_copy(self, device: torch.device, move: Move, *, is_away: bool) -> None:
        """Bring the copy and its gradient to a device, or home; read them behind the context of ``move``."""
        if self.copy is None or self.is_away == is_away:
            return
        was_shown = self.shown is not None
        self.take_back()
        gradient, self.copy.grad = self.copy.grad, None
        self.spare, self.early, self.copy_print = None, EarlyGradient(), None
        self.copy.data = move(self.copy.data, device)
        if gradient is not None and gradient.device != device:
            gradient = gradient.to(device) if was_shown else move(gradient, device)
        self.copy.grad = gradient
        self.is_away = is_away
        if was_shown:
            self.show_gradient()

    @property
    def is_staged(self) -> bool:
        """Whether `swap_weights` would do what `write_weights` does."""
        return self.banks is not None and self.twin is None and self.banks.is_ready(self.copy)

    def swap_weights(self) -> None:
        """Give the model's parameter the memory that `stage_all` has written."""
        assert self.banks is not None
        self.banks.swap()
        self.agree()

    def go_home(self) -> None:
        """Let the model's parameter lie in its own memory, with the values that it has."""
        if self.banks is not None and not self.banks.is_home:
            self.banks.go_home()
            self.agree()

    def gradient_came(self, together: Together) -> torch.Tensor | None:
        """Something was added to the model's gradient: have it converted if that seems to be all, and return it."""
        early, copy, gradient = self.early, self.copy, self.holder.grad
        early.num_came += 1
        if early.num_came != early.num_expected or copy is None or gradient is None or self.twin is not None:
            return None
        if self.may_be_late or self._suits_copy(gradient):
            return None
        if early.memory is None and HOST_LIMIT.has_room(copy.nbytes):
            early.memory = on_huge_pages(torch.empty_like(copy.detach()))
        return gradient if early.convert(gradient, together) else None

    def take_gradient(self, together: Together, *, late: bool = False) -> None:
        """Add the model's gradient to the copy's; with a shard, have it ready for the ranks.

        ``late``: it may stay in the model's dtype for now, if updates are likely to need no other.
        """
        self.join_gradient()
        self.convert_late()  # of an update that was not made
        copy, holder = self.copy, self.holder
        gradient, holder.grad = holder.grad, None
        if gradient is None or copy is None:
            return
        if self.shard is not None:
            self.whole = gradient
            return
        early, self.adds_up = self.early.take(gradient), copy.grad is not None
        if late and copy.grad is None and early is None and self._suits_late(gradient):
            self.late, self.spare = LateGradient(gradient.detach()), None
        elif copy.grad is None and early is not None:
            copy.grad, self.spare, self.early.memory = early, early, self.spare
        elif copy.grad is None:
            copy.grad = self._converted(gradient, together)
        elif copy.grad.layout is torch.strided:
            together.add(copy.grad, gradient.to(copy.device) if early is None else early)
        else:
            copy.grad = copy.grad + gradient.to(copy.device, copy.dtype)

    def _suits_late(self, gradient: torch.Tensor) -> bool:
        """Whether a gradient of the model may stand for the copy's."""
        is_streamed = self.shard is None and self.twin is None and not self.is_away
        if not (self.may_be_late and is_streamed and is_plain(gradient)):
            return False
        assert self.copy is not None
        return gradient.is_contiguous() and gradient.shape == self.copy.shape and gradient.dtype != self.copy.dtype

    @property
    def has_gradient(self) -> bool:
        """Whether the copy has one, late or not."""
        return self.copy is not None and (self.late is not None or self.copy.grad is not None)

    def convert_late(self) -> None:
        """Let the copy have a gradient that is late in its own dtype."""
        late, copy = self.late, self.copy
        if late is not None and copy is not None:
            with Together() as together:
                gradient = self._converted(late.gradient, together)
            if late.factor is not None:
                gradient.mul_(late.factor)
            copy.grad = gradient if copy.grad is None else copy.grad.add_(gradient)  # a graph has added to it
        self.late = None

    @property
    def passes_gradient_on(self) -> bool:
        """Whether the model's gradient becomes the copy's as it is, where both are in one place."""
        return self.copy is not None and self.copy.dtype == self.parameter.dtype

    def _suits_copy(self, gradient: torch.Tensor) -> bool:
        """Whether a gradient of the model can be the copy's as it is, or has a form that can't be converted early."""
        copy = self.copy
        is_same = copy is not None and gradient.dtype == copy.dtype and gradient.device == copy.device
        return is_same or gradient.layout is not torch.strided

    def _converted(self, gradient: torch.Tensor, together: Together) -> torch.Tensor:
        """A gradient of the model as the copy's: itself if it can be, else in the spare memory."""
        assert self.copy is not None
        gradient = gradient.detach() if gradient.requires_grad else gradient
        if gradient.dtype == self.copy.dtype and gradient.device == self.copy.device:
            return gradient
        if gradient.layout is not torch.strided:
            return gradient.to(self.copy.device, self.copy.dtype)
        together.copy(memory := self._spare_memory(), gradient)
        return memory

    def _spare_memory(self) -> torch.Tensor:
        """For the copy's gradient."""
        if self.spare is None:
            assert self.copy is not None
            if not self.is_away:
                HOST_LIMIT.check({"gradients in the optimizer's dtype": self.copy.nbytes})
            with torch.inference_mode(False):
                self.spare = on_huge_pages(torch.empty_like(self.copy.detach()))
        return self.spare

    def show_gradient(self) -> None:
        """Let the model's ``.grad`` be the copy's; with a shard, it stays this rank's own until it is averaged."""
        if self.shard is not None:
            self.parameter.grad, self.whole = self.whole, None
            return
        if self.copy is None or self.copy.grad is None:
            return
        self.parameter.grad = shown = self.copy.grad.to(self.parameter.device, self.parameter.dtype)
        self.shown = shown, shown._version, self.copy.grad, self.copy.grad._version

    @property
    def is_unseen(self) -> bool:
        """Whether the model has a gradient that has not come to the copy."""
        return self.shown is None and (self.holder.grad is not None or self.parameter.grad is not None)

    @property
    def is_shown(self) -> bool:
        """Whether the model and the copy have the same gradient, or none."""
        if self.copy is None or self.shard is not None:
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
        elif given is not shown or is_written or gradient is not None and gradient.dtype != self.copy.dtype:
            with Together() as together:
                gradient = self._converted(given, together)
        self.copy.grad, self.parameter.grad, self.shown = gradient, None, None  # at once: calls may be interrupted
