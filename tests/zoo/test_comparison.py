"""How the zoo compares a row with eager, and reports it."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.zoo import build, compare, report, run
from tests.zoo.__main__ import main as main_command
from tests.zoo.catalog import TASKS, Row, all_rows
from tests.zoo.compare import (
    EXAMPLE,
    Result,
    calls_of,
    examine,
    largest_difference,
    one_layer_per_stage,
)
from tests.zoo.cuts import cuts_between_blocks, is_repeated
from tests.zoo.inputs import Size, Task

ROOT = Path(__file__).parent.parent.parent


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    one, other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    for model in (one, other):
        model(torch.arange(12.0).reshape(4, 3)).square().sum().backward()
    return one, other


def test_equal_models_differ_by_nothing() -> None:
    one, other = pair()
    assert largest_difference(torch.tensor(2.0), one, torch.tensor(2.0), other) == (0.0, "loss")


@pytest.mark.parametrize("what", ["loss", "gradient of bias", "buffer running_mean", "missing", "nan"])
def test_every_difference_is_found(what: str) -> None:
    one, other = pair()
    loss = torch.tensor(2.0)
    one.bias.grad = torch.ones(3)
    other.bias.grad = torch.ones(3)
    if what == "loss":
        loss = torch.tensor(2.1)
    elif what == "missing":
        one.bias.grad, what = None, "gradient of bias"
    elif what == "nan":
        one.bias.grad[1], what = float("nan"), "gradient of bias"
    elif what == "gradient of bias":
        one.bias.grad[1] += 0.1
    else:
        one.running_mean[2] += 1
    found, where = largest_difference(loss, one, torch.tensor(2.0), other)
    assert not found <= 0.01 and where == what


class Shift(nn.Module):
    """Adds a large number and takes it away again; a copy of it does that in another order, or by another number."""

    def __init__(self, taken: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.is_copy, self.taken = False, taken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x + (1e5 - self.taken) if self.is_copy else (x + 1e5) - 1e5

    def __deepcopy__(self, memo: dict[int, Any]) -> Shift:
        copied = Shift(self.taken)
        copied.load_state_dict(self.state_dict())
        copied.is_copy = True
        return copied.to(next(self.parameters()).dtype)


def shifted(monkeypatch: pytest.MonkeyPatch, taken: float) -> Result:
    def built(row: Row) -> build.Specimen:
        torch.manual_seed(0)
        return build.Specimen(
            Shift(taken), lambda size, seed: {"x": torch.linspace(-1, 1, size.batch * 8).view(-1, 8)}, False
        )

    monkeypatch.setattr(compare, "build", built)
    return examine(Row("kind", "shift"))


def test_what_is_off_by_rounding_is_right_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    result = shifted(monkeypatch, 1e5)
    assert result.status == "right", result.cause
    assert result.differences["example"] > 1e-3 and 0 < result.differences_float64["example"] < 1e-9
    assert "in float64" in result.cause
    numbers = report.summary([result.as_dict()])["kind"]
    assert numbers["right_in_float64_only"] == 1 and numbers["right"] == 1


def test_what_is_off_by_more_than_rounding_stays_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real difference of one in ten thousand beside the rounding is found, although float32 hides it."""
    result = shifted(monkeypatch, 1e5 - 1e-4)
    assert result.status == "wrong" and result.differences["example"] > 1e-3
    assert 1e-5 < result.differences_float64["example"] < 1e-3
    assert "in float64 example:" in result.cause


def test_a_model_that_multiplies_rounding_is_known_by_it() -> None:
    class Waves(nn.Module):
        def __init__(self, frequency: float) -> None:
            super().__init__()
            self.layer, self.frequency = nn.Linear(8, 8), frequency

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(self.layer(x) * self.frequency)

    found = []
    for frequency in (1.0, 1e10):
        torch.manual_seed(0)
        specimen = build.Specimen(Waves(frequency), lambda size, seed: {"x": torch.ones(size.batch, 8)}, False)
        found.append(compare.sensitivity(compare.in_float64(specimen), EXAMPLE))
    assert 0 < found[0] < 1e-12 and 1e-7 < found[1] < 1e-2


