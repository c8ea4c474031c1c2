"""`roundpipe.compile` from the outside: what it returns, when it traces, what it refuses; numbers are eager's."""

from __future__ import annotations

import copy
import logging
import os
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import AutoRoundPipe, ConfigError, RoundPipe, RoundPipeRunConfig, TraceError
from tests.cases_api import DTYPE, Block, Skipping, assert_a_call_is_eager, batch, chain_of, compiled, loss_of


class Gate(nn.Module):
    """Branches on its data."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if x.sum() > 0 else x * 2


class BranchingRoot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(x)
        if x.sum() > 0:  # the line that the warning names
            return x
        return x * 2


def test_any_module_becomes_a_chain_of_generated_layers() -> None:
    model = Skipping().to(DTYPE)
    with compiled(model, example_args=(batch(),)) as pipe:
        chain = chain_of(pipe)
        assert type(pipe) is RoundPipe and isinstance(chain, nn.Sequential)
        assert len(chain) >= 5 and all(isinstance(layer, torch.fx.GraphModule) for layer in chain)
        assert_a_call_is_eager(pipe, model, batch())


def test_without_an_example_the_first_call_traces() -> None:
    model = Skipping().to(DTYPE)
    with compiled(model) as pipe:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
        assert pipe.trace_count == 0 and "not traced yet" in pipe.partition_table()
        assert_a_call_is_eager(pipe, model, batch())
        before = model.head.weight.clone()
        pipe.step(optimizer.step, is_async=False)
        assert pipe.trace_count == 1 and not torch.equal(model.head.weight, before)


def test_the_models_own_example_shows_the_partition_and_serves_calls() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    assert isinstance(model.dummy_inputs, dict)
    with compiled(model) as pipe:
        assert pipe.trace_count == 0
        assert "model.layers.1" in pipe.partition_table() or "model.layers.0 .. " in pipe.partition_table()
        assert pipe.trace_count == 1
        with torch.no_grad():
            for size, length in ((4, 9), (6, 12)):
                ids = torch.randint(96, (size, length))
                torch.testing.assert_close(pipe(input_ids=ids).logits, model(input_ids=ids).logits)


class Keeping(nn.Module):
    """Returns what each block computed on the way, if it is told to."""

    def __init__(self, use_cache: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=use_cache)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        kept = []
        for block in self.blocks:
            made = block(x)
            kept.append((made, made * 2))
            x = x + made
        return {"out": x, "kept": kept if self.config.use_cache else None}


@pytest.mark.parametrize("use_cache", [True, False])
def test_outputs_that_are_most_of_what_is_carried_are_told_of(use_cache: bool, caplog: Any) -> None:
    model = Keeping(use_cache)
    x = torch.randn(6, 16)
    with caplog.at_level(logging.WARNING, "roundpipe"), roundpipe.compile(model, devices=["cpu"]) as pipe:
        with torch.no_grad():
            pipe(x)
        assert not caplog.records, "nothing is kept for a backward, and generation needs caches"
    with caplog.at_level(logging.WARNING, "roundpipe"):
        with roundpipe.compile(model, example_args=(x,), devices=["cpu"]) as pipe:
            pipe(x)
    if use_cache:
        (record,) = caplog.records
        assert "outputs ['kept'][0][0], ['kept'][0][1]" in record.message and "more" in record.message
        assert "5,376 bytes" in record.message and "these read 384" in record.message
        assert "config.use_cache = False avoids" in record.message
    else:
        assert not caplog.records


def test_one_trace_serves_every_batch_size() -> None:
    model = Skipping().to(DTYPE)
    with compiled(model, example_args=(batch(),)) as pipe:
        for size in (6, 2, 9, 3):
            assert_a_call_is_eager(pipe, model, batch(size))
        assert pipe.trace_count == 1


def test_one_trace_serves_every_length_of_token_ids() -> None:
    embedded = nn.Sequential(nn.Embedding(50, 16), *(Block(16) for _ in range(3))).to(DTYPE)
    with compiled(embedded, example_args=(torch.randint(50, (4, 7)),)) as pipe:
        for size, length in ((6, 5), (2, 11), (9, 3)):
            assert_a_call_is_eager(pipe, embedded, torch.randint(50, (size, length)))
        assert pipe.trace_count == 1


def test_a_second_trace_serves_every_length_of_float_inputs() -> None:
    """A float input's length may be a number of features, so it is open only once it was seen to vary."""
    model = Skipping().to(DTYPE)
    with compiled(model, example_args=(batch(),)) as pipe:
        for length in (5, 3, 11, 7, 5):
            assert_a_call_is_eager(pipe, model, batch(4, length))
        assert pipe.trace_count == 2


