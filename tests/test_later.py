"""Elements of lists of modules hand on their outputs in pieces, and host code that looks sees eager's tensors."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipePackedData, RoundPipeRunConfig
from roundpipe.core.errors import MicrobatchError
from roundpipe.wrappers.lazy_outputs import LazyBatch, holds_lazy, merge_lazily, repack
from tests.equality import assert_same_gradients

WIDTH = 16
DEVICES = ["cpu", "cpu", "cpu"]
Body = Callable[["Listed", torch.Tensor], Any]


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


class Scale(nn.Module):
    """Runs on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Listed(nn.Module):
    """Calls the elements of a list as its body says."""

    def __init__(self, body: Body, blocks: list[nn.Module] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks or [block() for _ in range(4)])
        self.body = body
        self.looked: list[Any] = []

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(self, x)


def straight(model: Listed, x: torch.Tensor) -> torch.Tensor:
    for one in model.blocks:
        x = one(x)
    return x


def wrapped(model: nn.Module, **options: Any) -> Any:
    return roundpipe.wrap_model_to_roundpipe(model, use_sequential_preset=False, devices=DEVICES, **options)


def batch(size: int = 10) -> torch.Tensor:
    return torch.randn(size, WIDTH, dtype=torch.float64, requires_grad=True)


def total(outputs: Any) -> torch.Tensor:
    tensors = [one for one in roundpipe.core.trees.tensors(outputs) if one.is_floating_point()]
    return torch.stack([(one**2).sum() for one in tensors]).sum()


def check(body: Body, x: torch.Tensor | None = None, blocks: list[nn.Module] | None = None, **options: Any) -> Listed:
    """Outputs and gradients, of the arguments too, are eager's; twice, once without gradients."""
    torch.manual_seed(0)
    model = Listed(body, blocks).double()
    reference = copy.deepcopy(model)
    x = batch() if x is None else x
    other = x.detach().clone().requires_grad_(x.requires_grad)
    overrides = {model.blocks[index]: config for index, config in options.pop("of_blocks", {}).items()}
    skipped = [model.blocks[index] for index in options.pop("skipped", ())]
    with wrapped(model, override_config=overrides, skip_modules=skipped, **options) as pipe:
        outputs, expected = pipe(x), reference(other)
        assert not holds_lazy(outputs)
        torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
        total(outputs).backward()
        total(expected).backward()
        pipe.synchronize()
        torch.testing.assert_close(x.grad, other.grad, rtol=1e-10, atol=1e-10)
        assert_same_gradients(model, reference, 1e-10)
        with torch.no_grad():
            torch.testing.assert_close(pipe(x), reference(other), rtol=1e-12, atol=1e-12)
    return model


# ---------------------------------------------------------------------------------- handed on, or looked at


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


# ---------------------------------------------------------------------------------- options


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


class Pair(nn.Module):
    """Takes and gives more than one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, x: torch.Tensor, state: Any, place: torch.Tensor) -> Any:
        out = self.inner(x) + place
        return out, {"sum": out.sum(-1), "norm": out.mean(), "count": 3, "before": state}


def test_structures_scalars_and_tensors_that_are_no_batch() -> None:
    """A scalar is averaged and what is no tensor stays one, as when an element merges by itself."""

    def body(model: Listed, x: torch.Tensor) -> Any:
        state: Any = None
        place = torch.linspace(0, 1, WIDTH, dtype=x.dtype)[None]
        for one in model.blocks:
            x, state = one(x, state, place)
            assert state["count"] == 3 and state["norm"].ndim == 0
            state = {"sum": state["sum"]}
        return x, state["sum"]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # place is not as long as the batch
        check(body, blocks=[Pair() for _ in range(3)], x=batch(12))


class Placed(nn.Module):
    """Its first argument is not the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, place: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + place


def test_another_first_argument_decides_the_number() -> None:
    def body(model: Listed, x: torch.Tensor) -> torch.Tensor:
        place = torch.linspace(0, 1, WIDTH, dtype=x.dtype)[None]
        x = model.blocks[0](x)
        return model.blocks[2](place, model.blocks[1](place, x))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        check(body, blocks=[block(), Placed(), Placed()])


# ---------------------------------------------------------------------------------- the tensor itself


def pieces() -> list[torch.Tensor]:
    return [torch.randn(size, 3, dtype=torch.float64, requires_grad=True) for size in (3, 3, 2)]


USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "print": repr,
    "format": lambda x: f"{x.sum():.6f}",
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(force=True).tolist(),
    "numpy of gradients": lambda x: x.detach().numpy().tolist(),
    "pointer": lambda x: x.data_ptr() != 0,
    "storage": lambda x: x.untyped_storage().nbytes(),
    "data": lambda x: x.data.sum(),
    "item": lambda x: x[0, 0].item(),
    "truth": lambda x: bool((x > 0).any()),
    "iteration": lambda x: [row.sum() for row in x],
    "into": lambda x: torch.add(x.detach(), 1, out=torch.empty(0, dtype=x.dtype)),
    "conversion": lambda x: x.float().double(),
    "strides": lambda x: (x.stride(), x.t().stride(), x.contiguous().stride()),
    "inference": lambda x: torch.inference_mode()(lambda: x.detach() * 2)().clone(),
    "vmap": lambda x: torch.vmap(torch.sum)(x.detach()),
    "saved": lambda x: torch.load(_saved(x.detach()), weights_only=True),
    "copied": lambda x: copy.deepcopy(x.detach()),
    "autocast": lambda x: torch.autocast("cpu")(lambda: nn.functional.linear(x.float(), x.float()))(),
    "numpy function": lambda x: torch.as_tensor(x.detach().__array__()),
}


def _saved(x: torch.Tensor) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("use", USES)
def test_uses_of_the_tensor(use: str, grad: bool) -> None:
    parts = pieces()
    with torch.set_grad_enabled(grad):
        later, whole = merge_lazily(RoundPipePackedData([1 * one for one in parts])), torch.cat([1 * x for x in parts])
        assert isinstance(later, LazyBatch)
        found, expected = USES[use](later), USES[use](whole)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert type(found) is torch.Tensor
    elif use != "print":
        assert found == expected
    else:
        assert found.partition("grad_fn")[0] == expected.partition("grad_fn")[0]


def test_pieces_that_make_no_batch() -> None:
    assert merge_lazily([RoundPipePackedData([1, 1]), "a"]) == [1, "a"]
    scalars = merge_lazily(RoundPipePackedData([torch.tensor(1.0), torch.tensor(2.0)]))
    assert type(scalars) is torch.Tensor and scalars == 1.5
    one = torch.zeros(2)
    assert merge_lazily(RoundPipePackedData([one])) is one
    with pytest.raises(MicrobatchError, match="can't be concatenated"):
        merge_lazily(RoundPipePackedData([torch.zeros(2, 3), torch.zeros(2, 4)]))


def test_pieces_are_taken_only_as_they_would_be_cut() -> None:
    later = merge_lazily(RoundPipePackedData(pieces()))
    assert isinstance(repack([later], [3, 3, 2])[0], RoundPipePackedData)
    for sizes in ([4, 4], [2, 3, 3], None):
        assert type(repack([later], sizes)[0]) is torch.Tensor


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_pieces_have_what_is_written(grad: bool, before: bool) -> None:
    """By operations, views, and through memory alone."""
    with torch.set_grad_enabled(grad):
        later = merge_lazily(RoundPipePackedData([1 * one for one in pieces()]))
        if before:
            repack([later], [3, 3, 2])
        later.add_(1)
        later[2:4] = 7
        later.view(-1)[:2].mul_(3)
        later.data[7] = 5
        later.detach()[6] = 4
        later.detach().numpy()[5] = 3
        taken = repack([later], [3, 3, 2])[0]
        assert isinstance(taken, RoundPipePackedData)
        torch.testing.assert_close(torch.cat(list(taken)), later * 1, rtol=0, atol=0)
        assert [later[row, 0].item() for row in (2, 3, 5, 6, 7)] == [7, 7, 3, 4, 5]
        assert all(one.requires_grad == grad for one in taken)


def test_events_are_awaited_when_looked_at() -> None:
    class Arrival:
        happened = 0

        def synchronize(self) -> None:
            self.happened += 1

    events = [Arrival() for _ in range(3)]
    later = merge_lazily(RoundPipePackedData(pieces(), events))
    assert later.shape == (8, 3) and [one.happened for one in events] == [0, 0, 0]
    assert repack([later], [3, 3, 2])[0].events == events
    later.sum()
    assert [one.happened for one in events] == [1, 1, 1]


# ---------------------------------------------------------------------------------- other data


def test_other_data_in_its_place() -> None:
    """Its place in the autograd graph stays, as eager's does."""

    def body(model: Listed, x: torch.Tensor) -> torch.Tensor:
        for index, one in enumerate(model.blocks):
            x = one(x)
            x.data = x.data * (index + 2)
            assert x.data.requires_grad is False
        return x

    def shorter(model: Listed, x: torch.Tensor) -> torch.Tensor:
        x = model.blocks[0](x)
        with torch.no_grad():
            y = x.detach()
            y.data = torch.cat([y.data, y.data])[:, :3]
            assert y.shape == (2 * len(x), 3)
            factor = y.sum()
        return x * factor

    check(body, batch(8))
    check(shorter)
