"""Small models written by hand, each for what is hard to trace or to cut in it."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.fx.inputs import VOCABULARY, Case, Inputs, pictures, squared, tokens, vectors


def linears(number: int = 4) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(16, 16) for _ in range(number))


class ResidualBlock(nn.Module):
    """Two convolutions with BatchNorm and a skip."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(h)))


class ResNet(nn.Module):
    """Stem, residual blocks, pooling, head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(*(ResidualBlock(8) for _ in range(3)))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.blocks(self.stem(x))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(h, 1), 1))


class UNet(nn.Module):
    """Skips from each level down to the same level up."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 8, 16, 32]
        pairs = list(zip(widths, widths[1:], strict=False))
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in pairs
        )
        self.up = nn.ModuleList(nn.Conv2d(2 * b, a, 3, padding=1) for a, b in reversed(pairs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = skips[-1].mean((2, 3), keepdim=True).expand_as(F.max_pool2d(skips[-1], 2))
        for block in self.up:
            skip = skips.pop()
            x = block(torch.cat([F.interpolate(x, size=skip.shape[-2:]), skip], 1))
        return x


class SharedTwice(nn.Module):
    """One block called twice, and one weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1))
        self.last = nn.Linear(16, 16)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = self.block(x) + x
        return self.last(self.block(x) + x)


class ManyOutputs(nn.Module):
    """Nested inputs and outputs, an auxiliary loss, numbers and None among them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()
        self.gates = nn.ModuleList(nn.Linear(16, 4) for _ in range(4))

    def forward(self, batch: dict[str, torch.Tensor], *, scale: float = 1.0, extras: Any = None) -> Any:
        h = batch["x"] * scale
        if extras is not None:
            h = h + extras[0]
        hidden, aux = [], torch.zeros((), device=h.device)
        for layer, gate in zip(self.layers, self.gates, strict=True):
            weights = gate(h).softmax(-1)
            aux = aux + weights.mean(0).pow(2).sum()
            h = h + layer(h).tanh() * weights.amax(-1, keepdim=True)
            hidden.append(h)
        return {"logits": h, "aux": (aux, [hidden[0], hidden[2]]), "count": len(hidden), "none": None}


def many_inputs(batch: int, length: int) -> Inputs:
    return {"batch": {"x": torch.randn(batch, 16)}, "scale": 0.5, "extras": [torch.randn(batch, 16)]}


def many_loss(out: Any) -> torch.Tensor:
    aux, (first, third) = out["aux"]
    return out["logits"].pow(2).mean() + 0.1 * aux + first.mean() + third.pow(2).mean() * out["count"]


class MaskDecides(nn.Module):
    """Takes a shorter path if its mask is all ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            if not mask.all():
                x = x * mask[:, :1]
        return x


class AssignsBuffer(nn.Module):
    """Replaces a buffer in its forward, twice through a shared block, and counts in another."""

    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
            return x + self.mean

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()
        self.average = AssignsBuffer.Average()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        for layer in self.layers[:2]:
            x = layer(x).relu()
        x = self.average(x)
        x = self.layers[2](x)
        return self.layers[3](self.average(x))


class InPlace(nn.Module):
    """Writes activations, views and slices in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()
        self.bias = nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        kept = torch.zeros(x.shape[0], 3, 16, device=x.device)
        for index, layer in enumerate(self.layers[1:]):
            y = layer(x)
            y += self.bias
            y[:, 0] = 0
            kept[:, index] = y
            y[:, :8].mul_(2.0)
            x = x + y
        return x.masked_fill(torch.arange(16, device=x.device)[None] < 4, 0.0) + kept.sum(1)


class Regions(nn.Module):
    """Autocast, nested autocast and no_grad in glue, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()
        self.weight = nn.Parameter(torch.randn(16, 16) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.layers[0](x) @ self.weight
            with torch.autocast("cpu", enabled=False):
                x = self.layers[1](x.float())
            x = self.layers[2](x)
        with torch.no_grad():
            gate = self.layers[3](x.float()).softmax(-1)
        x = x.float() * gate + torch.rand_like(gate) * (torch.rand(x.shape[0], 1) > 0.5)
        return F.dropout(x, 0.3, self.training)


class DoubledGradient(torch.autograd.Function):
    """Identity with twice the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


ROWS_AT_ONCE = 5


class LogProbs(torch.autograd.Function):
    """Of each row's target, and whether it is the largest; logits are made for some rows at once."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Any:
        log_probs = torch.zeros(hidden.shape[0], dtype=hidden.dtype)
        best = torch.zeros(hidden.shape[0], dtype=torch.bool)
        for start in range(0, hidden.shape[0], ROWS_AT_ONCE):
            rows = slice(start, min(start + ROWS_AT_ONCE, hidden.shape[0]))
            found = (hidden[rows] @ weight.t()).log_softmax(-1)
            log_probs[rows] = found.gather(-1, targets[rows].unsqueeze(-1)).squeeze(-1)
            best[rows] = found.argmax(-1) == targets[rows]
        ctx.save_for_backward(hidden, weight, targets)
        ctx.mark_non_differentiable(best)
        return log_probs, best, None

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> Any:
        hidden, weight, targets = ctx.saved_tensors
        logits = torch.nn.functional.one_hot(targets, len(weight)) - (hidden @ weight.t()).softmax(-1)
        logits = logits * gradient.unsqueeze(-1)
        return logits @ weight, logits.t() @ hidden, None


class CustomFunction(nn.Module):
    """A custom autograd function in glue."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = DoubledGradient.apply(layer(x))
        return x


class BranchInside(nn.Module):
    """Submodules that branch on their activations."""

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Linear(16, 16)
            self.right = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 0:
                return self.left(x)
            return self.right(x)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(16, 16), BranchInside.Branch(), nn.Linear(16, 16), BranchInside.Branch()]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) + x
        return x


