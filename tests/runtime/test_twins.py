"""With residency="full" a model that fits lives on its device: nothing is streamed, and the numbers are the same."""

import itertools

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.errors import ConfigError
from roundpipe.runtime.device.backend import Device
from roundpipe.runtime.device.cpu import CpuBackend
from roundpipe.runtime.optimizer.optimizer import OptimizerSide
from tests.runtime.cases_twins import (
    NUM,
    OPTIMIZERS,
    PLANS,
    ROOM,
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
    train_scaled,
    wrapped,
    write,
    write_copies,
)
from tests.runtime.models import assert_equal_bits, batch, config, square_loss


def run(
    residency, *, is_async, optimizer="AdamW", steps=6, accumulate=1, plan=None, between=lambda *state: None, **options
):
    """What a run gives if ``between`` happens after each step, where weights were, and bytes of the last round."""
    model = model_of()
    found, where = [], []
    with wrapped(model, residency, PLANS[plan] if plan else None, **options) as piped:
        ours = optimizer_of(piped, OPTIMIZERS[optimizer])
        schedule = torch.optim.lr_scheduler.ExponentialLR(ours, 0.9)

        def update():
            torch.nn.utils.clip_grad_norm_(ours.param_groups[0]["params"], 0.5, foreach=False)
            ours.step()
            schedule.step()
            ours.zero_grad()

        for step in range(steps):
            for part in range(accumulate):
                x = batch(5, width=WIDTH, seed=10 * step + part)
                found.append(piped.forward_backward((x,), loss_fn=square_loss))
            piped.step(update, is_async=is_async)
            where.append(lives_there(piped))
            between(step, piped, model, ours, found)
        piped.synchronize()
        found += [parameter.detach().clone() for parameter in model.parameters()]
        last = moved(piped)
        piped.forward_backward((x,), loss_fn=square_loss)
        piped.step(update, is_async=is_async)
        piped.forward_backward((x,), loss_fn=square_loss)
        last = moved(piped)
    found += [parameter.detach().clone() for parameter in model.parameters()]
    return dict(enumerate(found)), where, last


@pytest.mark.parametrize("plan", [None, *PLANS])
@pytest.mark.parametrize("is_async", [False, True])
def test_numbers_are_those_of_streamed_weights_and_nothing_moves(is_async, plan):
    optimizer = "momentum" if plan else "AdamW"
    options = {"is_async": is_async, "accumulate": 1 if plan is None else 2, "plan": plan, "optimizer": optimizer}
    streamed, where, moved_bytes = run("auto", **options)
    assert not any(where) and all(moved_bytes)
    found, where, moved_bytes = run("full", **options)
    assert where == [False] + [True] * 5
    assert moved_bytes == (0, 0)
    assert_equal_bits(found, streamed)


ACTIONS = [
    [],
    [evaluate, read_state],
    [load_state],
    [write],
    [look_at_gradients],
    [save_and_load],
    [freeze, evaluate],
    [],
    [thaw],
    [write_copies],
    [],
]


@pytest.mark.parametrize("is_async", [False, True])
def test_whatever_happens_between_steps(is_async, tmp_path):
    def between(step, *state):
        for action in ACTIONS[step]:
            action(*state, *([tmp_path / "saved"] if action is save_and_load else []))

    options = {"is_async": is_async, "between": between, "steps": len(ACTIONS)}
    streamed, _, _ = run("auto", **options)
    found, where, moved_bytes = run("full", **options)
    assert where == [False] + [True] * (len(ACTIONS) - 1)
    assert moved_bytes == (0, 0)
    assert_equal_bits(found, streamed)


@pytest.mark.parametrize("is_async", [False, True])
def test_when_memory_runs_out_weights_come_home_and_the_call_goes_on_streamed(is_async, caplog):
    def between(step, piped, *state):
        if step == 2:
            piped.synchronize()
        if step == 2 and lives_there(piped):
            (backend,) = piped._session.engine.backends  # by the ledger: public numbers are sums
            backend.ledger.budget_bytes = backend.ledger.total_bytes + 64

    options = {"is_async": is_async, "plan": "stages", "accumulate": 2, "between": between}
    streamed, _, _ = run("auto", **options)
    found, where, moved_bytes = run("full", **options)
    assert where == [False, True, True, False, False, False] and all(moved_bytes)
    assert sum("ran out of device memory" in record.message for record in caplog.records) == 1
    assert_equal_bits(found, streamed)


