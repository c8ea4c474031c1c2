"""Lists, dicts and objects that training code keeps on a module, and that its forward does not read, need no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import roundpipe


class Memory:
    def __init__(self) -> None:
        self.rewards: list[Any] = []
        self.scale = 1.0


class Policy(nn.Module):
    """Whose forward reads nothing of what is kept on it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept, self.history = nn.Linear(4, 3), [1.0], {"loss": [2.0]}
        self.memory = Memory()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x).relu()
        return out

    def returns(self) -> float:
        """Which no forward calls."""
        return sum(self.kept) + sum(self.history["loss"])


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.head = Policy(), nn.Linear(3, 2)

    @property
    def kept(self) -> list[Any]:
        return self.policy.kept

    @property
    def history(self) -> dict[str, list[Any]]:
        return self.policy.history

    @property
    def memory(self) -> Memory:
        return self.policy.memory

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.policy(x))
        return out


def first_of(module: Any) -> float:
    return float(module.kept[-1])


class Reads(Policy):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.kept[-1]


class ReadsInHelper(Policy):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * first_of(self)


class ReadsInMethod(Policy):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.returns()


class ReadsByName(Policy):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * getattr(self, "ke" + "pt")[-1]


class ReadsAll(Policy):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * vars(self)["kept"][-1]


class ReadsObject(Policy):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.memory.rewards[-1] * self.memory.scale


class ReadsUnderAnotherName(Policy):
    def __init__(self) -> None:
        super().__init__()
        self.alias = self.kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.alias[-1]


@pytest.mark.parametrize("kind", [Policy, Inside])
def test_what_no_forward_reads_may_change(kind: type[Any]) -> None:
    model = kind()
    with roundpipe.compile(model, devices=["cpu"]) as pipe:
        for step in range(4):
            x = torch.randn(6, 4)
            out = pipe(x)
            torch.testing.assert_close(out, model(x))
            model.kept.append(out.sum())
            model.history["loss"].append(float(step))
            model.history[f"step {step}"] = [out.detach()]
            model.memory.rewards.append(step)
            model.memory.scale += step
        assert pipe.trace_count == 1
        del model.kept[:]
        pipe(x)
        assert pipe.trace_count == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind", [Reads, ReadsInHelper, ReadsInMethod, ReadsByName, ReadsAll, ReadsObject, ReadsUnderAnotherName]
)
def test_what_a_forward_reads_is_looked_at(kind: type[Any]) -> None:
    model = kind()
    model.memory.rewards.append(1.0)
    with roundpipe.compile(model, devices=["cpu"]) as pipe:
        for step in range(4):
            x = torch.randn(6, 4)
            torch.testing.assert_close(pipe(x), model(x))
            model.kept.append(2.0 + step)
            model.memory.rewards.append(3.0 + step)
            model.memory.scale += 1


@pytest.mark.filterwarnings("ignore")
def test_what_a_hook_reads_is_looked_at() -> None:
    model = Policy()
    model.register_forward_hook(lambda module, args, out: out * module.kept[-1])
    with roundpipe.compile(model, devices=["cpu"]) as pipe:
        for step in range(4):
            x = torch.randn(6, 4)
            torch.testing.assert_close(pipe(x), model(x))
            model.kept.append(2.0 + step)
