"""What a call of a part is: errors, children, classes, configs, weights that hooks make, nested tensors."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import roundpipe
from roundpipe import AutoRoundPipe, RoundPipeRunConfig
from roundpipe.wrappers.auto import PartsProgram
from roundpipe.wrappers.parts import IN_ONE_PIECE, overlaid
from tests.equality import assert_same_gradients, assert_same_state
from tests.wrappers.cases_parts import WIDTH, Caller, auto


def test_errors_of_a_part_keep_their_type_and_the_next_call_works() -> None:
    model = Caller()
    with auto(model) as pipe:
        with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
            pipe(torch.randn(4, WIDTH + 1))
        assert any("linear" in note for note in caught.value.__notes__)
        assert pipe(torch.randn(4, WIDTH)).shape == (4, WIDTH)


class Transformed(nn.Module):
    """Calls a module inside a transform, and another outside."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.head, self.way = nn.Linear(WIDTH, WIDTH), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "vmap":
            return self.head(torch.vmap(self.inner)(x))
        of_one = torch.func.grad if self.way == "grad" else torch.func.jacrev
        return self.head(torch.vmap(of_one(lambda row: self.inner(row).sum()))(x))


@pytest.mark.parametrize("way", ["vmap", "grad", "jacrev"])
def test_a_module_that_a_transform_calls_runs_as_it_is(way: str) -> None:
    torch.manual_seed(0)
    model = Transformed(way)
    reference, x = copy.deepcopy(model), torch.randn(6, WIDTH)
    expected = reference(x).square().mean()
    expected.backward()
    with pytest.warns(UserWarning, match="inside a function transform"):
        with roundpipe.compile(model, devices=["cpu"]) as pipe:
            for _ in range(2):
                model.zero_grad()
                loss = pipe.forward_backward((x,), loss_fn=lambda out, _: out.square().mean(), loss_reduction="mean")
                pipe.synchronize()
                torch.testing.assert_close(loss, expected.detach())
                assert_same_gradients(model, reference, 1e-6)


class TakesApart(nn.Module):
    """Calls a stack as a whole, and its children one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stack(self.stack[0](x))
        for module in self.stack:
            x = module(x)
        return self.stack[-2:](x) * len(self.stack)


def test_children_of_a_sequential_part_can_be_taken() -> None:
    model = TakesApart()
    eager = copy.deepcopy(model)
    x = torch.randn(4, WIDTH)
    eager(x).square().mean().backward()
    with auto(model) as pipe:
        pipe.forward_backward((x,), loss_fn=lambda outputs, _: outputs.square().mean(), run_config=IN_ONE_PIECE)
        pipe.synchronize()
        assert_same_gradients(model, eager, 1e-6)


def test_code_around_a_part_finds_an_object_of_its_class() -> None:
    class Asks(Caller):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found.append((type(self.linear), isinstance(self.linear, nn.Linear), self.linear.weight is weight))
            return super().forward(x)

    found: list[Any] = []
    model = Asks()
    weight = model.linear.weight
    with auto(model) as pipe:
        pipe(torch.randn(4, WIDTH))
        assert pipe._runner.tree.parts[0].why_on_host is None  # no public name tells
    assert found == [(nn.Linear, True, True)]


def test_a_part_whose_class_changes_what_a_call_is() -> None:
    class Doubled(nn.Linear):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs) * 2

    model = Caller()
    model.linear = Doubled(WIDTH, WIDTH)
    reference, x = copy.deepcopy(model), torch.randn(4, WIDTH)
    with auto(model) as pipe:
        torch.testing.assert_close(pipe(x), reference(x))


def test_the_first_config_that_gives_a_field_wins() -> None:
    both = overlaid(IN_ONE_PIECE, RoundPipeRunConfig(num_microbatch=4, recompute_grain="layer"))
    assert both == RoundPipeRunConfig(num_microbatch=1, recompute_grain="layer")


class Equalized:
    """Makes the weight from a parameter before each call."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        module.weight = module.weight_orig * 0.5  # type: ignore[assignment]

    @staticmethod
    def apply(module: nn.Linear) -> nn.Linear:
        weight = module.weight
        del module._parameters["weight"]
        module.register_parameter("weight_orig", nn.Parameter(weight.data))
        module.weight = weight.data  # type: ignore[assignment]
        module.register_forward_pre_hook(Equalized())
        return module


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("kind", ["spectral_norm", "weight_norm", "pruned", "equalized"])
@pytest.mark.parametrize("holder", ["alone", "Sequential"])
def test_weights_that_hooks_make(kind: str, holder: str) -> None:
    make = {
        "spectral_norm": nn.utils.spectral_norm,
        "weight_norm": nn.utils.weight_norm,
        "pruned": lambda module: prune.l1_unstructured(module, "weight", 0.3),
        "equalized": Equalized.apply,
    }[kind]

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            normed = make(nn.Linear(WIDTH, WIDTH))
            self.first = normed if holder == "alone" else nn.Sequential(normed, nn.Tanh())
            self.last = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.tanh(self.first(x)))

    torch.manual_seed(0)
    model = Normed().double()
    torch.manual_seed(0)
    reference = Normed().double()
    parts = dict.fromkeys(model.children(), IN_ONE_PIECE)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    options: dict[str, Any] = {"devices": ["cpu"] * 2, "model_run_config": IN_ONE_PIECE}
    with AutoRoundPipe(PartsProgram(model, parts, splits_inside=False), **options) as pipe:
        own = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
        for step in range(3):
            x = torch.randn(4, WIDTH, dtype=torch.float64)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = pipe.forward_backward((x,), loss_fn=lambda outputs, _: outputs.square().sum())
            expected = reference(x).square().sum()
            expected.backward()
            pipe.synchronize()
            torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=0, msg=f"step {step}")
            assert_same_gradients(model, reference, 1e-9)
            optimizer.step()
            optimizer.zero_grad()
            pipe.step(lambda: (own.step(), own.zero_grad()), is_async=False)
        pipe.synchronize()
        assert_same_state(model, reference, 1e-9)


def test_nested_tensors_are_for_the_host() -> None:
    """Torch's encoder gives them to its layers in eval mode; in training these run on the devices."""

    class Encodes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)

        def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
            return self.encoder(x, src_key_padding_mask=padding)

    model = Encodes()
    reference = copy.deepcopy(model)
    x, padding = torch.randn(4, 5, 8), torch.zeros(4, 5, dtype=torch.bool)
    padding[1:, 3:] = True
    parts = dict.fromkeys(model.encoder.layers, IN_ONE_PIECE)
    with AutoRoundPipe(PartsProgram(model, parts), devices=["cpu"]) as pipe, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*nested tensors")
        warnings.filterwarnings("error", message=".*runs on the CPU")
        for is_training in (True, False, True):
            pipe.train(is_training)
            reference.train(is_training)
            with torch.set_grad_enabled(is_training):
                torch.testing.assert_close(pipe(x, padding), reference(x, padding), rtol=1e-5, atol=1e-6)
