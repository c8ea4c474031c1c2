"""What the tests beside it share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.fx.inputs import Case


def built(case: Case) -> nn.Module:
    torch.manual_seed(0)
    model = case.build().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


def leaves_of(traced: Any) -> list[str]:
    return [str(node.target) for node in traced.graph.nodes if node.op == "call_module"]
