"""What operators allocate, with the workspaces of kernels that are known to take much."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roundpipe.core.allocations import Allocations

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 16, 8


def backward_peak(name: str, kv_heads: int, **arguments: Any) -> int:
    """Bytes at the most, in the backward of attention in bfloat16, without running a kernel."""
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention_backward")
    query = torch.empty(BATCH, HEADS, LENGTH, WIDTH, dtype=torch.bfloat16, device="meta")
    key = torch.empty(BATCH, kv_heads, LENGTH, WIDTH, dtype=torch.bfloat16, device="meta")
    sums = torch.empty(BATCH, HEADS, LENGTH, device="meta")
    seed = torch.empty((), dtype=torch.int64, device="meta")
    values: dict[str, Any] = {
        **dict.fromkeys(("grad_out", "grad_out_", "query", "out"), query),
        **dict.fromkeys(("key", "value"), key),
        **dict.fromkeys(("philox_seed", "philox_offset"), seed),
        **dict.fromkeys(("cum_seq_q", "cum_seq_k", "attn_bias"), None),
        **dict.fromkeys(("max_q", "max_k"), LENGTH),
        "logsumexp": sums,
        "dropout_p": 0.0,
        "is_causal": True,
        "grad_input_mask": [True, True, True, False],
    }
    names = [each.name for each in operator.default._schema.arguments if not each.kwarg_only]
    with Allocations() as memory:
        operator(*(values[each] for each in names))
    assert memory.live_bytes == 0
    return memory.peak_bytes


@pytest.mark.parametrize("name, number", [("flash", 2), ("efficient", 1), ("cudnn", 1)])
def test_the_backward_of_attention_sums_up_in_float32(name: str, number: int) -> None:
    elements = BATCH * HEADS * LENGTH * WIDTH
    assert backward_peak(name, HEADS) >= (4 * number + 3 * 2) * elements


def test_fewer_heads_of_keys_are_expanded() -> None:
    elements = BATCH * HEADS * LENGTH * WIDTH
    results = (1 + 2 / 2) * 2 * elements
    assert backward_peak("cudnn", HEADS // 2) == 4 * elements + 2 * 2 * elements + results


def test_attention_on_the_cpu_counts_as_on_an_accelerator() -> None:
    leaves = [torch.randn(BATCH, HEADS, LENGTH, WIDTH, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    attended = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
    elements = attended.numel()
    with Allocations((*leaves, attended)) as memory:
        attended.backward(torch.ones_like(attended))
    assert memory.peak_bytes >= (4 * 2 + 4 * 2) * elements  # sums; the gradients, and the one that comes in


@pytest.mark.parametrize(
    ("device", "number", "parts"), [("meta", 4000, 400 + 1000), ("meta", 3000, 0), ("cpu", 4000, 0)]
)
def test_the_backward_of_an_embedding_sums_up_parts_in_float32(device: str, number: int, parts: int) -> None:
    gradient = torch.zeros(number, WIDTH, dtype=torch.bfloat16, device=device)
    indices = torch.zeros(number, dtype=torch.int64, device=device)
    with Allocations() as memory:
        result = torch.ops.aten.embedding_dense_backward(gradient, indices, 1000, -1, False)
    workspace_bytes = parts * WIDTH * 4 + 2 * indices.nbytes if parts else 0
    assert memory.peak_bytes == result.nbytes + workspace_bytes


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("dtype", "groups", "is_copied"),
    [(torch.bfloat16, 1, True), (torch.float16, 1, True), (torch.float32, 1, False), (torch.bfloat16, WIDTH, False)],
)
def test_a_convolution_in_16_bits_copies_what_has_the_channels_first(
    dtype: torch.dtype, groups: int, is_copied: bool, order: torch.memory_format
) -> None:
    given = torch.empty(BATCH, WIDTH, LENGTH, LENGTH, dtype=dtype, device="meta").to(memory_format=order)
    weight = torch.empty(WIDTH, WIDTH // groups, 3, 3, dtype=dtype, device="meta")
    options = [1, 1], [1, 1], [1, 1], False, [0, 0], groups

    def copied(*tensors: torch.Tensor) -> int:
        changed = (each for each in tensors if not each.is_contiguous(memory_format=torch.channels_last))
        return sum(each.nbytes for each in changed) if is_copied else 0

    with Allocations() as memory:
        result = torch.ops.aten.convolution(given, weight, None, *options)
    assert memory.peak_bytes == result.nbytes + copied(given, result)
    gradient = torch.empty_like(given)  # of what has the same size
    with Allocations() as memory:
        gradients = torch.ops.aten.convolution_backward(gradient, given, weight, None, *options, [True, True, False])
    assert memory.peak_bytes == sum(each.nbytes for each in gradients[:2]) + copied(gradient, given)
