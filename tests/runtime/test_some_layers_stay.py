"""Where not all that is trained has room on the device, some layers live there; the numbers are the same."""

import functools

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.runtime.engine import full_plans, plans_beside
from roundpipe.runtime.optimizer import as_on_host, unasked
from tests.runtime import test_twins, test_unasked
from tests.runtime.cases_twins import OPTIMIZERS, ROOM, WIDTH, moved, optimizer_of, save_and_load, train_scaled, wrapped
from tests.runtime.models import DTYPE, assert_equal_bits, batch, mlp, square_loss

LAYER_BYTES = (WIDTH * WIDTH + WIDTH) * 8
ONE_OF_THREE = 11_000
"""Bytes of a device on which the weights of one layer stay."""
EIGHT_LAYERS = 27_000


class Factored(torch.optim.Optimizer):
    """With states of other shapes than the parameters', some of them in a list, as in Adafactor."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is None:
                    continue
                state, square = self.state[each], each.grad.square() + 1e-8
                if not state:
                    state["means"] = [torch.zeros_like(square.mean(dim, keepdim=True)) for dim in range(each.ndim)]
                scale = torch.ones_like(each)
                for dim, mean in enumerate(state["means"]):
                    mean.lerp_(square.mean(dim, keepdim=True), 0.2)
                    scale *= mean.rsqrt()
                each.sub_(each.grad * scale, alpha=group["lr"])


KINDS = {
    **OPTIMIZERS,
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, foreach=True),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, fused=True),
    "momentum foreach": lambda parameters: torch.optim.SGD(
        parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True
    ),
    "Factored": lambda parameters: Factored(parameters, {"lr": 0.01}),
}


def number_there(piped):
    """How many parameters live on the device."""
    twins = piped._session.engine.twins  # what is private to the runtime tells where weights are
    return sum(twins.get(each) is not None for each in piped.model.parameters())


def one_stage(depth):
    """A plan that is given, so that what stays goes by memory alone."""
    return ExecutePlan([], (0, depth), [])


def eight_layers(residency):
    """A model of which some layers fit the device beside its plan, and its wrapper."""
    torch.manual_seed(4)
    model = mlp(8, WIDTH).to(DTYPE)
    return model, wrapped(model, residency, memory_bytes=EIGHT_LAYERS)


def train(residency, *, depth=3, steps=4, is_async=True, optimizer="AdamW", memory_bytes=ONE_OF_THREE, plan=None):
    """What a run gives, how many parameters live on the device at its end, bytes that a round moves, and the peak."""
    torch.manual_seed(4)
    plan = plan or one_stage(depth)
    model, found = mlp(depth, WIDTH).to(DTYPE), []
    with wrapped(model, residency, plan, memory_bytes) as piped:
        ours = optimizer_of(piped, KINDS[optimizer])

        def update():
            torch.nn.utils.clip_grad_norm_(ours.param_groups[0]["params"], 0.5, foreach=False)
            ours.step()
            ours.zero_grad()

        for step in range(steps + 1):
            if step == steps:
                piped.synchronize()
                moved(piped)
            found.append(piped.forward_backward((batch(5, width=WIDTH, seed=step),), loss_fn=square_loss))
            piped.step(update, is_async=is_async)
        piped.synchronize()
        found += [parameter.detach().clone() for parameter in model.parameters()]
        return dict(enumerate(found)), number_there(piped), moved(piped), piped.peak_device_bytes()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("plan", [None, ExecutePlan([(0, 2)], (2, 3), [(1, 2), (0, 1)])])
def test_the_rest_is_streamed_and_the_numbers_are_the_same(is_async, plan):
    options = {"is_async": is_async, "plan": plan, "memory_bytes": ONE_OF_THREE if plan is None else 10_000}
    streamed, none, all_bytes, _ = train("off", **options)
    found, number, moved_bytes, peak_bytes = train("full", **options)
    visits = [1, 1, 1] if plan is None else [2, 2, 1]  # of each layer
    assert none == 0 and all_bytes == (sum(visits) * LAYER_BYTES, 3 * LAYER_BYTES)
    assert number == 2 and moved_bytes == (sum(visits[1:]) * LAYER_BYTES, 2 * LAYER_BYTES)
    assert peak_bytes <= options["memory_bytes"]
    assert_equal_bits(found, streamed)


@pytest.mark.parametrize("optimizer", KINDS)
def test_the_more_room_there_is_the_more_layers_stay(optimizer):
    streamed, _, _, _ = train("off", depth=8, optimizer=optimizer, memory_bytes=16_000)
    numbers = []
    for memory_bytes in range(16_000, 40_000, 3_000):
        found, number, moved_bytes, peak_bytes = train("full", depth=8, optimizer=optimizer, memory_bytes=memory_bytes)
        rest_bytes = (16 - number) // 2 * LAYER_BYTES
        numbers.append(number)
        assert moved_bytes == (rest_bytes, rest_bytes) and peak_bytes <= memory_bytes
        assert_equal_bits(found, streamed)
    assert numbers == sorted(numbers) and len(set(numbers)) > 3 and numbers[-1] == 16


def test_updates_may_use_copies_of_both_places_together(monkeypatch):
    entered = []
    # here both are the host, so that only who makes it possible tells
    monkeypatch.setattr(unasked, "as_on_host", lambda device: entered.append(device) or as_on_host.as_on_host(device))
    train("full", memory_bytes=ROOM)
    assert not entered
    train("full", steps=4)
    assert len(entered) == 4  # the first update is of streamed weights


@pytest.mark.parametrize("is_async", [False, True])
def test_whatever_happens_between_steps(is_async, tmp_path):
    def between(step, *state):
        numbers.append(number_there(state[0]))
        for action in test_twins.ACTIONS[step]:
            action(*state, *([tmp_path / "saved"] if action is save_and_load else []))

    steps, numbers = len(test_twins.ACTIONS), []
    options = {"is_async": is_async, "between": between, "steps": steps, "memory_bytes": ONE_OF_THREE}
    streamed, _, _ = test_twins.run("off", plan="one stage", **options)
    assert numbers == [0] * steps
    found, where, _ = test_twins.run("full", plan="one stage", **options)
    assert where == [False] + [True] * (steps - 1) and numbers[steps + 1 :] == [2] * (steps - 1)
    assert_equal_bits(found, streamed)


def test_evaluations_find_them_there_and_larger_calls_let_fewer_stay():
    def run(residency):
        (model, piped), found, numbers = eight_layers(residency), [], []
        with piped:
            ours = optimizer_of(piped, OPTIMIZERS["AdamW"])
            for step, num_rows in enumerate((4, 4, 4, 32, 4, 4)):
                x = batch(num_rows, width=WIDTH, seed=step)
                found.append(piped.forward_backward((x,), loss_fn=square_loss))
                numbers.append(number_there(piped))
                piped.step(lambda: (ours.step(), ours.zero_grad()))
                found.append(piped.forward_loss((batch(4, width=WIDTH, seed=99),), loss_fn=square_loss))
                numbers.append(number_there(piped))
            found += [parameter.detach().clone() for parameter in model.parameters()]
        return dict(enumerate(found)), numbers

    streamed, none = run("off")
    found, numbers = run("full")
    assert not any(none) and numbers == [0, 0, *sorted(numbers[2:], reverse=True)]
    assert numbers[2] == numbers[5] > numbers[-1] > 0
    assert_equal_bits(found, streamed)


def test_rounds_overlap_where_the_plan_that_streams_has_never_run():
    """More memory, and with it new plans: the one that streams is not needed any more, so it is never proven."""
    _, piped = eight_layers("full")
    with piped:
        ours = optimizer_of(piped, OPTIMIZERS["AdamW"])

        def step():
            piped.forward_backward((batch(4, width=WIDTH),), loss_fn=square_loss)
            piped.step(lambda: (ours.step(), ours.zero_grad()))
            return piped._session.log.latest.overlaps  # else it shows in seconds alone

        overlaps = [step() for _ in range(4)]
        piped._runner.builder.plans.set_budgets([34_000])  # no public call changes a device's memory
        overlaps += [step() for _ in range(3)]
        assert 0 < number_there(piped) < 16
    assert overlaps[3] and not overlaps[4] and all(overlaps[5:]), overlaps


@pytest.mark.parametrize("accumulate", [1, 2])
def test_stages_beside_them_are_looked_at_again_once_steps_were_measured(accumulate, monkeypatch):
    """The other ones are taken from an update on, and run with the same layers there."""
    singles = ExecutePlan([(i, i + 1) for i in range(7)], (7, 8), [(i, i + 1) for i in reversed(range(7))])
    real, asked = plans_beside.choose_plan, []

    def choose(costs, **arguments):
        is_again = bool(numbers) and numbers[-1][0] > 0  # layers live there
        asked.append(is_again)
        return singles if is_again else real(costs, **arguments)

    def run(residency):
        numbers.clear()
        (model, piped), found = eight_layers(residency), []
        with piped:
            ours = optimizer_of(piped, OPTIMIZERS["AdamW"])
            for step in range(9):
                for part in range(accumulate):
                    x = batch(4, width=WIDTH, seed=2 * step + part)
                    found.append(piped.forward_backward((x,), loss_fn=square_loss))
                    numbers.append((number_there(piped), len(piped.report().stages)))
                piped.step(lambda: (ours.step(), ours.zero_grad()))
            piped.synchronize()
            found += [parameter.detach().clone() for parameter in model.parameters()]
        return dict(enumerate(found))

    numbers = []
    streamed = run("off")
    monkeypatch.setattr(full_plans, "AUTO_GAIN", -1e9)
    monkeypatch.setattr(plans_beside, "choose_plan", choose)
    found = run("full")
    assert_equal_bits(found, streamed)
    there, stages = zip(*numbers, strict=True)
    assert 0 < there[-1] < 16 and set(there) == {0, there[-1]}
    changed = stages.index(15)
    assert set(stages[changed:]) == {15} and 15 not in stages[:changed] and changed % accumulate == 0
    assert asked.count(True) == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_when_memory_runs_out_fewer_layers_stay(is_async, caplog):
    def run(residency):
        (model, piped), found, numbers = eight_layers(residency), [], []
        with piped:
            ours = optimizer_of(piped, OPTIMIZERS["AdamW"])
            for step in range(8):
                if step == 3:
                    piped.synchronize()
                if step == 3 and number_there(piped):
                    (backend,) = piped._session.engine.backends  # by the ledger: public numbers are sums
                    backend.ledger.budget_bytes = max(backend.ledger.total_bytes + 64, 17_000)
                found.append(piped.forward_backward((batch(4, width=WIDTH, seed=step),), loss_fn=square_loss))
                numbers.append(number_there(piped))
                piped.step(lambda: (ours.step(), ours.zero_grad()), is_async=is_async)
            piped.synchronize()
            found += [parameter.detach().clone() for parameter in model.parameters()]
        return dict(enumerate(found)), numbers

    streamed, _ = run("off")
    found, numbers = run("full")
    assert numbers[2] > numbers[3] and numbers[3:] == sorted(numbers[3:], reverse=True)
    assert any("ran out of device memory" in record.message for record in caplog.records)
    assert_equal_bits(found, streamed)


@pytest.mark.parametrize("has_bias", [False, True])
def test_tied_half_weights_with_two_optimizers_and_a_scaler(has_bias):
    """The last layer has the first one's weight, and maybe a bias that is streamed."""

    def run(residency):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5)]
        last = nn.Linear(WIDTH, WIDTH, bias=has_bias)
        last.weight = layers[0][0].weight
        model = nn.Sequential(*layers, last).bfloat16()
        scaler = roundpipe.GradScaler(init_scale=256.0, growth_interval=2)
        with wrapped(model, residency, one_stage(6), 7_500, optim_dtype=torch.float32) as piped:
            losses, _ = train_scaled(piped, scaler)
            optimizer = piped._session.optimizer  # as above
            names = {name for name, each in model.named_parameters() if optimizer.lives_there(each)}
        state = {name: value.clone() for name, value in model.state_dict().items()}
        return {**state, **dict(enumerate(losses))}, names

    (streamed, none), (found, names) = run("off"), run("full")
    assert not none and {"0.0.weight", "0.0.bias"} <= names and "4.0.weight" not in names and "5.bias" not in names
    assert_equal_bits(found, streamed)