def test_what_is_wrong_in_shape_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "largest_difference", lambda *arguments: (float("inf"), "loss"))
    result = shifted(monkeypatch, 1e5)
    assert result.status == "wrong" and not result.differences_float64


def test_a_plan_with_a_stage_per_layer() -> None:
    plan = one_layer_per_stage(3)
    assert plan is not None and list(plan.forward) == [(0, 1), (1, 2)] and list(plan.backward) == [(1, 2), (0, 1)]
    assert one_layer_per_stage(1) is None


def test_repeated_blocks_are_those_with_weights_in_children() -> None:
    block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert is_repeated(nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(3)))
    assert not is_repeated(nn.ModuleList(nn.Linear(2, 2) for _ in range(3)))
    assert not is_repeated(nn.Sequential(block, block))


def test_some_rows_have_padding_and_some_change_it() -> None:
    rows = all_rows()
    assert len({calls_of(row)["example"].is_padded for row in rows}) == 2
    changing = [calls_of(row) for row in rows if "padding" in calls_of(row)]
    assert changing and all(calls["padding"].is_padded != calls["example"].is_padded for calls in changing)


def result(key: str, status: str, **fields: Any) -> dict[str, Any]:
    found = Result(key, key.partition("/")[0], status, **fields)
    return found.as_dict()


def test_totals_count_what_eager_can_train() -> None:
    traces = {"example": 1, "batch": 1, "length": 2}
    results = [
        result("timm/a", "right", num_layers=4, traces=traces, differences={"example": 1e-7}, trace_s=1.0),
        result("timm/b", "right", num_layers=4, traces={"example": 1, "batch": 2}, differences={"example": 1e-4}),
        result("timm/c", "wrong", num_layers=4, cause="loss"),
        result("timm/d", "eager fails", cause="no"),
    ]
    numbers = report.summary(results)["timm"]
    assert (numbers["rows"], numbers["eager_trains"], numbers["right"], numbers["wrong"]) == (4, 3, 2, 1)
    assert numbers["within_1e-6"] == 0.5 and numbers["one_trace_for_two_batch_sizes"] == 0.5
    assert numbers["no_trace_for_another_length"] == 0.0
    text = report.totals(results)
    assert "timm" in text and "all" in text and "main tasks" not in text
    assert "loss" in report.table(results)


def test_model_types_are_right_when_all_their_rows_are() -> None:
    traces = {"example": 1, "batch": 1}
    results = [
        result("causal-lm/A", "right", num_layers=4, traces=traces, model_type="a"),
        result("masked-lm/A", "not traced", model_type="a"),
        result("causal-lm/B", "right", num_layers=4, traces=traces, model_type="b"),
        result("seq2seq-lm/B", "eager fails", model_type="b"),
        result("causal-lm/C", "not built"),
        result("object-detection/D", "wrong", num_layers=4, model_type="d"),
    ]
    main = report.summary(results)["main tasks"]
    assert (main["model_types"], main["model_types_right"], main["share_model_types_right"]) == (2, 1, 0.5)
    text = report.totals(results)
    assert "five main tasks: 2, all rows right for 1 of them (50.00%)" in text and "Not right: a." in text


