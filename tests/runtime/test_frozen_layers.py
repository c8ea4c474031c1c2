"""Modules as they were when a call returned: made once, and again whenever something about them is otherwise."""

import copy

import pytest
import torch
from torch import nn

from roundpipe.runtime.weights.frozen_layers import LatestFrozenLayers
from roundpipe.runtime.weights.layer_weights import LayerWeights
from roundpipe.runtime.weights.module_copy import ModuleCopy
from roundpipe.runtime.weights.replica import Replica
from tests.runtime.cases_overlap import Held, build, eager, in_asynchronous_steps, train
from tests.runtime.models import DTYPE, assert_same, batch, gradients


class Layer(nn.Module):
    """With attributes of all kinds, of which a container holds itself."""

    def __init__(self):
        super().__init__()
        self.child = nn.Linear(2, 2)
        self.scale, self.names, self.seen, self.scales = 1.0, ["default"], [], {"default": 2.0}
        self.options = {"map": {"": [1]}}
        self.options["itself"] = self.options


CHANGES = {
    "value": lambda layer: setattr(layer, "scale", 2.0),
    "filled": lambda layer: layer.seen.append(1),
    "other item": lambda layer: layer.names.__setitem__(0, "other"),
    "other key": lambda layer: layer.scales.update(other=layer.scales.pop("default")),
    "filled within": lambda layer: layer.options["map"][""].append(2),
    "hook": lambda layer: layer.child.register_forward_hook(print),
    "mode": lambda layer: layer.child.eval(),
    "not trained": lambda layer: layer.child.bias.requires_grad_(False),
    "module": lambda layer: setattr(layer, "child", nn.Linear(2, 2)),
    "parameter": lambda layer: setattr(layer.child, "bias", nn.Parameter(torch.ones(2))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_layers_are_frozen_anew_once_something_has_changed(change):
    layers, latest = nn.Sequential(Layer(), Layer()), LatestFrozenLayers()
    first = latest.of(layers)
    assert latest.of(layers) is latest.of(layers) is first
    before = copy.copy(first.attributes_of(layers[1]))
    CHANGES[change](layers[1])
    second = latest.of(layers)
    assert second is not first and latest.of(layers) is second
    assert first.attributes_of(layers[1]) == before
    assert latest.of(layers[:1]) is not second


def test_what_a_recomputation_leaves_in_a_container_is_not_seen_by_the_next_step():
    layers, latest = nn.Sequential(Layer()), LatestFrozenLayers()
    for name in ("seen", "_forward_hooks"):
        container = latest.of(layers).attributes_of(layers[0])[name]
        container.append(1) if name == "seen" else container.update({0: print})
        assert not latest.of(layers).attributes_of(layers[0])[name]


def test_tensors_among_attributes_are_not_kept_for_another_step():
    layers, latest = nn.Sequential(Layer()), LatestFrozenLayers()
    layers[0].seen.append(torch.ones(2))
    assert latest.of(layers) is not latest.of(layers)


def test_modules_as_they_were_share_what_they_share():
    """Torch compiles code anew where two attributes were one object, and are two."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[0].active = model[1].active = ["default"]
    model[0].own, model[1].own = ["default"], ["default"]
    first, second = map(LatestFrozenLayers().of(model).attributes_of, model)
    assert first["active"] is second["active"] is not model[0].active
    assert first["own"] is not second["own"]


def test_visits_by_turns_look_at_each_module_only_if_something_has_changed(monkeypatch):
    layer, latest = Layer(), LatestFrozenLayers()
    layers = nn.Sequential(layer)
    del layer.options
    replica = Replica(layer, torch.device("cpu"))

    def visits():
        for frozen in (None, latest.of(layers), latest.of(layers)):
            replica.refresh({}, frozen)
            state, expected = replica.module.__dict__, layer.__dict__ if frozen is None else frozen.attributes_of(layer)
            assert state["scale"] == layer.scale
            assert state["seen"] is expected["seen"] and state["_forward_hooks"] is expected["_forward_hooks"]
            assert not replica.changed_attributes()

    for _ in range(3):
        visits()
    with monkeypatch.context() as without:
        without.setattr(ModuleCopy, "take_over", None)
        visits()
    for frozen in (None, latest.of(layers)):
        replica.refresh({}, frozen)
        replica.module.scale = torch.ones(1)  # left behind by a forward, which nobody gets
        assert not replica.changed_attributes()
        visits()
    layer.scale = 3.0
    visits()
    earlier = latest.of(layers)
    layer.scale, _ = 4.0, layer.seen.append(1)
    replica.refresh({}, earlier)  # a backward of the step before, while the next step's forward has begun
    assert replica.module.scale == 3.0 and replica.module.seen == []
    visits()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_attributes_that_change_while_backward_stages_run(workers):
    """Each step's backward has those of its call, whether they were the same in the step before or not."""
    model = build(held=2)
    model[1] = nn.Sequential(Held(), nn.BatchNorm1d(6)).to(DTYPE)
    reference = copy.deepcopy(model)
    hold = model[2].switch
    with in_asynchronous_steps(model, workers) as piped:
        for scale in (1.0, 1.0, 1.0, 2.0, 2.0, 1.0, 3.0):
            model[1][0].scale = reference[1][0].scale = scale
            reference.zero_grad()
            expected = eager(reference, batch(9))
            hold.may_go.clear()
            train(piped, batch(9))
            model[1][0].scale = 100.0
            model.eval()
            hold.may_go.set()
            list(piped.parameters())
            model.train()
            assert_same(gradients(model), expected, atol=1e-12)
            piped.zero_grad()
            piped.step(lambda: None)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_hook_of_a_parameter_is_for_the_calls_that_begin_with_it(workers):
    """One that is registered, or removed, while the last backward stages of a call run."""
    model, seen = build(held=2), []
    parameter, hold = model[0].weight, model[2].switch
    with in_asynchronous_steps(model, workers) as piped:

        def one_step(change=lambda: None):
            seen.clear()
            hold.may_go.clear()
            train(piped, batch(9))
            changed = change()
            hold.may_go.set()
            list(piped.parameters())
            piped.zero_grad()
            piped.step(lambda: None)
            return changed

        for _ in range(2):
            handle = one_step(lambda: parameter.register_hook(lambda gradient: seen.append(1)))
            assert not seen
            one_step()
            number = len(seen)
            assert number
            one_step(handle.remove)
            assert len(seen) == number
            one_step()
            assert not seen


def test_a_hook_of_a_parameter_runs_in_a_backward_that_comes_later():
    model, seen = build(), []
    with in_asynchronous_steps(model, 1) as piped:
        output = piped(batch(9))
        handle = model[0].weight.register_hook(lambda gradient: seen.append(1))
        output.sum().backward()
        assert seen
        seen.clear()
        output = piped(batch(9))
        handle.remove()
        output.sum().backward()
        assert not seen


class Adapter(nn.Module):
    """Writes a weight's data in a method, as adapters do to merge; ``buffer``: where there is a buffer."""

    def __init__(self, buffer):
        super().__init__()
        self.base = nn.Linear(2, 2)
        if buffer == "its own":
            self.register_buffer("mark", None)
        elif buffer == "inside":
            self.base.register_buffer("mark", torch.ones(2))

    def merge(self):
        self.base.weight.data += 1

    def forward(self, value):
        return self.base(value)


@pytest.mark.parametrize("buffer", ["its own", "inside", "beside it"])
def test_what_writes_data_of_weights_may_write_buffers_that_it_has(buffer):
    layer = nn.Sequential(Adapter(buffer))
    layer.register_buffer("frequencies", torch.ones(2))
    assert LayerWeights("layer", layer, lambda tensor: True).may_write_unseen == (buffer != "beside it")
