"""Loops without `RoundPipe.step`: the optimizer is stepped as in any training loop, with either list of parameters."""

import copy
import functools
import warnings

import pytest
import torch
from torch import nn

import roundpipe
from tests.runtime.models import DTYPE, assert_same, batch, config, mlp, square_loss

LR = 0.05
LISTS = {"copies": lambda piped: piped.optim_parameters(), "own": lambda piped: piped.model.parameters()}
lists = pytest.mark.parametrize("parameters", LISTS.values(), ids=LISTS)
optimizers = pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD], ids=["adamw", "sgd"])


class Half(nn.Module):
    """Part of it runs on the host, by plain autograd."""

    def __init__(self):
        super().__init__()
        self.first, self.rest = nn.Linear(6, 6), mlp(3)

    def forward(self, x):
        return self.rest(self.first(x))


def halves(model, on_host=("first",), **options):
    kept = {"use_sequential_preset": False, "skip_modules": [getattr(model, name) for name in on_host]}
    return roundpipe.wrap_model_to_roundpipe(model, lower_threshold=1, upper_threshold=0, **kept, **options)


WRAPS = {
    "layers": (mlp, roundpipe.RoundPipe),
    "compiled": (mlp, roundpipe.compile),
    "in parts": (lambda: Half().to(DTYPE), halves),
    "on the host": (lambda: Half().to(DTYPE), functools.partial(halves, on_host=("first", "rest"))),
}
wraps = pytest.mark.parametrize(("make", "wrap"), WRAPS.values(), ids=WRAPS)


def made(make):
    torch.manual_seed(0)
    return make()


def weights(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def eager(make, kind, steps=4, between=lambda loss, optimizer: loss.backward()):
    """The same loop in plain PyTorch."""
    model = made(make)
    optimizer = kind(model.parameters(), lr=LR)
    for number in range(steps):
        between(square_loss(model(batch(seed=number)), None), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@wraps
@lists
@optimizers
@pytest.mark.filterwarnings("error:gradients came")
def test_the_classic_loop_trains(make, wrap, parameters, kind):
    model = made(make)
    with wrap(model, devices=["cpu"] * 2) as piped:
        optimizer = kind(parameters(piped), lr=LR)
        for number in range(4):
            square_loss(piped(batch(seed=number)), None).backward()
            optimizer.step()
            assert_same(weights(piped), weights(model), atol=0)
            optimizer.zero_grad()
    assert_same(weights(model), eager(make, kind))


@wraps
@lists
@pytest.mark.filterwarnings("ignore:.*nothing overlaps")
def test_forward_backward_and_the_optimizers_own_step(make, wrap, parameters):
    model = made(make)
    with wrap(model, devices=["cpu"] * 2) as piped:
        optimizer = torch.optim.AdamW(parameters(piped), lr=LR)
        for number in range(4):
            piped.forward_backward((batch(seed=number),), loss_fn=square_loss, run_config=config(3))
            optimizer.step()
            optimizer.zero_grad()
    assert_same(weights(model), eager(make, torch.optim.AdamW))


@wraps
@lists
@pytest.mark.parametrize("clipped", LISTS.values(), ids=[f"clips {name}" for name in LISTS])
@pytest.mark.filterwarnings("error:gradients came")
def test_gradients_are_clipped_in_between(make, wrap, parameters, clipped):
    def clip(loss, optimizer):
        loss.backward()
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)

    model = made(make)
    with wrap(model, devices=["cpu"] * 2) as piped:
        optimizer = torch.optim.SGD(parameters(piped), lr=LR)
        to_clip = list(clipped(piped))
        for number in range(3):
            square_loss(piped(batch(seed=number)), None).backward()
            norm = torch.nn.utils.clip_grad_norm_(to_clip, 0.1)
            assert norm > 0.1
            optimizer.step()
            optimizer.zero_grad()
    assert_same(weights(model), eager(make, torch.optim.SGD, 3, clip))


def test_gradients_are_clipped_between_a_round_and_its_step():
    def clip(loss, optimizer):
        loss.backward()
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)

    model = made(mlp)
    with roundpipe.compile(model, devices=["cpu"] * 2) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=LR)
        for number in range(3):
            piped.forward_backward((batch(seed=number),), loss_fn=square_loss, run_config=config(1))
            assert torch.nn.utils.clip_grad_norm_(piped.optim_parameters(), 0.1) > 0.1
            piped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    assert_same(weights(model), eager(mlp, torch.optim.SGD, 3, clip))


