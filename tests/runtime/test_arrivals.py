"""Weights that come up layer by layer, as the optimizer's thread gives them back."""

import threading
import time
from itertools import pairwise

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.runtime.device.backend import Device
from roundpipe.runtime.device.cpu import CpuBackend
from roundpipe.runtime.optimizer import hand_over
from roundpipe.runtime.optimizer.hand_over import HandOver
from roundpipe.runtime.profiling.host_log import HostLog
from roundpipe.runtime.weights.gate import Gates
from roundpipe.runtime.weights.parameter_pair import ParameterPair
from tests.runtime.cases_overlap import LR, SINGLES, in_asynchronous_steps, stale_loop, train
from tests.runtime.models import assert_equal_bits, batch

pytestmark = pytest.mark.timeout(60)
ONE_STAGE = roundpipe.ExecutePlan([], (0, 4), [])
THREE = roundpipe.ExecutePlan([(0, 2)], (2, 4), [(0, 2)])
TWO_WORKERS = roundpipe.ExecutePlan([(0, 3)], (3, 4), [(1, 3), (0, 1)])


def linears():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double()


@pytest.fixture
def by_parameter(monkeypatch):
    """Each parameter is handed over by itself."""
    monkeypatch.setattr(hand_over, "HAND_OVER_BYTES", 1)


def run(model, plan, workers=1, before_write=lambda pairs: None, num_steps=4):
    """The report of some asynchronous steps."""
    with in_asynchronous_steps(model, workers) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=LR)
        handing = piped._session.optimizer._hand_over  # what is written when shows nowhere else
        write = handing.write_weights
        handing.write_weights = lambda pairs, swaps=False: (before_write(pairs), write(pairs, swaps))
        for seed in range(num_steps):
            train(piped, batch(seed=seed), plan=plan)
            piped.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        piped.synchronize()
        return piped.report()


def assert_follows(model, plan, workers=1, before_write=lambda pairs: None, num_steps=4):
    """Asynchronous steps give the weights of the same steps in eager."""
    report = run(model, plan, workers, before_write, num_steps)
    wanted = stale_loop(linears(), [batch(seed=seed) for seed in range(num_steps)], 3, 1)
    for found, each in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(found.detach(), each)
    return report


@pytest.mark.parametrize("plan", [ONE_STAGE, THREE], ids=["one stage", "three"])
def test_a_stage_begins_with_the_layers_that_are_there(by_parameter, plan):
    """Those behind are written once the first one has run in the next round."""
    model = linears()
    has_run, waited = threading.Event(), []
    model[0].register_forward_hook(lambda *_: has_run.set())

    def wait_for_the_first_layer(pairs):
        if any(pair.parameter is model[0].weight for pair in pairs):
            has_run.clear()
        if len(waited) < 2 and any(pair.parameter is model[1].weight for pair in pairs):
            waited.append(has_run.wait(20))

    assert_follows(model, plan, before_write=wait_for_the_first_layer)  # of four steps; a round follows two writes
    assert waited == [True, True]


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("plan", [ONE_STAGE, THREE, TWO_WORKERS], ids=["one stage", "three", "four"])
def test_weights_are_those_of_one_update_however_late_they_are_written(by_parameter, plan, workers):
    draws = iter(torch.rand(10_000, generator=torch.Generator().manual_seed(workers)).tolist())
    assert_follows(linears(), plan, workers, lambda pairs: time.sleep(0.01 * next(draws)), num_steps=6)


def test_frozen_layers_and_late_ones_of_one_stage(by_parameter, monkeypatch):
    """What the visit before has brought is taken for what it was, not for what is about to be written."""
    late, at_once = linears(), linears()
    for model in (late, at_once):
        model[1].requires_grad_(False)
    run(late, ONE_STAGE, before_write=lambda pairs: time.sleep(0.01))
    monkeypatch.undo()
    run(at_once, SINGLES)
    assert_equal_bits(dict(late.named_parameters()), dict(at_once.named_parameters()))


def test_what_a_computation_waits_for_is_no_computation(by_parameter):
    """The report's idle share and the timeline's waits have it."""
    model, late_s = linears(), 0.15

    def write_late(pairs):
        if any(pair.parameter is model[2].weight for pair in pairs):
            time.sleep(late_s)

    report = assert_follows(model, ONE_STAGE, before_write=write_late)
    (worker,) = report.workers
    assert worker.idle["optimizer"] * report.wall_s >= 2 * 0.9 * late_s  # two rounds came behind a write
    assert report.busy * report.wall_s < late_s


def test_other_work_on_the_host_waits_while_weights_are_written():
    gates, log = Gates(), HostLog("optimizer")
    pairs = [ParameterPair([str(index)], nn.Parameter(torch.zeros(4).bfloat16())) for index in range(3)]
    for pair in pairs:
        pair.make_copy(torch.float32)
        pair.parameter.grad = torch.ones(4).bfloat16()
    handing, done = HandOver(gates, log), threading.Event()
    write, seen = handing.write_weights, []

    def watched(group, swaps=False):
        other = threading.Thread(target=lambda: (gates.wait_written("the test"), done.set()), daemon=True)
        other.start()
        seen.append(done.wait(0.1))
        write(group, swaps)

    handing.write_weights = watched
    handing.exchange(pairs, (), weights_changed=True)
    assert seen == [False] and done.wait(20) and not gates.is_writing
    handing.exchange(pairs, (), weights_changed=False)
    assert len(seen) == 1 and not gates.is_writing


@pytest.mark.parametrize("with_gradients", [True, False])
def test_weights_that_come_within_a_computation_are_none_of_its_activations(with_gradients):
    target = CpuBackend(Device("cpu", memory_bytes=10_000), "here")
    with torch.set_grad_enabled(with_gradients), target.activations([]):
        kept = torch.ones(100)
        with target.uncounted():
            torch.ones(1000)
        with pytest.raises(ZeroDivisionError), target.uncounted():
            raise ZeroDivisionError
        kept = kept + torch.ones(100)
    assert target.ledger.peak_bytes == 3 * kept.nbytes


def test_a_timeline_has_the_pieces_of_what_was_interrupted(by_parameter):
    model = linears()
    with in_asynchronous_steps(model, 1) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=LR)
        handing = piped._session.optimizer._hand_over  # as above
        write = handing.write_weights

        def write_late(pairs, swaps=False):
            if any(pair.parameter is model[2].weight for pair in pairs):
                time.sleep(0.1)
            write(pairs, swaps)

        handing.write_weights = write_late
        for seed in range(2):
            train(piped, batch(seed=seed), plan=ONE_STAGE)
            piped.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        with piped.record_timeline() as timeline:
            train(piped, batch(seed=2), plan=ONE_STAGE)
    first = [span for span in timeline.spans if span.lane == "compute" and span.args["microbatch"] == 0]
    assert [span.args.get("piece", 0) for span in first] == [*range(len(first))] and len(first) > 1
    weights = sorted((span for span in timeline.spans if span.lane == "weights"), key=lambda span: span.start_s)
    assert [span.args.get("piece", 0) for span in weights] == [*range(len(weights))] and len(weights) > 1
    edges = [span.args["layers"] for span in weights]
    assert edges[0][0] == 0 and edges[-1][1] == 4 and all(a[1] == b[0] for a, b in pairwise(edges))
    waits = {span.args.get("cause") for span in timeline.spans if span.lane == "waits"}
    assert waits >= {"optimizer"}
