"""The accelerator backend: the CPU's numbers, real overlap, real budgets. Skipped where there is none."""

import copy
import gc
import json
import os
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.errors import DeviceMemoryError
from roundpipe.runtime.device import host_memory
from roundpipe.runtime.device.accelerator import LARGEST_PADDING, SMALL_BYTES, AcceleratorBackend
from roundpipe.runtime.device.backend import Device, Lane
from tests.runtime.models import (
    DTYPE,
    Noted,
    assert_same,
    batch,
    buffers,
    config,
    eager_round,
    gradients,
    mlp,
    skip_chain,
    square_loss,
)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none"),
]

rotations = pytest.mark.parametrize(
    "devices", [["cuda:0"], ["cuda:0", "cuda:0"], ["cuda:0", "cpu"], None], ids=["one", "twice", "mixed", "all"]
)
grains = pytest.mark.parametrize("grain", ["stage", "layer"])


def norms():
    return nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6), Noted(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
    ).to(DTYPE)


@rotations
@grains
@pytest.mark.parametrize("build", [lambda: mlp(6), norms, skip_chain], ids=["mlp", "norms", "skips"])
def test_equals_eager_on_the_cpu(devices, grain, build):
    model = build()
    reference = copy.deepcopy(model)
    plan = roundpipe.ExecutePlan([(0, 2), (2, 4)], (4, 6), [(2, 4), (0, 2)])
    with roundpipe.RoundPipe(model, devices=devices) as piped:
        for _ in range(3):
            expected, _ = eager_round(reference, (batch(9),), num=4)
            loss = piped.forward_backward((batch(9),), loss_fn=square_loss, run_config=config(4, grain, plan))
            assert loss.device.type == "cpu"
            torch.testing.assert_close(loss, expected, rtol=0, atol=1e-9)
        assert_same(gradients(model), gradients(reference), atol=1e-9)
        assert_same(buffers(model), buffers(reference), atol=1e-9)


@rotations
def test_forward_and_backward_apart(devices):
    model = mlp(6)
    reference = copy.deepcopy(model)
    given, expected = batch(9).cuda().requires_grad_(), batch(9).requires_grad_()
    square_loss(reference(expected), None).backward()
    with roundpipe.RoundPipe(model, devices=devices) as piped:
        output = piped(given, roundpipe_run_config=config(3, output_device="cuda:0"))
        assert output.device == torch.device("cuda:0")
        square_loss(output, None).backward()
    assert_same(gradients(model), gradients(reference), atol=1e-9)
    torch.testing.assert_close(given.grad.cpu(), expected.grad, rtol=0, atol=1e-9)


def test_repeated_devices_give_the_same_bits_and_draws():
    found = []
    for num_workers in (1, 2, 3):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5)).to(DTYPE)
        torch.manual_seed(2)
        with roundpipe.RoundPipe(model, devices=["cuda:0"] * num_workers) as piped:
            loss = piped.forward_backward((batch(9),), loss_fn=square_loss, run_config=config(4))
        found.append((loss, gradients(model)))
    for loss, grads in found[1:]:
        assert torch.equal(loss, found[0][0])
        assert_same(grads, found[0][1], atol=0)


def test_optimizer_steps_follow_eager():
    model = mlp()
    reference = copy.deepcopy(model)
    eager_optimizer = torch.optim.AdamW(reference.parameters(), lr=0.05)
    with roundpipe.RoundPipe(model, devices=["cuda:0", "cuda:0"]) as piped:
        optimizer = torch.optim.AdamW(piped.optim_parameters(), lr=0.05)
        for seed in range(5):
            eager_round(reference, (batch(seed=seed),), num=3)
            eager_optimizer.step()
            eager_optimizer.zero_grad()
            piped.forward_backward((batch(seed=seed),), loss_fn=square_loss, run_config=config(3))
            piped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        piped.synchronize()
        assert_same(dict(model.named_parameters()), dict(reference.named_parameters()), atol=1e-8)


