"""Small models, and the loop of microbatches that every round is measured against."""

import contextlib
import copy
import time

import torch
from torch import nn

import roundpipe
from roundpipe.core.layers import LayerChain, LayerCost, LayerSpec
from roundpipe.core.module_tree import weight_bytes_of
from roundpipe.runtime.config import RoundPipeRunConfig

DTYPE = torch.float64
ATOL = 1e-10


def mlp(depth=4, width=6):
    """``depth`` pairs of a linear layer and a tanh, as one layer each."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))).to(DTYPE)


def batch(size=7, width=6, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, width, generator=generator, dtype=DTYPE)


def square_loss(output, label):
    return output.square().sum() if label is None else (output - label).square().sum()


def slow_step(optimizer, seconds):
    """A ``step_fn`` that takes so long."""

    def step():
        time.sleep(seconds)
        optimizer.step()
        optimizer.zero_grad()

    return step


def pieces(value, num):
    """A tensor (or a tuple, list or dict of tensors) in even pieces, larger ones first."""
    if isinstance(value, torch.Tensor):
        return list(torch.tensor_split(value, num)) if value.ndim else [value] * num
    if isinstance(value, dict) and value:
        rows = zip(*(pieces(one, num) for one in value.values()), strict=True)
        return [dict(zip(value, row, strict=True)) for row in rows]
    # zip(*(pieces(v, num) for v in value.values()), strict=True)]
    if isinstance(value, (tuple, list)) and value:
        return [type(value)(row) for row in zip(*(pieces(one, num) for one in value), strict=True)]
    return [value] * num


def call(model, args, kwargs):
    """A model called eagerly; a hand-made chain by its entry, layers and exit."""
    return model.run(*args, **kwargs) if isinstance(model, LayerChain) else model(*args, **kwargs)


def eager_round(model, args=(), kwargs=None, label=None, loss_fn=square_loss, num=1):
    """What `forward_backward` promises to equal: the sum of losses (by position) and the outputs."""
    total, outputs = None, []
    rows = zip(pieces(tuple(args), num), pieces(kwargs or {}, num), pieces(label, num), strict=True)
    for some_args, some_kwargs, some_label in rows:
        output = call(model, some_args, some_kwargs)
        loss = loss_fn(output, some_label)
        torch.autograd.backward(loss)
        outputs.append(output)
        if isinstance(loss, torch.Tensor):
            total = loss.detach() if total is None else total + loss.detach()
        else:
            plain = [one.detach() for one in loss]
            total = plain if total is None else [a + b for a, b in zip(total, plain, strict=True)]
    return total, outputs


@contextlib.contextmanager
def pair(make):
    """A model compiled for two workers, the model itself, and a copy that stays plain."""
    torch.manual_seed(0)
    model = make()
    reference = copy.deepcopy(model)
    with roundpipe.compile(model, devices=["cpu", "cpu"]) as piped:
        yield piped, model, reference


def gradients(model):
    """Clones of a model's gradients by name; None where there is none."""
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def buffers(model):
    return {name: value.detach().clone() for name, value in model.named_buffers()}


def assert_same(found, expected, atol=ATOL):
    """Two dicts of tensors (or None) with the same keys and values."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, f"{name} has a gradient, eager's has none"
        else:
            assert found[name] is not None, f"{name} has no gradient, eager's has one"
            torch.testing.assert_close(
                found[name], value, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
            )


def assert_equal_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] is None) == (value is None), name
        assert value is None or torch.equal(found[name], value), name


class Branches(nn.Module):
    """Its own forward can't be traced."""

    def __init__(self):
        super().__init__()
        self.inner = mlp(2)

    def forward(self, value):
        return self.inner(value) if value.sum() > -1e9 else value


def config(num_microbatch, grain=None, plan=None, **options):
    return RoundPipeRunConfig(num_microbatch=num_microbatch, recompute_grain=grain, execute_plan=plan, **options)


