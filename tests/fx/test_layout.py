"""Traced code that asks how an activation lies in memory: answered where every kernel agrees, else refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from roundpipe.core.errors import TraceError
from roundpipe.fx.operations import as_traced
from roundpipe.fx.trace.tracer import trace
from tests.fx.against_eager import check, vectors
from tests.fx.replay import replay
from tests.fx.test_shapes import Layers


class Base(Layers):
    """Three layers, and then what the forward of a test makes of their output."""

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:3]:
            x = F.gelu(layer(x))
        return x


class AsksOfAPart(Base):
    """What ProphetNet does with its logits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.hidden(x)[:, 0]
        if not x.is_contiguous():
            x = x.contiguous() * 2
        return self.layers[3](x.view(-1, 8))


class AsksOfATransposed(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.hidden(x)
        turned = x.transpose(0, 1)
        x = self.layers[0](x) if x.is_contiguous() else self.layers[1](x)
        return self.layers[3](turned.transpose(0, 1) + x) * (1 if turned.is_contiguous() else 3)


class UsesStrides(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.hidden(x)
        strides = x.stride()
        again = x.as_strided(x.shape, strides)
        return self.layers[3](again) * (2 if strides[1] == 8 else 5)


@pytest.mark.parametrize("model", [AsksOfAPart, AsksOfATransposed, UsesStrides])
def test_an_answer_that_every_kernel_gives_is_traced(model: type[nn.Module]) -> None:
    seen = check(model, sizes=[(4, 6), (6, 6), (9, 6)])
    assert not seen.fell_back and seen.num_layers >= 3 and seen.trace_count == 1 and not seen.opaque


@pytest.mark.parametrize("model", [AsksOfAPart, AsksOfATransposed])
def test_another_answer_for_a_batch_of_one_is_another_trace(model: type[nn.Module]) -> None:
    seen = check(model, sizes=[(4, 6), (1, 6), (3, 6)], num_microbatches=1)
    assert not seen.fell_back and seen.trace_count == 2


def test_an_input_that_is_not_contiguous_is_not_taken_for_one_that_is() -> None:
    class AsksOfASum(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = x + self.layers[3].bias
            return self.hidden(total) * (1 if total.is_contiguous() else 3)

    turns = iter([False, True, False] * 2)

    def inputs(batch: int, length: int) -> dict[str, torch.Tensor]:
        x = vectors(batch, length)["x"]
        return {"x": x.transpose(0, 1).contiguous().transpose(0, 1) if next(turns) else x}

    check(AsksOfASum, inputs, sizes=[(4, 6), (4, 6), (4, 6)], num_microbatches=1, needs_grad=False)


def test_what_kernels_choose_is_refused_and_falls_back() -> None:
    class AsksOfAConvolution(Base):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv1d(8, 8, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.convolution(self.hidden(x).transpose(1, 2)).transpose(1, 2) * 2
            return self.layers[3](x) * (1 if x.is_contiguous() else 3)

    with pytest.raises(TraceError, match="is_contiguous asks how an activation lies"):
        trace(AsksOfAConvolution().double(), (), vectors(4, 6))
    assert check(AsksOfAConvolution).fell_back


@pytest.mark.parametrize("question", ["x.data_ptr() % 2", "x.storage_offset()", "x[..., :5].stride(0)"])
def test_where_something_lies_is_refused(question: str) -> None:
    class Asks(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.hidden(x)
            return x * (2 if eval(question, {"x": x}) else 3)

    with pytest.raises(TraceError, match="asks"):
        trace(Asks().double(), (), vectors(4, 6))
    assert check(Asks).fell_back


def test_a_kernel_that_lays_its_output_otherwise_after_all_is_found_out() -> None:
    class Kernel(nn.Linear):
        swapped = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            return out.transpose(0, 1).contiguous().transpose(0, 1) if Kernel.swapped else out

    class Asks(Base):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = Kernel(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.kernel(self.hidden(x))
            return self.layers[3](x) * (1 if x.is_contiguous() else 3)

    traced = trace(Asks().double(), (), vectors(4, 6))
    replay(traced, **vectors(4, 6))
    Kernel.swapped = True
    with pytest.raises(TraceError, match=r"test_layout.py:\d+ asked how a tensor lies in memory.*contiguous tensor"):
        replay(traced, **vectors(4, 6))


def test_only_strides_that_matter_are_compared() -> None:
    tensor = torch.empty_strided((1, 4, 3), (99, 1, 4))
    assert as_traced(tensor, (12, 1, 4), "a line") is tensor
    with pytest.raises(TraceError, match=r"at a line .* strides \(12, 3, 1\)"):
        as_traced(tensor, (12, 3, 1), "a line")
