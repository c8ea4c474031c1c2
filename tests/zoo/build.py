"""Builds the model of a row, and says how to call it.

Models have float32 weights, are in train mode, draw no random numbers, and have noise added to every weight, so that
nothing that is initialised to zero hides a wrong result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from roundpipe.core import trees
from tests.zoo import inputs, overrides
from tests.zoo.catalog import MAPPINGS, TASKS, Row
from tests.zoo.inputs import Size, Task
from tests.zoo.models_of_diffusers import DIFFUSERS
from tests.zoo.models_of_packages import PEFT, TIMM, TORCHAO
from tests.zoo.packages import imported, is_installed
from tests.zoo.shrink import RANDOM, shrunk

NOISE = 0.02
IMAGE_SIZE = 64


@dataclass(frozen=True, slots=True)
class Specimen:
    """A model that is ready to be trained."""

    model: nn.Module
    inputs_for: Callable[[Size, int], dict[str, Any]]
    """``(size, seed) -> keyword arguments``."""
    has_length: bool


def build(row: Row) -> Specimen:
    """The model of a row.

    Raises:
        Exception: whatever its package raises.
    """
    torch.manual_seed(0)
    return _BUILDERS[row.kind](row)


def prepare(model: nn.Module) -> None:
    """Float32, train mode, no dropout, no zeros."""
    model.float().train()
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and (
                RANDOM.fullmatch(name) or isinstance(module, nn.modules.dropout._DropoutNd)
            ):
                setattr(module, name, 0.0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * NOISE)


def loss_of(outputs: Any, label: Any = None) -> torch.Tensor:
    """The model's own loss if it computes one, otherwise a sum over all its outputs."""
    loss = outputs.get("loss") if hasattr(outputs, "get") else getattr(outputs, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return loss.sum()
    terms = [
        tensor.to(torch.promote_types(tensor.dtype, torch.float32)).square().mean()
        for tensor in trees.tensors(outputs)
        if tensor.requires_grad and tensor.is_floating_point() and tensor.numel()
    ]
    return torch.stack(terms).sum()


# transformers


def _of_transformers(row: Row) -> Specimen:
    specimen = _transformer(row.kind, row.name, row.recipe["model_type"])
    prepare(specimen.model)
    return specimen


def _transformer(task_name: str, class_name: str, model_type: str = "") -> Specimen:
    import transformers

    _make_packages_known()
    model_class = getattr(transformers, class_name)
    config_class = model_class.config_class
    if config_class is None:
        config_class = transformers.CONFIG_MAPPING[model_type]
    config = shrunk(config_class, _merged(overrides.CONFIGS, config_class.__name__, class_name))
    config.num_labels = TASKS[task_name].num_labels
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    model = model_class(config)
    extra = _merged(overrides.INPUTS, config_class.__name__, class_name, f"{task_name}/{class_name}")
    task = TASKS[task_name]
    make = functools.partial(inputs.make, task, task_name, model, config)
    return Specimen(model, lambda size, seed: make(size, extra, seed), task.has_length)


def _merged(table: dict[str, dict[str, Any]], *names: str) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for name in names:
        merged |= table.get(name, {})
    return merged


def _make_packages_known() -> None:
    """Lets other packages import torchvision, where that needs help."""
    if is_installed("torchvision"):
        imported("torchvision")


# The other packages


def _of_timm(row: Row) -> Specimen:
    timm = imported("timm")
    name, options = TIMM[row.name]
    config = timm.get_pretrained_cfg(name)
    size = IMAGE_SIZE
    try:
        model = timm.create_model(name, num_classes=inputs.NUM_LABELS, img_size=size, **options)
    except TypeError:  # it takes images of any size, or of one only
        model = timm.create_model(name, num_classes=inputs.NUM_LABELS, **options)
        if config is not None and config.fixed_input_size:
            size = config.input_size[-1]
    prepare(model)
    extra = {"x": (f"B 3 {size} {size}",)}
    return _from_data(model, extra)


def _of_diffusers(row: Row) -> Specimen:
    _make_packages_known()
    diffusers = imported("diffusers")
    options, extra = DIFFUSERS[row.name]
    model = getattr(diffusers, row.name)(**options)
    prepare(model)
    return _from_data(model, extra)


def _of_peft(row: Row) -> Specimen:
    peft = imported("peft")
    recipe = PEFT[row.name]
    base = _transformer(recipe["task"], recipe["model"])
    options = recipe["options"]
    config = getattr(peft, recipe["config"])(task_type=recipe["task_type"], **options)
    model = peft.get_peft_model(base.model, config)
    prepare(model)
    return Specimen(model, base.inputs_for, base.has_length)


def _of_torchao(row: Row) -> Specimen:
    """A model with quantised, frozen linear layers; what is left of it is trained."""
    quantization = imported("torchao.quantization")
    specimen = _transformer("causal-lm", row.name.partition("-")[2])
    prepare(specimen.model)
    quantization.quantize_(specimen.model, getattr(quantization, TORCHAO[row.name])())
    for module in specimen.model.modules():
        if isinstance(module, nn.Linear):
            module.weight.requires_grad_(False)
    return specimen


def _from_data(model: nn.Module, extra: dict[str, Any]) -> Specimen:
    make = functools.partial(inputs.make, Task({}), "", model, None)
    has_length = any(isinstance(rule, tuple) and "L" in str(rule[0]) for rule in extra.values())
    return Specimen(model, lambda size, seed: make(size, extra, seed), has_length)


_BUILDERS: dict[str, Callable[[Row], Specimen]] = {
    **dict.fromkeys(MAPPINGS, _of_transformers),
    "timm": _of_timm,
    "diffusers": _of_diffusers,
    "peft": _of_peft,
    "torchao": _of_torchao,
}
