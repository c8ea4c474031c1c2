"""Replicas: the user's module objects stay as they are, and attributes that point into the tree point into the copy."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import roundpipe
from roundpipe.core.errors import ConfigError
from roundpipe.core.layers import EXECUTION_DEVICE
from roundpipe.runtime.engine.running import RunningSteps
from roundpipe.runtime.weights.replica import Replica
from tests.runtime.models import (
    DTYPE,
    Noted,
    assert_round_is_eager,
    assert_same,
    batch,
    config,
    eager_round,
    gradients,
    mlp,
    square_loss,
)

CPU = torch.device("cpu")


class Block(nn.Module):
    """Points into its own tree in every way that a user's module does."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("shift", torch.zeros(6))
        self.method = self.add_shift
        self.partial = functools.partial(self.scaled, factor=2.0)
        self.of_module = functools.partial(torch.add, alpha=1.0)
        object.__setattr__(self, "plain_list", [self.first, self.second])
        self.by_name = {"first": self.first, "nested": [self.second]}
        object.__setattr__(self, "alias", self.second)
        object.__setattr__(self, "weights", [self.first.weight, self.scale])
        object.__setattr__(self, "weight", self.second.weight)
        self.num_calls = 0
        self.last_shape = ""

    def add_shift(self, value):
        return value + self.shift + self.scale

    def scaled(self, value, factor):
        return value * self.scale * factor

    def forward(self, value):
        self.num_calls += 1
        self.last_shape = str(tuple(value.shape))
        value = self.plain_list[0](value)
        value = self.by_name["nested"][0](value)
        value = self.alias(self.method(value).tanh())
        value = value @ self.weights[0] * self.weights[1] + value @ self.weight
        return self.partial(value)


def build():
    return nn.Sequential(Block(), nn.Tanh(), Block(), *mlp(2)).to(DTYPE)


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_attributes_that_point_into_the_tree(workers, grain):
    plan = roundpipe.ExecutePlan([(0, 2), (2, 4)], (4, 5), [(2, 4), (0, 2)])
    for each in (None, plan):
        assert_round_is_eager(build(), (batch(),), workers=workers, grain=grain, plan=each, calls=2)


def tree_state(model):
    """Identity of every object that a module tree is made of; in what order a module holds them does not count."""
    return {
        (id(module), name, id(value))
        for module in model.modules()
        for held in (module.__dict__, module._parameters, module._buffers, module._modules)
        for name, value in held.items()
        if name not in ("num_calls", "last_shape")
    }


def test_the_users_objects_are_never_replaced():
    model = nn.Sequential(*build(), nn.BatchNorm1d(6), Noted()).to(DTYPE)
    before = tree_state(model)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        for _ in range(2):
            piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(3))
            piped(batch()).sum().backward()
    assert tree_state(model) == before
    assert_same({name: p.detach() for name, p in model.named_parameters()}, values, atol=0)


def test_plain_attributes_come_back_once_per_microbatch():
    model = build()
    plan = roundpipe.ExecutePlan([(0, 2), (2, 4)], (4, 5), [(2, 4), (0, 2)])
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        for rounds in (1, 2):
            piped.forward_backward((batch(6),), loss_fn=square_loss, run_config=config(3, plan=plan))
            assert model[0].num_calls == model[2].num_calls == 3 * rounds, "recomputation does not count"
        assert model[0].last_shape == "(2, 6)"


def test_hooks_fire_with_the_layers_inputs_and_outputs():
    model = mlp(3)
    seen = []
    model[0].register_forward_pre_hook(lambda module, args: seen.append("pre"))
    model[0][0].register_forward_hook(lambda module, args, output: output * 2)
    model[2].register_full_backward_hook(lambda module, given, got: seen.append(("back", got[0].shape)))
    reference = copy.deepcopy(model)
    expected, _ = eager_round(reference, (batch(6),), num=2)
    assert seen.count("pre") == 2
    seen.clear()
    plan = roundpipe.ExecutePlan([(0, 1)], (1, 3), [(0, 1)])
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        found = piped.forward_backward((batch(6),), loss_fn=square_loss, run_config=config(2, plan=plan))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert_same(gradients(model), gradients(reference))
    assert seen.count("pre") == 4, "twice forward, twice recomputation"
    assert seen.count(("back", (3, 6))) == 2


def test_hooks_added_and_removed_between_calls():
    model = mlp(2)
    seen = []
    with roundpipe.RoundPipe(model) as piped, torch.no_grad():
        piped(batch())
        handle = model[1].register_forward_hook(lambda *_: seen.append(1))
        piped(batch(), roundpipe_run_config=config(1))
        handle.remove()
        piped(batch())
    assert seen == [1]


