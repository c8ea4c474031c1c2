"""What to plan for, from one word on the command line: a Hugging Face config, or a function of the user's.

    config.json, or the folder that has it     the architecture it names, on the meta device, weights not needed
    Qwen/Qwen3-8B                              the same, from the config in the local Hugging Face cache
    package.module:factory                     called without arguments; gives a model, or (model, kwargs)

Invariant: nothing is downloaded, no code that comes with a checkpoint is run, and no weights are read.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.checks import path_of
from roundpipe.core.errors import ConfigError

DEFAULT_SEQ = 2048
"""Tokens per sample of a model that is planned for."""
EXPLAINED_SEQ = 32
"""Of one that is only explained: what is traced hardly depends on it, and models that loop over tokens take as long."""
MOST_ELEMENTS = 2**28
"""Of an example's tensors; they are real ones, of up to eight bytes each."""


@dataclass(frozen=True, slots=True)
class Target:
    """A model and how to call it."""

    name: str
    model: nn.Module
    kwargs_for: Callable[[int], dict[str, Any]]
    """Number of samples to the keyword arguments of a call."""
    batch: int | None
    """Samples of the user's own example, if there is one."""
    tokens_per_sample: int | None
    """None where samples are no sequences of tokens."""
    has_loss: bool
    """Whether the call computes a loss, which then is part of the costs."""
    notes: tuple[str, ...] = ()
    """What of the config does not count here."""
    with_tokens: Callable[[int], Target] | None = None
    """The same with other numbers of tokens per sample, whatever the model says that it takes; None: it has none."""


def check_target(text: str) -> None:
    """Raises a `ConfigError` for what is neither a path nor ``module:function``, before anything is loaded."""
    if not path_of("TARGET", text).expanduser().exists() and ":" not in text and _cached_config(text) is None:
        is_name = _HUB_NAME.fullmatch(text) and not text.endswith(".json")
        fetched = f" (hf download {text} config.json fetches it)" if is_name else ""
        raise ConfigError(
            f"TARGET {text}: there is no such file or folder, nor such a model in the Hugging Face cache{fetched}; "
            "give a Hugging Face config.json, a folder that has one, or package.module:factory"
        )


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def _cached_config(name: str) -> Path | None:
    """The config of a model of the hub, such as ``Qwen/Qwen3-8B``, if the local cache has it; nothing is downloaded."""
    if not _HUB_NAME.fullmatch(name) or importlib.util.find_spec("huggingface_hub") is None:
        return None
    found = importlib.import_module("huggingface_hub").try_to_load_from_cache(name, "config.json")
    return Path(found) if isinstance(found, str) else None


def load_target(
    text: str, *, dtype: torch.dtype, seq: int | None, lora_rank: int | None, default_seq: int = DEFAULT_SEQ
) -> Target:
    """The target that the user named; a `ConfigError` says what to give if there is no such model or it can't be made.

    The dtype is of the weights of a model made from a config; without ``seq`` samples have the default number of
    tokens, or fewer if the model can't take as many. With ``lora_rank``, low-rank adapters of this rank on all linear
    layers are trained instead of the model.
    """
    check_target(text)
    path, cached = Path(text).expanduser(), None
    if not path.exists():
        cached = _cached_config(text)
    if path.exists() or cached is not None:
        target = _from_config(cached or path, dtype, seq, default_seq)
        target = target if cached is None else replace(target, name=text.partition("/")[2])
    else:
        target = _from_factory(text, seq, default_seq)
    if lora_rank is not None:
        _add_adapters(target.model, lora_rank, dtype)
    target.model.train()
    return target


def _from_config(path: Path, dtype: torch.dtype, seq: int | None, default_seq: int) -> Target:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{path} has no config.json; give a Hugging Face config or checkpoint folder")
    transformers = _imported("transformers", "a config.json")
    try:
        config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a broken file fails in many ways
        raise ConfigError(f"{file} can't be used as a Hugging Face config: {_first_line(error)}") from error
    text_config = config.get_text_config()
    config.use_cache = text_config.use_cache = False
    try:
        with torch.device("meta"):
            model = _architecture(transformers, config)._from_config(config, dtype=dtype)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{file}: the model can't be built from it: {_first_line(error)}") from error
    name = file.resolve().parent.name if path.is_dir() or file.name == "config.json" else file.stem
    return replace(_of_transformers(name, model, seq, default_seq), notes=tuple(_left_out(config, model)))


def _left_out(config: Any, model: nn.Module) -> Iterator[str]:
    """What of a config the model that was made from it doesn't follow."""
    named, kind = list(getattr(config, "architectures", None) or ()), type(model).__name__
    if named and kind not in named:
        yield f"transformers has no {' or '.join(map(str, named))}, which the config names: this is {kind}"
    if getattr(config, "quantization_config", None):
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        yield f"the config's quantization_config is left out: weights count as {dtype}"


def _architecture(transformers: Any, config: Any) -> Any:
    """The class that the config names, else the causal language model of its type."""
    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) in mapping:
        return mapping[type(config)]
    raise ConfigError(
        f"the config names no architecture that transformers {transformers.__version__} has, and {config.model_type!r} "
        'has no causal language model; add "architectures": ["..."], or give package.module:factory'
    )


