"""An inventory is current exactly as long as a walk of the trees would find the same."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from roundpipe.core.inventory import Inventory, kept, of_children
from roundpipe.core.module_tree import Renaming, buffers_in, modules_in, parameters_at, parameters_in


def _model() -> Any:
    model = nn.Sequential(
        nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False)), nn.ReLU(), nn.Linear(2, 2)
    )
    model[3].weight = model[0].weight
    return model


class _Nameless(Renaming):
    """What it holds has the names that it would have without it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        memo = set() if memo is None else memo
        memo.add(self)
        yield prefix, self
        yield from self.inner.named_modules(memo, prefix, remove_duplicate)


def _move_first(tables: Any, name: str) -> None:
    tables.update({each: tables.pop(each) for each in list(tables) if each != name})


def _become(module: nn.Module, kind: type) -> None:
    module.__class__ = kind


CHANGES: dict[str, Callable[[Any], object]] = {
    "a parameter is another": lambda model: setattr(model[0], "weight", nn.Parameter(model[0].weight.detach().clone())),
    "a parameter is equal to the one before": lambda model: setattr(model[0], "bias", nn.Parameter(model[0].bias.data)),
    "a parameter is new": lambda model: model[2].register_parameter("scale", nn.Parameter(torch.ones(()))),
    "a parameter is gone": lambda model: delattr(model[0], "bias"),
    "a parameter is None": lambda model: setattr(model[0], "bias", None),
    "a parameter takes the place of None": lambda model: setattr(model[1][1], "bias", nn.Parameter(torch.ones(2))),
    "a parameter has another name": lambda model: model[0]._parameters.update(other=model[0]._parameters.pop("bias")),
    "a parameter is elsewhere": lambda model: model[1][1]._parameters.update(bias=model[0]._parameters.pop("bias")),
    "parameters are in another order": lambda model: _move_first(model[0]._parameters, "bias"),
    "a buffer is another": lambda model: setattr(model[1][0], "running_mean", torch.zeros(2)),
    "a buffer is new": lambda model: model[2].register_buffer("count", torch.zeros(())),
    "a module is another": lambda model: model.__setitem__(2, nn.ReLU()),
    "a module is new": lambda model: model[2].add_module("inner", nn.ReLU()),
    "a module is gone": lambda model: model[1].__delitem__(1),
    "modules are in another order": lambda model: _move_first(model._modules, "2"),
    "a class is another": lambda model: _become(model[2], nn.GELU),
    "a weight is parametrized": lambda model: parametrize.register_parametrization(model[0], "bias", nn.ReLU()),
    "a table is another": lambda model: model[0].__dict__.update(_parameters=dict(model[0]._parameters)),
    "hooks are in another table": lambda model: model[2].__dict__.update(_forward_hooks=OrderedDict()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_a_walk_would_find_otherwise_is_seen(change: Callable[[Any], object]) -> None:
    model = _model()
    known = Inventory([model])
    assert known.is_current() and known.now() is known
    change(model)
    assert not known.is_current()
    now = known.now()
    assert now.is_current()
    assert now.modules == modules_in(model)
    assert list(map(id, now.parameters[0])) == list(map(id, parameters_in(model)))
    assert list(map(id, now.buffers)) == list(map(id, buffers_in(model)))
    named = [(name, id(each)) for name, each in parameters_at(model)]
    assert [(name, id(each)) for name, each in now.named_parameters] == named


def test_values_hooks_and_modes_are_not_part_of_it() -> None:
    model = _model()
    known = Inventory([model])
    forms, modes = known.forms(), known.modes()
    with torch.no_grad():
        model[0].weight.zero_()
    model.eval()
    model[1].requires_grad_(False)
    model[0].bias.data = torch.zeros(2, dtype=torch.float64)
    handle = model[2].register_forward_hook(lambda *_: None)
    assert known.is_current() and known.has_hooks()
    assert known.forms() != forms and known.modes() != modes
    handle.remove()
    assert not known.has_hooks()


def test_what_walks_in_its_own_way_is_walked_each_time() -> None:
    class Own(nn.Sequential):
        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            return iter(())

    model = nn.Sequential(Own(nn.Linear(2, 2)))
    asked = kept(model)
    assert asked() is not asked()
    scripted: Any = torch.jit.script(nn.Linear(2, 2))
    known = Inventory([nn.Sequential(scripted)])
    assert not known.is_current() and known.modes() == [True, True]


def test_what_only_gives_other_names_is_known_like_others() -> None:
    model = nn.Sequential(_Nameless(_model()))
    known = Inventory([model])
    assert known.is_current() and known.now() is known
    assert [name for name, _ in known.named_parameters][:2] == ["0.0.weight", "0.0.bias"]
    assert known.modules == list(model.modules())
    assert list(map(id, known.parameters[0])) == list(map(id, model.parameters()))
    model[0].inner[2].add_module("more", nn.Linear(2, 2))  # type: ignore[union-attr, operator, index]
    assert not known.is_current()
    assert known.now().modules == list(model.modules())


def test_children_are_known_as_long_as_their_owner() -> None:
    owner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    known = of_children(owner)
    assert of_children(owner) is known
    assert [len(own) for own in known.parameters] == [2, 2]
    owner.append(nn.Linear(2, 2))
    assert [len(own) for own in of_children(owner).parameters] == [2, 2, 2]
    owner[0].register_forward_hook(lambda *given, owner=owner: None)
    gone = weakref.ref(owner)
    del owner, known
    gc.collect()
    assert gone() is None
