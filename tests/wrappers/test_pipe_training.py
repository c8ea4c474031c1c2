"""Training through a `RoundPipe`: random draws, steps, synchronisation, loading."""

import copy
import threading
import time
import warnings

import pytest
import torch
from torch import nn

import roundpipe
from tests.runtime.models import (
    DTYPE,
    assert_equal_bits,
    assert_same,
    batch,
    config,
    eager_round,
    gradients,
    mlp,
    square_loss,
)
from tests.wrappers.cases_pipe import LR, threads, train_once


def dropouts():
    return nn.Sequential(
        nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 6), nn.Dropout(0.5)
    ).to(DTYPE)


def dropout_round(num_workers, grain, plan=None, calls=2):
    torch.manual_seed(1)
    model = dropouts()
    torch.manual_seed(5)
    with roundpipe.RoundPipe(model, devices=["cpu"] * num_workers) as piped:
        losses = [train_once(piped, grain=grain, plan=plan) for _ in range(calls)]
    return losses, gradients(model), torch.rand(())


def test_dropout_is_fixed_by_the_seed_for_any_rotation():
    losses, grads, after = dropout_round(1, "stage")
    assert losses[0] != losses[1], "each call draws anew"
    singles = roundpipe.ExecutePlan([(i, i + 1) for i in range(5)], (5, 6), [(i, i + 1) for i in reversed(range(5))])
    for num_workers, grain, plan in [(1, "layer", None), (2, "stage", None), (3, "layer", singles)]:
        others, other_grads, other_after = dropout_round(num_workers, grain, plan)
        assert all(torch.equal(a, b) for a, b in zip(others, losses, strict=True))
        assert_equal_bits(other_grads, grads)
        assert torch.equal(other_after, after), "the caller's generator advanced differently"


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_recomputation_repeats_the_draws(grain):
    class Draws(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))
            self.seen = []

        def forward(self, value):
            drawn = torch.rand(value.shape, dtype=DTYPE)
            self.seen.append((roundpipe.doing_recompute(), drawn))
            return value * drawn * self.weight

    model = nn.Sequential(*(Draws() for _ in range(3))).to(DTYPE)
    plan = roundpipe.ExecutePlan([(0, 2)], (2, 3), [(0, 2)])
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        train_once(piped, grain=grain, plan=plan)
    for layer in model[:2]:
        first = [drawn for again, drawn in layer.seen if not again]
        second = [drawn for again, drawn in layer.seen if again]
        assert len(first) == len(second) == 3
        for drawn in first:
            assert any(torch.equal(drawn, other) for other in second)
        assert not torch.equal(first[0], first[1])
    assert [again for again, _ in model[2].seen] == [False] * 3


def test_a_model_that_draws_nothing_leaves_the_generator_alone():
    before = torch.get_rng_state()
    model = mlp(3)
    torch.set_rng_state(before)
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        train_once(piped)
        piped(batch())
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_of_the_loss_function_do_not_disturb_the_caller():
    with roundpipe.RoundPipe(dropouts(), devices=["cpu"] * 3) as piped:
        torch.manual_seed(4)
        train_once(piped)
        first = torch.get_rng_state()
        torch.manual_seed(4)
        train_once(piped, num=2)
        assert torch.equal(torch.get_rng_state(), first)


def optimizer_of(kind, parameters):
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=LR, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=0.1)


def batches(num=5):
    return [batch(seed=10 + i) for i in range(num)]


def mean_loss(output, label):
    return output.square().mean()


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_synchronous_steps_follow_eager(kind, workers):
    model = mlp()
    reference = copy.deepcopy(model)
    eager_optimizer = optimizer_of(kind, reference.parameters())
    with roundpipe.RoundPipe(model, devices=["cpu"] * workers) as piped:
        optimizer = optimizer_of(kind, piped.optim_parameters())

        def step_fn():
            optimizer.step()
            optimizer.zero_grad()

        for one in batches():
            expected, _ = eager_round(reference, (one,), loss_fn=mean_loss, num=3)
            found = piped.forward_backward((one,), loss_fn=mean_loss, run_config=config(3))
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
            eager_optimizer.step()
            eager_optimizer.zero_grad()
            piped.step(step_fn, is_async=False)
        piped.synchronize()
        assert_same(dict(model.named_parameters()), dict(reference.named_parameters()))


@pytest.mark.parametrize("workers", [1, 2])
def test_asynchronous_steps_are_one_step_behind(workers):
    """``W_k = W_{k-1} - lr * grad(W_{max(k-2, 0)})``."""
    model = mlp()
    scratch = copy.deepcopy(model)
    weights = [{name: p.detach().clone() for name, p in model.named_parameters()}]
    losses = []
    for k, one in enumerate(batches(6), start=1):
        scratch.load_state_dict(weights[max(k - 2, 0)])
        scratch.zero_grad()
        losses.append(eager_round(scratch, (one,), loss_fn=mean_loss, num=3)[0])
        gradient = gradients(scratch)
        weights.append({name: w - LR * gradient[name] for name, w in weights[k - 1].items()})
    with roundpipe.RoundPipe(model, devices=["cpu"] * workers) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=LR)

        def step_fn():
            optimizer.step()
            optimizer.zero_grad()

        for one, expected in zip(batches(6), losses, strict=True):
            found = piped.forward_backward((one,), loss_fn=mean_loss, run_config=config(3))
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
            piped.step(step_fn)
        piped.synchronize()
        assert_same(dict(model.named_parameters()), weights[-1])


