"""Tables in which a replica's modules hold their weights, and stand-ins for weights that are read past them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, Self, cast

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.watched import unnoticed


class Reader(Protocol):
    """Brings weights to the device."""

    def read(self, index: int, position: int) -> torch.Tensor:
        """A tensor on the device, by its group and slot."""


class _Entries(dict[str, Any]):
    """A module's parameters or buffers; those at ``places`` are held, and `WeightTable` lets them go."""

    def __init__(self, entries: Mapping[str, Any], places: dict[str, tuple[int, int]], weights: Reader) -> None:
        super().__init__(entries)
        self.places = places
        self._weights = weights
        self._held: dict[str, tuple[Any, Any]] = {}
        """By name, what is held and what stands for it."""

    def hold(self, tensors: Mapping[str, Any]) -> None:
        """Have these tensors as entries, until `let_go`."""
        self._held = {name: (tensor, self.get(name)) for name, tensor in tensors.items()}
        self.__class__ = _Entries
        self.update(tensors)

    def let_go(self) -> None:
        """Have none of the tensors of `hold`; what the code has put in their places stays."""
        for name, (tensor, stand_in) in self._held.items():
            if self.get(name) is tensor:
                self[name] = stand_in
            else:
                del self.places[name]
        self._held = {}
        self.__class__ = WeightTable


class WeightTable(_Entries):
    """Entries that come when they are read by name."""

    def __getitem__(self, name: str) -> Any:
        place = self.places.get(name)
        return super().__getitem__(name) if place is None else self._weights.read(*place)

    def __setitem__(self, name: str, value: Any) -> None:
        self.places.pop(name, None)
        super().__setitem__(name, value)


class AbsentWeight(torch.Tensor):
    """A tensor of a device with the form of a weight that is at home; an operator gets the weight itself."""

    _weights: Reader
    _place: tuple[int, int]

    @classmethod
    def of(cls, tensor: torch.Tensor, device: torch.device, weights: Reader, place: tuple[int, int]) -> Self:
        form = torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
        stand_in: Any = torch.Tensor._make_subclass(cls, form, tensor.requires_grad)
        stand_in._is_param = isinstance(tensor, nn.Parameter)
        stand_in._weights, stand_in._place = weights, place
        return cast(Self, stand_in)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _OF_FORM:
            args, kwargs = trees.map_tensors((args, kwargs), _weight_of)
        with unnoticed():
            return func(*args, **kwargs)


def _weight_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._weights.read(*tensor._place) if isinstance(tensor, AbsentWeight) else tensor


def _functions(names: str) -> Iterator[Any]:
    for name in names.split():
        attribute = getattr(torch.Tensor, name)
        yield attribute if callable(attribute) else attribute.__get__


_OF_FORM = frozenset(
    _functions(
        "device dtype shape layout ndim size dim numel nelement element_size nbytes requires_grad is_leaf grad is_meta "
        "is_cuda is_cpu is_quantized is_sparse is_floating_point is_complex __hash__ __len__ _backward_hooks _version"
    )
)
"""What asks a tensor for its form alone."""
