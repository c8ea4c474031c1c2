"""The optimizer's side against a plain module, whose gradients come from eager autograd."""

import copy
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from roundpipe.runtime.optimizer import update
from roundpipe.runtime.optimizer.grad_scaler import GradScaler
from roundpipe.runtime.optimizer.optimizer import OptimizerSide
from roundpipe.runtime.weights import fingerprint
from roundpipe.runtime.weights.fingerprint import Fingerprint
from tests.runtime.cases_optimizer import (
    LR,
    assert_same,
    gradient_at,
    loss_of,
    make_batches,
    make_model,
    make_step,
    weights_of,
)


@pytest.fixture
def model():
    return make_model()


@pytest.fixture
def side(model):
    side = OptimizerSide(model.named_parameters, name="test", deadline_s=20)
    yield side
    side.close()


def test_async_steps_are_one_step_behind(model, side):
    _, step_fn = make_step(side)
    batches = make_batches(7)
    weights = [{name: p.detach().clone() for name, p in model.named_parameters()}]
    for k, batch in enumerate(batches, start=1):
        gradient = gradient_at(weights[max(k - 2, 0)], batch)
        weights.append({name: w - LR * gradient[name] for name, w in weights[k - 1].items()})
        loss_of(model, batch).backward()
        side.step(step_fn)
        side.wait()
        assert_same(weights_of(side), weights[k], rtol=0, atol=1e-15)
        assert_same({n: p.detach() for n, p in model.named_parameters()}, weights[k - 1], rtol=0, atol=1e-15)


def test_sync_steps_are_eager(model, side):
    reference = copy.deepcopy(model)
    eager = torch.optim.SGD(reference.parameters(), lr=LR, momentum=0.9)
    _, step_fn = make_step(side, momentum=0.9)
    for batch in make_batches(5):
        loss_of(reference, batch).backward()
        eager.step()
        eager.zero_grad()
        loss_of(model, batch).backward()
        side.step(step_fn, is_async=False)
        assert_same(dict(model.state_dict()), dict(reference.state_dict()), rtol=0, atol=0)


NOTHING_CHANGED = "step_fn changed none of the parameters that have gradients.*model.optim_parameters"


@pytest.mark.parametrize("is_async", [True, False])
def test_an_optimizer_of_other_parameters_is_noticed_once(model, side, is_async):
    optimizer = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=LR)  # the mistake

    def step_fn():
        optimizer.step()
        optimizer.zero_grad()

    list(side.optim_parameters())
    with pytest.warns(UserWarning, match=NOTHING_CHANGED) as caught:
        for batch in make_batches(4):
            loss_of(model, batch).backward()
            side.step(step_fn, is_async=is_async)
            side.wait()
        side.synchronize()
    assert [one.filename for one in caught] == [__file__]


def scaled_step(side):
    scaler = GradScaler(init_scale=1.0)
    optimizer, _ = make_step(side)

    def step_fn():
        for one in side.optim_parameters():
            one.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()

    return step_fn


def through_data(side):
    def step_fn():
        for one in side.optim_parameters():
            one.data.sub_(LR * one.grad)

    return step_fn


def overflown(side):
    def step_fn():  # as with a scaler that is not ours
        for one in side.optim_parameters():
            one.grad.fill_(torch.inf)

    return step_fn


def dropped(side):
    return lambda: [setattr(one, "grad", None) for one in side.optim_parameters()]


def zeroed(side):
    return lambda: [one.grad.zero_() for one in side.optim_parameters()]


def without_gain(side):
    optimizer = torch.optim.AdamW(side.optim_parameters(), lr=0.0)  # as at the start of a warmup
    return lambda: (optimizer.step(), optimizer.zero_grad())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("make", [scaled_step, through_data, overflown, dropped, zeroed, without_gain])
def test_a_step_that_has_reasons_to_change_nothing_is_not_warned_of(model, side, make):
    step_fn = make(side)
    for batch in make_batches(3):
        loss_of(model, batch).backward()
        side.step(step_fn, is_async=False)
        if make is not through_data:
            assert_same(weights_of(side), {name: p.detach() for name, p in model.named_parameters()})
    side.synchronize()