class BranchAtRoot(nn.Module):
    """Branches on an activation in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.sum() > 0:
                x = x * 2
        return x


class BranchCaught(nn.Module):
    """As `BranchAtRoot`, with a handler that would hide the failure to read data."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            try:
                x = x * 2 if bool(x.sum() > 0) else x
            except Exception:
                x = x * 3
        return x


class PythonRandom(nn.Module):
    """Skips layers by Python's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if random.random() < 0.3:
                continue
            x = layer(x)
        return x


class SelectsByMask(nn.Module):
    """Sizes that the data of an input determine."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.layers = linears()

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)[mask]
        for layer in self.layers:
            x = layer(x).relu()
        return x


def masked_inputs(batch: int, length: int) -> Inputs:
    return {"ids": tokens(batch, length), "mask": torch.rand(batch, length) > 0.3}


class VmapMask(nn.Module):
    """A mask made by a nested vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        allowed = torch.vmap(torch.vmap(lambda i, j: i >= j, in_dims=(None, 0)), in_dims=(0, None))(
            positions, positions
        )
        both = allowed[None] & mask[:, None, :]
        for layer in self.layers:
            x = F.scaled_dot_product_attention(x, layer(x), x, attn_mask=both)
        return x


def attention_inputs(batch: int, length: int) -> Inputs:
    return {"x": torch.randn(batch, length, 16), "mask": torch.ones(batch, length, dtype=torch.bool)}


HANDWRITTEN: dict[str, Case] = {
    "resnet": Case(ResNet, pictures, squared, (16,)),
    "unet": Case(UNet, pictures, squared, (16,)),
    "shared_twice": Case(SharedTwice, vectors, squared, (16,)),
    "many_outputs": Case(ManyOutputs, many_inputs, many_loss, (16,)),
    "assigns_buffer": Case(AssignsBuffer, vectors, squared, (16,)),
    "in_place": Case(InPlace, vectors, squared, (16,)),
    "regions": Case(Regions, vectors, squared, (16,)),
    "custom_function": Case(CustomFunction, vectors, squared, (16,)),
    "branch_inside": Case(BranchInside, vectors, squared, (16,)),
    "selects_by_mask": Case(SelectsByMask, masked_inputs, squared),
    "vmap_mask": Case(VmapMask, attention_inputs, squared, (16,)),
}
