"""Weights and gradients that are converted before they are needed, against those that are converted when they are."""

import copy
import threading

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.together import Together
from roundpipe.runtime.device import host_limit
from roundpipe.runtime.weights.banks import EarlyGradient
from tests.repeats import repeats
from tests.runtime.models import assert_equal_bits, config, square_loss

pytestmark = pytest.mark.timeout(60)
WIDTH = 8


class Half(nn.Module):
    """A layer with weights that are trained, weights that are not, and a buffer that its forward writes."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first.weight.requires_grad_(False)

    def forward(self, value):
        return self.last(self.norm(self.first(value)))


def build(kind="plain"):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    if kind == "tied":
        layers[3][0].weight = layers[0][0].weight
    if kind == "half frozen":
        layers[1:3] = Half(), Half()
        layers[0].requires_grad_(False)
    return nn.Sequential(*layers).bfloat16()


def piped_of(model, pin="double", workers=2, **options):
    plan = roundpipe.ExecutePlan([(0, 2), (2, 3)], (3, 4), [(1, 3), (0, 1)])
    settings = config(3, plan=plan, **options)
    return roundpipe.RoundPipe(
        model, torch.float32, devices=["cpu"] * workers, model_run_config=settings, pin_model=pin
    )


def value_of(seed):
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()


def run(kind, pin, workers, is_async, calls=(1, 1, 1, 2, 2, 1, 1), zeroes=True):
    """Losses, weights and gradients of some steps, and how many places a weight had."""
    model = build(kind)
    found, places = [], set()
    with piped_of(model, pin, workers) as piped:
        optimizer = torch.optim.AdamW(piped.optim_parameters(), lr=0.01)
        for step, num_calls in enumerate(calls):
            for call in range(num_calls):
                found.append(piped.forward_backward((value_of(10 * step + call),), loss_fn=square_loss))
            piped.step(lambda: (optimizer.step(), optimizer.zero_grad(zeroes)), is_async).wait()
            places.add(model[3][0].bias.data_ptr())
        piped.synchronize()
        assert model[3][0].bias.data_ptr() in places
        found += [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return {str(index): each.detach().clone() for index, each in enumerate(found)}, len(places)


@pytest.mark.parametrize("kind", repeats(["plain", "tied", "half frozen"], ["tied", "half frozen"]))
def test_steps_are_the_same_wherever_weights_are_converted(kind):
    for is_async in (True, False):
        expected, num_places = run(kind, "off", 1, is_async)
        assert num_places == 1
        for workers in (1, 2, 3):
            found, num_places = run(kind, "double", workers, is_async)
            assert_equal_bits(found, expected)
            assert num_places == 1 + is_async


def test_gradients_that_the_copies_keep():
    """``step_fn`` leaves zeros, to which the next gradients are added."""
    found, expected = (run("plain", pin, 2, True, zeroes=False)[0] for pin in ("double", "off"))
    assert_equal_bits(found, expected)


@pytest.fixture
def stepped():
    """A pipe whose model lies in its second memory, and a step of it."""
    model = build()
    home = [parameter.data for parameter in model.parameters()]
    with piped_of(model) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.1)
        seeds = iter(range(100))

        def step(update=lambda: (optimizer.step(), optimizer.zero_grad())):
            piped.forward_backward((value_of(next(seeds)),), loss_fn=square_loss)
            return piped.step(update)

        step()
        home = [parameter.data for parameter in model.parameters()]
        step()
        step().wait()
        assert all(now.data_ptr() != own.data_ptr() for now, own in zip(model.parameters(), home, strict=True))
        yield model, piped, step, home


def test_whoever_reads_finds_the_latest_weights_in_the_models_own_memory(stepped):
    model, piped, step, home = stepped
    for read in (model.state_dict, piped.synchronize, lambda: copy.deepcopy(model), lambda: piped.step(print, False)):
        step()
        step()
        read()
        assert all(now.data_ptr() == own.data_ptr() for now, own in zip(model.parameters(), home, strict=True))
        for now, newest in zip(model.parameters(), piped.optim_parameters(), strict=True):
            assert torch.equal(now, newest.bfloat16())


def test_a_write_through_memory_that_was_kept_counts(stepped):
    model, piped, step, home = stepped
    piped.synchronize()
    home[0].fill_(0.5)
    piped.step(lambda: None, False)
    assert (next(piped.optim_parameters()) == 0.5).all() and (next(model.parameters()) == 0.5).all()
    step()
    step()
    piped.synchronize()
    assert (next(model.parameters()) != 0.5).any()


def test_weights_that_are_changed_after_they_were_made_ready(stepped):
    """Through the copies: they are converted once more."""
    model, piped, step, _ = stepped
    first = next(piped.optim_parameters())
    with torch.no_grad():
        first.fill_(0.25)
    step(lambda: None).wait()
    assert (next(model.parameters()) == 0.25).all()


def test_a_backward_behind_the_change_of_places_is_refused(stepped):
    model, piped, step, _ = stepped
    output = piped(value_of(0))
    step()
    step()
    with pytest.raises(roundpipe.RoundPipeError, match="changed"):
        output.sum().backward()


def test_an_update_that_is_not_made_leaves_the_weights(stepped):
    model, piped, step, home = stepped

    def fail():
        raise ZeroDivisionError

    step(fail)
    with pytest.raises(ZeroDivisionError):
        piped.synchronize()
    piped.synchronize()
    for now, own, newest in zip(model.parameters(), home, piped.optim_parameters(), strict=True):
        assert torch.equal(now, newest.bfloat16()) and now.data_ptr() == own.data_ptr()


def test_weights_are_made_ready_while_the_round_runs(stepped):
    """The next call's weights change places without waiting for a conversion."""
    model, piped, step, _ = stepped
    step().wait()
    pairs = piped._session.optimizer.parameter_pairs()  # what is ready shows nowhere else
    assert all(pair.is_staged for pair in pairs)
    ready = [pair.banks.other.data_ptr() for pair in pairs]
    release = threading.Event()
    step(lambda: release.wait(20))
    piped.forward_backward((value_of(50),), loss_fn=square_loss)
    assert [pair.parameter.data_ptr() for pair in pairs] == ready
    release.set()