@pytest.mark.filterwarnings("error:options of the optimizer")
def test_a_rate_that_changes_before_an_update_has_read_it_is_warned_of_once(monkeypatch):
    with roundpipe.RoundPipe(made(mlp), devices="cpu") as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=LR)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        call = {"input_args": (batch(),), "loss_fn": square_loss}
        for is_async in (False, True, True):
            piped.forward_backward(**call)
            piped.step(lambda: (optimizer.step(), scheduler.step(), optimizer.zero_grad()), is_async)
        options = piped._session.optimizer._runner.options  # private: what the loop does must not depend on timing
        look = options.has_changed
        monkeypatch.setattr(options, "has_changed", lambda: (scheduler.step(), look())[1])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                piped.forward_backward(**call)
                piped.step(lambda: (optimizer.step(), optimizer.zero_grad()))
                piped.synchronize()
    assert ["depends on timing. Put scheduler.step()" in str(each.message) for each in caught].count(True) == 1


@pytest.mark.parametrize("clipped", LISTS.values(), ids=[f"clips {name}" for name in LISTS])
@lists
def test_gradients_of_half_precision_are_clipped_in_between(parameters, clipped):
    model = made(mlp).to(torch.bfloat16)
    with roundpipe.compile(model, devices=["cpu"] * 2) as piped:
        optimizer = torch.optim.SGD(parameters(piped), lr=1.0)
        to_clip = list(clipped(piped))
        for number in range(2):
            before = [parameter.detach().float().clone() for parameter in optimizer.param_groups[0]["params"]]
            square_loss(piped(batch(seed=number).bfloat16()), None).backward()
            torch.nn.utils.clip_grad_norm_(to_clip, 0.1)
            optimizer.step()
            optimizer.zero_grad()
            after = optimizer.param_groups[0]["params"]
            moved = torch.stack([(a.detach().float() - b).norm() for a, b in zip(after, before, strict=True)]).norm()
            assert 0.08 < moved < 0.12


