"""The wrapper itself: names and attributes, modes, random numbers, the optimizer's side, life and death."""

import copy
import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.errors import ClosedError, ConfigError
from roundpipe.wrappers.calls import ChainProgram
from roundpipe.wrappers.module_layers import chain_of_modules
from tests.runtime.models import (
    DTYPE,
    assert_equal_bits,
    assert_same,
    batch,
    config,
    eager_round,
    gradients,
    mlp,
    square_loss,
)

LR = 0.05


def train_once(piped, num=3, **options):
    return piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(num, **options))


def threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("roundpipe")}


# ---------------------------------------------------------------------------- layers, names, attributes


def test_a_sequential_has_one_layer_per_child():
    with roundpipe.RoundPipe(mlp(5)) as piped:
        assert len(piped._runner.source.chain) == 5
        assert [spec.name for spec in piped._runner.source.chain.specs] == ["0", "1", "2", "3", "4"]


def test_a_child_that_is_there_twice_is_two_layers():
    shared = nn.Linear(3, 3)
    with roundpipe.RoundPipe(nn.Sequential(shared, nn.Tanh(), shared)) as piped:
        assert len(piped._runner.source.chain) == 3


def test_any_other_module_is_one_layer():
    class Own(nn.Sequential):
        def forward(self, value):
            return super().forward(value) * 2

    for model in (nn.Linear(6, 6, dtype=DTYPE), Own(*mlp(3))):
        reference = copy.deepcopy(model)
        expected, _ = eager_round(reference, (batch(),), num=3)
        with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
            assert len(piped._runner.source.chain) == 1
            torch.testing.assert_close(train_once(piped), expected, rtol=0, atol=1e-10)
        assert_same(gradients(model), gradients(reference))


def test_the_name_is_the_callers_line_by_default():
    with roundpipe.RoundPipe(mlp(1), name="mine") as piped:
        assert piped._session.name == "mine"
    line = sys._getframe().f_lineno + 1
    with roundpipe.RoundPipe(mlp(1)) as piped:
        assert piped._session.name == f"test_pipe.py:{line}"


def test_attributes_are_those_of_the_model():
    model = mlp(2)
    model.note = "before"
    with roundpipe.RoundPipe(model) as piped:
        assert piped.model is model
        assert piped.note == "before"
        piped.note = "after"
        piped.added = nn.Linear(2, 2)
        assert model.note == "after" and isinstance(model.added, nn.Linear)
        del piped.note
        assert not hasattr(model, "note") and not hasattr(piped, "note")
        assert "added" in dir(piped) and "step" in dir(piped)
        del piped.added
        with pytest.raises(AttributeError, match="nothing"):
            piped.nothing


def test_attributes_are_those_of_the_original_model_if_one_is_set():
    model, original = mlp(2), nn.Module()
    original.inner, original.config = model, {"layers": 2}
    with roundpipe.RoundPipe(model) as piped:
        piped.set_original_model(original)
        assert piped.config == {"layers": 2} and piped.model is model
        piped.config = None
        assert original.config is None
        assert list(piped.state_dict()) == list(original.state_dict())
        assert dict(piped.named_parameters()).keys() == dict(original.named_parameters()).keys()
        piped.eval()
        assert not original.training and not model.training and not piped.training
        piped.train()
        assert original.training and model.training and piped.training


def test_parameters_buffers_and_state_are_the_models():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).to(DTYPE)
    with roundpipe.RoundPipe(model) as piped:
        assert all(a is b for a, b in zip(piped.parameters(), model.parameters(), strict=True))
        assert all(a is b for a, b in zip(piped.buffers(), model.buffers(), strict=True))
        assert list(piped.state_dict()) == list(model.state_dict())
        assert [name for name, _ in piped.named_modules()] == [name for name, _ in model.named_modules()]
        assert list(piped.children()) == list(model.children())


def test_modes_follow_the_model():
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.BatchNorm1d(6)).to(DTYPE).eval()
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        assert not piped.training
        expected = model(batch())
        torch.testing.assert_close(piped(batch()), expected, rtol=0, atol=1e-12)
        piped.train()
        assert model[1].training
        assert not torch.equal(piped(batch()), expected)
        model.eval()  # behind the wrapper's back
        torch.testing.assert_close(piped(batch()), model(batch()), rtol=0, atol=1e-12)


