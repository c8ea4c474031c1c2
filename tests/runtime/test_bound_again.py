"""Layers that are bound again to the same memory: what was changed since is seen, and nothing is left of a visit."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import ConfigError
from roundpipe.runtime.weights.module_copy import ModuleCopy
from roundpipe.runtime.weights.replica import Replica
from tests.runtime.models import DTYPE, assert_same, batch, config, eager_round, gradients, mlp, square_loss

RESIDENCIES = ("off", "full")


def rounds(model, changes, residency, calls=2):
    """Rounds with changes in between, each compared with eager's."""
    reference = copy.deepcopy(model)
    device = roundpipe.Device("cpu", memory_bytes=2**22)
    plan = None if residency == "full" else roundpipe.ExecutePlan([(0, 2), (2, 3)], (3, 4), [(2, 3), (0, 2)])
    settings = config(3, plan=plan, residency=residency)
    with roundpipe.RoundPipe(model, devices=[device], model_run_config=settings) as piped:
        for change in (lambda each: None, *changes):
            for each in (model, reference):
                change(each)
                each.zero_grad()
            for _ in range(calls):
                expected, _ = eager_round(reference, (batch(),), num=3)
                found = piped.forward_backward((batch(),), loss_fn=square_loss)
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
            piped.synchronize()
            assert_same(gradients(model), gradients(reference))


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_who_is_trained_changes(residency):
    def freeze(model):
        model[1][0].weight.requires_grad_(False)
        model[2].requires_grad_(False)

    rounds(mlp(4), (freeze, lambda model: model.requires_grad_(True), freeze), residency)


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_hooks_of_parameters_come_and_go(residency):
    handles = {}

    def hook(model):
        handles[model] = [model[i][0].weight.register_hook(lambda gradient: 3 * gradient) for i in (1, 3)]

    def unhook(model):
        for handle in handles[model]:
            handle.remove()

    rounds(mlp(4), (hook, unhook, hook), residency)


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_values_and_memory_of_parameters_change(residency):
    def other_data(model):
        model[1][0].weight.data = model[1][0].weight.data * 2

    def written(model):
        with torch.no_grad():
            model[2][0].weight.mul_(2)
            model[2][0].bias.data.mul_(2)

    def replaced(model):
        model[3][0].weight = nn.Parameter(model[3][0].weight.detach() * 2)

    rounds(mlp(4), (other_data, written, replaced), residency)


