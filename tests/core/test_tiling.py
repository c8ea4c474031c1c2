"""Functions of rows in tiles, beside the same functions run whole."""

import copy
import math
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from roundpipe.core.allocations import Allocations
from roundpipe.core.tiled_regions import Region, RowResult, SumResult
from roundpipe.core.tiling import in_tiles, num_tiles, tiles_of

BATCH, LENGTH, WIDTH, VOCABULARY = 2, 7, 8, 32
ROWS = ((0, 1), (1, 2), None)
FLAT = ((0, 2), None)


class Head(nn.Module):
    """An activation's head: logits, per-token losses, and their sum over all rows."""

    def __init__(self, drop=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, VOCABULARY)
        self.drop = drop

    def losses(self, x, labels):
        logits = self.linear(F.dropout(self.norm(x), self.drop))
        return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")


def loss_of_head(head, sizes, x, labels, total):
    logits, losses = head.losses(x, labels)
    return logits, losses.view(sizes), losses.sum() / total, logits.square().mean()


def head_region(**changes):
    options = {
        "function": loss_of_head,
        "sizes": (BATCH, LENGTH),
        "inputs": (ROWS, ROWS[:2], None),
        "results": (RowResult(ROWS), RowResult(ROWS[:2]), SumResult(), SumResult(is_mean=True)),
        "parameters": lambda head: list(head.parameters()),
    }
    return Region(**{**options, **changes})


def inputs(dtype=torch.float64):
    torch.manual_seed(0)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype)
    labels = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    labels[0, :3] = -100  # in some tiles, no row counts
    return x, labels, (labels != -100).sum()


def train(region, head, values, number, needs_grad=True, seed=1):
    head.zero_grad()
    values = [v.detach().requires_grad_(needs_grad) if v.is_floating_point() else v for v in values]
    torch.manual_seed(seed)
    with in_tiles(number):
        results = region(head, *values)
    weights = [torch.linspace(0.5, 1.5, r.numel(), dtype=r.dtype).view_as(r) for r in results]
    sum((r * w).sum() for r, w in zip(results, weights, strict=True) if r.requires_grad).backward()
    gradients = [v.grad for v in values] + [p.grad for p in head.parameters()]
    return list(results) + gradients


def strides(tensor):
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def assert_alike(got, want, tolerance=1e-12):
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a is None) == (b is None), index
        if a is not None:
            assert a.dtype == b.dtype and strides(a) == strides(b), index
            assert (a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1), index


@pytest.mark.parametrize("number", [2, 3, 5, 14, 100])
@pytest.mark.parametrize("needs_grad", [True, False])
def test_results_and_gradients_are_those_of_the_whole(number, needs_grad):
    head = Head().double()
    values = inputs()
    whole = train(head_region(), head, values, 1, needs_grad)
    assert_alike(train(head_region(), head, values, number, needs_grad), whole)


@pytest.mark.parametrize("is_mean", [False, True])
@pytest.mark.parametrize("trained", ["all", "input", "weights"])
@pytest.mark.parametrize("at_once", [True, False])
def test_one_sum_and_its_gradients_at_once(is_mean, trained, at_once):
    """The function runs once for each tile, and the gradients wait for a factor; else once more in the backward."""
    head, (x, labels, _) = Head().double().requires_grad_(trained != "input"), inputs()
    calls, scale = [], torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    def function(head, sizes, x, labels, scale):
        calls.append(sizes)
        losses = head.losses(x, labels)[1] * scale
        return (losses.mean() if is_mean else losses.sum(),)

    region = head_region(function=function, results=(SumResult(is_mean=is_mean),))
    found = []
    for number in (1, 5):
        for p in (scale, *head.parameters()):
            p.grad = torch.ones_like(p) if p.requires_grad else None
        leaf = x.clone().requires_grad_(trained != "weights")
        calls.clear()
        with in_tiles(number, at_once=at_once) as ran:
            (loss,) = region(head, leaf, labels, scale)
        (loss.exp() / 3).backward()  # any function of the sum
        found.append([loss.detach(), leaf.grad, *(p.grad for p in (scale, *head.parameters()))])
    assert_alike(found[1], found[0])
    num_tiles = len(tiles_of((BATCH, LENGTH), 5))
    assert (ran.repeats, len(calls)) == (not at_once, num_tiles * (1 if at_once else 2))


