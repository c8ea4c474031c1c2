"""Host weights in one buffer per layer, and the arena that they come up into."""

import gc
import mmap
import resource
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.errors import ConfigError
from roundpipe.runtime.device.backend import Device, Lane
from roundpipe.runtime.device.cpu import CpuBackend
from roundpipe.runtime.weights.host_weights import HostWeights
from roundpipe.runtime.weights.replica import BoundLayer, Replica
from roundpipe.runtime.weights.residency import Arena
from roundpipe.runtime.weights.slots import ALIGNMENT
from tests.runtime.models import DTYPE, assert_round_is_eager, batch, config, mlp, square_loss


def host_of(pin="alloc"):
    allocated = []

    def allocate(num_bytes):
        allocated.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    return HostWeights(pin, allocate), allocated


def backend():
    return CpuBackend(Device("cpu"), "test")


# ---------------------------------------------------------------------------------------- packing


def test_parameters_become_views_of_one_buffer():
    layer = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    objects = [*layer.parameters(), *layer.buffers()]
    host, allocated = host_of()
    weights = host.layer("layer", layer)
    assert len(allocated) == 1 and weights.is_packed()
    start, size = weights.packed.data_ptr(), weights.packed.numel()
    for tensor in layer.state_dict().values():
        assert start <= tensor.data_ptr() < start + size
        assert (tensor.data_ptr() - start) % ALIGNMENT == 0
    assert all(a is b for a, b in zip([*layer.parameters(), *layer.buffers()], objects, strict=True))
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert host.layer("layer", layer) is weights and len(allocated) == 1


def test_a_packed_layer_is_one_copy():
    copies = []
    target = backend()
    real = target._copy  # copies that are not seen one by one anywhere else
    target._copy = lambda lane, *rest: copies.append(lane) or real(lane, *rest)
    host, _ = host_of()
    weights = host.layer("layer", nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)))
    weights.upload(target, torch.empty(weights.num_bytes, dtype=torch.uint8), range(len(weights.slots)))
    assert copies == [Lane.WEIGHTS]


def test_a_tied_parameter_is_stored_once():
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = one.weight
    within = nn.Sequential(one, other)
    host, allocated = host_of()
    weights = host.layer("within", within)
    assert len(weights.slots) == 3 and sum(allocated) <= 3 * 64 + ALIGNMENT
    assert other.weight is one.weight

    host, allocated = host_of()
    first, second = host.layer("one", one), host.layer("other", other)
    assert first.is_packed() and second.is_packed()
    assert first.num_packed == 2 and second.num_packed == 1
    start = first.packed.data_ptr()
    assert start <= other.weight.data_ptr() < start + first.packed.numel()


def test_rebinding_data_is_noticed_and_still_right():
    model = mlp(3)
    with roundpipe.RoundPipe(model) as piped:
        piped(batch())
        host = piped._session.host  # numbers are right for weights that are not packed, too
        layer = piped._runner.source.chain[1]
        assert host.layer("1", layer).is_packed()
        model[1][0].weight.data = torch.full((6, 6), 0.25, dtype=DTYPE)
        assert not host.layer("1", layer).is_packed()
        torch.testing.assert_close(piped(batch()), model(batch()), rtol=0, atol=1e-12)
    assert_round_is_eager(model, (batch(),), workers=2)


def test_other_dtypes_and_shapes_are_packed_again():
    model = mlp(3)
    with roundpipe.RoundPipe(model) as piped:
        piped(batch())
        model.float()
        with torch.no_grad():
            torch.testing.assert_close(piped(batch().float()), model(batch().float()))
        # public numbers are right for weights that are not packed, too
        host, chain = piped._session.host, piped._runner.source.chain
        assert all(host.layer("", layer).is_packed() for layer in chain)