def test_changes_of_attributes_between_calls_are_seen():
    class Scaled(nn.Module):
        factor = 1.0

        def forward(self, value):
            return value * self.factor

    model = nn.Sequential(nn.Linear(6, 6), Scaled()).to(DTYPE)
    with roundpipe.RoundPipe(model) as piped, torch.no_grad():
        once = piped(batch())
        model[1].factor = 3.0
        torch.testing.assert_close(piped(batch()), once * 3)
        del model[1].factor
        torch.testing.assert_close(piped(batch()), once)


def test_buffers_that_change_shape_or_appear_come_back():
    class Grows(nn.Module):
        """Keeps a running history, and a buffer that is None at first."""

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.register_buffer("history", torch.zeros(0))
            self.register_buffer("first", None)
            self.register_buffer("gone", torch.ones(2))

        def forward(self, value):
            value = self.linear(value)
            self.history = torch.cat([self.history, value.detach().mean().reshape(1)])
            if self.first is None:
                self.first = value.detach().mean(0)
            self.gone = None
            return value + self.first + self.history.sum()

    def names(model):
        return {name: None if b is None else b.clone() for m in model for name, b in m._buffers.items()}

    for num_workers in (1, 2):
        for grain in ("stage", "layer"):
            model = nn.Sequential(nn.Linear(6, 6), Grows(), nn.Linear(6, 6), nn.Linear(6, 6)).to(DTYPE)
            reference = copy.deepcopy(model)
            plan = roundpipe.ExecutePlan([(0, 2)], (2, 4), [(0, 2)])
            with roundpipe.RoundPipe(model, devices=["cpu"] * num_workers) as piped:
                for _ in range(3):
                    expected, _ = eager_round(reference, (batch(),), num=3)
                    found = piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(3, grain, plan))
                    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
                    assert_same(gradients(model), gradients(reference))
                    assert_same(names(model), names(reference))
            assert len(model[1].history) == 9


def test_parametrised_modules():
    model = mlp(3)
    nn.utils.parametrizations.weight_norm(model[0][0])
    nn.utils.parametrizations.orthogonal(model[2][0])
    assert_round_is_eager(model, (batch(),), workers=2, calls=2)


def test_modules_of_other_kinds():
    model = nn.Sequential(
        nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True),
        nn.GRU(6, 6, batch_first=True),
    ).to(DTYPE)
    model.append(First())
    given = batch(4)[:, None].repeat(1, 3, 1)
    assert_round_is_eager(model, (given,), workers=2, calls=2)


class First(nn.Module):
    def forward(self, pair):
        return pair[0]


def test_the_execution_device_is_set_on_the_copy_alone():
    layer = nn.Linear(2, 2)
    setattr(layer, EXECUTION_DEVICE, CPU)
    replica = Replica(layer, torch.device("meta"))
    replica.refresh({})
    assert getattr(replica.module, EXECUTION_DEVICE) == torch.device("meta")
    assert getattr(layer, EXECUTION_DEVICE) == CPU


def test_a_shared_submodule_has_one_copy():
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    replica = Replica(model, CPU)
    assert replica.module[0] is replica.module[2] is replica.twin(shared)
    assert replica.module[0] is not shared


def test_what_holds_nothing_and_computes_nothing_is_shared():
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.passing, self.hooked = nn.Identity(), nn.Identity()
            self.empty, self.full = nn.ModuleDict(), nn.ModuleDict({"inner": nn.Linear(2, 2)})
            self.hooked.register_forward_hook(lambda *_: None)

    model = Adapted()
    copied = Replica(model, CPU).module
    assert copied.passing is model.passing and copied.empty is model.empty
    others = ("linear", "hooked", "full")
    assert all(getattr(copied, name) is not getattr(model, name) for name in others)
    root = nn.Identity()
    assert Replica(root, CPU).module is not root


def test_attributes_let_go_of_device_tensors():
    block = Block()
    replica = Replica(block, CPU)
    given = torch.zeros(6, 6)
    replica.refresh({id(block.first.weight): given})
    assert replica.module.weights[0] is given and replica.module.weights[1] is block.scale
    assert block.weights[0] is block.first.weight
    replica.drop_tensors()
    assert replica.module.weights is None
    replica.refresh({})
    assert replica.module.weights[0] is block.first.weight


