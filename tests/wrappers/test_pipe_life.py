"""The life of a `RoundPipe`, and what it refuses."""

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
from roundpipe.fx.guards.model_guard import ModelGuard
from roundpipe.wrappers.calls import ChainProgram
from roundpipe.wrappers.module_layers import chain_of_modules
from tests.runtime.models import (
    DTYPE,
    assert_same,
    batch,
    config,
    eager_round,
    gradients,
    mlp,
    square_loss,
)
from tests.wrappers.cases_pipe import LR, threads, train_once


def test_nothing_starts_before_the_first_call():
    before = threads()
    with roundpipe.RoundPipe(mlp(), devices=["cpu"] * 3) as piped:
        assert threads() == before
        train_once(piped)
        assert len(threads() - before) == 3 * 3, "each worker's own, and those that bring and convert its gradients"
    assert threads() == before


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


def test_another_compile_waits_for_the_update_that_is_not_over():
    held, names = threading.Event(), {"optimizer": "the first"}
    seen = []
    with roundpipe.RoundPipe(mlp()) as first:
        train_once(first)
        handle = first.step(lambda: (held.wait(), seen.append(names["optimizer"])))
        threading.Timer(0.5, held.set).start()
        with roundpipe.RoundPipe(mlp()):
            names["optimizer"] = "the second"
            assert handle.done()
    assert seen == ["the first"], "a notebook's cells may give its names to the next model's objects"


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


class Collects(nn.Module):
    """Its forward collects garbage, as any that makes objects may."""

    def __init__(self):
        super().__init__()
        self.layers = mlp(3)

    def forward(self, x):
        gc.collect()
        return self.layers(x)


@pytest.fixture
def no_garbage_collected():
    gc.disable()
    yield
    gc.enable()


def test_a_model_that_goes_while_another_is_traced_leaves_the_trace_alone(monkeypatch, no_garbage_collected):
    failed = []
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: failed.append(raised.exc_value))
    first = mlp()
    expected = copy.deepcopy(first)
    piped = roundpipe.compile(first, devices=["cpu"])
    optimizer = torch.optim.SGD(piped.optim_parameters(), lr=LR)
    plain = torch.optim.SGD(expected.parameters(), lr=LR)
    for module, own in ((piped, optimizer), (expected, plain)):
        square_loss(module(batch()), None).backward()
        own.step()
    in_a_circle = [piped]
    in_a_circle.append(in_a_circle)
    del piped, module, in_a_circle
    with roundpipe.compile(nn.Sequential(Collects(), mlp(2)), example_args=(batch(),), devices=["cpu"]) as other:
        assert len(other.partition_table().splitlines()) > 2 and not failed
    assert_same(first.state_dict(), expected.state_dict())


COMPILES = """
import gc, linecache
import torch, roundpipe
from torch.fx.graph_module import _loader
from roundpipe.fx.sizes import ShapeWorld
from tests.runtime.models import batch, mlp
from tests.wrappers.cases_pipe import train_once

for _ in range(3):
    with roundpipe.compile(mlp(), example_args=(batch(),), devices=["cpu"]) as piped:
        train_once(piped)
del piped
for _ in range(2):  # what has a finalizer goes in the second
    gc.collect()
worlds = sum(type(each) is ShapeWorld for each in gc.get_objects())
print(worlds, len(_loader.eval_cache), sum(name.startswith("<eval_with_key>") for name in linecache.cache))
"""


def test_a_compile_leaves_nothing_behind():
    """Neither in torch's caches of sizes, which have no limit, nor in those of generated code.

    In a process of its own, since what a test logs is kept until its end.
    """
    ran = subprocess.run([sys.executable, "-c", COMPILES], capture_output=True, text=True, timeout=100)
    assert ran.stdout.split() == ["0", "0", "0"], ran.stderr


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
        ({"input_kwargs": [1]}, "input_kwargs is a list with int"),
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


def test_microbatches_of_one_call_may_have_chains_of_their_own():
    """As where their shapes need traces of their own; gradients flow into one graph in front of them all."""

    class BySize:
        trace_count = 2

        def __init__(self, model):
            self.chains = {size: chain_of_modules(list(model.named_children())) for size in (2, 3)}

        def chain_for(self, args, kwargs, before=None, batch=None, *, or_whole=False, or_parts=False):
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


def test_the_model_is_compared_with_its_trace_once_per_call(monkeypatch):
    """Not once per microbatch: between them nothing touches it."""
    compared, change = [], ModelGuard.change
    monkeypatch.setattr(ModelGuard, "change", lambda self: compared.append(self) or change(self))
    model = mlp()
    with roundpipe.compile(model, devices="cpu", model_run_config=config(4)) as piped:
        piped.forward_backward((batch(8),), loss_fn=square_loss)
        for _ in range(2):
            del compared[:]
            piped.forward_backward((batch(8),), loss_fn=square_loss)
            assert len(compared) == 1
        model.eval()  # a change between calls is seen
        piped.forward_backward((batch(8),), loss_fn=square_loss)
        assert piped.trace_count == 2
