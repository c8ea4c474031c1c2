"""Models that keep something of each sample in rows of a buffer: parts of a batch would write over each other there."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipeRunConfig

ROWS, STEPS, WIDTH, NUMBER = 8, 10, 16, 6
"""There are few rows, so that a model can't be tried out with many samples."""
Form = Callable[["RowKeeper", torch.Tensor, int], torch.Tensor]


class RowKeeper(nn.Module):
    """Two layers around code that has buffers with rows for samples in several dimensions."""

    def __init__(self, form: Form, is_registered: bool = True, rows: int = ROWS) -> None:
        super().__init__()
        self.first, self.last, self.form = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5), form
        kept = {
            "rows": torch.zeros(rows, STEPS, WIDTH),
            "second": torch.zeros(STEPS, rows, WIDTH),
            "third": torch.zeros(2, 3, rows, WIDTH),
            "line": torch.zeros(rows),
            "table": torch.linspace(0, 1, rows * 3 * WIDTH).view(rows, 3, WIDTH),
        }
        for name, tensor in kept.items():
            if is_registered:
                self.register_buffer(name, tensor)
            else:
                setattr(self, name, tensor)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        return self.last(self.form(self, self.first(x), step))


def item_of_rows(model: RowKeeper, h: torch.Tensor, step: int) -> torch.Tensor:
    model.rows[: h.shape[0], step] = h[:, 0].detach()
    return model.rows[: h.shape[0]].sum(1)


def slice_of_rows(model: RowKeeper, h: torch.Tensor, step: int) -> torch.Tensor:
    model.rows[: h.shape[0], 3:4] = h.detach()
    return model.rows[: h.shape[0]].sum(1)


def slice_of_a_slice(model: RowKeeper, h: torch.Tensor, step: int) -> torch.Tensor:
    model.rows[: h.shape[0]][:, 3:4] = h.detach()
    return model.rows[: h.shape[0]].sum(1)


def decayed(model: RowKeeper, h: torch.Tensor, step: int) -> torch.Tensor:
    model.rows[: h.shape[0]] = model.rows[: h.shape[0]] * 0.5 + h.detach()
    return model.rows[: h.shape[0]].sum(1)


def copied(model: RowKeeper, h: torch.Tensor, step: int) -> torch.Tensor:
    model.rows[: h.shape[0], :1].copy_(h.detach())
    return model.rows[: h.shape[0]].sum(1)


def narrowed(model: RowKeeper, h: torch.Tensor, step: int) -> torch.Tensor:
    model.rows.narrow(0, 0, h.shape[0]).narrow(1, step, 1).copy_(h.detach())
    return model.rows[: h.shape[0]].sum(1)


def cached(model: RowKeeper, h: torch.Tensor, step: int) -> torch.Tensor:
    model.rows[: h.shape[0], step : step + 1] = h.detach()
    return h[:, 0] + model.rows[: h.shape[0], : step + 1].mean(1)


def by_places(model: RowKeeper, h: torch.Tensor, step: int) -> torch.Tensor:
    model.rows[torch.arange(len(h)), step] = h[:, 0].detach()
    return model.rows[: len(h)].sum(1)


def added(model: RowKeeper, h: torch.Tensor, step: int) -> torch.Tensor:
    model.rows[: len(h), step : step + 1] += h.detach()
    return model.rows[: len(h)].sum(1)


def in_second(model: RowKeeper, h: torch.Tensor, step: int) -> torch.Tensor:
    model.second[step, : h.shape[0]] = h[:, 0].detach()
    return model.second[:, : h.shape[0]].sum(0)


def in_third(model: RowKeeper, h: torch.Tensor, step: int) -> torch.Tensor:
    before = h[:, 0] + model.third[1, :, : h.shape[0]].sum(0)
    model.third[1, step, : h.shape[0]] = h[:, 0].detach()
    return before


def in_a_line(model: RowKeeper, h: torch.Tensor, step: int) -> torch.Tensor:
    before = h[:, 0] + model.line[: len(h), None]
    model.line[: len(h)] = h[:, 0, 0].detach()
    return before


def read_alone(model: RowKeeper, h: torch.Tensor, step: int) -> torch.Tensor:
    return h[:, 0] + model.table[: h.shape[0], 1]


FORMS = [
    *(item_of_rows, slice_of_rows, slice_of_a_slice, decayed, copied, narrowed, cached, by_places, added),
    *(in_second, in_third, in_a_line, read_alone),
]