def test_a_loss_whose_gradients_may_need_scaling_runs_again():
    """Those of float16 vanish where the factor comes in at the end."""
    head, (x, labels, _) = Head().half(), inputs(torch.float16)
    region = head_region(
        function=lambda head, sizes, x, labels: (head.losses(x, labels)[1].float().sum() * 1e-6,),
        inputs=(ROWS, ROWS[:2]),
        results=(SumResult(),),
    )
    with in_tiles(5) as ran:
        (loss,) = region(head, x, labels)
    (loss * 1e6).backward()
    assert ran.repeats and head.norm.weight.grad.abs().min() > 0


def test_gradients_are_added_to_those_that_are_there():
    head, values = Head().double(), inputs()
    whole = [p.clone() for p in train(head_region(), head, values, 1)[-4:]]
    for p in head.parameters():
        p.grad = torch.ones_like(p)
    before = [p.grad for p in head.parameters()]
    with in_tiles(4):
        logits, losses, loss, mean = head_region()(head, *values)
    ones = [torch.linspace(0.5, 1.5, r.numel(), dtype=r.dtype).view_as(r) for r in (logits, losses, loss, mean)]
    torch.autograd.backward([logits, losses, loss, mean], ones)
    assert all(p.grad is grad for p, grad in zip(head.parameters(), before, strict=True))
    assert_alike([grad - 1 for grad in before], whole, 1e-11)


def test_without_gradient_nothing_is_kept():
    head, values = Head().double(), inputs()
    whole = head_region()(head, *values)
    for frozen in (False, True):
        head.requires_grad_(not frozen)
        with torch.set_grad_enabled(frozen), in_tiles(5):
            results = head_region()(head, *values)
        assert not any(r.requires_grad for r in results)
        assert_alike(results, [r.detach() for r in whole])


def test_a_result_that_no_gradient_reaches():
    region = Region(
        lambda head, sizes, x: (x.argmax(-1), head.linear(x), x.detach() * 2),
        (BATCH, LENGTH),
        (ROWS,),
        (RowResult(ROWS[:2]), RowResult(ROWS), RowResult(ROWS, differentiable=False)),
        lambda head: list(head.linear.parameters()),
    )
    head, (x, *_) = Head().double(), inputs()
    with in_tiles(4):
        best, logits, doubled = region(head, x)
    assert not best.requires_grad and logits.requires_grad and not doubled.requires_grad
    doubled.requires_grad_()
    doubled.sum().backward()  # no gradient of the region's own
    assert head.linear.weight.grad is None


@pytest.mark.parametrize("number", [3, 14])
def test_whole_inputs_and_those_that_count_one_axis_get_gradients(number):
    def function(owner, sizes, x, positions, weight, flat):
        return (((x + positions) @ weight).transpose(1, 2) * flat.view(*sizes, 1).transpose(1, 2),)

    result = ((0, 1), None, (1, 2))
    region = Region(
        function, (BATCH, LENGTH), (ROWS, (None, (1, 2), None), None, FLAT), (RowResult(result, (0, 2, 1)),)
    )
    torch.manual_seed(0)
    shapes = [(BATCH, LENGTH, WIDTH), (1, LENGTH, WIDTH), (WIDTH, WIDTH), (BATCH * LENGTH, 1)]
    values = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    whole = train(region, nn.Module(), values, 1)
    assert_alike(train(region, nn.Module(), values, number), whole)


def test_rows_on_one_axis():
    region = Region(lambda owner, sizes, x: (x.exp(), x.sum()), (LENGTH,), (((0, 1), None),), (
        RowResult(((0, 1), None)), SumResult()))  # fmt: skip
    values = [torch.randn(LENGTH, 3, dtype=torch.float64)]
    assert_alike(train(region, nn.Module(), values, 3), train(region, nn.Module(), values, 1))


def test_draws_are_repeated_in_the_backward():
    head, (x, labels, total) = Head(drop=0.5).double(), inputs()
    region = head_region(draws_random=True)

    def loss(shift=0.0):
        torch.manual_seed(3)
        with in_tiles(3):
            return region(head, x + shift * direction, labels, total)[2]

    direction = torch.randn_like(x)
    leaf = x.clone().requires_grad_()
    torch.manual_seed(3)
    with in_tiles(3):
        value = region(head, leaf, labels, total)[2]
    state = torch.get_rng_state()
    value.backward()
    assert torch.equal(torch.get_rng_state(), state)
    difference = (loss(1e-6) - loss(-1e-6)) / 2e-6
    assert abs(difference - (leaf.grad * direction).sum()) < 1e-6 * abs(difference)
    assert value == loss()


