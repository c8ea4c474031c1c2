"""The wrapper in place of its model: attributes, utilities of torch.nn.Module, copies, Hugging Face and PEFT."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import AutoRoundPipe, ConfigError, NotCopyableError, RoundPipeError
from tests.wrappers.cases_forwarding import DEVICES, Model, assert_trains_like, inputs, made, squared

KINDS = ["compiled", "first call", "parts", "parts at the first call", "by hand"]


@pytest.mark.filterwarnings("ignore:Branching runs module by module", "ignore:forward_backward of an AutoRoundPipe")
@pytest.mark.parametrize("kind", KINDS)
def test_a_deep_copy_is_another_wrapper_of_another_model(kind: str) -> None:
    torch.manual_seed(0)
    model, pipe = made(kind)
    num_threads = threading.active_count()
    with pipe:
        reference = copy.deepcopy(model)
        assert_trains_like(pipe, reference)
        with copy.deepcopy(pipe) as other:
            assert type(other) is type(pipe) and other.model is not model
            assert not {id(one) for one in other.parameters()} & {id(one) for one in pipe.parameters()}
            assert not {id(one) for one in other.optim_parameters()} & {id(one) for one in pipe.optim_parameters()}
            assert all(torch.equal(a, b) for a, b in zip(other.optim_parameters(), model.parameters(), strict=True))
            before = copy.deepcopy(model.state_dict())
            assert_trains_like(other, copy.deepcopy(reference))
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert_trains_like(pipe, reference)  # with its workers still there
    assert threading.active_count() <= num_threads


def test_a_copy_has_the_latest_weights_and_the_mode() -> None:
    model, pipe = made("compiled")
    with pipe:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
        pipe.forward_backward((inputs(),), loss_fn=squared)
        pipe.step(optimizer.step)  # in the background
        pipe.eval()
        with copy.deepcopy({"teacher": pipe})["teacher"] as other:
            assert not other.training and not other.model.training
            assert all(torch.equal(a, b) for a, b in zip(other.parameters(), pipe.optim_parameters(), strict=True))
            assert all(one.grad is None for one in other.parameters())


def test_averaged_models() -> None:
    model, pipe = made("compiled")
    with pipe, torch.no_grad():
        averaged = torch.optim.swa_utils.AveragedModel(pipe)
        averaged.update_parameters(pipe)
        for one in pipe.parameters():
            one.add_(1.0)
        averaged.update_parameters(pipe)
        averaged.eval()
        with averaged.module:
            torch.testing.assert_close(averaged.module.stem.weight, model.stem.weight - 0.5)
            x = inputs()
            torch.testing.assert_close(averaged(x), averaged.module.model(x))


def saved_and_loaded(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def test_the_original_can_be_copied_and_saved_while_it_is_wrapped() -> None:
    model, pipe = made("compiled")
    with pipe:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
        pipe.forward_backward((inputs(),), loss_fn=squared)
        pipe.step(optimizer.step)
        pipe.synchronize()
        loaded = saved_and_loaded(pipe.model)
        for name, value in saved_and_loaded(pipe.state_dict()).items():  # of several dtypes
            assert torch.equal(value, model.state_dict()[name])
        buffer = io.BytesIO()
        torch.save(model.head.bias, buffer)
        assert buffer.tell() < 3000, "a tensor is saved without what lies beside it in memory"
        for other in (loaded, copy.deepcopy(model)):
            assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
            before = [one.clone() for one in pipe.optim_parameters()]
            other.load_state_dict({name: value * 2 for name, value in other.state_dict().items()})
            assert all(torch.equal(a, b) for a, b in zip(pipe.optim_parameters(), before, strict=True))


@pytest.mark.parametrize("kind", ["compiled", "parts", "by hand"])
@pytest.mark.parametrize(
    "use", [pickle.dumps, copy.copy, lambda pipe: torch.save(pipe, io.BytesIO())], ids=["pickle", "copy", "torch.save"]
)
def test_what_can_not_be_copied_says_what_to_do(kind: str, use: Callable[[Any], Any]) -> None:
    _, pipe = made(kind)
    with pipe:
        with pytest.raises(NotCopyableError, match=r"save_checkpoint.*model\.state_dict.*copy\.deepcopy") as caught:
            use(pipe)
        assert isinstance(caught.value, TypeError) and isinstance(caught.value, RoundPipeError)
        if isinstance(pipe, AutoRoundPipe):
            with pytest.raises(NotCopyableError, match="part of another wrapper"):
                # a user gets it only inside of a forward
                copy.deepcopy(pipe._runner.tree.module)


def frozen(pipe: Any) -> None:
    pipe.requires_grad_(False)
    assert not any(one.requires_grad for one in pipe.parameters()) and not list(pipe.optim_parameters())
    pipe.requires_grad_(True)
    assert len(list(pipe.optim_parameters())) == len(list(pipe.parameters()))


def applied(pipe: Any) -> None:
    seen: list[nn.Module] = []
    assert pipe.apply(seen.append) is pipe
    assert seen and set(seen) == set(pipe.model.modules())


def named(pipe: Any) -> None:
    model = pipe.model
    assert list(pipe.named_modules()) == list(model.named_modules())
    assert [name for name, _ in pipe.named_parameters("a")] == [name for name, _ in model.named_parameters("a")]
    assert list(pipe.children()) == list(model.children())
    assert list(pipe.state_dict(prefix="x.")) == list(model.state_dict(prefix="x."))
    first = next(name for name, _ in model.named_modules() if name)
    assert pipe.get_submodule(first) is model.get_submodule(first)
    parameter = next(name for name, _ in model.named_parameters())
    assert pipe.get_parameter(parameter) is model.get_parameter(parameter)


def zeroed(pipe: Any) -> None:
    pipe.forward_backward((inputs(),), loss_fn=squared)
    pipe.synchronize()
    assert all(one.grad is not None for one in pipe.parameters())
    pipe.zero_grad()
    assert all(one.grad is None for one in pipe.parameters())
    assert all(one.grad is None for one in pipe.optim_parameters())


def loaded(pipe: Any) -> None:
    state = {name: torch.full_like(value, 2) for name, value in pipe.state_dict().items()}
    for assign in (False, True):
        optim = list(pipe.optim_parameters())
        result = pipe.load_state_dict({name: value.clone() for name, value in state.items()}, assign=assign)
        assert not result.missing_keys and not result.unexpected_keys
        assert all(bool((one == 2).all()) for one in (*pipe.parameters(), *optim))
        name = next(iter(state))
        with pytest.raises(RuntimeError, match=f'Missing key.*"{name}"'):
            pipe.load_state_dict({key: value for key, value in state.items() if key != name}, assign=assign)
        few = pipe.load_state_dict({"other": torch.ones(1)}, strict=False)
        assert few.unexpected_keys == ["other"] and set(few.missing_keys) >= {
            name for name, _ in pipe.named_parameters()
        }
        zeroed(pipe)


def converted(pipe: Any) -> None:
    assert pipe.to(torch.float32) is pipe
    assert {one.dtype for one in pipe.parameters()} == {torch.float32}
    with torch.no_grad():
        assert pipe(inputs().float()).dtype == torch.float32
    pipe.half().double()
    assert {one.dtype for one in pipe.parameters()} == {torch.float64}
    zeroed(pipe)


def moved(pipe: Any) -> None:
    assert pipe.to("cpu") is pipe and pipe.cpu() is pipe
    for move in (
        lambda: pipe.to("meta"),
        lambda: pipe.cuda(),
        lambda: pipe.to("cuda"),
        lambda: pipe.to("cuda:0", torch.half),
    ):
        with pytest.raises(ConfigError, match=r"streamed to the devices.*devices="):
            move()
    assert all(one.device.type == "cpu" for one in pipe.parameters())


def clipped(pipe: Any) -> None:
    pipe.forward_backward((inputs(),), loss_fn=squared)
    pipe.synchronize()
    optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=1.0)
    before = [one.detach().clone() for one in pipe.parameters()]
    norm = nn.utils.clip_grad_norm_(pipe.parameters(), 1e-3)
    assert norm > 1e-3
    pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    pipe.synchronize()
    moves = [(one.detach() - was).norm() for one, was in zip(pipe.parameters(), before, strict=True)]
    assert float(torch.stack(moves).norm()) == pytest.approx(1e-3, rel=1e-3)


def vectorised(pipe: Any) -> None:
    vector = nn.utils.parameters_to_vector(pipe.parameters())
    nn.utils.vector_to_parameters(vector * 0, pipe.parameters())
    assert not any(bool(one.any()) for one in pipe.parameters())


def registered(pipe: Any) -> None:
    model = pipe.model
    pipe.register_buffer("counted", torch.ones(2, dtype=torch.float64))
    assert model.counted is pipe.counted and "counted" in pipe.state_dict()
    pipe.register_parameter("extra", None)
    pipe.add_module("twin", nn.Identity())
    assert "extra" in model._parameters and model.twin is pipe.twin
    for add in (pipe.add_module, pipe.register_module):
        with pytest.raises(ConfigError, match="before wrapping"):
            add("late", nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="before wrapping"):
        pipe.register_parameter("late", nn.Parameter(torch.ones(1)))
    del pipe.counted
    assert not hasattr(model, "counted")


def hooked(pipe: Any) -> None:
    calls: list[str] = []
    handles = [
        pipe.register_forward_pre_hook(lambda module, args: calls.append("before")),
        pipe.register_forward_hook(lambda module, args, output: calls.append("after")),
    ]
    with torch.no_grad():
        pipe(inputs())
    assert calls == ["before", "after"]
    for handle in handles:
        handle.remove()


def inside_another(pipe: Any) -> None:
    outer = nn.Sequential(nn.Linear(6, 6).double(), pipe)
    own = {f"1.{name}" for name in pipe.state_dict()}
    assert set(outer.state_dict()) == own | {"0.weight", "0.bias"}
    assert len(list(outer.parameters())) == 2 + len(list(pipe.parameters()))
    state = {name: torch.full_like(value, 3) for name, value in outer.state_dict().items()}
    result = outer.load_state_dict(state)
    assert not result.missing_keys and not result.unexpected_keys
    assert all(bool((one == 3).all()) for one in (*pipe.parameters(), *pipe.optim_parameters()))
    missing = next(name for name in state if name in own and name.endswith(".weight"))  # may not lack, unlike a count
    with pytest.raises(RuntimeError, match=missing):
        outer.load_state_dict({name: value for name, value in state.items() if name != missing})
    with pytest.raises(RuntimeError, match="Unexpected.*1.other"):
        outer.load_state_dict({**state, "1.other": torch.ones(1)})
    with pytest.raises(RuntimeError, match="size mismatch"):
        outer.load_state_dict({**state, missing: torch.ones(3, 3, 3)})
    outer.eval()
    assert not pipe.training and not pipe.model.training
    outer.train()
    x = inputs().requires_grad_()
    squared(outer(x)).backward()
    assert x.grad is not None and outer[0].weight.grad is not None


UTILITIES = [
    *(frozen, applied, named, zeroed, loaded, converted, moved, clipped, vectorised, registered, hooked),
    inside_another,
]


@pytest.mark.filterwarnings("ignore:Branching runs module by module", "ignore:forward_backward of an AutoRoundPipe")
@pytest.mark.parametrize("kind", ["parts at the first call", "by hand"])
@pytest.mark.parametrize("use", UTILITIES, ids=lambda use: use.__name__)
def test_utilities_of_modules(kind: str, use: Callable[[Any], None]) -> None:
    torch.manual_seed(1)
    _, pipe = made(kind)
    with pipe:
        use(pipe)


def test_a_compiled_model_is_converted_and_loaded() -> None:
    _, pipe = made("compiled")
    with pipe:
        pipe(inputs())
        converted(pipe)
        loaded(pipe)


def test_attributes_are_read_written_and_deleted_on_the_model() -> None:
    model, pipe = made("compiled")
    with pipe, torch.no_grad():
        x = inputs()
        pipe.scale = 3.0
        assert model.scale == 3.0 and pipe.describe() == "scale 3.0" and "describe" in dir(pipe)
        model.eval(), pipe.eval()
        torch.testing.assert_close(pipe(x), model(x))
        del pipe.scale
        assert not hasattr(model, "scale")
        with pytest.raises(AttributeError, match="'Model' object has no attribute 'nonsense'"):
            pipe.nonsense


class Outer(nn.Module):
    """Its part is called as a wrapper's own attribute for the wrapped module, as in Hugging Face models."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