def test_layers_are_uploaded_in_few_pieces(stepped):
    model, piped, _, _ = stepped
    host = piped._session.host  # where layers lie is known to nobody else
    for index, layer in enumerate(model):
        weights = host.layer(str(index), layer)
        pieces, apart = weights.pieces(range(len(weights.slots)))
        assert len(pieces) == 1 and not apart and pieces[0][0] is weights.banks[1]


def test_without_room_there_is_no_second_memory(monkeypatch):
    expected, _ = run("plain", "off", 2, True)
    monkeypatch.setattr(host_limit.HostLimit, "has_room", lambda self, num_bytes: False)
    found, num_places = run("plain", "double", 2, True)
    assert_equal_bits(found, expected)
    assert num_places == 1


def test_a_gradient_that_grew_is_converted_again():
    early, gradient = EarlyGradient(torch.empty(2)), torch.ones(2).bfloat16()

    def convert():
        with Together() as together:
            early.convert(gradient, together)
        early.converted(gradient)

    convert()
    assert early.take(gradient).tolist() == [1, 1] and early.take(gradient) is None
    convert()
    gradient.add_(1)
    assert early.take(gradient) is None
    convert()
    assert early.take(gradient.clone()) is None


def test_a_worker_does_not_wait_for_gradients_that_are_converted():
    """The first conversion begins and does not end until the last stage's backward has run."""
    first_is_reached = threading.Event()
    waits = []

    class Reached(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            first_is_reached.set()
            return gradient

    class First(nn.Linear):
        def forward(self, value):
            return Reached.apply(super().forward(value))

    model = nn.Sequential(First(WIDTH, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(3))).bfloat16()
    expected = copy.deepcopy(model)
    for seed in (1, 2):
        square_loss(expected(value_of(seed)), None).backward()
    plan = roundpipe.ExecutePlan([(0, 1), (1, 2), (2, 3)], (3, 4), [(2, 3), (1, 2), (0, 1)])
    with roundpipe.RoundPipe(
        model, torch.float32, devices=["cpu"], model_run_config=config(1, plan=plan), pin_model="off"
    ) as piped:
        piped.optim_parameters()
        gates = piped._session.engine._workers[0]._gates  # nothing of the user's runs in a conversion
        came = gates.came

        def slow(parameters):
            waits.append(first_is_reached.wait(30))
            came(parameters)

        piped.forward_backward((value_of(1),), loss_fn=square_loss)
        piped.synchronize()
        first_is_reached.clear()
        gates.came = slow
        piped.forward_backward((value_of(2),), loss_fn=square_loss)
        piped.synchronize()
        assert waits == [True] * 4
        for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(found.grad, wanted.grad)
