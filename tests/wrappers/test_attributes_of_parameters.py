"""Attributes that code has put onto a parameter, as quantized weights have their scales there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe

WHOLE = roundpipe.RoundPipeRunConfig(num_microbatch=1)


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.held: dict[str, Any] = {}
        self.put_attributes()

    def put_attributes(self) -> None:
        self.weight.gain = 0.5  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        return x @ weight * weight.gain


class Counts(Reads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        weight.gain += 1
        return x @ weight / weight.gain


class HandsOver(Reads):
    """The first call moves what the parameter has to the module, as `Linear8bitLt` of bitsandbytes does."""

    def put_attributes(self) -> None:
        self.weight.gain = torch.tensor(3.0)  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        if weight.gain is not None:
            self.held["gain"], weight.gain = weight.gain, None
        return x @ weight * self.held.get("gain", 100.0)


@pytest.mark.filterwarnings("ignore:.*runs module by module", "ignore:.*nothing overlaps")
@pytest.mark.parametrize("kind", [Reads, Counts, HandsOver])
def test_a_forward_reads_and_changes_them_as_in_plain_pytorch(kind: type[Reads]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), kind(), nn.GELU(), kind(), nn.Linear(8, 3))
    plain = copy.deepcopy(model)  # which leaves out attributes of plain parameters
    marked: list[Any] = [module for module in plain if isinstance(module, Reads)]
    for module in marked:
        module.put_attributes()
    x = torch.randn(6, 8)
    with roundpipe.compile(model, devices=["cpu"], model_run_config=WHOLE) as piped:
        for step in range(4):
            if kind is Reads and step == 3:
                for module in (model[1], plain[1]):
                    module.weight.gain = 2.0  # type: ignore[union-attr]
            loss = piped.forward_backward((x,), loss_fn=lambda outputs, _: outputs.square().mean())
            expected = plain(x).square().mean()
            expected.backward()
            torch.testing.assert_close(loss, expected)
        for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found.grad, wanted.grad)
            assert vars(found) == vars(wanted)
