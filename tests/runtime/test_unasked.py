"""With residency="auto" weights may live on a device without that anyone has asked: nobody sees a difference."""

import copy
import io
import pickle
import random

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.watched import WatchedParameter
from roundpipe.runtime.engine import full_plans
from roundpipe.runtime.optimizer import as_on_host, device_side
from tests.runtime.cases_twins import (
    OPTIMIZERS,
    WIDTH,
    evaluate,
    freeze,
    lives_there,
    load_state,
    look_at_gradients,
    model_of,
    moved,
    optimizer_of,
    read_state,
    save_and_load,
    thaw,
    wrapped,
)
from tests.runtime.models import assert_equal_bits, batch, square_loss

FIRST = 6
"""Steps after which weights are there if nothing speaks against it."""


@pytest.fixture(autouse=True)
def takes_any_gain(monkeypatch):
    """As if the worker were on an accelerator on which every step is faster."""
    monkeypatch.setattr(full_plans, "AUTO_GAIN", -1e9)
    init = full_plans.FullPlans.__init__
    monkeypatch.setattr(full_plans.FullPlans, "__init__", lambda self, costs, accelerators: init(self, costs, True))


class Loop:
    """A training loop with what strangers do in it."""

    def __init__(self, piped, model, *, is_async, optimizer="AdamW", in_step=lambda *state: None):
        self.piped, self.model, self.is_async, self.in_step = piped, model, is_async, in_step
        self.ours = optimizer_of(piped, OPTIMIZERS[optimizer])
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.ours, 0.9)
        self.found, self.where, self.number = [], [], 0

    def update(self):
        torch.nn.utils.clip_grad_norm_(self.ours.param_groups[0]["params"], 0.5, foreach=False)
        self.ours.step()
        self.in_step(self)
        self.schedule.step()
        self.ours.zero_grad()

    def step(self, num=1, accumulate=1):
        for _ in range(num):
            for part in range(accumulate):
                x = batch(5, width=WIDTH, seed=10 * self.number + part)
                self.found.append(self.piped.forward_backward((x,), loss_fn=square_loss))
            handle = self.piped.step(self.update, is_async=self.is_async)
            self.where.append(lives_there(self.piped))
            self.number += 1
        return handle


def run(residency, between=lambda loop: None, *, is_async, steps=12, accumulate=1, **options):
    """All that a run gives, with ``between`` after each step; where weights were, and why not on the device."""
    model = model_of()
    with wrapped(model, residency) as piped:
        loop = Loop(piped, model, is_async=is_async, **options)
        for _ in range(steps):
            loop.step(accumulate=accumulate)
            between(loop)
        piped.synchronize()
        loop.found += [parameter.detach().clone() for parameter in model.parameters()]
        loop.found += [copy.detach().clone() for copy in piped.optim_parameters()]
    return dict(enumerate(loop.found)), loop.where


def same(between=lambda loop: None, *, ends_at=None, **options):
    """A run with "auto" gives what one with "off" gives, and lives on the device until a step."""
    streamed, where = run("off", between, **options)
    assert not any(where)
    found, where = run("auto", between, **options)
    assert not any(where[:3]) and where[FIRST], where
    assert all(where[FIRST:ends_at]) and not any(where[ends_at:] if ends_at else ()), where
    assert_equal_bits(found, streamed)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_numbers_are_those_of_streamed_weights_and_nothing_moves(is_async, accumulate):
    same(is_async=is_async, accumulate=accumulate)
    model = model_of()
    with wrapped(model, "auto") as piped:
        loop = Loop(piped, model, is_async=is_async)
        loop.step(FIRST + 2)
        moved(piped)
        loop.step(2)
        assert lives_there(piped) and moved(piped) == (0, 0)


