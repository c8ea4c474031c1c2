"""A compiled model on devices that hold a quarter of what training it takes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import roundpipe
from roundpipe import Device, DeviceMemoryError, RoundPipeRunConfig
from tests.equality import assert_same_gradients, difference, eager_forward_backward
from tests.repeats import repeats

BATCH = NUM_MICROBATCHES = 8


def language_loss(outputs: Any, label: Any) -> torch.Tensor:
    return outputs.loss


@pytest.fixture(scope="module")
def model() -> Any:
    return decoder(num_layers=8)


def decoder(num_layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def weight_bytes(model: Any) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def compiled(model: Any, budget_bytes: int, num_workers: int = 1, grain: Any = "stage") -> Any:
    config = RoundPipeRunConfig(num_microbatch=NUM_MICROBATCHES, recompute_grain=grain)
    devices = [Device("cpu", memory_bytes=budget_bytes)] * num_workers
    return roundpipe.compile(model, devices=devices, model_run_config=config)


@pytest.mark.parametrize(
    ("num_workers", "grain"), repeats([(1, "stage"), (1, "layer"), (2, "stage"), (3, "layer")], ["3-layer"])
)
def test_a_quarter_of_weights_and_gradients_is_enough(model: Any, num_workers: int, grain: str) -> None:
    model.zero_grad()
    reference = copy.deepcopy(model)
    budget_bytes = 2 * weight_bytes(model) // 4
    ids = torch.randint(0, 256, (BATCH, 48))
    inputs = {"input_ids": ids, "labels": ids}
    with compiled(model, budget_bytes, num_workers, grain) as pipe:
        for _ in range(2):
            loss = pipe.forward_backward(input_kwargs=inputs, loss_fn=language_loss)
            expected = eager_forward_backward(reference, inputs, language_loss, NUM_MICROBATCHES)
        assert 0.4 * budget_bytes < pipe.peak_device_bytes() <= budget_bytes
    assert difference(loss, expected) <= 1e-5
    assert_same_gradients(model, reference, 1e-5)


class GatedMLP(torch.nn.Module):
    """A decoder's feed-forward."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(width, inner, bias=False)
        self.up_proj = torch.nn.Linear(width, inner, bias=False)
        self.down_proj = torch.nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class GatedBlock(torch.nn.Module):
    """A residual around a feed-forward."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.mlp = GatedMLP(width, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def test_below_the_largest_module_it_is_named_with_its_bytes() -> None:
    """Blocks are cut to single Linears; of the three of a feed-forward, one has the activation's product with it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(GatedBlock(128, 384), GatedBlock(128, 384))
    linear_bytes = model[0].mlp.up_proj.weight.nbytes
    budget_bytes = linear_bytes * 9 // 5
    with compiled(model, budget_bytes) as pipe, pytest.raises(DeviceMemoryError) as caught:
        pipe.forward_backward(input_args=(torch.randn(BATCH, 48, 128),), loss_fn=squares)
    message = str(caught.value)
    assert "mlp.up_proj) does not fit" in message
    assert f"budget of {budget_bytes:,} bytes" in message
    assert f"weights {linear_bytes:,}, gradients {linear_bytes:,}" in message


class Wide(torch.nn.Module):
    """A residual around a wide MLP: narrow at its ends, six times as wide inside."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 96)
        self.middle = torch.nn.Linear(96, 96)
        self.last = torch.nn.Linear(96, 16)
        self.branches = branches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        if self.branches and h.sum() > 1e9:
            h = h * 2
        return x + self.last(torch.tanh(self.middle(h)))


def wide(branches: bool = False) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 16), *[Wide(branches) for _ in range(8)], torch.nn.Linear(16, 4))


WIDE_BUDGET = int(3.7 * weight_bytes(Wide(False)))
"""Less than a block of `wide` takes as a stage of its own beside the next one, and more than the Linears in it do."""


def squares(outputs: torch.Tensor, label: Any = None) -> torch.Tensor:
    return outputs.square().sum()


@pytest.mark.parametrize(("num_workers", "has_example"), repeats([(1, True), (2, False)], ["2-False"]))
def test_a_block_that_is_too_large_for_the_device_is_cut_inside(num_workers: int, has_example: bool) -> None:
    model = wide()
    reference = copy.deepcopy(model)
    x = torch.randn(BATCH, 16)
    with roundpipe.compile(
        model,
        example_args=(x,) if has_example else (),
        devices=[Device("cpu", memory_bytes=WIDE_BUDGET)] * num_workers,
        model_run_config=RoundPipeRunConfig(num_microbatch=NUM_MICROBATCHES),
    ) as pipe:
        for _ in range(2):
            loss = pipe.forward_backward(input_args=(x,), loss_fn=squares)
            expected = eager_forward_backward(reference, {"input": x}, squares, NUM_MICROBATCHES)
        assert 0.8 * WIDE_BUDGET < pipe.peak_device_bytes() <= WIDE_BUDGET
        assert ": 24 layers" in pipe.partition_table()
    assert difference(loss, expected) <= 1e-5
    assert_same_gradients(model, reference, 1e-5)


def test_a_block_stays_whole_where_it_fits() -> None:
    x = torch.randn(BATCH, 16)
    for devices in ("cpu", Device("cpu", memory_bytes=2 * WIDE_BUDGET)):
        with roundpipe.compile(wide(), example_args=(x,), devices=devices) as pipe:
            assert ": 8 layers" in pipe.partition_table()


def test_a_block_that_is_too_large_and_can_not_be_cut_is_named() -> None:
    x = torch.randn(BATCH, 16)
    devices = [Device("cpu", memory_bytes=WIDE_BUDGET)]
    with roundpipe.compile(wide(branches=True), example_args=(x,), devices=devices) as pipe:
        with pytest.raises(
            DeviceMemoryError, match=r"layer \d \(\d\) does not fit the device budget .* split the layer"
        ):
            pipe.forward_backward(input_args=(x,), loss_fn=squares)
