"""The optimizer's copies: dtypes, names, freezing, writes, errors, threads."""

import copy
import gc
import operator
import threading
import weakref

import pytest
import torch
from torch import nn

from roundpipe.core.errors import ClosedError, ConfigError, DeadlockError
from roundpipe.runtime.optimizer.optimizer import OptimizerSide
from roundpipe.runtime.optimizer.update import OptimizerCtx, inside_optimizer
from roundpipe.runtime.weights.gate import Gate, Gates
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


def test_names_ties_and_frozen_parameters(model):
    model[2].weight.requires_grad_(False)
    tied = nn.ModuleDict({"a": model, "b": model[0]})
    side = OptimizerSide(lambda: tied.named_parameters(remove_duplicate=False))
    assert [n for n, _ in side.optim_named_parameters()] == ["a.0.weight", "a.0.bias", "a.2.bias"]
    assert [n for n, _ in side.optim_named_parameters("x", remove_duplicate=False)] == [
        "x.a.0.weight", "x.a.0.bias", "x.a.2.bias", "x.b.weight", "x.b.bias",
    ]  # fmt: skip
    assert len(list(side.optim_parameters())) == 3
    assert all(isinstance(p, nn.Parameter) and p.device.type == "cpu" for p in side.optim_parameters())


def test_freezing_and_thawing(model, side):
    model[2].weight.requires_grad_(False)
    assert "2.weight" not in dict(side.optim_named_parameters())
    model[2].weight.requires_grad_(True)
    copies = dict(side.optim_named_parameters())
    assert copies["2.weight"].equal(model[2].weight)
    model[0].bias.requires_grad_(False)
    frozen = model[0].bias.detach().clone()
    optimizer = torch.optim.AdamW(copies.values(), lr=1.0, weight_decay=0.5)
    loss_of(model, make_batches(1)[0]).backward()
    side.step(optimizer.step, is_async=False)
    assert copies["0.bias"].grad is None
    assert model[0].bias.equal(frozen)
    assert not copies["2.weight"].equal(dict(make_model().named_parameters())["2.weight"])


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_parameter_frozen_with_a_gradient_left_takes_its_step(model, side, is_async):
    """As in eager mode, where an optimizer goes by gradients; without one it stays."""
    reference = copy.deepcopy(model)
    plain = torch.optim.SGD(reference.parameters(), lr=LR)
    optimizer = torch.optim.SGD(side.optim_parameters(), lr=LR)
    for each, update in ((reference, plain.step), (model, lambda: side.step(optimizer.step, is_async))):
        loss_of(each, make_batches(1)[0]).backward()
        each[0].bias.requires_grad_(False)
        update()
    plain.zero_grad()
    plain.step()
    side.step(lambda: (optimizer.zero_grad(), optimizer.step()), is_async)
    side.synchronize()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_weights_are_copied_in_only_when_an_update_changed_them(model, side):
    side.step(lambda: None)
    side.synchronize()
    with torch.no_grad():
        model[0].bias.fill_(7.0)
    side.synchronize()
    assert model[0].bias.eq(7.0).all()


def test_sparse_gradients():
    torch.manual_seed(0)
    model = nn.Embedding(6, 2, sparse=True)
    side = OptimizerSide(model.named_parameters, torch.float64)
    optimizer = torch.optim.SGD(side.optim_parameters(), lr=1.0)
    before = model.weight.detach().clone()
    for rows in ([0, 1], [1, 3]):
        model(torch.tensor(rows)).sum().backward()
        side.synchronize()
        side.begin_call()
    side.step(optimizer.step, is_async=False)
    assert (before - model.weight.detach()).round(decimals=5)[:, 0].tolist() == [1, 2, 0, 1, 0, 0]
    side.close()


def test_clipping_and_scheduler(model, side):
    reference = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(p, lr=0.05) for p in (side.optim_parameters(), reference.parameters())]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in optimizers]

    def update(index):
        nn.utils.clip_grad_norm_(optimizers[index].param_groups[0]["params"], 1e-2)
        optimizers[index].step()
        schedulers[index].step()
        optimizers[index].zero_grad()

    for batch in make_batches(5):
        loss_of(reference, batch).backward()
        update(1)
        loss_of(model, batch).backward()
        side.step(update, False, (0,))
    assert_same(dict(model.state_dict()), dict(reference.state_dict()))
    assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr() == [0.0125]


