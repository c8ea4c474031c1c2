"""Inputs for a model, from the names of its forward's parameters, its task and its config.

A batch is made of named inputs, each by the rule for its name. What can't be told from names (how many
placeholder tokens an image stands for) is asked of the model itself.

Invariant: the same arguments give the same inputs.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.zoo.shrink import FIRST_TOKEN, VOCAB

NUM_LABELS = 3
IMAGE_SIZE = 64
AUDIO_SAMPLES_PER_POSITION = 400


@dataclass(frozen=True, slots=True)
class Size:
    """How large a batch is."""

    batch: int
    length: int
    """Positions of text or time."""
    is_padded: bool = False
    """Whether the last positions of the first sample are padding."""


@dataclass(frozen=True, slots=True)
class Request:
    """What an input is made for."""

    model: nn.Module
    config: Any
    size: Size
    task: str
    generator: torch.Generator
    made: dict[str, Any] = field(default_factory=dict)
    """The inputs that are made already."""

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Random integers in ``[low, high)``."""
        return torch.randint(low, max(high, low + 1), shape, generator=self.generator)

    def normal(self, *shape: int) -> torch.Tensor:
        """Random float32 numbers."""
        return torch.randn(shape, generator=self.generator)

    def setting(self, *names: str, default: Any = None) -> Any:
        """The first of some config fields that is there, in the config or one inside it."""
        for config in (self.config, *inner_configs(self.config)):
            for name in names:
                value = getattr(config, name, None)
                if value is not None:
                    return value
        return default


def inner_configs(config: Any) -> list[Any]:
    """The configs inside a config, at any depth."""
    found = []
    for value in list(getattr(config, "__dict__", {}).values()):
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            found += [value, *inner_configs(value)]
    return found


Maker = Callable[[Request], Any]


def token_ids(request: Request) -> torch.Tensor:
    """Ids that mean nothing in particular, ``[B, L]``; padded ends hold the padding token."""
    size = request.size
    ids = request.integers(FIRST_TOKEN, text_vocab(request), size.batch, size.length)
    if size.is_padded:
        ids[0, -num_padded(size) :] = request.setting("pad_token_id", default=0)
    if request.task == "sequence-classification":
        ids[:, size.length - num_padded(size) - 1] = request.setting("eos_token_id", default=2)
    return ids


_READERS = ("get_image_features", "get_audio_features", "get_video_features")
"""Methods that turn images or sound into what stands in the place of tokens."""


