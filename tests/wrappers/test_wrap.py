"""Wrapping module by module: what becomes a pipeline, and that the numbers stay eager's."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import AutoRoundPipe, ConfigError, RoundPipe
from tests.equality import assert_same_gradients, eager_forward_backward
from tests.repeats import repeats
from tests.wrappers.cases_wrap import (
    DEVICES,
    THREE,
    TOLERANCE,
    Branching,
    Nested,
    inputs,
    quiet,
    squared,
    train_like_eager,
    tree_parts,
    wrapped,
)


def test_the_fallback_of_compile_trains_like_eager() -> None:
    def compiled(model: nn.Module) -> RoundPipe:
        with pytest.warns(UserWarning, match=r"Branching runs module by module.*cases_wrap\.py:\d+"):
            return roundpipe.compile(model, example_args=(inputs()["x"],), devices=DEVICES)

    model = Branching().double()
    train_like_eager(model, compiled)
    assert model.num_calls == 9
    assert float(model.seen) == 36


def test_the_fallback_of_compile_splits_the_model_not_its_modules() -> None:
    model = Branching().double()
    reference = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="module by module"):
        pipe = roundpipe.compile(model, example_args=(inputs()["x"],), devices=DEVICES)
    with pipe, torch.no_grad():
        batch = inputs()
        found = pipe(**batch, roundpipe_run_config=THREE)
        expected = torch.cat([reference(one) for one in batch["x"].tensor_split(3)])
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert model.num_calls == 3


def test_the_fallback_of_compile_fits_a_device_smaller_than_the_model() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(128, 128) for _ in range(12)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x * 2 if x.sum() > 0 else x

    model = Deep()
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    device = roundpipe.Device("cpu", memory_bytes=weight_bytes // 2)
    with pytest.warns(UserWarning, match="module by module"):
        pipe = roundpipe.compile(model, example_args=(torch.randn(4, 128),), devices=[device])
    with pipe:
        quiet(lambda: pipe.forward_backward((torch.randn(4, 128),), loss_fn=squared))
        assert 0 < pipe.peak_device_bytes() < weight_bytes // 2


def test_options_of_the_fallback() -> None:
    model = Branching().double()
    with pytest.warns(UserWarning, match="module by module"):
        pipe = roundpipe.compile(model, example_args=(inputs()["x"],), devices=DEVICES, skip_modules=[model.blocks])
    assert set(tree_parts(pipe)) == {"embed", "norm", "head"}
    pipe.close()
    with pytest.raises(ConfigError, match="use_sequential_preset"):
        roundpipe.compile(model, use_sequential_preset=True)


@pytest.mark.parametrize(
    ("kind", "upper_threshold"),
    repeats(
        itertools.product(("branching", "nested"), (None, 0, 20_000)),
        ["branching-None", "nested-0", "nested-20000"],
    ),
)
def test_recursion_trains_like_eager(kind: str, upper_threshold: int | None) -> None:
    make = Branching if kind == "branching" else Nested
    train_like_eager(make().double(), lambda model: wrapped(model, upper_threshold=upper_threshold))


def test_skipped_modules_train_like_eager_on_the_host() -> None:
    model = Nested().double()
    skipped = [model.stem, model.branches["left"][1]]
    train_like_eager(model, lambda model: wrapped(model, skip_modules=skipped))


def test_everything_skipped_runs_on_the_host() -> None:
    model = Branching().double()
    train_like_eager(model, lambda model: wrapped(model, skip_modules=list(model.children())))


def test_asynchronous_steps_train_on_weights_one_step_old() -> None:
    """Modules on the host are as stale as those on the devices."""
    torch.manual_seed(1)
    model = Branching().double()
    reference = copy.deepcopy(model)
    rate = 1e-4
    batches = [inputs() for _ in range(4)]
    weights = [[one.detach().clone() for one in reference.parameters()]]
    for step, batch in enumerate(batches):
        with torch.no_grad():
            for one, old in zip(reference.parameters(), weights[max(step - 1, 0)], strict=True):
                one.copy_(old)
        reference.zero_grad()
        eager_forward_backward(reference, batch, squared, num_microbatches=3)
        gradients = [one.grad for one in reference.parameters()]
        weights.append([w - rate * g for w, g in zip(weights[-1], gradients, strict=True)])
    with wrapped(model, skip_modules=[model.embed]) as pipe:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=rate)
        for step, batch in enumerate(batches):

            def run(batch: dict[str, torch.Tensor] = batch) -> torch.Tensor:
                return pipe.forward_backward(input_kwargs=batch, loss_fn=squared)

            quiet(run) if step == 0 else run()
            pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        pipe.synchronize()
    for found, expected in zip(model.parameters(), weights[-1], strict=True):
        torch.testing.assert_close(found.detach(), expected, rtol=1e-9, atol=1e-12)


def test_forward_with_gradients_of_inputs() -> None:
    model = Nested().double().eval()
    reference = copy.deepcopy(model)
    x = inputs()["x"].requires_grad_()
    y = x.detach().clone().requires_grad_()
    with wrapped(model) as pipe:
        assert not pipe.training
        found, expected = pipe(x), reference(y)
        torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
        squared(found, None).backward()
        squared(expected, None).backward()
        pipe.synchronize()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-10, atol=TOLERANCE)
    assert_same_gradients(model, reference, 1e-10)


def test_gradients_flow_into_what_made_the_inputs() -> None:
    model = Branching().double()
    reference = copy.deepcopy(model)
    weight = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    other = weight.detach().clone().requires_grad_()
    x = inputs()["x"]
    with wrapped(model) as pipe:
        quiet(lambda: pipe.forward_backward((x @ weight,), loss_fn=squared))
    made = x @ other
    for piece in made.tensor_split(3):
        squared(reference(piece), None).backward(retain_graph=True)
    torch.testing.assert_close(weight.grad, other.grad, rtol=1e-10, atol=TOLERANCE)


def test_outputs_and_several_losses() -> None:
    model = Nested().double().eval()
    batch = inputs(7)
    label = torch.randn(7, 4, dtype=torch.float64)
    counts: list[int] = []

    def both(output: torch.Tensor, wanted: torch.Tensor) -> list[torch.Tensor]:
        counts.append(roundpipe.num_microbatches())
        return [(output - wanted).abs().sum(), output.sum()]

    with wrapped(model) as pipe:
        (first, second), outputs = quiet(
            lambda: pipe.forward_backward(input_kwargs=batch, label=label, loss_fn=both, return_outputs=True)
        )
    expected = copy.deepcopy(model)(**batch).detach()
    torch.testing.assert_close(outputs, expected, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(first, (expected - label).abs().sum())
    torch.testing.assert_close(second, expected.sum())
    assert counts == [3, 3, 3]


def test_a_sequential_is_a_pipeline_with_a_layer_per_child() -> None:
    with wrapped(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])) as pipe:
        assert type(pipe) is RoundPipe
        pipe(torch.randn(4, 8))
        assert "4 layers" in pipe.partition_table()


def test_a_module_with_parameters_of_its_own_is_one_layer() -> None:
    class Own(Nested):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(5000))

    with wrapped(Own()) as pipe:
        assert "1 layer," in str(pipe)
    train_like_eager(Own().double(), wrapped)


def test_thresholds() -> None:
    model = Branching()  # float32: a block has 19 KB, 74 KB in all
    every_block = {f"blocks.{index}" for index in range(3)}
    with wrapped(model) as pipe:
        assert isinstance(pipe, AutoRoundPipe)
        assert set(tree_parts(pipe)) == {"embed", "norm", "head", *every_block}
    with wrapped(Nested(), upper_threshold=100_000) as pipe:
        assert "1 layer," in str(pipe)
    with wrapped(Nested(), upper_threshold=0) as pipe:
        assert "stem" in tree_parts(pipe)
        assert "shared" not in tree_parts(pipe)  # 9 KB, below lower_threshold and above upper_threshold
    with wrapped(Nested(), upper_threshold=0, lower_threshold=9000) as pipe:
        assert "shared" in tree_parts(pipe)


def test_small_parts_and_parts_with_the_batch_elsewhere_stay_in_one_piece() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.TransformerEncoderLayer(16, 2, 256, dropout=0.0)  # [S, B, D]
            self.wide = nn.Linear(16, 1024)
            self.small = nn.Linear(1024, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.small(self.wide(self.attention(x)))

    model = Attending().double()
    with wrapped(model, upper_threshold=150_000, lower_threshold=20_000) as pipe:
        given = {name: part.own_options.num_microbatch for name, part in tree_parts(pipe).items()}
        assert given == {"attention": 1, "wide": None, "small": 1}
        x = torch.randn(5, 4, 16, dtype=torch.float64)
        with torch.no_grad():
            torch.testing.assert_close(pipe(x), model(x), rtol=1e-10, atol=TOLERANCE)
