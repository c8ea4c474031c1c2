"""Imports the packages of the zoo that are not there everywhere.

timm imports torchvision, and a torchvision built for an accelerator can't load its operators beside a torch built for
another; with the schemas of its operators known, its Python part imports, and that is all that timm wants.

Invariant: nothing is imported before it is asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

_TORCHVISION_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
    "roi_pool(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width) -> (Tensor, Tensor)",
    "ps_roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, "
    "int sampling_ratio) -> (Tensor, Tensor)",
    "ps_roi_pool(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width) "
    "-> (Tensor, Tensor)",
    "deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, "
    "SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, "
    "SymInt offset_groups, bool use_mask) -> Tensor",
    "_cuda_version() -> int",
)
_LIBRARIES: list[Any] = []


def is_installed(name: str) -> bool:
    """Whether a package can be found."""
    return importlib.util.find_spec(name) is not None


def imported(name: str) -> Any:
    """A package; torchvision, and what imports it, although its operators may not load.

    Raises:
        ImportError: it is not installed, or does not import.
    """
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError, AttributeError):
        if _LIBRARIES or not is_installed("torchvision"):
            raise
    library = torch.library.Library("torchvision", "FRAGMENT")
    _LIBRARIES.append(library)  # its definitions live as long as it does
    for schema in _TORCHVISION_OPERATORS:
        if not hasattr(torch.ops.torchvision, schema.partition("(")[0]):
            library.define(schema)
    return importlib.import_module(name)
