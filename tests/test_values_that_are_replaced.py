"""Tensors and containers that a script puts onto a model anew at each step are inputs of the graph, as numbers are."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import roundpipe
from roundpipe import RoundPipeRunConfig
from tests.runtime.models import gradients

NUM_SAMPLES, WIDTH, NUM_CLASSES, NUM_STEPS = 9, 6, 3, 5
Replace = Callable[["Model", int], None]
Rule = Callable[["Model", torch.Tensor], torch.Tensor]


class Model(nn.Module):
    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(5, WIDTH), nn.Linear(WIDTH, NUM_CLASSES)
        self.rule = rule
        self.register_buffer("registered", torch.ones(WIDTH))
        self.held, self.other = torch.ones(WIDTH), torch.ones(WIDTH)
        self.options: Any = {"scale": 1.0, "shift": torch.zeros(WIDTH)}
        self.sizes: Any = (1.0, 2)
        self.parts: Any = [torch.zeros(WIDTH), 1.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.outer(self.rule(self, self.inner(x).tanh()))
        return logits


def _values(step: int, *shape: int) -> torch.Tensor:
    return torch.rand(*(shape or (WIDTH,)), generator=torch.Generator().manual_seed(step))


def _put(name: str, make: Callable[[int], Any]) -> Replace:
    return lambda model, step: setattr(model, name, make(step))


def _put_two(model: Model, step: int) -> None:
    model.held, model.other = _values(step), _values(step + 20)


def _put_one_twice(model: Model, step: int) -> None:
    model.held = model.other = _values(step)


def _put_into_the_dict(model: Model, step: int) -> None:
    model.options["shift"] = _values(step)


def _averaged(model: Model, step: int) -> None:
    model.registered = 0.5 * model.registered + _values(step)


REPLACED: dict[str, tuple[Replace, Rule]] = {
    "an attribute": (_put("held", _values), lambda model, h: h * model.held),
    "a number in a tensor": (_put("held", lambda step: torch.tensor(0.1 * step)), lambda model, h: h * model.held),
    "truths": (_put("held", lambda step: _values(step) > 0.5), lambda model, h: h.masked_fill(model.held, 0.0)),
    "indices": (
        _put("held", lambda step: torch.randperm(WIDTH, generator=torch.Generator().manual_seed(step))),
        lambda model, h: h[:, model.held],
    ),
    "as long as the batch": (
        _put("held", lambda step: _values(step, NUM_SAMPLES)),
        lambda model, h: h * model.held.sum(),
    ),
    "one row": (_put("held", lambda step: _values(step, 1, WIDTH)), lambda model, h: h * model.held),
    "a view of another": (_put("held", lambda step: _values(step, 2, WIDTH)[0]), lambda model, h: h + model.held),
    "a buffer": (_put("registered", _values), lambda model, h: h * model.registered),
    "a buffer made of the one before": (_averaged, lambda model, h: h - model.registered),
    "two": (_put_two, lambda model, h: h * model.held - model.other),
    "one in two places": (_put_one_twice, lambda model, h: h * model.held - model.other),
    "a number of a dict": (
        _put("options", lambda step: {"scale": 0.1 * step}),
        lambda model, h: h * model.options["scale"],
    ),
    "all of a dict": (
        _put("options", lambda step: OrderedDict(scale=0.1 * step, shift=_values(step))),
        lambda model, h: h * model.options["scale"] + model.options["shift"],
    ),
    "a tensor in a dict that stays": (_put_into_the_dict, lambda model, h: h + model.options["shift"]),
    "a number of a tuple": (_put("sizes", lambda step: (0.3 * step, 2)), lambda model, h: h * model.sizes[0]),
    "all of a tuple": (
        _put("sizes", lambda step: (0.3 * step, 1 + step)),
        lambda model, h: h * model.sizes[0] + model.sizes[1],
    ),
    "all of a list": (
        _put("parts", lambda step: [_values(step), 0.2 * step]),
        lambda model, h: (h + model.parts[0]) * model.parts[1],
    ),
    "a list in a loop": (
        _put("parts", lambda step: [_values(step), 0.2 * step, _values(step + 9)]),
        lambda model, h: sum((h * part for part in model.parts), torch.zeros(())),
    ),
}


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(NUM_SAMPLES, 5, generator=generator), torch.randint(
        NUM_CLASSES, (NUM_SAMPLES,), generator=generator
    )


def _trained(model: Model, replace: Replace, num_microbatch: int = 3, steps: int = NUM_STEPS) -> int:
    """Compares each step with plain PyTorch; how many traces there were."""
    plain, loss_fn = copy.deepcopy(model), nn.functional.cross_entropy
    config = RoundPipeRunConfig(num_microbatch=num_microbatch, loss_reduction="mean")
    with roundpipe.compile(model, devices=["cpu"] * 2, model_run_config=config) as piped:
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
        for step in range(1, 1 + steps):
            for each in (plain, model):
                replace(each, step)
            x, labels = _batch(step)
            loss = piped.forward_backward((x,), label=labels, loss_fn=loss_fn)
            expected = loss_fn(plain(x), labels)
            expected.backward()
            assert_close(loss, expected)
            assert_close(gradients(model), gradients(plain))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        count = piped.trace_count
    for name in ("held", "other", "registered", "parts", "options", "sizes"):
        assert_close(getattr(model, name), getattr(plain, name))
    return count


@pytest.mark.parametrize("num_microbatch", [1, 3])
@pytest.mark.parametrize("name", REPLACED)
def test_what_is_replaced_is_traced_twice(name: str, num_microbatch: int) -> None:
    replace, rule = REPLACED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _trained(Model(rule), replace, num_microbatch) == 2


def _of_length(model: Model, step: int) -> None:
    model.held = _values(step, step + 1)


def test_a_size_that_changes_takes_one_trace_more() -> None:
    assert _trained(Model(lambda model, h: h * model.held.mean()), _of_length) == 3


KEPT: dict[str, tuple[Replace, Rule]] = {
    "another dtype each time": (
        _put("held", lambda step: _values(step).to([torch.float32, torch.float64][step % 2])),
        lambda model, h: h * model.held.float(),
    ),
    "none at times": (
        _put("held", lambda step: _values(step) if step % 2 else None),
        lambda model, h: h if model.held is None else h * model.held,
    ),
    "more items": (
        _put("parts", lambda step: [0.1 * number for number in range(step)]),
        lambda model, h: h + sum(model.parts),
    ),
    "another kind of container": (
        _put("parts", lambda step: (tuple if step % 2 else list)((0.1 * step, 1.0))),
        lambda model, h: h * model.parts[0],
    ),
    "gone at times": (
        lambda model, step: model.options.pop("scale", None) if step % 2 else model.options.update(scale=0.1 * step),
        lambda model, h: h * model.options.get("scale", 1.0),
    ),
    "read as a number": (_put("held", lambda step: torch.tensor(0.1 * step)), lambda model, h: h * model.held.item()),
    "decided by": (
        _put("held", lambda step: torch.tensor(0.1 * step)),
        lambda model, h: h * 2 if model.held > 0.25 else h,
    ),
}


@pytest.mark.parametrize("num_microbatch", [1, 3])
@pytest.mark.parametrize("name", KEPT)
def test_what_is_replaced_otherwise_is_right(name: str, num_microbatch: int) -> None:
    replace, rule = KEPT[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _trained(Model(rule), replace, num_microbatch)


class Counting(nn.Module):
    """Writes into the tensor that a script puts there, or into what it is a view of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(5, NUM_CLASSES), torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        logits: torch.Tensor = self.layer(x) * self.count
        return logits


