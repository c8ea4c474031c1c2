"""Master weights: all parameters of a model, each with the optimizer's copy of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from roundpipe.core.caller import warn
from roundpipe.core.checks import check_flag, check_type
from roundpipe.core.contexts import contextmanager
from roundpipe.core.errors import ConfigError, enumerated
from roundpipe.runtime.device.host_limit import HOST_LIMIT
from roundpipe.runtime.weights.banks import Banks
from roundpipe.runtime.weights.pairs import clear_gradients, convert_gradients, look, watch_copies, with_other_values
from roundpipe.runtime.weights.parameter_pair import ParameterPair
from roundpipe.runtime.weights.shard import Shard

NamedParameters = Iterable[tuple[str, nn.Parameter]]


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
            were replaced or added since are found; who gives the same tuple again says that none were.
        optim_dtype: dtype of the copies of floating-point parameters; None keeps each parameter's.
        widens_half: None gives float32 copies to parameters of half precision; else there is a warning of them.
        shard: the part of each parameter that has a copy; None: all.
    """

    def __init__(
        self,
        named_parameters: Callable[[], NamedParameters],
        optim_dtype: torch.dtype | None,
        widens_half: bool = False,
        shard: Shard | None = None,
    ) -> None:
        self._shard = shard
        self._named_parameters = named_parameters
        self._optim_dtype = optim_dtype
        self._widens_half = widens_half
        self._dtypes: dict[torch.dtype, torch.dtype] = {}
        """Of copies, by the parameter's."""
        self._has_warned = False
        self._converts_early = False
        self.is_aside = False
        """Whether the gradients that the model has now are not to be taken: see `gradients_aside`."""
        self._pairs: list[ParameterPair] = []
        self._by_name: dict[str, ParameterPair] = {}
        self._by_parameter: dict[torch.Tensor, ParameterPair] = {}
        self._copied: tuple[list[ParameterPair], list[tuple[torch.dtype, torch.Size]]] = ([], [])
        """Pairs that have the right copies, and the dtypes and sizes that their parameters had."""
        self._found: NamedParameters | None = None
        """What was given last, if that is told by its identity, and all these have pairs."""
        self._find()

    def __iter__(self) -> Iterator[ParameterPair]:
        return iter(self._pairs)

    def of(self, parameter: torch.Tensor) -> ParameterPair | None:
        """The pair of a parameter, if it is one of the model's, as of the latest look."""
        return self._by_parameter.get(parameter)

    def has(self, parameter: torch.Tensor) -> bool:
        """Whether it is one of the model's, as of the latest look."""
        return parameter in self._by_parameter

    def _find(self) -> None:
        """One pair per parameter object that the model has now; pairs go on for those that it had before."""
        found = self._named_parameters()
        if found is self._found:
            return
        now, known = list(found), self._by_name
        self._found = found if isinstance(found, tuple) else None
        is_same = len(now) == len(known) and all(name in known and known[name].parameter is each for name, each in now)
        if is_same and len({each for _, each in now}) == len(self._pairs):
            return
        before = self._by_parameter
        pairs: dict[torch.Tensor, ParameterPair] = {}
        for name, parameter in now:
            if parameter not in pairs:
                pairs[parameter] = before.get(parameter) or ParameterPair([], parameter, shard=self._shard)
                pairs[parameter].names = []
            pairs[parameter].names.append(name)
        self._pairs, self._by_parameter = list(pairs.values()), pairs
        self._by_name = {name: pairs[parameter] for name, parameter in now}

    def with_new(self) -> Sequence[ParameterPair]:
        """All, with parameters that the model has got since; those whose place others took may come back."""
        found = self._named_parameters()
        if found is self._found:
            return tuple(self._pairs)
        new: dict[torch.Tensor, ParameterPair] = {}
        for name, parameter in found:
            if parameter not in self._by_parameter and isinstance(parameter, nn.Parameter):
                new.setdefault(parameter, ParameterPair([], parameter, shard=self._shard)).names.append(name)
        self._found = None
        self._pairs, self._by_parameter = [*self._pairs, *new.values()], {**self._by_parameter, **new}
        return tuple(self._pairs)

    def trainable(self) -> list[ParameterPair]:
        """The pairs of parameters that are trainable now; those that had no copy get one."""
        self._find()
        return self.make_copies(self._pairs)

    def make_copies(self, pairs: Sequence[ParameterPair]) -> list[ParameterPair]:
        """Those of these that are trainable now, each with a copy."""
        trainable = [pair for pair in pairs if pair.parameter.requires_grad]
        kinds = [(pair.parameter.dtype, pair.parameter.shape) for pair in trainable]
        if (trainable, kinds) == self._copied:
            return trainable
        for pair in trainable:
            pair.drop_copy_of_other_size()
        if self._optim_dtype is None:
            for pair in trainable:
                if pair.copy is not None and pair.copy.dtype is not self._dtype_of_copy(pair):
                    pair.follow_dtype(self._dtype_of_copy(pair))
        if new := [pair for pair in trainable if pair.copy is None]:
            copies_bytes = sum(pair.parameter.numel() * self._dtype_of_copy(pair).itemsize for pair in new)
            num_shards = 1 if self._shard is None else self._shard.count
            HOST_LIMIT.check({"the optimizer's copies of weights": copies_bytes // num_shards})
            for pair in new:
                pair.make_copy(self._dtype_of_copy(pair))
            watch_copies(new)
        self._warn_of_half(trainable)
        self._copied = list(trainable), kinds
        return trainable

    def _dtype_of_copy(self, pair: ParameterPair) -> torch.dtype:
        dtype = pair.parameter.dtype
        if (known := self._dtypes.get(dtype)) is None:
            known = self._dtypes[dtype] = copy_dtype(dtype, self._optim_dtype, widens_half=self._widens_half)
        return known

    def copy_dtypes(self) -> list[torch.dtype]:
        """The dtypes of the copies, made or to be made, of parameters that are trainable now."""
        return list(dict.fromkeys(self._dtype_of_copy(pair) for pair in self._pairs if pair.parameter.requires_grad))

    def _warn_of_half(self, trainable: Sequence[ParameterPair]) -> None:
        """Warn, once, of copies in half precision that nobody asked for."""
        if self._has_warned or self._optim_dtype is not None:
            return
        halves = set(filter(_is_half, {pair.copy.dtype for pair in trainable if pair.copy is not None}))
        half = [pair for pair in trainable if pair.copy is not None and pair.copy.dtype in halves] if halves else []
        if half:
            self._has_warned = True
            names = enumerated([pair.names[0] for pair in half])
            warn(
                f"the optimizer's copies of {names} have the parameters' own dtype, {half[0].parameter.dtype}, in "
                "which small updates are lost. Give optim_dtype=torch.float32, as compile() does by itself, or this "
                "dtype if it is meant"
            )

    def named_copies(
        self, prefix: str, remove_duplicate: bool, trainable: Sequence[ParameterPair] | None = None
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The copies of some parameters, with the original names, as ``nn.Module`` gives them.

        ``trainable``: theirs; None: those of parameters that are trainable now.
        """
        check_type("prefix", prefix, str, "a string that is put before each name")
        check_flag("remove_duplicate", remove_duplicate)
        trainable = self.trainable() if trainable is None else trainable
        names = {pair.names[0]: pair for pair in trainable} if remove_duplicate else self._by_name
        due = set(map(id, trainable))
        for name, pair in names.items():
            if pair.copy is not None and id(pair) in due:
                yield (f"{prefix}.{name}" if prefix else name), pair.copy

    def with_copies(self) -> list[ParameterPair]:
        """The pairs that the optimizer may have updated; those that are frozen now may have gradients from before."""
        return [pair for pair in self._pairs if pair.copy is not None]

    def ahead(self) -> list[ParameterPair]:
        """Those whose copies were written since they and the model agreed; a `ConfigError` if each rank has a shard."""
        ahead = [pair for pair in self._pairs if pair.is_ahead]
        if any(pair.copy is not None and pair.copy._version == pair.copy_version for pair in ahead):
            # through `.data`: others may have been written where nobody looked
            ahead += [pair for pair in self._pairs if pair not in ahead and not pair.is_away and pair.is_behind]
        if ahead and self._shard is not None:
            for pair in ahead:
                pair.agree()
            raise ConfigError(
                f"{enumerated([pair.names[0] for pair in ahead])}: the optimizer's copies were written outside of "
                "step_fn. With shard_optimizer=True a rank has a part of each; write them inside step_fn"
            )
        return ahead

    def convert_early(self, gradients: bool, memory: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """From now on: gradients as they come home, which takes the memory of them all once more; and weights of
        parameters for which there is ``memory``, in which they lie by turns.
        """
        self._converts_early = gradients
        for parameter, second in memory:
            if (pair := self._by_parameter.get(parameter)) is not None:
                pair.banks = Banks(parameter, parameter.data, second)

    @torch.no_grad()
    def gradients_came(self, parameters: Iterable[torch.Tensor]) -> None:
        """Something was added to the gradients of these; called before anybody may take them."""
        if self._converts_early and not self.is_aside:
            known = self._by_parameter
            convert_gradients(pair for each in parameters if (pair := known.get(each)) is not None)

    @contextmanager
    def gradients_aside(self) -> Iterator[None]:
        """While open, the model has no gradients."""
        originals = [(pair.parameter, pair.parameter.grad) for pair in self.with_new()]
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
        originals = [(pair.parameter, pair.parameter.grad) for pair in self.with_new()]
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
            cleared = [pair for pair in self._pairs if stays or pair.copy is None]
            holders += [pair.holder for pair in cleared]
            holders += [pair.parameter for pair in cleared if pair.twin is not None]
        clear_gradients(holders, set_to_none)

    def replace(self, name: str, parameter: nn.Parameter) -> None:
        """A parameter was loaded, and may be another object now: its copy starts again."""
        if (pair := self._by_name.get(name)) is not None:
            self._found = None
            if pair.parameter is not parameter:
                self._by_parameter.pop(pair.parameter)
                self._pairs = [each for each in self._pairs if each.parameter is not parameter]
                self._by_parameter[parameter] = pair
                pair.parameter, pair.shown, pair.banks, pair.twin = parameter, None, None, None
                if pair.copy is not None:
                    pair.copy.grad = pair.late = None  # that of the other one
            pair.start_again()


def written_beside_update(names: Iterable[str]) -> ConfigError:
    """The error for parameters that both an update and somebody else have written."""
    return ConfigError(
        f"{enumerated([*names])}: written while an asynchronous update was on its way, so that one of the two would "
        "be lost. Write weights after synchronize(), or take steps that are not asynchronous: step(..., is_async=False)"
    )


def take_writes(pairs: Sequence[ParameterPair], *, has_update: bool) -> None:
    """What was written into the model's weights since the last step holds for the copies too.

    Raises:
        ConfigError: an update is on its way into the model, so that both have new values.
    """
    look(pairs)
    unmarked = with_other_values([pair for pair in pairs if not pair.is_written])
    written = [pair for pair in pairs if pair.is_written] + unmarked
    if written and has_update:
        for pair in written:
            pair.agree()
            pair.is_written = False
        raise written_beside_update(pair.names[0] for pair in written)
    if unmarked:  # through `.data`: others may have been written where nobody looked
        written = [pair for pair in pairs if pair.is_written or pair.has_written_values]
    for pair in written:
        pair.take_written()
