"""A tensor that a forward keeps on its model and that sizes alone tell, such as a causal mask, is made anew."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import roundpipe
from roundpipe import RoundPipeRunConfig
from tests.runtime.models import gradients

VOCABULARY, WIDTH = 23, 8
Mask = Callable[[Any, torch.Tensor], torch.Tensor]


def _causal(number: int) -> torch.Tensor:
    mask = (torch.triu(torch.ones(number, number)) == 1).transpose(0, 1)
    return mask.float().masked_fill(mask == 0, float("-inf")).masked_fill(mask == 1, 0.0)


def _written(number: int) -> torch.Tensor:
    mask = torch.zeros(number, number)
    mask.fill_(float("-inf")).triu_(1)
    mask[:, 0] = 0.0
    return mask


def _of_size(model: Any, h: torch.Tensor) -> torch.Tensor:
    number = h.shape[1]
    if model.mask is None or model.mask.size(0) != number:
        model.mask = _causal(number).to(h.device)
    mask: torch.Tensor = model.mask
    return mask


def _made_once(model: Any, h: torch.Tensor) -> torch.Tensor:
    if model.mask is None:
        model.mask = _causal(32)
    mask: torch.Tensor = model.mask[: h.shape[1], : h.shape[1]]
    return mask


def _grown(model: Any, h: torch.Tensor) -> torch.Tensor:
    number = h.shape[1]
    if model.mask is None or model.mask.shape[0] < number:
        model.mask = _written(number)
    mask: torch.Tensor = model.mask[:number, :number]
    return mask


def _of_two(model: Any, h: torch.Tensor) -> torch.Tensor:
    number = h.shape[1]
    if not hasattr(model, "tables") or len(model.tables[0]) < number:
        positions = torch.arange(number)[:, None] / torch.arange(1, number + 1)
        model.tables = positions.cos(), positions.sin()
    cosine, sine = model.tables
    mask: torch.Tensor = cosine[:number, :number] + sine[:number, :number]
    return mask


def _of_a_dict(model: Any, h: torch.Tensor) -> torch.Tensor:
    number = h.shape[1]
    if number not in model.masks:
        model.masks[number] = _causal(number)
    mask: torch.Tensor = model.masks[number]
    return mask


def _looked_into(model: Any, h: torch.Tensor) -> torch.Tensor:
    mask = _of_size(model, h)
    return mask if mask[0, 0] == 0 else mask + 1


def _of_another_length(model: Any, h: torch.Tensor) -> torch.Tensor:
    number = h.shape[1]
    if model.mask is None or model.mask.shape[0] != number:
        model.mask = torch.linspace(0, 1, number)
    mask: torch.Tensor = model.mask.expand(number, number)
    return mask


def _of_half_the_length(model: Any, h: torch.Tensor) -> torch.Tensor:
    number = h.shape[1]
    if model.mask is None:
        model.mask = torch.full((number, number), float("-inf")).triu(1 + number // 2)
    mask: torch.Tensor = model.mask[:number, :number]
    return mask


def _of_the_first_length(model: Any, h: torch.Tensor) -> torch.Tensor:
    if model.mask is None:
        model.mask = torch.ones(()) * h.shape[1]
    mask: torch.Tensor = model.mask.expand(h.shape[1], h.shape[1])
    return mask


def _counted(model: Any, h: torch.Tensor) -> torch.Tensor:
    model.count = model.count + 1
    mask: torch.Tensor = model.count.expand(h.shape[1], h.shape[1])
    return mask


def _otherwise_at_first(model: Any, h: torch.Tensor) -> torch.Tensor:
    if model.mask is None:
        model.mask = torch.zeros(32, 32)
        return _causal(h.shape[1])
    mask: torch.Tensor = model.mask[: h.shape[1], : h.shape[1]]
    return mask


def _added_to(model: Any, h: torch.Tensor) -> torch.Tensor:
    if model.mask is None:
        model.mask = torch.zeros(32, 32)
    model.mask += 1
    mask: torch.Tensor = model.mask[: h.shape[1], : h.shape[1]]
    return mask


def _of_data(model: Any, h: torch.Tensor) -> torch.Tensor:
    if model.mask is None:
        model.mask = h.detach().sum(-1)[:1, :3].mean() * torch.ones(32, 32)
    mask: torch.Tensor = model.mask[: h.shape[1], : h.shape[1]]
    return mask


MADE_ANEW: dict[str, Mask] = {
    "of the size": _of_size,
    "made once": _made_once,
    "grown": _grown,
    "two": _of_two,
    "looked into": _looked_into,
}
OTHERS: dict[str, Mask] = {
    "in a dict": _of_a_dict,
    "of another length": _of_another_length,
    "of half the length": _of_half_the_length,
    "of the first length": _of_the_first_length,
    "counted": _counted,
    "added to": _added_to,
    "of data": _of_data,
    "otherwise at first": _otherwise_at_first,
}


class Decoder(nn.Module):
    def __init__(self, mask_of: Mask, is_inside: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, 0.0, batch_first=True) for _ in range(2)
        )
        self.masks_inside = Masks(mask_of) if is_inside else None
        self.head, self.mask_of = nn.Linear(WIDTH, VOCABULARY), mask_of
        self.mask, self.masks, self.count = None, dict[Any, Any](), torch.zeros(())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embedding(ids)
        mask = self.mask_of(self, h) if self.masks_inside is None else self.masks_inside(h)
        for layer in self.layers:
            h = layer(h, src_mask=mask)
        logits: torch.Tensor = self.head(h)
        return logits


class Masks(nn.Module):
    def __init__(self, mask_of: Mask) -> None:
        super().__init__()
        self.mask_of, self.mask, self.masks, self.count = mask_of, None, dict[Any, Any](), torch.zeros(())

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.mask_of(self, h)


def _loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def _trained(model: Decoder, lengths: list[int], num_microbatch: int) -> Any:
    """Compares each step with plain PyTorch; gives what is compiled."""
    plain = copy.deepcopy(model)
    config = RoundPipeRunConfig(num_microbatch=num_microbatch, loss_reduction="mean")
    with roundpipe.compile(model, devices=["cpu"] * 2, model_run_config=config) as piped:
        for step, length in enumerate(lengths):
            ids = torch.randint(VOCABULARY, (6, length), generator=torch.Generator().manual_seed(step))
            piped.zero_grad()
            plain.zero_grad()
            loss = piped.forward_backward((ids,), label=ids, loss_fn=_loss)
            expected = _loss(plain(ids), ids)
            expected.backward()
            assert_close(loss, expected)
            assert_close(gradients(model), gradients(plain))
    return piped


@pytest.mark.parametrize("num_microbatch", [1, 3])
@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("name", MADE_ANEW)
def test_a_tensor_that_sizes_tell_is_made_anew(name: str, is_inside: bool, num_microbatch: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        piped = _trained(Decoder(MADE_ANEW[name], is_inside), [7, 7, 9, 5, 9, 30], num_microbatch)
    assert piped.trace_count == 1


@pytest.mark.parametrize("num_microbatch", [1, 3])
@pytest.mark.parametrize("name", OTHERS)
def test_one_that_they_do_not_tell_is_as_in_pytorch(name: str, num_microbatch: int) -> None:
    if num_microbatch == 3 and name in ("counted", "added to", "of data", "otherwise at first"):
        pytest.skip("each microbatch is a call")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _trained(Decoder(OTHERS[name]), [7, 7, 7, 5, 7, 6], num_microbatch)
