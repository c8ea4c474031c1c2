"""The tables: quantities, folding, totals."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.core.layers import LayerChain, LayerCost, LayerSpec
from roundpipe.reports import partition_table as report
from roundpipe.reports import tables
from roundpipe.reports.tables import summary_table
from roundpipe.wrappers.module_layers import chain_of_modules

BLOCK = LayerCost(
    forward_s=0.002,
    backward_s=0.004,
    forward_flops=40 * 10**9,
    backward_flops=80 * 10**9,
    num_parameters=200_000_000,
    weight_bytes=400 * 2**20,
    carry_bytes=2**20,
)
EMBED = LayerCost(forward_s=1e-4, backward_s=1e-4, num_parameters=10**7, weight_bytes=2**24, carry_bytes=2**20)
HEAD = replace(BLOCK, carry_bytes=0, forward_flops=100 * 10**9, num_parameters=10**7)


def chain_of(specs: list[LayerSpec], costs: list[LayerCost]) -> LayerChain:
    template = chain_of_modules([("only", nn.Identity())])
    return LayerChain([nn.Identity() for _ in specs], specs, costs, template.entry, template.exit, 4096)


def stack(num_blocks: int = 80) -> LayerChain:
    names = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(num_blocks))]
    specs = [LayerSpec(name, (name,)) for name in names]
    specs.append(LayerSpec("model.norm .. lm_head", ("model.norm", "lm_head")))
    return chain_of(specs, [EMBED, *[BLOCK] * num_blocks, HEAD])


def cells(table: str) -> list[list[str]]:
    """The cells of every line that is no rule."""
    return [re.split(r" {2,}", line) for line in table.splitlines() if line and not line.startswith("--")]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1536 * 2**20, "1.50 GiB"), (2**20 - 1, "1.00 MiB")],
)
def test_bytes(num_bytes: int, text: str) -> None:
    assert tables.format_bytes(num_bytes) == text


def test_bytes_never_need_four_digits_before_the_point() -> None:
    for exponent in range(10, 60):
        for offset in (-1, 0, 1):
            number = tables.format_bytes(2**exponent + offset).split()[0]
            assert float(number) < 1024
            assert len(number.replace(".", "")) <= 4


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (8_030_000_000, "8.03 B"), (405e9, "405 B"), (12_345, "12.3 K")],
)
def test_count(count: float, text: str) -> None:
    assert tables.format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 us"),
        (12e-6, "12 us"),
        (0.0123, "12.3 ms"),
        (1.5, "1.50 s"),
        (90, "90 s"),
        (125.2, "2 min 5 s"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert tables.format_seconds(seconds) == text


def test_flops() -> None:
    assert tables.format_flops(1.25e12) == "1.25 TFLOP"


def test_a_stack_of_blocks_is_one_row() -> None:
    rows = cells(report.layer_table(stack()))
    assert rows[2][:2] == ["1 .. 80", "model.layers.0 .. model.layers.79 (80x)"]
    assert len(rows) == 1 + 3 + 1
    assert rows[2][2:] == ["200 M", "400 MiB", "0.04", "0.08", "1.00 MiB"]


def test_an_unlike_block_splits_the_fold() -> None:
    chain = stack(8)
    costs = list(chain.costs)
    costs[4] = replace(BLOCK, num_parameters=1)
    rows = cells(report.layer_table(chain_of(list(chain.specs), costs)))
    assert [row[0] for row in rows] == ["layer", "0", "1 .. 3", "4", "5 .. 8", "9", "total"]


def test_two_alike_are_not_folded() -> None:
    assert [row[0] for row in cells(report.layer_table(stack(2)))] == ["layer", "0", "1", "2", "3", "total"]


def test_alternating_layers_fold_by_their_period() -> None:
    kinds, specs, costs = [("attn", BLOCK), ("mlp", HEAD)], [], []
    for index in range(6):
        for kind, cost in kinds:
            specs.append(LayerSpec(f"h.{index}.{kind}", (f"h.{index}.{kind}",)))
            costs.append(cost)
    rows = cells(report.layer_table(chain_of(specs, costs)))
    assert [row[:2] for row in rows[1:-1]] == [
        ["0 .. 10", "h.0.attn .. h.5.attn (6x)"],
        ["1 .. 11", "h.0.mlp .. h.5.mlp (6x)"],
    ]


def test_folding_leaves_the_totals() -> None:
    total = cells(report.layer_table(stack()))[-1]
    assert total[0] == "total"
    assert total[2] == tables.format_count(80 * BLOCK.num_parameters + 2 * 10**7)
    assert total[3] == tables.format_bytes(81 * BLOCK.weight_bytes + EMBED.weight_bytes)
    assert total[4:6] == ["3.3", "6.48"]


@pytest.mark.parametrize(
    ("flops", "unit", "number"),
    [
        (1, "KFLOP", "0.001"),
        (2_000_000, "MFLOP", "2"),
        (3_210_000_000, "GFLOP", "3.21"),
        (10**15, "TFLOP", "1,000"),
    ],
)
def test_flops_are_in_one_unit_that_suits_the_largest(flops: int, unit: str, number: str) -> None:
    rows = cells(report.layer_table(chain_of([LayerSpec("a")], [LayerCost(forward_flops=flops)])))
    assert rows[0][4:6] == [f"forward {unit}", f"backward {unit}"]
    assert rows[1][4:6] == [number, "-"]


def test_measured_times_replace_flops_and_folded_rows_show_their_mean() -> None:
    chain = stack(4)
    costs = [replace(cost, forward_s=0.001 * index, backward_s=0.003) for index, cost in enumerate(chain.costs)]
    rows = cells(report.layer_table(chain_of(list(chain.specs), costs), costs=costs, measured=True))
    assert rows[0][4:6] == ["forward ms", "backward ms"]
    assert rows[2][0] == "1 .. 4"
    assert rows[2][4:6] == ["2.50", "3.00"]


def test_stages() -> None:
    plan = ExecutePlan(forward=[(0, 2), (2, 4)], fused=(4, 6), backward=[(2, 4), (0, 2)])
    rows = cells(report.stage_table(stack(4), plan))
    assert [row[0] for row in rows] == ["stage", "F0", "F1", "U", "B1", "B2", "round"]
    assert rows[1][1] == "model.embed_tokens .. model.layers.0"
    # forward only, forward + backward of the tail, recomputation + backward
    assert [row[4] for row in rows[1:-1]] == ["40", "80", "140", "80", "40"]
    assert [row[5] for row in rows[1:-1]] == ["-", "-", "160", "160", "80"]
    # a stage that reaches the first layer in backward hands nothing on
    assert [row[6] for row in rows[1:-1]] == ["1.00 MiB"] * 4 + ["-"]


def test_stages_that_workers_share() -> None:
    plan = ExecutePlan([(0, 2)], (2, 6), [(0, 2)], replicas=[1, 3, 2])
    alone, shared = (cells(report.stage_table(stack(4), each)) for each in (replace(plan, replicas=()), plan))
    assert [row[0] for row in shared] == ["stage", "F0", "U x3", "B1 x2", "round"]
    for row, other in zip(alone[:-1], shared[:-1], strict=True):
        assert row[1:] == other[1:]
    # 416 MiB + 3 * 1600 MiB + 2 * 416 MiB: each worker brings the weights up
    assert shared[-1][3] == "5.91 GiB"
    assert alone[-1][4:] == shared[-1][4:]


def test_repeated_stages_fold_and_backward_names_ascend() -> None:
    chain = stack()
    plan = ExecutePlan(
        forward=[(i, i + 2) for i in range(0, 76, 2)],
        fused=(76, 82),
        backward=[(i, i + 1) for i in reversed(range(76))],
    )
    rows = cells(report.stage_table(chain, plan))
    assert [row[0] for row in rows[1:-1]] == ["F0", "F1 .. F37", "U", "B1 .. B75", "B76"]
    assert rows[2][1] == "model.layers.1 .. model.layers.74 (37x)"
    assert rows[4][1] == "model.layers.0 .. model.layers.74 (75x)"


def test_balance_is_heaviest_over_mean() -> None:
    costs = [replace(BLOCK, forward_s=s, backward_s=0.0) for s in (1.0, 1.0, 4.0)]
    chain = chain_of([LayerSpec(name) for name in "abc"], costs)
    assert "balance (heaviest / mean) 2.00" in report.layer_table(chain)


def test_balance_without_times_goes_by_weights() -> None:
    costs = [LayerCost(weight_bytes=w) for w in (100, 300)]
    assert "mean) 1.50" in report.layer_table(chain_of([LayerSpec("a"), LayerSpec("b")], costs))


def test_headline_counts_shared_parameters_once() -> None:
    shared = nn.Linear(10, 10)
    text = report.partition_table(chain_of_modules([("a", shared), ("b", shared)]), title="twins")
    assert text.splitlines()[0] == "twins: 2 layers, 110 parameters (shared ones counted once)"
    single = report.partition_table(chain_of_modules([("a", nn.Linear(10, 10))]))
    assert single.splitlines()[0] == "1 layer, 110 parameters"


def test_headline_with_a_plan_and_example_size() -> None:
    plan = ExecutePlan(fused=(0, 4))
    chain = stack(2)
    chain.example_size = "4,096 tokens"
    headline = report.partition_table(chain, plan).splitlines()[0]
    assert "1 stages in a round" not in headline
    assert "1 stage in a round" in headline
    assert headline.endswith("for 4,096 tokens")


def test_covers_names_the_layer_or_its_modules() -> None:
    specs = [
        LayerSpec("h.0", ("h.0.ln", "h.0.attn", "h.0.mlp", "h.0.drop")),
        LayerSpec("a .. d", ("a", "b", "c", "d")),
        LayerSpec("norm .. head", ("norm", "head")),
        LayerSpec("glue"),
    ]
    rows = cells(report.layer_table(chain_of(specs, [EMBED] * 4)))
    assert [row[1] for row in rows[1:-1]] == ["h.0", "a .. d (4 modules)", "norm, head", "glue"]


def test_no_line_ends_in_spaces_or_has_four_rules() -> None:
    text = report.partition_table(stack(), ExecutePlan(fused=(0, 82)))
    assert all(line == line.rstrip() for line in text.splitlines())
    assert sum(line.startswith("--") for line in text.splitlines()) == 4


def test_explain() -> None:
    assert report.explain_table(None, {"": "if at model.py:3"}).startswith("The model's own forward")
    assert "(the model)" in report.explain_table(None, {"": "if at model.py:3"})
    text = report.explain_table(stack(3), {"model.router": "branches on data"})
    assert "1 of its modules stayed whole" in text
    assert re.search(r"model\.router +branches on data", text)
    assert "nothing stayed opaque" in report.explain_table(stack(3), {})


def test_summary_aligns_its_values() -> None:
    lines = summary_table({"loss": "5.5 -> 2.4", "tokens per second": "1.20 K"}).splitlines()
    assert lines == ["loss               5.5 -> 2.4", "tokens per second  1.20 K"]


def test_a_real_chain_on_meta() -> None:
    with torch.device("meta"):
        modules = [(str(index), nn.Linear(1024, 1024)) for index in range(5)]
    rows = cells(report.layer_table(chain_of_modules(modules)))
    assert rows[1][:4] == ["0 .. 4", "0 .. 4 (5x)", "1.05 M", "4.00 MiB"]
