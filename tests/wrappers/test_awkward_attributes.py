"""Objects whose classes answer for any attribute, with a KeyError or None, where the library asks objects something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe
from roundpipe import ConfigError
from roundpipe.core.attributes import attributes_of, given_attribute, stored_attribute
from tests.fx.cases_far_state import AttributeDict, DotDict, Passing

KINDS = (AttributeDict, DotDict, Passing)


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def assert_equal_to_eager(model: nn.Module, loss_fn: Any = F.cross_entropy) -> None:
    x, label = torch.randn(6, 8, dtype=torch.float64), torch.arange(6) % 4
    expected = loss_fn(model(x), label)
    with roundpipe.compile(model, devices=["cpu"]) as pipe:
        for _ in range(2):
            loss = pipe.forward_backward((x,), label=label, loss_fn=loss_fn, loss_reduction="mean")
            torch.testing.assert_close(loss, expected.detach())


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_that_is_an_object(kind: Any) -> None:
    class WeightedLoss(kind):  # type: ignore[misc]
        def __call__(self, outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            return self.weight * F.cross_entropy(outputs, label)

    assert_equal_to_eager(blocks(), WeightedLoss(weight=2.0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_that_is_an_object(kind: Any) -> None:
    class ScalingHook(kind):  # type: ignore[misc]
        def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            return output * self.weight

    model = blocks()
    model[1].register_forward_hook(ScalingHook(weight=2.0))
    assert_equal_to_eager(model)


class AsksItsConfig(nn.Module):
    """Looks up in its config what it does not have; its forward can't be traced if it asks for data."""

    def __init__(self, config: Any, asks: bool) -> None:
        super().__init__()
        self.blocks = blocks()
        self.config, self.asks = config, asks

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return self.__dict__["config"][name]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(x) * self.scale
        return x * 2 if self.asks and float(x.sum()) > 1e9 else x


@pytest.mark.parametrize("kind", [AttributeDict, DotDict])
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.filterwarnings("ignore:AsksItsConfig runs module by module", "ignore:forward_backward of an AutoRoundPipe")
def test_a_module_that_answers_for_its_config(kind: Any, asks: bool) -> None:
    assert_equal_to_eager(AsksItsConfig(kind(scale=2.0), asks))


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints(kind: Any, tmp_path: Path) -> None:
    model = blocks()
    model.config = kind(scale=1.0)
    with roundpipe.compile(model, devices=["cpu"]) as pipe:
        with pytest.raises(ConfigError, match="scheduler is .*, which has no state_dict"):
            pipe.save_checkpoint(tmp_path / "refused", scheduler=kind(scale=1.0))
        pipe.save_checkpoint(tmp_path / "kept")


def test_what_is_asked() -> None:
    held = AttributeDict(scale=1.0)
    assert attributes_of(held) == {} and attributes_of(3) is None and attributes_of(AttributeDict) is None
    assert stored_attribute(held, "scale") is None and given_attribute(held, "scale") == 1.0
    assert given_attribute(held, "other", 2) == 2 and stored_attribute(DotDict(), "other", 2) == 2
    assert stored_attribute(Passing(), "__call__", 2) == 2