@pytest.mark.filterwarnings("error")
def test_a_step_that_does_nothing_after_others_is_not_warned_of(model, side):
    _, step_fn = make_step(side)
    for number, batch in enumerate(make_batches(5)):
        loss_of(model, batch).backward()
        side.step((lambda: None) if number % 2 else step_fn)
        side.wait()
    side.synchronize()


@pytest.mark.filterwarnings("error")
def test_copies_are_compared_until_an_optimizer_of_them_has_stepped(model, side, monkeypatch):
    """A fused one leaves no mark, and what lies on a device shows no values either."""
    compared = []
    monkeypatch.setattr(fingerprint._Sample, "of", lambda parameter: None)  # as of what is not on the host
    look = SimpleNamespace(of=lambda copy: compared.append(copy) or Fingerprint.of(copy))
    monkeypatch.setattr(update, "Fingerprint", look)
    optimizer, copies = torch.optim.AdamW(side.optim_parameters(), lr=LR, fused=True), list(side.optim_parameters())
    for number, batch in enumerate(make_batches(5)):
        loss_of(model, batch).backward()
        side.step(lambda is_made=number >= 2: (is_made and optimizer.step(), optimizer.zero_grad()), is_async=False)
        assert len(compared) == min(number + 1, 3) * len(copies)


def test_mixed_steps(model, side):
    """A round after a step that is not asynchronous trains on its result, others on the one before."""
    _, step_fn = make_step(side)
    modes = [True, False, True, True, False, False, True]
    weights = [{name: p.detach().clone() for name, p in model.named_parameters()}]
    trained_on = 0
    for k, (batch, is_async) in enumerate(zip(make_batches(len(modes)), modes, strict=True), start=1):
        gradient = gradient_at(weights[trained_on], batch)
        weights.append({name: w - LR * gradient[name] for name, w in weights[k - 1].items()})
        loss_of(model, batch).backward()
        side.step(step_fn, is_async=is_async)
        trained_on = k - 1 if is_async else k
        side.wait()
        assert_same(weights_of(side), weights[k], rtol=0, atol=1e-15)


def test_async_step_returns_while_it_runs(model, side):
    release, ran_in = threading.Event(), []

    def step_fn(first, *, second):
        ran_in.append((threading.current_thread(), first, second))
        assert release.wait(10)

    side.step(step_fn, True, (1,), {"second": 2})
    assert threading.active_count() > 1
    release.set()
    side.wait()
    assert ran_in[0][0] is not threading.current_thread()
    assert ran_in[0][1:] == (1, 2)


def test_gradients_accumulate_over_rounds(model, side):
    """Two rounds before a step, and a step that zeroes nothing: as eager."""
    reference = copy.deepcopy(model)
    eager = torch.optim.SGD(reference.parameters(), lr=LR)
    optimizer = torch.optim.SGD(side.optim_parameters(), lr=LR)
    batches = iter(make_batches(6))
    for _ in range(3):
        for batch in (next(batches), next(batches)):
            loss_of(reference, batch).backward()
            loss_of(model, batch).backward()
        eager.step()
        side.step(optimizer.step, is_async=False)
        assert all(p.grad is None for p in model.parameters())
    assert_same(dict(model.state_dict()), dict(reference.state_dict()))
    side.synchronize()
    assert_same({n: p.grad for n, p in model.named_parameters()}, {n: p.grad for n, p in reference.named_parameters()})


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("is_async", [True, False])
def test_synchronize_shows_what_the_step_left(model, side, set_to_none, is_async):
    optimizer = torch.optim.SGD(side.optim_parameters(), lr=LR)

    def step_fn():
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)

    loss_of(model, make_batches(1)[0]).backward()
    side.step(step_fn, is_async=is_async)
    side.synchronize()
    assert_same({n: p.detach() for n, p in model.named_parameters()}, weights_of(side))
    for parameter in model.parameters():
        assert parameter.grad is None if set_to_none else not parameter.grad.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_synchronize_before_step_loses_nothing(dtype):
    model = make_model(dtype)
    side = OptimizerSide(model.named_parameters, torch.float64)
    optimizer = torch.optim.SGD(side.optim_parameters(), lr=LR)
    first, second = make_batches(2, dtype)
    loss_of(model, first).backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    for _ in range(2):
        side.synchronize()
        assert_same({n: p.grad for n, p in model.named_parameters()}, expected)
    side.begin_call(adds_gradients=False)
    assert_same({n: p.grad for n, p in model.named_parameters()}, expected)
    side.begin_call()
    assert all(p.grad is None for p in model.parameters())
    loss_of(model, second).backward()
    total = {n: expected[n].double() + p.grad.double() for n, p in model.named_parameters()}
    side.synchronize()
    assert_same({n: p.grad for n, p in model.named_parameters()}, {n: g.to(dtype) for n, g in total.items()})
    seen = {}
    side.step(lambda: seen.update({n: p.grad.clone() for n, p in side.optim_named_parameters()}))
    side.wait()
    assert_same(seen, total, rtol=0, atol=0)
    optimizer.zero_grad()
    side.close()


