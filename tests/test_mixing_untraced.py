"""Models without a graph whose code mixes samples or goes by their places: their batches stay in one piece, too."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from tests.test_mixing_models import DEVICES, DTYPE, Mixed, batch, train


def centred(h: torch.Tensor) -> torch.Tensor:
    return h - h.mean(0)


def with_random_depth(mix: Any, h: torch.Tensor) -> torch.Tensor:
    return mix(h) if random.random() < 2 else h


def with_noise_of_numpy(mix: Any, h: torch.Tensor) -> torch.Tensor:
    return mix(h) + 0 * np.random.rand()


def with_an_array(mix: Any, h: torch.Tensor) -> torch.Tensor:
    assert np.isfinite(h.detach().numpy()).all()
    return mix(h)


def with_a_log(mix: Any, h: torch.Tensor) -> torch.Tensor:
    assert f"{h.detach().mean():.3f}"
    return mix(h)


def spread(h: torch.Tensor) -> torch.Tensor:
    return h * torch.linspace(0, 1, len(h))[:, None]


def scaled_by_an_array(h: torch.Tensor) -> torch.Tensor:
    return h / torch.from_numpy(h.detach().std(0).numpy())


WAYS = [with_random_depth, with_noise_of_numpy, with_an_array, with_a_log]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("mix", [centred, spread, scaled_by_an_array, torch.tanh], ids=lambda mix: mix.__name__)
def test_untraced_batches_are_cut_unless_samples_are_mixed(way: Any, mix: Any) -> None:
    torch.manual_seed(0)
    model = Mixed(lambda h: way(mix, h)).to(DTYPE)
    reference, (x, label) = copy.deepcopy(model), batch()
    expected = F.cross_entropy(reference(x), label)
    expected.backward()
    with pytest.warns(UserWarning, match="module by module"):
        piped = roundpipe.compile(model, example_args=(x,), devices=DEVICES)
    with piped:
        state = random.getstate(), np.random.get_state()[1].tolist()
        loss, told = train(piped)
        assert len(told) == (mix is not torch.tanh)
        assert not told or "So the batch is not cut" in told[0]
        assert way is not with_a_log or state == (random.getstate(), np.random.get_state()[1].tolist())
        torch.testing.assert_close(loss, expected.detach())
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


class NumberGiven(nn.Module):
    """Mixes samples behind a number that Python draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(centred(x) if random.random() < 2 else x)


def test_a_number_of_microbatches_that_is_given_stays() -> None:
    x, _ = batch()
    with pytest.warns(UserWarning, match="module by module"):
        piped = roundpipe.compile(NumberGiven().to(DTYPE), example_args=(x,), devices=DEVICES)
    with piped:
        _, told = train(piped, roundpipe.RoundPipeRunConfig(num_microbatch=3))
        assert len(told) == 1 and "Each of the 3 microbatches" in told[0]
        _, told = train(piped, roundpipe.RoundPipeRunConfig(num_microbatch=1))
        assert not told