class Adapted(nn.Module):
    """A frozen layer beside one that is trained, as with LoRA."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(16 * WIDTH, 16 * WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(16 * WIDTH, 2, bias=False), nn.Linear(2, 16 * WIDTH, bias=False)

    def forward(self, value):
        return torch.tanh(self.base(value) + self.up(self.down(value)))


@pytest.mark.parametrize("is_async", [False, True])
def test_small_trained_weights_all_stay_and_frozen_ones_as_far_as_there_is_room(is_async):
    base_bytes = ((16 * WIDTH) ** 2 + 16 * WIDTH) * 4

    def run(residency):
        torch.manual_seed(4)
        model, found = nn.Sequential(*(Adapted() for _ in range(6))), []
        plan = ExecutePlan([(0, 2), (2, 4)], (4, 6), [(2, 4), (0, 2)])
        with wrapped(model, residency, plan, 450_000) as piped:
            ours = optimizer_of(piped, OPTIMIZERS["AdamW"])
            for step in range(5):
                if step == 4:
                    piped.synchronize()
                    moved(piped)
                x = batch(4, width=16 * WIDTH, seed=step).float()
                found.append(piped.forward_backward((x,), loss_fn=square_loss))
                piped.step(lambda: (ours.step(), ours.zero_grad()), is_async=is_async)
            piped.synchronize()
            found += [parameter.detach().clone() for parameter in model.parameters()]
            return dict(enumerate(found)), number_there(piped), moved(piped), piped.peak_device_bytes()

    streamed, _, all_bytes, _ = run("off")
    found, number, moved_bytes, peak_bytes = run("full")
    assert number == 12 and moved_bytes[1] == 0 < all_bytes[1]
    assert moved_bytes[0] % base_bytes == 0 < moved_bytes[0] < all_bytes[0]
    assert peak_bytes <= 450_000
    assert_equal_bits(found, streamed)


@pytest.fixture
def takes_any_gain(monkeypatch):
    """With "auto", as on an accelerator on which every step is faster."""
    monkeypatch.setattr(full_plans, "AUTO_GAIN", -1e9)
    init = full_plans.FullPlans.__init__
    monkeypatch.setattr(full_plans.FullPlans, "__init__", lambda self, costs, accelerators: init(self, costs, True))


@pytest.fixture
def little_memory(takes_any_gain, monkeypatch):
    """Gives models of `test_unasked` little memory."""
    wrapped = test_unasked.wrapped
    return lambda memory_bytes: monkeypatch.setattr(
        test_unasked, "wrapped", functools.partial(wrapped, memory_bytes=memory_bytes)
    )


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_nobody_notices_where_nobody_has_asked(little_memory, is_async, accumulate):
    numbers = []

    def between(loop):
        numbers.append(number_there(loop.piped))
        if not is_async:
            loop.found += [parameter.detach().clone() for parameter in loop.model.parameters()]
        loop.found += [value.clone() for value in loop.piped.state_dict().values()]

    little_memory(ONE_OF_THREE + (accumulate > 1) * 2_000)  # gradients are there twice while they add up
    test_unasked.same(between, is_async=is_async, accumulate=accumulate)
    # weights and biases of one layer; of two where measured times lead to stages that leave the room
    assert numbers[-1] == 2 or accumulate > 1 and numbers[-1] == 4


@pytest.mark.parametrize("residency", ["auto", "full"])
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda:0", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
        ),
    ],
)
def test_megabytes_on_a_device_train_as_streamed_ones_do(takes_any_gain, device, residency):
    width, depth, memory_bytes = 512, 12, 60 * 2**20
    if device != "cpu":  # of which a tenth is left to libraries, whose workspaces are as large as some of these layers
        width, memory_bytes = 2_048, 960 * 2**20

    def run(residency):
        torch.manual_seed(4)
        model, losses = mlp(depth, width).float(), []
        devices = [roundpipe.Device(device, memory_bytes=memory_bytes)]
        options = roundpipe.RoundPipeRunConfig(num_microbatch=2, residency=residency)
        with roundpipe.RoundPipe(model, devices=devices, model_run_config=options, optim_dtype=torch.float32) as piped:
            optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.1, momentum=0.9)

            def update():
                torch.nn.utils.clip_grad_norm_(piped.optim_parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()

            for step in range(12):
                x = batch(8, width=width, seed=step).float()
                losses.append(piped.forward_backward((x,), loss_fn=square_loss).detach())
                piped.step(update)
            piped.synchronize()
            number = number_there(piped)
        return torch.stack(losses), [parameter.detach().clone() for parameter in model.parameters()], number

    streamed, weights, none = run("off")
    losses, found, number = run(residency)
    assert none == 0 < number < 2 * depth
    torch.testing.assert_close(losses, streamed, rtol=1e-5, atol=0)
    torch.testing.assert_close(found, weights, rtol=1e-5, atol=1e-6)
