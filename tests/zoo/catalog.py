"""Every row of the zoo: what is built, and from what.

A row is a name and a recipe; building it imports the package that it is from. Rows of transformers are its own
tables of model classes by task; those of the other packages are lists of names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.zoo import inputs
from tests.zoo.inputs import Task
from tests.zoo.models_of_diffusers import DIFFUSERS
from tests.zoo.models_of_packages import PEFT, TIMM, TORCHAO
from tests.zoo.packages import is_installed

_TEXT = {"input_ids": inputs.token_ids, "attention_mask": inputs.attention_mask}

TASKS: dict[str, Task] = {
    "causal-lm": Task({**_TEXT, "labels": inputs.target_ids}),
    "masked-lm": Task({**_TEXT, "labels": inputs.target_ids}),
    "seq2seq-lm": Task({**_TEXT, "labels": inputs.target_ids}),
    "sequence-classification": Task({**_TEXT, "labels": inputs.sample_labels}),
    "image-classification": Task({"pixel_values": inputs.pixels, "labels": inputs.sample_labels}, has_length=False),
    "token-classification": Task({**_TEXT, "labels": inputs.token_labels}),
    "question-answering": Task(
        {**_TEXT, "start_positions": inputs.positions, "end_positions": inputs.positions}, num_labels=2
    ),
    "multiple-choice": Task({"input_ids": inputs.choices, "labels": inputs.choice_labels}),
    "object-detection": Task({"pixel_values": inputs.pixels}, has_length=False),
    "semantic-segmentation": Task({"pixel_values": inputs.pixels, "labels": inputs.pixel_labels}, has_length=False),
    "universal-segmentation": Task(
        {"pixel_values": inputs.pixels, "pixel_values_videos": inputs.video}, has_length=False
    ),
    "depth-estimation": Task({"pixel_values": inputs.pixels}, has_length=False),
    "video-classification": Task(
        {"pixel_values": inputs.video, "pixel_values_videos": inputs.video, "labels": inputs.sample_labels},
        has_length=False,
    ),
    "speech-recognition": Task(
        {
            "input_values": inputs.waveform,
            "input_features": inputs.mel_bands_last,
            "attention_mask": inputs.frame_mask,
            "labels": inputs.short_labels,
        }
    ),
    "speech-seq2seq": Task(
        {
            "input_values": inputs.waveform,
            "input_features": inputs.mel_bands,
            "input_features_mask": inputs.feature_mask,
            "input_ids": inputs.ids_with_media,
            "labels": inputs.labels_like_ids,
        }
    ),
    "audio-classification": Task(
        {
            "input_values": inputs.waveform,
            "input_features": inputs.mel_bands_last,
            "labels": inputs.sample_labels,
        }
    ),
    "zero-shot-image-classification": Task({**_TEXT, "pixel_values": inputs.pixels}, constants={"return_loss": True}),
    "image-text-to-text": Task(
        {"pixel_values": inputs.pixels, "input_ids": inputs.ids_with_media, "labels": inputs.labels_like_ids}
    ),
    "time-series-prediction": Task({"past_values": inputs.series}, has_length=False),
    "time-series-classification": Task({"past_values": inputs.series}, has_length=False),
    "time-series-regression": Task({"past_values": inputs.series}, has_length=False),
}
"""Task -> its inputs."""

MAPPINGS: dict[str, str] = {
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq-lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "sequence-classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "image-classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "token-classification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "question-answering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "multiple-choice": "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES",
    "object-detection": "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES",
    "semantic-segmentation": "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
    "universal-segmentation": "MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING_NAMES",
    "depth-estimation": "MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES",
    "video-classification": "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES",
    "speech-recognition": "MODEL_FOR_CTC_MAPPING_NAMES",
    "speech-seq2seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "audio-classification": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "zero-shot-image-classification": "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "image-text-to-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "time-series-prediction": "MODEL_FOR_TIME_SERIES_PREDICTION_MAPPING_NAMES",
    "time-series-classification": "MODEL_FOR_TIME_SERIES_CLASSIFICATION_MAPPING_NAMES",
    "time-series-regression": "MODEL_FOR_TIME_SERIES_REGRESSION_MAPPING_NAMES",
}
"""Task -> the table of transformers that lists its model classes."""

SELECTED: dict[str, tuple[str, ...]] = {
    "image-text-to-text": (
        "AyaVisionForConditionalGeneration",
        "Cohere2VisionForConditionalGeneration",
        "Florence2ForConditionalGeneration",
        "GotOcr2ForConditionalGeneration",
        "InternVLForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "Ovis2ForConditionalGeneration",
        "PaliGemmaForConditionalGeneration",
        "QianfanOCRForConditionalGeneration",
        "UnlimitedOcrForConditionalGeneration",
        "VideoLlavaForConditionalGeneration",
    ),
}
"""Tasks of which only some classes are rows: the others take images that only their own processors can prepare."""

MAIN_TASKS = tuple(MAPPINGS)[:5]


@dataclass(frozen=True, slots=True)
class Row:
    """One model of the zoo."""

    kind: str
    """The task, or the package."""
    name: str
    """The class or model name, unique within its kind."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """What the builder of its kind needs."""

    @property
    def key(self) -> str:
        """Unique in the zoo."""
        return f"{self.kind}/{self.name}"


def transformers_rows() -> list[Row]:
    """One row per task and model class; model types that share a class are one row."""
    from transformers.models.auto import modeling_auto

    rows: dict[str, Row] = {}
    for task, table in MAPPINGS.items():
        for model_type, names in getattr(modeling_auto, table).items():
            for name in (names,) if isinstance(names, str) else names:
                row = Row(task, name, {"model_type": model_type})
                if name in SELECTED.get(task, (name,)):
                    rows.setdefault(row.key, row)
    return list(rows.values())


def all_rows() -> list[Row]:
    """The whole zoo, kind by kind; packages that are not installed have no rows."""
    rows = transformers_rows() if is_installed("transformers") else []
    packages: dict[str, Iterable[str]] = {"timm": TIMM, "diffusers": DIFFUSERS, "peft": PEFT, "torchao": TORCHAO}
    for package, names in packages.items():
        if is_installed(package):
            rows += [Row(package, name) for name in names]
    return rows
