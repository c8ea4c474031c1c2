"""Trained weights that live on several workers' devices, each layer's on one: numbers are those of streamed ones."""

import random
import weakref

import pytest
import torch

import roundpipe
from roundpipe import Device, ExecutePlan
from roundpipe.runtime.engine import full_plans
from roundpipe.runtime.weights import download, twin_group
from roundpipe.runtime.weights.twins import Twins
from tests.runtime import test_unasked as loops
from tests.runtime.cases_twins import OPTIMIZERS, WIDTH, evaluate, optimizer_of, read_state, train_scaled, write_copies
from tests.runtime.models import DTYPE, assert_equal_bits, batch, config, mlp, square_loss

DEPTH = 6
HALVES = ExecutePlan([(0, 3)], (3, DEPTH), [(0, 3)], rotates=False)
THIRDS = ExecutePlan([(0, 2), (2, 4)], (4, DEPTH), [(2, 4), (0, 2)], rotates=False)
SINGLES = ExecutePlan(
    [(i, i + 1) for i in range(DEPTH - 1)],
    (DEPTH - 1, DEPTH),
    [(i, i + 1) for i in range(DEPTH - 2, -1, -1)],
    rotates=False,
)
ROOM = 10**6


def wrapped(model, residency, plan=None, workers=2, memory_bytes=ROOM, **options):
    devices = [Device("cpu", memory_bytes=memory_bytes)] * workers
    run_config = config(3, plan=plan, residency=residency)
    return roundpipe.RoundPipe(model, devices=devices, model_run_config=run_config, **options)


def needs_cards(number):
    return pytest.mark.skipif(torch.cuda.device_count() < number, reason=f"needs {number} CUDA devices")


def homes(piped):
    """Of each worker, how many parameters live on its device."""
    found = piped._session.engine.twins.homes  # what is private to the runtime tells where weights are
    return [sum(home == worker for home in found.values()) for worker in range(piped.num_workers)]


def train(residency, plan, workers=2, *, is_async=True, optimizer="AdamW", memory_bytes=ROOM, steps=5, between=None):
    """What a run gives; homes of parameters, bytes of weights that the last round moved, and each device's peak."""
    torch.manual_seed(4)
    model, found, norms = mlp(DEPTH, WIDTH).to(DTYPE), [], []
    with wrapped(model, residency, plan, workers, memory_bytes) as piped:
        ours = optimizer_of(piped, OPTIMIZERS[optimizer])

        def update():
            norms.append(torch.nn.utils.clip_grad_norm_(ours.param_groups[0]["params"], 0.5, foreach=False))
            ours.step()
            ours.zero_grad()

        for step in range(steps):
            if step == steps - 1:
                piped.synchronize()
                piped.report()
            found.append(piped.forward_backward((batch(6, width=WIDTH, seed=step),), loss_fn=square_loss))
            piped.step(update, is_async=is_async)
            if between is not None:
                between(piped, model, ours, found)
        piped.synchronize()
        there, report = homes(piped), piped.report()
        found += [*norms, *(parameter.detach().clone() for parameter in model.parameters())]
    moved = [worker.moved_bytes["weights"] + worker.moved_bytes["gradients"] for worker in report.workers]
    return dict(enumerate(found)), there, moved, [worker.peak_bytes for worker in report.workers]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("plan", "workers", "expected"),
    [(HALVES, 2, [6, 6]), (THIRDS, 3, [4, 4, 4]), (SINGLES, 2, [6, 6]), (HALVES, 3, [6, 6, 0])],
)
def test_everything_lives_there_and_nothing_moves(plan, workers, expected, is_async, optimizer):
    options = {"is_async": is_async, "optimizer": optimizer}
    streamed, none, _, _ = train("off", plan, workers, **options)
    found, there, moved, _ = train("full", plan, workers, **options)
    assert none == [0] * workers and there == expected
    assert moved == [0] * workers
    assert_equal_bits(found, streamed)


LAYER_BYTES = (WIDTH + 1) * WIDTH * 8