def test_weights_can_be_converted_but_not_moved():
    model = mlp(2)
    with roundpipe.RoundPipe(model) as piped:
        train_once(piped)
        piped.float()
        assert all(p.dtype is torch.float32 for p in model.parameters())
        loss = piped.forward_backward((batch().float(),), loss_fn=square_loss)
        assert loss.dtype is torch.float32
        with pytest.raises(ConfigError, match="streamed to the devices"):
            piped.to("meta")


# --------------------------------------------------------------------------------------- random numbers


def dropouts():
    return nn.Sequential(
        nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 6), nn.Dropout(0.5)
    ).to(DTYPE)


def dropout_round(num_workers, grain, plan=None, calls=2):
    torch.manual_seed(1)
    model = dropouts()
    torch.manual_seed(5)
    with roundpipe.RoundPipe(model, devices=["cpu"] * num_workers) as piped:
        losses = [train_once(piped, grain=grain, plan=plan) for _ in range(calls)]
    return losses, gradients(model), torch.rand(())


def test_dropout_is_fixed_by_the_seed_for_any_rotation():
    losses, grads, after = dropout_round(1, "stage")
    assert losses[0] != losses[1], "each call draws anew"
    singles = roundpipe.ExecutePlan([(i, i + 1) for i in range(5)], (5, 6), [(i, i + 1) for i in reversed(range(5))])
    for num_workers, grain, plan in [(1, "layer", None), (2, "stage", None), (3, "layer", singles)]:
        others, other_grads, other_after = dropout_round(num_workers, grain, plan)
        assert all(torch.equal(a, b) for a, b in zip(others, losses, strict=True))
        assert_equal_bits(other_grads, grads)
        assert torch.equal(other_after, after), "the caller's generator advanced differently"


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_recomputation_repeats_the_draws(grain):
    class Draws(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))
            self.seen = []

        def forward(self, value):
            drawn = torch.rand(value.shape, dtype=DTYPE)
            self.seen.append((roundpipe.doing_recompute(), drawn))
            return value * drawn * self.weight

    model = nn.Sequential(*(Draws() for _ in range(3))).to(DTYPE)
    plan = roundpipe.ExecutePlan([(0, 2)], (2, 3), [(0, 2)])
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        train_once(piped, grain=grain, plan=plan)
    for layer in model[:2]:
        first = [drawn for again, drawn in layer.seen if not again]
        second = [drawn for again, drawn in layer.seen if again]
        assert len(first) == len(second) == 3
        for drawn in first:
            assert any(torch.equal(drawn, other) for other in second)
        assert not torch.equal(first[0], first[1])
    assert [again for again, _ in model[2].seen] == [False] * 3


def test_a_model_that_draws_nothing_leaves_the_generator_alone():
    before = torch.get_rng_state()
    model = mlp(3)
    torch.set_rng_state(before)
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        train_once(piped)
        piped(batch())
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_of_the_loss_function_do_not_disturb_the_caller():
    with roundpipe.RoundPipe(dropouts(), devices=["cpu"] * 3) as piped:
        torch.manual_seed(4)
        train_once(piped)
        first = torch.get_rng_state()
        torch.manual_seed(4)
        train_once(piped, num=2)
        assert torch.equal(torch.get_rng_state(), first)


# ------------------------------------------------------------------------------------ optimizer's side


def optimizer_of(kind, parameters):
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=LR, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=0.1)


def batches(num=5):
    return [batch(seed=10 + i) for i in range(num)]


def mean_loss(output, label):
    return output.square().mean()


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_synchronous_steps_follow_eager(kind, workers):
    model = mlp()
    reference = copy.deepcopy(model)
    eager_optimizer = optimizer_of(kind, reference.parameters())
    with roundpipe.RoundPipe(model, devices=["cpu"] * workers) as piped:
        optimizer = optimizer_of(kind, piped.optim_parameters())

        def step_fn():
            optimizer.step()
            optimizer.zero_grad()

        for one in batches():
            expected, _ = eager_round(reference, (one,), loss_fn=mean_loss, num=3)
            found = piped.forward_backward((one,), loss_fn=mean_loss, run_config=config(3))
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
            eager_optimizer.step()
            eager_optimizer.zero_grad()
            piped.step(step_fn, is_async=False)
        piped.synchronize()
        assert_same(dict(model.named_parameters()), dict(reference.named_parameters()))


