"""Costs against closed forms, against real autograd, and their price."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from roundpipe.fx import counting
from roundpipe.fx.graph.nodes import value_bytes
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.passes import cost
from roundpipe.fx.passes.cost import NodeCost
from tests.fx import handmade


def costs_by_name(traced: TracedGraph, **options: Any) -> dict[str, NodeCost]:
    return {node.name: value for node, value in cost.measure(traced, **options).items()}


class Perceptron(nn.Module):
    def __init__(self, width: int = 8, bias: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def test_linear_layers_by_formula() -> None:
    found = costs_by_name(handmade.trace(Perceptron(), torch.randn(6, 8)))
    up, down, tanh = found["up"], found["down"], found["tanh"]
    assert up.forward_flops == 2 * 6 * 8 * 32
    assert up.backward_flops == 2 * 6 * 8 * 32  # the input needs no gradient: the weight's alone
    assert down.backward_flops == 2 * down.forward_flops
    assert up.num_parameters == 8 * 32 and up.parameter_bytes == up.gradient_bytes == 8 * 32 * 4
    assert [node.name for node in up.saved_values] == ["x"] and up.saved_bytes == 0
    assert [node.name for node in tanh.saved_values] == ["tanh"]
    assert found["x"] == NodeCost()


def test_frozen_parameters_have_no_gradient_and_less_backward() -> None:
    model = Perceptron()
    model.down.requires_grad_(False)
    found = costs_by_name(handmade.trace(model, torch.randn(6, 8)))
    assert found["down"].gradient_bytes == 0 and found["down"].parameter_bytes > 0
    assert found["down"].backward_flops == found["down"].forward_flops
    model.requires_grad_(False)
    found = costs_by_name(handmade.trace(model, torch.randn(6, 8)))
    assert found["up"].backward_flops == 0 and found["up"].backward_s == 0


class Twice(nn.Module):
    """Views, writes in place and attention, each of several sizes and several times."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Perceptron(8, bias=index > 0) for index in range(3)])
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x.view(3, 2, 8)).flatten(0, 1)
            x = F.scaled_dot_product_attention(x[None], x[None], x[None])[0]
        return self.norm(x).clone().mul_(2).t().contiguous()


def test_operators_inferred_once_cost_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = handmade.trace(Twice(), torch.randn(6, 8))
    found = cost.measure(traced)
    monkeypatch.setattr(cost, "recalled", lambda mode: contextlib.nullcontext())
    assert cost.measure(traced) == found


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_attention_is_counted_forward_and_backward() -> None:
    found = costs_by_name(handmade.trace(Attention(), torch.randn(2, 10, 16)))
    attention = found["scaled_dot_product_attention"]
    assert attention.forward_flops == 2 * 2 * (2 * 2) * 10 * 10 * 8
    assert attention.backward_flops == pytest.approx(2.5 * attention.forward_flops)
    whole = costs_by_name(handmade.trace(nn.Sequential(Attention()), torch.randn(2, 10, 16), leaves=["0"]))
    projection = 2 * 20 * 16 * 48
    assert whole["_0"].forward_flops == attention.forward_flops + projection


