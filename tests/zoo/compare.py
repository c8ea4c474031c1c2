"""One row: its model compiled, trained for a few calls, and compared with eager PyTorch.

The calls are the example's sizes, another batch size, another length, each with inputs of its own, and for some rows
the same with the padding taken away or added. Half of the rows have padding in their example. Eager runs a deep copy
of the model on the same inputs. Every layer is a stage of its own in the first call, so that all that
crosses a cut crosses the host, and all but the last layer is recomputed; later calls use the planner's stages.

A gradient that is zero but for rounding differs from eager's by all of itself when sums are taken in another order. So
a row that is off in float32 is run again in float64, with a much smaller tolerance, and is right if it agrees there.
That tolerance grows with what the model itself makes of rounded inputs: some detectors multiply them by 1e11.

Invariant: what is compared is compared for every parameter and every buffer; nothing is left out because it is wrong.
"""

from __future__ import annotations

import copy
import math
import os
import re
import sys
import time
import zlib
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.errors import TraceError
from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.fx.passes.lower import LowerOptions
from roundpipe.fx.source import TracedSource
from roundpipe.runtime.config import RoundPipeRunConfig
from roundpipe.wrappers.calls import ChainProgram
from roundpipe.wrappers.pipe import RoundPipe
from tests.zoo.build import Specimen, build, loss_of
from tests.zoo.catalog import Row
from tests.zoo.cuts import cuts_between_blocks
from tests.zoo.inputs import Size

TOLERANCE = 1e-3
"""Largest relative difference of float32 results that counts as right."""
TOLERANCE_FLOAT64 = 1e-7
"""The same in float64."""
SENSITIVITY_MARGIN = 10.0
"""A model may differ from eager in float64 by so many times what eager differs from itself by when its inputs and
weights are rounded: what a model makes of rounding says nothing about who ran it. Never by more than `TOLERANCE`."""
SMALL_GRADIENT = 1e-4
"""Gradients are compared relative to their own largest value, or to this share of the model's largest one."""
EXAMPLE = Size(3, 16)
CALLS: dict[str, Size] = {"example": EXAMPLE, "batch": Size(5, 16), "length": Size(3, 24), "padding": EXAMPLE}
OTHER_PADDING_EVERY = 6
"""One row in so many is also called with padding if its example has none, and the other way round."""


def calls_of(row: Row) -> dict[str, Size]:
    """The calls that a row is compared for, and their sizes."""
    number = zlib.crc32(row.key.encode())
    is_padded = bool(number // OTHER_PADDING_EVERY % 2)
    calls = {name: replace(size, is_padded=is_padded != (name == "padding")) for name, size in CALLS.items()}
    if number % OTHER_PADDING_EVERY:
        del calls["padding"]
    return calls


@dataclass
class Result:
    """What was found out about a row."""

    key: str
    kind: str
    status: str = ""
    """``right``, ``wrong``, ``not traced``, ``too coarse`` (fewer than three layers), or why there is nothing to
    compare: ``not built``, ``eager fails``, ``eager is random``."""
    cause: str = ""
    model_type: str = ""
    """Of its config, for models of transformers."""
    num_layers: int = 0
    num_blocks: int = 0
    """Repeated blocks that the model has."""
    most_carried: int | None = None
    """The largest number of values carried over a cut between two blocks of one list; inputs don't count."""
    opaque: dict[str, str] = field(default_factory=dict)
    """Modules whose inside was not traced, with why."""
    differences: dict[str, float] = field(default_factory=dict)
    """Call -> largest relative difference from eager of loss, gradients and buffers."""
    differences_float64: dict[str, float] = field(default_factory=dict)
    """The same in float64, for a row that is off in float32."""
    sensitivity_float64: float | None = None
    """For such a row, what eager differs from itself by when inputs and weights are off by their rounding."""
    eager_fails: dict[str, str] = field(default_factory=dict)
    """Calls that eager can't do, with its error."""
    traces: dict[str, int] = field(default_factory=dict)
    """Call -> traces made by then."""
    trace_s: float = 0.0
    """Processor seconds of the first trace, its costs and its layers."""
    total_s: float = 0.0
    """Processor seconds of all."""

    @property
    def counts(self) -> bool:
        """Whether eager can train it."""
        return self.status in ("right", "wrong", "not traced", "too coarse")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def examine(row: Row) -> Result:
    """Builds, compiles and compares a row; errors of any kind become its status."""
    result = Result(row.key, row.kind)
    start = time.process_time()
    try:
        _examine(row, result)
    finally:
        result.total_s = round(time.process_time() - start, 3)
    return result


def _examine(row: Row, result: Result) -> None:
    try:
        specimen = build(row)
    except Exception as error:  # of another package
        result.status, result.cause = "not built", describe(error)
        return
    result.model_type = getattr(getattr(specimen.model, "config", None), "model_type", "")
    try:
        if _is_random(specimen):
            result.status, result.cause = "eager is random", "two runs with different seeds differ"
            return
    except Exception as error:
        result.status, result.cause = "eager fails", describe(error)
        return
    _compare(specimen, row, result, TOLERANCE)
    if result.status == "wrong" and all(map(math.isfinite, result.differences.values())):
        _look_closer(row, result)


def _look_closer(row: Row, result: Result) -> None:
    """Runs a row that is off in float32 again in float64."""
    again = Result(row.key, row.kind)
    specimen = in_float64(build(row))
    try:
        result.sensitivity_float64 = sensitivity(specimen, calls_of(row)["example"])
    except Exception as error:
        result.cause += f"; in float64 eager fails: {describe(error)}"
        return
    tolerance = min(max(TOLERANCE_FLOAT64, SENSITIVITY_MARGIN * result.sensitivity_float64), TOLERANCE)
    _compare(specimen, row, again, tolerance)
    result.differences_float64 = again.differences
    if again.status == "right" and not again.eager_fails:
        result.status = "right"
        result.cause += f"; by {max(again.differences.values()):.2e} in float64"
    else:
        result.cause += f"; in float64 {again.cause or next(iter(again.eager_fails.values()))}"


def sensitivity(specimen: Specimen, size: Size) -> float:
    """The largest relative difference of eager from itself when inputs and weights are off by their rounding."""
    inputs = specimen.inputs_for(size, 1)
    models = [copy.deepcopy(specimen.model) for _ in range(2)]
    generator = torch.Generator().manual_seed(1)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor.clone()
        signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.dtype) * 2 - 1
        return tensor * (1 + signs * torch.finfo(tensor.dtype).eps)

    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.copy_(moved(parameter))
    losses = []
    for model, batch in zip(models, (_copied(inputs), dict(trees.map_tensors(inputs, moved))), strict=True):
        torch.manual_seed(11)
        loss = loss_of(model(**batch))
        loss.backward()
        losses.append(loss.detach())
    return largest_difference(losses[1], models[1], losses[0], models[0])[0]