def ids_with_media(request: Request) -> torch.Tensor:
    """Ids with a run of the placeholder token as long as the features of a sample, ``[B, L + features]``.

    The features are those of the images or the sound among the inputs; plain ids if the model has no placeholders.
    """
    ids = token_ids(request)
    names = (("image_token_id", "image_token_index"), ("audio_token_id", "audio_token_index"))
    token = next((found for pair in names if (found := request.setting(*pair)) is not None), None)
    reader = _reader(request)
    if reader is None or token is None:
        return ids
    parameters = inspect.signature(reader).parameters
    takes_all = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values())
    media = {name: value for name, value in request.made.items() if name in parameters or takes_all}
    with torch.no_grad():
        features = reader(**media)
    features = getattr(features, "pooler_output", features)
    rows = sum(part.shape[:-1].numel() for part in ([features] if isinstance(features, torch.Tensor) else features))
    places = torch.full((request.size.batch, rows // request.size.batch), int(token))
    return torch.cat([ids[:, :1], places, ids[:, 1:]], 1)


def _reader(request: Request) -> Callable[..., Any] | None:
    """What reads images or sound: a method of a copy of the model, or of a module inside; models may count calls."""
    for module in copy.deepcopy(request.model).float().modules():
        for name in _READERS:
            if hasattr(module, name):
                method: Callable[..., Any] = getattr(module, name)
                return method
    return None


def labels_like_ids(request: Request) -> torch.Tensor:
    """Targets as long as the ids among the inputs; those of a decoder where there are none, or it has its own."""
    ids = request.made.get("input_ids")
    if ids is None or getattr(request.config, "is_encoder_decoder", False):
        return target_ids(request)
    return torch.randint(FIRST_TOKEN, text_vocab(request), ids.shape, generator=request.generator)


def series(request: Request) -> torch.Tensor:
    """Observed values, ``[B, T, C]``, or ``[B, T]`` for a model that knows no channels."""
    channels = request.setting("num_input_channels", "input_size")
    shape = [int(request.setting("context_length", default=32)), *([int(channels)] if channels else [])]
    return request.normal(request.size.batch, *shape)


def text_vocab(request: Request) -> int:
    """The number of token ids of the text side."""
    config = request.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocab = getattr(text, "vocab_size", None) or request.setting("vocab_size", default=VOCAB)
    return int(vocab) if isinstance(vocab, int) else VOCAB


def num_padded(size: Size) -> int:
    """Positions of the first sample that are padding."""
    return size.length // 4


def attention_mask(request: Request) -> torch.Tensor:
    """Ones, ``[B, L]``, and zeros where there is padding."""
    mask = torch.ones(request.size.batch, request.size.length, dtype=torch.long)
    if request.size.is_padded:
        mask[0, -num_padded(request.size) :] = 0
    return mask


def pixels(request: Request) -> torch.Tensor:
    """Images, ``[B, C, H, W]``."""
    height, width = image_size(request)
    return request.normal(request.size.batch, channels(request), height, width)


def channels(request: Request) -> int:
    """Channels of an image."""
    return int(request.setting("num_channels", "in_channels", "in_chans", default=3))


def image_size(request: Request) -> tuple[int, int]:
    """Height and width of an image."""
    size = request.setting("image_size", "input_size", default=IMAGE_SIZE)
    if isinstance(size, Mapping):
        size = (size["height"], size["width"])
    if isinstance(size, (list, tuple)):
        return int(size[0]), int(size[-1])
    return int(size), int(size)


def video(request: Request) -> torch.Tensor:
    """Clips, ``[B, T, C, H, W]``."""
    height, width = image_size(request)
    frames = request.setting("num_frames", "frames_per_clip", default=4)
    return request.normal(request.size.batch, int(frames), channels(request), height, width)


def waveform(request: Request) -> torch.Tensor:
    """Sound, ``[B, T]``."""
    return request.normal(request.size.batch, request.size.length * AUDIO_SAMPLES_PER_POSITION)


def boxes(request: Request) -> torch.Tensor:
    """Boxes of tokens on a page, ``[B, L, 4]``, corners ascending."""
    size = request.size
    corners = request.integers(0, 60, size.batch, size.length, 4)
    return torch.cat([corners[..., :2].minimum(corners[..., 2:]), corners[..., :2].maximum(corners[..., 2:])], -1)


def spectrogram(request: Request) -> torch.Tensor:
    """A spectrogram as an image, ``[B, T, M]``, of the length that the model has positions for."""
    frames = request.setting("max_length", default=4 * request.size.length)
    return request.normal(request.size.batch, int(frames), int(request.setting("num_mel_bins", default=16)))


def frame_mask(request: Request) -> torch.Tensor:
    """Ones for every frame or sample of sound, ``[B, T]``."""
    takes_waveform = request.model.main_input_name == "input_values"
    length = request.size.length * (AUDIO_SAMPLES_PER_POSITION if takes_waveform else 4)
    return torch.ones(request.size.batch, length, dtype=torch.long)


def mel_bands_first(request: Request) -> torch.Tensor:
    """A spectrogram, ``[B, M, T]``."""
    frames = request.setting("max_source_positions", default=None)
    length = 2 * int(frames) if frames else 4 * request.size.length
    return request.normal(request.size.batch, int(request.setting("num_mel_bins", default=16)), length)


def mel_bands_last(request: Request) -> torch.Tensor:
    """A spectrogram, ``[B, T, M]``."""
    names = ("feature_projection_input_dim", "num_mel_bins", "input_dim", "input_feat_per_channel", "feature_size")
    bands = request.setting(*names)
    return request.normal(request.size.batch, 4 * request.size.length, int(bands or 16))


def mel_bands(request: Request) -> torch.Tensor:
    """A spectrogram: bands first if the model has positions for frames, as Whisper does, else bands last."""
    return (mel_bands_first if request.setting("max_source_positions") else mel_bands_last)(request)


def feature_mask(request: Request) -> torch.Tensor:
    """Ones for every frame of the spectrogram among the inputs, ``[B, T]``."""
    features = request.made["input_features"]
    bands = int(request.setting("num_mel_bins", default=16))
    return torch.ones(features.shape[0], features.shape[1 if features.shape[2] == bands else 2], dtype=torch.long)


def token_labels(request: Request) -> torch.Tensor:
    """A class per position, ``[B, L]``."""
    return request.integers(0, NUM_LABELS, request.size.batch, request.size.length)


def sample_labels(request: Request) -> torch.Tensor:
    """A class per sample, ``[B]``."""
    return request.integers(0, NUM_LABELS, request.size.batch)


def choice_labels(request: Request) -> torch.Tensor:
    """One of two choices per sample, ``[B]``."""
    return request.integers(0, 2, request.size.batch)


def short_labels(request: Request) -> torch.Tensor:
    """Targets of speech recognition, ``[B, 4]``."""
    return request.integers(FIRST_TOKEN, text_vocab(request), request.size.batch, 4)


def target_ids(request: Request) -> torch.Tensor:
    """Targets of a decoder, ``[B, L]``."""
    return request.integers(FIRST_TOKEN, text_vocab(request), request.size.batch, request.size.length)


def pixel_labels(request: Request) -> torch.Tensor:
    """A class per pixel, ``[B, H, W]``."""
    return request.integers(0, NUM_LABELS, request.size.batch, *image_size(request))


def positions(request: Request) -> torch.Tensor:
    """A position per sample, ``[B]``."""
    return request.integers(0, request.size.length // 2, request.size.batch)


def choices(request: Request) -> torch.Tensor:
    """Ids of two choices per sample, ``[B, 2, L]``."""
    size = request.size
    return request.integers(FIRST_TOKEN, text_vocab(request), size.batch, 2, size.length)


BY_NAME: dict[str, Maker] = {"input_ids": token_ids, "pixel_values": pixels, "pixel_values_videos": video}
"""Inputs that a forward can't do without, whatever the task."""
LAST = ("input_features_mask", "input_ids", "labels")
"""Inputs that may be made to fit the others, in the order in which they need each other."""
EITHER = (("input_values", "input_features"),)
"""Two forms of the same input: a model that takes both gets the first."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a task gives to a model beyond its main input."""

    makers: Mapping[str, Maker]
    """Name of a parameter of the forward -> how its value is made; parameters that are not there are skipped."""
    has_length: bool = True
    """Whether inputs have a length that can vary."""
    num_labels: int = NUM_LABELS
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Plain values for parameters of the forward."""


def make(
    task: Task, task_name: str, model: nn.Module, config: Any, size: Size, extra: Mapping[str, Any], seed: int
) -> dict[str, Any]:
    """The keyword arguments of one call.

    Args:
        task: the rules.
        task_name: its name.
        model, config: what the inputs are for.
        size: of the batch.
        extra: further inputs: a maker by its name in this module, or a shape (``B``, ``L`` and numbers) and a limit
            for integers; None: leave that input out.
        seed: of the random numbers.
    """
    request = Request(model, config, size, task_name, torch.Generator().manual_seed(seed))
    parameters = inspect.signature(model.forward).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    made = request.made
    rules: dict[str, Any] = {name: maker for name, maker in task.makers.items() if _is_taken(name, parameters)}
    needed = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    rules |= {name: BY_NAME[name] for name in needed if name in BY_NAME and name not in rules}
    for first, other in EITHER:
        if first in rules:
            rules.pop(other, None)
    rules |= extra
    for name in sorted(rules, key=lambda name: LAST.index(name) if name in LAST else -1):
        if (rule := rules[name]) is not None:
            made[name] = rule(request) if callable(rule) else _extra(rule, request)
    made |= {name: value for name, value in task.constants.items() if name in parameters or takes_all}
    return made


def _is_taken(name: str, parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Whether a forward takes an input; one with ``**kwargs`` takes labels, too."""
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return name in parameters or takes_all and name == "labels"


def _extra(rule: Any, request: Request) -> Any:
    """An input from data: the name of a maker, ``(shape, limit)``, or a plain value."""
    if isinstance(rule, str):
        return globals()[rule](request)
    if not isinstance(rule, tuple) or not rule or not isinstance(rule[0], str):
        return rule
    sizes = {"B": request.size.batch, "L": request.size.length}
    shape = [_dimension(word, sizes) for word in rule[0].split()]
    kind = rule[1] if len(rule) > 1 else None
    if kind is None:
        return request.normal(*shape)
    if kind == "ones":
        return torch.ones(shape, dtype=torch.long)
    if kind == "eights":
        return torch.full(shape, 8)
    if kind == "true":
        return torch.ones(shape, dtype=torch.bool)
    if kind == "uniform":
        return torch.rand(shape, generator=request.generator)
    return request.integers(0, kind, *shape)


def _dimension(word: str, sizes: Mapping[str, int]) -> int:
    """``B``, ``L``, ``2L``, ``16B`` or a number."""
    if word[-1] in sizes:
        return int(word[:-1] or 1) * sizes[word[-1]]
    return int(word)