def saved_for_real(model: nn.Module, *args: torch.Tensor) -> int:
    kept: dict[int, int] = {}
    weights = {t.untyped_storage().data_ptr() for t in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(*args)
    del output
    return sum(kept.values())


class Saving(nn.Module):
    """Dropout, norm, softmax: each keeps something of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = Perceptron()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.softmax(self.mlp(self.norm(x)).relu() * 2, -1)


@pytest.mark.parametrize("leaf", [True, False])
def test_saved_bytes_equal_what_autograd_really_keeps(leaf: bool) -> None:
    model, x = Saving(), torch.randn(5, 8)
    if leaf:
        found = costs_by_name(handmade.trace(nn.Sequential(model), x, leaves=["0"]))
        leaf_cost = found["_0"]
        total = leaf_cost.saved_bytes + sum(value_bytes(node) for node in leaf_cost.saved_values)
    else:
        found = costs_by_name(handmade.trace(model, x))
        values = {node for value in found.values() for node in value.saved_values}
        total = sum(value.saved_bytes for value in found.values())
        total += sum(map(value_bytes, values))
    assert total == saved_for_real(model, x)


def test_workspace_is_the_peak_of_temporaries() -> None:
    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + 1  # one more
            z = y * 2  # two at once
            del y
            return (z.view(-1) + z.view(-1)).sum()  # z and the sum of both, then the sum's own 4 bytes

    found = costs_by_name(handmade.trace(nn.Sequential(Chain()), torch.randn(100), leaves=["0"]))
    assert found["_0"].workspace_bytes == 2 * 400 + 4


def test_nodes_that_look_alike_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)], nn.Linear(8, 4))
    traced = handmade.trace(model, torch.randn(2, 8))
    runs: list[int] = []
    forward = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: runs.append(self.out_features) or forward(self, x))
    found = costs_by_name(traced)
    # the first (no gradient to the input), the middle ones, the last: with autograd, and once per shape without it
    assert runs == [8, 8, 8, 4, 4]
    assert len({found[f"_{index}"].forward_flops for index in range(20)}) == 1


def test_same_weights_with_another_stride_cost_other() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, stride=2))
    found = costs_by_name(handmade.trace(model, torch.randn(2, 4, 8, 8)))
    assert found["_0"].forward_flops == 4 * found["_1"].forward_flops


def test_no_memory_and_no_trace_is_left_on_the_model() -> None:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.norm = nn.BatchNorm1d(4)
            self.cache: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.cache = x
            return self.norm(self.linear(x))

    model = nn.Sequential(Remembering())
    traced = handmade.trace(model, torch.randn(2, 4), leaves=["0"])
    model[0].cache = None
    before, state = dict(model[0].__dict__), {n: t.clone() for n, t in model.state_dict().items()}
    rng = torch.get_rng_state()
    cost.measure(traced)
    assert model[0].__dict__ == before and model[0].cache is None
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(rng, torch.get_rng_state())


LENGTHS: list[int] = []


def test_what_the_code_of_leaves_writes_down_is_taken_back() -> None:
    class Writes(nn.Module):
        def __init__(self, parent: list[Any], log: list[int]) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.parent = parent  # the model, which is no submodule in a list
            self.log = log

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for log in (LENGTHS, self.log, self.parent[0].log):
                log.append(len(x))
            return x * self.weight

    parent: list[Any] = []
    log: list[int] = []
    model = nn.Sequential(Writes(parent, log), Writes(parent, log), Writes(parent, []))
    model.log = []  # type: ignore[assignment]
    parent.append(model)
    traced = handmade.trace(model, torch.randn(2, 4), leaves=["0", "1", "2"])
    for written in (LENGTHS, log, model.log, model[2].log):
        written.clear()  # type: ignore[operator]
    found = costs_by_name(traced)
    assert found["_0"].forward_flops == found["_2"].forward_flops and not found["_0"].estimated
    assert [LENGTHS, log, model.log, model[2].log] == [[], [], [], []]


def test_meta_models_are_measured() -> None:
    with torch.device("meta"):
        model = Perceptron(4096)
    found = costs_by_name(handmade.trace(model, torch.empty(1024, 4096, device="meta")))
    assert found["up"].forward_flops == 2 * 1024 * 4096 * 4 * 4096


class DataDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight if x.sum().item() > 0 else x


def test_what_cannot_run_on_fakes_is_estimated() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.opaque = nn.Linear(8, 8), DataDependent()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.before(x)

    model = Model()
    traced = handmade.trace(model, torch.randn(3, 8))
    before = traced.body[0]
    with traced.graph.inserting_after(before):
        node = traced.graph.call_module("opaque", (before,))
    node.meta["value"] = before.meta["value"]
    found = costs_by_name(traced)["opaque"]
    assert found.estimated
    assert found.forward_flops == 2 * 8 * 3 and found.num_parameters == 8
    assert found.forward_s > 0 and found.saved_bytes > 0 and found.workspace_bytes > 0


def test_what_fails_on_fakes_is_not_logged_by_torch(caplog: pytest.LogCaptureFixture) -> None:
    """As kernels without a meta function for a dtype do, around which a module may have Python of its own."""

    class Mismatched(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.mm(x, x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.leaf = nn.Linear(8, 8), Mismatched()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.before(x)

    traced = handmade.trace(Model(), torch.randn(6, 8))
    (before,) = (node for node in traced.graph.nodes if node.target == "before")
    with traced.graph.inserting_after(before):
        node = traced.graph.call_module("leaf", (before,))
    node.meta["value"] = before.meta["value"]
    torchs = logging.getLogger("torch._subclasses.fake_tensor")
    torchs.addHandler(caplog.handler)  # it does not propagate
    try:
        found = costs_by_name(traced)["leaf"]
    finally:
        torchs.removeHandler(caplog.handler)
    assert found.estimated and not caplog.records


def test_in_place_nodes_are_run() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).relu_().add_(1)

    found = costs_by_name(handmade.trace(Model(), torch.randn(3, 8)))
    assert not any(value.estimated for value in found.values())
    assert found["relu_"].workspace_bytes == 0


def test_a_profile_turns_counts_into_seconds() -> None:
    profile = cost.DeviceProfile(flops_per_s=1e6, bytes_per_s=1e6, kernel_s=1e-9)
    found = costs_by_name(handmade.trace(Perceptron(), torch.randn(6, 8)), profile=profile)
    up = found["up"]
    assert up.forward_s == pytest.approx((up.forward_flops + (6 * 8 + 8 * 32 + 6 * 32) * 4) / 1e6)
    slow = cost.DeviceProfile(kernel_s=1.0)
    assert costs_by_name(handmade.trace(Perceptron(), torch.randn(6, 8)), profile=slow)["up"].forward_s == 1


def test_formulas_name_kernels_that_torch_has() -> None:
    """The counter of FLOPs is given kernels of this torch; a renamed kernel would be counted as nothing."""
    formulas = counting.extra_formulas()
    names = {packet.__name__.rpartition(".")[2] for packet in formulas}
    assert "_scaled_dot_product_flash_attention_for_cpu" in names


def test_backward_hooks_of_the_users_see_nothing_of_it() -> None:
    model, seen = Perceptron(), list[Any]()
    model.up.register_full_backward_hook(lambda module, into, out: seen.append(out[0]))
    model.down.register_full_backward_pre_hook(lambda module, out: seen.append(out[0]))
    found = costs_by_name(handmade.trace(model, torch.randn(6, 8)))
    assert found["down"].backward_flops == 2 * found["down"].forward_flops and not seen
    model(torch.randn(6, 8)).sum().backward()
    assert len(seen) == 2
