"""Elements of lists of modules hand on their outputs in pieces, and host code that looks sees eager's tensors."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import RoundPipeRunConfig
from roundpipe.wrappers.lazy_outputs import LazyBatch
from tests.equality import assert_same_gradients
from tests.wrappers.cases_later import WIDTH, Body, Listed, batch, block, check, total, wrapped


class Scale(nn.Module):
    """Runs on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def straight(model: Listed, x: torch.Tensor) -> torch.Tensor:
    for one in model.blocks:
        x = one(x)
    return x


@pytest.fixture
def merges(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what was put together."""
    seen: list[tuple[int, ...]] = []
    original = LazyBatch.whole

    def watched(self: LazyBatch) -> torch.Tensor:
        seen.append(tuple(self.shape))
        return original(self)

    monkeypatch.setattr(LazyBatch, "whole", watched)
    return seen


@pytest.mark.parametrize("size", [10, 12, 3])
def test_what_is_handed_on_is_never_put_together(size: int, merges: list[Any]) -> None:
    """Neither in forward nor in backward; also with fewer samples than microbatches."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # runs as 3 microbatches instead of 4
        check(straight, batch(size))
    assert merges == []


def test_shape_and_dtype_put_nothing_together(merges: list[Any]) -> None:
    def body(model: Listed, x: torch.Tensor) -> torch.Tensor:
        for one in model.blocks:
            x = one(x)
            assert isinstance(x, torch.Tensor) and not isinstance(x, (list, tuple))
            rows, columns = x.shape
            assert (rows, columns, x.ndim, x.dtype, len(x), x.size(0)) == (10, WIDTH, 2, torch.float64, 10, 10)
            assert x.device == torch.device("cpu") and x.is_contiguous() and not x.is_leaf == x.requires_grad
        return x

    check(body)
    assert merges == []


def residual(model: Listed, x: torch.Tensor) -> torch.Tensor:
    for one in model.blocks:
        x = x + one(x)
    return x


def collected(model: Listed, x: torch.Tensor) -> Any:
    states = [x]
    for one in model.blocks:
        states.append(one(states[-1]))
    return {"last": states[-1], "all": tuple(states)}


def looked_at(model: Listed, x: torch.Tensor) -> Any:
    """Reads beside the chain, which goes on with pieces."""
    means = []
    for one in model.blocks:
        x = one(x)
        means.append(x.mean(0))
        if x.abs().max() < 0:
            raise AssertionError
    return x, means


def written(model: Listed, x: torch.Tensor) -> Any:
    """In place: later elements get what was written."""
    x = model.blocks[0](x)
    x += 1
    x = model.blocks[1](x)
    x[2:5] = 0.5
    x = model.blocks[2](x)
    x.view(-1)[:7].mul_(3)
    return model.blocks[3](x)


def hooked(model: Listed, x: torch.Tensor) -> Any:
    """Gradients of what is in between, seen by hooks and changed by them."""
    for one in model.blocks[:-1]:
        x = one(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: 2 * gradient)
    return model.blocks[-1](x)


class Own(torch.autograd.Function):
    """A function that sees its argument itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.saved_tensors[0].cos()


def custom(model: Listed, x: torch.Tensor) -> Any:
    for one in model.blocks:
        x = Own.apply(one(x))
    return x


def rearranged(model: Listed, x: torch.Tensor) -> Any:
    for one in model.blocks:
        x = one(x).flip(0)[:, torch.arange(WIDTH - 1, -1, -1)]
    rows = list(model.blocks[0](x))
    return torch.stack(rows), torch.cat([model.blocks[1](x), x]), torch.where(x > 0, model.blocks[2](x), x)


def checkpointed(model: Listed, x: torch.Tensor) -> Any:
    for one in model.blocks:
        x = torch.utils.checkpoint.checkpoint(torch.tanh, one(x), use_reentrant=False)
    return x


def detached(model: Listed, x: torch.Tensor) -> Any:
    first = model.blocks[0](x)
    with torch.no_grad():
        factor = first.std() + float(first.detach().numpy().max()) + first.detach().tolist()[0][0]
    return model.blocks[1](first.detach()) * factor + model.blocks[2](first)


def in_no_grad(model: Listed, x: torch.Tensor) -> Any:
    """First looked at where nothing is recorded."""
    x = model.blocks[0](x)
    with torch.no_grad():
        size = x.norm()
    return model.blocks[1](x) / size + x


def twice(model: Listed, x: torch.Tensor) -> Any:
    """One value to several elements, and to one again."""
    x = model.blocks[0](x)
    return model.blocks[1](x) + model.blocks[2](model.blocks[1](x)) + model.blocks[3](x)


BODIES: list[Body] = [
    straight, residual, collected, looked_at, written, hooked, custom, rearranged, checkpointed, detached, in_no_grad,
    twice,
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_any_code_around_gives_eagers_numbers(body: Body) -> None:
    check(body)


@pytest.mark.parametrize("body", [straight, residual, looked_at], ids=lambda body: body.__name__)
def test_training_step_by_step(body: Body) -> None:
    """The loop that runs microbatch by microbatch."""
    model = Listed(body).double()
    reference = copy.deepcopy(model)
    x = batch().detach()
    with wrapped(model) as pipe, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # nothing overlaps
        pipe.forward_backward((x,), loss_fn=lambda outputs, label: total(outputs))
        pipe.synchronize()
    for piece in x.tensor_split(4):
        total(reference(piece)).backward()
    if body is not looked_at:  # whose means are of a microbatch
        assert_same_gradients(model, reference, 1e-10)


def test_gradients_of_what_is_in_between() -> None:
    kept: dict[str, list[torch.Tensor]] = {"pipe": [], "eager": []}

    def body(model: Listed, x: torch.Tensor) -> torch.Tensor:
        for one in model.blocks[:-1]:
            x = one(x)
            x.retain_grad()
            kept[str(model.which)].append(x)
        return model.blocks[-1](x)

    model = Listed(body).double()
    reference = copy.deepcopy(model)
    model.which, reference.which = "pipe", "eager"  # type: ignore[assignment]
    x = batch()
    with wrapped(model) as pipe:
        found, expected = pipe(x), reference(x)
        middle = [torch.autograd.grad(total(one), kept[key][1], retain_graph=True)[0] for one, key in (
            (found, "pipe"), (expected, "eager"),
        )]  # fmt: skip
        torch.testing.assert_close(middle[0] * 1, middle[1], rtol=1e-10, atol=1e-10)
    assert middle[1].abs().sum() > 0


@pytest.mark.parametrize(
    "of_blocks",
    [
        {1: RoundPipeRunConfig(merge_output=True)},
        {1: RoundPipeRunConfig(merge_output=False)},
        {1: RoundPipeRunConfig(num_microbatch=2)},
        {1: RoundPipeRunConfig(num_microbatch=1), 2: RoundPipeRunConfig(num_microbatch=5)},
        {0: RoundPipeRunConfig(recompute_grain="layer"), 3: RoundPipeRunConfig(merge_output=True)},
    ],
    ids=repr,
)
def test_options_of_single_elements(of_blocks: dict[int, RoundPipeRunConfig]) -> None:
    check(straight, of_blocks=of_blocks)


def test_kinds_of_what_the_code_around_sees() -> None:
    """Pieces stay apart by default; ``override_config`` says otherwise."""

    def body(model: Listed, x: torch.Tensor) -> torch.Tensor:
        for one in model.blocks:
            x = one(x)
            model.looked.append(type(x).__name__)
        return x

    apart, whole = RoundPipeRunConfig(merge_output=False), RoundPipeRunConfig(merge_output=True)
    model = Listed(body).double()
    with wrapped(model, override_config={model.blocks[1]: apart, model.blocks[2]: whole}) as pipe:
        pipe(batch())
    assert model.looked == ["LazyBatch", "RoundPipePackedData", "Tensor", "Tensor"]


def test_a_split_of_the_users_own_gets_tensors() -> None:
    given: list[Any] = []

    def split(args: Any, kwargs: Any, number: int) -> Any:
        given.append(type(args[0]))
        return [(one,) for one in args[0].tensor_split(number)], [kwargs] * number

    check(straight, of_blocks={1: RoundPipeRunConfig(split_input=split)})
    assert set(given) == {torch.Tensor}


@pytest.mark.parametrize("skipped", [[1], [0, 2], [3]])
@pytest.mark.parametrize("body", [straight, residual], ids=lambda body: body.__name__)
def test_skipped_elements_run_on_the_host(skipped: list[int], body: Body) -> None:
    check(body, blocks=[Scale() if index in skipped else block() for index in range(4)], skipped=skipped)