@lists
@pytest.mark.parametrize("scaler_kind", [roundpipe.GradScaler, torch.amp.GradScaler], ids=["ours", "torch's"])
def test_a_scaler_and_a_scheduler(parameters, scaler_kind):
    model = made(mlp)
    expected_model = copy.deepcopy(model)
    plain = torch.optim.AdamW(expected_model.parameters(), lr=LR)
    plain_scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    scaler = scaler_kind("cpu", init_scale=1024.0, growth_interval=2)
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        optimizer = torch.optim.AdamW(parameters(piped), lr=LR)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for number in range(4):
            square_loss(expected_model(batch(seed=number)), None).backward()
            plain.step()
            plain.zero_grad()
            plain_scheduler.step()
            scaler.scale(square_loss(piped(batch(seed=number)), None)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
        assert scaler.get_scale() == 4096.0
        before = weights(model)
        (piped(batch()).sum() * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == 2048.0
        assert_same(weights(model), before, atol=0)
    assert_same(weights(model), weights(expected_model))


@lists
@pytest.mark.parametrize("where", ["before forward", "before backward", "after step", "by the wrapper", "by the model"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_may_be_cleared_anywhere(parameters, where, set_to_none):
    model = made(mlp)
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        list(piped.optim_parameters())  # there are copies, whatever the optimizer has
        optimizer = torch.optim.AdamW(parameters(piped), lr=LR)
        for number in range(4):
            if where == "before forward":
                optimizer.zero_grad(set_to_none)
            loss = square_loss(piped(batch(seed=number)), None)
            if where == "before backward":
                optimizer.zero_grad(set_to_none)
            loss.backward()
            optimizer.step()
            if where == "after step":
                optimizer.zero_grad(set_to_none)
            elif where.startswith("by"):
                (piped if where == "by the wrapper" else model).zero_grad(set_to_none)
    assert_same(weights(model), eager(mlp, torch.optim.AdamW))


@lists
def test_gradients_accumulate_over_backwards(parameters):
    model = made(mlp)
    expected = copy.deepcopy(model)
    plain = torch.optim.SGD(expected.parameters(), lr=LR)
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        optimizer = torch.optim.SGD(parameters(piped), lr=LR)
        for number in range(3):
            for part in range(3):
                x = batch(seed=3 * number + part)
                square_loss(expected(x), None).backward()
                square_loss(piped(x), None).backward()
            for each in (plain, optimizer):
                each.step()
                each.zero_grad()
    assert_same(weights(model), weights(expected))


def test_an_optimizer_that_evaluates_the_loss_itself():
    def trained(model, call, parameters):
        optimizer = torch.optim.LBFGS(parameters, lr=0.1, max_iter=4)

        def closure():
            optimizer.zero_grad()
            loss = square_loss(call(batch()), None)
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        return weights(model)

    expected_model = made(mlp)
    expected = trained(expected_model, expected_model, expected_model.parameters())
    for parameters in LISTS.values():
        model = made(mlp)
        with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
            assert_same(trained(model, piped, parameters(piped)), expected, atol=1e-8)


def test_several_optimizers_and_a_loop_by_hand():
    model, expected = made(mlp), made(mlp)
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        copies = list(piped.optim_parameters())
        pairs = [
            (torch.optim.SGD(side[:3], lr=LR), torch.optim.AdamW(side[3:6], lr=LR))
            for side in (copies, list(expected.parameters()))
        ]
        for number in range(3):
            square_loss(expected(batch(seed=number)), None).backward()
            square_loss(piped(batch(seed=number)), None).backward()
            for each in (optimizer for pair in pairs for optimizer in pair):
                each.step()
            with torch.no_grad():
                for side in (copies, list(expected.parameters())):
                    for parameter in side[6:]:
                        parameter -= LR * parameter.grad
                    for parameter in side:
                        parameter.grad = None
        piped.synchronize()
        assert_same(weights(model), weights(expected))


def test_weights_that_are_written_between_steps_count():
    model, expected = made(mlp), made(mlp)
    plain = torch.optim.SGD(expected.parameters(), lr=LR)
    with roundpipe.RoundPipe(model, devices=["cpu"]) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=LR)
        for number in range(3):
            for module, call, each in ((expected, expected, plain), (model, piped, optimizer)):
                square_loss(call(batch(seed=number)), None).backward()
                each.step()
                each.zero_grad()
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter.clamp_(-0.1, 0.1)
    assert_same(weights(model), weights(expected))


@lists
def test_a_loop_may_change_over_with_a_warning_at_most(parameters):
    model, expected = made(mlp), made(mlp)
    plain = torch.optim.SGD(expected.parameters(), lr=LR)
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=LR)
        later = torch.optim.SGD(parameters(piped), lr=LR)
        for number in range(5):
            square_loss(expected(batch(seed=number)), None).backward()
            plain.step()
            plain.zero_grad()
            piped.forward_backward((batch(seed=number),), loss_fn=square_loss, run_config=config(3))
            if number < 1 or number == 3:
                piped.step(lambda: (optimizer.step(), optimizer.zero_grad()))
                piped.synchronize()
            else:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    later.step()
                assert len(caught) == (number == 1 or number == 4) * (parameters is LISTS["copies"])
                later.zero_grad()
    assert_same(weights(model), weights(expected))


def test_after_an_error_in_the_optimizer_training_goes_on():
    model = made(mlp)
    with roundpipe.RoundPipe(model, devices=["cpu"]) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=LR)
        square_loss(piped(batch()), None).backward()

        def fails():
            raise KeyError

        with pytest.raises(KeyError):
            optimizer.step(fails)
        optimizer.step()
        optimizer.zero_grad()
        assert_same(weights(model), weights(piped))
        square_loss(piped(batch()), None).backward()


def test_optimizers_of_other_models_are_left_alone():
    other = made(mlp)
    optimizer = torch.optim.SGD(other.parameters(), lr=LR)
    with roundpipe.RoundPipe(made(mlp), devices=["cpu"]) as piped:
        handle = piped.step(lambda: None)
        square_loss(other(batch()), None).backward()
        optimizer.step()
        handle.wait()
    assert_same(weights(other), weights(other))
    before = weights(piped.model)
    own = torch.optim.SGD(piped.model.parameters(), lr=LR)  # the wrapper is closed, the model is the user's own
    square_loss(piped.model(batch()), None).backward()
    own.step()
    assert any(not torch.equal(before[name], value) for name, value in weights(piped.model).items())


def test_a_step_of_another_model_inside_an_asynchronous_step_fn_is_refused():
    with roundpipe.RoundPipe(made(mlp), devices=["cpu"]) as one, roundpipe.RoundPipe(mlp(), devices=["cpu"]) as two:
        optimizer = torch.optim.SGD(two.optim_parameters(), lr=LR)
        square_loss(two(batch()), None).backward()
        with pytest.raises(roundpipe.ConfigError, match="inside the step_fn of another model"):
            one.step(optimizer.step).result()
        one.step(optimizer.step, is_async=False)
        two.zero_grad()
        assert_same(weights(two.model), weights(two), atol=0)


def test_torch_calls_back_behind_a_backward():
    """The way to that is private to torch; where this fails, see `wrappers/deferred.py`."""
    seen = []

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            # private to torch: this is what holds it in place
            torch.autograd.Variable._execution_engine.queue_callback(lambda: seen.append(leaf.grad is not None))
            return gradient

    leaf = torch.ones(2, requires_grad=True)
    Node.apply(leaf * 2).sum().backward()
    assert seen == [True]