@pytest.mark.parametrize("is_async", [False, True])
def test_the_hosts_weights_follow(is_async):
    """Behind a step that is waited for they are the latest, read one by one; behind others one step old at most."""

    def between(loop):
        if not is_async:
            loop.found += [parameter.detach().clone() for parameter in loop.model.parameters()]
        elif loop.number > FIRST:
            before = [parameter.detach().clone() for parameter in loop.model.parameters()]
            loop.step(2)
            for old, new in zip(before, loop.model.parameters(), strict=True):
                assert not torch.equal(old, new)

    same(between, is_async=is_async, steps=8)


def write(loop):
    with torch.no_grad():
        loop.model[1][0].weight.mul_(0.5)
        loop.model[0][0].bias.data.add_(0.25)  # of which torch takes no note


def test_weights_may_be_written_one_by_one_behind_steps_that_are_waited_for():
    same(lambda loop: loop.number > FIRST and write(loop), is_async=False)


@pytest.mark.parametrize("is_async", [False, True])
def test_what_reads_the_model_sees_the_latest_weights(is_async, tmp_path):
    def between(loop):
        x = batch(5, width=WIDTH, seed=99)
        if loop.number % 2:
            with torch.no_grad():
                loop.found.append(loop.piped.eval()(x))
                loop.found.append(loop.piped.forward_loss((x,), loss_fn=square_loss))
            loop.piped.train()
            loop.found.append(loop.model.eval()(x).detach())
            loop.model.train()
        loop.found += [value.clone() for value in loop.piped.state_dict().values()]
        loop.found += [value.clone() for value in copy.deepcopy(loop.model).state_dict().values()]
        if loop.number == 9:
            loop.piped.save_checkpoint(tmp_path / "saved", optimizer=loop.ours)
        if loop.number == 10:
            loop.piped.synchronize()
            loop.found += [each.grad.clone() for each in loop.model.parameters() if each.grad is not None]

    same(between, is_async=is_async)


def average(loop, copies):
    """An exponential average of the copies, in tensors of the host."""
    if not hasattr(loop, "averages"):
        loop.averages = [torch.zeros(each.shape, dtype=each.dtype) for each in copies]
    with torch.no_grad():
        for each, one in zip(loop.averages, copies, strict=True):
            each.lerp_(one, 0.25)
    loop.found += [each.clone() for each in loop.averages]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("way", ["held", "from the optimizer", "asked for"])
def test_averages_of_copies_outside_of_step_fn(way, is_async):
    def between(loop):
        if loop.number == 1:
            loop.held = list(loop.piped.optim_parameters())
        if loop.number > FIRST + 2:
            loop.piped.synchronize()
            if way == "asked for":
                average(loop, list(loop.piped.optim_parameters()))
            else:
                average(loop, loop.held if way == "held" else loop.ours.param_groups[0]["params"])
            assert type(next(iter(loop.ours.param_groups[0]["params"]))) is nn.Parameter
            assert not lives_there(loop.piped)

    def run_first(loop):
        between(loop)

    options = {"is_async": is_async}
    streamed, _ = run("off", run_first, **options)
    found, where = run("auto", run_first, **options)
    # who asks for the copies in the loop does not have them there at all
    assert where[FIRST + 3 :] == [False] * (12 - FIRST - 3)
    assert_equal_bits(found, streamed)


LOOKS = {
    "gradient": lambda copy: copy.grad,
    "device": lambda copy: copy.device,
    "sum": lambda copy: copy + 1,
    "in a list": lambda copy: torch.stack([copy, copy]),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda copy: torch.save([copy], io.BytesIO()),
    "data": lambda copy: copy.data,
    "numpy": lambda copy: copy.detach().numpy(),
    "norm": lambda copy: nn.utils.get_total_norm([copy]),
    "text": repr,
}


