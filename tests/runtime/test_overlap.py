"""Rounds that are under way at once: after an asynchronous step a call returns with its losses."""

import copy
import functools
import random
import re
import threading
import time

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.runtime.device.cpu import CpuBackend
from tests.runtime.models import DTYPE, assert_equal_bits, assert_same, batch, config, gradients, square_loss

pytestmark = pytest.mark.timeout(60)

SINGLES = roundpipe.ExecutePlan([(0, 1), (1, 2), (2, 3)], (3, 4), [(2, 3), (1, 2), (0, 1)])
LR = 0.1


class _Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, layer):
        ctx.layer = layer
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.layer.fails:
            raise ZeroDivisionError("in the backward")
        assert ctx.layer.may_go.wait(20), "nobody let the backward go on"
        return gradient, None


class Held(nn.Module):
    """A linear layer whose backward waits until the test lets it go."""

    def __init__(self, size=6):
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.scale = 1.0
        self.switch = _Switch()

    def forward(self, value):
        return _Held.apply(self.linear(value) * self.scale, self.switch)


class _Switch:
    """Shared by all copies of a layer."""

    def __init__(self):
        self.may_go = threading.Event()
        self.may_go.set()
        self.fails = False

    def __deepcopy__(self, memo):
        return _Switch()


def build(held=2):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6) for _ in range(4)]
    layers[held] = Held()
    return nn.Sequential(*layers).to(DTYPE)


def in_asynchronous_steps(model, workers=3, **settings):
    """A pipe whose last step was asynchronous and did nothing."""
    piped = roundpipe.RoundPipe(model, devices=["cpu"] * workers, **settings)
    piped.step(lambda: None)
    piped.synchronize()
    return piped


def train(piped, value, plan=SINGLES, num=3):
    # a module that is not of torch.nn may draw random numbers, for all we know, and is waited for
    options = config(num, plan=plan, preserve_rng_state=False)
    return piped.forward_backward((value,), loss_fn=square_loss, run_config=options)


def eager(model, value, num=3):
    for piece in value.tensor_split(num):
        square_loss(model(piece), None).backward()
    return gradients(model)


def test_the_next_round_begins_beside_the_last_backward_stages():
    model = build(held=1)
    hold = model[1].switch
    calls = []

    def on_forward(module, args):
        calls.extend([] if roundpipe.doing_recompute() else [1])
        if len(calls) > 3:  # the second round's
            hold.may_go.set()

    model[0].register_forward_pre_hook(on_forward)
    with in_asynchronous_steps(model) as piped:
        hold.may_go.clear()
        train(piped, batch())  # hangs here if the call waits for its backward
        assert not hold.may_go.is_set()
        piped.step(lambda: None)
        train(piped, batch())
        piped.synchronize()


def test_a_step_that_waits_ends_the_overlap():
    model = build()
    with in_asynchronous_steps(model) as piped:
        piped.step(lambda: None, is_async=False)
        reference = eager(copy.deepcopy(model), batch())
        train(piped, batch())
        assert_same(gradients(model), reference)


def test_gradients_are_whole_wherever_they_are_asked_for():
    model = build()
    reference = eager(copy.deepcopy(model), batch())
    with in_asynchronous_steps(model) as piped:
        hold = model[2].switch
        for ask in (piped.synchronize, lambda: list(piped.parameters()), lambda: piped.step(lambda: None, False)):
            hold.may_go.clear()
            train(piped, batch())
            threading.Timer(0.1, hold.may_go.set).start()
            if ask is not piped.synchronize:
                ask()
            piped.synchronize()
            assert_same(gradients(model), reference)
            piped.zero_grad()
            piped.step(lambda: None)


