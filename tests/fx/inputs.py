"""Inputs of small models, by batch size and length, and what a model under test is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

VOCABULARY = 64

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model under test."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], Inputs]
    """Batch size and length to keyword arguments."""
    loss: Callable[[Any], torch.Tensor] = lambda out: out.loss
    lengths: tuple[int, ...] = (16, 24)


def squared(out: Any) -> torch.Tensor:
    """A loss for a model that returns a tensor, or a tuple with one in front."""
    return (out if isinstance(out, torch.Tensor) else out[0]).pow(2).mean()


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def causal_inputs(batch: int, length: int) -> Inputs:
    """Token ids, a mask of ones, and labels."""
    ids = tokens(batch, length)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def padded_inputs(batch: int, length: int) -> Inputs:
    """As `causal_inputs`, the first sample padded at the left."""
    inputs = causal_inputs(batch, length)
    inputs["attention_mask"][0, :3] = 0
    return inputs


def sequence_inputs(batch: int, length: int) -> Inputs:
    """A source with a mask, and labels of half its length."""
    ids = tokens(batch, length)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": tokens(batch, length // 2),
    }


def image_inputs(batch: int, length: int) -> Inputs:
    return {"pixel_values": torch.randn(batch, 3, 32, 32), "labels": torch.randint(0, 2, (batch,))}


def vectors(batch: int, length: int) -> Inputs:
    return {"x": torch.randn(batch, 16)}


def pictures(batch: int, length: int) -> Inputs:
    return {"x": torch.randn(batch, 3, 16, 16)}
