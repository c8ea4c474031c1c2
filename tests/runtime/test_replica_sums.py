"""Gradients of a stage's replicas are added up on devices that are peers: the host's sums, and each goes home once."""

import itertools

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import Device, ExecutePlan
from roundpipe.runtime.device.backend import Lane
from roundpipe.runtime.device.cpu import CpuBackend
from roundpipe.runtime.weights import download, replica_sums
from roundpipe.runtime.weights.download import Addends, Download
from roundpipe.runtime.weights.replica_sums import bring_sums
from tests.runtime.models import DTYPE, assert_equal_bits, assert_same, batch, config, gradients, mlp, square_loss

PLAN = ExecutePlan([(0, 1), (1, 3)], (3, 4), [(1, 3), (0, 1)], replicas=[2, 1, 3, 2, 3])


@pytest.fixture
def few_at_once(monkeypatch):
    """Pieces of some numbers, so that small gradients have several."""
    monkeypatch.setattr(replica_sums, "PIECE_BYTES", 64)
    monkeypatch.setattr(download, "PIECE_BYTES", 100)


def downloads_of(replicas):
    """Of replicas with these gradients, by host parameter, and the bytes that each is told to have brought."""
    moved = [[] for _ in replicas]
    made = []
    for told, held in zip(moved, replicas, strict=True):
        backend = CpuBackend(Device(), "worker")
        note = lambda num_bytes, began, ended, told=told: told.append(num_bytes)  # noqa: E731
        addends = Addends(backend, backend.record(Lane.COMPUTE), note)
        assert all(addends.take(host, gradient) for host, gradient in held)
        made.append(Download(addends=addends))
    return made, moved


def settled(downloads, parameters):
    for piece in (piece for each in downloads for piece in each.pieces):
        piece.settle()
    return [parameter.grad for parameter in parameters]


@pytest.mark.usefixtures("few_at_once")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", [2, 3, 5])
def test_sums_are_those_of_the_host_and_each_brings_its_share(number, dtype):
    parameters = [torch.nn.Parameter(torch.zeros(7, 40, dtype=dtype)) for _ in range(number)]
    parts = [[(p, torch.randn(7, 40).to(dtype)) for p in parameters] for _ in range(number)]
    expected = [list(itertools.accumulate(part[i][1] for part in parts))[-1].clone() for i in range(number)]
    downloads, moved = downloads_of(parts)
    bring_sums(downloads)
    assert moved == [[parameters[0].nbytes]] * number
    assert [len(each.parameters) for each in downloads] == [number + 1] * number  # one, and what was added up
    for found, sum_of_host in zip(settled(downloads, parameters), expected, strict=True):
        torch.testing.assert_close(found, sum_of_host, rtol=0, atol=0)


@pytest.mark.usefixtures("few_at_once")
def test_gradients_that_some_replicas_have_or_that_lie_otherwise():
    one, turned, converted = (torch.nn.Parameter(torch.zeros(6, 30)) for _ in range(3))
    own, first, second = torch.randn(6, 30), torch.randn(30, 6).T, torch.randn(6, 30)
    lower, higher = torch.randn(6, 30, dtype=torch.float64), torch.randn(6, 30)
    expected = [own.clone(), first + second]
    downloads, _ = downloads_of(
        [[(turned, first), (converted, lower)], [(one, own), (turned, second), (converted, higher)]]
    )
    bring_sums(downloads)
    pieces = [piece for each in downloads for piece in each.pieces]
    brought = [gradient for piece in pieces for host, _, gradient in piece.gradients if host is converted]
    assert_equal_bits(dict(enumerate(brought)), {0: lower, 1: higher})  # one behind the other, as without devices
    for piece in (piece for each in downloads for piece in each.pieces):
        piece.gradients = [each for each in piece.gradients if each[0] is not converted]
    assert_equal_bits(dict(enumerate(settled(downloads, [one, turned]))), dict(enumerate(expected)))


def test_what_is_not_dense_goes_home_by_itself():
    sparse = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (4,))
    addends = Addends(CpuBackend(Device(), "worker"), None, print)
    assert not addends.take(torch.zeros(4), sparse)