def test_a_failed_guard_traces_again_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    model = Skipping().to(DTYPE)
    caplog.set_level(logging.INFO, logger="roundpipe")
    with compiled(model, example_args=(batch(), 1.0)) as pipe, torch.no_grad():
        assert not any("tracing Skipping again" in text for text in caplog.messages)
        for scale in (1.0, 2.5, 1.0, 2.5):
            x = batch()
            torch.testing.assert_close(pipe(x, scale)["scores"], model(x, scale)["scores"])
        assert pipe.trace_count == 2, "both are kept"
    assert sum("tracing Skipping again" in text for text in caplog.messages) == 1


def test_traces_one_after_the_other_are_warned_of() -> None:
    """Also where every call has several microbatches, of which only the first is traced."""

    class Rooted(Skipping):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
            return super().forward(x, float(f"{scale}"))

    model, x = Rooted().to(DTYPE), batch()
    with compiled(model, example_args=(x, 0.5)) as pipe, torch.no_grad():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for number in range(4):
                pipe(x, float(number + 2))
            for _ in range(30):
                pipe(x, 5.0)
            for number in range(4):
                pipe(x, float(number + 12))
        with pytest.warns(UserWarning, match="was traced 10 times, the last 5 one after the other"):
            pipe(x, 22.0)


def test_training_and_evaluation_take_a_trace_each() -> None:
    model = Skipping(dropout=0.4).to(DTYPE)
    with compiled(model, example_args=(batch(),)) as pipe:
        x = batch()
        for _ in range(2):
            pipe.train()
            torch.manual_seed(1)
            first = pipe(x)["scores"].detach()
            pipe.eval()
            with torch.no_grad():
                torch.testing.assert_close(pipe(x)["scores"], model(x)["scores"])
                assert not torch.equal(first, model(x)["scores"])
        assert pipe.trace_count <= 2


def test_dropout_is_fixed_by_the_seed_for_any_rotation() -> None:
    found = []
    for workers in (1, 2, 3):
        torch.manual_seed(3)
        model = Skipping(dropout=0.4).to(DTYPE)
        x = batch()
        with compiled(model, example_args=(x,), workers=workers) as pipe:
            torch.manual_seed(7)
            loss = pipe.forward_backward((x,), loss_fn=loss_of, run_config=RoundPipeRunConfig(num_microbatch=3))
            pipe.synchronize()
            found.append([loss, *(parameter.grad for parameter in model.parameters())])
    for other in found[1:]:  # another rotation has another plan, which adds in another order
        torch.testing.assert_close(other, found[0], rtol=1e-12, atol=1e-12)