def test_shown_gradients_belong_to_the_user(model, side):
    """Clipping, replacing and clearing ``.grad`` after synchronize counts for the step."""
    seen = []

    def record():
        seen.append({n: None if p.grad is None else p.grad.clone() for n, p in side.optim_named_parameters()})

    list(side.optim_parameters())
    loss_of(model, make_batches(1)[0]).backward()
    side.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    model[0].bias.grad = torch.ones_like(model[0].bias)
    model[2].bias.grad = None
    weight = model[0].weight.grad.clone()
    side.step(record, is_async=False)
    torch.testing.assert_close(seen[0]["0.weight"], weight)
    assert seen[0]["0.bias"].eq(1).all()
    assert seen[0]["2.bias"] is None


def test_shown_gradients_modified_in_low_precision():
    model = make_model(torch.bfloat16)
    side = OptimizerSide(model.named_parameters, torch.float32)
    copies = dict(side.optim_named_parameters())
    loss_of(model, make_batches(1, torch.bfloat16)[0]).backward()
    side.synchronize()
    model[0].weight.grad.mul_(2)
    expected = model[0].weight.grad.float()
    side.begin_call()
    assert model[0].weight.grad is None
    torch.testing.assert_close(copies["0.weight"].grad, expected)


def test_optimizer_zero_grad_after_synchronize(model, side):
    optimizer, _ = make_step(side)
    first, second = make_batches(2)
    loss_of(model, first).backward()
    side.synchronize()
    optimizer.zero_grad()
    side.begin_call()
    loss_of(model, second).backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    side.synchronize()
    assert_same({n: p.grad for n, p in model.named_parameters()}, expected)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_clears_both_sides(model, side, set_to_none):
    list(side.optim_parameters())
    first, second = make_batches(2)
    loss_of(model, first).backward()
    side.synchronize()
    side.begin_call()
    loss_of(model, second).backward()
    side.zero_grad(set_to_none)
    side.synchronize()
    assert all(p.grad is None if set_to_none else not p.grad.any() for p in model.parameters())


def test_low_precision_weights_with_float32_copies():
    model = make_model(torch.bfloat16)
    before = {n: p.detach().float() for n, p in model.named_parameters()}
    side = OptimizerSide(model.named_parameters, torch.float32)
    assert_same(weights_of(side), before)
    storage = [p.data_ptr() for p in model.parameters()]
    _, step_fn = make_step(side)
    for batch in make_batches(3, torch.bfloat16):
        loss_of(model, batch).backward()
        gradient = {n: p.grad.float() for n, p in model.named_parameters()}
        side.step(step_fn, is_async=False)
        before = {n: w - LR * gradient[n] for n, w in before.items()}
        assert_same(weights_of(side), before)
        assert_same({n: p.detach() for n, p in model.named_parameters()}, {n: w.bfloat16() for n, w in before.items()})
    assert [p.data_ptr() for p in model.parameters()] == storage
    side.close()


def test_equal_dtypes_hand_the_gradient_over(model, side):
    loss_of(model, make_batches(1)[0]).backward()
    addresses = [p.grad.data_ptr() for p in model.parameters()]
    side.step(lambda: None, is_async=False)
    assert [p.grad.data_ptr() for p in side.optim_parameters()] == addresses
