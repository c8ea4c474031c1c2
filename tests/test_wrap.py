"""Wrapping module by module: what becomes a pipeline, and that the numbers stay eager's."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import roundpipe
from roundpipe import AutoRoundPipe, ConfigError, RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.wrappers.auto import HostRunner
from roundpipe.wrappers.part import Part
from tests.equality import assert_same_gradients, assert_same_state, eager_forward_backward

DEVICES = ["cpu", "cpu"]
WIDTH = 48
TOLERANCE = 1e-12


def block(width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, width))


class Branching(nn.Module):
    """Blocks in a list, around which the root decides by data."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList([block() for _ in range(3)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(()))
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        self.seen = self.seen + len(x)
        hidden = self.embed(x)
        for one in self.blocks:
            hidden = hidden + one(hidden)
        if hidden.abs().sum() > 0:
            hidden = 2 * hidden
        return self.head(self.norm(hidden)) * self.scale


class Nested(nn.Module):
    """Containers in containers, and a module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(8, WIDTH), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)))
        self.branches = nn.ModuleDict({"left": nn.ModuleList([block(), block()]), "right": block()})
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.activation = nn.ReLU(inplace=True)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(x)
        for one in self.branches["left"]:
            hidden = one(hidden) + hidden
        hidden = self.shared(hidden) + self.shared(self.branches["right"](hidden))
        return self.head(self.activation(hidden))


def squared(output: torch.Tensor, label: Any) -> torch.Tensor:
    return (output**2).sum()


def inputs(batch: int = 12) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(batch, 8, dtype=torch.float64)}


def quiet(call: Callable[[], Any]) -> Any:
    """A call that may warn, once, that nothing overlaps."""
    with pytest.warns(UserWarning, match="nothing overlaps"):
        return call()


def train_like_eager(model: nn.Module, wrap: Callable[[nn.Module], RoundPipe], steps: int = 3) -> None:
    """Losses, gradients, buffers and optimizer steps equal eager's."""
    reference = copy.deepcopy(model)
    parameters = list(model.parameters())
    with wrap(model) as pipe:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=1e-3, momentum=0.9)
        eager = torch.optim.SGD(reference.parameters(), lr=1e-3, momentum=0.9)
        for step in range(steps):
            batch = inputs()

            def run(batch: dict[str, torch.Tensor] = batch) -> torch.Tensor:
                return pipe.forward_backward(input_kwargs=batch, loss_fn=squared)

            loss = quiet(run) if step == 0 else run()
            expected = eager_forward_backward(reference, batch, squared, num_microbatches=3)
            torch.testing.assert_close(loss, expected, rtol=TOLERANCE, atol=TOLERANCE)
            pipe.synchronize()
            assert_same_gradients(model, reference, 1e-10)
            pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
            eager.step()
            eager.zero_grad()
        pipe.synchronize()
        assert_same_state(model, reference, 1e-10)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert not any(isinstance(module, RoundPipe) for module in model.modules())


def wrapped(model: nn.Module, **options: Any) -> Any:
    return wrap_model_to_roundpipe(model, use_sequential_preset=False, name="wrapped", devices=DEVICES, **options)


def tree_parts(pipe: Any) -> dict[str, Part]:
    """Qualified name -> part, in the wrapped tree, which no public name shows."""
    return parts_in(pipe._runner)


def parts_in(runner: HostRunner) -> dict[str, Part]:
    parts = {part.module: part for part in runner.tree.parts}
    named = runner.model.named_modules(remove_duplicate=False)
    return {name: parts[module] for name, module in named if module in parts}


# Numbers


def test_the_fallback_of_compile_trains_like_eager() -> None:
    def compiled(model: nn.Module) -> RoundPipe:
        with pytest.warns(UserWarning, match=r"Branching runs module by module.*test_wrap\.py:\d+"):
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
        found = pipe(**batch)
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


@pytest.mark.parametrize("make", [Branching, Nested])
@pytest.mark.parametrize("upper_threshold", [None, 0, 20_000])
def test_recursion_trains_like_eager(make: type[nn.Module], upper_threshold: int | None) -> None:
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


