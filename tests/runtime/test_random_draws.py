"""Draws of layers and of losses: recomputation repeats them, and no worker disturbs another's."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig
from roundpipe.fx.graph.nodes import draws_random
from roundpipe.fx.trace.tracer import trace

DTYPE = torch.float64
KINDS = {"GRU": nn.GRU, "LSTM": nn.LSTM, "RNN": nn.RNN}


class Recurrent(nn.Module):
    def __init__(self, kind, dropout=0.4, num_layers=2):
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.recurrent = KINDS[kind](6, 6, num_layers, dropout=dropout, batch_first=True)
        self.out = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 10))

    def forward(self, ids):
        return self.out(self.recurrent(self.embed(ids))[0])


@pytest.mark.filterwarnings("ignore:dropout option adds dropout after all but last")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dropout", "num_layers", "training"), [(0.4, 2, True), (0.0, 2, True), (0.4, 1, True)])
def test_dropout_between_recurrent_layers_is_seen(kind, dropout, num_layers, training):
    model, ids = Recurrent(kind, dropout, num_layers), torch.randint(10, (4, 3))
    for is_training in (training, False):
        (node,) = [
            each for each in trace(model.train(is_training), (ids,), {}).graph.nodes if each.target == "recurrent"
        ]
        assert draws_random(node) is (is_training and dropout > 0 and num_layers > 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:forward_backward of an AutoRoundPipe")
@pytest.mark.parametrize("is_own_loop", [False, True])
@pytest.mark.parametrize("is_in_parts", [False, True])
def test_recomputation_repeats_the_dropout_between_recurrent_layers(kind, is_own_loop, is_in_parts, recwarn):
    torch.manual_seed(0)
    model, ids = Recurrent(kind).to(DTYPE), torch.randint(10, (6, 4))
    weights = [model.embed.weight, model.recurrent.weight_hh_l0, model.recurrent.weight_ih_l1]
    directions, size = [torch.randn_like(weight) for weight in weights], 1e-6

    def move(factor):
        with torch.no_grad():
            for weight, direction in zip(weights, directions, strict=True):
                weight.add_(factor * size * direction)

    def wrap():
        if is_in_parts:
            return roundpipe.wrap_model_to_roundpipe(model, use_sequential_preset=False, devices=["cpu"] * 3)
        return roundpipe.compile(model, devices=["cpu"] * 3, example_args=(ids,))

    with wrap() as pipe:
        options = RoundPipeRunConfig(num_microbatch=3)

        def loss():
            torch.manual_seed(5)
            if is_own_loop:
                found = pipe(ids, roundpipe_run_config=options).square().sum()
                found.backward()
                return float(found.detach())
            found = float(pipe.forward_backward((ids,), loss_fn=lambda y, _: y.square().sum(), run_config=options))
            pipe.synchronize()
            return found

        loss()
        slope = sum(
            float((weight.grad * direction).sum()) for weight, direction in zip(weights, directions, strict=True)
        )
        move(1)
        above = loss()
        move(-2)
        assert slope == pytest.approx((above - loss()) / (2 * size), rel=1e-5)
    assert not [each for each in recwarn if "runs on the CPU" in str(each.message)]


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = x + F.dropout(torch.tanh(layer(x)), 0.3, self.training)
        return x


def drawing_loss(out, label):
    noise = torch.randn_like(out)
    return F.mse_loss(F.dropout(out, 0.5) + noise, label)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_loss_function_that_draws_gives_the_same_on_any_number_of_devices(is_async):
    x, label = torch.randn(12, 8, dtype=DTYPE), torch.randn(12, 8, dtype=DTYPE)

    def losses(num_devices):
        torch.manual_seed(0)
        model = Dropping().to(DTYPE)
        options = RoundPipeRunConfig(num_microbatch=6)
        with roundpipe.compile(model, devices=["cpu"] * num_devices, model_run_config=options) as pipe:
            optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
            torch.manual_seed(3)
            found = []
            for _ in range(5):
                found.append(
                    float(pipe.forward_backward((x,), label=label, loss_fn=drawing_loss, loss_reduction="mean"))
                )
                pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
        return found

    expected = losses(1)
    for num_devices in (2, 3, 4):
        assert losses(num_devices) == pytest.approx(expected, rel=1e-9)