def test_script_modules():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to(DTYPE)
    reference = copy.deepcopy(model)
    model[1] = torch.jit.script(model[1])
    eager_round(reference, (batch(),), num=3)
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(3))
    assert_same(gradients(model), gradients(reference))


class Scaled(nn.Module):
    """May get a factor later."""

    def __init__(self):
        super().__init__()
        self.linear, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_parameter("factor", None)
        self.register_buffer("shift", None)

    def forward(self, value):
        value = self.other(torch.tanh(self.linear(value)))
        value = value if self.factor is None else value * self.factor
        return value if self.shift is None else value + self.shift


def halved(value):
    return nn.Parameter(value.detach() / 2)


CHANGES = {
    "weight_norm": lambda layer: nn.utils.parametrizations.weight_norm(layer.linear),
    "spectral_norm": lambda layer: nn.utils.parametrizations.spectral_norm(layer.linear),
    "pruned": lambda layer: prune.l1_unstructured(layer.linear, "weight", 0.5),
    "submodule replaced": lambda layer: setattr(layer, "linear", nn.Linear(6, 6, bias=False)),
    "submodule put around": lambda layer: setattr(layer, "linear", nn.Sequential(layer.linear, nn.Tanh())),
    "parameter given": lambda layer: setattr(layer, "factor", nn.Parameter(torch.full((6,), 2.0))),
    "parameter taken": lambda layer: setattr(layer.linear, "bias", None),
    "parameter replaced": lambda layer: setattr(layer.linear, "weight", halved(layer.linear.weight)),
    "buffer given": lambda layer: setattr(layer, "shift", torch.ones(6)),
    "buffer added": lambda layer: layer.register_buffer("unused", torch.ones(6)),
    "tied": lambda layer: setattr(layer.other, "weight", layer.linear.weight),
    "another class": lambda layer: setattr(layer.other, "__class__", Doubled),
}


class Doubled(nn.Linear):
    def forward(self, value):
        return 2 * super().forward(value)


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_whose_structure_changes_between_calls(change):
    model = nn.Sequential(nn.Linear(6, 6), Scaled(), nn.Linear(6, 6)).to(DTYPE).eval()
    reference = copy.deepcopy(model)
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        for changes in (False, True, False):
            for one in (model, reference):
                one.zero_grad()
                if changes:
                    torch.manual_seed(5)
                    CHANGES[change](one[1])
                    one.to(DTYPE).eval()
            expected, _ = eager_round(reference, (batch(),), num=3)
            found = piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(3))
            piped.synchronize()
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
            assert_same(gradients(model), gradients(reference))


def test_weights_that_are_no_longer_tied():
    model = nn.Sequential(nn.Linear(6, 6), Scaled(), nn.Linear(6, 6)).to(DTYPE)
    model[1].other.weight = model[1].linear.weight
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        for _ in range(2):
            model.zero_grad()
            reference = copy.deepcopy(model)
            eager_round(reference, (batch(),), num=3)
            piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(3))
            assert_same(gradients(model), gradients(reference))
            model[1].other.weight = halved(model[1].linear.weight)


@pytest.mark.parametrize("change", ["weight_norm", "submodule put around", "parameter given", "parameter taken"])
def test_a_structure_that_changes_before_the_backward_is_an_error(change):
    model = nn.Sequential(nn.Linear(6, 6), Scaled(), nn.Linear(6, 6)).to(DTYPE)
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        for changes in (False, True):
            outputs = piped(batch())
            if changes:
                CHANGES[change](model[1])
                with pytest.raises(ConfigError, match="while a round was running that needs the model as it was"):
                    outputs.sum().backward()
            else:
                outputs.sum().backward()


@pytest.mark.parametrize("change", ["weight_norm", "submodule put around", "parameter given", "parameter taken"])
def test_a_worker_makes_no_copy_of_another_structure_than_was_laid_out(change, monkeypatch):
    """As if somebody changed it between a call's begin and the worker's first look."""
    model = nn.Sequential(nn.Linear(6, 6), Scaled(), nn.Linear(6, 6)).to(DTYPE)
    # between a call's begin and a worker's first look no user's code runs
    begin = RunningSteps.begin
    monkeypatch.setattr(RunningSteps, "begin", lambda *given: (CHANGES[change](model[1]), begin(*given)))
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        with pytest.raises(ConfigError, match="while a round was running that needs the model as it was"):
            piped(batch())
        monkeypatch.undo()
        torch.testing.assert_close(piped(batch()), model.to(DTYPE)(batch()), rtol=0, atol=1e-12)