@pytest.mark.parametrize("workers", [1, 2])
def test_asynchronous_steps_are_one_step_behind(workers):
    """``W_k = W_{k-1} - lr * grad(W_{max(k-2, 0)})``."""
    model = mlp()
    scratch = copy.deepcopy(model)
    weights = [{name: p.detach().clone() for name, p in model.named_parameters()}]
    losses = []
    for k, one in enumerate(batches(6), start=1):
        scratch.load_state_dict(weights[max(k - 2, 0)])
        scratch.zero_grad()
        losses.append(eager_round(scratch, (one,), loss_fn=mean_loss, num=3)[0])
        gradient = gradients(scratch)
        weights.append({name: w - LR * gradient[name] for name, w in weights[k - 1].items()})
    with roundpipe.RoundPipe(model, devices=["cpu"] * workers) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=LR)

        def step_fn():
            optimizer.step()
            optimizer.zero_grad()

        for one, expected in zip(batches(6), losses, strict=True):
            found = piped.forward_backward((one,), loss_fn=mean_loss, run_config=config(3))
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
            piped.step(step_fn)
        piped.synchronize()
        assert_same(dict(model.named_parameters()), weights[-1])


def test_an_asynchronous_step_does_not_block():
    release = threading.Event()
    with roundpipe.RoundPipe(mlp(), devices=["cpu"] * 2) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=LR)
        train_once(piped)

        def step_fn():
            assert release.wait(20)
            optimizer.step()

        piped.step(step_fn)
        loss = train_once(piped)
        assert not release.is_set() and torch.isfinite(loss)
        release.set()
        piped.synchronize()


def test_parameters_inside_step_fn_are_the_optimizers():
    model = mlp()
    with roundpipe.RoundPipe(model) as piped:
        copies = list(piped.optim_parameters())
        seen = {}

        def step_fn():
            seen["inside"] = list(piped.parameters())
            seen["named"] = dict(piped.named_parameters())

        train_once(piped)
        piped.step(step_fn, is_async=False)
        assert all(a is b for a, b in zip(seen["inside"], copies, strict=True))
        assert seen["named"].keys() == dict(model.named_parameters()).keys()
        assert all(a is b for a, b in zip(piped.parameters(), model.parameters(), strict=True))
        with roundpipe.OptimizerCtx():
            assert all(a is b for a, b in zip(piped.parameters(), copies, strict=True))


def test_an_exception_in_step_fn_is_raised_at_the_next_call():
    class Mine(Exception):
        pass

    def step_fn():
        raise Mine("in the step")

    with roundpipe.RoundPipe(mlp(), devices=["cpu"] * 2) as piped:
        train_once(piped)
        piped.step(step_fn)
        time.sleep(0.2)
        with pytest.raises(Mine, match="in the step"):
            train_once(piped)
        assert torch.isfinite(train_once(piped))


def test_closing_ends_threads_also_if_a_step_failed():
    def step_fn():
        raise ValueError("in the step")

    before = threads()
    piped = roundpipe.RoundPipe(mlp(), devices=["cpu"] * 2)
    train_once(piped)
    piped.step(step_fn)
    with pytest.raises(ValueError, match="in the step"):
        piped.close()
    piped.close()
    assert threads() <= before


def test_synchronize_before_step_loses_nothing():
    model = mlp()
    reference = copy.deepcopy(model)
    with roundpipe.RoundPipe(model) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=LR)
        eager_optimizer = torch.optim.SGD(reference.parameters(), lr=LR)
        for _ in range(2):
            eager_round(reference, (batch(),), num=3)
            train_once(piped)
            piped.synchronize()
            assert_same(gradients(model), gradients(reference))
        piped.step(optimizer.step, is_async=False)
        eager_optimizer.step()
        piped.synchronize()
        assert_same(dict(model.named_parameters()), dict(reference.named_parameters()))


