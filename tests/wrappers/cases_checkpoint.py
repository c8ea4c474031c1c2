"""What the tests beside it share."""

import torch
from torch import nn

import roundpipe

WIDTH = 6


def piped(workers=1, depth=3, dtype=torch.float32, optim_dtype=None, seed=1):
    """Layers with weights, statistics and random draws."""
    torch.manual_seed(seed)
    layers = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), nn.Tanh()) for _ in range(depth)
    ]
    model = nn.Sequential(*layers).to(dtype)
    return roundpipe.RoundPipe(model, optim_dtype=optim_dtype, devices=["cpu"] * workers)


def loss(output, label):
    return output.float().square().sum()


def train(model, optimizer, steps, is_async=False, scheduler=None, scaler=None):
    """Inputs come from torch's generator, so that they repeat only if a load sets it."""
    dtype = next(model.parameters()).dtype

    def update():
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()

    def scaled(output, label):
        return loss(output, label) if scaler is None else scaler.scale(loss(output, label))

    for _ in range(steps):
        inputs = (torch.randn(8, WIDTH, dtype=dtype),)
        model.forward_backward(inputs, loss_fn=scaled, run_config=roundpipe.RoundPipeRunConfig(num_microbatch=2))
        model.step(update, is_async)
    model.synchronize()


def clones(model):
    """Everything that a step changes."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return state | {f"optim {name}": copy.detach().clone() for name, copy in model.optim_named_parameters()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert not [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


def sgd(model):
    return torch.optim.SGD(model.optim_parameters(), lr=0.05, momentum=0.9)


def adamw(model):
    return torch.optim.AdamW(model.optim_parameters(), lr=0.01)


class Tied(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 10, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.inner(self.embedding(tokens)))
