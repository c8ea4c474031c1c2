"""What tells that a tensor was written reads the same elements of every dtype, and only where there is memory."""

import pytest
import torch

from roundpipe.runtime.weights.fingerprint import SAMPLED, Fingerprint

DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.bool, torch.float8_e4m3fn, torch.complex64)


def of(tensor):
    return Fingerprint.of(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (40, 50), (3, 1000)])
def test_a_sample_is_of_elements_all_over(dtype, shape):
    tensor = torch.randn(shape).mul(9).to(dtype)
    stride = tensor.numel() // SAMPLED | 1
    expected = tensor.reshape(-1)[::stride].contiguous()
    assert of(tensor).sample.bits == bytes(expected.view(torch.uint8).tolist())


def test_a_write_through_data_shows_and_nan_is_itself():
    for value in (1.0, float("nan")):
        parameter = torch.nn.Parameter(torch.full((300, 300), value))
        before = of(parameter)
        assert not before.has_other_values
        parameter.data.fill_(2.0)
        assert before.has_other_values and not before.is_marked
        assert not of(parameter).has_other_values


def test_views_and_what_has_no_memory():
    whole = torch.randn(10)
    part = whole[3:7]
    before = of(part)
    whole[:3], whole[7:] = 0.0, 0.0
    assert not before.has_other_values
    whole[5] = 9.0
    assert before.has_other_values
    emptied = torch.randn(5)
    emptied.untyped_storage().resize_(0)
    others = (
        torch.empty(0),
        torch.empty(3, 4).t(),
        torch.empty(3, device="meta"),
        torch.empty(2, dtype=torch.complex128),
    )
    for tensor in (emptied, *others):
        assert of(tensor).sample is None and not of(tensor).has_other_values


def test_memory_that_is_gone_is_not_read_and_what_has_moved_is_compared_with_what_it_was():
    parameter = torch.nn.Parameter(torch.randn(1000))
    before = of(parameter)
    parameter.data = torch.zeros(1000)  # frees what the sample was of
    assert before.is_marked and not before.has_other_values
    values = torch.randn(1000)
    parameter.data = values
    before = of(parameter)
    parameter.data = values.clone()
    moved = before.moved()
    assert not moved.is_marked and not moved.has_other_values
    parameter.data.add_(1.0)
    assert moved.has_other_values
    assert before.moved().has_other_values  # also if it was written before anybody said that it has moved
