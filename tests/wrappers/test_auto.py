"""`AutoRoundPipe` as an object: run options, attributes, the optimizer's side, its end."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import AutoRoundPipe, ClosedError, ConfigError, ExecutePlan, RoundPipeRunConfig
from roundpipe.wrappers.auto import PartsProgram


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 4)
        self.right = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4))
        self.bias = nn.Parameter(torch.zeros(4))
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.sizes.append(len(x))
        return {"left": self.left(x), "both": self.left(x) + self.right(x) + self.bias}


def halves(model: nn.Module | None = None, *, splits_inside: bool = True) -> AutoRoundPipe:
    model = model or Halves()
    parts = {module: RoundPipeRunConfig() for module in model.children()}
    return AutoRoundPipe(PartsProgram(model, parts, splits_inside=splits_inside), name="halves", devices=["cpu", "cpu"])


def test_the_table_lists_the_parts() -> None:
    with halves() as pipe:
        table = str(pipe)
        assert table == pipe.partition_table()
    assert table.startswith("halves: own forward on the CPU, parts on the devices: 2 layers")
    assert "left" in table and "right" in table


def test_splitting_inside_or_around() -> None:
    for splits_inside, sizes in ((True, [7]), (False, [3, 2, 2])):
        model = Halves().eval()
        with halves(model, splits_inside=splits_inside) as pipe, torch.no_grad():
            found = pipe(torch.ones(7, 4))
            assert model.sizes == sizes
            torch.testing.assert_close(found["both"], model(torch.ones(7, 4))["both"])


def test_split_and_merge_rules_are_the_whole_models() -> None:
    model = Halves().eval()
    config = RoundPipeRunConfig(num_microbatch=2, merge_output=lambda outputs: [len(one["left"]) for one in outputs])
    with halves(model) as pipe, torch.no_grad():
        assert pipe(torch.ones(7, 4), roundpipe_run_config=config) == [4, 3]
        kept = pipe(torch.ones(6, 4), roundpipe_run_config=RoundPipeRunConfig(merge_output=False))
        assert [len(one) for one in kept["left"]] == [2, 2, 2]


def test_without_gradients_nothing_is_kept() -> None:
    with halves() as pipe:
        with torch.no_grad():
            assert not pipe(torch.ones(4, 4))["both"].requires_grad
        off = RoundPipeRunConfig(requires_grad=False)
        assert not pipe(torch.ones(4, 4), roundpipe_run_config=off)["both"].requires_grad
        assert pipe(torch.ones(4, 4))["both"].requires_grad


def test_a_plan_for_one_chain_is_refused() -> None:
    config = RoundPipeRunConfig(execute_plan=ExecutePlan([], (0, 2), []))
    with halves() as pipe, pytest.raises(ConfigError, match="override_config"):
        pipe(torch.ones(4, 4), roundpipe_run_config=config)


def test_misuse_of_forward_backward_is_named() -> None:
    with halves() as pipe, pytest.raises(ConfigError, match="input_args is Tensor"):
        pipe.forward_backward(torch.ones(4, 4))  # type: ignore[arg-type]


def test_it_warns_once() -> None:
    with halves() as pipe:
        with pytest.warns(UserWarning, match="nothing overlaps"):
            pipe.forward_backward((torch.ones(4, 4),), loss_fn=lambda output, label: output["both"].sum())
        pipe.forward_backward((torch.ones(4, 4),), loss_fn=lambda output, label: output["both"].sum())


def test_dropout_is_fixed_by_the_seed() -> None:
    with halves() as pipe:
        found = []
        for seed in (3, 3, 4):
            torch.manual_seed(seed)
            found.append(pipe(torch.ones(6, 4))["both"].detach())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_the_optimizers_side_has_all_parameters() -> None:
    model = Halves()
    with halves(model) as pipe:
        assert dict(pipe.optim_named_parameters()).keys() == dict(model.named_parameters()).keys()
        assert all(a is b for a, b in zip(pipe.parameters(), model.parameters(), strict=True))
        pipe(torch.ones(4, 4))["both"].sum().backward()
        pipe.synchronize()
        torch.testing.assert_close(model.bias.grad, torch.full((4,), 4.0))
        assert model.left.weight.grad is not None
        pipe.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())


def test_loaded_weights_reach_parts_host_and_optimizer() -> None:
    model, other = Halves().eval(), Halves().eval()
    with halves(model) as pipe, torch.no_grad():
        pipe.load_state_dict(other.state_dict())
        torch.testing.assert_close(pipe(torch.ones(4, 4))["both"], other(torch.ones(4, 4))["both"])
        for name, copied in pipe.optim_named_parameters():
            assert torch.equal(copied, other.get_parameter(name))


def test_checkpoints(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model, other = Halves(), Halves()
    with halves(model) as pipe, halves(other) as loaded:
        pipe.save_checkpoint(tmp_path / "saved", step=3)
        assert loaded.load_checkpoint(tmp_path / "saved").step == 3
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_train_and_eval_reach_every_module() -> None:
    model = Halves()
    with halves(model) as pipe:
        pipe.eval()
        assert not pipe.training and not any(module.training for module in model.modules())
        with torch.no_grad():
            assert torch.equal(pipe(torch.ones(4, 4))["both"], pipe(torch.ones(4, 4))["both"])
        pipe.train()
        assert pipe.training and all(module.training for module in model.modules())


def losses_and_gradients(model: nn.Module, call: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """What a call gives and leaves, as float32 on the CPU."""
    model.zero_grad()
    loss = call()
    return [
        loss.detach().float().cpu(),
        *(one.grad.float().cpu() for one in model.parameters() if one.grad is not None),
    ]


def test_autocast_reaches_host_and_parts() -> None:
    model = Halves().eval()
    left_out = copy.deepcopy(model)
    x = torch.randn(6, 4)

    def loss_fn(output: dict[str, torch.Tensor], label: None) -> torch.Tensor:
        assert output["left"].dtype == torch.bfloat16
        return output["both"].float().square().sum()

    def eager() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            losses = [loss_fn(left_out(piece), None) for piece in x.tensor_split(3)]
        sum(losses).backward()
        return torch.stack(losses).sum()

    with halves(model) as pipe:

        def call() -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                loss = pipe.forward_backward((x,), loss_fn=loss_fn)
            pipe.synchronize()
            return loss

        with pytest.warns(UserWarning, match="nothing overlaps"):
            found = losses_and_gradients(model, call)
    for a, b in zip(found, losses_and_gradients(left_out, eager), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("autocast", [False, True])
def test_on_a_gpu_it_trains_like_eager(autocast: bool) -> None:
    """Parts and loss on the GPU, the model's own code and a module that was left out on the CPU."""
    model = Halves().eval()
    reference = copy.deepcopy(model).cuda()
    x, label = torch.randn(6, 4), torch.randn(6, 4)
    places: set[str] = set()

    def loss_fn(output: dict[str, torch.Tensor], label: torch.Tensor) -> torch.Tensor:
        places.update((output["both"].device.type, label.device.type))
        return (output["both"].float() - label).square().sum()

    def eager() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = loss_fn(reference(x.cuda()), label.cuda())
        loss.backward()
        return loss

    parts = {model.right: RoundPipeRunConfig()}
    with AutoRoundPipe(PartsProgram(model, parts, (model.left,)), devices=["cuda:0", "cuda:0"]) as pipe:

        def call() -> torch.Tensor:
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                loss = pipe.forward_backward((x,), label=label, loss_fn=loss_fn)
            pipe.synchronize()
            return loss

        with pytest.warns(UserWarning, match="nothing overlaps"):
            found = losses_and_gradients(model, call)
        assert places == {"cuda"}
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            on_gpu = pipe(x.cuda(), roundpipe_run_config=RoundPipeRunConfig(output_device="cuda:0"))["both"]
            torch.testing.assert_close(on_gpu.float(), reference(x.cuda())["both"].float(), rtol=2e-2, atol=2e-2)
    tolerance = 3e-2 if autocast else 1e-4
    for a, b in zip(found, losses_and_gradients(reference, eager), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


class Smooths(nn.Module):
    """Keeps what it made for the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.before: torch.Tensor | None = None
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x @ self.weight
        if self.before is not None:
            out = out + 0.5 * self.before[0]
        self.before = out.detach()
        self.seen.append(len(x))
        return out * len(self.seen)


@pytest.mark.filterwarnings("ignore:forward_backward of an AutoRoundPipe")
def test_the_whole_model_as_one_part() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 2))
    x = torch.randn(6, 4)
    expected = model(x)
    with AutoRoundPipe(model, devices=["cpu", "cpu"]) as pipe:
        assert pipe.model is model and "3 layers" in str(pipe)
        torch.testing.assert_close(pipe(x), expected)
        (part,) = pipe._runner.tree.parts  # where a part runs shows in a warning alone
        pipe.forward_backward((x,), loss_fn=lambda output, label: output.sum())
        pipe.synchronize()
        assert part.module is model and part.why_on_host is None
        assert model[0].weight.grad is not None
        copied = copy.deepcopy(pipe)
        torch.testing.assert_close(copied(x), expected)
        copied.close()


@pytest.mark.filterwarnings("ignore:forward_backward of an AutoRoundPipe")
def test_a_whole_model_with_state_runs_on_the_host() -> None:
    model = Smooths()
    reference = copy.deepcopy(model)
    config = RoundPipeRunConfig(num_microbatch=2)
    with AutoRoundPipe(model, name="smooths", model_run_config=config, devices=["cpu", "cpu"]) as pipe:
        with pytest.warns(UserWarning, match="smooths runs on the CPU from now on"):
            losses = [pipe.forward_backward((torch.ones(5, 4),), loss_fn=lambda out, _: out.square().sum())]
        losses.append(pipe.forward_backward((torch.ones(5, 4),), loss_fn=lambda out, _: out.square().sum()))
        pipe.synchronize()
    for loss in losses:
        pieces = [reference(piece).square().sum() for piece in torch.ones(5, 4).tensor_split(2)]
        sum(pieces).backward()
        torch.testing.assert_close(loss, torch.stack(pieces).sum().detach())
    torch.testing.assert_close(model.weight.grad, reference.weight.grad)
    assert model.seen == reference.seen == [3, 2, 3, 2]
    torch.testing.assert_close(model.before, reference.before)


class SetsItself(nn.Module):
    """Starts from the first data that it sees, as activation norms do."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(4))
        self.register_buffer("is_set", torch.tensor(False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_set:
            self.offset.data.copy_(-x.mean(0))
            self.is_set.fill_(True)
        return x + self.offset


@pytest.mark.filterwarnings("ignore:forward_backward of an AutoRoundPipe")
@pytest.mark.filterwarnings("ignore:.*runs on the CPU from now on")
def test_weights_that_a_forward_sets_through_data_stay_set() -> None:
    model = nn.Sequential(nn.Linear(4, 4), SetsItself(), nn.Linear(4, 2))
    reference = copy.deepcopy(model)
    eager = torch.optim.SGD(reference.parameters(), lr=0.1)
    with AutoRoundPipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=1), devices=["cpu"]) as pipe:
        ours = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
        for _ in range(2):
            x = torch.randn(6, 4)
            expected = reference(x).square().sum()
            expected.backward()
            eager.step()
            eager.zero_grad()
            loss = pipe.forward_backward((x,), loss_fn=lambda out, _: out.square().sum())
            pipe.step(lambda: (ours.step(), ours.zero_grad()), is_async=False)
            torch.testing.assert_close(loss, expected.detach())
            for one, other in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(one, other)


def test_the_users_model_can_be_saved(tmp_path: Path) -> None:
    model = Halves()
    with halves(model) as pipe:
        pipe(torch.ones(4, 4))
        assert pipe.model is model
        torch.save(pipe.model, tmp_path / "model.pt")


def test_its_end() -> None:
    before = threading.active_count()
    pipe = halves()
    pipe(torch.ones(4, 4))
    pipe.close()
    with pytest.raises(ClosedError):
        pipe(torch.ones(4, 4))
    assert threading.active_count() == before
    pipe = halves()
    pipe(torch.ones(4, 4))
    del pipe
    gc.collect()
    assert threading.active_count() == before


class Keeping(nn.Module):
    """Returns containers that it keeps and fills again at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept, self.counts = nn.Linear(4, 3), {"list": [None]}, [0]

    def forward(self, x):
        self.kept["y"] = self.linear(x)
        self.kept["list"][0] = 2 * self.kept["y"]
        self.counts[0] = len(x)
        return self.kept, self.counts


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config", [{}, {"num_microbatch": 3}], ids=["default", "given"])
@pytest.mark.parametrize("records_gradients", [False, True])
def test_containers_that_a_forward_fills_again_have_all_microbatches(config, records_gradients):
    model, x = Keeping(), torch.randn(9, 4)
    expected = model.linear(x)
    with roundpipe.compile(model, devices=["cpu"] * 2, model_run_config=RoundPipeRunConfig(**config)) as pipe:
        for _ in range(2):
            with torch.set_grad_enabled(records_gradients):
                kept, _ = pipe(x)
            torch.testing.assert_close(kept["y"], expected)
            torch.testing.assert_close(kept["list"][0], 2 * expected)
        _, (kept, _) = pipe.forward_backward((x,), loss_fn=lambda out, _: out[0]["y"].sum(), return_outputs=True)
        torch.testing.assert_close(kept["y"], expected)
