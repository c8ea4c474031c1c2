"""Layers that are alike are known as such, whatever they are called and whatever is handed on past them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from roundpipe.core.layers import LayerChain
from roundpipe.fx.passes.alike import layer_key, module_key
from roundpipe.fx.passes.lower import lower
from roundpipe.fx.trace.tracer import trace


class Adapter(nn.Linear):
    """Knows its own name, as adapters of PEFT do."""

    def __init__(self, name: str, scale: float) -> None:
        super().__init__(8, 8)
        self.options: dict[str, Any] = {"target": name, "nested": [name, {"dtype": "torch.float32"}]}
        self.scale = scale


class Block(nn.Module):
    def __init__(self, number: int, scale: float) -> None:
        super().__init__()
        self.number, self.groups = number, 3  # of which the second is the first of one block
        self.first = Adapter(f"blocks.{number}.first", scale)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.first(x)) * self.first.scale)


class Skipping(nn.Module):
    """Every second block's value is read at the end only, so that more and more is handed on."""

    def __init__(self, scales: list[float]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(number, scale) for number, scale in enumerate(scales))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = []
        for block in self.blocks:
            x = block(x)
            values.append(x)
        for value in values[::2]:
            x = x + value
        return x


def keys_of(scales: list[float]) -> list[Hashable]:
    chain: LayerChain = lower(trace(Skipping(scales), (torch.rand(4, 8),))).chain
    assert len(chain) == len(scales)
    return [layer_key(layer, spec) for layer, spec in zip(chain, chain.specs, strict=True)]


def test_names_in_a_larger_model_do_not_count() -> None:
    def key(number: int, name: str) -> Hashable:
        return module_key(Adapter(name, 1.0), f"blocks.{number}.first")

    first = key(0, "model.blocks.0.first")
    assert first == key(1, "model.blocks.1.first")
    assert first != key(1, "other.blocks.1.first") and first != key(1, "model.blocks.0.first")


def test_names_and_values_that_pass_by_do_not_count() -> None:
    keys = keys_of([2.0] * 6)
    assert len(set(keys[:-1])) == 1 != len(set(keys))


def test_other_attributes_count() -> None:
    keys = keys_of([2.0, 2.0, 3.0, 2.0, 2.0, 2.0])
    assert keys[0] == keys[1] != keys[2]


def test_another_module_s_name_counts() -> None:
    model = Skipping([2.0] * 6)
    assert isinstance(adapter := model.blocks[1].first, Adapter)
    adapter.options["target"] = "blocks.3.first"
    chain = lower(trace(model, (torch.rand(4, 8),))).chain
    keys = [layer_key(layer, spec) for layer, spec in zip(chain, chain.specs, strict=True)]
    assert keys[0] == keys[2] != keys[1]


def test_a_number_that_equals_the_block_s_counts_as_it_is() -> None:
    model = Skipping([2.0] * 6)
    chain = lower(trace(model, (torch.rand(4, 8),))).chain
    pairs = list(zip(chain, chain.specs, strict=True))
    assert len({layer_key(layer, spec) for layer, spec in pairs[:-1]}) == 1
    assert isinstance(block := model.blocks[1], Block)
    block.groups = 4
    keys = [layer_key(layer, spec) for layer, spec in pairs]
    assert keys[0] == keys[2] == keys[3] == keys[4] != keys[1]