def test_an_asynchronous_step_does_not_block():
    release = threading.Event()
    with roundpipe.RoundPipe(mlp(), devices=["cpu"] * 2) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=LR)
        train_once(piped)

        def step_fn():
            assert release.wait(20)
            optimizer.step()

        piped.step(step_fn)
        loss = train_once(piped)
        assert not release.is_set() and torch.isfinite(loss)
        release.set()
        piped.synchronize()


def test_parameters_inside_step_fn_are_the_optimizers():
    model = mlp()
    with roundpipe.RoundPipe(model) as piped:
        copies = list(piped.optim_parameters())
        seen = {}

        def step_fn():
            seen["inside"] = list(piped.parameters())
            seen["named"] = dict(piped.named_parameters())

        train_once(piped)
        piped.step(step_fn, is_async=False)
        assert all(a is b for a, b in zip(seen["inside"], copies, strict=True))
        assert seen["named"].keys() == dict(model.named_parameters()).keys()
        assert all(a is b for a, b in zip(piped.parameters(), model.parameters(), strict=True))
        with roundpipe.OptimizerCtx():
            assert all(a is b for a, b in zip(piped.parameters(), copies, strict=True))


def test_an_exception_in_step_fn_is_raised_at_the_next_call():
    class Mine(Exception):
        pass

    def step_fn():
        raise Mine("in the step")

    with roundpipe.RoundPipe(mlp(), devices=["cpu"] * 2) as piped:
        train_once(piped)
        piped.step(step_fn)
        time.sleep(0.2)
        with pytest.raises(Mine, match="in the step"):
            train_once(piped)
        assert torch.isfinite(train_once(piped))


def test_closing_ends_threads_also_if_a_step_failed():
    def step_fn():
        raise ValueError("in the step")

    before = threads()
    piped = roundpipe.RoundPipe(mlp(), devices=["cpu"] * 2)
    train_once(piped)
    piped.step(step_fn)
    with pytest.raises(ValueError, match="in the step"):
        piped.close()
    piped.close()
    assert threads() <= before


def test_synchronize_before_step_loses_nothing():
    model = mlp()
    reference = copy.deepcopy(model)
    with roundpipe.RoundPipe(model) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=LR)
        eager_optimizer = torch.optim.SGD(reference.parameters(), lr=LR)
        for _ in range(2):
            eager_round(reference, (batch(),), num=3)
            train_once(piped)
            piped.synchronize()
            assert_same(gradients(model), gradients(reference))
        piped.step(optimizer.step, is_async=False)
        eager_optimizer.step()
        piped.synchronize()
        assert_same(dict(model.named_parameters()), dict(reference.named_parameters()))


def test_zero_grad_drops_what_was_accumulated():
    model = mlp()
    reference = copy.deepcopy(model)
    eager_round(reference, (batch(),), num=3)
    with roundpipe.RoundPipe(model) as piped:
        train_once(piped)
        piped.zero_grad()
        train_once(piped)
        piped.synchronize()
        assert_same(gradients(model), gradients(reference))


def test_loading_a_state_reaches_the_optimizer():
    model, other = mlp(), mlp()
    with roundpipe.RoundPipe(model) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.0)
        train_once(piped)
        piped.step(optimizer.step)
        piped.load_state_dict(other.state_dict())
        train_once(piped)
        piped.step(optimizer.step, is_async=False)
        piped.synchronize()
        assert_equal_bits(dict(model.named_parameters()), dict(other.named_parameters()))


def test_half_precision_weights_with_float32_copies():
    model = mlp().bfloat16()
    with roundpipe.RoundPipe(model, optim_dtype=torch.float32, devices=["cpu"] * 2) as piped:
        optimizer = torch.optim.AdamW(piped.optim_parameters(), lr=1e-4)
        assert all(p.dtype is torch.float32 for p in piped.optim_parameters())
        before = [p.clone() for p in piped.optim_parameters()]
        piped.forward_backward((batch().bfloat16(),), loss_fn=square_loss, run_config=config(3))
        piped.step(optimizer.step, is_async=False)
        assert all(p.dtype is torch.bfloat16 for p in model.parameters())
        for old, new, held in zip(before, piped.optim_parameters(), model.parameters(), strict=True):
            assert not torch.equal(old, new)
            assert torch.equal(held, new.bfloat16())


@pytest.mark.parametrize("is_async", [True, False])
def test_an_optimizer_with_some_of_the_models_own_parameters_trains_them(is_async):
    """As where a group of layers that were frozen is added."""
    model = mlp()
    model[0].requires_grad_(False)
    with roundpipe.compile(model, devices=["cpu"]) as piped:
        optimizer = torch.optim.SGD([each for each in piped.optim_parameters() if each.requires_grad], lr=LR)

        def train(steps=3):
            for number in range(steps):
                piped.forward_backward((batch(seed=number),), loss_fn=square_loss)
                piped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
            piped.synchronize()

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train()
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": [*model[0].parameters()]})
        before = next(model[0].parameters()).detach().clone()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train()
        assert not torch.equal(next(model[0].parameters()), before)