@pytest.mark.parametrize("look", LOOKS)
def test_copies_come_home_before_somebody_looks(look):
    model = model_of()
    with wrapped(model, "auto") as piped:
        loop = Loop(piped, model, is_async=True)
        held = loop.ours.param_groups[0]["params"]
        loop.step(FIRST + 1).wait()
        assert lives_there(piped) and all(type(each) is WatchedParameter for each in held)
        assert held[0].requires_grad and held[0].shape == held[0].size() and held[0] in set(held)
        loop.schedule.get_last_lr(), copy.deepcopy(loop.schedule.state_dict())
        assert lives_there(piped)
        LOOKS[look](held[0])
        assert not lives_there(piped) and all(type(each) is nn.Parameter for each in held)
        loop.step(3)
        assert not lives_there(piped)


def test_copies_are_watched_until_it_is_decided_that_they_stay(monkeypatch):
    monkeypatch.setattr(full_plans, "AUTO_GAIN", 1e9)
    model = model_of()
    with wrapped(model, "auto") as piped:
        loop = Loop(piped, model, is_async=True)
        (kinds, parameters) = [], loop.ours.param_groups[0]["params"]
        for _ in range(FIRST + 1):
            loop.step().wait()
            kinds.append({type(each) for each in parameters})
        assert {WatchedParameter} in kinds and kinds[-1] == {nn.Parameter} and not any(loop.where)


def test_clearing_gradients_outside_of_step_fn_is_no_look():
    model = model_of()
    with wrapped(model, "auto") as piped:
        ours = optimizer_of(piped, OPTIMIZERS["AdamW"])
        for step in range(10):
            piped.forward_backward((batch(5, width=WIDTH, seed=step),), loss_fn=square_loss)
            piped.step(ours.step)
            ours.zero_grad()
        assert lives_there(piped)


def test_copies_are_home_when_the_model_is_closed():
    model = model_of()
    with wrapped(model, "auto") as piped:
        loop = Loop(piped, model, is_async=True)
        loop.step(FIRST + 1)
        assert lives_there(piped)
        pairs = piped._session.optimizer.parameter_pairs()  # where copies are is told by them alone
    assert not any(pair.is_away for pair in pairs)
    assert all(type(each) is nn.Parameter for each in loop.ours.param_groups[0]["params"])


class Own(torch.optim.AdamW):
    """An optimizer of somebody else."""


def test_what_might_be_noticed_stays_on_the_host(caplog):
    x = batch(5, width=WIDTH)
    views = []

    def made(kind, *, lr=0.01, beside=(), views_of=0):
        def make(copies):
            copies = list(copies)
            views[:] = [each.detach() for each in copies[:views_of]]
            return kind([*copies, *beside], lr=lr)

        return make

    cases = {
        "Own is not one of torch's": made(Own),
        "has options that are tensors": made(torch.optim.AdamW, lr=torch.tensor(0.01)),
        "has other parameters, too": made(torch.optim.AdamW, beside=[nn.Parameter(torch.ones(2))]),
        "other tensors lie in the memory": made(torch.optim.AdamW, views_of=1),
    }
    for words, make in cases.items():
        caplog.clear()
        with caplog.at_level("INFO", logger="roundpipe"), wrapped(model_of(), "auto") as piped:
            ours = make(piped.optim_parameters())
            for _ in range(FIRST + 2):
                piped.forward_backward((x,), loss_fn=square_loss)
                piped.step(lambda ours=ours: (ours.step(), ours.zero_grad()))
                assert not lives_there(piped)
        assert sum(words in record.message for record in caplog.records) == 1, words


@pytest.mark.parametrize("is_async", [False, True])
def test_when_memory_runs_out_all_is_streamed(is_async):
    def between(loop):
        if loop.number == FIRST + 2:
            loop.piped.synchronize()
        if loop.number == FIRST + 2 and lives_there(loop.piped):
            (backend,) = loop.piped._session.engine.backends  # by the ledger: public numbers are sums
            backend.ledger.budget_bytes = backend.ledger.total_bytes + 64

    same(between, is_async=is_async, accumulate=2, ends_at=FIRST + 2)