@pytest.mark.parametrize("plan", [HALVES, SINGLES])
def test_the_more_room_devices_have_the_more_layers_of_each_stay(plan):
    seen = []
    for memory_bytes in range(9_000, 22_000, 1_500):
        streamed, _, _, _ = train("off", plan, memory_bytes=memory_bytes)
        found, there, moved, peaks = train("full", plan, memory_bytes=memory_bytes)
        assert_equal_bits(found, streamed)
        assert max(peaks) <= memory_bytes and abs(there[0] - there[1]) <= 2
        assert all(bool(bytes_) == (number < 6) for bytes_, number in zip(moved, there, strict=True))
        seen.append(sum(there))
    assert seen == sorted(seen) and seen[0] < 6 and seen[-1] == 12 and len(set(seen)) >= 3


@pytest.mark.parametrize("is_async", [False, True])
def test_what_reads_and_writes_between_steps_finds_the_latest(is_async):
    def between(piped, model, ours, found):
        number = len(found)
        evaluate(piped, model, ours, found)
        read_state(piped, model, ours, found)
        if number > 10:
            write_copies(piped, model, ours, found)

    streamed, _, _, _ = train("off", HALVES, is_async=is_async, between=between)
    found, there, _, _ = train("full", HALVES, is_async=is_async, between=between)
    assert there == [6, 6]
    assert_equal_bits(found, streamed)


@pytest.fixture
def on_two(monkeypatch, any_gain):
    """The loops of one worker, on two."""

    def wrapped_on_two(model, residency="full", plan=None, **options):
        return wrapped(model, residency, plan, **options)

    monkeypatch.setattr(loops, "wrapped", wrapped_on_two)


@pytest.fixture
def any_gain(monkeypatch):
    monkeypatch.setattr(full_plans, "AUTO_GAIN", -1e9)  # as if on accelerators on which every step is faster
    init = full_plans.FullPlans.__init__
    monkeypatch.setattr(full_plans.FullPlans, "__init__", lambda self, costs, accelerators: init(self, costs, True))


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_nobody_notices_where_nobody_has_asked(on_two, is_async, accumulate):
    loops.same(is_async=is_async, accumulate=accumulate)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_between_steps(on_two, seed, tmp_path):
    loops.test_whatever_happens_between_steps(seed, tmp_path)


def test_load_state_of_model_and_optimizer(on_two):
    loops.test_load_state_of_model_and_optimizer()


@pytest.mark.parametrize("look", loops.LOOKS)
def test_copies_come_home_before_somebody_looks(on_two, look):
    loops.test_copies_come_home_before_somebody_looks(look)


def test_a_weight_of_two_workers_layers_is_streamed_with_these_layers():
    def run(residency):
        torch.manual_seed(4)
        model, found = mlp(DEPTH, WIDTH), []
        model[5][0].weight = model[0][0].weight
        with wrapped(model, residency, HALVES) as piped:
            ours = optimizer_of(piped, OPTIMIZERS["AdamW"])
            for step in range(4):
                found.append(piped.forward_backward((batch(6, width=WIDTH, seed=step),), loss_fn=square_loss))
                piped.step(lambda: (ours.step(), ours.zero_grad()), is_async=False)
            there = homes(piped)
            piped.synchronize()
            found += [parameter.detach().clone() for parameter in model.parameters()]
        return dict(enumerate(found)), there

    streamed, _ = run("off")
    found, there = run("full")
    assert there == [4, 4]
    assert_equal_bits(found, streamed)


def test_other_sizes_and_evaluations_leave_layers_where_they_are():
    def run(residency):
        torch.manual_seed(4)
        model, found, seen = mlp(DEPTH, WIDTH), [], []
        with wrapped(model, residency) as piped:
            ours = optimizer_of(piped, OPTIMIZERS["AdamW"])
            draw = random.Random(0)
            for step in range(10):
                x = batch(draw.choice([3, 6, 12]), width=WIDTH, seed=step)
                found.append(piped.forward_backward((x,), loss_fn=square_loss))
                piped.step(lambda: (ours.step(), ours.zero_grad()), is_async=bool(step % 2))
                with torch.no_grad():
                    found.append(piped.forward_loss((x,), loss_fn=square_loss))
                seen.append(dict(piped._session.engine.twins.homes))  # private, as above
            piped.synchronize()
            found += [parameter.detach().clone() for parameter in model.parameters()]
        return dict(enumerate(found)), seen

    streamed, _ = run("off")
    found, seen = run("full")
    torch.testing.assert_close(found, streamed, rtol=0, atol=1e-9)
    assert all(each == seen[-1] for each in seen[2:])


