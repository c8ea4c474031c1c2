"""What the tests beside it share."""

from __future__ import annotations

import torch
from torch import nn

DTYPE = torch.float64


DEVICES = ["cpu", "cpu"]


class Classifier(nn.Sequential):
    """Pictures `[B, 3, 8, 8]` to scores of ten classes."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 32), nn.GELU(), nn.Linear(32, 10)
        )


def sequential(dtype: torch.dtype = DTYPE) -> nn.Sequential:
    return nn.Sequential(*Classifier().children()).to(dtype)
