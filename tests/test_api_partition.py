"""What `compile` shows, balances, saves and refuses."""

from __future__ import annotations

import copy
import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import ConfigError, RoundPipeRunConfig, TraceError
from roundpipe.core.errors import TraceCause
from tests.cases_api import DTYPE, Skipping, assert_a_call_is_eager, batch, chain_of, compiled, loss_of


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
    with compiled(Skipping()) as pipe, pytest.raises(ConfigError, match="already; pass the original"):
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
                r"forward of Forgetful raises AttributeError at .*test_api_partition\.py:\d+.*raises it, too", note
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
        assert pipe._runner.fallback is None  # its table is of the latest trace


def test_a_copys_fallback_knows_the_copys_modules() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with roundpipe.compile(model, devices=["cpu"]) as pipe, copy.deepcopy(pipe) as copied:
        # nothing public tells, unless a trace fails with a module that must run once
        on_failure, make_fallback = copied._runner.source._on_failure, copied._runner.make_fallback
        assert on_failure.__self__ is make_fallback.__self__
        assert make_fallback.__self__.model is copied.model is not model