def copies_and_kernels(trace):
    """Start and end of every host-to-device copy of weights, and of every matrix multiplication."""
    with open(trace) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    spans = [(event, event["ts"], event["ts"] + event["dur"]) for event in events]
    copies = [
        (start, end)
        for event, start, end in spans
        if event.get("cat") == "gpu_memcpy" and "HtoD" in event["name"] and event["args"].get("bytes", 0) > 1 << 25
    ]
    kernels = [(start, end) for event, start, end in spans if event.get("cat") == "kernel"]
    return copies, kernels


class Repeated(nn.Linear):
    """Multiplies by its weight several times: kernels that take longer than the worker needs to give them."""

    def forward(self, value):
        for _ in range(8):
            value = super().forward(value)
        return value


@pytest.mark.skipif("TORCH_CUDA_SANITIZER" in os.environ, reason="the sanitizer serialises what it checks")
def test_uploads_overlap_the_computation(tmp_path):
    width = 4096
    model = nn.Sequential(*(Repeated(width, width, bias=False) for _ in range(8))).requires_grad_(False)
    given = torch.randn(2048, width)  # 8 MiB a microbatch, beside weights of 64 MiB
    singles = [(i, i + 1) for i in range(8)]
    plan = roundpipe.ExecutePlan(singles[:-1], singles[-1], singles[:-1][::-1])
    with roundpipe.RoundPipe(model, devices=["cuda:0"]) as piped, torch.no_grad():
        run = config(4, plan=plan, residency="off")
        piped(given, roundpipe_run_config=run)
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            piped(given, roundpipe_run_config=run)
            torch.cuda.synchronize()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    copies, kernels = copies_and_kernels(tmp_path / "trace.json")
    assert len(copies) >= 8 and kernels
    beside = sum(any(start < k_end and k_start < end for k_start, k_end in kernels) for start, end in copies)
    assert beside >= 4, f"{beside} of {len(copies)} uploads run while a kernel does"


def test_training_within_a_budget():
    width = 2048
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(24)))
    model_bytes = 2 * sum(p.nbytes for p in model.parameters())
    budget = model_bytes // 3
    gc.collect()
    others_bytes = torch.cuda.memory_allocated()  # such as workspaces that libraries keep per stream
    with roundpipe.RoundPipe(model, devices=[Device("cuda:0", memory_bytes=budget)]) as piped:
        piped.forward_backward((torch.randn(64, width),), loss_fn=square_loss, run_config=config(4))  # warms up
        torch.cuda.empty_cache()
        piped.peak_device_bytes(reset=True)
        before = torch.cuda.memory_allocated()
        piped.forward_backward((torch.randn(64, width),), loss_fn=square_loss, run_config=config(4))
        peak_bytes = piped.peak_device_bytes() - others_bytes
        assert peak_bytes <= budget + (80 << 20), "libraries have workspaces of their own"
        assert torch.cuda.memory_allocated() <= before + (1 << 20), "nothing stays but the arena"


def test_carried_values_do_not_pile_up_over_rounds_that_overlap():
    width = 4096
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(6)))
    singles = [(i, i + 1) for i in range(6)]
    plan = roundpipe.ExecutePlan(singles[:-1], singles[-1], singles[:-1][::-1])
    given = torch.randn(8 * 2048, width)  # 32 MiB a microbatch, and slower to compute with than to hand out
    peaks = []
    with roundpipe.RoundPipe(model, devices=["cuda:0"]) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=1e-6)
        piped.peak_device_bytes(reset=True)  # whatever else the process did so far

        def update():
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(8):
            run = config(8, plan=plan, residency="off")
            piped.forward_backward((given,), loss_fn=square_loss, run_config=run)
            piped.step(update)
            peaks.append(piped.peak_device_bytes(reset=True))
    assert max(peaks[4:]) <= 1.1 * max(peaks[1:4]), peaks


def test_the_peak_can_be_asked_for_before_anything_ran():
    code = (
        "import torch, roundpipe\n"
        "with roundpipe.RoundPipe(torch.nn.Sequential(torch.nn.Linear(2, 2)), devices=['cuda:0']) as piped:\n"
        "    print(piped.peak_device_bytes(reset=True))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "0", done.stderr


def test_a_layer_larger_than_the_budget_is_named():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4096))
    with roundpipe.RoundPipe(model, devices=[Device("cuda:0", memory_bytes=4096)]) as piped:
        with pytest.raises(DeviceMemoryError, match="layer 1"):
            piped.forward_backward((torch.randn(4, 8),), loss_fn=square_loss)


