"""Weights that are written, frozen or replaced between steps."""

import copy

import pytest
import torch
from torch import nn

import roundpipe
from tests.runtime.cases_training import NUM, eager_backward, modes, workers
from tests.runtime.models import DTYPE, batch, config, mlp, square_loss


class CastsItsWeight(nn.Module):
    """Keeps one weight in float32 whatever the model's dtype, as routers of some mixtures of experts do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.router = nn.Linear(6, 6, bias=False)

    def forward(self, x):
        self.router = self.router.to(torch.float32)
        return self.linear(x) * self.router(x.float()).softmax(-1).to(x.dtype)


@pytest.mark.parametrize("way", ["compile", "by hand"])
@workers
def test_a_weight_that_the_forward_converts_is_converted_on_the_host(workers, way):
    torch.manual_seed(0)
    model = nn.Sequential(*(CastsItsWeight() for _ in range(4))).to(DTYPE)
    reference = copy.deepcopy(model)
    eager = torch.optim.AdamW(reference.parameters(), lr=0.05)
    make = roundpipe.compile if way == "compile" else roundpipe.RoundPipe
    with make(model, devices=["cpu"] * workers) as piped:
        ours = torch.optim.AdamW(piped.optim_parameters(), lr=0.05)
        for seed in range(4):
            x = batch(seed=seed)
            eager.zero_grad()
            expected = eager_backward(reference, x)
            loss = piped.forward_backward((x,), loss_fn=square_loss, run_config=config(NUM))
            piped.synchronize()
            assert float(loss) == pytest.approx(expected, rel=1e-7)
            assert {name: p.dtype for name, p in piped.named_parameters()} == {
                name: torch.float32 if "router" in name else DTYPE for name, _ in reference.named_parameters()
            }
            for one, other in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-7)
            eager.step()
            piped.step(lambda: (ours.step(), ours.zero_grad()), is_async=False)
        assert [p.dtype for p in piped.optim_parameters()] == [p.dtype for p in reference.parameters()]
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert piped.trace_count <= 2


def clamp(parameter):
    parameter.clamp_(-0.1, 0.1)


def reset(parameter):
    nn.init.constant_(parameter, 0.3)


def rebind(parameter):
    parameter.data = parameter.data * 0.5


def through_another_dtype(parameter):
    parameter.data = parameter.data.float().to(DTYPE)


def clamp_data(parameter):
    parameter.data.clamp_(-0.1, 0.1)


WRITES = [clamp, reset, rebind, through_another_dtype, clamp_data]


@pytest.mark.parametrize("way", ["compile", "by hand"])
@pytest.mark.parametrize("whose", ["parameters", "optim_parameters"])
@pytest.mark.parametrize("write", WRITES)
@modes
def test_weights_written_between_steps_stay_written(is_async, write, whose, way):
    """Weight clipping, a restart of some weights, averages swapped in: after `synchronize`, or a step that waits.

    A loop may have the model's weights for it, or those that its optimizer has.
    """
    model = mlp()
    reference = copy.deepcopy(model)
    eager = torch.optim.Adam(reference.parameters(), lr=0.01)
    with (roundpipe.compile if way == "compile" else roundpipe.RoundPipe)(model, devices=["cpu"] * 2) as piped:
        ours = torch.optim.Adam(piped.optim_parameters(), lr=0.01)
        for seed in range(4):
            with torch.no_grad():
                weights = model.parameters() if whose == "parameters" else piped.optim_parameters()
                for one, other in list(zip(weights, reference.parameters(), strict=True))[seed::2]:
                    write(one)
                    write(other)
            state = (model if seed % 2 else piped).state_dict()
            for one, other in zip(state.values(), reference.state_dict().values(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)
            expected = eager_backward(reference, batch(seed=seed))
            loss = piped.forward_backward((batch(seed=seed),), loss_fn=square_loss, run_config=config(NUM))
            assert float(loss) == pytest.approx(expected, rel=1e-9)
            eager.step()
            eager.zero_grad()
            piped.step(lambda: (ours.step(), ours.zero_grad()), is_async=is_async)
            if is_async:
                piped.synchronize()
            for one, other in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


def test_a_write_of_a_copys_data_counts_where_no_sample_is_looked_at_too():
    model = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 5)).double()
    with roundpipe.RoundPipe(model, devices=["cpu"]) as piped:
        copies = list(piped.optim_parameters())
        for one in copies:
            one.data.view(-1)[1] = 0.5  # which is looked at in the small ones only
        piped.synchronize()
        for one, other in zip(model.parameters(), copies, strict=True):
            assert torch.equal(one, other) and one.view(-1)[1] == 0.5


def double(parameter):
    parameter.mul_(2)


@pytest.mark.parametrize("write", [double, clamp_data])
def test_weights_written_while_an_update_is_on_its_way_are_an_error(write):
    model = mlp()
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.01)
        for _ in range(2):
            piped.forward_backward((batch(),), loss_fn=square_loss)
            piped.step(optimizer.step)
        piped.forward_backward((batch(),), loss_fn=square_loss)
        with torch.no_grad():
            write(next(model.parameters()))
        with pytest.raises(roundpipe.ConfigError, match=r"weight: written while an asynchronous update.*synchronize"):
            piped.step(optimizer.step)
        piped.synchronize()
        piped.step(optimizer.step)


def test_a_write_of_data_is_taken_over_where_no_sample_is_looked_at_too():
    """One weight of many is seen to be written; that is reason to look at all of all."""
    model = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 5)).double()
    with roundpipe.RoundPipe(model, devices=["cpu"], optim_dtype=torch.float32) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.0)
        for parameter in model.parameters():
            parameter.data.view(-1)[1] = 0.5  # which is looked at in the small ones only
        want = [parameter.detach().clone() for parameter in model.parameters()]
        piped.forward_backward((torch.randn(4, 40, dtype=DTYPE),), loss_fn=square_loss)
        piped.step(optimizer.step, is_async=False)
        for parameter, was in zip(model.parameters(), want, strict=True):
            torch.testing.assert_close(parameter, was, rtol=1e-6, atol=0)


def test_an_update_on_its_way_reaches_a_parameter_that_is_frozen_meanwhile():
    model = mlp()
    with roundpipe.compile(model, devices=["cpu"] * 2) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.1)
        copies = dict(piped.optim_named_parameters())
        for index in range(4):
            if index == 2:
                for parameter in list(model.parameters())[:2]:
                    parameter.requires_grad_(False)
            piped.forward_backward((batch(seed=index),), loss_fn=square_loss, run_config=config(NUM))
            piped.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        piped.synchronize()
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, copies[name]), name
            assert parameter.grad is None


def test_two_wrappers_of_one_module_take_over_each_others_updates():
    model = mlp()
    reference = copy.deepcopy(model)
    eager = torch.optim.SGD(reference.parameters(), lr=0.01)
    with roundpipe.RoundPipe(model, devices=["cpu"]) as one, roundpipe.compile(model, devices=["cpu"]) as other:
        optimizers = {piped: torch.optim.SGD(piped.optim_parameters(), lr=0.01) for piped in (one, other)}
        for piped in (one, other, other, one, one):
            eager.zero_grad()
            eager_backward(reference, batch())
            eager.step()
            piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(NUM))
            optimizer = optimizers[piped]
            piped.step(lambda optimizer=optimizer: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("way", ["compile", "by hand"])
@modes
def test_a_parameter_replaced_after_wrapping_is_trained_by_a_new_optimizer(is_async, way):
    model = mlp()
    reference = copy.deepcopy(model)

    def replace(of):
        name, module = next((name, one) for name, one in of.named_modules() if isinstance(one, nn.Linear))
        with torch.random.fork_rng():
            torch.manual_seed(3)
            module.weight = nn.Parameter(torch.randn_like(module.weight))

    with (roundpipe.compile if way == "compile" else roundpipe.RoundPipe)(model, devices=["cpu"] * 2) as piped:
        for _ in range(2):
            eager = torch.optim.SGD(reference.parameters(), lr=0.01)
            ours = torch.optim.SGD(piped.optim_parameters(), lr=0.01)
            for seed in range(2):
                expected = eager_backward(reference, batch(seed=seed))
                loss = piped.forward_backward((batch(seed=seed),), loss_fn=square_loss, run_config=config(NUM))
                assert float(loss) == pytest.approx(expected, rel=1e-9)
                eager.step()
                eager.zero_grad()
                piped.step(lambda ours=ours: (ours.step(), ours.zero_grad()), is_async=is_async)
                piped.synchronize()
            for one, other in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)
            replace(model)
            replace(reference)