def _of_transformers(name: str, model: Any, seq: int | None, default_seq: int, tokens: int | None = None) -> Target:
    kind, input_name, length = type(model).__name__, model.main_input_name, None
    label_shape: tuple[int, ...] | None
    if input_name == "pixel_values":
        size, channels = getattr(model.config, "image_size", 224), getattr(model.config, "num_channels", 3)
        shape = (channels, *((size, size) if isinstance(size, int) else size))
        dtype = next(model.parameters()).dtype
        label_shape = () if "ImageClassification" in kind else None
    elif input_name == "input_ids":
        length = tokens or _num_tokens(model, seq, default_seq)
        shape, dtype = (length,), torch.long
        label_shape = () if "SequenceClassification" in kind else None
        if "LM" in kind or "ConditionalGeneration" in kind:
            label_shape = (length,)
    else:
        raise ConfigError(
            f"{kind} takes {input_name!r}, for which no example can be made up; give package.module:factory that "
            "returns (model, kwargs)"
        )

    def kwargs_for(num_samples: int) -> dict[str, Any]:
        _check_size(num_samples, math.prod(shape))
        kwargs = {input_name: torch.ones(num_samples, *shape, dtype=dtype)}
        if label_shape is not None:
            kwargs["labels"] = torch.zeros(num_samples, *label_shape, dtype=torch.long)
        return kwargs

    def with_tokens(tokens: int) -> Target:
        return _of_transformers(name, model, None, default_seq, tokens)

    longest = _longest(model)
    notes = []
    if length is not None and longest is not None and length > longest:
        notes.append(f"the config says that the model takes at most {longest:,} tokens (max_position_embeddings)")
    target = Target(name, model, kwargs_for, None, length, label_shape is not None, tuple(notes))
    return target if length is None else replace(target, with_tokens=with_tokens)


def _num_tokens(model: Any, seq: int | None, default_seq: int) -> int:
    longest = _longest(model)
    if seq is not None and longest is not None and seq > longest:
        raise ConfigError(
            f"--seq {seq}: {type(model).__name__} takes at most {longest} tokens (max_position_embeddings)"
        )
    return seq or min(default_seq, longest or default_seq)


def _longest(model: Any) -> int | None:
    """The most tokens that a config says its model takes."""
    longest: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return longest


def _check_size(num_samples: int, num_elements: int) -> None:
    if num_samples * num_elements > MOST_ELEMENTS:
        raise ConfigError(
            f"an example of {num_samples:,} samples of {num_elements:,} values each has more than {MOST_ELEMENTS:,} in "
            "all; give a smaller --batch or --seq, or more --microbatches"
        )


def _from_factory(text: str, seq: int | None, default_seq: int) -> Target:
    module_name, _, function_name = text.partition(":")
    if not module_name or not function_name:
        raise ConfigError(f"{text!r} names no function; give package.module:factory")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # it is the user's code
        raise ConfigError(f"{text}: {module_name!r} can't be imported: {_describe(error)}") from error
    factory = getattr(module, function_name, None)
    if factory is None:
        raise ConfigError(f"{text}: {module_name} has no {function_name!r}")
    if not callable(factory):
        raise ConfigError(f"{text} is {type(factory).__name__}; name a function that returns a model")
    try:
        result = factory()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{text} is called without arguments, and failed: {_describe(error)}") from error
    model, kwargs = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(model, nn.Module) or not isinstance(kwargs, dict | None):
        raise ConfigError(
            f"{text} returned {type(result).__name__}; it must return an nn.Module, or (nn.Module, dict of keyword "
            "arguments)"
        )
    if kwargs is None:
        if hasattr(model, "main_input_name") and hasattr(model, "config"):
            return _of_transformers(text, model, seq, default_seq)
        raise ConfigError(f"{text} returned a model alone; return (model, kwargs) with an example of its arguments")
    if seq is not None:
        raise ConfigError("--seq is for models made from a config; the factory's own kwargs say how long samples are")
    return _of_example(text, model, kwargs)


def _of_example(text: str, model: nn.Module, kwargs: dict[str, Any]) -> Target:
    batch = next((len(tensor) for tensor in trees.tensors(kwargs) if tensor.ndim), 0)
    if not batch:
        raise ConfigError(f"{text}: the keyword arguments have no tensor with samples along dimension 0")
    try:
        inspect.signature(model.forward).bind(**kwargs)
    except TypeError as error:
        raise ConfigError(f"{text}: {type(model).__name__} can't be called with these arguments: {error}") from error

    def kwargs_for(num_samples: int) -> dict[str, Any]:
        def resized(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.ndim or len(tensor) != batch:
                return tensor
            _check_size(num_samples, tensor.numel() // batch)
            return tensor[torch.arange(num_samples, device=tensor.device) % batch]

        return trees.map_tensors(kwargs, resized)

    ids = kwargs.get("input_ids")
    tokens = ids.shape[1] if isinstance(ids, torch.Tensor) and ids.ndim == 2 else None
    return Target(text, model, kwargs_for, batch, tokens, "labels" in kwargs)


def _add_adapters(model: nn.Module, rank: int, dtype: torch.dtype) -> None:
    """Freezes the model and puts adapters onto its linear layers, in place."""
    peft = _imported("peft", "--lora")
    model.requires_grad_(False)
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft remarks on patterns that it has made itself
            peft.inject_adapter_in_model(config, model, low_cpu_mem_usage=on_meta)
    except Exception as error:
        raise ConfigError(f"--lora {rank}: {type(model).__name__} takes no adapters: {_first_line(error)}") from error
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def _imported(package: str, what: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(f"{what} needs the package {package}: pip install 'roundpipe[hf]'") from error


def _first_line(error: BaseException) -> str:
    """What an error says, up to its first line that doesn't announce another."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    last = next((index for index, line in enumerate(lines) if not line.rstrip().endswith(":")), len(lines) - 1)
    return " ".join(line.strip() for line in lines[: last + 1])


def _describe(error: BaseException) -> str:
    """An error of the user's code: its type, what it says, and the line it is from."""
    where = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename != __file__ and "importlib" not in frame.filename:
            where = f" ({Path(frame.filename).name}:{frame.lineno})"
    return f"{type(error).__name__}: {_first_line(error)}{where}"
