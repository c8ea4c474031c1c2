"""One step of staleness, and what may not wait inside of a step."""

import copy
import functools
import random
import threading
import time

import pytest
import torch
from torch import nn

import roundpipe
from tests.repeats import repeats
from tests.runtime.cases_overlap import LR, SINGLES, build, eager, in_asynchronous_steps, stale_loop, train
from tests.runtime.models import DTYPE, assert_equal_bits, assert_same, batch, config, gradients, square_loss

pytestmark = pytest.mark.timeout(60)


class Jitter(nn.Module):
    """Sleeps now and then."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, value):
        time.sleep(random.choice((0, 0, 0.002)))
        return self.layer(value)


PLANS = {
    "one layer each": SINGLES,
    "one stage": roundpipe.ExecutePlan([], (0, 4), []),
    "short forward": roundpipe.ExecutePlan([(0, 1)], (1, 4), [(0, 1)]),
    "long backward": roundpipe.ExecutePlan([(0, 3)], (3, 4), [(0, 3)]),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize(
    "calls_per_step, tied", repeats([(1, False), (1, True), (2, False), (2, True)], ["1-False", "2-True"])
)
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


ENDS = {"close()": roundpipe.RoundPipe.close, "the end of with": lambda piped: piped.__exit__(None, None, None)}


@pytest.mark.parametrize("residency", ["off", "full"])
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_the_last_update_is_in_the_model_at_the_end(end, residency):
    """Or what is saved from the model afterwards lacks it."""
    model = build()
    reference = copy.deepcopy(model)
    piped = roundpipe.RoundPipe(
        model,
        devices=[roundpipe.Device("cpu", memory_bytes=2**24)],
        model_run_config=roundpipe.RoundPipeRunConfig(residency=residency),
    )
    ours = torch.optim.SGD(piped.optim_parameters(), lr=LR)
    piped.forward_backward((batch(5),), loss_fn=square_loss)
    piped.step(lambda: (ours.step(), ours.zero_grad()))
    end(piped)
    square_loss(reference(batch(5)), None).backward()
    torch.optim.SGD(reference.parameters(), lr=LR).step()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("wrap", [roundpipe.RoundPipe, roundpipe.compile])
def test_a_model_that_is_given_to_another_wrapper_has_the_last_update(wrap, recwarn):
    """As where a cell of a notebook is run again."""
    model = build()
    reference = copy.deepcopy(model)
    pipes = []
    for _ in range(3):
        pipes.append(wrap(model, devices=["cpu"]))
        ours = torch.optim.SGD(pipes[-1].optim_parameters(), lr=LR)
        loss = pipes[-1].forward_backward((batch(5),), loss_fn=square_loss)
        pipes[-1].step(lambda ours=ours: (ours.step(), ours.zero_grad()))
        theirs = torch.optim.SGD(reference.parameters(), lr=LR)
        expected = square_loss(reference(batch(5)), None)
        expected.backward()
        theirs.step()
        theirs.zero_grad()
        torch.testing.assert_close(loss, expected.detach())
    assert not recwarn.list  # of hooks, which are there while an update is under way


@pytest.mark.parametrize("is_async", [True, False])
def test_what_an_update_had_written_before_it_failed_is_in_the_model_at_the_end(is_async):
    """As in eager mode."""
    model = build()
    piped = roundpipe.RoundPipe(model, devices=["cpu"])

    def fail():
        with torch.no_grad():
            next(iter(piped.optim_parameters())).zero_()
        raise ArithmeticError

    piped.forward_backward((batch(5),), loss_fn=square_loss)
    with pytest.raises(ArithmeticError):
        piped.step(fail, is_async=is_async)
        piped.close()
    piped.close()
    assert not model[0].weight.any() and model[0].bias.any()