def test_figures_replace_what_is_between_the_marks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text("".join(json.dumps(result(key, "wrong", cause="a|b")) + "\n" for key in ("timm/a", "timm/b")))
    second.write_text(json.dumps(result("timm/a", "eager fails", cause="no")) + "\n")
    document, numbers = tmp_path / "zoo.md", tmp_path / "zoo.json"
    document.write_text(f"before\n{report.START}\nold\n{report.END}\nafter\n")
    command = ["--merge", str(first), str(second), "--json", str(numbers), "--document", str(document)]
    assert main_command(command) == 1  # timm/b is wrong
    assert "timm" in capsys.readouterr().out
    text = document.read_text()
    assert text.startswith("before") and text.endswith("after\n") and "old" not in text
    assert "| timm/a | eager fails | no |" in text and "| timm/b | wrong | a\\|b |" in text
    assert json.loads(numbers.read_text())["summary"]["timm"]["eager_trains"] == 1
    rounding = result("timm/c", "right", differences_float64={"example": 1e-9}, cause="by 1e-09", traces={})
    rounding["sensitivity_float64"] = 2e-9
    assert "| by 1e-09, where rounding moves eager itself by 2e-09 |" in report.figures([rounding])
    with pytest.raises(ValueError, match="no <!-- figures -->"):
        report.with_figures("nothing", [])


def test_a_row_that_kills_its_process_and_one_that_hangs_cost_a_row_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "answers.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys, time
            for line in sys.stdin:
                key = line.strip()
                if key == "kind/kills":
                    sys.stderr.write("it was me\\n")
                    os._exit(3)
                if key == "kind/hangs":
                    time.sleep(60)
                print('{"key": "%s", "kind": "kind", "status": "right"}' % key, flush=True)
            """
        )
    )
    popen = subprocess.Popen
    monkeypatch.setattr(
        run.subprocess, "Popen", lambda command, **options: popen([sys.executable, str(script)], **options)
    )
    monkeypatch.setattr(run, "START_S", 20.0)
    written = tmp_path / "rows.jsonl"
    keys = ["kind/a", "kind/kills", "kind/b", "kind/hangs", "kind/c"]
    found = {row["key"]: row for row in run.results_of(keys, written, 4.0)}
    assert [found[key]["status"] for key in keys] == ["right", "crashed", "right", "crashed", "right"]
    assert found["kind/kills"]["cause"] == "it was me" and "took more than" in found["kind/hangs"]["cause"]
    monkeypatch.setattr(run.subprocess, "Popen", None)  # the second time nothing is started
    assert {row["key"]: row for row in run.results_of(keys, written, 4.0)} == found


@pytest.mark.long
def test_the_command_examines_rows_and_writes_json(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the row is a model of transformers")
    file = tmp_path / "zoo.json"
    command = [sys.executable, "-m", "tests.zoo", "masked-lm/BertForMaskedLM", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "masked-lm/BertForMaskedLM" in done.stdout and "main tasks" in done.stdout
    written = json.loads(file.read_text())
    (row,) = written["rows"]
    assert row["status"] == "right" and set(row["differences"]) == set(calls_of_row(row["key"]))
    assert written["summary"]["all"]["right"] == 1


def calls_of_row(key: str) -> dict[str, Size]:
    return calls_of(next(row for row in all_rows() if row.key == key))


def test_blocks_and_their_cuts_are_found() -> None:
    """A model that hands a second tensor along from block to block is seen to do so."""
    from roundpipe.fx.passes.lower import LowerOptions
    from roundpipe.fx.source import TracedSource

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.tanh(self.up(x)))

    class Model(nn.Module):
        def __init__(self, hands_on: bool) -> None:
            super().__init__()
            self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(Block() for _ in range(4))
            self.hands_on = hands_on

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            start = self.first(x)
            x = start
            for block in self.blocks:
                x = block(x)
            return x + start if self.hands_on else x

    for hands_on, values in ((False, 1), (True, 2)):
        model = Model(hands_on)
        chain = TracedSource(model, LowerOptions(), lambda error: None).chain_for((torch.ones(EXAMPLE.batch, 8),), {})
        assert chain is not None
        assert cuts_between_blocks(model, chain) == (4, values)


def test_tasks_without_text_have_no_length() -> None:
    for task in TASKS.values():
        assert isinstance(task, Task)
        takes_text = "input_ids" in task.makers or "input_values" in task.makers
        assert task.has_length == takes_text or "pixel_values" in task.makers