class Mixed(nn.Module):
    """Tied, frozen and shared weights, buffers that a forward writes and one that it reads."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("shift", torch.full((WIDTH,), 0.5))
        self.unused = nn.Parameter(torch.ones(3))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, value):
        value = torch.tanh(self.frozen(self.norm(self.first(value))) + self.shift)
        return self.last(value)


def test_two_optimizers_a_scaler_tied_frozen_and_half_weights():
    def train(residency):
        torch.manual_seed(0)
        model, scaler = Mixed().bfloat16(), roundpipe.GradScaler(init_scale=256.0, growth_interval=2)
        run_config = config(NUM, residency=residency)
        devices = [Device("cpu", memory_bytes=ROOM)]
        with roundpipe.compile(model, devices=devices, model_run_config=run_config) as piped:
            assert {copy.dtype for copy in piped.optim_parameters()} == {torch.float32}
            losses, x = train_scaled(piped, scaler)
            assert lives_there(piped) == (residency == "full")
            last = moved(piped)
            piped.forward_backward((x,), loss_fn=square_loss)
            last = moved(piped)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        return {**state, **dict(enumerate(losses))}, last

    (streamed, _), (found, last) = train("auto"), train("full")
    buffer_bytes = 2 * 2 * WIDTH + 8  # statistics, which each visit may write
    assert last[0] <= buffer_bytes + 3 * 64 and last[1] <= buffer_bytes
    assert_equal_bits(found, streamed)


def test_a_limit_that_only_the_device_knows(monkeypatch):
    """Without ``memory_bytes``: a device tells how much it has, now a little more and now less."""
    told = itertools.cycle([ROOM, int(1.2 * ROOM), int(0.8 * ROOM)])

    def take_budget(backend):
        backend.memory_budget_bytes = next(told)
        return backend.memory_budget_bytes

    monkeypatch.setattr(CpuBackend, "take_budget", take_budget)
    begin = CpuBackend.__init__

    def init(backend, *args):
        begin(backend, *args)
        backend.take_budget()

    monkeypatch.setattr(CpuBackend, "__init__", init)
    states = []
    for residency in ("full", "off"):
        model = model_of()
        with wrapped(model, residency, memory_bytes=None) as piped:
            ours = optimizer_of(piped, OPTIMIZERS["AdamW"])
            for seed in range(7):
                piped.forward_backward((batch(5 + seed % 2, width=WIDTH, seed=seed),), loss_fn=square_loss)
                piped.step(lambda ours=ours: (ours.step(), ours.zero_grad()))
                assert lives_there(piped) is (residency == "full" and seed > 0)  # the first step shows the loop
            piped.synchronize()
            states.append([parameter.detach().clone() for parameter in model.parameters()])
    for full, streamed in zip(*states, strict=True):
        torch.testing.assert_close(full, streamed, rtol=0, atol=1e-12)


def test_what_can_not_live_there_is_streamed():
    model, x = model_of(), batch(5, width=WIDTH)

    def train(piped, step_fn, num=3):
        for _ in range(num):
            piped.forward_backward((x,), loss_fn=square_loss)
            piped.step(step_fn, is_async=False)
        return lives_there(piped)

    with wrapped(model, memory_bytes=6000) as piped:  # too little, but enough to stream
        assert not train(piped, lambda: None)
    with roundpipe.RoundPipe(model, devices="cpu", model_run_config=config(NUM, residency="full")) as piped:
        assert not train(piped, lambda: None)  # a device with the host's memory
    with wrapped(model) as piped:  # which evaluates the loss itself
        ours = torch.optim.LBFGS(piped.optim_parameters(), max_iter=2)

        def closure():
            ours.zero_grad()
            return piped.forward_backward((x,), loss_fn=square_loss)

        assert not train(piped, lambda: ours.step(closure))
    with wrapped(model) as piped:
        ours = optimizer_of(piped, OPTIMIZERS["AdamW"])
        assert train(piped, lambda: (ours.step(), ours.zero_grad()))
        piped(x).sum().backward()
        assert not lives_there(piped)
        assert not train(piped, lambda: (ours.step(), ours.zero_grad()))  # once and for all


@pytest.mark.parametrize("is_async", [False, True])
def test_weights_with_second_memory_on_the_host(is_async):
    options = {
        "is_async": is_async,
        "pin_model": "double",
        "between": lambda step, *rest: step == 3 and read_state(*rest),
    }
    assert_equal_bits(run("full", **options)[0], run("auto", **options)[0])


def test_a_forward_from_before_notices_new_weights():
    model, x = model_of(), batch(5, width=WIDTH)
    with wrapped(model) as piped:
        ours = optimizer_of(piped, OPTIMIZERS["AdamW"])
        for step in range(3):
            piped.forward_backward((x,), loss_fn=square_loss)
            if step:
                assert lives_there(piped)
            piped.step(lambda: (ours.step(), ours.zero_grad()), is_async=False)
            if step == 0:
                output = piped(x)
        with pytest.raises(roundpipe.BackwardError, match="changed in place since the RoundPipe forward"):
            output.sum().backward()


def test_weights_that_are_assigned_by_a_load_are_trained_from_there():
    found = []
    for residency in ("auto", "full"):
        model, x = model_of(), batch(5, width=WIDTH)
        with wrapped(model, residency) as piped:
            ours = optimizer_of(piped, OPTIMIZERS["AdamW"])
            for step in range(5):
                piped.forward_backward((x,), loss_fn=square_loss)
                piped.step(lambda ours=ours: (ours.step(), ours.zero_grad()))
                if step == 2:
                    state = {name: torch.full_like(value, 0.25) for name, value in model.state_dict().items()}
                    model.load_state_dict(state, assign=True)
            assert lives_there(piped) == (residency == "full")
            piped.synchronize()
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    assert_equal_bits(*found)


def test_weights_written_one_by_one_while_they_are_behind_are_refused():
    model, x = model_of(), batch(5, width=WIDTH)
    with wrapped(model) as piped:
        ours = optimizer_of(piped, OPTIMIZERS["AdamW"])
        for _ in range(2):
            piped.forward_backward((x,), loss_fn=square_loss)
            piped.step(ours.step, is_async=False)
        with torch.no_grad():
            model[0][0].weight.clamp_(-0.1, 0.1)
        with pytest.raises(ConfigError, match=r"0\.0\.weight: written while the latest weights were on the device"):
            piped.forward_backward((x,), loss_fn=square_loss)
        piped.synchronize()
        with torch.no_grad():
            model[0][0].weight.clamp_(-0.1, 0.1)
        piped.forward_backward((x,), loss_fn=square_loss)
        piped.step(lambda: None, is_async=False)
        piped.synchronize()
        assert float(model[0][0].weight.detach().abs().max()) <= 0.1


@pytest.mark.parametrize("fused", [False, True])
def test_states_are_where_the_copies_are(fused):
    model = nn.Linear(2, 2, bias=False)
    side = OptimizerSide(model.named_parameters)
    ours = torch.optim.AdamW(side.optim_parameters(), fused=fused)
    (pair,) = side.parameter_pairs()
    pair.copy.grad = torch.ones(2, 2)
    side.step(ours.step, is_async=False)
    here, state, there = pair.copy, ours.state[pair.copy], nn.Parameter(torch.empty(2, 2, device="meta"))
    ours.state[there], ours.param_groups[0]["params"] = ours.state.pop(pair.copy), [there]
    pair.copy = there
    # what the engine does around it needs a device that is not the CPU
    side._move_states(ours)
    assert {name: value.device.type for name, value in state.items()} == {
        "step": "meta" if fused else "cpu",
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }
    pair.copy = here  # whose values a model has at the end
    side.close()