def test_lbfgs_calls_the_model_in_its_closure(model, side):
    reference = copy.deepcopy(model)
    batch = make_batches(1)[0]
    eager = torch.optim.LBFGS(reference.parameters(), max_iter=5)
    ours = torch.optim.LBFGS(side.optim_parameters(), max_iter=5)

    def eager_closure():
        eager.zero_grad()
        loss = loss_of(reference, batch)
        loss.backward()
        return loss

    def closure():
        ours.zero_grad()
        side.synchronize()
        side.begin_call()
        loss = loss_of(model, batch)
        loss.backward()
        side.synchronize()
        return loss

    eager.step(eager_closure)
    side.step(lambda: ours.step(closure), is_async=False)
    assert_same(dict(model.state_dict()), dict(reference.state_dict()))


@pytest.mark.parametrize("is_async", [True, False])
def test_parameters_are_the_optimizers_inside_step_fn(side, is_async):
    seen = []
    side.step(lambda: seen.append(inside_optimizer()), is_async=is_async)
    side.wait()
    assert seen == [True]
    assert not inside_optimizer()
    with OptimizerCtx(), OptimizerCtx():
        assert inside_optimizer()
    assert not inside_optimizer()


def test_async_error_is_raised_at_the_next_call_and_loses_no_gradient(model, side):
    class UserError(Exception):
        pass

    def fail():
        raise UserError("no")

    _, step_fn = make_step(side)
    side.step(fail)
    side.wait()
    loss_of(model, make_batches(1)[0]).backward()
    with pytest.raises(UserError, match="no") as caught:
        side.begin_call()
    assert caught.value.__notes__ == ["roundpipe: raised in step_fn of step 1 of test"]
    side.begin_call()
    before = weights_of(side)
    side.step(step_fn)
    side.wait()
    assert not before["0.weight"].equal(weights_of(side)["0.weight"])


def test_async_error_is_raised_by_step_synchronize_and_close(model):
    def fail():
        raise ZeroDivisionError

    for call in ("synchronize", "close", "refresh"):  # zero_grad does not wait for it
        side = OptimizerSide(model.named_parameters)
        side.step(fail)
        with pytest.raises(ZeroDivisionError):
            getattr(side, call)()
        side.close()
    side = OptimizerSide(model.named_parameters)
    side.step(fail)
    with pytest.raises(ZeroDivisionError):
        side.step(fail)
    with pytest.raises(ZeroDivisionError):
        side.step(fail, is_async=False)
    side.synchronize()
    side.close()


def test_refresh_starts_from_the_models_weights(model, side):
    _, step_fn = make_step(side)
    loss_of(model, make_batches(1)[0]).backward()
    side.step(step_fn)
    side.synchronize()
    model.load_state_dict({n: torch.full_like(w, 2.0) for n, w in model.state_dict().items()})
    side.refresh()
    side.synchronize()
    assert all(p.eq(2.0).all() for p in model.parameters())
    assert all(p.eq(2.0).all() for p in side.optim_parameters())


def test_misuse_is_refused(model, side):
    with pytest.raises(ConfigError, match="step_fn is 3"):
        side.step(3)
    with pytest.raises(ConfigError, match=r"step\(\) was called inside step_fn"):
        side.step(lambda: side.step(lambda: None), is_async=False)
    side.step(lambda: side.synchronize())
    with pytest.raises(ConfigError, match="inside an asynchronous step_fn"):
        side.synchronize()
    with pytest.raises(ConfigError, match="weight is on the meta device"):
        next(OptimizerSide(nn.Linear(1, 1, device="meta").named_parameters).optim_parameters())


def test_waiting_has_a_deadline(model):
    side = OptimizerSide(model.named_parameters, name="slow", deadline_s=0.05)
    release = threading.Event()
    handle = side.step(lambda: release.wait(10))
    with pytest.raises(DeadlockError, match=r"synchronize\(\) of slow waits for update 1 in thread roundpipe-optim"):
        side.synchronize()
    release.set()
    assert handle.wait(10)
    side.close()


def test_close_ends_the_thread(model):
    threads = set(threading.enumerate())
    side = OptimizerSide(model.named_parameters)
    assert set(threading.enumerate()) == threads
    side.step(lambda: None, is_async=False)  # it copies in the thread, too
    (thread,) = set(threading.enumerate()) - threads
    assert thread.daemon
    side.close()
    side.close()
    assert not thread.is_alive()
    for call in (side.synchronize, side.begin_call, lambda: side.step(lambda: None)):
        with pytest.raises(ClosedError, match="was closed"):
            call()