def test_what_the_caller_changes_after_the_call_is_not_seen():
    """Arguments, attributes, modes and frozen parameters are those of the call."""
    for change in ("argument", "attribute", "mode", "frozen"):
        model = build(held=2)
        model[1] = nn.Sequential(Held(), nn.BatchNorm1d(6)).to(DTYPE)
        value = batch(9)
        twin = copy.deepcopy(model)
        reference = eager(twin, value)
        with in_asynchronous_steps(model) as piped:
            hold = model[2].switch
            hold.may_go.clear()
            train(piped, value)
            if change == "argument":
                value.fill_(100)
            elif change == "attribute":
                model[1][0].scale = 100.0
            elif change == "mode":
                model.eval()
            else:
                model[0].requires_grad_(False)
                model[1].requires_grad_(False)
            hold.may_go.set()
            list(piped.parameters())
            model.requires_grad_(True)
            assert_same(gradients(model), reference, atol=1e-12)
            assert_same(dict(model.named_buffers()), dict(twin.named_buffers()), atol=1e-12)


def test_an_argument_that_is_being_uploaded_when_the_call_could_return(monkeypatch):
    upload = CpuBackend.upload
    began, changed = threading.Event(), threading.Event()
    model, value = build(), batch(9)
    given = value.clone()

    def slowly(self, source, *args, **kwargs):
        if _share_memory(source, given) and not in_forward.match(threading.current_thread().name):
            began.set()
            changed.wait(0.5)
        return upload(self, source, *args, **kwargs)

    def loss_fn(output, label):
        assert began.wait(20), "the last stage's upload waits for nothing"
        return square_loss(output, label)

    in_forward = re.compile(".*worker [0-3]$")
    monkeypatch.setattr(CpuBackend, "upload", slowly)
    expected = eager(copy.deepcopy(model), value)
    with in_asynchronous_steps(model, 7) as piped:  # one for each job
        options = config(3, plan=SINGLES, preserve_rng_state=False)
        piped.forward_backward((given,), loss_fn=loss_fn, run_config=options)
        given.fill_(100)
        changed.set()
        piped.synchronize()
    assert_same(gradients(model), expected, atol=1e-12)


def _share_memory(one, other):
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def test_buffers_are_there_with_the_losses():
    model = build(held=2)
    model[0] = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).to(DTYPE)
    twin = copy.deepcopy(model)
    eager(twin, batch(9))
    with in_asynchronous_steps(model) as piped:
        hold = model[2].switch
        hold.may_go.clear()
        train(piped, batch(9))
        assert_same(dict(model.named_buffers()), dict(twin.named_buffers()), atol=1e-12)
        hold.may_go.set()


@pytest.mark.parametrize("then", ["train", "step", "synchronize", "parameters"])
def test_a_late_error_is_raised_at_the_next_call(then):
    model = build(held=1)
    with in_asynchronous_steps(model) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=LR)
        before = [p.detach().clone() for p in model.parameters()]
        model[1].switch.may_go.clear()
        train(piped, batch())
        model[1].switch.fails = True
        model[1].switch.may_go.set()
        (running,) = piped._session.engine.running() or [None]
        if running is not None:
            running.wait_over()
        with pytest.raises(ZeroDivisionError, match="in the backward") as caught:
            {
                "train": lambda: train(piped, batch()),
                "step": lambda: piped.step(optimizer.step),
                "synchronize": piped.synchronize,
                "parameters": piped.parameters,
            }[then]()
        assert any("phase backward" in note for note in caught.value.__notes__)
        model[1].switch.fails = False
        piped.zero_grad()
        piped.synchronize()
        assert_equal_bits(dict(enumerate(before)), dict(enumerate(p.detach() for p in model.parameters())))
        reference = eager(copy.deepcopy(model), batch())
        train(piped, batch())
        piped.synchronize()
        assert_same(gradients(model), reference)


def test_no_step_is_taken_on_the_gradients_of_a_round_that_fails():
    """The step is called before the round fails."""
    model = build(held=1)
    with in_asynchronous_steps(model) as piped:
        stepped = []
        model[1].switch.may_go.clear()
        train(piped, batch())
        piped.step(lambda: stepped.append(1))
        model[1].switch.fails = True
        model[1].switch.may_go.set()
        with pytest.raises(ZeroDivisionError):
            piped.synchronize()
        piped.synchronize()
        assert not stepped
        model[1].switch.fails = False
        piped.zero_grad()
        piped.step(lambda: stepped.append(1))
        piped.synchronize()
        assert stepped == [1]


