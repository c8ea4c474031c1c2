"""Forward hooks that draw random numbers, such as NEFTune's noise: recomputation repeats their draws."""

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import ExecutePlan, RoundPipeRunConfig

DTYPE = torch.float64
PLAN = ExecutePlan([(0, 2)], (2, 4), [(0, 2)])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def noisy(module, args, output):
    return output + torch.empty_like(output).uniform_(-0.5, 0.5)


@pytest.mark.parametrize("kind", ["by hand", "compiled"])
@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after wrapping"])
def test_gradients_are_those_of_the_draws_that_the_loss_saw(kind, is_late):
    torch.manual_seed(0)
    net, ids = Net().to(DTYPE), torch.randint(0, 10, (4, 3))
    if not is_late:
        net.embed.register_forward_hook(noisy)
    if kind == "by hand":
        pipe = roundpipe.RoundPipe(nn.Sequential(net.embed, *net.layers), devices=["cpu"] * 2)
        options = RoundPipeRunConfig(num_microbatch=2, execute_plan=PLAN)
    else:
        pipe = roundpipe.compile(net, example_args=(ids,), devices=["cpu"] * 2)
        options = RoundPipeRunConfig(num_microbatch=2)
    if is_late:
        net.embed.register_forward_hook(noisy)
    weight = net.layers[0][0].weight
    direction, size = torch.randn(8, 8, dtype=DTYPE), 1e-6

    def loss():
        torch.manual_seed(5)
        found = float(pipe.forward_backward((ids,), loss_fn=lambda y, _: y.square().sum(), run_config=options))
        pipe.synchronize()
        return found

    with pipe:
        loss()
        slope = float((weight.grad * direction).sum())
        with torch.no_grad():
            weight.add_(size * direction)
        above = loss()
        with torch.no_grad():
            weight.sub_(2 * size * direction)
        assert slope == pytest.approx((above - loss()) / (2 * size), rel=1e-6)


def seen(module, args, output):
    module.seen = getattr(module, "seen", 0) + 1


def requires_grad(module, args, output):
    output.requires_grad_(True)


@pytest.mark.parametrize("hook", [lambda *_: None, seen, requires_grad])
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("is_classic", [False, True])
def test_hooks_that_draw_nothing_leave_the_callers_draws_alone(hook, is_late, is_classic):
    """Or a loader's batches would come in another order than in eager mode."""
    net, ids = Net().to(DTYPE), torch.randint(0, 10, (4, 3))
    if not is_late:
        net.embed.register_forward_hook(hook)
    options = RoundPipeRunConfig(num_microbatch=2)
    with roundpipe.compile(net, devices=["cpu"] * 2, model_run_config=options) as pipe:
        if is_late:
            net.embed.register_forward_hook(hook)
        torch.manual_seed(7)
        before = torch.get_rng_state()
        for _ in range(3):
            if is_classic:
                pipe(ids).square().sum().backward()
            else:
                pipe.forward_backward((ids,), loss_fn=lambda y, _: y.square().sum(), loss_reduction="sum")
            pipe.synchronize()
        assert torch.equal(torch.get_rng_state(), before)


def test_hooks_that_draw_draw_something_else_in_each_call():
    net, ids = Net().to(DTYPE), torch.randint(0, 10, (4, 3))
    net.embed.register_forward_hook(noisy)
    with roundpipe.compile(net, devices=["cpu"]) as pipe, torch.no_grad():
        outputs = [pipe(ids) for _ in range(4)]
        assert all(not torch.equal(one, other) for one, other in zip(outputs, outputs[1:], strict=False))
        torch.manual_seed(3)
        first = [pipe(ids) for _ in range(2)]
        torch.manual_seed(3)
        torch.testing.assert_close([pipe(ids) for _ in range(2)], first, rtol=0, atol=0)