def test_a_scaler_and_two_optimizers():
    def run(residency):
        torch.manual_seed(4)
        model = mlp(DEPTH, WIDTH).bfloat16()
        with wrapped(model, residency, HALVES, optim_dtype=torch.float32) as piped:
            scaler = roundpipe.GradScaler("cpu", init_scale=4.0)
            losses, _ = train_scaled(piped, scaler)
            piped.synchronize()
            there = homes(piped)
        return dict(enumerate([*losses, *(value.clone() for value in model.state_dict().values())])), there

    streamed, _ = run("off")
    found, there = run("full")
    assert there == [6, 6]
    assert_equal_bits(found, streamed)


@pytest.mark.parametrize("is_async", [False, True])
def test_when_one_device_has_no_room_the_other_gives_its_memory_back(is_async, monkeypatch):
    """The second one refuses once: then fewer layers live there."""
    begin, asked = Twins.begin, []

    def refuse(self, parameters, beside_bytes):
        asked.append(len(parameters))
        if len(asked) == 2:
            raise roundpipe.DeviceMemoryError("none is left")
        return begin(self, parameters, beside_bytes)

    monkeypatch.setattr(Twins, "begin", refuse)
    streamed, _, _, _ = train("off", HALVES, is_async=is_async)
    found, there, _, peaks = train("full", HALVES, is_async=is_async)
    assert asked[:2] == [6, 6] and max(peaks) <= ROOM and there == [0, 0]
    assert_equal_bits(found, streamed)


@pytest.mark.parametrize("dtype", [DTYPE, torch.bfloat16])
@pytest.mark.parametrize("is_async", [False, True])
def test_gradients_of_workers_with_one_device_outlive_the_update(dtype, is_async, monkeypatch):
    """Else their allocator would give the memory to what they do before that, beside what the update still reads."""
    gradients, live, follow = [], [], twin_group._follow  # the moment in question is within the runtime

    def followed(backend, leader):
        if gradients:  # the update has run
            live.append([gradient() is not None for gradient in gradients])
            gradients.clear()
        follow(backend, leader)

    monkeypatch.setattr(twin_group, "_follow", followed)  # that moment
    torch.manual_seed(4)
    with wrapped(mlp(DEPTH, WIDTH).to(dtype), "full", HALVES, optim_dtype=torch.float64) as piped:
        ours = optimizer_of(piped, OPTIMIZERS["momentum"])

        def update():
            gradients[:] = [weakref.ref(each.grad) for each in ours.param_groups[0]["params"]]
            ours.step()
            ours.zero_grad()

        for step in range(3):
            piped.forward_backward((batch(6, width=WIDTH, seed=step).to(dtype),), loss_fn=square_loss)
            piped.step(update, is_async=is_async)
        piped.synchronize()
        assert homes(piped) == [6, 6]
    assert live[1:] == [[True] * 12] * 2  # the first update is made on the host


