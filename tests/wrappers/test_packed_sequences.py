"""Recurrent layers on packed sequences, in a model that runs in parts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import roundpipe
from tests.runtime.models import gradients


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.recurrent = nn.ModuleList(nn.GRU(16, 16, batch_first=True) for _ in range(2))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for layer in self.recurrent:
            packed = pack_padded_sequence(hidden, lengths, batch_first=True, enforce_sorted=False)
            hidden, _ = pad_packed_sequence(layer(packed)[0], batch_first=True, total_length=x.shape[1])
        return self.last(hidden)


@pytest.mark.filterwarnings("ignore:Recurrent runs module by module", "ignore:forward_backward of an AutoRoundPipe")
@pytest.mark.parametrize(("devices", "number"), [(["cpu"], 1), (["cpu", "cpu"], 3)])
def test_several_layers_take_packed_sequences(devices: list[str], number: int) -> None:
    torch.manual_seed(0)
    model = Recurrent()
    reference, x, lengths = copy.deepcopy(model), torch.randn(6, 9, 8), torch.tensor([9, 7, 5, 9, 3, 6])
    expected = reference(x, lengths).square().mean()
    expected.backward()
    with roundpipe.compile(model, devices=devices) as piped:
        loss = piped.forward_backward(
            (x, lengths),
            loss_fn=lambda outputs, _: outputs.square().mean(),
            run_config=roundpipe.RoundPipeRunConfig(num_microbatch=number, loss_reduction="mean"),
        )
        piped.synchronize()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradients(model), gradients(reference))
