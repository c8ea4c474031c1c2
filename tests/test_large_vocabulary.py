"""A vocabulary whose logits are larger than the device: they exist in tiles only, and the numbers are eager's."""

from __future__ import annotations

import copy
import re
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe
from roundpipe import Device, DeviceMemoryError, RoundPipeRunConfig
from tests.equality import assert_same_gradients, difference
from tests.wrappers.cases_tails import runs

__all__ = ["runs"]

VOCABULARY, WIDTH, LENGTH = 151_936, 16, 160


class Language(nn.Module):
    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(ids)
        return {"logits": self.head(hidden + self.block(hidden))}


def loss_fn(outputs: Any, label: Any) -> torch.Tensor:
    label = F.pad(label, (0, 1), value=-100)[..., 1:]
    return F.cross_entropy(outputs["logits"].float().flatten(0, 1), label.reshape(-1))


def test_a_budget_for_a_fraction_of_the_logits_is_enough(runs: Counter[str]) -> None:
    torch.manual_seed(0)
    model = Language()
    reference = copy.deepcopy(model)
    ids = torch.randint(0, VOCABULARY, (2, LENGTH))
    label = ids.clone()
    label[1, 100:] = -100
    budget_bytes = int(0.6 * LENGTH * VOCABULARY * 4)
    with roundpipe.compile(model, devices=[Device("cpu", memory_bytes=budget_bytes)]) as pipe:
        config = RoundPipeRunConfig(num_microbatch=2)
        loss = pipe.forward_backward((ids,), label=label, loss_fn=loss_fn, run_config=config)
        assert pipe.peak_device_bytes() <= budget_bytes
    assert runs["tiled in tail"] >= 2
    losses = [loss_fn(reference(ids[index : index + 1]), label[index : index + 1]) for index in range(2)]
    torch.autograd.backward(losses)
    assert difference(loss, torch.stack(losses).detach().sum()) <= 1e-5
    assert_same_gradients(model, reference, 1e-4)


def test_what_a_device_lacks_is_told_for_logits_in_tiles() -> None:
    """Whole they would need several times as much; a device that has what is said is large enough."""
    torch.manual_seed(0)
    vocabulary = VOCABULARY // 8
    ids = torch.randint(0, vocabulary, (2, LENGTH))

    def call_on(memory_bytes: int) -> None:
        with roundpipe.compile(Language(vocabulary), devices=[Device("cpu", memory_bytes=memory_bytes)]) as pipe:
            config = RoundPipeRunConfig(num_microbatch=2)
            pipe.forward_backward((ids,), label=ids.clone(), loss_fn=loss_fn, run_config=config)

    with pytest.raises(DeviceMemoryError, match="already counts on 256 tiles, the most there are") as raised:
        call_on(2 * vocabulary * WIDTH * 4)
    found = re.search(r"it needs ([\d,]+) bytes", str(raised.value))
    assert found is not None
    needed_bytes = int(found[1].replace(",", ""))
    assert needed_bytes < 0.6 * LENGTH * vocabulary * 4
    call_on(needed_bytes)