# The choice


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
        assert pipe._runner.tree.parts[0].module is pipe.model
    train_like_eager(Own().double(), wrapped)


def test_thresholds() -> None:
    model = Branching()  # float32: a block has 19 KB, 74 KB in all
    every_block = {f"blocks.{index}" for index in range(3)}
    with wrapped(model) as pipe:
        assert isinstance(pipe, AutoRoundPipe)
        assert set(tree_parts(pipe)) == {"embed", "norm", "head", *every_block}
    with wrapped(Nested(), upper_threshold=100_000) as pipe:
        assert pipe._runner.tree.parts[0].module is pipe.model
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


def test_override_config() -> None:
    model = Branching().double().eval()
    sizes: dict[str, list[int]] = {"first": [], "second": []}
    model.blocks[0][0].register_forward_hook(lambda module, args, output: sizes["first"].append(len(output)))
    model.blocks[1][0].register_forward_hook(lambda module, args, output: sizes["second"].append(len(output)))
    with wrapped(
        model,
        override_config={model.blocks[0]: RoundPipeRunConfig(num_microbatch=2)},
        model_run_config=RoundPipeRunConfig(num_microbatch=4),
    ) as pipe:
        with torch.no_grad():
            pipe(**inputs())
        assert sizes == {"first": [6, 6], "second": [3] * 4}
        with torch.no_grad():
            pipe(**inputs(), roundpipe_run_config=RoundPipeRunConfig(num_microbatch=3))
        assert sizes == {"first": [6] * 4, "second": [3] * 4 + [4] * 3}


