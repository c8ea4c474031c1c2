"""Steps in tiles: chosen where nothing fits without them, predicted as they run, and with eager's numbers."""

import logging
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe
from roundpipe import Device, RoundPipeRunConfig
from roundpipe.core.errors import DeviceMemoryError
from roundpipe.core.tiling import UNTILED
from roundpipe.wrappers import calls_in_tiles, recovery
from tests.runtime.models import assert_same, gradients

VOCABULARY, WIDTH, LENGTH, BATCH = 512, 8, 64, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Decoder(nn.Module):
    """Small but for its logits, whose loss is in its forward."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids, labels):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


def batch():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
    return ids, torch.where(ids % 7 == 0, -100, ids)


def loss_of(outputs, label):
    return outputs


def decoder():
    torch.manual_seed(1)
    return Decoder().double()


@pytest.fixture(scope="module")
def eager():
    """The loss and the gradients of two microbatches, one after the other."""
    model = decoder()
    losses = [model(*pieces) for pieces in zip(*(tensor.chunk(2) for tensor in batch()), strict=True)]
    sum(losses).backward()
    return sum(losses).detach(), gradients(model)


def run(model, budget=None, workers=1, texts=None, **options):
    """Loss, peak and tiles of a call with two microbatches; ``texts`` gets what people are told of it."""
    config = RoundPipeRunConfig(**{"num_microbatch": 2, **options})
    with roundpipe.compile(model, devices=[Device("cpu", memory_bytes=budget)] * workers) as piped:
        loss = piped.forward_backward(batch(), loss_fn=loss_of, run_config=config)
        piped.synchronize()
        # reports show tiles in words
        tiles = piped._runner.session.log.latest.tiles
        if texts is not None:
            texts += [piped.partition_table(), str(piped.report())]
        return loss, piped.peak_device_bytes(), tiles


@pytest.mark.parametrize("number", [1, 3, 500])
def test_a_given_number_has_the_numbers_of_none(number, eager):
    model = decoder()
    loss, _, tiles = run(model, tiles=number, workers=2)
    assert (tiles.layers, tiles.tail) == (number, number)
    torch.testing.assert_close(loss, eager[0], rtol=0, atol=1e-12)
    assert_same(gradients(model), eager[1], atol=1e-12)


@pytest.fixture(scope="module")
def untiled_peak():
    return run(decoder(), 10**9)[1]


@pytest.mark.parametrize(
    "share", [pytest.param(index / 20, marks=() if index in (5, 20) else pytest.mark.long) for index in range(1, 21)]
)
def test_budgets(share, eager, untiled_peak):
    """Down to less than a tile: eager's numbers within the budget, or an error whose proposal works."""
    model, budget = decoder(), int(share * untiled_peak)
    try:
        loss, peak, tiles = run(model, budget)
    except DeviceMemoryError as error:
        assert share < 0.5
        if found := re.search(r"num_microbatch=(\d+) with recompute_grain='(\w+)'", str(error)):
            run(model, budget, num_microbatch=int(found[1]), recompute_grain=found[2])
        return
    torch.testing.assert_close(loss, eager[0], rtol=0, atol=1e-12)
    assert_same(gradients(model), eager[1], atol=1e-12)
    assert peak <= budget
    assert share < 0.9 or tiles == UNTILED


@pytest.mark.parametrize(
    "share", [pytest.param(share, marks=pytest.mark.long if share != 0.45 else ()) for share in (0.3, 0.45, 0.6)]
)
def test_each_plan_of_a_recovery_is_within_the_budget(share, eager, untiled_peak, monkeypatch):
    """Where layers take so much more than was predicted that a plan without tiles is tried: eager's numbers."""
    real, shrink, needs = calls_in_tiles.measure_memory, recovery.shrink, []
    monkeypatch.setattr(calls_in_tiles, "measure_memory", lambda *args: [cost.scaled(0.1) for cost in real(*args)])
    model, budget = decoder(), int(share * untiled_peak)

    def noted(plans, call, plan):
        # what a plan was predicted to need is shown once it has run, which these plans have not
        before = plans.needed_bytes(call, plan)
        if found := shrink(plans, call, plan):
            needs.append((before, plans.needed_bytes(call, plans.plan(call))))  # as above
        return found

    monkeypatch.setattr(recovery, "shrink", noted)
    loss, peak, _ = run(model, budget, residency="off")
    torch.testing.assert_close(loss, eager[0], rtol=0, atol=1e-12)
    assert_same(gradients(model), eager[1], atol=1e-12)
    assert needs[0][0] <= budget and peak <= budget
    assert all(after <= 0.85 * before for before, after in needs), needs


def test_tiles_are_chosen_where_nothing_fits_without_them_and_logged_once(caplog, eager, untiled_peak):
    model, budget = decoder(), untiled_peak // 2
    with pytest.raises(DeviceMemoryError, match="tiles='auto' is predicted to fit"):
        run(model, budget, tiles="off")
    with caplog.at_level(logging.INFO, "roundpipe"):
        loss, peak, tiles = run(model, budget, texts=(texts := []))
    assert tiles.tail > 1 and peak <= budget
    table, report = texts
    (last,) = [line for line in table.splitlines() if "and the loss" in line]
    assert last.split()[-1] == str(tiles.tail) and "working memory" in table
    _, by_stage = table.split("device memory in a step, as planned\n\n")
    terms = {"weights", "gradients", "activations", "carried", "staged", "in all"}
    assert terms <= set(re.split("  +", by_stage.splitlines()[0])) and "U" in by_stage
    assert re.search(rf"tiles +{tiles.tail} in the last layer with the loss", report)
    assert re.search(r"planned for .*: weights .*, activations .*, carried .*, staged ", report)
    torch.testing.assert_close(loss, eager[0], rtol=0, atol=1e-12)
    (record,) = [record for record in caplog.records if "runs in tiles" in record.message]
    assert f"{tiles.tail} tiles" in record.message and " instead of " in record.message


def test_out_of_memory_with_the_smallest_stages_leads_to_tiles(eager, untiled_peak, monkeypatch, caplog):
    """Where a prediction was too low by far."""
    real = calls_in_tiles.measure_memory

    def measure_memory(*args):
        return [cost if args[-1] != UNTILED else cost.scaled(0.2) for cost in real(*args)]

    monkeypatch.setattr(calls_in_tiles, "measure_memory", measure_memory)
    model = decoder()
    with caplog.at_level(logging.WARNING, "roundpipe"):
        loss, peak, tiles = run(model, untiled_peak // 2)
    assert "ran out of device memory" in caplog.text
    assert tiles.tail > 1 and peak <= untiled_peak // 2
    torch.testing.assert_close(loss, eager[0], rtol=0, atol=1e-12)
    assert_same(gradients(model), eager[1], atol=1e-12)
