"""The Lightning recipe of the documentation, run by Lightning, against plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.documents import ROOT, blocks_of


def recipe() -> str:
    (block,) = [block for block in blocks_of(ROOT / "docs" / "lightning.md") if block.language == "python"]
    return block.text


def test_the_recipe_trains_like_plain_pytorch() -> None:
    pytest.importorskip("lightning")
    torch.manual_seed(0)
    namespace: dict[str, Any] = {"__name__": "recipe"}
    exec(compile(recipe(), "lightning.md", "exec"), namespace)
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


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}])
def test_automatic_optimization_with_clipping_and_accumulation(options: dict[str, Any]) -> None:
    lightning = pytest.importorskip("lightning")
    namespace: dict[str, Any] = {"__name__": "recipe"}
    exec(compile(recipe().split("data = ")[0], "lightning.md", "exec"), namespace)

    class Automatic(namespace["Classifier"]):  # type: ignore[misc]
        def __init__(self, wraps: bool) -> None:
            super().__init__()
            self.automatic_optimization = True
            self.wraps = wraps

        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_index: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.held[0](batch[0]) if self.wraps else self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            parameters = self.held[0].optim_parameters() if self.wraps else self.net.parameters()
            return torch.optim.SGD(parameters, lr=0.5)

    trained = []
    for wraps in (True, False):
        torch.manual_seed(0)
        data = torch.utils.data.TensorDataset(torch.randn(24, 32), torch.randint(10, (24,)))
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = lightning.Trainer(accelerator="cpu", max_epochs=2, enable_model_summary=False, **quiet, **options)
        classifier = Automatic(wraps)
        trainer.fit(classifier, torch.utils.data.DataLoader(data, batch_size=6))
        trained.append(classifier.net)
    for found, expected in zip(trained[0].parameters(), trained[1].parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_the_precision_that_lightning_asks_for_holds_on_the_devices() -> None:
    lightning = pytest.importorskip("lightning")
    namespace: dict[str, Any] = {"__name__": "recipe"}
    exec(compile(recipe().split("data = ")[0], "lightning.md", "exec"), namespace)
    seen: set[torch.dtype] = set()

    class Seeing(namespace["Classifier"]):  # type: ignore[misc]
        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_index: int) -> None:
            self.held[0].forward_backward(
                (batch[0],), loss_fn=lambda outputs, _: seen.add(outputs.dtype) or outputs.sum()
            )

    data = torch.utils.data.TensorDataset(torch.randn(12, 32))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, precision="bf16-mixed", enable_model_summary=False, **quiet
    )
    trainer.fit(Seeing(), torch.utils.data.DataLoader(data, batch_size=6))
    assert seen == {torch.bfloat16}
