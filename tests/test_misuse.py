"""Everything that can be called wrongly: an error of the library's own that says what was given and what is allowed.

Each row has words of its message, and the class of Python's that the error is as well, so that code which
catches that one goes on to work. After each, the model trains.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.nn.utils import parametrize

import roundpipe
from roundpipe import RoundPipeRunConfig as Config


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))


def loss_fn(outputs: torch.Tensor, label: Any) -> torch.Tensor:
    return outputs.square().sum()


X = torch.ones(5, 6)
CONSTRUCTIONS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "model is a list": ({"model": [nn.Linear(2, 2)]}, ValueError, "got list"),
    "model is a class": ({"model": nn.Linear}, ValueError, "got type"),
    "model without shapes": (
        {"model": nn.Sequential(nn.Linear(6, 4), nn.LazyLinear(3))},
        ValueError,
        r"1\.weight of the Sequential has no shape yet.*Call the model once on an example before",
    ),
    "optim_dtype of whole numbers": ({"optim_dtype": torch.int8}, ValueError, "floating-point torch.dtype"),
    "optim_dtype as text": ({"optim_dtype": "float32"}, ValueError, "floating-point torch.dtype"),
    "name is a number": ({"name": 5}, ValueError, "name is int; give a string"),
    "config is a dict": ({"model_run_config": {}}, ValueError, "give a RoundPipeRunConfig"),
    "pin_model unknown": ({"pin_model": "pinned"}, ValueError, "'alloc', 'register' and 'off'"),
    "pin_model is True": ({"pin_model": True}, ValueError, "'alloc', 'register' and 'off'"),
    "register without CUDA": ({"pin_model": "register"}, ValueError, "use 'alloc' or 'off'"),
    "no devices": ({"devices": []}, ValueError, "names no device"),
    "unknown device": ({"devices": ["gpu0"]}, ValueError, "not a device torch knows"),
    "device is a float": ({"devices": [1.5]}, ValueError, "devices: 1.5 is float"),
    "devices is a number of them": ({"devices": 2.0}, ValueError, "devices"),
}


@pytest.mark.parametrize("given", CONSTRUCTIONS)
def test_constructions(given: str) -> None:
    options, python_class, words = CONSTRUCTIONS[given]
    arguments = {"model": network(), "devices": ["cpu"], **options}
    for make in (roundpipe.RoundPipe, roundpipe.compile):
        with pytest.raises(roundpipe.RoundPipeError, match=words) as caught:
            make(**arguments)
        assert isinstance(caught.value, python_class)


def failing_step(piped: Any) -> None:
    piped.step(lambda: piped.step(lambda: None), is_async=False)


def call_in_step(piped: Any) -> None:
    piped.step(lambda: piped(X))
    piped.synchronize()


def with_cached_weights(piped: Any) -> None:
    with parametrize.cached():
        piped(X)


def train(**options: Any) -> Callable[[Any], Any]:
    return lambda piped: piped.forward_backward(**{"input_args": (X,), "loss_fn": loss_fn, **options})


def run(config: Any, *args: Any) -> Callable[[Any], Any]:
    return lambda piped: piped(*(args or (X,)), roundpipe_run_config=config)


def second_backward(piped: Any) -> None:
    loss = piped(X).sum()
    loss.backward()
    loss.backward()


NUMBER = 3
CALLS: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "a tensor as input_args": (train(input_args=X), ValueError, "input_args is Tensor; give a tuple"),
    "a list as input_kwargs": (train(input_kwargs=[X]), ValueError, "input_kwargs is a list with Tensor; give a dict"),
    "kwargs whose keys are no names": (
        train(input_kwargs={1: X}),
        ValueError,
        "the keyword 1 is int; keywords are strings",
    ),
    "no function as loss_fn": (train(loss_fn=3), ValueError, "loss_fn is int; give a function"),
    "a number as loss": (train(loss_fn=lambda *_: 1.0), TypeError, "returned float; it must return a tensor"),
    "outputs as loss": (train(loss_fn=lambda o, _: o), RuntimeError, r"shape \[2, 6\]; a loss has one element"),
    "a detached loss": (train(loss_fn=lambda o, _: o.sum().detach()), RuntimeError, "does not depend on anything"),
    "a dict as run_config": (train(run_config={}), ValueError, "RoundPipeRunConfig"),
    "a dict as config of forward": (run({}), ValueError, "RoundPipeRunConfig"),
    "an empty batch": (train(input_args=(torch.ones(0, 6),)), ValueError, "empty"),
    "an empty batch in forward": (run(Config(), torch.ones(0, 6)), ValueError, "empty"),
    "a spec that fits no argument": (
        run(Config(split_input=((TensorChunkSpec(0), TensorChunkSpec(0)), None))),
        ValueError,
        "args has 1 items but its spec has 2",
    ),
    "a spec of a dim that is not there": (run(Config(split_input=((TensorChunkSpec(4),), None))), ValueError, "dim"),
    "a split function of a wrong length": (
        run(Config(num_microbatch=NUMBER, split_input=lambda args, kwargs, n: ([args], [kwargs]))),
        ValueError,
        "split_input",
    ),
    "a label function of a wrong length": (
        train(label=X, run_config=Config(split_label=lambda label, n: [])),
        ValueError,
        "split_label",
    ),
    "a merge function that is a number": (run(Config(merge_output=3)), ValueError, "output has the spec 3; allowed"),
    "a plan for another model": (
        train(run_config=Config(execute_plan=roundpipe.ExecutePlan([(0, 3)], (3, 9), [(0, 3)]))),
        ValueError,
        "4 layers",
    ),
    "a second backward": (second_backward, RuntimeError, "second time"),
    "no function as step_fn": (lambda piped: piped.step(3), ValueError, "step_fn is 3; give a function"),
    "an argument where is_async is": (lambda piped: piped.step(print, "x"), ValueError, "is_async is str; give True"),
    "a call while computed weights are cached": (with_cached_weights, ValueError, "parametrize.cached.., which keeps"),
    "a step within a step": (failing_step, ValueError, "inside step_fn"),
    "a call within an asynchronous step": (call_in_step, ValueError, "inside an asynchronous step_fn"),
    "a move to another device": (lambda piped: piped.to("meta"), ValueError, "stay in host memory"),
    "a model that is none": (lambda piped: piped.set_original_model(3), ValueError, "must be an nn.Module, got int"),
    "a prefix that is no text": (lambda piped: list(piped.optim_named_parameters(3)), ValueError, "prefix is int"),
}


@pytest.mark.parametrize("given", CALLS)
def test_calls(given: str) -> None:
    do, python_class, words = CALLS[given]
    model = network()
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        with pytest.raises(roundpipe.RoundPipeError, match=words) as caught:
            do(piped)
        assert isinstance(caught.value, python_class)
        piped.zero_grad()
        found = piped.forward_backward((X,), loss_fn=loss_fn)
        torch.testing.assert_close(found, model(X).square().sum().detach())


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "no microbatches": ({"num_microbatch": 0}, "num_microbatch: got 0"),
    "microbatches as float": ({"num_microbatch": 2.0}, "num_microbatch: got 2.0"),
    "microbatches as bool": ({"num_microbatch": True}, "num_microbatch: got True"),
    "grain": ({"recompute_grain": "block"}, "recompute_grain: got 'block'"),
    "output device": ({"output_device": "nowhere"}, "output_device: got 'nowhere'"),
    "split_input without kwargs": ({"split_input": (TensorChunkSpec(0),)}, "split_input"),
    "requires_grad": ({"requires_grad": "no"}, "requires_grad: got 'no'"),
    "preserve_rng_state": ({"preserve_rng_state": 1}, "preserve_rng_state: got 1"),
    "check_finite": ({"check_finite": "always"}, "check_finite: got 'always'"),
    "plan": ({"execute_plan": [(0, 1)]}, "execute_plan"),
}


@pytest.mark.parametrize("given", CONFIGS)
def test_configs(given: str) -> None:
    options, words = CONFIGS[given]
    with pytest.raises(roundpipe.ConfigError, match=words):
        Config(**options)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: roundpipe.Device("cpu", memory_bytes=0), "memory_bytes=0"),
        (lambda: roundpipe.Device("cpu", memory_bytes="24 apples"), "memory_bytes='24 apples'"),
        (lambda: roundpipe.Device(3), "not a device"),
        (lambda: roundpipe.ExecutePlan([(0, 2), (3, 4)], (4, 6), [(0, 4)]).validate(6), r"forward|range"),
        (lambda: roundpipe.ExecutePlan([(2, 0)], (2, 3), [(0, 2)]), r"\(2, 0\)"),
        (lambda: roundpipe.ExecutePlan(3, (2, 3), [(0, 2)]), "forward"),
        (lambda: roundpipe.GradScaler(growth_factor=0.5), "growth_factor"),
        (lambda: roundpipe.GradScaler(init_scale="big"), "init_scale"),
        (lambda: roundpipe.GradScaler().scale("loss"), "got a str"),
        (lambda: roundpipe.GradScaler().load_state_dict({}), "empty state"),
        (lambda: roundpipe.GradScaler().load_state_dict({"scale": 1.0}), "growth_factor"),
        (lambda: roundpipe.GradScaler().update("much"), "new_scale"),
        (roundpipe.num_microbatches, "inside loss_fn"),
        (roundpipe.get_recompute_data, "recompute"),
    ],
)
def test_values_and_helpers(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(roundpipe.RoundPipeError, match=words):
        make()


class Scheduler:
    """Has no state."""


CHECKPOINTS: dict[str, tuple[Callable[[Any, Path], Any], type[Exception], str]] = {
    "no folder": (lambda piped, path: piped.save_checkpoint(3), ValueError, "dir"),
    "a folder of something else": (lambda piped, path: piped.save_checkpoint(path), ValueError, "checkpoint"),
    "a step that is no number": (lambda piped, path: piped.save_checkpoint(path / "a", step="9"), ValueError, "step"),
    "a scheduler without state": (
        lambda piped, path: piped.save_checkpoint(path / "a", scheduler=Scheduler()),
        ValueError,
        "scheduler",
    ),
    "an optimizer that is none": (lambda piped, path: piped.save_checkpoint(path / "a", 3), ValueError, "optimizer"),
    "another model's optimizer": (
        lambda piped, path: piped.save_checkpoint(path / "a", torch.optim.SGD(network().parameters(), lr=1.0)),
        ValueError,
        "optimizer",
    ),
    "extra that is no data": (lambda piped, path: piped.save_checkpoint(path / "a", extra=print), ValueError, "extra"),
    "nothing to load": (lambda piped, path: piped.load_checkpoint(path / "b"), FileNotFoundError, "no checkpoint"),
    "no folder to load": (lambda piped, path: piped.load_checkpoint(3), ValueError, "dir"),
}


@pytest.mark.parametrize("given", CHECKPOINTS)
def test_checkpoints(given: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    do, python_class, words = CHECKPOINTS[given]
    (tmp_path / "precious.txt").write_text("of the user's")
    with roundpipe.RoundPipe(network(), devices=["cpu"]) as piped:
        with pytest.raises(roundpipe.RoundPipeError, match=words) as caught:
            do(piped, tmp_path)
        assert isinstance(caught.value, python_class)
        assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


def test_calls_of_a_closed_model() -> None:
    piped = roundpipe.RoundPipe(network(), devices=["cpu"])
    piped.close()
    for call in (
        lambda: piped(X),
        train(),
        lambda *_: piped.step(print),
        lambda *_: piped.synchronize(),
        lambda *_: piped.zero_grad(),
    ):
        with pytest.raises(roundpipe.ClosedError, match="closed"):
            call(piped) if call.__code__.co_argcount else call()


def test_a_model_without_values() -> None:
    with roundpipe.RoundPipe(network().to("meta"), devices=["cpu"]) as piped:
        with pytest.raises(roundpipe.RoundPipeError, match="meta device"):
            piped(X)
        with pytest.raises(roundpipe.RoundPipeError, match="meta device"):
            list(piped.optim_parameters())