def assert_round_is_eager(
    model,
    args=(),
    kwargs=None,
    label=None,
    *,
    loss_fn=square_loss,
    num=3,
    workers=1,
    grain="stage",
    plan=None,
    calls=1,
    atol=ATOL,
):
    """Runs the same rounds eagerly and through `RoundPipe`; compares losses, gradients and buffers."""
    reference = copy.deepcopy(model)
    with roundpipe.RoundPipe(model, devices=["cpu"] * workers) as piped:
        for _ in range(calls):
            expected, expected_outputs = eager_round(reference, args, kwargs, label, loss_fn, num)
            found, outputs = piped.forward_backward(
                tuple(args),
                kwargs or {},
                label,
                loss_fn,
                return_outputs=True,
                run_config=config(num, grain, plan),
            )
            torch.testing.assert_close(found, expected, rtol=0, atol=atol)
            if isinstance(outputs, torch.Tensor) and outputs.ndim:
                torch.testing.assert_close(outputs, torch.cat(expected_outputs), rtol=0, atol=atol)
        piped.synchronize()
        assert_same(gradients(model), gradients(reference), atol)
        assert_same(buffers(model), buffers(reference), atol)


# --------------------------------------------------------------------------------- hand-made chains


class Piece(nn.Module):
    """A module as a layer of named values: ``reads`` are its arguments, ``makes`` its results."""

    def __init__(self, module, reads, makes):
        super().__init__()
        self.module = module
        self.reads = reads
        self.makes = makes

    def forward(self, carry):
        made = self.module(*(carry[name] for name in self.reads))
        if len(self.makes) == 1:
            made = (made,)
        return {**carry, **dict(zip(self.makes, made, strict=True))}


class Entry:
    """Positional and keyword arguments under names."""

    def __init__(self, names):
        self.names = names

    def __call__(self, args, kwargs):
        return {**dict(zip(self.names, args, strict=False)), **kwargs}


class Exit:
    def __init__(self, reads, build):
        self.reads = reads
        self.build = build

    def __call__(self, carry):
        return self.build(*(carry[name] for name in self.reads))


def chain(inputs, parts, outputs, build=lambda value: value, costs=None, **spec_options):
    """A `LayerChain` of ``(module, reads, makes)``, with ``build`` of the values ``outputs`` as its output."""
    layers = [Piece(module, reads, makes).to(DTYPE) for module, reads, makes in parts]
    specs = [
        LayerSpec(f"part{i}", (f"part{i}.module",), tuple(reads), tuple(makes), **spec_options)
        for i, (_, reads, makes) in enumerate(parts)
    ]
    return LayerChain(layers, specs, costs or [cost_of(layer) for layer in layers], Entry(inputs), Exit(outputs, build))


def cost_of(layer, activation_bytes=0, carry_bytes=0):
    weight_bytes = weight_bytes_of(layer)
    gradient_bytes = sum(p.numel() * p.element_size() for p in layer.parameters() if p.requires_grad)
    seconds = max(weight_bytes, 1) * 1e-12
    return LayerCost(
        forward_s=seconds,
        backward_s=2 * seconds,
        weight_bytes=weight_bytes,
        gradient_bytes=gradient_bytes,
        activation_bytes=activation_bytes,
        carry_bytes=carry_bytes,
    )


class Do(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


class Both(nn.Module):
    """A linear layer of its first argument, plus the second."""

    def __init__(self, width=6):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, value, skip):
        return torch.tanh(self.linear(value)) + skip


def skip_chain(depth=6, width=6):
    """The first layer's output skips to the last one, and another one over two layers on the way."""
    parts = [(nn.Linear(width, width), ["x"], ["h0"])]
    for i in range(1, depth - 1):
        parts.append((nn.Sequential(nn.Linear(width, width), nn.Tanh()), [f"h{i - 1}"], [f"h{i}"]))
    parts[3] = (Both(width), ["h2", "h0"], ["h3"])
    parts.append((Both(width), [f"h{depth - 2}", "h0"], ["y"]))
    return chain(["x"], parts, ["y"])


class Noted(nn.Module):
    """Adds its running mean to its input, and assigns a new tensor to it in every forward."""

    def __init__(self, width=6):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, value):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * value.detach().mean(0)
            self.count += 1
        return value * (1 + self.mean)


@contextlib.contextmanager
def without_waits(monkeypatch, backends, lane):
    """Backends that record events but don't wait for them on one lane."""
    with monkeypatch.context() as patch:
        for backend in backends:
            real = backend.wait
            patch.setattr(
                backend,
                "wait",
                lambda waiting, event, real=real: None if waiting is lane else real(waiting, event),
            )
        yield