def test_an_exception_leaves_a_model_that_works():
    class Fails(nn.Module):
        fails = True

        def forward(self, value):
            if self.fails:
                raise ValueError("mine")
            return value

    model = nn.Sequential(*mlp(2), Fails(), *mlp(2))
    with roundpipe.RoundPipe(model, devices=["cuda:0", "cuda:0"]) as piped:
        with pytest.raises(ValueError, match="mine"):
            piped.forward_backward((batch(),), loss_fn=square_loss)
        Fails.fails = False
        reference = copy.deepcopy(model)
        expected, _ = eager_round(reference, (batch(),), num=3)
        found = piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(3))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("num_bytes", [2400, 150_000, 1 << 20, (1 << 20) + (1 << 18), 3 << 20])
def test_host_buffers_are_pinned_and_exact(num_bytes):
    backend = AcceleratorBackend(Device("cuda:0"), "test")
    buffers = [backend.host_buffer(num_bytes) for _ in range(4)]  # some on one page, if anything allows it
    for buffer in buffers:
        assert buffer.numel() == num_bytes
        assert buffer.untyped_storage().nbytes() <= max(LARGEST_PADDING * num_bytes, SMALL_BYTES)
        # is_pinned asks the driver, which knows allocated and registered memory alike
        assert buffer.is_pinned() and buffer[-1:].is_pinned()


def test_values_between_stages_take_little_more_of_the_host_than_they_have():
    backend = AcceleratorBackend(Device("cuda:0"), "test")
    source = torch.randn(9 << 19, device="cuda").view(-1, 1 << 10).t()  # 18 MiB, which torch's allocator would double
    backend.follow_caller()
    with backend.activate():
        backend.wait(Lane.DOWNLOAD, backend.record(Lane.COMPUTE))
        addresses = set()
        for _ in range(8):
            down = backend.download(source, is_inner=True)
            backend.wait(Lane.UPLOAD, backend.record(Lane.DOWNLOAD))
            up = backend.upload(down)
            assert down.is_pinned() and down.stride() == source.stride()
            assert down.untyped_storage().nbytes() == source.nbytes
            addresses.add(down.data_ptr())
            del down
            backend.synchronize()
            assert torch.equal(up, source)
    assert len(addresses) == 1, "the same pages each time"


def test_copies_run_on_their_own_streams():
    backend = AcceleratorBackend(Device("cuda:0"), "test")
    source = torch.randn(1 << 20).pin_memory()
    with backend.activate():
        for lanes in ((Lane.UPLOAD, Lane.DOWNLOAD), (Lane.WEIGHTS, Lane.GRADIENTS)):
            up = backend.upload(source, lane=lanes[0])
            backend.wait(Lane.COMPUTE, backend.record(lanes[0]))
            doubled = up * 2
            backend.wait(lanes[1], backend.record(Lane.COMPUTE))
            down = backend.download(doubled, lane=lanes[1])
            event = backend.record(lanes[1])
            event.synchronize()
            assert event.is_done() and down.is_pinned() and torch.equal(down, source * 2)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_drawing_leaves_the_generators_as_they_were():
    backend = AcceleratorBackend(Device("cuda:0"), "test")
    before = torch.get_rng_state(), torch.cuda.get_rng_state(0)
    with backend.random(3):
        first = torch.rand(3, device="cuda:0")
    with backend.random(3):
        assert torch.equal(torch.rand(3, device="cuda:0"), first)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(torch.cuda.get_rng_state(0), before[1])


def test_importing_does_not_start_cuda():
    code = "import torch, roundpipe; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_registered_memory_is_pinned():
    model = mlp(3)
    with roundpipe.RoundPipe(model, devices=["cuda:0"], pin_model="register") as piped, torch.no_grad():
        torch.testing.assert_close(piped(batch()), model(batch()), rtol=0, atol=1e-9)
        assert all(p.is_pinned() for p in model.parameters())