def test_a_submodule_that_can_not_be_traced_stays_whole_and_the_rest_is_cut() -> None:
    model = nn.Sequential(*(Block(16) for _ in range(3)), Gate(), *(Block(16) for _ in range(3))).to(DTYPE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe = compiled(model, example_args=(batch(),))
    with pipe:
        assert type(pipe) is RoundPipe and len(chain_of(pipe)) >= 5
        assert list(pipe._runner.source.opaque) == ["3"]  # `explain` would trace it again
        assert_a_call_is_eager(pipe, model, batch())


def test_a_branch_on_data_is_never_burned_in() -> None:
    model = nn.Sequential(Block(16), Gate(), nn.Linear(16, 16)).to(DTYPE)
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.zero_()  # so the sign of the input decides
    with compiled(model, example_args=(batch().abs(),)) as pipe:
        for x in (batch().abs(), -batch().abs(), batch().abs()):
            assert_a_call_is_eager(pipe, model, x)


def test_a_root_that_can_not_be_traced_falls_back_with_one_warning() -> None:
    model = BranchingRoot().to(DTYPE)
    with pytest.warns(UserWarning) as caught:
        pipe = compiled(model, example_args=(batch(),))
    (warning,) = [str(one.message) for one in caught]
    source = Path(__file__).read_text().splitlines()
    line = next(
        number for number, text in enumerate(source, 1) if "the line that the warning names" in text and "#" in text
    )
    assert f"{os.path.basename(__file__)}:{line}" in warning or (f"line {line}" in warning and "test_api" in warning)
    assert "BranchingRoot" in warning and "AutoRoundPipe" in warning
    with pipe:
        assert isinstance(pipe, AutoRoundPipe)
        with pytest.warns(UserWarning, match="nothing overlaps"):
            assert_a_call_is_eager(pipe, model, batch())


def test_without_fallback_it_raises() -> None:
    with pytest.raises(TraceError, match="test_api.py"):
        compiled(BranchingRoot().to(DTYPE), example_args=(batch(),), fallback=False)
    with compiled(BranchingRoot().to(DTYPE), fallback=False) as pipe:
        for _ in range(2):
            with pytest.raises(TraceError, match=r"test_api\.py:\d+.*torch\.where"):
                pipe(batch())
            with pytest.raises(TraceError, match=r"test_api\.py"):
                pipe.forward_backward((batch(),), loss_fn=loss_of)


class BranchingInEval(BranchingRoot):
    """Can be traced in training mode only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) if self.training else super().forward(x)


def test_a_root_found_untraceable_at_the_first_call_falls_back_with_its_optimizer() -> None:
    model = BranchingRoot().to(DTYPE)
    reference = copy.deepcopy(model)
    with compiled(model, name="late") as pipe:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=1e-2, momentum=0.9)
        eager = torch.optim.SGD(reference.parameters(), lr=1e-2, momentum=0.9)
        assert "not traced yet" in pipe.partition_table()
        for step in range(3):
            x = batch()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                pipe.forward_backward((x,), loss_fn=loss_of, run_config=RoundPipeRunConfig(num_microbatch=2))
            found = [str(one.message) for one in caught]
            if step == 0:
                assert len(found) == 3 and all(one.filename == __file__ for one in caught), found
                assert re.search(
                    r"Root runs module by module.*test_api\.py:\d+ \(if x.sum\(\) > 0.*torch\.where",
                    found[0],
                )
                assert "nothing overlaps" in found[1]
                assert "its forward decides by an activation, and each microbatch decides by its own, so" in found[2]
                assert "late: own forward on the CPU, parts on the devices" in str(pipe) and "block" in str(pipe)
            else:
                assert not found
            for piece in x.tensor_split(2):
                loss_of(reference(piece)).backward()
            pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
            eager.step()
            eager.zero_grad()
        pipe.synchronize()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
        assert pipe.trace_count == 1
        with torch.no_grad():
            torch.testing.assert_close(pipe(x), torch.cat([reference(piece) for piece in x.tensor_split(3)]))


def layers_shown(table: str) -> list[list[str]]:
    """The first layers of a partition table and what they cover; their times may be measured by now."""
    return [re.split("  +", line)[:2] for line in table.splitlines()[4:6]]


def test_only_the_calls_that_can_not_be_traced_fall_back() -> None:
    model = BranchingInEval().to(DTYPE)
    with compiled(model, example_args=(batch(),)) as pipe:
        table = str(pipe)
        assert_a_call_is_eager(pipe, model, batch())
        pipe.eval()
        with pytest.warns(UserWarning, match="module by module"), torch.no_grad():
            found = pipe(batch())
        assert found.shape == (6, 5, 16)
        pipe.train()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_a_call_is_eager(pipe, model, batch())  # not a fallback: it would warn that nothing overlaps
        assert pipe.trace_count == 3  # a piece of a batch and the batch
        assert layers_shown(str(pipe)) == layers_shown(table)


def test_options_of_the_fallback_hold_at_the_first_call() -> None:
    model = BranchingRoot().to(DTYPE)
    sizes: list[int] = []
    model.block.register_forward_hook(lambda module, args, output: sizes.append(len(output)))
    override = {model.block: RoundPipeRunConfig(num_microbatch=1)}
    with compiled(model, skip_modules=[model.block.up], lower_threshold=0, override_config=override) as pipe:
        with pytest.warns(UserWarning) as caught, torch.no_grad():
            pipe(batch(), roundpipe_run_config=RoundPipeRunConfig(num_microbatch=3))
    messages = [str(one.message) for one in caught]
    assert any("skip_modules: block.up is inside" in text for text in messages), messages
    assert sizes == [2, 2, 2]
    with pytest.raises(ConfigError, match="lower_threshold=-1"):
        compiled(model, lower_threshold=-1)


def test_an_example_of_its_own_that_can_not_be_traced_decides_nothing() -> None:
    class Odd(BranchingInEval):
        @property
        def dummy_inputs(self) -> dict[str, torch.Tensor]:
            return {"x": torch.zeros(2, 3, 99)}  # the wrong width

    model = Odd().to(DTYPE)
    with compiled(model) as pipe:
        assert "not traced yet" in str(pipe)
        assert_a_call_is_eager(pipe, model, batch())
        assert "layer" in str(pipe)