def test_strides_are_kept():
    layer = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    transposed = nn.Linear(3, 5)
    transposed.weight = nn.Parameter(torch.randn(3, 5).t())
    expanded = nn.Module()
    expanded.weight = nn.Parameter(torch.ones(1).expand(4))
    host, _ = host_of()
    for module in (layer, transposed, expanded):
        before, strides = module.weight.detach().clone(), module.weight.stride()
        weights = host.layer("layer", module)
        assert weights.is_packed() and torch.equal(module.weight, before)
        if module is not expanded:
            assert module.weight.stride() == strides
    assert expanded.weight.is_contiguous()


def test_pin_model_off_leaves_memory_where_it_is():
    model = mlp(3)
    before = [p.data_ptr() for p in model.parameters()]
    with roundpipe.RoundPipe(model, pin_model="off") as piped:
        piped.forward_backward((batch(),), loss_fn=square_loss)
        assert [p.data_ptr() for p in model.parameters()] == before
    assert_round_is_eager(mlp(3), (batch(),))


def test_weights_mapped_from_a_file_stay_there(tmp_path):
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(mmap.PAGESIZE * 4))
    storage = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=mmap.PAGESIZE * 4)
    mapped = torch.empty(0, dtype=torch.float64).set_(storage, 0, (16, 16))
    model = nn.Sequential(nn.Linear(16, 16, bias=False)).to(DTYPE)
    model[0].weight.data = mapped
    with roundpipe.RoundPipe(model, pin_model="off") as piped, torch.no_grad():
        assert torch.equal(piped(batch(4, 16)), torch.zeros(4, 16, dtype=DTYPE))
    assert model[0].weight.data_ptr() == mapped.data_ptr()


def test_host_memory_of_packed_weights():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(100, 90), nn.LayerNorm(90), nn.Linear(90, 100)) for _ in range(4)))
    weight_bytes = sum(p.nbytes for p in model.parameters())
    with roundpipe.RoundPipe(model) as piped, torch.no_grad():
        piped(torch.ones(2, 100))
        # all that it holds, so that nothing is counted twice
        buffers = {id(w.packed): w.packed.numel() for w in piped._session.host._layers.values()}
    assert weight_bytes <= sum(buffers.values()) <= 1.1 * weight_bytes


