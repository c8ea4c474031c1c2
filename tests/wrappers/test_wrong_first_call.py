"""A first call that plain PyTorch refuses leaves nothing behind."""

import warnings

import pytest
import torch
from torch import nn

import roundpipe


@pytest.mark.parametrize("has_good_call_before", [False, True])
def test_a_sequence_of_layers_is_cut_after_a_call_of_a_wrong_shape(has_good_call_before):
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    x = torch.randn(6, 8)
    with roundpipe.compile(model, devices=["cpu", "cpu"]) as piped, warnings.catch_warnings():
        warnings.simplefilter("error")
        if has_good_call_before:
            piped(x)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            piped(torch.randn(6, 9))
        piped.report()  # the next one is of what follows
        for _ in range(3):
            torch.testing.assert_close(piped(x), model(x))
        assert piped.report().num_rounds == 3
