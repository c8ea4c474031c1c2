"""Layers of a stage are bound one by one, as they are needed."""

import threading

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.runtime.weights.replica import BoundLayer
from tests.runtime.cases_engine import grains
from tests.runtime.models import Do, batch, config, mlp


def log_binding(monkeypatch, model, seen):
    """Have a model's layers, by their places, note when they are bound and called."""
    places = {layer: index for index, layer in enumerate(model)}
    bind = BoundLayer.bind

    def logged(self, *args):
        bind(self, *args)
        seen.append(("bound", next(places[each] for each in self.weights.layer.modules() if each in places)))

    monkeypatch.setattr(BoundLayer, "bind", logged)  # no other mark is left of when
    for layer, index in places.items():
        layer.register_forward_pre_hook(lambda *_, index=index: seen.append(("called", index)))


@grains
def test_a_layer_runs_before_the_next_one_is_bound(monkeypatch, grain):
    """The device begins while the worker still makes the rest of the stage ready."""
    model, seen = mlp(3), []
    log_binding(monkeypatch, model, seen)
    plan = roundpipe.ExecutePlan(forward=[(0, 3)], backward=[(0, 3)])
    with roundpipe.RoundPipe(model, devices=["cpu"], model_run_config=config(2, grain, plan)) as piped:
        piped(batch()).sum().backward()
    forward, backward = [0, 1, 2], [0, 1, 2] if grain == "stage" else [2, 1, 0]
    first = [[(what, index) for index in order for what in ("bound", "called")] for order in (forward, backward)]
    second = [[("called", index) for index in order] for order in (forward, backward)]
    assert seen == first[0] + second[0] + first[1] + second[1]


def test_a_worker_that_waits_for_the_stage_before_binds_meanwhile(monkeypatch):
    is_bound, seen = threading.Event(), []

    def wait(hidden):
        assert is_bound.wait(60)
        return hidden

    model = nn.Sequential(Do(wait), *mlp(3))
    log_binding(monkeypatch, model, seen)
    bind = BoundLayer.bind

    def counted(self, *args):
        bind(self, *args)
        if {("bound", index) for index in (1, 2, 3)} <= set(seen):
            is_bound.set()

    monkeypatch.setattr(BoundLayer, "bind", counted)  # as above
    plan = roundpipe.ExecutePlan(forward=[(0, 1)], fused=(1, 4), backward=[(0, 1)])
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2, model_run_config=config(2, plan=plan)) as piped:
        piped.forward_backward((batch(),), loss_fn=lambda output, label: output.sum())
    assert is_bound.is_set()


@pytest.mark.parametrize("which", [0, 1])
def test_what_layers_that_were_not_bound_have_is_left_alone(which):
    """A round that fails in front of them, and one that does not, after a count has been changed between rounds."""

    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))
            self.count = 0
            self.fails = False

        def forward(self, hidden):
            if self.fails:
                raise ZeroDivisionError
            self.count += 1
            return hidden * self.weight

    model = nn.Sequential(*(Counter() for _ in range(3)))
    plan = roundpipe.ExecutePlan(fused=(0, 3))
    with roundpipe.RoundPipe(model, devices=["cpu"], model_run_config=config(2, plan=plan)) as piped:
        run = lambda: piped.forward_backward((batch(),), loss_fn=lambda output, label: output.sum())  # noqa: E731
        run()
        assert [layer.count for layer in model] == [2, 2, 2]
        for layer in model:
            layer.count = 10
        model[which].fails = True
        with pytest.raises(ZeroDivisionError):
            run()
        assert [layer.count for layer in model] == [10, 10, 10]
        model[which].fails = False
        run()
        assert [layer.count for layer in model] == [12, 12, 12]
