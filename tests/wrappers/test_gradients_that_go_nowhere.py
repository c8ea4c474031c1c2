"""Habits by which gradients would train nothing, or be counted twice, and that plain PyTorch forgives: told of."""

from __future__ import annotations

import copy
import functools
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.testing import assert_close

import roundpipe
from roundpipe import ConfigError, RoundPipe
from roundpipe.runtime.optimizer.hand_over import HandOver
from tests.runtime.models import gradients

X, LABELS = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1, 2])


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def _round(piped: RoundPipe) -> None:
    piped.forward_backward((X,), label=LABELS, loss_fn=nn.functional.cross_entropy, loss_reduction="mean")


def _evaluated(piped: RoundPipe) -> torch.Tensor:
    loss: torch.Tensor = piped.forward_loss(
        (X,), label=LABELS, loss_fn=nn.functional.cross_entropy, loss_reduction="mean"
    )
    return loss


def _stepped(piped: RoundPipe, optimizer: torch.optim.Optimizer, is_async: bool = False) -> None:
    _round(piped)
    piped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
    piped.synchronize()


def _in_a_loop_of_its_own(piped: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
    nn.functional.cross_entropy(piped(X), LABELS).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize("step", [_stepped, _in_a_loop_of_its_own])
def test_an_optimizer_of_an_earlier_compile_is_refused(step: Callable[..., None], is_closed: bool) -> None:
    model = _model()
    piped = roundpipe.compile(model, devices=["cpu"])
    optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.1, momentum=0.9)
    step(piped, optimizer)
    if is_closed:
        piped.close()
    del piped
    gc.collect()
    with roundpipe.compile(model, devices=["cpu"]) as again:
        with pytest.raises(ConfigError, match="copies that an earlier compile of the model has made"):
            step(again, optimizer)
        again.zero_grad()
        other = torch.optim.SGD(again.optim_parameters(), lr=0.1, momentum=0.9)
        other.load_state_dict(optimizer.state_dict())
        before = [parameter.detach().clone() for parameter in model.parameters()]
        step(again, other)
        assert not any(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("step", [_stepped, _in_a_loop_of_its_own])
def test_so_is_one_of_both(step: Callable[..., None]) -> None:
    model = _model()
    with roundpipe.compile(model, devices=["cpu"]) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.1)
        step(piped, optimizer)
    model[-1] = nn.Linear(8, 3)
    with roundpipe.compile(model, devices=["cpu"]) as again:
        new = [parameter for name, parameter in again.optim_named_parameters() if name.startswith("2.")]
        optimizer.add_param_group({"params": new})
        with pytest.raises(ConfigError, match="2 of the 6 parameters of the optimizer are copies"):
            step(again, optimizer)


def test_two_models_with_a_part_in_common_have_an_optimizer_each() -> None:
    trunk, others = nn.Linear(5, 8), (nn.Linear(8, 3), nn.Linear(8, 3))
    models = [nn.Sequential(trunk, nn.Tanh(), head) for head in others]
    piped = [roundpipe.compile(model, devices=["cpu"]) for model in models]
    optimizers = [torch.optim.SGD(each.optim_parameters(), lr=0.1) for each in piped]
    for _ in range(3):
        for each, optimizer in zip(piped, optimizers, strict=True):
            _stepped(each, optimizer)
    for each in piped:
        each.close()


@pytest.mark.parametrize("is_async", [True, False])
def test_gradients_that_a_step_leaves_are_told_of(is_async: bool) -> None:
    model = _model()
    with roundpipe.compile(model, devices=["cpu"]) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.1)
        with pytest.warns(UserWarning, match="as if zero_grad\\(\\) were left out") as told:
            for _ in range(4):
                _round(piped)
                piped.step(lambda: optimizer.step(), is_async=is_async)
            piped.synchronize()
            _evaluated(piped)
        assert sum("zero_grad" in str(each.message) for each in told) == 1


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("place", ["before", "in step_fn", "behind", "of parts"])
def test_zero_grad_of_the_module_clears_what_a_step_has_taken(place: str, is_async: bool) -> None:
    model = _model()
    plain = copy.deepcopy(model)
    taken = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.5)
    with warnings.catch_warnings(), roundpipe.compile(model, devices=["cpu"] * 2) as piped:
        warnings.simplefilter("error")
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.1, momentum=0.5)
        before = [parameter.detach().clone() for parameter in plain.parameters()]
        for _ in range(6):
            if place == "before":
                model.zero_grad()
            _round(piped)
            piped.step(
                lambda: (optimizer.step(), model.zero_grad() if place == "in step_fn" else None), is_async=is_async
            )
            for part in model if place == "of parts" else [model] if place == "behind" else []:
                part.zero_grad()
        piped.synchronize()
    for _ in range(6):  # an asynchronous step trains on weights that are one update old
        now = [parameter.detach().clone() for parameter in plain.parameters()]
        if is_async:
            _put(plain, before)
        nn.functional.cross_entropy(plain(X), LABELS).backward()
        _put(plain, now)
        taken.step()
        taken.zero_grad()
        before = now
    assert_close(dict(model.named_parameters()), dict(plain.named_parameters()))