def in_float64(specimen: Specimen) -> Specimen:
    """The same model and the same numbers in float64."""

    def inputs_for(size: Size, seed: int) -> dict[str, Any]:
        return dict(trees.map_tensors(specimen.inputs_for(size, seed), _widened))

    return Specimen(specimen.model.double(), inputs_for, specimen.has_length)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _compare(specimen: Specimen, row: Row, result: Result, tolerance: float) -> None:
    """Traces a model and runs its calls."""
    model, reference = specimen.model, copy.deepcopy(specimen.model)
    source = TracedSource(model, LowerOptions(), _raise)
    config = RoundPipeRunConfig(num_microbatch=1)
    calls = calls_of(row)
    try:
        example = specimen.inputs_for(calls["example"], 1)
        start = time.process_time()
        chain = source.chain_for((), example)
        result.trace_s = round(time.process_time() - start, 3)
        assert chain is not None
    except Exception as error:  # anything but a TraceError is a bug of the tracer
        result.status, result.cause = "not traced", describe(error)
        return
    result.num_layers = len(chain)
    result.opaque = {name: without_paths(why) for name, why in source.opaque.items()}
    result.num_blocks, result.most_carried = cuts_between_blocks(model, chain)
    result.status = "right"
    with RoundPipe(ChainProgram(model, source), devices=["cpu"], model_run_config=config) as pipe:
        for name, size in calls.items():
            if _applies(name, specimen):
                _compare_call(specimen, pipe, source, reference, name, size, result, tolerance)
    if result.status == "right" and result.num_layers < 3:
        result.status, result.cause = "too coarse", f"{result.num_layers} layers"


def _applies(name: str, specimen: Specimen) -> bool:
    if name == "length":
        return specimen.has_length
    if name == "padding":
        return specimen.has_length and "attention_mask" in specimen.inputs_for(EXAMPLE, 1)
    return True


def _raise(error: TraceError) -> None:
    raise error


def describe(error: BaseException) -> str:
    """An error as one line, cut at 400 characters."""
    text = without_paths(" ".join(f"{type(error).__name__}: {error}".split()))
    return text if len(text) <= 400 else text[:397] + "..."


def without_paths(text: str) -> str:
    """A text with files named from the folder that their package is in."""
    folders = {os.path.abspath(folder) for folder in sys.path} | {os.path.realpath(folder) for folder in sys.path}
    for folder in sorted(folders, key=len, reverse=True):
        text = text.replace(folder + os.sep, "")
    return re.sub(r"(?:/[^\s/:]+)+/(?=site-packages/|python3)", "", text)


