"""The zoo itself: rules that shrink configs and make inputs, totals, and rows that crash or hang."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.zoo import build, inputs, overrides
from tests.zoo.catalog import MAPPINGS, TASKS, all_rows
from tests.zoo.compare import (
    describe,
)
from tests.zoo.inputs import Size
from tests.zoo.shrink import shrunk, undeclared


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
    assert undeclared(base) == {"returns_token": True} and not undeclared(BackboneConfig())
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


def test_causes_name_files_from_their_package_on() -> None:
    inside = f"{Path(torch.__file__).parent}/nn/modules/linear.py:3"
    assert describe(ValueError(f"at {inside} (x)")) == "ValueError: at torch/nn/modules/linear.py:3 (x)"
    other = "/some/where/lib/python3.11/site-packages/other/file.py:7"
    assert describe(ValueError(other)) == "ValueError: site-packages/other/file.py:7"