def test_a_step_fn_that_uses_the_copies_with_tensors_of_the_host_is_the_last_there(monkeypatch):
    """Here the device is the host: the copies alone count as the device's."""
    copies = []
    monkeypatch.setattr(as_on_host.HostMix, "is_there", lambda self, tensor: any(tensor is each for each in copies))
    monkeypatch.setattr(as_on_host.HostMix, "to_host", lambda self, tensor: tensor.clone())
    monkeypatch.setattr(as_on_host.HostMix, "to_device", lambda self, tensor, device: tensor.clone())

    def in_step(loop):
        if loop.number > FIRST + 1:
            copies[:] = loop.ours.param_groups[0]["params"]
            average(loop, copies)
            copies.clear()

    same(is_async=False, in_step=in_step, ends_at=FIRST + 3)


@pytest.mark.parametrize("residency", ["auto", "full"])
def test_an_optimizers_state_is_given_in_tensors_of_the_host(residency, monkeypatch):
    model, asked = model_of(), []
    # where both are the host, only who is asked to move tells of a move
    moved_to = device_side._moved
    # as above
    monkeypatch.setattr(device_side, "_moved", lambda *given: asked.append(given[1]) or moved_to(*given))
    with wrapped(model, residency) as piped:
        loop = Loop(piped, model, is_async=True)
        for lives in (False, True):
            loop.step(FIRST * lives + 1).wait()
            assert lives_there(piped) == lives
            del asked[:]
            state = loop.ours.state_dict()["state"]
            num = len(list(model.parameters()))
            assert asked == [torch.device("cpu")] * num * lives and len(state) == num
        assert lives_there(piped)
        copied = copy.deepcopy(loop.schedule.state_dict()), pickle.loads(pickle.dumps(state))
        assert all(torch.equal(copied[1][key]["exp_avg"], state[key]["exp_avg"]) for key in state)


CHANGES = [evaluate, read_state, load_state, look_at_gradients, save_and_load, freeze, thaw]
"""What happens between steps, but for looks at the copies."""


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_between_steps(seed, tmp_path):
    """The order is drawn."""
    draw, is_async = random.Random(seed), bool(seed % 2)
    drawn = [draw.sample(CHANGES, draw.randint(0, 2)) for _ in range(9)]

    def between(loop):
        for change in drawn[loop.number - FIRST - 1] if loop.number > FIRST else ():
            folder = [tmp_path / "saved"] if change is save_and_load else []
            change(loop.piped, loop.model, loop.ours, loop.found, *folder)

    options = {"is_async": is_async, "steps": FIRST + 9, "accumulate": 1 + seed // 3}
    streamed, _ = run("off", between, **options)
    found, where = run("auto", between, **options)
    assert where[FIRST]
    assert_equal_bits(found, streamed)


def test_freezing_and_thawing():
    def between(loop):
        if loop.number in (FIRST + 1, FIRST + 3):
            loop.model[1].requires_grad_(loop.number > FIRST + 1)

    same(between, is_async=True)


def test_load_state_of_model_and_optimizer():
    def between(loop):
        if loop.number == FIRST + 2:
            loop.piped.load_state_dict({name: value * 0.5 for name, value in loop.piped.state_dict().items()})
        if loop.number == FIRST + 3:
            loop.piped.synchronize()
            state = copy.deepcopy(loop.ours.state_dict())
            for each in state["state"].values():
                each["exp_avg"].mul_(0.5)
            loop.ours.load_state_dict(state)

    streamed, _ = run("off", between, is_async=True)
    found, where = run("auto", between, is_async=True)
    assert where[FIRST]
    assert_equal_bits(found, streamed)


def test_a_cpu_worker_streams(monkeypatch):
    monkeypatch.undo()
    model = model_of()
    with wrapped(model, "auto") as piped:
        loop = Loop(piped, model, is_async=True)
        loop.step(FIRST + 4)
        assert not any(loop.where)
        assert isinstance(piped, roundpipe.RoundPipe)