def test_closing_ends_what_is_running():
    threads = set(threading.enumerate())
    model = build()
    piped = in_asynchronous_steps(model)
    model[2].switch.may_go.clear()
    train(piped, batch())
    threading.Timer(0.1, model[2].switch.may_go.set).start()
    piped.close()
    assert not {one for one in set(threading.enumerate()) - threads if one.name.startswith("roundpipe")}


def test_an_interrupted_call_leaves_the_round_before_alone(monkeypatch):
    from roundpipe.runtime.engine.step import StepState

    model = build(held=1)
    with in_asynchronous_steps(model) as piped:
        train(piped, batch())
        real = StepState.wait_losses

        def interrupted(self):
            monkeypatch.setattr(StepState, "wait_losses", real)
            raise KeyboardInterrupt

        monkeypatch.setattr(StepState, "wait_losses", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(piped, batch())
        piped.zero_grad()
        reference = eager(copy.deepcopy(model), batch())
        train(piped, batch())
        piped.synchronize()
        assert_same(gradients(model), reference)


class Jitter(nn.Module):
    """Sleeps now and then."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, value):
        time.sleep(random.choice((0, 0, 0.002)))
        return self.layer(value)


def stale_loop(model, batches, num, calls_per_step):
    """``W[k] = W[k-1] - lr * grad(W[max(k-2, 0)])``, in eager."""
    weights = [[p.detach().clone() for p in model.parameters()]]
    for k in range(1, len(batches) // calls_per_step + 1):
        with torch.no_grad():
            for parameter, old in zip(model.parameters(), weights[max(k - 2, 0)], strict=True):
                parameter.copy_(old)
        model.zero_grad()
        for value in batches[(k - 1) * calls_per_step : k * calls_per_step]:
            eager(model, value, num)
        weights.append([w - LR * p.grad for w, p in zip(weights[-1], model.parameters(), strict=True)])
    return weights[-1]


PLANS = {
    "one layer each": SINGLES,
    "one stage": roundpipe.ExecutePlan([], (0, 4), []),
    "short forward": roundpipe.ExecutePlan([(0, 1)], (1, 4), [(0, 1)]),
    "long backward": roundpipe.ExecutePlan([(0, 3)], (3, 4), [(0, 3)]),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("calls_per_step", [1, 2])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_trajectory_is_that_of_one_step_of_staleness(plan, calls_per_step, tied):
    ends = []
    for workers in (1, 2, 3, 4):
        torch.manual_seed(0)
        layers = [nn.Linear(6, 6) for _ in range(4)]
        if tied:
            layers[3] = layers[0]
        model = nn.Sequential(*map(Jitter, layers)).to(DTYPE)
        batches = [batch(5, seed=i) for i in range(6)]
        reference = stale_loop(copy.deepcopy(model), batches, 3, calls_per_step)
        with roundpipe.RoundPipe(model, devices=["cpu"] * workers) as piped:
            optimizer = torch.optim.SGD(piped.optim_parameters(), lr=LR)

            def update(optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()

            for k, value in enumerate(batches, 1):
                train(piped, value, plan)
                if k % calls_per_step == 0:
                    piped.step(update)
            piped.synchronize()
            ends.append([p.detach().clone() for p in model.parameters()])
        assert_same(dict(enumerate(ends[-1])), dict(enumerate(reference)), atol=1e-12)
        assert_equal_bits(dict(enumerate(ends[-1])), dict(enumerate(ends[0])))


def penalty_of(source):
    """Loss functions that read the weights in one way or another."""

    class Trainer:
        def __init__(self):
            self.model = source

        def loss(self, outputs, label):
            return penalised(outputs, self.model.parameters())

    weights = list(source.model.parameters() if isinstance(source, roundpipe.RoundPipe) else source.parameters())
    return {
        "model": lambda outputs, label: penalised(outputs, source.parameters()),
        "weights": lambda outputs, label, of=weights: penalised(outputs, of),
        "method": Trainer().loss,
        "partial": functools.partial(lambda of, outputs, label: penalised(outputs, of), weights),
    }


def penalised(outputs, weights):
    return outputs.square().mean() + 0.1 * sum(weight.square().sum() for weight in weights)


@pytest.mark.parametrize("through", ["the model", "the wrapper"])
@pytest.mark.parametrize("way", ["model", "weights", "method", "partial"])
def test_a_loss_function_may_read_the_weights(way, through):
    """They stay as they are while it runs, although the optimizer's thread has newer ones."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6))).to(DTYPE)
    reference = copy.deepcopy(model)
    latest = [nn.Parameter(parameter.detach().clone()) for parameter in reference.parameters()]
    eager = torch.optim.SGD(latest, lr=0.05)
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2, model_run_config=config(2)) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.05)
        for step in range(6):
            x = torch.randn(4, 32, dtype=DTYPE, generator=torch.Generator().manual_seed(step))
            expected = 0.0
            for piece in x.chunk(2):
                loss = penalised(reference(piece), reference.parameters())
                loss.backward()
                expected += float(loss.detach())
            found = piped.forward_backward((x,), loss_fn=penalty_of(model if through == "the model" else piped)[way])
            assert float(found) == pytest.approx(expected, rel=1e-12), f"in step {step}"
            piped.step(lambda: (optimizer.step(), optimizer.zero_grad()))
            with torch.no_grad():
                for parameter, newest in zip(reference.parameters(), latest, strict=True):
                    newest.grad, parameter.grad = parameter.grad, None
                    parameter.copy_(newest)
            eager.step()


