"""Loads into the model behind the wrapper: they hold, before, between and during updates."""

from __future__ import annotations

import copy
import io
import time
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.runtime.optimizer.loading import LoadWatch

DTYPE = torch.float64


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to(DTYPE)


def train(piped: Any) -> None:
    piped.forward_backward((torch.randn(6, 6, dtype=DTYPE),), loss_fn=lambda outputs, _: outputs.square().sum())


def assert_same_weights(model: nn.Module, other: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def num_hooks(model: nn.Module) -> int:
    return len(model._load_state_dict_pre_hooks) + len(model._load_state_dict_post_hooks)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
def test_a_load_into_the_users_model_reaches_the_optimizer(trained: bool, is_async: bool) -> None:
    model, other = network(), network()
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.1)

        def update() -> None:
            time.sleep(0.05)  # a load that did not wait for it would be overwritten
            optimizer.step()
            optimizer.zero_grad()

        if trained:
            train(piped)
            piped.step(update, is_async=is_async)
        model.load_state_dict(other.state_dict())
        assert_same_weights(model, other)
        optimizer.param_groups[0]["lr"] = 0.0
        train(piped)
        piped.step(update, is_async=False)
        assert_same_weights(model, other)
        for copied, theirs in zip(piped.optim_parameters(), other.parameters(), strict=True):
            assert torch.equal(copied, theirs)


@pytest.mark.parametrize("behind", [False, True], ids=["wrapper", "model"])
def test_parameters_that_a_load_replaces_are_trained(behind: bool) -> None:
    """``assign=True`` gives the model other parameter objects; the optimizer's side follows them."""
    model, other = network(), network()
    reference = copy.deepcopy(other)
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.1)

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        train(piped)
        piped.step(update, is_async=False)
        before = model[0].weight
        train(piped)  # the parameters that are replaced take these gradients with them
        (model if behind else piped).load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
        assert model[0].weight is not before
        plain = torch.optim.SGD(reference.parameters(), lr=0.1)
        for _ in range(2):
            x = torch.randn(6, 6, dtype=DTYPE)
            reference(x).square().sum().backward()
            plain.step()
            plain.zero_grad()
            piped.forward_backward((x,), loss_fn=lambda outputs, _: outputs.square().sum())
            piped.step(update, is_async=False)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_a_model_that_holds_the_wrapped_one_may_load() -> None:
    model = network()
    whole, other = nn.ModuleDict({"inner": model}), nn.ModuleDict({"inner": network()})
    with roundpipe.RoundPipe(model, devices=["cpu"]) as piped:
        copies = list(piped.optim_parameters())
        whole.load_state_dict(other.state_dict())
        for copied, theirs in zip(copies, other.parameters(), strict=True):
            assert torch.equal(copied, theirs)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_load_into_a_part_of_the_model_reaches_the_optimizer(is_async: bool, assign: bool) -> None:
    model, other = nn.Sequential(network(), network()), network()
    reference = copy.deepcopy(model)
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.1)

        def update() -> None:
            time.sleep(0.05)
            optimizer.step()
            optimizer.zero_grad()

        train(piped)
        piped.step(update, is_async=is_async)
        piped.model[1].load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
        assert_same_weights(model[1], other)
        assert not torch.equal(model[0][0].weight, reference[0][0].weight)  # and the update is there
        before = copy.deepcopy(model)
        optimizer.param_groups[0]["lr"] = 0.0
        train(piped)
        piped.step(update, is_async=False)
        assert_same_weights(model, before)
        assert_same_weights(model[1], other)


def test_a_load_of_a_large_model_refreshes_each_copy_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(network() for _ in range(20)))
    with roundpipe.RoundPipe(model, devices=["cpu"]) as piped:
        # how often copies are refreshed shows in nothing but time
        optimizer = piped._session.optimizer
        train(piped)
        loaded: list[str] = []
        real = optimizer.after_load
        monkeypatch.setattr(
            optimizer, "after_load", lambda named: real([(loaded.append(n), (n, p))[1] for n, p in named])
        )
        waits: list[int] = []
        synchronize = optimizer.synchronize
        monkeypatch.setattr(optimizer, "synchronize", lambda: (waits.append(1), synchronize()))
        model.load_state_dict(model.state_dict())
    assert sorted(loaded) == sorted(name for name, _ in model.named_parameters()) and len(waits) == 1


def test_copies_and_pickles_of_the_model_do_nothing_to_it() -> None:
    model, other = network(), network()
    with roundpipe.RoundPipe(model, devices=["cpu"]) as piped:
        copies = [copied.detach().clone() for copied in piped.optim_parameters()]
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            twin.load_state_dict(other.state_dict())
            assert_same_weights(twin, other)
        with torch.no_grad():
            model[0].weight.zero_()  # what a refresh would show
        for copied, before in zip(piped.optim_parameters(), copies, strict=True):
            assert torch.equal(copied, before)


def test_hooks_end_with_the_wrapper() -> None:
    model, other = network(), network()
    for _ in range(2):
        with roundpipe.RoundPipe(model, devices=["cpu"]):
            assert num_hooks(model) == 2
        assert num_hooks(model) == 0
    piped = roundpipe.RoundPipe(model, devices=["cpu"])
    del piped
    assert num_hooks(model) == 0
    model.load_state_dict(other.state_dict())
    assert_same_weights(model, other)


def test_an_optimizer_that_is_gone_is_no_error() -> None:
    model, other = network(), network()
    piped = roundpipe.RoundPipe(network(), devices=["cpu"])
    # a watch is made by nothing public but a whole pipe
    watch = LoadWatch(model, piped._session.optimizer)
    piped.close()
    del piped
    model.load_state_dict(other.state_dict())
    watch.end()
    watch.end()
    assert num_hooks(model) == 0


def test_a_load_into_a_script_module_counts():
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    with roundpipe.RoundPipe(model, devices=["cpu"]) as piped:
        copies = dict(piped.optim_named_parameters())
        loaded = {name: torch.full_like(value, 3.0) for name, value in model.state_dict().items()}
        model.load_state_dict(loaded)
        piped.step(lambda: None, is_async=False)
        for name, value in loaded.items():
            assert torch.equal(copies[name], value) and torch.equal(model.state_dict()[name], value)
