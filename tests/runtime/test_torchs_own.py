"""While torch's own optimizers step on a device, nobody looks at what they do; with the numbers of the host."""

import pytest
import torch

import roundpipe
from roundpipe.runtime.optimizer import as_on_host
from tests.runtime.cases_twins import WIDTH, lives_there, model_of
from tests.runtime.models import batch, square_loss
from tests.runtime.test_unasked import FIRST, average, same, takes_any_gain

__all__ = ["takes_any_gain"]  # a fixture of every test


@pytest.mark.parametrize("when", ["pre", "post"])
def test_what_others_do_in_hooks_of_the_optimizer_may_use_tensors_of_the_host(when, monkeypatch):
    """Here the device is the host: the copies alone count as the device's."""
    monkeypatch.setattr(as_on_host.HostMix, "to_host", lambda self, tensor: tensor.clone())
    monkeypatch.setattr(as_on_host.HostMix, "to_device", lambda self, tensor, device: tensor.clone())

    def between(loop):
        def hook(optimizer, args, kwargs):
            copies = optimizer.param_groups[0]["params"]
            with monkeypatch.context() as there:
                is_there = lambda self, tensor: any(tensor is each for each in copies)  # noqa: E731
                there.setattr(as_on_host.HostMix, "is_there", is_there)
                average(loop, copies)

        if loop.number == FIRST + 2:
            getattr(loop.ours, f"register_step_{when}_hook")(hook)

    same(between, is_async=False, ends_at=FIRST + 3)


def test_torchs_own_part_of_a_step_is_not_looked_at(monkeypatch):
    """An update of a small model would take longer for it than for all else."""
    run = set()
    dispatch = as_on_host.HostMix.__torch_dispatch__

    def noted(self, func, types, args=(), kwargs=None):
        run.add((str(func), self.looks))
        return dispatch(self, func, types, args, kwargs)

    monkeypatch.setattr(as_on_host.HostMix, "__torch_dispatch__", noted)
    same(is_async=False)
    for name in ("norm", "addcdiv"):  # of clipping, and of AdamW
        assert {looks for function, looks in run if name in function} == {False}, name


def test_clipping_can_be_compiled_whole():
    with roundpipe.RoundPipe(model_of(), devices="cpu"):
        clip = torch.compile(lambda each: torch.nn.utils.clip_grad_norm_(each, 1.0), backend="eager", fullgraph=True)
        parameter = torch.nn.Parameter(torch.ones(4))
        parameter.grad = torch.ones(4)
        assert float(clip([parameter])) == 2


TORCHS_OWN = {
    "Adadelta": lambda given: torch.optim.Adadelta(given, 0.5),
    "Adafactor": lambda given: torch.optim.Adafactor(given, 0.01),
    "Adagrad": lambda given: torch.optim.Adagrad(given, 0.05),
    "Adam": lambda given: torch.optim.Adam(given, 0.02, amsgrad=True),
    "AdamW, fused": lambda given: torch.optim.AdamW(given, 0.02, fused=True),
    "AdamW, one by one": lambda given: torch.optim.AdamW(given, 0.02, foreach=False),
    "Adamax": lambda given: torch.optim.Adamax(given, 0.02),
    "ASGD": lambda given: torch.optim.ASGD(given, 0.05),
    "NAdam": lambda given: torch.optim.NAdam(given, 0.02),
    "RAdam": lambda given: torch.optim.RAdam(given, 0.02),
    "RMSprop": lambda given: torch.optim.RMSprop(given, 0.02, centered=True, momentum=0.5),
    "Rprop": lambda given: torch.optim.Rprop(given, 0.02),
    "SGD": lambda given: torch.optim.SGD(given, 0.05, momentum=0.9, nesterov=True),
}


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none")
@pytest.mark.parametrize("name", TORCHS_OWN)
def test_torchs_optimizers_step_there_as_on_the_host(name):
    def run(residency):
        model, losses = model_of(), []
        options = roundpipe.RoundPipeRunConfig(num_microbatch=2, residency=residency)
        with roundpipe.RoundPipe(model, devices=["cuda:0"], model_run_config=options) as piped:
            optimizer = TORCHS_OWN[name](piped.optim_parameters())

            def update():
                torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)
                optimizer.step()
                optimizer.zero_grad()

            for step in range(2 * FIRST):
                x = batch(6, width=WIDTH, seed=step)
                losses.append(piped.forward_backward((x,), loss_fn=square_loss).detach())
                piped.step(update)
            piped.synchronize()
            lives = lives_there(piped)
        return torch.stack(losses), [each.detach().clone() for each in model.parameters()], lives

    losses, weights, lives = run("off")
    found_losses, found, lives_by_then = run("auto")
    assert lives_by_then and not lives
    # step sizes of ASGD are in float32, and a device computes them by other functions
    torch.testing.assert_close(found_losses, losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(found, weights, rtol=1e-6, atol=1e-8)