def test_zero_grad_drops_what_was_accumulated():
    model = mlp()
    reference = copy.deepcopy(model)
    eager_round(reference, (batch(),), num=3)
    with roundpipe.RoundPipe(model) as piped:
        train_once(piped)
        piped.zero_grad()
        train_once(piped)
        piped.synchronize()
        assert_same(gradients(model), gradients(reference))


def test_loading_a_state_reaches_the_optimizer():
    model, other = mlp(), mlp()
    with roundpipe.RoundPipe(model) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.0)
        train_once(piped)
        piped.step(optimizer.step)
        piped.load_state_dict(other.state_dict())
        train_once(piped)
        piped.step(optimizer.step, is_async=False)
        piped.synchronize()
        assert_equal_bits(dict(model.named_parameters()), dict(other.named_parameters()))


def test_half_precision_weights_with_float32_copies():
    model = mlp().bfloat16()
    with roundpipe.RoundPipe(model, optim_dtype=torch.float32, devices=["cpu"] * 2) as piped:
        optimizer = torch.optim.AdamW(piped.optim_parameters(), lr=1e-4)
        assert all(p.dtype is torch.float32 for p in piped.optim_parameters())
        before = [p.clone() for p in piped.optim_parameters()]
        piped.forward_backward((batch().bfloat16(),), loss_fn=square_loss, run_config=config(3))
        piped.step(optimizer.step, is_async=False)
        assert all(p.dtype is torch.bfloat16 for p in model.parameters())
        for old, new, held in zip(before, piped.optim_parameters(), model.parameters(), strict=True):
            assert not torch.equal(old, new)
            assert torch.equal(held, new.bfloat16())


# --------------------------------------------------------------------------------------- life and death


def test_nothing_starts_before_the_first_call():
    before = threads()
    with roundpipe.RoundPipe(mlp(), devices=["cpu"] * 3) as piped:
        assert threads() == before
        train_once(piped)
        assert len(threads() - before) == 2 * 3, "each worker's own, and the one that brings its gradients home"
    assert threads() == before


def test_importing_starts_nothing():
    code = (
        "import threading, torch, roundpipe; "
        "assert threading.active_count() == 1, threading.enumerate(); "
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_closed_model_says_so():
    piped = roundpipe.RoundPipe(mlp(), name="mine")
    train_once(piped)
    piped.close()
    piped.close()
    for call in (lambda: piped(batch()), lambda: train_once(piped), lambda: piped.step(lambda: None)):
        with pytest.raises(ClosedError, match="mine was closed"):
            call()
    assert list(piped.state_dict()), "the weights are still there"


def test_backward_after_close_says_so():
    with roundpipe.RoundPipe(mlp()) as piped:
        output = piped(batch())
    with pytest.raises(ClosedError):
        output.sum().backward()


def wait_for_end(is_over, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not is_over() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return is_over()


def test_a_deleted_model_ends_its_threads():
    before = threads()
    model = mlp()
    piped = roundpipe.RoundPipe(model, devices=["cpu"] * 2)
    optimizer = torch.optim.SGD(piped.optim_parameters(), lr=LR)
    train_once(piped)
    piped.step(optimizer.step)
    piped.synchronize()
    piped(batch()).sum().backward()
    wrapper = weakref.ref(piped)
    del piped
    assert wait_for_end(lambda: wrapper() is None)
    assert wait_for_end(lambda: threads() <= before)
    assert torch.isfinite(model(batch())).all(), "the user's model lives on"


def test_a_process_ends_with_an_open_model():
    code = (
        "import torch, roundpipe; from torch import nn; "
        "model = roundpipe.RoundPipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), devices=['cpu'] * 2); "
        "optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1); "
        "model.forward_backward((torch.ones(4, 4),), loss_fn=lambda output, _: output.sum()); "
        "model.step(optimizer.step); print('end')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "end\n" and "Error" not in done.stderr, done.stderr


def test_two_models_side_by_side():
    one, other = mlp(), mlp()
    references = copy.deepcopy(one), copy.deepcopy(other)
    with (
        roundpipe.RoundPipe(one, devices=["cpu"] * 2) as first,
        roundpipe.RoundPipe(other, devices=["cpu"] * 2) as second,
    ):
        for piped, reference in zip((first, second) * 2, references * 2, strict=True):
            train_once(piped)
            eager_round(reference, (batch(),), num=3)
    assert_same(gradients(one), gradients(references[0]))
    assert_same(gradients(other), gradients(references[1]))


# ---------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "options, message",
    [
        ({"devices": []}, "names no device"),
        ({"devices": ["nowhere:0"]}, "not a device torch knows"),
        ({"devices": [1.5]}, "is float"),
        ({"pin_model": "maybe"}, "'alloc', 'register' and 'off'"),
        ({"pin_model": "register", "devices": ["cpu"]}, "CUDA"),
        ({"optim_dtype": torch.int32}, "floating-point"),
        ({"optim_dtype": "float32"}, "floating-point"),
        ({"model_run_config": {}}, "RoundPipeRunConfig"),
    ],
)
def test_bad_options_say_what_is_allowed(options, message):
    with pytest.raises(ConfigError, match=message):
        roundpipe.RoundPipe(mlp(1), **options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"input_args": batch()}, "input_args is Tensor"),
        ({"input_kwargs": [1]}, "input_kwargs is list"),
        ({"loss_fn": None}, "loss_fn is NoneType"),
        ({"run_config": {}}, "RoundPipeRunConfig"),
    ],
)
def test_bad_arguments_say_what_is_allowed(options, message):
    with roundpipe.RoundPipe(mlp(1)) as piped:
        with pytest.raises(ConfigError, match=message):
            piped.forward_backward(**{"input_args": (batch(),), "loss_fn": square_loss, **options})
        assert torch.isfinite(train_once(piped))


