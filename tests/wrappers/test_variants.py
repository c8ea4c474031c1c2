"""Microbatches that need different traces run in one round, as each would alone.

Most are given one by one: where a call cuts a batch, its data decide for all pieces.
"""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe
from roundpipe.fx.passes.lower import lower
from roundpipe.fx.trace.tracer import trace
from tests.repeats import repeats
from tests.runtime.models import assert_same, buffers, config, gradients, pieces
from tests.wrappers.cases_tails import runs

__all__ = ["runs"]

WIDTH = 6


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.LayerNorm(WIDTH)

    def forward(self, x, mask):
        x = x + torch.tanh(self.norm(self.linear(x)))
        return x + torch.tanh(self.other(x) if mask is None else self.other(x) * mask)


class Masked(nn.Module):
    """Takes another way for a mask of ones, and one more for a single sample."""

    def __init__(self, norm=False, depth=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block(norm) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x, mask):
        if bool(mask.all()):
            mask = None
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x * 2 if x.shape[0] == 1 else x)


def arguments(size=7):
    generator = torch.Generator().manual_seed(5)
    mask = torch.ones(size, 1, dtype=torch.float64)
    mask[2] = 0
    return {"x": torch.randn(size, WIDTH, generator=generator, dtype=torch.float64), "mask": mask}


def total(output, label):
    return output.square().sum()


def each(reference, given, num):
    return [(reference(**piece)) for piece in pieces(given, num)]


@pytest.mark.parametrize(
    ("workers", "grain"), repeats([(1, "stage"), (2, "layer"), (3, "stage")], ["2-layer", "3-stage"])
)
def test_a_call_is_one_round(workers, grain, caplog):
    model = Masked().double()
    reference, given = copy.deepcopy(model), arguments()
    with caplog.at_level(logging.INFO, "roundpipe"), roundpipe.compile(model, devices=["cpu"] * workers) as piped:
        for num in (4, 7):  # 2, 2, 2, 1 samples, and single ones
            expected = each(reference, given, num)
            loss = sum(map(total, expected, expected))
            loss.backward()
            found, outputs = piped.forward_backward(
                input_kwargs=given, loss_fn=total, return_outputs=True, run_config=config(num, grain)
            )
            torch.testing.assert_close(found, loss.detach(), rtol=0, atol=1e-12)
            torch.testing.assert_close(outputs, torch.cat(expected).detach(), rtol=0, atol=1e-12)
        piped.synchronize()
        assert_same(gradients(model), gradients(reference), 1e-12)
        assert piped._session.engine.steps.num_begun == 2  # rounds, of which no report tells the number
        assert piped.trace_count >= 3
    assert "run in one round" in caplog.text


class Uneven(nn.Module):
    """Without a mask it computes much, else its weights are most of what it takes."""

    def __init__(self, is_small):
        super().__init__()
        self.linear, self.is_small = nn.Linear(WIDTH, WIDTH), is_small
        self.table = nn.Parameter(torch.randn(1 if is_small else 999, WIDTH) / WIDTH)

    def forward(self, x, mask):
        x = x + torch.tanh(self.linear(x)) + self.table.mean(0)
        for _ in range(40 if self.is_small == (mask is None) else 1):
            x = x + torch.tanh(self.linear(x))
        return x if mask is None else x * mask


def test_traces_in_which_other_layers_are_heavy_are_cut_alike(caplog):
    """By itself, each would be cut otherwise."""
    model = Masked()
    model.blocks = nn.ModuleList(Uneven(is_small=index < 4) for index in range(12))
    reference, given = copy.deepcopy(model.double()), arguments()
    whole = {**given, "mask": torch.ones_like(given["mask"])}
    alone = [len(lower(trace(model, (), example)).chain) for example in (given, whole)]
    assert alone[1] > alone[0] + 2
    with caplog.at_level(logging.INFO, "roundpipe"), roundpipe.compile(model, devices=["cpu"] * 2) as piped:
        found = piped.forward_backward(input_kwargs=list(pieces(given, 3)), loss_fn=total)
        piped.synchronize()
        assert piped._session.engine.steps.num_begun == 1 and piped.trace_count == 2  # see above
    loss = sum(map(total, expected := each(reference, given, 3), expected))
    loss.backward()
    torch.testing.assert_close(found, loss.detach(), rtol=1e-12, atol=0)
    assert_same(gradients(model), gradients(reference), 1e-9)
    assert "run in one round" in caplog.text