@pytest.mark.parametrize("where", ["loss_fn", "a hook", "a parameter's hook"])
@pytest.mark.parametrize(
    "what", ["piped(x)", "piped.synchronize()", "piped.zero_grad()", "piped.step(print)", "piped.close()"]
)
def test_what_waits_for_rounds_is_refused_inside_of_one(what, where):
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)).to(DTYPE)
    x = batch()
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2, model_run_config=config(2)) as piped:
        call = functools.partial(eval, what, {"piped": piped, "x": x})
        handle = None
        if where == "a hook":
            handle = model[1].register_forward_hook(lambda *_: call() and None)
        elif where == "a parameter's hook":
            handle = model[1].weight.register_hook(lambda _: call() and None)

        def loss_fn(outputs, label):
            if where == "loss_fn":
                call()
            return square_loss(outputs, label)

        with pytest.raises(roundpipe.ConfigError, match="was called by a layer, a loss_fn or a hook of the same model"):
            piped.forward_backward((x,), loss_fn=loss_fn)
        if handle is not None:
            handle.remove()
        assert torch.isfinite(piped.forward_backward((x,), loss_fn=square_loss))


def test_backwards_of_forwards_run_in_any_order_beside_a_training_step():
    """Each step has job numbers of its own, though a backward runs long after its forward."""
    model = build(held=0)
    reference = eager(copy.deepcopy(model), batch())
    for value in (batch(seed=1), batch(seed=3)):
        copied = copy.deepcopy(model)
        copied(value).sum().backward()
        reference = {name: total + gradients(copied)[name] for name, total in reference.items()}
    with in_asynchronous_steps(model) as piped:
        options = config(3, plan=SINGLES, preserve_rng_state=False)
        first, _, third = (piped(batch(seed=seed), roundpipe_run_config=options) for seed in (1, 2, 3))
        first.sum().backward()
        model[0].switch.may_go.clear()
        train(piped, batch())
        threading.Timer(0.1, model[0].switch.may_go.set).start()
        third.sum().backward()
        piped.synchronize()
        assert_same(gradients(model), reference)