def test_autocast_of_the_forward_holds_in_the_backward():
    head, values = Head(), inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        plain = loss_of_head(head, (BATCH, LENGTH), *values)
        with in_tiles(5):
            tiled = head_region()(head, *values)
        after = head.linear(values[0])
    assert [t.dtype for t in tiled] == [p.dtype for p in plain]
    assert_alike([t.float() for t in tiled], [p.float() for p in plain], 1e-2)
    gradients = []
    for results in (plain, tiled):
        head.zero_grad()
        results[2].backward()
        gradients.append([p.grad for p in head.parameters()])
    assert_alike(gradients[1], gradients[0], 1e-2)
    head.zero_grad()
    after.sum().backward()  # the cache of casts has no weight without a gradient
    assert head.linear.weight.grad is not None


def test_a_parameter_with_a_hook_gets_its_gradient_at_once():
    head, values = Head().double(), inputs()
    calls = []
    head.linear.weight.register_hook(lambda grad: calls.append(grad) or grad * 2)
    whole = train(head_region(), head, values, 1)
    assert_alike(train(head_region(), head, values, 6), whole)
    assert len(calls) == 2


def test_half_precision_sums_are_cast_to_the_whole_ones_type():
    region = Region(
        lambda owner, sizes, x: (x.sum(dtype=torch.float32),),
        (BATCH, LENGTH), (ROWS,), (SumResult(dtype=torch.float16),),
    )  # fmt: skip
    x = torch.full((BATCH, LENGTH, WIDTH), 3.0, dtype=torch.float16, requires_grad=True)
    for number in (1, 4):
        with in_tiles(number):
            (result,) = region(None, x)
        assert result.dtype == torch.float16 and result == x.numel() * 3


@pytest.mark.parametrize("sizes", [(5,), (1, 9), (4, 6), (7, 3)])
@pytest.mark.parametrize("number", [1, 2, 3, 4, 10, 99])
def test_tiles_cover_every_row_once_in_order(sizes, number):
    tiles = tiles_of(sizes, number)
    total = math.prod(sizes)
    rows = torch.arange(total).view(sizes)
    found = []
    for tile in tiles:
        part = rows
        for dim, (start, size) in enumerate(zip(tile.starts, tile.sizes, strict=True)):
            part = part.narrow(dim, start, size)
        assert part.numel() == tile.num_rows <= -(-total // number)
        found.append(part.flatten())
    assert torch.equal(torch.cat(found), torch.arange(total))


def test_memory_is_that_of_a_tile():
    """Logits, their softmax and gradient are much larger than all else."""
    vocabulary, rows = 4096, 64
    linear = nn.Linear(8, vocabulary, bias=False)
    labels = torch.randint(0, vocabulary, (1, rows))

    def function(linear, sizes, x, labels):
        return (F.cross_entropy(linear(x).flatten(0, 1), labels.flatten(), reduction="sum"),)

    region = Region(function, (rows,), ((None, (0, 1), None), (None, (0, 1))), (SumResult(),), lambda m: [m.weight])
    peaks = []
    for number, most in ((1, None), (4, None), (16, None), (16, 3), (15, None), (15, 3)):
        linear.weight.grad = torch.zeros_like(linear.weight)
        x = torch.randn(1, rows, 8)
        with Allocations([x, labels, linear.weight, linear.weight.grad]) as memory, in_tiles(number, most):
            region(linear, x, labels)[0].backward()
        peaks.append(memory.peak_bytes - linear.weight.nbytes)
    assert peaks[1] < 1.1 * peaks[0] / 4 and peaks[2] < 1.2 * peaks[0] / 16
    assert peaks[2] == peaks[3] and peaks[4] == peaks[5]  # a few tiles tell what all take


def test_the_number_belongs_to_the_thread():
    numbers = []
    with in_tiles(4):
        with in_tiles(2):
            assert num_tiles() == 2
        thread = threading.Thread(target=lambda: numbers.append(num_tiles()))
        thread.start()
        thread.join()
        assert num_tiles() == 4
    assert (num_tiles(), numbers) == (1, [1])


def test_a_region_is_a_value():
    region = head_region()
    assert copy.copy(region) == region
