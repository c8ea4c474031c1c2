"""Compiled models on a CUDA device against eager PyTorch on the same device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import roundpipe
from roundpipe import RoundPipeRunConfig
from tests.equality import difference, eager_forward_backward
from tests.models import CASES, Case, in_dtype

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none"),
]

DEVICE = "cuda:0"


def on_device(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(DEVICE) for name, value in inputs.items()}


def assert_equal(case: Case, devices: list[str], tolerance: float) -> None:
    model = case.make()
    reference = copy.deepcopy(model).to(DEVICE)
    with roundpipe.compile(
        model, devices=devices, model_run_config=RoundPipeRunConfig(num_microbatch=2), fallback=False
    ) as pipe:
        for batch, length in [(4, 16), (6, 24), (3, 16)]:
            inputs = in_dtype(case.inputs(batch, length), case.dtype)
            expected = eager_forward_backward(reference, on_device(inputs), case.loss, 2)
            loss = pipe.forward_backward(input_kwargs=inputs, loss_fn=case.loss)
            assert difference(loss, expected.cpu()) <= tolerance
        assert pipe.trace_count == 1
        on_eager = dict(reference.named_parameters())
        for name, parameter in model.named_parameters():
            gradient = on_eager[name].grad
            assert difference(parameter.grad, None if gradient is None else gradient.cpu()) <= tolerance, name
        for name, buffer in model.named_buffers():
            assert difference(buffer, dict(reference.named_buffers())[name].cpu()) <= tolerance, name


@pytest.mark.parametrize("devices", [[DEVICE], [DEVICE, DEVICE]], ids=["one", "twice"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loss_gradients_and_buffers_equal_eager(case: Case, devices: list[str]) -> None:
    assert_equal(case, devices, 1e-9 if case.dtype is torch.float64 else 1e-4)


def test_autocast_of_the_caller_holds_on_the_device() -> None:
    """Casts that the model's code reads off its tensors are those of the device's autocast."""
    llama = next(case for case in CASES if case.name == "llama")
    case = Case(llama.name, llama.build, llama.inputs, llama.loss, dtype=torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert_equal(case, [DEVICE], 2e-2)
