"""Where everything has room by far, weights live on the device from the first step on; nobody sees a difference."""

import copy

import pytest
import torch

from roundpipe.runtime.engine import full_plans
from tests.runtime.cases_twins import (
    OPTIMIZERS,
    WIDTH,
    lives_there,
    model_of,
    moved,
    optimizer_of,
    save_and_load,
    wrapped,
)
from tests.runtime.models import assert_equal_bits, batch, square_loss
from tests.runtime.test_unasked import Loop, Own, average, run


@pytest.fixture(autouse=True)
def is_large_on_an_accelerator(monkeypatch):
    """As if the worker were on one, and the model large."""
    monkeypatch.setattr(full_plans, "LEAST_AT_ONCE_BYTES", 1)
    init = full_plans.FullPlans.__init__
    monkeypatch.setattr(full_plans.FullPlans, "__init__", lambda self, costs, accelerators: init(self, costs, True))


def same(between=lambda loop: None, *, ends_at=None, **options):
    """A run with "auto" gives what one with "off" gives, and lives on the device until a step."""
    streamed, where = run("off", between, **options)
    assert not any(where)
    found, where = run("auto", between, **options)
    assert all(where[:ends_at]) and not any(where[ends_at:] if ends_at else ()), where
    assert_equal_bits(found, streamed)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_numbers_are_those_of_streamed_weights_and_nothing_moves(is_async, accumulate, optimizer):
    same(is_async=is_async, accumulate=accumulate, optimizer=optimizer)
    model = model_of()
    with wrapped(model, "auto") as piped:
        loop = Loop(piped, model, is_async=is_async)
        loop.step()
        moved(piped)
        loop.step(2)
        assert lives_there(piped) and moved(piped) == (0, 0)


@pytest.mark.parametrize("number", [0, 2])
def test_copies_come_home_when_somebody_looks(number):
    def between(loop):
        if loop.number > number:
            loop.piped.synchronize()
            average(loop, loop.ours.param_groups[0]["params"])

    same(between, is_async=True, ends_at=number + 1)


def test_a_step_fn_that_uses_copies_with_tensors_of_the_host_is_right():
    # here both are the host, so that nothing tells of the mix: the numbers alone
    same(is_async=False, in_step=lambda loop: average(loop, loop.ours.param_groups[0]["params"]))


def trained(residency, make, memory_bytes=10**7, stepped=lambda piped, ours: piped.step(ours.step)):
    """What steps give with an optimizer that a function makes, and where weights were."""
    model, found, where = model_of(), [], []
    with wrapped(model, residency, memory_bytes=memory_bytes) as piped:
        ours = make(piped)
        for step in range(3):
            found.append(piped.forward_backward((batch(5, width=WIDTH, seed=step),), loss_fn=square_loss))
            where.append(lives_there(piped))
            ours = ours or OPTIMIZERS["AdamW"](piped.optim_parameters())
            stepped(piped, ours)
            ours.zero_grad()
        piped.synchronize()
        found += [parameter.detach().clone() for parameter in model.parameters()]
    return dict(enumerate(found)), where


def with_others(piped):
    return torch.optim.SGD([*piped.optim_parameters(), torch.nn.Parameter(torch.zeros(3))], lr=0.1)


def of_some(piped):
    return torch.optim.SGD(list(piped.optim_parameters())[1:], lr=0.1)


LATER = {
    "of a class of its own": lambda piped: Own(piped.optim_parameters(), lr=0.05),
    "of states that are not known": lambda piped: torch.optim.Adagrad(piped.optim_parameters(), lr=0.05),
    "with other parameters": with_others,
    "of some copies": of_some,
    "made behind the first call": lambda piped: None,
}


@pytest.mark.parametrize("name", LATER)
def test_not_with_an_optimizer(name):
    streamed, _ = trained("off", LATER[name])
    found, where = trained("auto", LATER[name])
    assert not any(where)
    assert_equal_bits(found, streamed)


def adamw(piped):
    return optimizer_of(piped, OPTIMIZERS["AdamW"])


def test_only_with_a_wide_margin():
    wheres = [trained("auto", adamw, memory_bytes)[1] for memory_bytes in range(8_000, 40_000, 2_000)]
    assert all(len(set(where)) == 1 for where in wheres)
    begins = [where[0] for where in wheres]
    assert begins == sorted(begins) and not begins[0] and begins[-1]
    # one that is asked for takes all there is
    assert trained("full", adamw, range(8_000, 40_000, 2_000)[begins.index(True) - 1])[1][-1]


def test_a_small_model_begins_when_it_is_measured(monkeypatch):
    monkeypatch.setattr(full_plans, "LEAST_AT_ONCE_BYTES", 10**6)
    _, where = trained("auto", adamw)
    assert not any(where)


def test_a_loop_that_steps_by_itself_has_the_copies_at_home():
    def stepped(piped, ours):
        piped.synchronize()
        ours.step()

    streamed, _ = trained("off", adamw, stepped=stepped)
    found, where = trained("auto", adamw, stepped=stepped)
    assert where == [True, False, False]
    assert_equal_bits(found, streamed)


@pytest.mark.parametrize("is_async", [False, True])
def test_states_that_were_loaded_before_the_first_step_go_there(is_async):
    def resumed(residency, state, steps):
        model = model_of()
        with wrapped(model, residency) as piped:
            loop = Loop(piped, model, is_async=is_async)
            if state is not None:
                loop.ours.load_state_dict(copy.deepcopy(state))
            loop.step(steps)
            assert lives_there(piped) is (residency == "auto")
            loop.piped.synchronize()
            found = [*loop.found, *(parameter.detach().clone() for parameter in model.parameters())]
            return dict(enumerate(found)), copy.deepcopy(loop.ours.state_dict())

    _, state = resumed("off", None, 2)
    (streamed, expected), (found, given) = resumed("off", state, 3), resumed("auto", state, 3)
    assert_equal_bits(found, streamed)
    for key, of_one in expected["state"].items():
        assert all(torch.equal(value, given["state"][key][name]) for name, value in of_one.items())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_it_takes_of_the_device_is_known_before_the_first_step(optimizer):
    model = model_of()
    parameters, passed_on_bytes = set(model.parameters()), sum(each.nbytes for each in model.parameters())
    with wrapped(model, "auto") as piped:
        loop = Loop(piped, model, is_async=False, optimizer=optimizer)
        loop.step()
        session = piped._session  # what is counted ahead shows nowhere else to the byte
        counted = session.engine.twins.of_workers[0].num_bytes - session.engine.twins.of_workers[0].weights_bytes
        loop.step()
        # gradients of the copies' dtype count as the model's; beside states there is a count of steps of each
        found = session.optimizer.device_bytes(parameters) - passed_on_bytes
        assert 0 <= found - counted <= 4 * len(parameters)


@pytest.mark.parametrize("is_async", [False, True])
def test_checkpoints(is_async, tmp_path):
    def between(loop):
        if loop.number in (1, 3):
            save_and_load(loop.piped, loop.model, loop.ours, loop.found, tmp_path / "saved")

    streamed, _ = run("off", between, is_async=is_async, steps=6)
    found, where = run("auto", between, is_async=is_async, steps=6)
    assert where[0]
    assert_equal_bits(found, streamed)
