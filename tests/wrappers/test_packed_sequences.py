"""Recurrent layers on packed sequences, in a model that runs in parts."""

from __future__ import annotations

import copy
import warnings

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


class Encoder(nn.Module):
    """Packs a batch whose first dimension is the samples', or time."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.embedding, self.gru = nn.Embedding(20, 6), nn.GRU(6, 6, batch_first=batch_first)
        self.last = nn.Linear(6, 3)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(self.embedding(ids), lengths, self.gru.batch_first, enforce_sorted=False)
        return self.last(self.gru(packed)[1][0])


class Padded(Encoder):
    """The same as the advice says."""

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        outputs, _ = self.gru(self.embedding(ids))
        return self.last(outputs[torch.arange(len(ids)), lengths - 1])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("way", ["training", "forward"])
def test_by_default_numbers_are_eagers_and_the_reason_is_told(batch_first: bool, way: str) -> None:
    torch.manual_seed(0)
    model = Encoder(batch_first).double()
    reference = copy.deepcopy(model)
    told: list[str] = []
    with roundpipe.compile(model, devices=["cpu", "cpu"]) as piped:
        for lengths in (torch.tensor([7, 5, 4, 2, 2, 1, 6, 3]), torch.tensor([2, 5, 5, 3])):
            ids = torch.randint(20, (len(lengths), int(lengths.max())))
            arguments = (ids if batch_first else ids.T.contiguous(), lengths)
            expected = reference(*arguments).square().sum()
            expected.backward()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if way == "training":
                    loss = piped.forward_backward(arguments, loss_fn=lambda outputs, _: outputs.square().sum())
                else:
                    loss = piped(*arguments).square().sum()
                    loss.backward()
            told += [str(each.message) for each in caught]
            torch.testing.assert_close(loss.detach(), expected.detach())
        piped.synchronize()
        torch.testing.assert_close(gradients(model), gradients(reference))
    (why,) = (each for each in told if "can't be traced" in each)
    assert "given a PackedSequence, whose sizes are data" in why and "Node" not in why and "lengths - 1" in why
    assert any("batch_first=False, and nothing tells" in each for each in told) is not batch_first


def test_what_the_reason_advises_is_cut_into_layers() -> None:
    torch.manual_seed(0)
    model, ids, lengths = Padded(True).double(), torch.randint(20, (8, 7)), torch.tensor([7, 5, 4, 2, 2, 1, 6, 3])
    packed = Encoder(True).double()
    packed.load_state_dict(model.state_dict())
    with roundpipe.compile(model, devices=["cpu", "cpu"]) as piped, warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(piped(ids, lengths), packed(ids, lengths))
