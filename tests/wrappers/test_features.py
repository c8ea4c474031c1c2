"""Losses that read what forward hooks collected."""

import copy

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import ConfigError, ExecutePlan, RoundPipeRunConfig
from tests.equality import assert_same_gradients

WIDTH = 6


class Collector:
    """Keeps the latest output in an attribute."""

    def __init__(self):
        self.latest = None

    def __call__(self, module, args, output):
        self.latest = output

    def loss(self, outputs, label):
        return outputs.square().sum() + self.latest.pow(3).mean()


def dict_of_features():
    features = {}

    def hook(module, args, output):
        features["x"] = output

    return hook, lambda outputs, label: outputs.square().sum() + features["x"].pow(3).mean()


def list_of_features():
    kept = []
    return (
        lambda module, args, output: kept.append(output),
        lambda outputs, label: outputs.square().sum() + kept[-1].pow(3).mean(),
    )


def attribute_of_an_object():
    collector = Collector()
    return collector, collector.loss


def variable():
    latest = None

    def hook(module, args, output):
        nonlocal latest
        latest = output

    return hook, lambda outputs, label: outputs.square().sum() + latest.pow(3).mean()


def attribute_of_a_trainer():
    class Trainer:
        def __init__(self):
            self.features = {}

        def keep(self, module, args, output):
            self.features[0] = output

        def criterion(self, outputs, label):
            return outputs.square().sum() + self.features[0].pow(3).mean()

    trainer = Trainer()
    return trainer.keep, lambda outputs, label: trainer.criterion(outputs, label)


WAYS = (dict_of_features, list_of_features, attribute_of_an_object, variable, attribute_of_a_trainer)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))).double()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layer", [0, 2])
def test_a_loss_reads_features_of_its_microbatch_with_their_gradients(way, layer):
    model, x = make_model(), torch.randn(5, WIDTH, dtype=torch.float64)
    reference = copy.deepcopy(model)
    hook, loss_fn = way()
    reference[layer].register_forward_hook(hook)
    expected = 0.0
    for piece in x.tensor_split(3):
        loss = loss_fn(reference(piece), None)
        loss.backward()
        expected += float(loss.detach())
    hook, loss_fn = way()
    model[layer].register_forward_hook(hook)
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as pipe:
        found = pipe.forward_backward((x,), loss_fn=loss_fn, run_config=RoundPipeRunConfig(num_microbatch=3))
        assert float(found) == pytest.approx(expected, rel=1e-12)
        pipe.synchronize()
        assert_same_gradients(model, reference, 1e-12)


def test_a_plan_that_runs_the_hook_apart_from_the_loss_is_refused():
    model = make_model()
    hook, loss_fn = dict_of_features()
    model[1].register_forward_hook(hook)
    plan = ExecutePlan([(0, 2)], (2, 4), [(0, 2)])
    with (
        roundpipe.RoundPipe(model, devices=["cpu"]) as pipe,
        pytest.raises(ConfigError, match="collects.*layer 1 or before"),
    ):
        x = torch.randn(5, WIDTH, dtype=torch.float64)
        pipe.forward_backward((x,), loss_fn=loss_fn, run_config=RoundPipeRunConfig(execute_plan=plan))


def test_hooks_that_leave_nothing_for_the_loss_change_no_plan():
    model, seen = make_model(), []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    plan = ExecutePlan([(0, 2)], (2, 4), [(0, 2)])
    with roundpipe.RoundPipe(model, devices=["cpu"]) as pipe:
        x = torch.randn(5, WIDTH, dtype=torch.float64)
        pipe.forward_backward(
            (x,), loss_fn=lambda outputs, label: outputs.sum(), run_config=RoundPipeRunConfig(execute_plan=plan)
        )
    assert seen


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.head(self.body(x).tanh())


@pytest.mark.filterwarnings("ignore:.*runs on the CPU from now on", "ignore:forward_backward of an AutoRoundPipe")
def test_a_hook_that_comes_after_the_first_call_of_a_part():
    torch.manual_seed(0)
    model = Two().double()
    twin, x = copy.deepcopy(model), torch.randn(6, WIDTH, dtype=torch.float64)
    with roundpipe.AutoRoundPipe(model, devices=["cpu"] * 2) as piped:
        piped.forward_backward((x,), loss_fn=lambda outputs, label: outputs.square().sum())
        piped.zero_grad()
        hook, loss_fn = dict_of_features()
        model.body.register_forward_hook(hook)
        config = RoundPipeRunConfig(num_microbatch=2)
        piped.forward_backward((x,), loss_fn=loss_fn, run_config=config)
        piped.synchronize()
    hook, loss_fn = dict_of_features()
    twin.body.register_forward_hook(hook)
    for half in x.chunk(2):
        loss_fn(twin(half), None).backward()
    assert_same_gradients(model, twin, 1e-12)
