"""Frozen weights of tensor subclasses, such as quantized ones, are packed and moved as what they are made of."""

import pytest
import torch
from torch import nn

import roundpipe
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


@pytest.mark.parametrize(("quantize", "share"), [(four_bit, 1 / 6), (int8_of_torchao, 1 / 3)])
@pytest.mark.parametrize("wrap", [roundpipe.compile, roundpipe.RoundPipe])
def test_quantized_weights_are_streamed_packed(quantize, share, wrap):
    plain, model = (network(quantize) for _ in range(2))
    x = torch.randn(6, WIDTH)
    packed_bytes = sum(inner.nbytes for part in model for inner in parts_of(part.base.weight))
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
        assert_close(gradients(model), gradients(plain))
        for part in model:  # one behind the other in the layer's buffer
            values, scale, *_ = parts_of(part.base.weight)
            assert scale.data_ptr() == values.data_ptr() + values.nbytes

        with piped.streamed() as on_device:
            assert_close({"outputs": on_device(x)}, {"outputs": plain(x)})
        with torch.no_grad():
            for ours, theirs in zip(model, plain, strict=True):
                for scale in (parts_of(ours.base.weight)[1], parts_of(theirs.base.weight)[1]):
                    scale.mul_(1.5)
            assert_close({"outputs": piped(x)}, {"outputs": plain(x)})
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


def parts_of(weight):
    return [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]