@pytest.mark.parametrize("front", [False, True])
def test_forward_and_its_backward_are_one_round_each(front):
    model, first = Masked().double(), nn.Linear(WIDTH, WIDTH).double()
    reference, given = copy.deepcopy(nn.ModuleList([model, first])), arguments()
    if front:
        expected = [reference[0](reference[1](p["x"]), p["mask"]) for p in pieces(given, 4)]
    else:
        expected = each(reference[0], given, 4)
    torch.cat(expected).square().sum().backward()
    with roundpipe.compile(model, devices=["cpu"] * 2) as piped:
        x = first(given["x"]) if front else given["x"]
        output = piped(x, given["mask"], roundpipe_run_config=config(4))
        output.square().sum().backward()
        piped.synchronize()
        torch.testing.assert_close(output, torch.cat(expected), rtol=0, atol=1e-12)
        assert_same(gradients(nn.ModuleList([model, first])), gradients(reference), 1e-12)
        assert piped._session.engine.steps.num_begun == 2  # see above
        with torch.no_grad():
            again = piped(given["x"], given["mask"], roundpipe_run_config=config(7))
        assert again.shape == output.shape


def test_statistics_are_kept_in_the_order_of_microbatches():
    model = Masked(norm=True).double()
    reference, given = copy.deepcopy(model), arguments(8)
    given["mask"][5] = 0
    for output in each(reference, given, 4):
        output.square().sum().backward()
    with roundpipe.compile(model, devices=["cpu"] * 2) as piped:
        piped.forward_backward(input_kwargs=given, loss_fn=total, run_config=config(4))
        piped.synchronize()
        assert_same(gradients(model), gradients(reference), 1e-10)
        assert_same(buffers(model), buffers(reference), 1e-12)
        assert piped._session.engine.steps.num_begun == 1  # see above


def test_a_limit_of_memory_and_asynchronous_steps_hold():
    model, plain = Masked().double(), arguments()
    reference = copy.deepcopy(model)
    states = [{name: value.detach().clone() for name, value in reference.named_parameters()}] * 2
    for _ in range(4):
        reference.load_state_dict(states[-2])
        reference.zero_grad()
        sum(total(output, None) for output in each(reference, plain, 4)).backward()
        states.append({name: states[-1][name] - 1e-3 * p.grad for name, p in reference.named_parameters()})
    limited = [roundpipe.Device("cpu", memory_bytes=1 << 16)] * 2
    with roundpipe.compile(model, devices=limited) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=1e-3)
        for _ in range(4):
            piped.forward_backward(input_kwargs=plain, loss_fn=total, run_config=config(4))
            piped.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        piped.synchronize()
        assert_same({name: p.detach() for name, p in model.named_parameters()}, states[-1], 1e-12)


def test_an_error_names_the_module_as_in_a_layer_of_its_own():
    class Fails(nn.Linear):
        def forward(self, value):
            if not torch.compiler.is_compiling() and type(value) is torch.Tensor and value.isnan().any():
                raise RuntimeError("not a number")
            return super().forward(value)

    model = Masked().double()
    model.blocks[2].other = Fails(WIDTH, WIDTH).double()
    given = arguments()
    with roundpipe.compile(model, devices="cpu") as piped:
        piped.forward_backward(input_kwargs=given, loss_fn=total, run_config=config(4))
        given["x"][0] = torch.nan
        with pytest.raises(RuntimeError, match="not a number") as caught:
            piped.forward_backward(input_kwargs=given, loss_fn=total, run_config=config(4))
    assert any("module blocks.2.other" in note for note in caught.value.__notes__)


class Longer(Masked):
    """Leaves out blocks for a mask of ones."""

    def forward(self, x, mask):
        for block in self.blocks[: 2 if bool(mask.all()) else 4]:
            x = block(x, None)
        return self.head(x)


def test_several_rounds_are_logged_once(caplog):
    model, given = Longer().double(), arguments()
    with roundpipe.compile(model, devices="cpu") as piped:
        for _ in range(2):
            piped.forward_backward(input_kwargs=list(pieces(given, 4)), loss_fn=total)
    assert caplog.text.count("one call runs as 3 rounds") == 1


class Classifier(Masked):
    """Computes its own loss, of many more classes than it is wide."""

    def __init__(self):
        super().__init__(depth=2)
        self.head = nn.Linear(WIDTH, 4096)

    def forward(self, x, mask, target):
        logits = super().forward(x, mask)
        return {"loss": F.cross_entropy(logits, target), "logits": logits}


def test_the_loss_is_a_part_of_the_last_layer_of_each(runs):
    model, given = Classifier().double(), arguments(128)
    given["target"] = torch.arange(128).masked_fill(given["x"][:, 0] > 1, -100)
    reference = copy.deepcopy(model)
    expected = reference(**given)["loss"]
    expected.backward()
    logits_bytes = 64 * 4096 * 8
    with roundpipe.compile(model, devices=[roundpipe.Device("cpu", memory_bytes=logits_bytes // 2)]) as piped:
        found = piped.forward_backward(
            input_kwargs=list(pieces(given, 2)), loss_fn=lambda outputs, _: outputs["loss"], loss_reduction="mean"
        )
        assert runs["tiled in tail"] >= 2 and piped.trace_count == 2
        assert piped.peak_device_bytes() <= logits_bytes // 2
    torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-12)
    assert_same(gradients(model), gradients(reference), 1e-12)
