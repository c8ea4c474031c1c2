"""The Lightning recipe of the documentation, run by Lightning, against plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.documents import ROOT, blocks_of


def test_the_recipe_trains_like_plain_pytorch() -> None:
    pytest.importorskip("lightning")
    (block,) = [block for block in blocks_of(ROOT / "docs" / "lightning.md") if block.language == "python"]
    torch.manual_seed(0)
    namespace: dict[str, Any] = {"__name__": "recipe"}
    exec(compile(block.text, "lightning.md", "exec"), namespace)
    trained, logged = namespace["classifier"], namespace["trainer"].callback_metrics

    torch.manual_seed(0)
    data = torch.randn(24, 32), torch.randint(10, (24,))
    net = namespace["Classifier"]().net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(2):
        losses, evaluated = [], []
        for images, classes in zip(*(part.split(12) for part in data), strict=True):
            loss = nn.functional.cross_entropy(net(images), classes)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        with torch.no_grad():
            for images, classes in zip(*(part.split(12) for part in data), strict=True):
                evaluated.append(nn.functional.cross_entropy(net(images), classes).item())
    assert float(logged["loss"]) == pytest.approx(losses[-1], rel=1e-5)
    assert float(logged["validation_loss"]) == pytest.approx(sum(evaluated) / len(evaluated), rel=1e-5)
    for found, expected in zip(trained.net.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert not any("held" in name for name, _ in trained.named_modules())