def test_outputs_of_list_elements_kept_apart() -> None:
    class Straight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([block() for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for one in self.blocks:
                x = one(x)
                self.kinds.append(type(x).__name__)
            return x

    model = Straight().double().eval()
    model.kinds = []  # type: ignore[assignment]
    reference = copy.deepcopy(model)
    apart = {one: RoundPipeRunConfig(merge_output=False) for one in model.blocks[:-1]}
    x = torch.randn(9, WIDTH, dtype=torch.float64)
    with wrapped(model, override_config=apart) as pipe:
        found = pipe(x)
        assert model.kinds == ["RoundPipePackedData", "RoundPipePackedData", "Tensor"]
        squared(found, None).backward()
        pipe.synchronize()
    squared(reference(x), None).backward()
    torch.testing.assert_close(found, reference(x), rtol=TOLERANCE, atol=TOLERANCE)
    assert_same_gradients(model, reference, 1e-10)


def test_the_model_itself_skipped_is_given_back() -> None:
    model = Branching()
    assert wrapped(model, skip_modules=[model]) is model


@pytest.mark.parametrize("given", [3, "head", ["head"], [0], nn.Linear(2, 2), iter([])])
def test_skipped_modules_are_modules(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"skip_modules.*\[model\.head\]"):
        wrapped(Branching(), skip_modules=given)
    with pytest.raises(ConfigError, match=r"skip_modules.*\[model\.head\]"):
        roundpipe.compile(Branching(), skip_modules=given)


def test_options_without_effect_are_named() -> None:
    model = Branching()
    with pytest.warns(UserWarning, match=r"skip_modules: blocks\.1\.0 is inside"):
        wrapped(model, skip_modules=[model.blocks[1][0]]).close()
    with pytest.warns(UserWarning, match=r"override_config: the options of blocks have no effect"):
        wrapped(model, override_config={model.blocks: RoundPipeRunConfig()}).close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lower_threshold": -1}, "lower_threshold=-1"),
        ({"upper_threshold": "1GiB"}, "upper_threshold='1GiB'"),
        ({"override_config": {nn.Linear(1, 1): RoundPipeRunConfig()}}, "no module of the model"),
        ({"tensor_parallel": 2}, "tensor_parallel"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wrapped(Branching(), **options)


def test_a_wrapped_model_is_not_wrapped_again() -> None:
    with wrapped(Branching()) as pipe, pytest.raises(ConfigError, match="wrapped already"):
        wrapped(pipe)


# The graph compiler as the preset


class Traceable(Nested):
    """Says itself what it takes."""

    @property
    def dummy_inputs(self) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(4, 8)}


@pytest.mark.parametrize("preset", [None, True])
@pytest.mark.parametrize("options", [{}, {"example_args": (torch.randn(4, 8),)}])
def test_a_traceable_model_is_cut(preset: bool | None, options: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = Nested() if options else Traceable()
    with caplog.at_level(logging.INFO, "roundpipe.api"):
        pipe = wrap_model_to_roundpipe(model, preset, devices=DEVICES, **options)
    with pipe:
        assert type(pipe) is RoundPipe
        assert pipe.trace_count == 1
        assert len(caplog.records) == 1
        assert "graph compiler" in caplog.text
        pipe(torch.randn(6, 8))


class Misleading(Nested):
    """Has inherited an example that its forward does not take."""

    @property
    def dummy_inputs(self) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.ones(3, 5, dtype=torch.long)}


@pytest.mark.parametrize("preset", [None, True])
def test_an_example_of_its_own_that_does_not_fit_decides_nothing(
    preset: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "roundpipe.api"):
        pipe = wrap_model_to_roundpipe(Misleading(), preset, devices=DEVICES)
    with pipe:
        assert len(caplog.records) == 1 and "at its first call" in caplog.text
        assert "not traced yet" in pipe.partition_table()
        pipe(torch.randn(6, 8))
        assert pipe._runner.fallback is None and "layer" in pipe.partition_table()


def test_required_of_a_model_that_shows_only_with_its_own_example_that_it_can_not_be_traced() -> None:
    class Own(Branching):
        @property
        def dummy_inputs(self) -> dict[str, torch.Tensor]:
            return {"x": torch.randn(4, 8)}

    with wrap_model_to_roundpipe(Own(), True, devices=DEVICES) as pipe:
        with pytest.raises(NotImplementedError, match=r"use_sequential_preset=True, but Own"):
            pipe(torch.randn(6, 8))
    with wrap_model_to_roundpipe(Own(), devices=DEVICES) as pipe, torch.no_grad():
        pipe(torch.randn(6, 8))
        assert isinstance(pipe._runner.fallback, HostRunner)


def test_without_an_example_it_is_cut_at_the_first_call(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "roundpipe.api"):
        pipe = wrap_model_to_roundpipe(Nested(), devices=DEVICES)
    with pipe:
        assert pipe.trace_count == 0
        assert "at its first call" in caplog.text
        pipe(torch.randn(6, 8))
        assert pipe.trace_count == 1


def test_a_model_that_can_not_be_traced(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(4, 8)
    with caplog.at_level(logging.INFO, "roundpipe.api"):
        pipe = wrap_model_to_roundpipe(Branching(), devices=DEVICES, example_args=(x,))
    with pipe:
        assert isinstance(pipe, AutoRoundPipe)
    assert "test_wrap.py" in caplog.text
    with pytest.raises(NotImplementedError, match=r"use_sequential_preset=True, but Branching.*test_wrap\.py"):
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
    with wrap_model_to_roundpipe(copy.deepcopy(model).eval(), devices=DEVICES) as pipe, torch.no_grad():
        batch = inputs()
        torch.testing.assert_close(pipe(**batch), pipe._target(**batch), rtol=TOLERANCE, atol=TOLERANCE)
    with wrap_model_to_roundpipe(model, **options) as pipe:
        with torch.no_grad():
            pipe(**inputs())
        inside = pipe._runner.fallback
        assert sizes[-2:] == [6, 6] and isinstance(inside, HostRunner)
        assert set(parts_in(inside)) == {"norm", "head", *(f"blocks.{index}" for index in range(3))}
    train_like_eager(Branching().double(), lambda one: wrap_model_to_roundpipe(one, devices=DEVICES))


# What must run once


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
        pipe = roundpipe.compile(model, example_args=(x,), devices=DEVICES) if is_compiled else wrapped(model)
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


# Hugging Face


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
