"""A step_fn that does something with the model's own parameters, where it has no effect, is told of, once."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from tests.runtime.models import batch, mlp, square_loss

Update = Callable[[Any, nn.Module, torch.optim.Optimizer], None]


def clamp(piped: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.1, 0.1)


def clamp_data(piped: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def with_both(piped: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if len(optimizer.param_groups) == 1:
        optimizer.add_param_group({"params": [*model[-1].parameters()]})
    optimizer.step()


WRONG: dict[str, tuple[Update, str]] = {
    "writes": (clamp, "step_fn wrote .*, the model's own"),
    "writes through .data": (clamp_data, "step_fn wrote .*, the model's own"),
    "both": (with_both, "parameters of the optimizer in step_fn are the model's own"),
}


def right(piped: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(piped.optim_parameters(), 0.1)
    optimizer.step()
    with torch.no_grad():
        for copy in piped.optim_parameters():
            copy.clamp_(-0.1, 0.1)


def told(update: Update, is_async: bool, number: int = 4) -> list[str]:
    torch.manual_seed(0)
    model = mlp()
    with (
        warnings.catch_warnings(record=True) as caught,
        roundpipe.compile(model, devices=["cpu"] * 2) as piped,
    ):
        warnings.simplefilter("always")
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.1)
        for seed in range(number):
            piped.forward_backward((batch(seed=seed),), loss_fn=square_loss)
            piped.step(lambda: (update(piped, model, optimizer), optimizer.zero_grad()), is_async=is_async)
            piped.synchronize()  # beside a round, a step of the model's own parameters may be refused
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(("name", "is_async"), [*((name, False) for name in WRONG), ("both", True)])
def test_what_has_no_effect_is_told_of_once(name: str, is_async: bool) -> None:
    update, text = WRONG[name]
    found = told(update, is_async)
    assert len(found) == 1
    with pytest.warns(UserWarning, match=text):
        warnings.warn(found[0], stacklevel=1)


@pytest.mark.parametrize("is_async", [False, True])
def test_the_copies_are_right(is_async: bool) -> None:
    assert told(right, is_async) == []


@pytest.mark.parametrize("is_added", [False, True])
def test_parameters_that_are_unfrozen_later_need_a_group(is_added: bool) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    with warnings.catch_warnings(record=True) as caught, roundpipe.compile(model, devices=["cpu"] * 2) as piped:
        warnings.simplefilter("always")
        optimizer = torch.optim.SGD(before := list(piped.optim_parameters()), lr=0.1)
        start = model[0][0].weight.detach().clone()
        for seed in range(4):
            if seed == 2:
                model[0].requires_grad_(True)
                if is_added:
                    known = set(map(id, before))
                    new = [each for each in piped.optim_parameters() if id(each) not in known]
                    optimizer.add_param_group({"params": new})
            piped.forward_backward((batch(seed=seed),), loss_fn=square_loss)
            piped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        assert torch.equal(model[0][0].weight, start) is not is_added
    found = [str(each.message) for each in caught]
    assert len(found) == (not is_added) and all("unfrozen or resized after the first step" in each for each in found)


def test_freezing_for_a_while_and_optimizers_in_turn_are_right() -> None:
    model = mlp()
    with warnings.catch_warnings(), roundpipe.compile(model, devices=["cpu"] * 2) as piped:
        warnings.simplefilter("error")
        copies = list(piped.optim_parameters())
        optimizers = [torch.optim.SGD(part, lr=0.1) for part in (copies[:2], copies[2:])]
        for seed in range(6):
            model[0].requires_grad_(seed not in (1, 2))
            piped.forward_backward((batch(seed=seed),), loss_fn=square_loss)
            optimizer = optimizers[seed % 2]
            piped.step(lambda optimizer=optimizer: (optimizer.step(), optimizer.zero_grad()), is_async=False)


def test_a_write_that_changes_nothing_keeps_what_rounding_hides() -> None:
    def moved(clamps: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = mlp().bfloat16()
        with roundpipe.compile(model, devices=["cpu"]) as piped:
            optimizer = torch.optim.SGD(copies := list(piped.optim_parameters()), lr=1e-4)
            for _ in range(20):
                piped.forward_backward((batch(seed=0).bfloat16(),), loss_fn=lambda y, _: y.float().square().mean())
                piped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
                with torch.no_grad():
                    for parameter in model.parameters() if clamps else ():
                        parameter.clamp_(-100, 100)
            return torch.cat([copy.detach().flatten() for copy in copies])

    assert torch.equal(moved(True), moved(False))


def test_a_write_of_some_elements_leaves_the_others() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).bfloat16()
    with roundpipe.compile(model, devices=["cpu"]) as piped:
        optimizer = torch.optim.SGD(copies := list(piped.optim_parameters()), lr=1e-4)
        x = torch.randn(3, 4).bfloat16()
        for _ in range(2):
            piped.forward_backward((x,), loss_fn=lambda y, _: y.float().square().mean())
            piped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        before = copies[0].detach().clone()
        with torch.no_grad():
            model[0].weight[1] = 0.5
        piped.forward_backward((x,), loss_fn=lambda y, _: y.float().square().mean())
        piped.step(lambda: None, is_async=False)
        expected = before.clone()
        expected[1] = 0.5
        assert torch.equal(copies[0], expected)
        assert not torch.equal(before[0], before[0].bfloat16().float())


def test_states_of_an_optimizer_are_those_of_the_latest_update() -> None:
    model = mlp()
    with roundpipe.compile(model, devices=["cpu"] * 2) as piped:
        optimizer = torch.optim.Adam(piped.optim_parameters(), lr=0.1)
        for number in range(1, 4):
            piped.forward_backward((batch(seed=number),), loss_fn=square_loss)
            piped.step(lambda: (optimizer.step(), optimizer.zero_grad()))
            assert all(state["step"] == number for state in optimizer.state_dict()["state"].values())


def test_another_wrapper_sees_the_latest_update() -> None:
    trunk = mlp()
    model = nn.Sequential(trunk, nn.Linear(batch().shape[1], 3, dtype=batch().dtype))
    with (
        roundpipe.compile(model, devices=["cpu"] * 2) as piped,
        roundpipe.compile(trunk, devices=["cpu"]) as features,
    ):
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.5)
        for seed in range(3):
            piped.forward_backward((batch(seed=seed),), loss_fn=square_loss)
            piped.step(lambda: (optimizer.step(), optimizer.zero_grad()))
            with torch.no_grad():
                torch.testing.assert_close(features(batch()), trunk(batch()))


@pytest.mark.parametrize("is_own_loop", [False, True])
def test_hooks_of_copies_are_told_of(is_own_loop: bool) -> None:
    with (
        roundpipe.compile(mlp(), devices=["cpu"]) as piped,
        pytest.warns(UserWarning, match="which never run") as warned,
    ):
        optimizer = torch.optim.SGD(copies := list(piped.optim_parameters()), lr=0.1)
        copies[0].register_hook(lambda gradient: gradient.clamp(-1, 1))
        for seed in range(3):
            if is_own_loop:
                square_loss(piped(batch(seed=seed)), None).backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                piped.forward_backward((batch(seed=seed),), loss_fn=square_loss)
                piped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    assert len([each for each in warned if "which never run" in str(each.message)]) == 1


@pytest.mark.parametrize("way", ["by name", "as an argument", "at once"])
def test_an_optimizer_of_the_same_name_is_told_of(way: str) -> None:
    with warnings.catch_warnings(record=True) as caught, roundpipe.compile(mlp(), devices=["cpu"]) as piped:
        warnings.simplefilter("always")
        for lr in (0.1, 0.2, 0.3):
            optimizer = torch.optim.SGD(piped.optim_parameters(), lr=lr)
            for seed in range(2):
                piped.forward_backward((batch(seed=seed),), loss_fn=square_loss)
                if way == "as an argument":
                    piped.step(lambda own: (time.sleep(0.02), own.step(), own.zero_grad()), True, optimizer)
                else:
                    piped.step(
                        lambda: (time.sleep(0.02), optimizer.step(), optimizer.zero_grad()),  # noqa: B023
                        is_async=way == "by name",
                    )
        piped.synchronize()
    found = [str(each.message) for each in caught]
    assert len(found) == (way == "by name") and all("stood for other optimizers" in each for each in found)


@pytest.mark.parametrize("is_async", [False, True])
def test_an_embedding_that_grows_gets_another_copy(is_async: bool) -> None:
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6)).double()
    reference = copy.deepcopy(model)
    label = torch.arange(4)
    with roundpipe.compile(model, devices=["cpu"] * 2) as piped:
        for size in (6, 9):
            for net in (model, reference):
                weight = net[0].weight
                weight.data = torch.cat([weight.data, torch.ones(size - len(weight), 4, dtype=weight.dtype)])
            optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.1)
            other = torch.optim.SGD(reference.parameters(), lr=0.1)
            ids = torch.tensor([0, 3, size - 1, 2])
            piped.forward_backward((ids,), label=label, loss_fn=nn.functional.cross_entropy, loss_reduction="mean")
            piped.step(lambda own: (own.step(), own.zero_grad()), is_async, optimizer)
            nn.functional.cross_entropy(reference(ids), label).backward()
            other.step()
            other.zero_grad()
            piped.synchronize()
            for one, expected in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(one, expected)
