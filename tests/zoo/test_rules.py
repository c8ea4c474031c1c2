"""The zoo itself: rules that shrink configs and make inputs, totals, and rows that crash or hang."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.zoo import build, compare, inputs, overrides, report, run
from tests.zoo.__main__ import main as main_command
from tests.zoo.catalog import MAPPINGS, TASKS, Row, all_rows
from tests.zoo.compare import (
    EXAMPLE,
    Result,
    calls_of,
    cuts_between_blocks,
    describe,
    examine,
    is_repeated,
    largest_difference,
    one_layer_per_stage,
)
from tests.zoo.inputs import Size, Task
from tests.zoo.shrink import _undeclared, shrunk

ROOT = Path(__file__).parent.parent.parent


@dataclasses.dataclass
class VisionConfig:
    model_type = "vision"
    hidden_size: int = 1024
    depths: tuple[int, ...] = (2, 2, 18, 2)
    widths: tuple[int, ...] = (96, 192, 384, 768)
    num_heads: tuple[int, ...] = (3, 6, 12, 24)
    image_size: int = 224


@dataclasses.dataclass
class TextConfig:
    model_type = "text"
    vocab_size: int = 50000
    hidden_size: int = 4096
    num_hidden_layers: int = 12
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int | None = None
    intermediate_size: int = 11008
    hidden_dropout: float = 0.1
    use_cache: bool = True
    pad_token_id: int = 40000
    image_token_id: int = 45000
    hidden_act: str = "silu"
    layer_types: list[str] | None = None
    vision_config: VisionConfig = dataclasses.field(default_factory=VisionConfig)

    def __post_init__(self) -> None:
        if self.layer_types is None:
            kinds = ["full" if index % 4 == 3 else "sliding" for index in range(self.num_hidden_layers)]
            self.layer_types = kinds


def test_sizes_shrink_by_the_names_of_their_fields() -> None:
    config = shrunk(TextConfig, {})
    assert config.hidden_size == 32 and config.vocab_size == 96 and config.intermediate_size == 48
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 8)
    assert config.hidden_dropout == 0.0 and config.use_cache is False and config.hidden_act == "silu"
    assert config.pad_token_id == 0 and 3 <= config.image_token_id < 16


def test_lists_per_layer_keep_one_layer_of_each_kind() -> None:
    config = shrunk(TextConfig, {})
    assert config.num_hidden_layers == 3
    assert config.layer_types == ["sliding", "sliding", "full"]


def test_stages_keep_their_number_and_proportions() -> None:
    config = shrunk(TextConfig, {}).vision_config
    assert config.depths == (1, 1, 1, 1)
    assert config.widths == (16, 32, 64, 128)
    assert config.num_heads == (1, 2, 4, 8)
    assert config.image_size == 64


def test_overrides_win_and_reach_configs_inside() -> None:
    config = shrunk(TextConfig, {"hidden_size": 48, "vision_config": {"image_size": 96}})
    assert config.hidden_size == 48
    assert config.vision_config.image_size == 96 and config.vision_config.hidden_size == 32


@dataclasses.dataclass
class BackboneConfig:
    model_type = "backbone"
    num_hidden_layers: int = 24
    out_indices: tuple[int, ...] = (6, 12, 18, 24)
    hidden_sizes: tuple[int, ...] = (256, 512, 1024, 2048)
    stem_channels: tuple[int, ...] = (3, 48, 96)
    returns_token: dataclasses.InitVar[bool] = False

    def __post_init__(self, returns_token: bool) -> None:
        if returns_token:
            self.returns_token = True


@dataclasses.dataclass
class DetectorConfig:
    model_type = "detector"
    backbone_config: BackboneConfig = dataclasses.field(default_factory=lambda: BackboneConfig(returns_token=True))
    encoder_in_channels: tuple[int, ...] = (512, 1024, 2048)
    decoder_in_channels: tuple[int, ...] = (256, 256, 256)
    backbone_out_indices: tuple[int, ...] = (1, 2)


def test_a_backbone_keeps_as_many_outputs_at_its_last_layers() -> None:
    config = shrunk(BackboneConfig, {})
    assert config.num_hidden_layers == 4 and config.out_indices == (1, 2, 3, 4)
    assert config.stem_channels == (3, 16, 32)  # an image has three channels
    fewer = shrunk(BackboneConfig, {}, BackboneConfig(out_indices=(11, 23)))
    assert fewer.num_hidden_layers == 3 and fewer.out_indices == (1, 2)
    assert shrunk(BackboneConfig, {"out_indices": (2, 4)}).num_hidden_layers == 3


def test_widths_that_a_backbone_hands_over_shrink_with_it() -> None:
    config = shrunk(DetectorConfig, {})
    assert config.backbone_config.hidden_sizes == (16, 32, 64, 128)
    assert config.encoder_in_channels == (32, 64, 128) and config.decoder_in_channels == (32, 32, 32)
    assert config.backbone_out_indices == (1, 2)  # of stages, which are all kept


def test_switches_beyond_the_class_are_kept() -> None:
    base = BackboneConfig(returns_token=True)
    base.num_extra = 3  # type: ignore[attr-defined]
    assert _undeclared(base) == {"returns_token": True} and not _undeclared(BackboneConfig())
    assert shrunk(DetectorConfig, {}).backbone_config.returns_token


class Taker(nn.Module):
    main_input_name = "input_ids"

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> None: ...


def made(task: str, size: Size, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    return inputs.make(TASKS[task], task, Taker(), shrunk(TextConfig, {}), size, extra or {}, seed=1)


def test_inputs_are_those_that_the_forward_takes() -> None:
    batch = made("causal-lm", Size(3, 8))
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert batch["input_ids"].shape == (3, 8) and batch["input_ids"].min() >= 16 and batch["input_ids"].max() < 96
    assert batch["attention_mask"].all()
    again = made("causal-lm", Size(3, 8))
    assert all(torch.equal(batch[name], again[name]) for name in batch)


def test_padding_shows_in_ids_and_mask() -> None:
    batch = made("causal-lm", Size(3, 8, is_padded=True))
    assert batch["attention_mask"].sum() == 3 * 8 - 2
    assert (batch["input_ids"][0, -2:] == 0).all()


def test_extra_inputs_come_from_data() -> None:
    extra = {"attention_mask": None, "boxes": ("B 2L 4", 9), "scale": 3, "noise": ("B 5",), "all": ("B L", "ones")}
    batch = made("causal-lm", Size(3, 8), extra)
    assert "attention_mask" not in batch and batch["scale"] == 3
    assert batch["boxes"].shape == (3, 16, 4) and batch["boxes"].max() < 9
    assert batch["noise"].is_floating_point() and batch["all"].all()


class Hearing(nn.Module):
    """Takes ids with placeholders for sound, which it turns into one feature per two frames."""

    main_input_name = "input_ids"

    def forward(self, input_ids: Any = None, input_features: Any = None, labels: Any = None) -> None: ...

    num_read = 0

    def get_audio_features(self, input_features: torch.Tensor) -> torch.Tensor:
        self.num_read += 1
        return input_features[:, ::2]


@dataclasses.dataclass
class HearingConfig(TextConfig):
    audio_token_id: int = 7
    image_token_id: int | None = None  # type: ignore[assignment]


def test_placeholders_are_as_many_as_the_features_of_the_sound() -> None:
    config = HearingConfig()
    task = TASKS["speech-seq2seq"]
    model = Hearing()
    batch = inputs.make(task, "speech-seq2seq", model, config, Size(3, 8), {}, seed=1)
    assert model.num_read == 0  # the model that is compared is not the one that is asked
    assert batch["input_features"].shape == (3, 32, 16)
    assert ((batch["input_ids"] == config.audio_token_id).sum(1) == 16).all()
    assert batch["input_ids"].shape == batch["labels"].shape == (3, 8 + 16)


class Needing(nn.Module):
    def forward(
        self, pixel_values_videos: Any, input_ids: Any, other: Any, input_values: Any = None, input_features: Any = None
    ) -> None: ...


def test_inputs_that_a_forward_needs_are_made_whatever_the_task() -> None:
    batch = inputs.make(TASKS["speech-seq2seq"], "", Needing(), TextConfig(), Size(3, 8), {}, seed=1)
    assert set(batch) == {"pixel_values_videos", "input_ids", "input_values"}  # one of two forms of the sound
    assert batch["pixel_values_videos"].ndim == 5


def test_every_override_is_for_a_class_that_there_is() -> None:
    transformers = pytest.importorskip("transformers", reason="the classes are those of transformers")
    rows = {row.key for row in all_rows()}
    assert set(overrides.NOT_TRACED) <= rows
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    known = {*CONFIG_MAPPING_NAMES.values(), *dir(transformers)}  # by name: importing all of them takes long
    assert not {*overrides.CONFIGS, *overrides.INPUTS} - known - rows


def test_rows_have_names_of_their_own_and_a_builder() -> None:
    rows = all_rows()
    keys = [row.key for row in rows]
    assert len(set(keys)) == len(keys)
    assert {row.kind for row in rows} <= set(build._BUILDERS)
    assert set(MAPPINGS) == set(TASKS)


def test_prepared_models_draw_nothing_and_hide_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.LayerNorm(4)).double().eval()
    nn.init.zeros_(model[0].weight)
    build.prepare(model)
    assert model.training and model[1].p == 0.0
    assert model[0].weight.dtype is torch.float32 and model[0].weight.abs().min() > 0


# What is compared


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    one, other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    for model in (one, other):
        model(torch.arange(12.0).reshape(4, 3)).square().sum().backward()
    return one, other


def test_causes_name_files_from_their_package_on() -> None:
    inside = f"{Path(torch.__file__).parent}/nn/modules/linear.py:3"
    assert describe(ValueError(f"at {inside} (x)")) == "ValueError: at torch/nn/modules/linear.py:3 (x)"
    other = "/some/where/lib/python3.11/site-packages/other/file.py:7"
    assert describe(ValueError(other)) == "ValueError: site-packages/other/file.py:7"


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


# Totals


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


# Processes


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