@pytest.mark.parametrize(
    "devices",
    [
        ["cpu", "cpu"],
        pytest.param(["cuda:0", "cuda:0"], marks=[pytest.mark.cuda, needs_cards(1)]),
        pytest.param(["cuda:0", "cuda:1"], marks=[pytest.mark.cuda, needs_cards(2)]),
    ],
)
@pytest.mark.parametrize("is_all", [True, False])
def test_megabytes_on_devices_train_as_streamed_ones_do(any_gain, monkeypatch, devices, is_all):
    """The norm of all gradients is of tensors of several devices, put together by hand as well.

    Of one stage, some gradients stay on the device while others come home in pieces.
    """
    monkeypatch.setattr(download, "PIECE_BYTES", 2**20)
    width, memory_bytes = 512, (80 if is_all else 20) * 2**20
    if devices[0] != "cpu":  # a tenth is left to libraries, whose workspaces are as large as such layers
        width, memory_bytes = 2048, (1280 if is_all else 416) * 2**20

    def run(residency):
        torch.manual_seed(4)
        model, found, norms = mlp(12, width).float(), [], []
        given = [Device(device, memory_bytes=memory_bytes) for device in devices]
        options = config(4, residency=residency)
        with roundpipe.RoundPipe(model, devices=given, model_run_config=options, optim_dtype=torch.float32) as piped:
            ours = torch.optim.SGD(piped.optim_parameters(), lr=0.1, momentum=0.9, fused=True)
            copies = list(piped.optim_parameters())

            def update():
                gradients = [copy.grad for copy in copies]
                by_hand = torch.stack([gradient.double().norm() for gradient in gradients]).norm()
                # float() of a device's tensor makes that device current, which misleads the CUDA sanitizer
                norms.append(float(by_hand.cpu()))
                for gradient in gradients:
                    gradient.mul_(0.5 / by_hand)
                norm = torch.nn.utils.clip_grad_norm_(copies, 0.25)
                assert abs(float(norm.cpu()) - 0.5) < 0.01  # float32 on the host is no more exact
                ours.step()
                ours.zero_grad()

            for step in range(12):
                x = batch(16, width=width, seed=step).float()
                found.append(piped.forward_backward((x,), loss_fn=square_loss).detach().cpu())
                piped.step(update, is_async=step % 3 > 0)
            piped.synchronize()
            there = homes(piped)
            found += [torch.tensor(norms), *(each.detach().clone() for each in model.parameters())]
        return dict(enumerate(found)), there

    streamed, none = run("off")
    found, there = run("auto")
    assert none == [0, 0] and (sum(there) == 24 and all(there) if is_all else 0 < sum(there) < 24), there
    torch.testing.assert_close(found, streamed, rtol=1e-4, atol=1e-4)


def test_small_trained_weights_all_stay_and_frozen_ones_as_far_as_there_is_room():
    def run(residency, memory_bytes):
        torch.manual_seed(4)
        model, found = mlp(DEPTH, 16).to(DTYPE), []
        for layer in model:
            layer[0].weight.requires_grad_(False)
        with wrapped(model, residency, SINGLES, memory_bytes=memory_bytes) as piped:
            ours = optimizer_of(piped, OPTIMIZERS["AdamW"])
            for step in range(5):
                piped.report()
                found.append(piped.forward_backward((batch(6, width=16, seed=step),), loss_fn=square_loss))
                piped.step(lambda: (ours.step(), ours.zero_grad()), is_async=False)
            piped.synchronize()
            there, report = homes(piped), piped.report()
            found += [parameter.detach().clone() for parameter in model.parameters()]
        return dict(enumerate(found)), there, [worker.moved_bytes["weights"] for worker in report.workers]

    streamed, _, all_bytes = run("off", 9_000)
    assert min(all_bytes) > 2 * 16 * 16 * 8
    for memory_bytes, moves in {9_000: True, 12_000: False}.items():
        found, there, moved_bytes = run("full", memory_bytes)
        assert there == [3, 3] and (max(moved_bytes) > 0) is moves
        assert_equal_bits(found, streamed)


def test_plans_of_other_sizes_come_to_the_same_homes_after_all_were_at_home():
    model, seen = mlp(DEPTH, WIDTH), []
    with wrapped(model, "full") as piped:
        ours = optimizer_of(piped, OPTIMIZERS["AdamW"])

        def step(size):
            piped.forward_backward((batch(size, width=WIDTH),), loss_fn=square_loss)
            piped.step(lambda: (ours.step(), ours.zero_grad()), is_async=False)
            seen.append(dict(piped._session.engine.twins.homes))  # private, as above

        step(6)
        step(6)
        assert len(seen[-1]) == 12
        model[1].requires_grad_(False)
        step(12)
        model[1].requires_grad_(True)
        for size in (24, 6, 12, 24, 6, 12, 24):
            step(size)
    assert len(seen[-1]) == 12 and all(each == seen[-1] for each in seen[-6:])
