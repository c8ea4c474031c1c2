"""What a tree of modules holds: bytes of its weights, and whether its structure changed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from itertools import chain
from typing import TypeVar

import torch
from torch import nn

from roundpipe.core.attributes import given_attribute
from roundpipe.core.contexts import contextmanager
from roundpipe.core.storages import bytes_of

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)
_TORCHS_OWN = nn.Module.named_modules, nn.Module.modules


class Renaming(nn.Module):
    """A module whose ``named_modules`` gives other names than torch's own would, in the same order."""


_WALKS: ContextVar[dict[nn.Module, list[nn.Module]] | None] = ContextVar("walks", default=None)
"""Of the innermost `walked_once`."""


@contextmanager
def walked_once() -> Iterator[None]:
    """Inside, `modules_in` walks each tree once: whoever enters knows that none of them changes."""
    token = _WALKS.set({})
    try:
        yield
    finally:
        _WALKS.reset(token)


def modules_in(module: nn.Module) -> Sequence[nn.Module]:
    """What ``modules()`` gives, several times as fast in deep trees, of which adapters make many."""
    if (walks := _WALKS.get()) is None:
        return _walk(module)
    if (known := walks.get(module)) is None:
        known = walks[module] = _walk(module)
    return known


def _walk(module: nn.Module) -> list[nn.Module]:
    found: dict[nn.Module, None] = {module: None}
    ways = [iter(module._modules.values())]
    while ways:
        for child in ways[-1]:
            if child is None or child in found:
                continue
            found[child] = None
            if below := child._modules:
                ways.append(iter(below.values()))
                break
        else:
            ways.pop()
    kinds: set[type[nn.Module]] = set(map(type, found))
    return list(found) if all(map(is_in_torchs_order, kinds)) else list(module.modules())


def named_modules_in(module: nn.Module) -> dict[str, nn.Module]:
    """What ``named_modules()`` gives, by the same way."""
    found: dict[nn.Module, str] = {module: ""}
    ways = [("", iter(module._modules.items()))]
    while ways:
        prefix, way = ways[-1]
        for name, child in way:
            if child is None or child in found:
                continue
            found[child] = path = prefix + name
            if below := child._modules:
                ways.append((f"{path}.", iter(below.items())))
                break
        else:
            ways.pop()
    if not _all_walk_as_torch(found):
        return dict(module.named_modules())
    return dict(zip(found.values(), found, strict=True))


def places_in(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """What ``named_modules(remove_duplicate=False)`` gives, fast where no module has two names."""
    named = named_modules_in(module)
    num_children = sum(
        child is not None for inner in named.values() if (below := inner._modules) for child in below.values()
    )
    if num_children + 1 == len(named) and _all_walk_as_torch(named.values()):
        return list(named.items())
    return list(module.named_modules(remove_duplicate=False))


def is_in_torchs_order(kind: type[nn.Module]) -> bool:
    """Whether modules of a class walk their trees as torch's own do; names may be others."""
    return issubclass(kind, Renaming) or _walks_as_torch(kind)


def _walks_as_torch(kind: type[nn.Module]) -> bool:
    return (kind.named_modules, kind.modules) == _TORCHS_OWN


def _all_walk_as_torch(modules: Iterable[nn.Module]) -> bool:
    """Whether no class among some modules' has an order or names of its own."""
    kinds: set[type[nn.Module]] = set(map(type, modules))
    return all(map(_walks_as_torch, kinds))


def parameters_in(module: nn.Module) -> list[nn.Parameter]:
    """What ``parameters()`` gives, by the same way."""
    if type(module).named_parameters is not nn.Module.named_parameters:
        return list(module.parameters())
    return _once([inner._parameters for inner in modules_in(module)])


def buffers_in(module: nn.Module) -> list[torch.Tensor]:
    """What ``buffers()`` gives, by the same way."""
    if type(module).named_buffers is not nn.Module.named_buffers:
        return list(module.buffers())
    return _once([inner._buffers for inner in modules_in(module)])


def parameters_at(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """What ``named_parameters(remove_duplicate=False)`` gives, by the same way: a shared one at each of its names."""
    if type(module).named_parameters is not nn.Module.named_parameters:
        return list(module.named_parameters(remove_duplicate=False))
    return _named([(path, inner._parameters) for path, inner in places_in(module)])


def buffers_at(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """What ``named_buffers(remove_duplicate=False)`` gives, by the same way."""
    if type(module).named_buffers is not nn.Module.named_buffers:
        return list(module.named_buffers(remove_duplicate=False))
    return _named([(path, inner._buffers) for path, inner in places_in(module)])


def _once(tables: Iterable[Mapping[str, _Tensor | None]]) -> list[_Tensor]:
    """What modules hold in tables, shared ones once."""
    held = chain.from_iterable([table.values() for table in tables if table])
    return list({id(tensor): tensor for tensor in held if tensor is not None}.values())


def _named(tables: Iterable[tuple[str, Mapping[str, _Tensor | None]]]) -> list[tuple[str, _Tensor]]:
    """What modules hold in tables, with the names of the modules."""
    prefixed = [(f"{path}." if path else "", table) for path, table in tables if table]
    return [
        (prefix + name, tensor) for prefix, table in prefixed for name, tensor in table.items() if tensor is not None
    ]


def weight_bytes_of(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers, shared ones once."""
    unique = {id(t): t for t in (*parameters_in(module), *buffers_in(module))}
    return sum(map(bytes_of, unique.values()))


def training_bytes_of(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers and of the gradients of those that are trained, shared ones once."""
    return weight_bytes_of(module) + sum(bytes_of(t) for t in parameters_in(module) if t.requires_grad)


def has_attention(module: nn.Module) -> bool:
    """Whether a model is likely to compute attention: some class of its modules has it in its name."""
    return any("attention" in type(each).__name__.lower() for each in modules_in(module))


def puts_time_first(module: nn.Module) -> bool:
    """Whether a module takes dimension 0 as time, as recurrent modules and attention of torch's do by default."""
    return given_attribute(module, "batch_first") is False


def common_path(names: Sequence[str]) -> list[str]:
    """The parts of qualified names that all of them begin with."""
    paths = [name.split(".") for name in names]
    return [parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]


class Structure:
    """Classes, submodules and numbers of tensors of modules, such as ``model.modules()``."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._seen = [
            (module, type(module), len(module._parameters), len(module._buffers), list(module._modules.items()))
            for module in modules
            if not isinstance(module, torch.jit.ScriptModule)  # can't be changed
        ]

    def changed(self) -> nn.Module | None:
        """A module that has another class, other submodules, or more or fewer names now; None if there is none."""
        for module, kind, num_parameters, num_buffers, children in self._seen:
            now = module._modules
            if (
                type(module) is not kind
                or len(module._parameters) != num_parameters
                or len(module._buffers) != num_buffers
                or (list(now.items()) != children if now else children)
            ):
                return module
        return None


def structure_message(module: nn.Module, name: str = "") -> str:
    """The message about a module, or a parameter of it, that came into the model or left it while it was needed."""
    what = f"parameter {name!r} of a {type(module).__name__}" if name else f"a {type(module).__name__}"
    return (
        f"{what} was put into the model, or taken out of it, while a round was running that needs the model as it was. "
        "Change the structure of a model after synchronize(), and call backward on what forward gave before"
    )