def _is_random(specimen: Specimen) -> bool:
    """Whether eager's loss depends on the random seed; raises what eager raises."""
    losses = []
    for seed in (1, 2):
        model = copy.deepcopy(specimen.model)
        torch.manual_seed(seed)
        loss = loss_of(model(**specimen.inputs_for(EXAMPLE, 1)))
        loss.backward()
        losses.append(float(loss.detach()))
    if not math.isfinite(losses[0]):
        raise ValueError(f"its loss is {losses[0]}")
    return losses[0] != losses[1]


def _compare_call(
    specimen: Specimen,
    pipe: RoundPipe,
    source: TracedSource,
    reference: nn.Module,
    name: str,
    size: Size,
    result: Result,
    tolerance: float,
) -> None:
    """One training call on both sides."""
    model = specimen.model
    inputs = specimen.inputs_for(size, 7 + size.batch + size.length)
    model.zero_grad()
    reference.zero_grad()
    try:
        torch.manual_seed(11)
        expected = loss_of(reference(**_copied(inputs)))
        expected.backward()
    except Exception as error:
        result.eager_fails[name] = describe(error)
        return
    plan = one_layer_per_stage(result.num_layers) if name == "example" else None
    run_config = RoundPipeRunConfig(execute_plan=plan)
    try:
        torch.manual_seed(11)
        loss = pipe.forward_backward(input_kwargs=_copied(inputs), loss_fn=loss_of, run_config=run_config)
        pipe.synchronize()
    except Exception as error:
        result.traces[name] = source.trace_count
        result.differences[name] = math.inf
        result.status = "not traced" if isinstance(error, TraceError) else "wrong"
        result.cause = result.cause or f"{name}: {describe(error)}"
        return
    result.traces[name] = source.trace_count
    found, where = largest_difference(loss, model, expected.detach(), reference)
    result.differences[name] = found
    if not found <= tolerance:
        result.status, result.cause = "wrong", result.cause or f"{name}: {where} is off by {found:.2e}"


def _copied(inputs: dict[str, Any]) -> dict[str, Any]:
    return dict(trees.map_tensors(inputs, torch.Tensor.clone))


def one_layer_per_stage(num_layers: int) -> ExecutePlan | None:
    """Every layer a stage; None for a single layer."""
    if num_layers < 2:
        return None
    stages = [(index, index + 1) for index in range(num_layers - 1)]
    return ExecutePlan(stages, (num_layers - 1, num_layers), stages[::-1])


def largest_difference(
    loss: torch.Tensor, model: nn.Module, expected: torch.Tensor, reference: nn.Module
) -> tuple[float, str]:
    """The largest relative difference of loss, gradients and buffers, and where it is."""
    worst = (_relative(loss, expected, 1e-12), "loss")
    expected_gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    largest = max((_largest(gradient) for gradient in expected_gradients.values() if gradient is not None), default=0.0)
    for name, parameter in model.named_parameters():
        gap = _relative(parameter.grad, expected_gradients[name], SMALL_GRADIENT * largest)
        worst = _worse(worst, (gap, f"gradient of {name}"))
    expected_buffers = dict(reference.named_buffers())
    for name, buffer in model.named_buffers():
        worst = _worse(worst, (_relative(buffer, expected_buffers.get(name), 1e-6), f"buffer {name}"))
    return worst


def _worse(one: tuple[float, str], other: tuple[float, str]) -> tuple[float, str]:
    return other if other[0] > one[0] else one


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def _relative(found: torch.Tensor | None, expected: torch.Tensor | None, floor: float) -> float:
    """Largest difference over the largest expected value; a missing gradient is zero; infinite for other shapes."""
    if found is None or expected is None:
        other = found if expected is None else expected
        return 0.0 if other is None or _largest(other.double()) <= floor * TOLERANCE else math.inf
    if found.shape != expected.shape:
        return math.inf
    if not found.numel():
        return 0.0
    found, expected = found.detach().double(), expected.detach().double()
    if torch.equal(found, expected) or torch.equal(found.isnan(), expected.isnan()) and expected.isnan().all():
        return 0.0
    same = (found == expected) | (found.isnan() & expected.isnan())
    gap = (found - expected).abs().masked_fill(same, 0.0)
    scale = expected[expected.isfinite()].abs().max() if expected.isfinite().any() else torch.tensor(0.0)
    worst = float(gap.max()) / max(float(scale), floor, 1e-30)
    return math.inf if math.isnan(worst) else worst