def differs(model: RowKeeper, number: int | None, has_grad: bool = True) -> tuple[bool, list[str]]:
    """Whether some of three calls give something else than plain PyTorch, or leave it; and what they warn of."""
    plain, config = copy.deepcopy(model), RoundPipeRunConfig(num_microbatch=number)
    torch.manual_seed(1)
    found: list[bool] = []
    with (
        roundpipe.compile(model, devices=["cpu"] * 2, model_run_config=config) as piped,
        warnings.catch_warnings(record=True) as caught,
        torch.set_grad_enabled(has_grad),
    ):
        warnings.simplefilter("always")
        plain.train(has_grad)
        piped.train(has_grad)
        for step in range(3):
            x = torch.randn(NUMBER, 1, WIDTH)
            found.append(not torch.allclose(plain(x, step), piped(x, step), atol=1e-6))
        piped.synchronize()
        names = ("rows", "second", "third", "line")
        found += [not torch.allclose(getattr(plain, name), getattr(model, name), atol=1e-6) for name in names]
    return any(found), [str(each.message) for each in caught]


def seeded(form: Form, is_registered: bool = True, rows: int = ROWS) -> RowKeeper:
    torch.manual_seed(0)
    return RowKeeper(form, is_registered, rows)


@pytest.mark.parametrize("has_grad", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_a_batch_of_kept_rows_is_not_cut(form: Form, has_grad: bool) -> None:
    is_other, texts = differs(seeded(form), None, has_grad)
    assert not is_other
    told = [text for text in texts if "mixes the samples" in text]
    assert len(told) == 1 and "the batch is not cut but runs as one microbatch" in told[0]


@pytest.mark.parametrize(
    ("form", "rows"), [(cached, NUMBER), (by_places, NUMBER), (in_second, NUMBER), (by_places, 100)]
)
def test_it_is_so_with_any_number_of_rows(form: Form, rows: int) -> None:
    is_other, texts = differs(seeded(form, rows=rows), None)
    assert not is_other and any("mixes the samples" in text for text in texts)


@pytest.mark.parametrize("form", FORMS)
def test_a_number_that_is_given_cuts_and_is_warned_of(form: Form) -> None:
    is_other, texts = differs(seeded(form), 3)
    assert is_other
    told = [text for text in texts if "mixes the samples" in text]
    assert len(told) == 1 and "Each of the 3 microbatches has only its own samples" in told[0]


@pytest.mark.parametrize("form", [slice_of_a_slice, copied, narrowed])
def test_views_of_a_tensor_that_is_not_registered_are_written_as_in_plain_torch(form: Form) -> None:
    is_other, texts = differs(seeded(form, is_registered=False), None)
    assert not is_other and any("the batch is not cut" in text for text in texts)


class WritesAttention(nn.Module):
    """Attends to what earlier calls left, in tensors that are registered or not."""

    def __init__(self, is_registered: bool) -> None:
        super().__init__()
        self.table, self.made, self.out = nn.Embedding(50, 16), nn.Linear(16, 48), nn.Linear(16, 50)
        for name in ("keys", "cached"):
            if is_registered:
                self.register_buffer(name, torch.zeros(ROWS, 16, 16), persistent=False)
            else:
                setattr(self, name, torch.zeros(ROWS, 16, 16))

    def forward(self, ids: torch.Tensor, start: int) -> torch.Tensor:
        number, length = ids.shape
        query, key, value = self.made(self.table(ids)).chunk(3, -1)
        self.keys[:number, start : start + length] = key
        self.cached[:number, start : start + length] = value
        scores = query @ self.keys[:number, : start + length].transpose(1, 2)
        if length > 1:
            scores = scores + torch.triu(torch.full((length, length), float("-inf")), 1)
        return self.out(scores.softmax(-1) @ self.cached[:number, : start + length])


def generated(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The scores of the last of three tokens."""
    with torch.no_grad():
        scores = model(ids, 0)
        for start in range(ids.shape[1], ids.shape[1] + 3):
            scores = model(scores[:, -1:].argmax(-1), start)
    return scores


@pytest.mark.parametrize("is_registered", [True, False])
def test_a_cache_of_keys_and_values_is_that_of_the_batch(is_registered: bool) -> None:
    torch.manual_seed(0)
    model = WritesAttention(is_registered).eval()
    plain, ids = copy.deepcopy(model), torch.randint(50, (NUMBER, 4))
    with roundpipe.compile(model, devices=["cpu"] * 2) as piped, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        piped.eval()
        torch.testing.assert_close(generated(piped, ids), generated(plain, ids))
    assert any(
        "the buffer cached, which the forward reads, changes with each batch" in str(each.message) for each in caught
    )