@torch.no_grad()
def _put(model: nn.Module, values: list[torch.Tensor]) -> None:
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.data = value.clone()


def _cleared_before(piped: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    _round(piped)
    piped.step(lambda: optimizer.step(), is_async=False)


def _cleared_by_the_model(piped: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
    piped.zero_grad()
    _round(piped)
    piped.step(lambda: optimizer.step(), is_async=False)


def _cleared_by_hand(piped: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
    def step() -> None:
        optimizer.step()
        for parameter in piped.optim_parameters():
            parameter.grad = None

    _round(piped)
    piped.step(step, is_async=False)


def _accumulated(piped: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
    for index in range(2):
        _round(piped)
        if index:
            piped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        else:
            piped.step(lambda: None, is_async=False)


@pytest.mark.parametrize("step", [_stepped, _cleared_before, _cleared_by_the_model, _cleared_by_hand, _accumulated])
def test_those_that_are_cleared_or_meant_to_add_up_are_not(step: Any) -> None:
    model = _model()
    with warnings.catch_warnings(), roundpipe.compile(model, devices=["cpu"]) as piped:
        warnings.filterwarnings("error", "gradients that the last step had taken")
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.1)
        for _ in range(3):
            step(piped, optimizer)
        piped.synchronize()
        _evaluated(piped)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_backward_where_gradients_are_off_is_refused(off: Callable[[], Any]) -> None:
    model = _model()
    with roundpipe.compile(model, devices=["cpu"]) as piped:
        with off(), pytest.raises(ConfigError, match="call forward_loss with the same arguments"):
            _round(piped)
        assert not any(map(torch.is_tensor, gradients(model).values()))
        with off():
            loss = _evaluated(piped)
        assert_close(loss, nn.functional.cross_entropy(model(X), LABELS).detach())


def test_a_write_right_behind_an_asynchronous_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, exchange, is_due = _model(), HandOver.exchange, [False]

    def write_and_exchange(self: HandOver, *args: Any, **kwargs: Any) -> None:
        if is_due[0]:
            is_due[0] = False
            with torch.no_grad():
                model[0].weight.fill_(100.0)
        exchange(self, *args, **kwargs)

    monkeypatch.setattr(HandOver, "exchange", write_and_exchange)
    with roundpipe.compile(model, devices=["cpu"]) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.1)
        for step in range(3):
            _round(piped)
            is_due[0] = step == 2
            piped.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        with pytest.raises(ConfigError, match="0.weight: written while an asynchronous update was on its way"):
            piped.synchronize()
        piped.synchronize()


@pytest.mark.parametrize("of_wrapper", [False, True])
def test_an_average_of_weights_sees_the_latest_update(of_wrapper: bool) -> None:
    model = _model()
    averages = [AveragedModel(model), AveragedModel(model)]
    with roundpipe.compile(model, devices=["cpu"]) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.5)
        for _ in range(4):
            _round(piped)
            piped.step(lambda: (optimizer.step(), optimizer.zero_grad()))
            averages[0].update_parameters(piped if of_wrapper else model)
            piped.synchronize()
            averages[1].update_parameters(model)
            assert_close(averages[0].state_dict(), averages[1].state_dict())


def _clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()


def _of_layers(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_value_(parameters=[*model.parameters()][:2], clip_value=0.01)
    optimizer.step()
    optimizer.zero_grad()


def _stepped_and_cleared(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    model.zero_grad()


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """As nanoGPT's configure_optimizers has them."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trained if parameter.ndim > 1]
    others = [parameter for parameter in trained if parameter.ndim < 2]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


@pytest.mark.parametrize("update", [_clipped, _of_layers, _stepped_and_cleared])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_an_optimizer_of_the_models_own_parameters_trains_in_step_fn(
    update: Callable[..., None], dtype: torch.dtype, is_frozen: bool
) -> None:
    trained: list[dict[str, torch.Tensor]] = []
    for is_own in (True, False):
        model = _model().to(dtype)
        model[0].weight.requires_grad_(not is_frozen)
        with warnings.catch_warnings(), roundpipe.compile(model, devices=["cpu"]) as piped:
            warnings.simplefilter("error")
            own = {name: each for name, each in model.named_parameters() if each.requires_grad}
            copies = {own[name]: each for name, each in piped.optim_named_parameters()}
            groups = _groups(model)
            if not is_own:
                groups = [{**group, "params": [copies[each] for each in group["params"]]} for group in groups]
            optimizer = torch.optim.AdamW(groups, lr=0.05)
            for _ in range(4):
                loss_fn = lambda out, labels: nn.functional.cross_entropy(out.float(), labels)  # noqa: E731
                piped.forward_backward((X.to(dtype),), label=LABELS, loss_fn=loss_fn, loss_reduction="mean")
                piped.step(functools.partial(update, model, optimizer), is_async=False)
            trained.append({name: each.detach().clone() for name, each in piped.optim_named_parameters()})
            assert set(copies.values()) == {each for group in optimizer.param_groups for each in group["params"]}
    assert_close(*trained, rtol=0, atol=0)


def test_a_scaler_unscales_what_such_an_optimizer_steps() -> None:
    trained = []
    for is_own in (True, False):
        model, scaler = _model(), roundpipe.GradScaler(init_scale=1024.0)
        with roundpipe.compile(model, devices=["cpu"]) as piped:
            optimizer = torch.optim.SGD(model.parameters() if is_own else piped.optim_parameters(), lr=0.1)

            def update(scaler: Any = scaler, optimizer: Any = optimizer) -> None:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

            for _ in range(3):
                loss_fn = lambda *given, scaler=scaler: scaler.scale(nn.functional.cross_entropy(*given))  # noqa: E731
                piped.forward_backward((X,), label=LABELS, loss_fn=loss_fn, loss_reduction="mean")
                piped.step(update, is_async=False)
            trained.append({name: each.detach().clone() for name, each in model.named_parameters()})
    assert_close(*trained)


def test_lbfgs_has_a_list_of_its_own() -> None:
    model = _model()
    with roundpipe.compile(model, devices=["cpu"]) as piped:
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            piped.forward_backward((X,), label=LABELS, loss_fn=nn.functional.cross_entropy, loss_reduction="mean")
            piped.synchronize()
            return _evaluated(piped)

        before = _evaluated(piped)
        for _ in range(3):
            piped.step(lambda: optimizer.step(closure), is_async=False)
        assert _evaluated(piped) < 0.7 * before


class _WithFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.body(x).tanh()
        return self.head(h), h


@pytest.mark.parametrize("num_microbatch", [1, 3])
def test_an_output_that_keeps_its_gradient_lacks_what_comes_through_others(num_microbatch: int) -> None:
    config = roundpipe.RoundPipeRunConfig(num_microbatch=num_microbatch)
    with roundpipe.compile(_WithFeatures(), devices=["cpu"], model_run_config=config) as piped:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            logits, h = piped(X)
            (logits.sum() + h.sum()).backward()
    with (
        roundpipe.compile(_WithFeatures(), devices=["cpu"], model_run_config=config) as piped,
        pytest.warns(UserWarning, match="retain_grad\\(\\) of an output") as told,
    ):
        for _ in range(2):
            logits, h = piped(X)
            h.retain_grad()
            logits.sum().backward()
    assert len(told) == 1


@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.parametrize("has_step", [False, True])
def test_zero_grad_between_forward_and_backward(has_step: bool, is_own: bool) -> None:
    model = _model()
    plain = copy.deepcopy(model)
    with warnings.catch_warnings(), roundpipe.compile(model, devices=["cpu"] * 2) as piped:
        warnings.simplefilter("error")
        given = model.parameters() if is_own else piped.optim_parameters()
        optimizer, taken = torch.optim.SGD(given, lr=0.5), torch.optim.SGD(plain.parameters(), lr=0.5)
        for _ in range(5):
            losses = [nn.functional.cross_entropy(each(X), LABELS) for each in (piped, plain)]
            for module, loss in zip((model, plain), losses, strict=True):
                module.zero_grad()
                loss.backward()
            assert_close(*losses)
            taken.step()
            if has_step:
                piped.step(optimizer.step, is_async=False)
            else:
                optimizer.step()
    assert_close(dict(model.named_parameters()), dict(plain.named_parameters()))
