"""`forward_loss`: the losses of `forward_backward`, without its backward and without the outputs' way to the host."""

import pytest
import torch
from torch import nn

import roundpipe
from tests.runtime.models import DTYPE, batch, config, mlp, square_loss
from tests.wrappers.cases_pipe import train_once


class Classifier(nn.Module):
    """Its wide outputs are read by the loss alone; an early value is an output too."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 500)

    def forward(self, x):
        first = self.body[0](x)
        return {"first": first, "logits": self.head(self.norm(self.body[1:](first)))}


def two_losses(outputs, label):
    loss = nn.functional.cross_entropy(outputs["logits"], label, reduction="sum")
    return [loss / roundpipe.num_microbatches(), outputs["first"].square().sum()]


@pytest.fixture
def labels():
    return torch.randint(500, (7,), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("wrap", [roundpipe.compile, roundpipe.AutoRoundPipe])
@pytest.mark.parametrize("mode", [True, False], ids=["training", "evaluation"])
def test_losses_are_those_of_a_round_without_its_gradients(wrap, workers, mode, labels):
    torch.manual_seed(0)
    model = Classifier().to(DTYPE).train(mode)
    x = batch(7)
    given = {"label": labels, "loss_fn": two_losses, "return_outputs": True, "run_config": config(3)}
    with wrap(model, devices=["cpu"] * workers) as piped:
        losses, outputs = piped.forward_loss((x,), **given)
        assert all(parameter.grad is None for parameter in model.parameters())
        expected, expected_outputs = piped.forward_backward((x,), **given)
        assert model.head.weight.grad is not None
    torch.testing.assert_close(losses, expected, rtol=0, atol=0)
    torch.testing.assert_close(outputs, expected_outputs, rtol=0, atol=0)
    assert not any(each.requires_grad for each in (*losses, *outputs.values()))


def test_outputs_stay_on_the_device(labels):
    torch.manual_seed(0)
    model = Classifier().to(DTYPE).eval()
    with roundpipe.compile(model, devices=["cpu"] * 2, example_args=(batch(7),)) as piped:
        with piped.record_timeline() as timeline:
            piped.forward_loss((batch(7),), label=labels, loss_fn=two_losses, run_config=config(3))
        with piped.record_timeline() as with_outputs:
            piped(batch(7), roundpipe_run_config=config(3))
    down = [span for span in timeline.spans if span.name.startswith("values of")]
    assert len(down) < len([span for span in with_outputs.spans if span.name.startswith("values of")])


def test_frozen_models_have_a_loss():
    model = mlp().requires_grad_(False)
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        loss = piped.forward_loss((batch(),), loss_fn=square_loss, run_config=config(3))
        torch.testing.assert_close(loss, square_loss(model(batch()), None))
        with pytest.raises(roundpipe.LossError, match="forward_loss"):
            train_once(piped)


def test_gradients_wait_for_their_step():
    model = mlp()
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        train_once(piped)
        before = [parameter.grad.clone() for parameter in model.parameters()]
        piped.forward_loss((batch(),), loss_fn=square_loss, run_config=config(3))
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)


def test_an_error_of_the_loss_says_where():
    def fails(outputs, label):
        raise KeyError("label")

    with roundpipe.RoundPipe(mlp(), devices=["cpu"] * 2) as piped:
        with pytest.raises(KeyError) as caught:
            piped.forward_loss((batch(),), loss_fn=fails, run_config=config(3))
        notes = "".join(caught.value.__notes__)
        assert "phase loss_fn" in notes and "zero_grad" not in notes
        train_once(piped)


def test_workers_are_told():
    with roundpipe.RoundPipe(mlp(), devices=["cpu"] * 3) as piped:
        assert piped.num_workers == 3
        assert piped.worker_devices == (torch.device("cpu"),) * 3
