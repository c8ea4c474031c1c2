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
from roundpipe.core.errors import TraceCause

DTYPE = torch.float64


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Skipping(nn.Module):
    """Blocks, of which the first feeds the last as well; any batch, any length."""

    def __init__(self, width: int = 16, num_blocks: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(width, 3)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        first = x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = self.dropout(block(x))
        return {"scores": self.head(x + first) * scale, "hidden": x}


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


def loss_of(outputs: Any, label: Any = None) -> torch.Tensor:
    tensor = outputs["scores"] if isinstance(outputs, dict) else outputs
    return tensor.square().sum()


def batch(size: int = 6, length: int = 5) -> torch.Tensor:
    return torch.randn(size, length, 16, dtype=DTYPE)


def compiled(model: nn.Module, *, workers: int = 2, **options: Any) -> Any:
    return roundpipe.compile(model, devices=["cpu"] * workers, **options)


def assert_a_call_is_eager(pipe: Any, model: nn.Module, x: torch.Tensor) -> None:
    """One forward and backward against the same microbatches in eager."""
    reference = copy.deepcopy(model)
    reference.zero_grad()
    pipe.zero_grad()
    expected = torch.zeros((), dtype=DTYPE)
    for piece in torch.tensor_split(x, 2):
        loss = loss_of(reference(piece))
        loss.backward()
        expected += loss.detach()
    found = pipe.forward_backward((x,), loss_fn=loss_of, run_config=RoundPipeRunConfig(num_microbatch=2))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    pipe.synchronize()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad, theirs.grad, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: name + text
        )


def chain_of(pipe: Any) -> Any:
    chain = pipe._runner.source.latest
    assert chain is not None
    return chain


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
    model, x = Skipping().to(DTYPE), batch()
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
        assert list(pipe._runner.source.opaque) == ["3"]
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
                assert len(found) == 2 and all(one.filename == __file__ for one in caught), found
                assert re.search(
                    r"Root runs module by module.*test_api\.py:\d+ \(if x.sum\(\) > 0.*torch\.where",
                    found[0],
                )
                assert "nothing overlaps" in found[1]
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
        assert pipe.trace_count == 2
        assert layers_shown(str(pipe)) == layers_shown(table)


def test_options_of_the_fallback_hold_at_the_first_call() -> None:
    model = BranchingRoot().to(DTYPE)
    sizes: list[int] = []
    model.block.register_forward_hook(lambda module, args, output: sizes.append(len(output)))
    override = {model.block: RoundPipeRunConfig(num_microbatch=1)}
    with compiled(model, skip_modules=[model.block.up], lower_threshold=0, override_config=override) as pipe:
        with pytest.warns(UserWarning) as caught, torch.no_grad():
            pipe(batch())
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


def test_the_partition_is_shown() -> None:
    model = Skipping().to(DTYPE)
    with compiled(model, example_args=(batch(),), name="shown") as pipe:
        table = pipe.partition_table()
        assert str(pipe) == repr(pipe) == table
    assert table.startswith("shown: ")
    header, *stages = [line for line in table.splitlines() if line.startswith(("layer ", "stage "))]
    for column in ("covers", "parameters", "weights", "forward", "backward", "carries"):
        assert column in header and all(column in line for line in stages)
    assert len(stages) == 1 and "balance (heaviest / mean)" in table and "blocks" in table


def test_balance_by_size_and_by_a_function_cut_elsewhere() -> None:
    class Uneven(nn.Module):
        """One weight that much is computed with, then many weights that little is computed with."""

        def __init__(self) -> None:
            super().__init__()
            self.mixing = nn.ModuleList(nn.Conv1d(16, 16, 5, padding=2) for _ in range(8))
            self.wide = nn.ModuleList(nn.Linear(16, 4096) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.mT
            for one in self.mixing:
                x = one(x).tanh()
            x = x.mean(-1)
            return self.wide[0](x) + self.wide[1](x)

    weights: list[nn.Module] = []

    def one_each(module: nn.Module) -> float:
        weights.append(module)
        return 1.0

    found = {}
    for balance in ("time", "size", one_each):
        with compiled(Uneven().to(DTYPE), example_args=(batch(4, 200),), balance=balance) as pipe:
            found[balance] = [spec.module_names for spec in chain_of(pipe).specs]
    num_convolutions = {
        balance: [sum("mixing" in name for name in names) for names in layers] for balance, layers in found.items()
    }
    assert max(num_convolutions["time"]) <= 4 < max(num_convolutions["size"]), "they take time, and have few weights"
    assert {type(module) for module in weights} == {nn.Conv1d, nn.Linear}
    assert len(found[one_each]) > len(found["size"])


@pytest.mark.parametrize("balance", ["time", "size", lambda module: float(type(module) is nn.Linear)])
def test_every_balance_gives_the_same_numbers(balance: Any) -> None:
    model = Skipping().to(DTYPE)
    with compiled(model, example_args=(batch(),), balance=balance) as pipe:
        assert_a_call_is_eager(pipe, model, batch())


def test_trained_weights_are_saved_by_the_original_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    keys, ids = list(model.state_dict()), torch.randint(96, (4, 9))
    owners = {name: id(parameter) for name, parameter in model.named_parameters()}
    with compiled(model) as pipe:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
        before = model.lm_head.weight.detach().clone()
        pipe.forward_backward(
            input_kwargs={"input_ids": ids}, loss_fn=lambda outputs, _: outputs.logits.square().mean()
        )
        pipe.step(optimizer.step)
        pipe.synchronize()
        assert list(pipe.state_dict()) == keys
        assert {name: id(parameter) for name, parameter in model.named_parameters()} == owners
        assert not torch.equal(model.lm_head.weight, before)
        pipe.save_pretrained(tmp_path)
        loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(loaded.eval()(input_ids=ids).logits, model(input_ids=ids).logits)


def test_adapters_are_saved_as_adapters(tmp_path: Path) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(config)
    plain = copy.deepcopy(base)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    ids = torch.randint(96, (4, 9))
    with compiled(model) as pipe:
        assert all("lora_" in name for name, _ in pipe.optim_named_parameters())
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.5)
        for _ in range(2):
            pipe.forward_backward(
                input_kwargs={"input_ids": ids}, loss_fn=lambda outputs, _: outputs.logits.square().mean()
            )
            pipe.step(optimizer.step, is_async=False)
        pipe.synchronize()
        pipe.save_pretrained(tmp_path)
        with torch.no_grad():
            expected = model.eval()(input_ids=ids).logits
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits, expected)