def test_garbage_collection_ends_the_thread(model):
    threads = set(threading.enumerate())
    side = OptimizerSide(model.named_parameters)
    side.step(lambda: None)
    side.wait()
    (thread,) = set(threading.enumerate()) - threads
    reference = weakref.ref(side)
    del side
    gc.collect()
    thread.join(5)
    assert reference() is None and not thread.is_alive()


class RecordingGate(Gate):
    """Notes what it is told, and lets the optimizer's thread open nothing until the test says so."""

    def __init__(self):
        super().__init__()
        self.events = []
        self.may_open = threading.Event()

    def close(self, parameters):
        parameters = list(parameters)
        self.events.append(("close", len(parameters), threading.current_thread() is threading.main_thread()))
        super().close(parameters)

    def open(self, parameters):
        assert self.may_open.wait(10)
        super().open(parameters)


def test_weights_are_handed_over_in_the_optimizer_thread(model):
    gates = Gates()
    gate = gates.weights = RecordingGate()
    gate.may_open.set()
    side = OptimizerSide(model.named_parameters, gates=gates)
    _, step_fn = make_step(side)
    weights = [weights_of(side)]
    for k, batch in enumerate(make_batches(3), start=1):
        gate.wait(model.parameters(), "test")
        gate.may_open.clear()
        gate.events.clear()
        loss_of(model, batch).backward()
        gradient = gradient_at(weights[max(k - 2, 0)], batch)
        weights.append({n: w - LR * gradient[n] for n, w in weights[-1].items()})
        side.step(step_fn)
        assert gate.events == [("close", 4, True)]
        with pytest.raises(DeadlockError, match="4 parameters"):
            # only this wait is to fail, and no other
            gate._deadline_s = 0.05
            gate.wait(model.parameters(), "a worker")
        # only this wait is to fail, and no other
        gate._deadline_s = 10
        gate.may_open.set()
        for one in (gate, gates.gradients):
            one.wait(model.parameters(), "a worker")
        side.wait()
        assert_same(weights_of(side), weights[k], rtol=0, atol=1e-15)
    side.synchronize()
    side.close()


class Interrupting:
    """Passes calls of some methods on and raises KeyboardInterrupt, as Ctrl-C does, before or behind one of them."""

    def __init__(self, target, method, behind):
        self._target, self._method, self._behind, self.left = target, method, behind, 1

    def __getattr__(self, name):
        real = getattr(self._target, name)
        if name != self._method or not self.left:
            return real

        def call(*arguments):
            self.left = 0
            if self._behind:
                real(*arguments)
            raise KeyboardInterrupt

        return call


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("where", ["_updates._gates.close", "_scalers.begin_step", "_updates._thread.submit"])
def test_an_interrupted_step_was_made_or_not(model, where, behind):
    """Nobody waits for ever, and no gradient is lost: a step that was not made can be made again."""
    gates = Gates(deadline_s=10)
    side = OptimizerSide(model.named_parameters, gates=gates, deadline_s=10)
    _, step_fn = make_step(side)
    *path, holder, method = where.split(".")
    owner = operator.attrgetter(*path)(side) if path else side
    before, batch = weights_of(side), make_batches(1)[0]
    gradient = gradient_at(before, batch)
    loss_of(model, batch).backward()
    real = getattr(owner, holder)
    setattr(owner, holder, Interrupting(real, method, behind))
    with pytest.raises(KeyboardInterrupt):
        side.step(step_fn)
    setattr(owner, holder, real)
    for gate in (gates.weights, gates.gradients):
        gate.wait(model.parameters(), "a worker")
    if side.num_steps == 0:
        assert_same(weights_of(side), before)
        assert all(p.grad is not None for p in model.parameters())
        side.step(step_fn)
    side.synchronize()
    assert side.num_steps == 1
    assert_same(weights_of(side), {n: w - LR * gradient[n] for n, w in before.items()}, rtol=0, atol=1e-15)
    side.close()


def test_every_parameter_is_opened_after_an_error(model, monkeypatch):
    gates = Gates(deadline_s=10)
    side = OptimizerSide(model.named_parameters, gates=gates)

    def fail(pair, together, late):
        raise ZeroDivisionError

    monkeypatch.setattr("roundpipe.runtime.weights.master_weights.ParameterPair.take_gradient", fail)
    side.step(lambda: pytest.fail("must not run"))
    for gate in (gates.weights, gates.gradients):
        gate.wait(model.parameters(), "a worker")
    with pytest.raises(ZeroDivisionError):
        side.close()


def test_zero_grad_clears_parameters_that_were_replaced(model, side):
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    loss_of(model, make_batches(1)[0]).backward()
    side.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