def test_packing_never_holds_two_models():
    """Layer by layer: the peak is one layer above the model."""
    code = """
import resource, torch, roundpipe
from torch import nn
megabytes = 16
model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(12)))
with torch.no_grad():
    for p in model.parameters():
        p.fill_(0.5)
piped = roundpipe.RoundPipe(model)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
chain = piped._runner.source.chain
piped._session.host.prepare([spec.name for spec in chain.specs], list(chain))
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
assert grown < 4 * megabytes, grown
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert resource.RUSAGE_SELF == 0


# ------------------------------------------------------------------------------------------ arena


def bound(host, target, layer):
    return BoundLayer(host.layer("layer", layer), Replica(layer, target.device))


def test_visits_lie_at_alternating_ends():
    target = backend()
    host, _ = host_of()
    layers = [nn.Linear(n, n, bias=False) for n in (8, 4, 8, 16)]
    sizes = [n * n * 4 for n in (8, 4, 8, 16)]
    arena = Arena(target)
    arena.reserve(sizes)
    total = sizes[2] + sizes[3]
    assert arena._buffer.numel() == total == target.ledger.total_bytes  # the addresses are the test
    base = arena._buffer.data_ptr()
    visits = []
    for position, (layer, size) in enumerate(zip(layers, sizes, strict=True)):
        visit, side = arena.begin([bound(host, target, layer)])
        visit.bring(1)
        start = visit.memory[0].data_ptr() - base
        assert side == position % 2
        assert start == (0 if side == 0 else total - size)
        visits.append((visit, side))
        if len(visits) == 2:  # the next one comes up only when the one before is done
            earlier, earlier_side = visits.pop(0)
            earlier.arrive(0)
            earlier.bind(0, with_gradients=False)
            assert earlier.layers[0].module.weight.data_ptr() == earlier.memory[0].data_ptr()
            arena.end(earlier_side, earlier.release(keep_buffers=False)[1])
            assert earlier.layers[0].module.weight is None
    arena.free()
    assert target.ledger.total_bytes == 0


def test_an_arena_grows_and_is_reused():
    target = backend()
    arena = Arena(target)
    arena.reserve([100, 200])
    first = arena._buffer  # that it is the same memory shows in its address alone
    arena.reserve([64])
    assert arena._buffer is first  # as above
    arena.reserve([1000, 10, 10])
    # as above
    assert arena._buffer is not first and arena._buffer.numel() == 1024 + 64
    assert target.ledger.total_bytes == 1088


def test_visits_at_the_same_place_have_their_own_values_and_keep_no_memory():
    target, (host, _) = backend(), host_of()
    arena, layer = Arena(target), nn.Linear(8, 8, bias=False)
    arena.reserve([256])
    memory = weakref.ref(arena._buffer.untyped_storage())  # nothing else tells whether it is gone
    for value in (1.0, 2.0, 3.0):
        torch.nn.init.constant_(layer.weight, value)
        visit, side = arena.begin([bound(host, target, layer)])
        visit.bring(1)
        visit.arrive(0)
        visit.bind(0, with_gradients=True)
        weight = visit.layers[0].module.weight
        assert torch.equal(weight, layer.weight) and weight.grad is None
        weight.sum().backward()
        with torch.no_grad():
            weight.add_(1)  # as a forward may
        arena.end(side, visit.release(keep_buffers=False)[1])
    del visit, weight
    arena.reserve([1024])
    gc.collect()
    assert memory() is None


@pytest.mark.parametrize("accumulate", [2, 3])
def test_weights_come_up_once_for_all_calls_of_an_update(accumulate):
    """In one stage; in the first steps samples of the host's values are not taken yet."""
    model, uploaded = mlp(3).to(DTYPE), []
    with roundpipe.RoundPipe(model, devices=["cpu"], model_run_config=config(2)) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.01)
        for _ in range(4):
            for _ in range(accumulate):
                piped.forward_backward((batch(),), loss_fn=square_loss)
                piped.synchronize()
                uploaded.append(piped.report().workers[0].moved_bytes["weights"])
            piped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        before = piped.forward_backward((batch(),), loss_fn=square_loss)
        model[2][0].weight.data.mul_(2)  # of which torch takes no note
        assert piped.forward_backward((batch(),), loss_fn=square_loss) != before
    steady = [uploaded[0], *[0] * (accumulate - 1)]
    assert uploaded[2 * accumulate :] == 2 * steady and uploaded[0] > 0


def test_released_layers_hold_no_device_memory():
    target = backend()
    host, _ = host_of()
    layer = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    one = bound(host, target, layer)
    arena = Arena(target)
    arena.reserve([one.weights.num_bytes])
    visit, _ = arena.begin([one])
    visit.bring(1)
    visit.arrive(0)
    visit.bind(0, with_gradients=True)
    assert all(p is not None for p in one.module[0]._parameters.values())
    visit.release(keep_buffers=True)
    for module in one.module:
        assert set(module._parameters.values()) | set(module._buffers.values()) == {None}
    assert all(p is not None for p in layer[0]._parameters.values())


def test_gradients_settle_by_addition():
    layer = nn.Linear(3, 3)
    target = backend()
    host, _ = host_of()
    arena = Arena(target)
    arena.reserve([layer.weight.nbytes + 64])
    for repeat in (1, 2, 3):
        visit, side = arena.begin([bound(host, target, layer)])
        visit.bring(1)
        visit.arrive(0)
        visit.bind(0, with_gradients=True)
        visit.layers[0].module(torch.ones(2, 3)).sum().backward()
        pending, events, _ = visit.release(keep_buffers=False)
        arena.end(side, events)
        pending.settle()
        assert torch.equal(layer.weight.grad, torch.full((3, 3), 2.0 * repeat))


