"""With residency="full", what the host does with the user's own parameters counts as with streamed ones."""

import copy

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.runtime.device.backend import Device
from tests.runtime.models import ATOL, DTYPE, assert_same, batch, config, gradients, mlp, square_loss

WIDTH, NUM, LR = 8, 2, 0.01


class Pair:
    """A model on one worker, where its weights live by now, and the same in eager."""

    def __init__(self, residency, is_async):
        torch.manual_seed(4)
        self.model = mlp(3, WIDTH).to(DTYPE)
        self.reference = copy.deepcopy(self.model)
        devices = [Device("cpu", memory_bytes=10**7)]
        self.piped = roundpipe.RoundPipe(self.model, devices=devices, model_run_config=config(NUM, residency=residency))
        self.ours = torch.optim.SGD(self.piped.optim_parameters(), lr=LR, momentum=0.9)
        self.theirs = torch.optim.SGD(self.reference.parameters(), lr=LR, momentum=0.9)
        self.is_async = is_async
        for _ in range(2):
            self.train()
            self.step()

    @property
    def lives_there(self):
        return bool(self.piped._session.engine.twins)  # what is private to the runtime tells where weights are

    def train(self, loss_of=lambda model: square_loss, x=None):
        """A round; after each update is waited for, both have the same weights."""
        x = batch(6, width=WIDTH) if x is None else x
        found = self.piped.forward_backward((x(self.model) if callable(x) else x,), loss_fn=loss_of(self.model))
        total = 0.0
        for part in (x(self.reference) if callable(x) else x).tensor_split(NUM):
            loss = loss_of(self.reference)(self.reference(part), None)
            loss.backward(retain_graph=True)
            total += loss.item()
        assert found.item() == pytest.approx(total, abs=ATOL)

    def step(self):
        self.piped.step(lambda: (self.ours.step(), self.ours.zero_grad()), self.is_async)
        self.theirs.step()
        self.theirs.zero_grad()
        self.piped.synchronize()
        assert_same(dict(self.model.named_parameters()), dict(self.reference.named_parameters()))


@pytest.fixture(params=["full", "auto"])
def residency(request):
    return request.param


@pytest.fixture(params=[True, False], ids=["async", "sync"])
def pair(request, residency):
    pair = Pair(residency, request.param)
    assert pair.lives_there == (residency == "full")
    yield pair
    pair.piped.close()


def test_a_loss_that_reads_the_weights_has_them_on_the_host(pair, residency, caplog):
    def penalized(model):
        return lambda out, label: square_loss(out, label) + sum(each.square().sum() for each in model.parameters())

    for _ in range(3):
        pair.train(penalized)
        pair.step()
    assert not pair.lives_there
    said = [record for record in caplog.records if "loss_fn can reach the model" in record.message]
    assert len(said) == (residency == "full")


def test_a_write_that_leaves_no_mark_right_before_the_step(pair):
    pair.train()
    pair.piped.synchronize()
    for model in (pair.model, pair.reference):
        model[1][0].weight.data.add_(0.01)
    pair.step()
    pair.train()
    pair.step()


def test_gradients_of_a_graph_on_the_host_join_those_of_the_round(pair, residency):
    """Also if an embedding that the model has is looked up before the call, whose inputs get gradients."""
    for _ in range(2):
        pair.train(x=lambda model: batch(6, width=WIDTH) + model[0][0].bias)
        for model in (pair.model, pair.reference):
            (0.1 * model[2][0].weight.square().sum()).backward()
        pair.step()
        assert pair.lives_there == (residency == "full")


def test_such_gradients_are_cleared_and_come_home_with_the_weights(pair):
    def penalize():
        for model in (pair.model, pair.reference):
            (0.1 * model[2][0].weight.square().sum()).backward()

    penalize()
    pair.piped.zero_grad()
    pair.theirs.zero_grad()
    pair.train()
    penalize()
    pair.piped.synchronize()
    assert_same(gradients(pair.model), gradients(pair.reference))
    pair.step()
    pair.train()
    penalize()
    for model in (pair.model, pair.reference):
        model[1].requires_grad_(False)  # which brings all home
    pair.train(lambda model: square_loss)
    pair.step()


def test_the_optimizers_zero_grad_takes_such_gradients_too(pair):
    (pair.model[2][0].weight.square().sum()).backward()
    pair.train()
    pair.ours.zero_grad()
    pair.theirs.zero_grad()
    assert all(parameter.grad is None for parameter in (*pair.model.parameters(), *pair.piped.optim_parameters()))
    pair.train()
    pair.step()


def test_what_is_first_made_in_inference_mode_can_be_trained(residency):
    """Weights that come to the device, copies, and memory for gradients of another dtype."""
    torch.manual_seed(4)
    model, x = mlp(3, WIDTH).float(), batch(6, width=WIDTH).float()
    devices = [Device("cpu", memory_bytes=10**7)]
    run_config = config(NUM, residency=residency)
    with roundpipe.RoundPipe(model, devices=devices, model_run_config=run_config, optim_dtype=DTYPE) as piped:
        with torch.inference_mode():
            ours = torch.optim.SGD(piped.optim_parameters(), lr=LR)
        for _ in range(3):
            piped.forward_backward((x,), loss_fn=square_loss)
            piped.synchronize()
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.5)
            before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            piped.eval()
            with torch.inference_mode():
                piped(x)
            piped.train()
            piped.step(lambda: (ours.step(), ours.zero_grad()), is_async=False)
            piped.synchronize()
            expected = {name: value - LR * 0.5 for name, value in before.items()}
            assert_same({name: value.detach() for name, value in model.named_parameters()}, expected, atol=1e-6)


def test_weights_that_come_to_the_device_for_an_evaluation_can_be_trained():
    """Its layers are others, so that weights are packed anew, at home."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)).to(DTYPE)
    devices, x = [Device("cpu", memory_bytes=10**7)], batch(6, width=WIDTH)
    with roundpipe.compile(model, devices=devices, model_run_config=config(NUM, residency="full")) as piped:
        ours = torch.optim.SGD(piped.optim_parameters(), lr=LR)
        for calls_in_between in (False, True, False, False):
            piped.forward_backward((x,), loss_fn=square_loss)
            if calls_in_between:
                piped.eval()
                with torch.inference_mode():
                    piped(x)
                piped.train()
            piped.step(lambda: (ours.step(), ours.zero_grad()), is_async=False)
        assert piped._session.engine.twins  # private, as above