def test_a_model_must_be_a_module():
    with pytest.raises(ConfigError, match="got list"):
        roundpipe.RoundPipe([nn.Linear(2, 2)])


def test_limits_of_a_device_must_be_positive():
    for field in ("memory_bytes", "upload_bytes_per_s", "download_bytes_per_s"):
        with pytest.raises(ConfigError, match=field):
            roundpipe.Device("cpu", **{field: 0})


@pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator is there")
def test_an_accelerator_that_is_not_there_is_refused():
    for given in ("cuda:0", 0, torch.device("cuda")):
        with pytest.raises(ConfigError, match="no accelerator"):
            roundpipe.RoundPipe(mlp(1), devices=given)


# ------------------------------------------------------------------------------------- several chains


def test_microbatches_of_one_call_may_have_chains_of_their_own():
    """As where their shapes need traces of their own; gradients flow into one graph in front of them all."""

    class BySize:
        trace_count = 2

        def __init__(self, model):
            self.chains = {size: chain_of_modules(list(model.named_children())) for size in (2, 3)}

        def chain_for(self, args, kwargs):
            return self.chains[len(args[0])]

    front, model = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).to(DTYPE), mlp()
    references = copy.deepcopy(front), copy.deepcopy(model)
    outputs = references[1](references[0](batch(8)))
    expected = square_loss(outputs, None)
    expected.backward()
    with roundpipe.RoundPipe(ChainProgram(model, BySize(model)), devices=["cpu"] * 2) as piped:
        assert piped.trace_count == 2
        given = front(batch(8))  # in microbatches of 3, 3 and 2
        loss, found = piped.forward_backward((given,), loss_fn=square_loss, return_outputs=True, run_config=config(3))
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-10)
        torch.testing.assert_close(found, outputs.detach(), rtol=0, atol=1e-10)
        for one, reference in zip((front, model), references, strict=True):
            assert_same(gradients(one), gradients(reference))
            one.zero_grad()
        square_loss(piped(front(batch(8)), roundpipe_run_config=config(3)), None).backward()
        for one, reference in zip((front, model), references, strict=True):
            assert_same(gradients(one), gradients(reference))