def test_gradients_of_weights_go_down_behind_the_last_values():
    layer, target = nn.Linear(3, 3), backend()
    arena = Arena(target)
    arena.reserve([layer.weight.nbytes + 64])
    visit, _ = arena.begin([bound(host_of()[0], target, layer)])
    visit.bring(1)
    visit.arrive(0)
    visit.bind(0, with_gradients=True)
    visit.layers[0].module(torch.ones(2, 3)).sum().backward()
    target.download(torch.ones(3))
    values = target.record(Lane.DOWNLOAD)
    pending, _, _ = visit.release(keep_buffers=False)
    assert pending.event.seen.items() >= values.seen.items()


def test_config_can_be_used_with_tensor_subclasses():
    """A subclass that can't be laid out in bytes is moved as a whole."""

    class Marked(torch.Tensor):
        pass

    model = mlp(3)
    model[1][0].register_buffer("marked", torch.ones(6, dtype=DTYPE).as_subclass(Marked))
    with roundpipe.RoundPipe(model) as piped:
        loss = piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(2))
    assert torch.isfinite(loss) and type(model[1][0].marked) is Marked


# ------------------------------------------------------------------------------------ shared memory


def with_data(target, source):
    target.data = source


SHARED = {
    "all of it": lambda model: with_data(model[2].weight, model[0].weight.data),
    "transposed": lambda model: with_data(model[2].weight, model[0].weight.data.t()),
    "a row": lambda model: with_data(model[2].bias, model[0].weight.data[2]),
    "a buffer": lambda model: model[2].register_buffer("seen", model[0].weight.data),
    "a view as a buffer": lambda model: model[0].register_buffer("seen", model[0].weight.detach()[:, 1]),
}


@pytest.mark.parametrize("pin", ["alloc", "off"])
@pytest.mark.parametrize("how", SHARED)
def test_parameters_that_share_memory_are_named(how, pin):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    SHARED[how](model)
    with roundpipe.RoundPipe(model, devices=["cpu"], pin_model=pin) as piped:
        before = [tensor.data_ptr() for tensor in model.state_dict().values()]
        for _ in range(2):
            with pytest.raises(
                ConfigError, match=r"0\.weight and [02]\.\w+ are (a )?parameter.* same memory.*assigning"
            ):
                piped(torch.ones(2, 4))
        assert [tensor.data_ptr() for tensor in model.state_dict().values()] == before
        model[2] = nn.Linear(4, 4)
        model[0]._buffers.clear()
        piped(torch.ones(2, 4))


def test_views_of_one_memory_without_common_elements_are_fine():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(DTYPE)
    flat = torch.randn(48, dtype=DTYPE)
    columns = torch.randn(4, 8, dtype=DTYPE)
    with_data(model[0].weight, columns[:, ::2])
    with_data(model[2].weight, columns[:, 1::2])
    with_data(model[0].bias, flat[4:8])
    with_data(model[2].bias, flat[8:12])
    model[2].register_buffer("scale", torch.ones(4, dtype=DTYPE))
    model[0].register_buffer("scale", model[2].scale[:2])  # of buffers alone: nobody updates them
    model[2].tied = model[0].weight
    assert_round_is_eager(model, (torch.ones(5, 4, dtype=DTYPE),), workers=2)


@pytest.mark.parametrize("layers_are_gone", [False, True])
def test_memory_that_a_new_parameter_shares_is_found_later(layers_are_gone):
    """Also where the first layers are gone, so that their weights are packed again."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    with roundpipe.RoundPipe(model, devices=["cpu"]) as piped:
        piped(torch.ones(2, 4))
        model[2] = nn.Linear(4, 4)
        model[2].weight.data = model[0].weight.data
        if layers_are_gone:
            gc.collect()
        with pytest.raises(ConfigError, match=r"0\.weight and 2\.weight are parameters in the same memory"):
            piped(torch.ones(2, 4))
