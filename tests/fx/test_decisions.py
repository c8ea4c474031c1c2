"""Which modules are leaves, on trees of the usual kinds."""

from __future__ import annotations

from typing import Any

from torch import nn

from roundpipe.fx.trace.decisions import Decision, Knowledge, LeafPolicy


class Block(nn.Module):
    """Two linear layers, and a stack of experts if asked for."""

    def __init__(self, width: int = 8, num_experts: int = 0) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.experts = nn.ModuleList(Block(width) for _ in range(num_experts))


class Stage(nn.Module):
    """Blocks in a row."""

    def __init__(self, num_blocks: int, num_experts: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8, num_experts) for _ in range(num_blocks))


class Mask(nn.Module):
    """No parameters, the author's own class."""


def leaves(model: nn.Module, limit: int | None = None, **decisions: Decision) -> set[str]:
    names = {module: name for name, module in model.named_modules()}
    policy = LeafPolicy(
        model, names, Knowledge(limit, decisions={k.replace("_", "."): v for k, v in decisions.items()})
    )
    return {name for module, name in names.items() if policy.is_leaf(module)}


def test_blocks_of_a_long_stack_are_leaves() -> None:
    found = leaves(Stage(24))
    assert {f"blocks.{index}" for index in range(24)} <= found
    assert "" not in found and "blocks" not in found


def test_blocks_of_a_short_stack_are_looked_into_if_they_are_large() -> None:
    found = leaves(Stage(4))
    assert "blocks.0" not in found and {"blocks.0.first", "blocks.3.second"} <= found


def test_a_module_that_holds_a_stack_is_no_leaf_however_small() -> None:
    model = nn.Sequential(Stage(2), Stage(20))
    found = leaves(model)
    assert "0" not in found and "0.blocks.0" in found and "1.blocks.19" in found


def test_experts_do_not_open_one_of_many_blocks() -> None:
    found = leaves(Stage(16, num_experts=4))
    assert "blocks.3" in found
    assert "blocks.3" not in leaves(Stage(4, num_experts=4))


def test_torch_layers_and_own_modules_without_parameters() -> None:
    model = nn.Sequential(nn.Dropout(), Mask(), nn.MultiheadAttention(8, 2))
    assert {"0", "2"} <= leaves(model) and "1" not in leaves(model)


def test_a_byte_limit_opens_blocks() -> None:
    assert "blocks.0" not in leaves(Stage(24), limit=300)


def test_decisions_win() -> None:
    assert "blocks.0" not in leaves(Stage(24), blocks_0=Decision.DESCEND)
    assert "blocks.0" in leaves(Stage(4), blocks_0=Decision.PROBE)


def test_blocks_with_a_call_of_their_own_are_leaves() -> None:
    class Guarded(Block):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    model = Stage(24)
    model.blocks = nn.ModuleList(Guarded() for _ in range(24))
    assert {f"blocks.{index}" for index in range(24)} <= leaves(model)
