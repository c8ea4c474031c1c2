"""Where the first NaN or Inf arises, and torch's anomaly mode in workers."""

import math

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import ExecutePlan, NonFiniteError, RoundPipeRunConfig

DTYPE = torch.float64
PLANS = {
    "apart": ExecutePlan([(0, 1), (1, 2), (2, 3)], (3, 4), [(2, 3), (1, 2), (0, 1)]),
    "in one": ExecutePlan([], (0, 4), []),
    "in two": ExecutePlan([(0, 2)], (2, 4), [(0, 2)]),
}


class Layer(nn.Module):
    """Breaks, if told so, for one sample."""

    def __init__(self, breaks=None):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.breaks = breaks

    def forward(self, x):
        y = torch.tanh(self.linear(x)) + x
        if self.breaks == "forward":
            y = y / (x[:, :1] - 7.0).clamp(min=0).detach()
        elif self.breaks == "backward":  # finite values, and a gradient of 0 / 0 where the first feature is 7
            y = y + (x[:, :1] - 7.0).abs().sqrt()
        return y


def make(breaks, where=2):
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(breaks if index == where else None) for index in range(4))).to(DTYPE)
    with torch.no_grad():
        for layer in model:
            layer.linear.weight[0] = 0
            layer.linear.bias[0] = 0  # the first feature stays
    return model


def make_batch(bad):
    x = torch.randn(6, 4, dtype=DTYPE, generator=torch.Generator().manual_seed(0))
    x[:, 0] = 8.0
    if bad is not None:
        x[bad, 0] = 7.0
    return x


def square(outputs, label):
    return outputs.square().sum()


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("breaks", ["forward", "backward"])
@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_the_layer_microbatch_and_phase_are_named(plan, breaks, grain):
    options = RoundPipeRunConfig(num_microbatch=3, recompute_grain=grain, execute_plan=plan, check_finite=True)
    with roundpipe.RoundPipe(make(breaks), devices=["cpu"] * 2) as pipe:
        pipe.forward_backward((make_batch(None),), loss_fn=square, run_config=options)
        with pytest.raises(NonFiniteError, match=rf"layer 2 \(2\).*microbatch 1, phase {breaks}"):
            pipe.forward_backward((make_batch(3),), loss_fn=square, run_config=options)
        pipe.zero_grad()
        pipe.forward_backward((make_batch(None),), loss_fn=square, run_config=options)
        off = pipe.forward_backward((make_batch(3),), loss_fn=square, run_config=RoundPipeRunConfig(num_microbatch=3))
        assert math.isfinite(off) == (breaks == "backward")


def test_a_loss_that_breaks_is_named():
    options = RoundPipeRunConfig(num_microbatch=3, check_finite=True)
    with (
        roundpipe.RoundPipe(make(None), devices=["cpu"]) as pipe,
        pytest.raises(NonFiniteError, match="the loss is NaN.*microbatch 0, phase loss_fn"),
    ):
        loss_fn = lambda outputs, label: outputs.sum() * math.nan  # noqa: E731
        pipe.forward_backward((make_batch(None),), loss_fn=loss_fn, run_config=options)


def test_a_weight_that_is_the_cause_is_named():
    model = make(None)
    with torch.no_grad():
        model[1].linear.bias[2] = math.nan
    with (
        roundpipe.RoundPipe(model, devices=["cpu"]) as pipe,
        pytest.raises(NonFiniteError, match=r"output of layer 1 \(1\) holds NaN; its .*linear.bias holds one"),
    ):
        pipe(make_batch(None), roundpipe_run_config=RoundPipeRunConfig(check_finite=True))


def test_infinite_masks_and_inputs_that_are_handed_on_are_no_finding():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            mask = torch.full((x.shape[1], x.shape[1]), -math.inf, dtype=x.dtype).triu(1)
            for layer in self.layers:
                x = layer((x @ x.transpose(1, 2) + mask).softmax(-1) @ x)
            return x

    x = torch.randn(4, 3, 4, dtype=DTYPE)
    with roundpipe.compile(Masked().to(DTYPE), example_args=(x,), devices=["cpu"]) as pipe:
        pipe.forward_backward((x,), loss_fn=square, run_config=RoundPipeRunConfig(check_finite=True))


def test_a_model_in_parts_is_looked_at_too():
    model = make("forward")
    options = RoundPipeRunConfig(num_microbatch=3, check_finite=True)
    pipe = roundpipe.wrap_model_to_roundpipe(
        nn.Sequential(model, nn.Identity()), use_sequential_preset=False, lower_threshold=1, devices=["cpu"]
    )
    with pipe, pytest.raises(NonFiniteError, match="microbatch 1, phase forward"):
        pipe.forward_backward((make_batch(3),), loss_fn=square, run_config=options)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_anomaly_mode_reaches_the_workers(is_async):
    """Also those backward stages that would run beside the next call, when the mode is over."""
    plan = PLANS["in two"]
    options = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan, preserve_rng_state=False)
    with roundpipe.RoundPipe(make("backward", where=1), devices=["cpu"] * 2) as pipe:
        optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.0)
        for _ in range(2):
            pipe.forward_backward((make_batch(None),), loss_fn=square, run_config=options)
            pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async)
        with (
            pytest.warns(UserWarning, match="Anomaly Detection"),
            torch.autograd.detect_anomaly(),
            pytest.raises(RuntimeError, match="returned nan values") as caught,
        ):
            pipe.forward_backward((make_batch(0),), loss_fn=square, run_config=options)
        assert "phase backward" in "".join(caught.value.__notes__)
        pipe.zero_grad()