@pytest.mark.parametrize("outer", ["compile", "compile late", "wrap", "RoundPipe", "AutoRoundPipe"])
@pytest.mark.parametrize("kind", [roundpipe.RoundPipe, roundpipe.AutoRoundPipe])
def test_a_wrapper_inside_of_what_is_wrapped_is_named(kind, outer):
    make = {
        "compile": lambda model: roundpipe.compile(model, example_args=(batch(),), devices=["cpu"]),
        "compile late": lambda model: roundpipe.compile(model, devices=["cpu"]),
        "wrap": lambda model: roundpipe.wrap_model_to_roundpipe(model, devices=["cpu"]),
        "RoundPipe": lambda model: roundpipe.RoundPipe(model, devices=["cpu"]),
        "AutoRoundPipe": lambda model: roundpipe.AutoRoundPipe(model, devices=["cpu"]),
    }[outer]
    inner = mlp(2)
    with kind(inner, devices=["cpu"]) as pipe:
        model = nn.Sequential(nn.Linear(6, 6), nn.ModuleDict({"body": pipe})).to(DTYPE)
        model[1].forward = pipe.forward
        words = rf"1\.body of the Sequential is a {kind.__name__} already.*Wrap the Sequential alone"
        with pytest.raises(ConfigError, match=words):
            make(model)
        with pytest.raises(ConfigError, match="already; pass the original"):
            make(pipe)
        around = nn.Sequential(nn.Linear(6, 6), pipe).to(DTYPE)  # plain PyTorch, and allowed
        torch.testing.assert_close(around(batch()), inner(around[0](batch())), rtol=0, atol=1e-12)


@pytest.mark.parametrize("change", ["replaced", "swapped", "appended", "deleted", "draws"])
def test_children_of_a_sequential_may_change_between_calls(change):
    model = mlp(4)
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        for changes in (False, True):
            if changes and change == "replaced":
                model[1] = mlp(1)
            elif changes and change == "swapped":
                model[1], model[2] = model[2], nn.Sequential(model[1], model[0])
            elif changes and change == "appended":
                model.append(model[0])
            elif changes and change == "deleted":
                del model[2]
            elif changes:  # below the children: the layers stay, what is known of them does not
                model[1][0].register_buffer("mask", torch.ones(6))
                model[1][1] = nn.Sequential(nn.Tanh(), Flips())
            model.zero_grad()
            reference = copy.deepcopy(model)
            expected, _ = eager_round(reference, (batch(),), num=3)
            Flips.seen.clear()
            found = piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(3))
            if change == "draws" and changes:
                assert len(Flips.seen["forward"]) > 1 and Flips.seen["forward"] == Flips.seen["recomputation"]
                continue
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
            assert_same(gradients(model), gradients(reference))


class Flips(nn.Module):
    """Draws, and notes what it drew in a forward and in its recomputation."""

    seen = {}

    def forward(self, value):
        signs = torch.randint(0, 2, (6,)) * 2 - 1
        phase = "recomputation" if roundpipe.doing_recompute() else "forward"
        self.seen.setdefault(phase, set()).add(tuple(signs.tolist()))
        return value * signs


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_gradients_flow_to_labels(is_async, workers):
    """Such as the outputs of a teacher that is trained too; what of a label needs no gradient gets none."""

    def loss_fn(output, label):
        return ((output - label["target"]) * label["weight"]).square().sum()

    model = mlp()
    reference, teacher = copy.deepcopy(model), nn.Linear(6, 6).to(torch.float64)
    other_teacher = copy.deepcopy(teacher)
    weight, leaf = batch(seed=4), batch(seed=5).requires_grad_()
    with roundpipe.RoundPipe(model, devices=["cpu"] * workers, model_run_config=config(3)) as piped:
        piped.optim_parameters()
        for round_ in range(3):
            label = {"target": other_teacher(batch(seed=round_)), "weight": weight}
            expected, _ = eager_round(reference, (batch(),), label=label, loss_fn=loss_fn)
            label = {"target": teacher(batch(seed=round_)), "weight": weight}
            found = piped.forward_backward((batch(),), label=label, loss_fn=loss_fn)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
            piped.step(lambda: None, is_async=is_async)
        piped.forward_backward((batch(),), label={"target": leaf, "weight": weight}, loss_fn=loss_fn)
    assert weight.grad is None
    assert_same(gradients(teacher), gradients(other_teacher))
    expected_leaf = leaf.detach().clone().requires_grad_()
    eager_round(reference, (batch(),), label={"target": expected_leaf, "weight": weight}, loss_fn=loss_fn)
    torch.testing.assert_close(leaf.grad, expected_leaf.grad, rtol=1e-10, atol=0)
