"""Stages without processes: what each takes and has, that they give what the model gives, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.errors import ConfigError, PartitionError, TraceError
from roundpipe.distributed import StageModule, model_outputs, parameters_on_meta, partition_stages
from roundpipe.distributed.boundary import Boundary
from roundpipe.distributed.weights import materialise
from tests.fx.modules import BranchAtRoot
from tests.models import ManyOutputs, ResNet, SharedTwice, UNet, many_loss

CPU = torch.device("cpu")


def run(stages: Sequence[StageModule], *args: Any, **kwargs: Any) -> Any:
    """The model's outputs by one stage after the other."""
    values = stages[0](*args, **kwargs)
    for stage in stages[1:]:
        values = stage(*values)
    return model_outputs(stages[-1], values)


class Sizes(nn.Module):
    """Names that a stage's module must not take for its own, a buffer that is not saved, a size in the last layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.plan = nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor | int]:
        length = self.layers[0](x[:, ::2]).shape[1]
        for layer in self.layers:
            x = layer(x) * self.plan
        return {"mean": x.sum(1) / length * self.scale, "count": 3}


def tokens(batch: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(0, 90, (batch, 6))}


def floats(*shape: int) -> Callable[[int], dict[str, torch.Tensor]]:
    return lambda batch: {"x": torch.randn(batch, *shape)}


@pytest.mark.parametrize(
    ("build", "inputs", "num_stages"),
    [
        (UNet, floats(3, 16, 16), 4),
        (ManyOutputs, floats(16), 3),
        (SharedTwice, tokens, 4),
        (Sizes, floats(6, 4), 3),
    ],
)
def test_stages_one_after_the_other_are_the_model(
    build: Callable[[], nn.Module], inputs: Callable[[int], dict[str, torch.Tensor]], num_stages: int
) -> None:
    model = build()
    example, batch = inputs(2), inputs(5)
    stages = partition_stages(model, num_stages, example_kwargs=example)
    outputs, expected = run(stages, **batch), model(**batch)
    torch.testing.assert_close(outputs, expected)
    keys = {key: id(tensor) for stage in stages for key, tensor in stage.state_dict(keep_vars=True).items()}
    assert keys == {key: id(tensor) for key, tensor in model.state_dict(keep_vars=True).items()}
    if build is ManyOutputs:
        many_loss(outputs, None).backward()
        assert any(parameter.grad is not None for parameter in model.parameters())


def test_a_number_travels_as_a_shape() -> None:
    boundary = Boundary(tensors=("x",), dtypes=(torch.float32,), sizes=("n",), constants=(("k", 2),))
    carry = {"x": torch.randn(2, 3).t(), "n": 7, "k": 2}
    sent = boundary.pack(carry, torch.device("cpu"))
    assert [tensor.numel() for tensor in sent] == [6, 0] and sent[0].is_contiguous()
    found = boundary.unpack(sent)
    assert torch.equal(found.pop("x"), carry.pop("x")) and found == carry
    with pytest.raises(ConfigError, match="the value k between two stages is 3; it was 2"):
        boundary.pack({"x": torch.ones(1), "n": 7, "k": 3}, torch.device("cpu"))


def test_a_compiled_model_has_stages_of_its_own_layers() -> None:
    model = UNet()
    x = torch.randn(2, 3, 16, 16)
    with roundpipe.compile(model, example_args=(x,), devices=["cpu"]) as pipe:
        stages = partition_stages(pipe, 3)
    torch.testing.assert_close(run(stages, x), model(x))
    assert pipe.trace_count == 1


def test_layers_run_with_the_tensors_that_the_stage_has_now() -> None:
    stages = partition_stages(Sizes(), 2, example_kwargs=floats(6, 4)(2))
    stages = [materialise(stage, CPU, None).double().float() for stage in stages]  # buffers are other tensors now
    x = torch.randn(2, 6, 4)
    assert run(stages, x=x)["mean"].abs().sum() > 0
    stages[-1].get_buffer("scale").zero_()
    assert run(stages, x=x)["mean"].abs().sum() == 0


def test_only_a_stage_s_own_weights_are_read() -> None:
    values = Sizes().state_dict()
    with parameters_on_meta():
        model = Sizes()
    assert all(parameter.is_meta for parameter in model.parameters()) and not model.scale.is_meta
    stages = partition_stages(model, 3, example_kwargs=floats(6, 4)(2))
    read: list[str] = []

    class Recorded(dict[str, torch.Tensor]):
        def __getitem__(self, key: str) -> torch.Tensor:
            read.append(key)
            return super().__getitem__(key)

    last = materialise(stages[-1], CPU, Recorded(values))
    assert set(read) == set(last.state_dict()) < set(values)
    assert all(parameter.is_meta for parameter in model.parameters())
    for key, value in last.state_dict().items():
        assert torch.equal(value, values[key])
    stages = [materialise(stage, CPU, values) for stage in stages]
    reference = Sizes()
    reference.load_state_dict(values)
    x = torch.randn(2, 6, 4)
    torch.testing.assert_close(run(stages, x=x), reference(x))


def test_values_that_are_not_there_are_named() -> None:
    with parameters_on_meta():
        model = Sizes()
    stage = partition_stages(model, 1, example_kwargs=floats(6, 4)(2))[0]
    with pytest.raises(ConfigError, match=r"plan.*: no values"):
        materialise(stage, CPU, None)
    values = {**Sizes().state_dict(), "plan": torch.ones(5)}
    with pytest.raises(ConfigError, match=r"plan has shape \(5,\) in weights=, and \(4,\)"):
        materialise(stage, CPU, values)
    with torch.device("meta"):
        model = Sizes()
    stage = partition_stages(model, 1, example_kwargs=floats(6, 4)(2))[0]
    with pytest.raises(ConfigError, match="scale: no values"):
        materialise(stage, CPU, Sizes().state_dict())


class NormTwice(nn.Module):
    """One BatchNorm, and so one set of statistics, in the first layer and in the last."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layers(self.norm(x)))


