"""A part of the zoo, of every kind: compiled models equal eager PyTorch."""

from __future__ import annotations

import pytest

from tests.repeats import repeats
from tests.zoo.catalog import MAIN_TASKS, Row, all_rows
from tests.zoo.compare import examine
from tests.zoo.packages import is_installed

ROWS = {
    "causal-lm": [
        "LlamaForCausalLM",
        "GPT2LMHeadModel",
        "Gemma2ForCausalLM",
        "MixtralForCausalLM",
        "JetMoeForCausalLM",  # how many tokens go to an expert differs from layer to layer
        "BigBirdForCausalLM",  # the model sets attributes of its layers
        "MambaForCausalLM",  # padding reaches a layer whose sizes are found by running it
    ],
    "masked-lm": ["BertForMaskedLM", "DistilBertForMaskedLM", "PerceiverForMaskedLM"],
    "seq2seq-lm": ["T5ForConditionalGeneration", "BartForConditionalGeneration"],
    "sequence-classification": [
        "RobertaForSequenceClassification",
        "GPT2ForSequenceClassification",
        "CanineForSequenceClassification",  # a second run knows sizes as numbers, and the config is set by the first
        "XLMForSequenceClassification",  # the same, and a size of a tensor that is there for nothing else
        "JetMoeForSequenceClassification",  # the same, and sizes that data decides
    ],
    "image-classification": ["ViTForImageClassification", "ResNetForImageClassification"],
    "token-classification": ["BertForTokenClassification"],
    "question-answering": ["RobertaForQuestionAnswering"],
    "multiple-choice": ["BertForMultipleChoice"],
    "object-detection": ["YolosForObjectDetection", "PPOCRV6SmallDetForObjectDetection"],
    "semantic-segmentation": ["Data2VecVisionForSemanticSegmentation"],
    "universal-segmentation": ["EomtForUniversalSegmentation"],
    "depth-estimation": ["DepthAnythingForDepthEstimation"],  # four outputs of a backbone
    "video-classification": ["VivitForVideoClassification"],
    "speech-recognition": ["HubertForCTC"],
    "speech-seq2seq": ["WhisperForConditionalGeneration"],
    "audio-classification": ["Wav2Vec2ForSequenceClassification"],
    "zero-shot-image-classification": ["CLIPModel"],
    "image-text-to-text": ["LlavaForConditionalGeneration"],
    "time-series-prediction": ["TimesFm2_5ModelForPrediction"],
    "time-series-classification": ["PatchTSTForClassification"],
    "time-series-regression": ["PatchTSTForRegression"],
    "timm": ["resnet", "vision_transformer", "convnext"],
    "diffusers": ["UNet2DModel", "DiTTransformer2DModel"],
    "peft": ["lora-LlamaForCausalLM", "prompt-tuning-GPT2LMHeadModel"],
    "torchao": ["Int8WeightOnlyConfig-LlamaForCausalLM"],
}
"""Kind -> rows."""
LONG = {
    "masked-lm/DistilBertForMaskedLM",
    "time-series-regression/PatchTSTForRegression",
    "video-classification/VivitForVideoClassification",
    "causal-lm/GPT2LMHeadModel",
    "peft/lora-LlamaForCausalLM",
    "seq2seq-lm/BartForConditionalGeneration",
    "sequence-classification/GPT2ForSequenceClassification",
    "causal-lm/Gemma2ForCausalLM",
    "causal-lm/JetMoeForCausalLM",
    "causal-lm/MambaForCausalLM",
    "causal-lm/BigBirdForCausalLM",
    "masked-lm/PerceiverForMaskedLM",
    "seq2seq-lm/T5ForConditionalGeneration",
    "token-classification/BertForTokenClassification",
    "zero-shot-image-classification/CLIPModel",
    "sequence-classification/RobertaForSequenceClassification",
    "sequence-classification/CanineForSequenceClassification",
    "sequence-classification/XLMForSequenceClassification",
    "sequence-classification/JetMoeForSequenceClassification",
    "question-answering/RobertaForQuestionAnswering",
    "object-detection/PPOCRV6SmallDetForObjectDetection",
    "semantic-segmentation/Data2VecVisionForSemanticSegmentation",
    "speech-recognition/HubertForCTC",
    "audio-classification/Wav2Vec2ForSequenceClassification",
    "image-classification/ResNetForImageClassification",
    "depth-estimation/DepthAnythingForDepthEstimation",
    "universal-segmentation/EomtForUniversalSegmentation",
    "object-detection/YolosForObjectDetection",
    "speech-seq2seq/WhisperForConditionalGeneration",
    "image-text-to-text/LlavaForConditionalGeneration",
    "time-series-prediction/TimesFm2_5ModelForPrediction",
}
"""Rows that take more than two seconds, or are like another."""
RETRACED = {
    "image-text-to-text/LlavaForConditionalGeneration": "it compares the numbers of image tokens and features",
    "time-series-prediction/TimesFm2_5ModelForPrediction": "it takes the batch apart into a list of series",
}
"""Rows that another batch size traces again, with why."""


def row_of(key: str) -> Row:
    """A row, or a skip if its package is not there."""
    kind = key.partition("/")[0]
    package = kind if kind in ("timm", "diffusers", "peft", "torchao") else "transformers"
    if not is_installed(package):
        pytest.skip(f"{package} is not installed; docs/zoo.md says how to install it")
    return next(row for row in all_rows() if row.key == key)


def test_every_kind_has_a_row() -> None:
    assert {row.kind for row in all_rows()} <= set(ROWS)


KEYS = [f"{kind}/{name}" for kind, names in ROWS.items() for name in names]


@pytest.mark.parametrize("key", repeats(KEYS, set(KEYS) - LONG))
def test_equals_eager(key: str) -> None:
    row = row_of(key)
    result = examine(row)
    assert result.status == "right", f"{result.status}: {result.cause}"
    assert result.num_layers >= 3
    assert not {"example", "batch"} & set(result.eager_fails)
    assert (result.traces["batch"] == 1) is (key not in RETRACED)
    if row.kind in MAIN_TASKS:
        assert result.num_layers >= result.num_blocks
