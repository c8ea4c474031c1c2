"""The Lightning recipe of the documentation, with a stand-in for what it uses of Lightning, against plain PyTorch."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.documents import ROOT, blocks_of


class StandInModule(nn.Module):
    """Notes what is logged, and gives the optimizer back."""

    def log(self, name: str, value: torch.Tensor) -> None:
        self.__dict__.setdefault("logged", {}).setdefault(name, []).append(float(value))

    def optimizers(self) -> torch.optim.Optimizer:
        return self.__dict__["optimizer"]


class StandInTrainer:
    """Calls the hooks of a module in Lightning's order."""

    def __init__(self, max_epochs: int, **options: Any) -> None:
        self.max_epochs = max_epochs

    def fit(self, module: Any, batches: Any, evaluated: Any) -> None:
        module.setup("fit")
        module.__dict__["optimizer"] = module.configure_optimizers()
        for _ in range(self.max_epochs):
            for index, batch in enumerate(batches):
                module.training_step(batch, index)
            module.eval()
            with torch.no_grad():
                for index, batch in enumerate(evaluated):
                    module.validation_step(batch, index)
            module.train()
        module.on_fit_end()


def test_the_recipe_trains_like_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = SimpleNamespace(LightningModule=StandInModule, Trainer=StandInTrainer)
    monkeypatch.setitem(sys.modules, "lightning", stand_in)  # type: ignore[arg-type]
    (block,) = [block for block in blocks_of(ROOT / "docs" / "lightning.md") if block.language == "python"]
    torch.manual_seed(0)
    namespace: dict[str, Any] = {"__name__": "recipe"}
    exec(compile(block.text, "lightning.md", "exec"), namespace)
    trained = namespace["classifier"]

    torch.manual_seed(0)
    data = torch.randn(24, 32), torch.randint(10, (24,))
    net = namespace["Classifier"]().net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    losses, evaluated = [], []
    for _ in range(2):
        for images, classes in zip(*(part.split(12) for part in data), strict=True):
            loss = nn.functional.cross_entropy(net(images), classes)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        with torch.no_grad():
            for images, classes in zip(*(part.split(12) for part in data), strict=True):
                evaluated.append(nn.functional.cross_entropy(net(images), classes).item())
    assert trained.logged["loss"] == pytest.approx(losses, rel=1e-5)
    assert trained.logged["validation_loss"] == pytest.approx(evaluated, rel=1e-5)
    for found, expected in zip(trained.net.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert not any("held" in name for name, _ in trained.named_modules())