def test_a_buffer_that_is_written_stays_on_one_stage() -> None:
    with pytest.raises(PartitionError, match="1 stages at most"):
        partition_stages(NormTwice(), 2, example_args=(torch.randn(3, 4),))


def test_what_can_not_be_is_refused() -> None:
    model = UNet()
    x = torch.randn(2, 3, 16, 16)
    with pytest.raises(PartitionError, match=r"num_stages=50, but the model can be cut into \d+ stages"):
        partition_stages(model, 50, example_args=(x,))
    with pytest.raises(ConfigError, match="num_stages=0"):
        partition_stages(model, 0, example_args=(x,))
    with pytest.raises(ConfigError, match="no example"):
        partition_stages(model, 2)
    with pytest.raises(TraceError):
        partition_stages(BranchAtRoot(), 2, example_args=(torch.randn(2, 16),))
    stages = partition_stages(model, 2, example_args=(x,))
    with pytest.raises(ConfigError, match="traced for other arguments: .*dimension 2"):
        stages[0](torch.randn(2, 3, 8, 16))
    with pytest.raises(ConfigError, match="traced in train mode"):
        stages[0].eval()(x)
    with pytest.raises(ConfigError, match="tensors that a stage gives, got 1"):
        stages[1](x)


REGISTRY: dict[str, float] = {"scale": 2.0}
"""To which others add, as building a model of Hugging Face does."""


class ReadsRegistry(Sizes):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor | int]:
        return super().forward(x * REGISTRY["scale"])


def test_copied_stages_outlast_changes_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second cut, in eval mode, or another model that registers itself must not end a training."""
    model, x = ReadsRegistry(), torch.randn(2, 6, 4)
    parts = partition_stages(model, 2, example_kwargs={"x": x})
    stages = [materialise(part, CPU, None) for part in parts]
    expected = model(x)
    monkeypatch.setitem(REGISTRY, "other", 3.0)
    torch.testing.assert_close(run(stages, x=x), expected)
    with pytest.raises(ConfigError, match="global REGISTRY holds something else now"):
        parts[0](x=x)
    copied = partition_stages(model.eval(), 2, example_kwargs={"x": x})
    torch.testing.assert_close(run([materialise(part, CPU, None) for part in copied], x=x), expected)
    torch.testing.assert_close(run(stages, x=x), expected)
    with pytest.raises(ConfigError, match="the model is in eval mode now; its stages were cut in train mode"):
        materialise(parts[1], CPU, None)


def test_eval_mode_is_that_of_the_model() -> None:
    model = ResNet().eval()
    x = torch.randn(2, 3, 16, 16)
    stages = partition_stages(model, 3, example_args=(x,))
    torch.testing.assert_close(run(stages, x), model(x))
    assert not any(module.training for stage in stages for module in stage.modules())
