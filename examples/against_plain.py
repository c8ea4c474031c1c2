"""The same steps, and the same step's memory, in plain PyTorch: what the examples' ``--check`` compares with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

CHECK_STEPS = 3
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


def agrees(
    model: Any,
    net: nn.Module,
    data: Iterator[tuple[dict[str, Any], torch.Tensor]],
    loss_fn: Callable[[Any, torch.Tensor], torch.Tensor],
    lr: float,
) -> bool:
    """Whether the first steps of SGD are those of plain PyTorch; prints by how much they differ.

    Args:
        model: wraps ``net``; both are in evaluation mode meanwhile, without dropout or batches' statistics. Plain
            PyTorch gets the same microbatches and updates copies in float32, too: all else is a matter of rounding,
            and in bfloat16 some gradients are nothing but that.
        net: the model itself.
        data: keyword arguments and labels of each step.
        loss_fn: ``(outputs, labels) -> loss``, a mean over samples.
        lr: the learning rate.
    """
    plain = copy.deepcopy(net).eval()
    model.eval()
    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    copies = [parameter.detach().float() for parameter in trained]
    ours, theirs = torch.optim.SGD(model.optim_parameters(), lr=lr), torch.optim.SGD(copies, lr=lr)
    loss_differences, gradient_differences, sizes = [], [], []

    def counted(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        sizes.append(len(labels))
        return loss_fn(outputs, labels)

    for _, (inputs, labels) in zip(range(CHECK_STEPS), data, strict=False):
        sizes.clear()
        loss = model.forward_backward(input_kwargs=inputs, label=labels, loss_fn=counted, loss_reduction="mean")
        model.synchronize()
        expected = sum(plain_losses(plain, inputs, labels, loss_fn, sizes))
        loss_differences.append(abs(float(loss) - expected))
        gradient_differences.append(gradient_difference(net, plain))
        model.step(lambda: (ours.step(), ours.zero_grad()), is_async=False)
        for parameter, copied in zip(trained, copies, strict=True):
            copied.grad = parameter.grad.float() if parameter.grad is not None else None
        theirs.step()
        with torch.no_grad():
            for parameter, copied in zip(trained, copies, strict=True):
                parameter.copy_(copied)
        plain.zero_grad()
    model.train()
    loss_difference, gradient = largest(loss_differences), largest(gradient_differences)
    print(f"check: largest loss difference {loss_difference:.1e}, gradient difference {gradient:.1e}")
    tolerance = max(TOLERANCE[parameter.dtype] for parameter in trained)
    if not largest([loss_difference, gradient]) < tolerance:
        print(f"check: FAILED, more than {tolerance:.0e}")
        return False
    return True


def plain_losses(
    plain: nn.Module,
    inputs: dict[str, Any],
    labels: torch.Tensor,
    loss_fn: Callable[[Any, torch.Tensor], torch.Tensor],
    sizes: list[int],
) -> Iterator[float]:
    """What microbatches of these sizes add to the loss of a batch, in plain PyTorch; adds their gradients up."""
    end = 0
    for size in sizes:
        start, end = end, end + size
        rows = {name: one[start:end] if isinstance(one, torch.Tensor) else one for name, one in inputs.items()}
        loss = loss_fn(plain(**rows), labels[start:end]) * (size / len(labels))
        loss.backward()
        yield float(loss.detach())


def largest(differences: list[float]) -> float:
    """The largest, or NaN if there is one, which `max` would lose."""
    return float(torch.tensor(differences).max())


def gradient_difference(model: nn.Module, plain: nn.Module) -> float:
    """Largest difference of two models' gradients, relative to the parameter's largest gradient."""
    differences = [0.0]
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if (ours.grad is None) != (theirs.grad is None):
            raise SystemExit(f"check: only one of the two has a gradient for {name}")
        if ours.grad is not None and theirs.grad is not None:
            scale = theirs.grad.abs().max().clamp_min(1e-12)
            differences.append(float((ours.grad - theirs.grad).abs().max() / scale))
    return largest(differences)


def eager_bytes(model: nn.Module, batch: int, seq: int) -> int:
    """Device memory that plain PyTorch needs for a step with AdamW: everything is there at once.

    Activations are those that autograd keeps for one short sequence, scaled to the batch.
    """
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    length = min(seq, 128)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(input_ids=torch.zeros(1, length, dtype=torch.long), use_cache=False)
    activations = (sum(kept.values()) + output.logits.nbytes) * batch * seq // length
    weights = sum(parameter.nbytes for parameter in model.parameters())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = sum(parameter.nbytes for parameter in trained)
    moments_and_copies = sum((2 if one.dtype is torch.float32 else 3) * 4 * one.numel() for one in trained)
    return weights + gradients + activations + moments_and_copies
