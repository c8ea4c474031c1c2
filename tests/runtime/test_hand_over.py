"""Weights and gradients that are converted before they are needed, against those that are converted when they are."""

import copy
import threading

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.together import Together
from roundpipe.runtime.device import host_limit
from roundpipe.runtime.optimizer.hand_over import HandOver
from roundpipe.runtime.profiling.host_log import HostLog
from roundpipe.runtime.weights.banks import Banks, EarlyGradient
from roundpipe.runtime.weights.download import Download
from roundpipe.runtime.weights.gate import Gates
from roundpipe.runtime.weights.parameter_pair import ParameterPair
from tests.repeats import repeats
from tests.runtime.cases_overlap import LR, in_asynchronous_steps, stale_loop, train
from tests.runtime.cases_overlap import build as build_held
from tests.runtime.models import assert_equal_bits, batch, config, square_loss

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


def test_weights_that_the_next_round_needs_first_are_handed_over_first():
    """All have been uploaded for the last time when the step is made; the first stage's last backward still runs."""
    model = build_held(held=1)
    with in_asynchronous_steps(model, 1) as piped:
        opened = []
        gate = piped._session.optimizer._gates.weights  # in which order weights are written shows nowhere else
        really_open = gate.open
        gate.open = lambda parameters: (opened.extend(given := [*parameters]), really_open(given))
        hold = model[1].switch
        hold.may_go.clear()
        train(piped, batch(), plan=roundpipe.ExecutePlan([(0, 2)], (2, 4), [(0, 2)]))
        piped.step(lambda: None)
        gate.wait(parameters := list(model.parameters()), "the test")
        hold.may_go.set()
        numbers = [next(i for i, each in enumerate(parameters) if each is one) for one in opened]
        assert numbers[: len(parameters)] == list(range(len(parameters)))


def test_what_steps_have_in_the_same_jobs_is_converted_in_one_call(monkeypatch):
    """However large: between two calls a thread waits for its turn to run Python."""
    pairs = [ParameterPair([str(index)], nn.Parameter(torch.zeros(2**22).bfloat16())) for index in range(3)]
    for pair in pairs:
        pair.make_copy(torch.float32)
        pair.banks = Banks(pair.parameter, pair.parameter.data, torch.empty_like(pair.parameter.data))
        pair.parameter.grad = torch.ones(2**22).bfloat16()
    calls = []
    for name in ("_foreach_copy_", "_foreach_mul_", "_foreach_add_"):
        call = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *given, call=call: (calls.append(1), call(*given)))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *given: pytest.fail("one tensor alone"))
    hand_over = HandOver(Gates(), HostLog("optimizer"))

    def num_calls(call):
        calls.clear()
        call()
        return len(calls)

    with torch.no_grad():
        torch._foreach_add_([pair.copy for pair in pairs], 1)
    assert num_calls(lambda: hand_over.exchange(pairs, (), True)) == 2  # weights and gradients
    assert all((pair.parameter == 1).all() and (pair.copy.grad == 1).all() for pair in pairs)
    assert num_calls(lambda: hand_over.stage(pairs)) == 1 and all(pair.is_staged for pair in pairs)
    download = Download(gradients=[(pair.parameter, pair.parameter, torch.ones(2**22).bfloat16()) for pair in pairs])
    assert num_calls(lambda: download.settle(0.5)) == 1
    download = Download(gradients=[(pair.parameter, pair.parameter, torch.ones(2**22).bfloat16()) for pair in pairs])
    assert num_calls(lambda: download.settle(0.5)) == 2
    assert all((pair.parameter.grad == 1).all() for pair in pairs)


def test_a_stage_runs_while_the_next_ones_weights_are_handed_over():
    """The last layers are written once the next round has run the first microbatch through the first ones."""
    model, expected = (nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double() for _ in range(2))
    expected.load_state_dict(model.state_dict())
    has_run, waited = threading.Event(), []
    has_all, is_written = threading.Event(), threading.Event()

    def wait_in_backward(_):
        """All weights are on the device, and the round is not over, when the last layers' are to be written."""
        has_all.set()
        is_written.wait(20)

    with in_asynchronous_steps(model, 1) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=LR)
        hand_over = piped._session.optimizer._hand_over  # what is written when shows nowhere else
        write = hand_over.write_weights

        def write_late(pairs, swaps=False):
            if any(pair.parameter is model[3].weight for pair in pairs):
                is_written.set()
                waited.append(has_run.wait(20))
            write(pairs, swaps)

        def one_step(seed):
            train(piped, batch(seed=seed), plan=roundpipe.ExecutePlan([(0, 2)], (2, 4), [(0, 2)]))
            assert hook is None or has_all.wait(20)
            piped.step(lambda: (optimizer.step(), optimizer.zero_grad()))

        hook = None
        one_step(0)
        hand_over.write_weights = write_late
        hook = model[0].weight.register_hook(wait_in_backward)
        one_step(1)
        hook.remove()
        model[1].register_forward_hook(lambda *_: None if roundpipe.doing_recompute() else has_run.set())
        one_step(2)
        assert waited and all(waited)
        piped.synchronize()
        wanted = stale_loop(expected, [batch(seed=seed) for seed in range(3)], 3, 1)
        for found, each in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(found.detach(), each)