def test_a_meta_model_is_planned_without_memory() -> None:
    width, num_layers = 8192, 12
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(num_layers)))
        example = torch.empty(4, width)
    page = os.sysconf("SC_PAGE_SIZE")

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * page

    before = resident()
    with compiled(model, example_args=(example,)) as pipe:
        table = pipe.partition_table()
    assert resident() - before < 200e6 < 4 * width**2 * num_layers
    assert "GiB" in table and f"{num_layers} layers" in table


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"example_args": [1]}, "give a tuple"),
        ({"balance": "weight"}, "'time', 'size' or a function"),
        ({"devices": []}, "names no device"),
        ({"pin_model": "yes"}, "'alloc', 'register' and 'off'"),
        ({"optim_dtype": torch.int8}, "floating-point"),
    ],
)
def test_bad_options_say_what_is_allowed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        roundpipe.compile(Skipping(), **options)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="an nn.Module, got function"):
        roundpipe.compile(lambda x: x)  # type: ignore[arg-type]
    with compiled(Skipping()) as pipe, pytest.raises(ConfigError, match="compiled already"):
        roundpipe.compile(pipe)


def test_the_config_keyword_is_not_passed_on() -> None:
    class Strict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor, **others: Any) -> torch.Tensor:
            assert not others
            return self.inner(x)

    model, x = Strict().to(DTYPE), batch()
    with compiled(model, example_args=(x,)) as pipe, torch.no_grad():
        expected = model(x)
        config = RoundPipeRunConfig(num_microbatch=3)
        for call in (pipe, pipe.forward):
            torch.testing.assert_close(call(x, roundpipe_run_config=config), expected)
            torch.testing.assert_close(call(x=x), expected)


def test_gradients_flow_to_and_through_the_inputs() -> None:
    model, front = Skipping().to(DTYPE), nn.Linear(16, 16).to(DTYPE)
    reference = copy.deepcopy(front)
    x = batch()
    loss_of(model(reference(x))).backward()
    model.zero_grad()
    with compiled(model, example_args=(x,)) as pipe:
        loss_of(pipe(front(x))).backward()
        for ours, theirs in zip(front.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        front.zero_grad()
        pipe.forward_backward((front(x),), loss_fn=loss_of)
    for ours, theirs in zip(front.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


# What the model's forward raises itself


class Forgetful(nn.Module):
    """Its author forgot a module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.missing(self.inner(x))


def test_what_the_forward_raises_in_eager_too_is_raised_as_it_is() -> None:
    model, x = Forgetful(), torch.randn(3, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in ({"example_args": (x,)}, {}):
            with pytest.raises(AttributeError, match="no attribute 'missing'") as caught:
                compiled(model, **options)(x)
            (note,) = caught.value.__notes__
            assert re.search(
                r"forward of Forgetful raises AttributeError at .*test_api\.py:\d+.*without roundpipe", note
            )
            assert "submodule" not in note
    assert model.calls == 0
    found = roundpipe.explain(model, (x,))
    assert isinstance(found.error, TraceError) and isinstance(found.error.__cause__, AttributeError)
    assert "submodule" not in str(found) and "on the CPU" not in str(found)
    without_data = roundpipe.explain(Forgetful().to("meta"), (x,))
    assert without_data.error is not None and without_data.error.cause is TraceCause.MODEL_ERROR


def test_after_a_call_with_wrong_arguments_the_model_is_traced() -> None:
    model = Skipping()
    with compiled(model) as pipe:
        with pytest.raises(RuntimeError):
            pipe(torch.randn(3, 5))
        x = torch.randn(4, 16)
        torch.testing.assert_close(pipe(x)["scores"], model(x)["scores"])
        assert pipe._runner.fallback is None


def test_a_copys_fallback_knows_the_copys_modules() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with roundpipe.compile(model, devices=["cpu"]) as pipe, copy.deepcopy(pipe) as copied:
        # nothing public tells, unless a trace fails with a module that must run once
        on_failure, make_fallback = copied._runner.source._on_failure, copied._runner.make_fallback
        assert on_failure.__self__.choice is make_fallback.__self__
        assert make_fallback.__self__.model is copied.model is not model
