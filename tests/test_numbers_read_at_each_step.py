"""Numbers that a forward reads from data, and that are others in each batch, are inputs of the graph."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import roundpipe
from roundpipe import RoundPipeRunConfig
from tests.runtime.models import gradients
from tests.test_numbers_of_batches import NUM_CLASSES, WIDTH, OwnLoss, Scale, Scaled

NUM_STEPS = 5


def _padded(h: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Sums over the longest of all samples."""
    longest = lengths.max().item()
    mask = torch.arange(longest) < lengths[:, None]
    return h * mask.float().cumsum(1)[:, :longest].mean(1, keepdim=True)


def _packed(h: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    number = lengths.sum().item()
    rows = torch.repeat_interleave(torch.arange(len(h)), lengths, output_size=number)
    return torch.zeros_like(h).index_add(0, rows, h[rows])


def _in_a_loop(h: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.stack([row * torch.arange(size).float().mean() for row, size in zip(h, lengths.tolist(), strict=True)])


READ_ONCE: dict[str, Scale] = {
    "a sum": lambda h, lengths: h / lengths.sum().item(),
    "a mean": lambda h, lengths: h * lengths.float().mean().item(),
    "one that is at least 1": lambda h, lengths: h / max(lengths.sum().item(), 1),
    "one computed with": lambda h, lengths: h / (2 * lengths.sum().item() + 1),
    "two of them": lambda h, lengths: h * (lengths.sum().item() / (lengths.max().item() + lengths.min().item())),
    "a root": lambda h, lengths: h / lengths.sum().item() ** 0.5,
    "over it": lambda h, lengths: 1 / lengths.sum().item() * h,
    "integers over it": lambda h, lengths: h * (lengths / lengths.sum().item())[:, None],
    "a limit": lambda h, lengths: h * 2 if lengths.sum().item() > 2 else h,
    "whether there are any": lambda h, lengths: h * 2 if lengths.sum().item() > 0 else h,
    "a size": lambda h, lengths: h + h.new_ones(lengths.sum().item()).mean(),
    "computed sizes": lambda h, lengths: h + h.new_ones(2, lengths.sum().item() // 2 + 1).mean(),
    "a size and a divisor": lambda h, lengths: h.new_ones(lengths.sum().item()).mean() + h / lengths.sum().item(),
    "the longest": _padded,
    "packed samples": _packed,
}
READ_PER_SAMPLE: dict[str, Scale] = {
    "each sample's": lambda h, lengths: h * h.new_tensor(lengths.tolist())[:, None],
    "in a loop": _in_a_loop,
}


def _lengths(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(1, 9, (9,), generator=generator)


def _compare(model: nn.Module, arguments: Callable[[int], tuple[torch.Tensor, ...]], num_microbatch: int) -> int:
    """Steps of a model and a copy in eager mode; how often it was traced."""
    eager = copy.deepcopy(model)
    config = RoundPipeRunConfig(num_microbatch=num_microbatch)
    with roundpipe.compile(model, devices=["cpu"] * 2, model_run_config=config) as pipe:
        for step in range(NUM_STEPS):
            batch = arguments(step)
            pipe.zero_grad()
            eager.zero_grad()
            pipe.forward_backward(batch, loss_fn=lambda out, _: out.square().sum(), loss_reduction="sum")
            eager(*batch).square().sum().backward()
            assert_close(gradients(model), gradients(eager))
            with torch.no_grad():
                assert_close(pipe(*batch), eager(*batch))
        return pipe.trace_count


def _batch(step: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(step)
    return torch.randn(9, 5), _lengths(step)


@pytest.mark.parametrize("num_microbatch", [1, 3])
@pytest.mark.parametrize("scale", READ_ONCE.values(), ids=READ_ONCE)
def test_two_traces_serve_all_batches(scale: Scale, num_microbatch: int) -> None:
    torch.manual_seed(0)
    assert _compare(Scaled(scale), _batch, num_microbatch) == 2


@pytest.mark.parametrize("num_microbatch", [1, 3])
@pytest.mark.parametrize("scale", READ_PER_SAMPLE.values(), ids=READ_PER_SAMPLE)
def test_so_they_do_where_a_list_is_read(scale: Scale, num_microbatch: int) -> None:
    torch.manual_seed(0)
    assert _compare(Scaled(scale), _batch, num_microbatch) == 2


def test_a_loss_over_the_number_of_its_tokens_is_that_of_the_batch() -> None:
    torch.manual_seed(0)
    model = OwnLoss(lambda losses, lengths: losses.sum() / lengths.sum().item())
    eager = copy.deepcopy(model)
    with roundpipe.compile(model, devices=["cpu"] * 2) as pipe:
        for step in range(NUM_STEPS):
            batch = *_batch(step), torch.randint(NUM_CLASSES, (9,))
            pipe.zero_grad()
            eager.zero_grad()
            loss, expected = pipe.forward_backward(batch, loss_fn=lambda out, _: out), eager(*batch)
            expected.backward()
            assert_close((loss, gradients(model)), (expected.detach(), gradients(eager)))
        assert pipe.trace_count <= 4


def test_a_graph_serves_batches_that_are_cut_and_others() -> None:
    torch.manual_seed(0)
    model = Scaled(READ_ONCE["a size and a divisor"])
    eager = copy.deepcopy(model)
    with roundpipe.compile(model, devices=["cpu"] * 2) as pipe, torch.no_grad():
        for step in range(6):
            x, lengths = _batch(step)
            config = RoundPipeRunConfig(num_microbatch=(1, 3, 9)[step % 3])
            assert_close(pipe(x, lengths, roundpipe_run_config=config), eager(x, lengths))
        assert pipe.trace_count <= 3


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, WIDTH)
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) / self.temperature.item()


def test_so_does_one_that_reads_a_buffer() -> None:
    model = Temperature()
    eager = copy.deepcopy(model)
    with roundpipe.compile(model, devices=["cpu"]) as pipe, torch.no_grad():
        for step in range(NUM_STEPS):
            x, _ = _batch(step)
            model.temperature.fill_(0.5 + step)
            eager.temperature.fill_(0.5 + step)
            assert_close(pipe(x), eager(x))
        assert pipe.trace_count == 2


def test_code_that_needs_a_number_of_its_own_is_right() -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for scale in (
            lambda h, lengths: h * {lengths.max().item(): 2.0}.get(8, 1.0),
            lambda h, lengths: h * sum(1.0 for _ in range(lengths.max().item())),
            lambda h, lengths: h * float(f"{lengths.max().item()}"),
        ):
            _compare(Scaled(scale), _batch, 3)


def test_a_number_that_code_needs_itself_is_no_input_any_more() -> None:
    """Else each step would be a trace with symbols, which takes longer, and the batch would never run in parts."""
    torch.manual_seed(0)
    model = Scaled(lambda h, lengths: h * sum(1.0 for _ in range(lengths.max().item())))
    said: list[str] = []
    with roundpipe.compile(model, devices=["cpu"]) as pipe, torch.no_grad():
        for step in range(6):
            x, lengths = torch.randn(9, 5), torch.full((9,), step + 1)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert_close(
                    pipe(x, lengths, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1)), model(x, lengths)
                )
            said += [str(each.message) for each in caught]
        assert pipe.trace_count == 2
    assert any("its code reads data of lengths (item)" in text for text in said)


RATIOS: dict[str, Scale] = {
    "samples": lambda h, lengths: h * (lengths.sum().item() / lengths.shape[0]),
    "samples, by len()": lambda h, lengths: h * (lengths.sum().item() / len(lengths)),
    "elements": lambda h, lengths: h * (1 - lengths.sum().item() / (10 * lengths.numel())),
    "the other way round": lambda h, lengths: h * (lengths.numel() / lengths.sum().item()),
}


@pytest.mark.parametrize("scale", RATIOS.values(), ids=RATIOS)
def test_a_number_over_a_size_keeps_the_batch_whole(scale: Scale) -> None:
    torch.manual_seed(0)
    model = Scaled(scale)
    said: list[str] = []
    with roundpipe.compile(model, devices=["cpu"] * 2) as pipe, torch.no_grad():
        for step in range(NUM_STEPS):
            batch = _batch(step)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert_close(pipe(*batch), model(*batch))
            said += [str(each.message) for each in caught]
    assert any("divided by a size" in text and "not cut" in text for text in said)
