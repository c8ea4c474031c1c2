"""Models on one CPU worker with a budget, whose weights may live on its device, and what happens between steps."""

import copy

import torch

import roundpipe
from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.runtime.device.backend import Device
from tests.runtime.models import DTYPE, batch, config, mlp, square_loss

WIDTH, NUM, DEPTH = 8, 2, 3
PLANS = {"one stage": ExecutePlan([], (0, DEPTH), []), "stages": ExecutePlan([(0, 2)], (2, DEPTH), [(1, 2), (0, 1)])}
ROOM = 10**7


def wrapped(model, residency="full", plan=None, memory_bytes=ROOM, **options):
    """A model on one CPU worker whose memory is counted."""
    run_config = config(NUM, plan=plan, residency=residency)
    devices = [Device("cpu", memory_bytes=memory_bytes)]
    return roundpipe.RoundPipe(model, devices=devices, model_run_config=run_config, **options)


def model_of(dtype=DTYPE):
    torch.manual_seed(4)
    return mlp(DEPTH, WIDTH).to(dtype)


def moved(piped):
    """Bytes of weights and gradients that the worker has moved since the last call."""
    (worker,) = piped.report().workers
    return worker.moved_bytes["weights"], worker.moved_bytes["gradients"]


def lives_there(piped):
    return bool(piped._session.engine.twins)  # what is private to the runtime tells where weights are


def optimizer_of(piped, kind):
    return kind(piped.optim_parameters())


OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, foreach=False),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False),
}


def train_scaled(piped, scaler):
    """Six steps under a scaler, with two optimizers, of which one rests in each third: losses, and the last input."""
    copies = dict(piped.optim_named_parameters())
    weights, biases = ([copy for name, copy in copies.items() if ("bias" in name) is it] for it in (False, True))
    both = torch.optim.AdamW(weights, lr=0.05), torch.optim.SGD(biases, lr=0.1, momentum=0.9)

    def update(step):
        for one in both if step % 3 else both[:1]:
            scaler.unscale_(one)
            torch.nn.utils.clip_grad_norm_(one.param_groups[0]["params"], 1.0)
            scaler.step(one)
            one.zero_grad()
        scaler.update()

    losses = []
    for step in range(6):
        x = batch(6, width=WIDTH, seed=step).bfloat16()
        loss_fn = lambda out, _: scaler.scale(out.float().square().sum())  # noqa: E731
        losses.append(piped.forward_backward((x,), loss_fn=loss_fn))
        piped.step(update, True, step)
    return losses, x


def evaluate(piped, model, ours, found):
    x = batch(5, width=WIDTH, seed=99)
    with torch.no_grad():
        found.append(piped.eval()(x))
        found.append(piped.forward_loss((x,), loss_fn=square_loss))
    piped.train()
    found.append(model.eval()(x).detach())  # the user's own model
    model.train()


def read_state(piped, model, ours, found):
    found += [value.clone() for value in piped.state_dict().values()]
    found += [value.clone() for value in copy.deepcopy(model).state_dict().values()]


def load_state(piped, model, ours, found):
    piped.load_state_dict({name: value * 0.5 for name, value in piped.state_dict().items()})


def write(piped, model, ours, found):
    piped.synchronize()
    with torch.no_grad():
        model[1][0].weight.mul_(0.5)
        model[0][0].bias.data.add_(0.25)  # of which torch takes no note


def write_copies(piped, model, ours, found):
    piped.synchronize()
    with torch.no_grad():
        next(piped.optim_parameters()).mul_(0.5)


def look_at_gradients(piped, model, ours, found):
    piped.forward_backward((batch(5, width=WIDTH, seed=98),), loss_fn=square_loss)
    piped.synchronize()
    found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model[2][0].weight.grad.mul_(0.5)


def freeze(piped, model, ours, found):
    model[1].requires_grad_(False)


def thaw(piped, model, ours, found):
    model[1].requires_grad_(True)


def deferred(piped, model, ours, found):
    out = piped(batch(5, width=WIDTH, seed=97))
    square_loss(out, None).backward()
    piped.zero_grad()


def save_and_load(piped, model, ours, found, folder):
    piped.save_checkpoint(folder, optimizer=ours)
    piped.forward_backward((batch(5, width=WIDTH, seed=96),), loss_fn=square_loss)
    piped.step(lambda: (ours.step(), ours.zero_grad()))
    piped.load_checkpoint(folder, optimizer=ours)