def test_streams_are_used_again():
    """Libraries keep a workspace for every stream they have seen."""
    given, seen = Device("cuda:0"), set()
    gc.collect()  # those of other tests
    for _ in range(3):
        backend = AcceleratorBackend(given, "first")
        seen.add(backend._streams)  # the objects themselves: only the device knows them
        del backend
        gc.collect()
    assert len(seen) == 1


class _Refusing:
    """The CUDA runtime, but host memory is not registered; an error stays behind as the driver would leave it."""

    def __init__(self, runtime):
        self._runtime = runtime

    def __getattr__(self, name):
        return getattr(self._runtime, name)

    def cudaHostRegister(self, address, num_bytes, flags):
        return self._runtime.cudaHostRegister(0, num_bytes, flags)


def wide(layers=4):
    return nn.Sequential(*(nn.Linear(300, 300, dtype=DTYPE) for _ in range(layers)))


def test_memory_is_registered_where_it_is_until_the_model_is_closed():
    model = wide()
    before = [p.data_ptr() for p in model.parameters() if p.ndim == 2]
    reference = copy.deepcopy(model)
    with roundpipe.RoundPipe(model, devices=["cuda:0"], pin_model="register") as piped:
        expected, _ = eager_round(reference, (batch(9, 300),), num=3)
        loss = piped.forward_backward((batch(9, 300),), loss_fn=square_loss, run_config=config(3))
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-9)
        piped.synchronize()
        assert_same(gradients(model), gradients(reference))
        assert [p.data_ptr() for p in model.parameters() if p.ndim == 2] == before
        assert all(p.is_pinned() for p in model.parameters())
    assert not any(p.is_pinned() for p in model.parameters() if p.ndim == 2)


@pytest.mark.parametrize("pin_model", ["alloc", "register"])
def test_a_refusal_to_pin_costs_speed_only(monkeypatch, pin_model):
    runtime = _Refusing(torch.cuda.cudart())
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(host_memory, "_has_warned", threading.Event())  # as in a new process
    real = torch.empty

    def empty(*args, **options):
        if options.get("pin_memory"):
            raise RuntimeError("CUDA error: out of memory")
        return real(*args, **options)

    monkeypatch.setattr(torch, "empty", empty)
    model = wide()
    reference = copy.deepcopy(model)
    with roundpipe.RoundPipe(model, devices=["cuda:0"], pin_model=pin_model) as piped:
        expected, _ = eager_round(reference, (batch(9, 300),), num=3)
        with pytest.warns(RuntimeWarning, match="limit of locked memory") as caught:
            loss = piped.forward_backward((batch(9, 300),), loss_fn=square_loss, run_config=config(3))
        assert len(caught) == 1
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-9)
        assert not any(p.is_pinned() for p in model.parameters())


def test_what_comes_up_for_a_run_stays_until_the_device_is_past_it():
    """The device is behind the worker, and all uploads of a size would lie in the same memory."""
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(3)))
    given = torch.randn(12 * 1024, 4096)
    labels = torch.arange(12.0)[:, None].repeat(1, 1024 * 64).reshape(12 * 1024, 64)
    plan = roundpipe.ExecutePlan([], (0, 3), [])

    def loss_fn(outputs, label):
        return outputs.mean() * 0 + label.mean()

    with roundpipe.RoundPipe(model, devices=["cuda:0"]) as piped:
        loss = piped.forward_backward((given,), label=labels, loss_fn=loss_fn, run_config=config(12, plan=plan))
    assert float(loss) == pytest.approx(66.0)


def test_what_others_take_is_not_planned_for():
    backend = AcceleratorBackend(Device("cuda:0"), "worker")
    backend.note_others(0)
    before = backend.take_budget()
    taken = torch.empty(2**30, dtype=torch.uint8, device="cuda:0")
    backend.note_others(0)
    beside = backend.take_budget()
    assert before - 1.1 * taken.nbytes <= beside <= before - 0.8 * taken.nbytes
    del taken
    backend.note_others(0)
    assert backend.take_budget() >= 0.99 * before