def test_names_that_are_listed_can_be_asked_for() -> None:
    model = Outer().double()
    with roundpipe.compile(model, example_args=(inputs(),), devices=DEVICES) as pipe:
        for listed, get in (
            (pipe.named_modules, pipe.get_submodule),
            (pipe.named_parameters, pipe.get_parameter),
            (pipe.named_buffers, pipe.get_buffer),
        ):
            assert all(get(name) is one for name, one in listed())
        assert pipe.get_parameter("model.stem.weight") is model.model.stem.weight
        with pytest.raises(AttributeError):
            pipe.get_parameter("stem.weight")
        model.model.head.requires_grad_(False)
        with roundpipe.OptimizerCtx():
            copies = dict(pipe.named_parameters())
            assert all(pipe.get_parameter(name) is one for name, one in copies.items())
            assert "model.stem.weight" in copies and copies["model.stem.weight"] is not model.model.stem.weight
            assert pipe.get_parameter("model.head.weight") is model.model.head.weight, "it has no copy"
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
        pipe.forward_backward((inputs(),), loss_fn=squared)
        pipe.step(optimizer.step)
        pipe.forward_backward((inputs(),), loss_fn=squared)  # its last stages may be running
        assert pipe.get_parameter("model.stem.weight").grad is not None


def test_a_sequential_is_indexed_and_others_are_not():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    with roundpipe.compile(model, devices=["cpu"]) as piped:
        assert piped[0] is model[0] and piped[-1] is model[2]
        assert len(piped) == 3 and [*piped] == [*model] and model[1] in piped
        assert [*piped[1:]] == [*model[1:]]
    with roundpipe.compile(nn.Bilinear(4, 4, 2), devices=["cpu"]) as piped:
        assert piped  # although it has no length
        for ask in (len, iter, lambda wrapper: wrapper[0]):
            with pytest.raises(TypeError, match="Bilinear"):
                ask(piped)
