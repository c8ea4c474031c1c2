"""Models that can not be traced, and what must run on the host."""

from __future__ import annotations

import copy
import logging
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import roundpipe
from roundpipe import AutoRoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.wrappers.auto import HostRunner
from tests.equality import assert_same_gradients, eager_forward_backward
from tests.wrappers.cases_wrap import (
    DEVICES,
    TOLERANCE,
    WIDTH,
    Branching,
    block,
    inputs,
    parts_in,
    quiet,
    squared,
    train_like_eager,
    tree_parts,
    wrapped,
)


def test_a_model_that_can_not_be_traced(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(4, 8)
    with caplog.at_level(logging.INFO, "roundpipe.wrappers.parts_choice"):
        pipe = wrap_model_to_roundpipe(Branching(), devices=DEVICES, example_args=(x,))
    with pipe:
        assert isinstance(pipe, AutoRoundPipe)
    assert "cases_wrap.py" in caplog.text
    with pytest.raises(NotImplementedError, match=r"use_sequential_preset=True, but Branching.*cases_wrap\.py"):
        wrap_model_to_roundpipe(Branching(), True, devices=DEVICES, example_args=(x,))
    with wrap_model_to_roundpipe(Branching(), True, devices=DEVICES) as pipe:
        for _ in range(2):
            with pytest.raises(NotImplementedError):
                pipe(x)


def test_found_untraceable_at_the_first_call_it_is_wrapped_module_by_module() -> None:
    model = Branching().double()
    override = {model.blocks[1]: RoundPipeRunConfig(num_microbatch=2)}
    sizes: list[int] = []
    model.blocks[1][0].register_forward_hook(lambda module, args, output: sizes.append(len(output)))
    options: dict[str, Any] = {"skip_modules": [model.embed], "override_config": override, "devices": DEVICES}
    other = copy.deepcopy(model).eval()
    with wrap_model_to_roundpipe(other, devices=DEVICES) as pipe, torch.no_grad():
        batch = inputs()
        torch.testing.assert_close(pipe(**batch), other(**batch), rtol=TOLERANCE, atol=TOLERANCE)
    with wrap_model_to_roundpipe(model, **options) as pipe:
        with torch.no_grad():
            pipe(**inputs())
        inside = pipe._runner.fallback  # its parts' options show in no table
        assert sizes[-2:] == [6, 6] and isinstance(inside, HostRunner)
        assert set(parts_in(inside)) == {"norm", "head", *(f"blocks.{index}" for index in range(3))}
    train_like_eager(Branching().double(), lambda one: wrap_model_to_roundpipe(one, devices=DEVICES))


class Anneals(nn.Module):
    """Every call counts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.sizes = [*self.sizes, len(x)]
        return self.linear(x) / self.calls


class OneAnneals(nn.Module):
    def __init__(self, odd: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList([block(), odd, block()])
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for one in self.blocks:
            x = one(x)
        return self.head(x)


def test_around_what_must_run_once_the_devices_run_the_rest() -> None:
    model = OneAnneals(nn.Sequential(nn.Linear(WIDTH, WIDTH), Anneals(), nn.BatchNorm1d(WIDTH))).double()
    with wrapped(model) as pipe:
        inside = {"blocks.1.0", "blocks.1.1.linear", "blocks.1.2"}
        assert set(tree_parts(pipe)) == {"stem", "head", "blocks.0", "blocks.2", *inside}
    train_like_eager(model, wrapped)
    assert model.blocks[1][1].calls == 9 and model.blocks[1][1].sizes == [4] * 9


def test_a_hook_that_hands_something_on_runs_around_its_module() -> None:
    class Collects(OneAnneals):
        def __init__(self) -> None:
            super().__init__(block())
            self.features: list[torch.Tensor] = []
            self.blocks[1][0].register_forward_hook(self.keep)

        def keep(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
            self.features.append(output)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.features.clear()
            return super().forward(x) + sum(one.mean() for one in self.features)

    model = Collects().double()
    with wrapped(model) as pipe:
        assert {"blocks.0", "blocks.1.0"} <= set(tree_parts(pipe))
    train_like_eager(Collects().double(), wrapped)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_sequential_with_a_module_that_must_run_once(is_compiled: bool) -> None:
    model = nn.Sequential(nn.Linear(8, WIDTH), Anneals(), nn.Linear(WIDTH, 4)).double()
    reference = copy.deepcopy(model)
    x = inputs()["x"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = RoundPipeRunConfig(num_microbatch=3)  # it would not be cut by itself
        given = {"devices": DEVICES, "model_run_config": options}
        pipe = roundpipe.compile(model, example_args=(x,), **given) if is_compiled else wrapped(model)
        with pipe:
            assert isinstance(pipe, AutoRoundPipe)
            assert set(tree_parts(pipe)) == {"0", "1.linear", "2"}
            for _ in range(2):
                pipe.forward_backward((x,), loss_fn=squared)
                for piece in x.tensor_split(3):
                    squared(reference(piece), None).backward()
            pipe.synchronize()
    assert_same_gradients(model, reference, 1e-10)
    assert model[1].calls == reference[1].calls == 6
    assert not any("skip_modules" in str(one.message) for one in caught)


def test_weights_that_a_forward_writes() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(5, WIDTH, max_norm=0.5)
            self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.words(x.abs().long().clamp(max=4)[:, 0]))

    model = Words().double()
    with wrapped(model) as pipe:
        assert "head" in tree_parts(pipe)
    train_like_eager(model, wrapped)


@pytest.mark.parametrize("upper_threshold", [None, 100_000])
def test_a_hugging_face_model(upper_threshold: int | None) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).double()
    reference = copy.deepcopy(model)
    devices_of_loss: list[int] = []
    loss_function = type(model).loss_function.fget(model)
    model._loss_function = lambda *args, **kwargs: (devices_of_loss.append(1), loss_function(*args, **kwargs))[1]
    ids = torch.randint(0, 97, (6, 9))
    with wrapped(model, upper_threshold=upper_threshold) as pipe:
        assert any(name.startswith("model.layers.1") for name in tree_parts(pipe))
        found, expected = pipe(input_ids=ids, labels=ids), reference(input_ids=ids, labels=ids)
        assert devices_of_loss == [1]  # in one piece: the mean over all tokens
        torch.testing.assert_close(found.loss, expected.loss, rtol=TOLERANCE, atol=TOLERANCE)
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-10, atol=TOLERANCE)
        found.loss.backward()
        expected.loss.backward()
        pipe.synchronize()
        assert_same_gradients(model, reference, 1e-10)
        assert pipe.config is config and config.use_cache
        batch = {"input_ids": ids, "labels": ids}
        loss = quiet(lambda: pipe.forward_backward(input_kwargs=batch, loss_fn=lambda output, label: output.loss))
        eager = eager_forward_backward(reference, batch, lambda output, label: output.loss, num_microbatches=3)
        torch.testing.assert_close(loss, eager, rtol=TOLERANCE, atol=TOLERANCE)
        pipe.synchronize()
        assert_same_gradients(model, reference, 1e-10)
        assert list(pipe.state_dict()) == list(reference.state_dict())
        assert pipe.generate(ids[:1], max_new_tokens=2, do_sample=False).shape == (1, 11)


def test_functions_of_the_users_split_a_call_once() -> None:
    """Also the call in which the model is found to be untraceable."""
    model = Branching().double()
    calls: list[str] = []

    def split_input(args: Any, kwargs: Any, number: int) -> Any:
        calls.append("input")
        return [(one,) for one in args[0].tensor_split(number)], [kwargs] * number

    def split_label(label: torch.Tensor, number: int) -> list[torch.Tensor]:
        calls.append("label")
        return list(label.tensor_split(number))

    def loss_fn(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return ((output - label) ** 2).sum()

    config = RoundPipeRunConfig(split_input=split_input, split_label=split_label, num_microbatch=3)
    x, label = inputs()["x"], torch.randn(12, 4, dtype=torch.float64)
    reference = copy.deepcopy(model)
    with wrap_model_to_roundpipe(model, devices=DEVICES, model_run_config=config) as pipe:
        for _ in range(2):
            calls.clear()
            torch.testing.assert_close(pipe(x), torch.cat([reference(one) for one in x.tensor_split(3)]))
            assert calls == ["input"]
    model = copy.deepcopy(reference)
    with wrap_model_to_roundpipe(model, devices=DEVICES, model_run_config=config) as pipe:
        calls.clear()
        quiet(lambda: pipe.forward_backward((x,), label=label, loss_fn=loss_fn))
        assert calls == ["input", "label"]
        pipe.synchronize()
    reference.zero_grad()
    for one, wanted in zip(x.tensor_split(3), label.tensor_split(3), strict=True):
        loss_fn(reference(one), wanted).backward()
    assert_same_gradients(model, reference, 1e-10)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("with_example", [True, False])
def test_sparse_arguments_run_module_by_module(with_example: bool, layout: str) -> None:
    class Convolves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
            return self.last(torch.sparse.mm(adjacency, self.first(x).relu()))

    model = Convolves()
    reference = copy.deepcopy(model)
    x, dense = torch.randn(4, 8), (torch.rand(4, 4) > 0.5).float()
    adjacency = dense.to_sparse() if layout == "coo" else dense.to_sparse_csr()
    config = RoundPipeRunConfig(num_microbatch=1)
    options: dict[str, Any] = {"example_args": (x, adjacency)} if with_example else {}
    with pytest.warns(UserWarning, match="can't trace Convolves: the tensor at .*adjacency.* is a sparse one"):
        pipe = roundpipe.compile(model, devices=["cpu"] * 2, model_run_config=config, **options)
        found = pipe.forward_backward((x, adjacency), loss_fn=lambda output, _: output.square().sum())
    pipe.synchronize()
    expected = reference(x, adjacency).square().sum()
    expected.backward()
    torch.testing.assert_close(found, expected.detach())
    assert_same_gradients(model, reference, 1e-5)
    pipe.close()


class Forces(nn.Module):
    """An energy, and its gradient for the positions, which the loss goes through too."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(num_blocks))
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            h = x
            for block in self.blocks:
                h = block(h)
            energy = self.head(h).sum()
            (forces,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy, forces


@pytest.mark.filterwarnings("ignore:.*AutoRoundPipe")
@pytest.mark.parametrize("way", ["compile", "wrap"])
def test_a_model_that_differentiates_its_own_gradients_runs_on_the_host(way: str) -> None:
    model, x = Forces(3).double(), torch.randn(4, 6, dtype=torch.float64)
    reference = copy.deepcopy(model)

    def loss_fn(outputs: Any, _: Any) -> torch.Tensor:
        return outputs[0] + outputs[1].square().sum()

    options: dict[str, Any] = {"devices": ["cpu"], "model_run_config": RoundPipeRunConfig(num_microbatch=1)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if way == "compile":
            pipe = roundpipe.compile(model, **options)
        else:
            pipe = wrap_model_to_roundpipe(model, use_sequential_preset=False, lower_threshold=0, **options)
        with pipe:
            loss = pipe.forward_backward((x,), loss_fn=loss_fn)
            pipe.synchronize()
    assert any("all of it runs on the CPU" in str(one.message) for one in caught)
    expected = loss_fn(reference(x), None)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


class Reentrant(nn.Module):
    """Runs its blocks again in the backward; they depend on which samples come together."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0 * self.head.weight.sum()
        for one in self.blocks:
            x = checkpoint(one, x, use_reentrant=True)
        return self.head(x)


@pytest.mark.filterwarnings("ignore:.*AutoRoundPipe")
@pytest.mark.parametrize("way", ["forward_backward", "forward"])
def test_a_reentrant_checkpoint_around_a_part_repeats_the_same_call(way: str) -> None:
    model, x = Reentrant().double(), torch.randn(6, WIDTH, dtype=torch.float64)
    reference = copy.deepcopy(model)
    one_piece = RoundPipeRunConfig(num_microbatch=1)
    with wrap_model_to_roundpipe(model, use_sequential_preset=False, lower_threshold=64, devices=DEVICES) as pipe:
        assert "parts on the devices" in pipe.partition_table()
        if way == "forward":
            pipe(x, roundpipe_run_config=one_piece).square().sum().backward()
        else:
            pipe.forward_backward((x,), loss_fn=lambda y, _: y.square().sum(), run_config=one_piece)
        pipe.synchronize()
    reference(x).square().sum().backward()
    assert_same_gradients(model, reference, TOLERANCE)
    for ours, theirs in zip(model.modules(), reference.modules(), strict=True):
        if isinstance(theirs, nn.BatchNorm1d) and isinstance(ours, nn.BatchNorm1d):
            assert theirs.num_batches_tracked == ours.num_batches_tracked == 2