def test_a_tensor_that_the_forward_writes_is_written() -> None:
    model = Counting()
    plain = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        piped = roundpipe.compile(model, devices=["cpu"], model_run_config=RoundPipeRunConfig(num_microbatch=1))
    for step in range(4):
        model.count, plain.count = torch.full((), 2.0 * step), torch.full((), 2.0 * step)
        for _ in range(2):
            x, _ = _batch(step)
            assert_close(piped(x), plain(x))
        assert_close(model.count, plain.count)
    piped.close()


class Whole(nn.Module):
    """Is not looked into, since it decides by data; what it finds, it finds itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.held = nn.Linear(WIDTH, WIDTH), torch.ones(WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = h * self.held
        out: torch.Tensor = self.layer(h) if h.sum() > 1e9 else h
        return out


class WithWhole(Model):
    def __init__(self) -> None:
        super().__init__(lambda model, h: model.whole(h))
        self.whole = Whole()


def test_a_layer_that_stays_whole_finds_the_new_tensor() -> None:
    def replace(model: Any, step: int) -> None:
        model.whole.held = _values(step)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _trained(WithWhole(), replace)


def test_each_forward_has_what_was_there_when_it_was_called() -> None:
    """Backwards recompute it after something else was put there."""
    model = Model(lambda model, h: h * model.held)
    plain = copy.deepcopy(model)
    with roundpipe.compile(model, devices=["cpu"]) as piped:
        for first in (1, 3, 5):
            losses: list[Any] = [0.0, 0.0]
            for step in (first, first + 1):
                for index, (owner, call) in enumerate([(plain, plain), (model, piped)]):
                    owner.held = _values(step)
                    losses[index] = losses[index] + call(_batch(step)[0]).square().sum()
            for loss in losses:
                loss.backward()
            assert_close(*losses)
            assert_close(gradients(model), gradients(plain))
        assert piped.trace_count == 2


def test_what_an_argument_is_too_may_be_replaced() -> None:
    model = Model(lambda model, h: h * model.held.sum())
    plain = copy.deepcopy(model)
    with roundpipe.compile(model, devices=["cpu"]) as piped:
        for step in range(4):
            x, _ = _batch(step)
            model.held = plain.held = x
            assert_close(piped(x, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=3)), plain(x))
        assert piped.trace_count == 2


def test_a_tensor_that_requires_grad_is_refused_as_ever() -> None:
    model = Model(lambda model, h: h * model.held)
    with roundpipe.compile(model, devices=["cpu"], fallback=False) as piped:
        for step in range(3):
            model.held = _values(step)
            piped(_batch(step)[0])
        model.held = _values(3).requires_grad_()
        with pytest.raises(roundpipe.TraceError, match="requires grad"):
            piped(_batch(3)[0])


_shared = torch.ones(WIDTH)


def test_so_is_a_variable() -> None:
    def replace(model: Model, step: int) -> None:
        global _shared
        _shared = _values(step)

    assert _trained(Model(lambda model, h: h * _shared), replace) == 2


def test_the_guards_name_it(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(lambda model, h: h * model.held.float() + model.options["scale"])
    with roundpipe.compile(model, devices=["cpu"]) as piped, caplog.at_level("INFO"):
        for step in range(3):
            model.held, model.options = _values(step), {"scale": 0.1 * step}
            piped(_batch(step)[0])
        model.held = _values(1).double()
        piped(_batch(1)[0])
    assert "input Model.held is torch.float64" in caplog.text


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", REPLACED)
def test_a_device_gets_what_is_replaced(name: str) -> None:
    replace, rule = REPLACED[name]
    model = Model(rule)
    plain = copy.deepcopy(model).cuda()
    config = RoundPipeRunConfig(num_microbatch=3, loss_reduction="mean")
    with roundpipe.compile(model, devices=["cuda:0"], model_run_config=config) as piped:
        for step in range(1, 5):
            replace(model, step)
            for attribute in ("held", "other", "registered", "parts", "options", "sizes"):
                value = getattr(model, attribute)
                moved = value.cuda() if isinstance(value, torch.Tensor) else _moved(value)
                setattr(plain, attribute, moved)
            x, labels = _batch(step)
            loss = piped.forward_backward((x,), label=labels, loss_fn=nn.functional.cross_entropy)
            expected = nn.functional.cross_entropy(plain(x.cuda()), labels.cuda())
            assert_close(loss, expected.cpu())
        assert piped.trace_count == 2


def _moved(container: Any) -> Any:
    def moved(item: Any) -> Any:
        return item.cuda() if isinstance(item, torch.Tensor) else item

    if isinstance(container, dict):
        return {key: moved(item) for key, item in container.items()}
    return type(container)(map(moved, container))