def run(devices, options, model):
    with roundpipe.RoundPipe(model, devices=devices, model_run_config=options) as piped:
        losses = [piped.forward_backward((batch(seed=seed),), loss_fn=square_loss) for seed in range(3)]
        piped.synchronize()
        moved = [worker.moved_bytes["gradients"] for worker in piped.report().workers]
    return {f"loss {i}": loss for i, loss in enumerate(losses)} | gradients(model), moved


@pytest.mark.usefixtures("few_at_once")
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_rounds_have_the_numbers_of_devices_that_are_no_peers(monkeypatch, workers):
    def found():
        torch.manual_seed(0)
        return run(["cpu"] * workers, config(6, plan=PLAN), mlp())

    there, moved_there = found()
    monkeypatch.setattr(CpuBackend, "is_peer", lambda self, other: False)
    at_home, moved_home = found()
    assert_same(there, at_home)
    assert sum(moved_there) < sum(moved_home)


@pytest.mark.parametrize("devices", [["cpu"], ["cpu"] * 2])
def test_what_comes_in_pieces_is_converted_as_what_comes_at_once(monkeypatch, devices):
    def trained():
        torch.manual_seed(4)
        model = mlp().to(torch.bfloat16)
        plan = ExecutePlan(fused=(0, 4), replicas=[len(devices)])
        options = config(4, plan=plan)
        with roundpipe.RoundPipe(model, devices=devices, model_run_config=options, optim_dtype=torch.float32) as piped:
            optimizer = torch.optim.AdamW(piped.optim_parameters(), lr=0.01)
            for seed in range(4):
                for part in range(2):
                    piped.forward_backward((batch(seed=seed + part).bfloat16(),), loss_fn=square_loss)
                piped.step(lambda: (optimizer.step(), optimizer.zero_grad()))
            piped.synchronize()
            return {str(i): each.detach().clone() for i, each in enumerate(piped.optim_parameters())}

    at_once = trained()
    monkeypatch.setattr(download, "PIECE_BYTES", 50)
    assert_equal_bits(trained(), at_once)


def test_embeddings_with_sparse_gradients_beside_dense_ones():
    def model():
        torch.manual_seed(3)
        layers = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 2), nn.Identity()
        return nn.Sequential(*layers).to(DTYPE)

    def round_of(devices, plan):
        made = model()
        with roundpipe.RoundPipe(made, devices=devices, model_run_config=config(4, plan=plan)) as piped:
            for _ in range(2):
                piped.forward_backward((torch.arange(8) % 9,), loss_fn=square_loss)
            piped.synchronize()
            return {name: each.grad.to_dense() for name, each in made.named_parameters()}

    assert_same(
        round_of(["cpu"] * 2, ExecutePlan(fused=(0, 4), replicas=[2])), round_of(["cpu"], ExecutePlan(fused=(0, 4)))
    )


def test_an_error_while_they_are_added_up_ends_the_round(monkeypatch):
    model, options = mlp(), config(4, plan=ExecutePlan(fused=(0, 4), replicas=[2]))
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2, model_run_config=options) as piped:
        piped.forward_backward((batch(4),), loss_fn=square_loss)
        piped.synchronize()
        before = gradients(model)
        with monkeypatch.context() as broken, pytest.raises(ZeroDivisionError):
            broken.setattr(CpuBackend, "on", lambda self, lane: 1 / 0)
            piped.forward_backward((batch(4),), loss_fn=square_loss)
            piped.synchronize()
        assert_equal_bits(gradients(model), before)
        piped.forward_backward((batch(4),), loss_fn=square_loss)
        piped.synchronize()
        assert_same(gradients(model), {name: 2 * gradient for name, gradient in before.items()})


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
def test_on_two_gpus(monkeypatch):
    def found(devices):
        torch.manual_seed(0)
        return run(devices, config(6, plan=PLAN), mlp())

    gpus, moved_there = found(["cuda:0", "cuda:1"])
    monkeypatch.setattr("roundpipe.runtime.device.accelerator._are_cuda_peers", lambda device, other: False)
    at_home, moved_home = found(["cuda:0", "cuda:1"])
    assert_same(gpus, at_home)
    assert sum(moved_there) < sum(moved_home)
