"""Frozen weights of tensor subclasses, such as quantized ones, are packed and moved as what they are made of."""

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.storages import stored_tensors
from roundpipe.runtime.device.backend import Lane
from tests.runtime.models import assert_same, config, gradients, square_loss

WIDTH = 64


class FourBit(torch.Tensor):
    """Two weights per byte and a scale per row, in the form of torch's protocol for such subclasses."""

    @staticmethod
    def __new__(cls, nibbles, scale, dtype):
        shape = (nibbles.shape[0], nibbles.shape[1] * 2)
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=nibbles.device)

    def __init__(self, nibbles, scale, dtype):
        self.nibbles, self.scale = nibbles, scale

    @classmethod
    def of(cls, weight):
        scale = weight.detach().abs().amax(1, keepdim=True) / 7
        values = (weight.detach() / scale).round().to(torch.int8) + 8
        return cls((values[:, ::2] * 16 + values[:, 1::2]).to(torch.uint8), scale, weight.dtype)

    def values(self):
        both = torch.stack([self.nibbles // 16, self.nibbles % 16], -1).flatten(1)
        return (both.to(self.dtype) - 8) * self.scale

    def __tensor_flatten__(self):
        return ["nibbles", "scale"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner, dtype, size, stride):
        return cls(inner["nibbles"], inner["scale"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].nibbles, args[0].scale, args[0].dtype)
        args = [arg.values() if isinstance(arg, cls) else arg for arg in args]
        return func(*args, **(kwargs or {}))


def four_bit(linear):
    linear.weight = nn.Parameter(FourBit.of(linear.weight), requires_grad=False)


def int8_of_torchao(linear):
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(linear, quantization.Int8WeightOnlyConfig())


class ScaleState:
    """What says what the bytes of a `PackedWeight` stand for; scales have scales of their own."""

    def __init__(self, scale, shape, state2=None):
        self.scale, self.shape, self.levels, self.state2 = scale, shape, LEVELS, state2


LEVELS = torch.arange(-8.0, 8.0)
"""All states have this one tensor."""


class PackedWeight(nn.Parameter):
    """A parameter of bytes beside a state, as bitsandbytes has them."""

    def __new__(cls, packed, quant_state):
        self = torch.Tensor._make_subclass(cls, packed, False)
        self.quant_state = quant_state
        return self


class PackedLinear(nn.Linear):
    def forward(self, x):
        packed, state = self.weight.flatten().long(), self.weight.quant_state
        scale = state.scale * state.state2.scale
        values = state.levels[torch.stack([packed // 16, packed % 16], -1)].reshape(state.shape)
        return nn.functional.linear(x, values * scale)


def packed_beside_a_state(linear):
    four_bits = FourBit.of(linear.weight)
    linear.__class__ = PackedLinear
    second = ScaleState(torch.tensor([0.5]), None)
    state = ScaleState(2 * four_bits.scale, linear.weight.shape, second)
    linear.weight = PackedWeight(four_bits.nibbles.reshape(-1, 1), state)


def nf4_of_bitsandbytes(linear, nested=False):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    packed = bitsandbytes.nn.Linear4bit(
        WIDTH, WIDTH, bias=False, compute_dtype=torch.float32, quant_type="nf4", compress_statistics=nested
    )
    packed.load_state_dict(linear.state_dict())
    linear.__class__ = bitsandbytes.nn.Linear4bit
    linear.__dict__ = packed.to("cpu").__dict__


def nested_nf4_of_bitsandbytes(linear):
    nf4_of_bitsandbytes(linear, nested=True)


class Adapted(nn.Module):
    """A frozen quantized map and a trained one of low rank."""

    def __init__(self, quantize):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        quantize(self.base)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


def assert_close(found, expected):
    assert_same(found, expected, atol=1e-4)


def network(quantize, depth=6):
    torch.manual_seed(0)
    return nn.Sequential(*[Adapted(quantize) for _ in range(depth)])


def moved_bytes(piped):
    return sum(backend.moved_bytes[Lane.WEIGHTS] for backend in piped._session.engine.backends)  # shown nowhere else


@pytest.mark.parametrize(
    ("quantize", "share"),
    [(four_bit, 1 / 6), (packed_beside_a_state, 1 / 6), (int8_of_torchao, 1 / 3), (nf4_of_bitsandbytes, 1 / 6)],
)
@pytest.mark.parametrize("wrap", [roundpipe.compile, roundpipe.RoundPipe])
def test_quantized_weights_are_streamed_packed(quantize, share, wrap):
    plain, model = (network(quantize) for _ in range(2))
    x = torch.randn(6, WIDTH)
    packed_bytes = sum(inner.nbytes for part in model for inner in stored_tensors(part.base.weight))
    trained_bytes = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    whole_bytes = 4 * 6 * WIDTH**2
    assert packed_bytes < share * whole_bytes
    loss = square_loss(plain(x), None)
    loss.backward()
    with wrap(model, devices=["cpu"]) as piped:
        found = piped.forward_backward((x,), loss_fn=square_loss, run_config=config(2))
        assert moved_bytes(piped) <= 2 * (packed_bytes + trained_bytes) + 64 * 100  # up at most twice
        assert piped.peak_device_bytes() < whole_bytes / 2  # weights and what lies between layers
        torch.testing.assert_close(found, loss.detach())
        piped.synchronize()
        assert piped.report().host_memory.weights == packed_bytes + trained_bytes
        assert_close(gradients(model), gradients(plain))
        for part in model:  # one behind the other in the layer's buffer
            values, scale, *_ = stored_tensors(part.base.weight)
            assert scale.data_ptr() == values.data_ptr() + values.nbytes

        with piped.streamed() as on_device:
            assert_close({"outputs": on_device(x)}, {"outputs": plain(x)})
        with torch.no_grad():
            for ours, theirs in zip(model, plain, strict=True):
                for scale in (stored_tensors(ours.base.weight)[1], stored_tensors(theirs.base.weight)[1]):
                    scale.mul_(1.5)
            assert_close({"outputs": piped(x)}, {"outputs": plain(x)})
    assert_close({"outputs": model(x)}, {"outputs": plain(x)})


@pytest.mark.parametrize("quantize", [packed_beside_a_state, nf4_of_bitsandbytes, nested_nf4_of_bitsandbytes])
def test_parameters_with_a_state_go_up_once_with_it_and_packed(quantize):
    plain, model = (network(quantize, depth=3) for _ in range(2))
    x, levels = torch.randn(6, WIDTH), LEVELS.data_ptr()
    stored = [inner for part in model for inner in stored_tensors(part.base.weight)]
    trained = [each for each in model.parameters() if each.requires_grad]
    expected_bytes = sum(each.nbytes for each in stored + trained)
    assert expected_bytes < 4 * 3 * WIDTH**2 / 3
    with roundpipe.RoundPipe(model, devices=["cpu"]) as piped:
        piped.forward_backward((x,), loss_fn=square_loss)
        assert 0 <= moved_bytes(piped) - expected_bytes < 64 * len(stored + trained)  # each begins at 64 bytes
        square_loss(plain(x), None).backward()
        piped.synchronize()
        assert_close(gradients(model), gradients(plain))
        with piped.streamed() as on_device:
            assert_close({"outputs": on_device(x)}, {"outputs": plain(x)})
    assert LEVELS.data_ptr() == levels
    assert_close({"outputs": model(x)}, {"outputs": plain(x)})


def test_a_model_that_is_quantized_later_and_weights_left_where_they_are():
    plain, model = (network(lambda linear: None, depth=2) for _ in range(2))
    x = torch.randn(4, WIDTH)
    with roundpipe.RoundPipe(model, devices=["cpu"], pin_model="off") as piped:
        piped.forward_backward((x,), loss_fn=square_loss)
        before = moved_bytes(piped)
        for part in (*plain, *model):
            four_bit(part.base)
        piped.zero_grad()
        piped.forward_backward((x,), loss_fn=square_loss)
        assert moved_bytes(piped) - before < before / 2
        square_loss(plain(x), None).backward()
        piped.synchronize()
        assert_close(gradients(model), gradients(plain))


@pytest.mark.parametrize("quantize", [nf4_of_bitsandbytes, nested_nf4_of_bitsandbytes])
def test_packing_leaves_the_objects_of_scales_which_guards_go_by(quantize):
    """If they were others after a call, a graph whose guards look at them would be traced again."""
    x, model = torch.randn(4, WIDTH), network(quantize, depth=3)
    states = [module.base.weight.quant_state for module in model]
    states[1].code = states[0].code  # a table that several share
    with roundpipe.compile(model, devices=["cpu"]) as piped:
        before = [(id(state.absmax), id(state.code)) for state in states]
        for _ in range(2):
            piped.forward_backward((x,), loss_fn=lambda outputs, _: outputs.sum())
            assert [(id(state.absmax), id(state.code)) for state in states] == before
    assert len({code for _, code in before}) == 3  # each layer's lies in memory of its own


class ByName(PackedLinear):
    def forward(self, x):
        is_packed = self.weight.__class__.__name__ == "PackedWeight"
        return super().forward(x) if is_packed else nn.functional.linear(x, self.weight)


def packed_by_name(linear):
    packed_beside_a_state(linear)
    linear.__class__ = ByName


def with_magnitudes(model):
    """The adapters of DoRA, which ask weights for the name of their class, and put them where they are."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["base"], use_dora=True))


@pytest.mark.filterwarnings("error:.*module by module")
@pytest.mark.parametrize(
    ("quantize", "adapt"), [(packed_by_name, nn.Sequential), (nf4_of_bitsandbytes, with_magnitudes)]
)
def test_code_may_go_by_the_name_of_the_class_of_packed_weights(quantize, adapt):
    plain, model = (adapt(network(quantize, depth=3)) for _ in range(2))
    x = torch.randn(6, WIDTH)
    loss = square_loss(plain(x), None)
    loss.backward()
    with roundpipe.compile(model, devices=["cpu"]) as piped:
        found = piped.forward_backward((x,), loss_fn=square_loss, run_config=config(3))
        piped.synchronize()
        torch.testing.assert_close(found, loss.detach())
        assert_close(gradients(model), gradients(plain))