class Unruly(nn.Module):
    """Gives its weight other memory, while it is told to."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(6, dtype=DTYPE) + 1)
        self.how = "not"

    def forward(self, hidden):
        if self.how == "other memory":
            self.weight.data = torch.zeros_like(self.weight)
        elif self.how == "another view":
            self.weight.data = self.weight.data[:, :1].expand(6, 6)
        return hidden @ self.weight


@pytest.mark.parametrize("how", ["other memory", "another view"])
@pytest.mark.parametrize("residency", ["off", "frozen stays"])
def test_what_a_forward_does_to_its_weight_ends_with_the_visit(how, residency):
    model = nn.Sequential(Unruly(), *mlp(2))
    if residency == "frozen stays":
        model[0].requires_grad_(False)
    settings = config(1, plan=roundpipe.ExecutePlan(fused=(0, 3)))
    with roundpipe.RoundPipe(model, devices=["cpu"], model_run_config=settings) as piped:
        call = lambda: piped.forward_backward((batch(),), loss_fn=square_loss)  # noqa: E731
        expected = call()
        for _ in range(2):
            model[0].how = how
            with pytest.raises(ConfigError, match="writes its parameter") if how == "other memory" else nullcontext():
                call()
            model[0].how = "not"
            torch.testing.assert_close(call(), expected, rtol=0, atol=0)
            torch.testing.assert_close(model[0].weight.detach(), torch.eye(6, dtype=DTYPE) + 1)


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_layers_that_share_a_weight_have_gradients_of_their_own(residency):
    model = mlp(4)
    for each in model[1:]:
        each[0].weight = model[0][0].weight
    reference = copy.deepcopy(model)
    settings = config(2, residency=residency)
    device = roundpipe.Device("cpu", memory_bytes=2**22)
    with roundpipe.RoundPipe(model, devices=[device], model_run_config=settings) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.01)
        eager = torch.optim.SGD(reference.parameters(), lr=0.01)
        for _ in range(4):
            expected, _ = eager_round(reference, (batch(),), num=2)
            found = piped.forward_backward((batch(),), loss_fn=square_loss)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
            piped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
            eager.step()
            eager.zero_grad()
        state, expected_state = piped.state_dict(), reference.state_dict()
        assert_same({name: state[name] for name in expected_state}, expected_state)


class Attributes(nn.Module):
    """With attributes of all kinds."""

    def __init__(self):
        super().__init__()
        self.one, self.pair, self.names, self.by_name = 1, (1, 2), [], {}
        self.child = nn.Linear(2, 2)
        self.child_too = [self.child]


def taken_over(copied, original, state, twin):
    found = copied.take_over(original.__dict__, state, {id(original.child): twin}, {}, torch.device("cpu"))
    own = ("_parameters", "_buffers", "_modules")
    return found, {name: value for name, value in state.items() if name not in own}


def test_attributes_are_as_they_are_now():
    original, copied, twin = Attributes(), ModuleCopy(), nn.Linear(2, 2)
    state = {**original.__dict__}

    def check():
        found, state_now = taken_over(copied, original, state, twin)
        own = ("_parameters", "_buffers", "_modules")
        expected = {name: value for name, value in original.__dict__.items() if name not in own}
        assert state_now.keys() == expected.keys()
        for name, value in expected.items():
            if name in found:
                assert state_now[name] == [twin] if name != "by_name" else state_now[name] == {"a": twin}
            else:
                assert state_now[name] is value, name
        return found

    assert check() == check() == ["child_too"]
    original.one = True
    assert check() == ["child_too"] and state["one"] is True
    original.names.append(original.child)
    assert set(check()) == {"child_too", "names"} and original.names == [original.child]
    original.names.clear()
    original.by_name["a"] = original.child
    assert set(check()) == {"child_too", "by_name"}
    del original.by_name, original.pair
    original.other = (1, 2)
    check()
    state["made"], state["one"] = 1, 7
    del state["names"]
    assert copied.changed(state) == [("one", 7), ("made", 1)]
    check()
    assert copied.changed(state) == []
    original.pair = (original.child, 1)
    original.child_too = None
    check_pair = taken_over(copied, original, state, twin)
    assert check_pair[0] == ["pair"] and state["pair"] == (twin, 1)
    state["pair"] = None
    assert copied.changed(state) == [("pair", None)]


CHANGES = {
    "another value": lambda layer: setattr(layer, "one", True),
    "another name": lambda layer: (delattr(layer, "last"), setattr(layer, "later", None)),
    "filled": lambda layer: layer.names.append(layer.child),
    "pointing": lambda layer: layer.by_name.update(a=layer.child),
    "pointing in a container within": lambda layer: layer.options["map"][""].append(layer.child),
    "a hook": lambda layer: layer.child.register_forward_hook(print),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("of_copy", [False, True])
def test_a_change_after_many_visits_without_one(change, of_copy, monkeypatch):
    layer = Attributes()
    layer.by_name["b"] = 1
    layer.child_too, layer.last = None, None
    layer.options = {"map": {"": [torch.device("cpu")]}, "pair": (1, torch.float32)}  # as those of adapters
    replica = Replica(layer, torch.device("cpu"))
    before = dict(layer.__dict__)
    for _ in range(4):
        replica.refresh({})
        assert not replica.changed_attributes()
    with monkeypatch.context() as without:
        without.setattr(ModuleCopy, "take_over", None)  # nothing has changed, which is seen at once
        replica.refresh({})
    CHANGES[change](replica.module if of_copy else layer)
    if of_copy:
        expected = {"another value": [], "another name": [(layer, "later", None)]}.get(change, [])
        assert replica.changed_attributes() == expected
    for _ in range(2):
        replica.refresh({})
        state = replica.module.__dict__
        assert state.keys() == layer.__dict__.keys() and state["one"] is layer.one
        assert not any(value is layer.child for value in (*state["names"], *state["by_name"].values())) or of_copy
        assert layer.child not in state["options"]["map"][""] or of_copy
        assert state["child_too"] is before["child_too"]
        assert replica.module.child._forward_hooks is layer.child._forward_hooks
    assert not replica.changed_attributes()
