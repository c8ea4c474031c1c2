"""The classic interface of pipelines: an ``nn.Sequential``, how many layers each stage has, how many chunks a batch."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.balance import cut_into
from roundpipe.core.checks import check_count, items_of
from roundpipe.core.errors import ConfigError
from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.core.module_tree import weight_bytes_of
from roundpipe.core.random_state import preserved_random_state
from roundpipe.runtime.config import RoundPipeRunConfig
from roundpipe.runtime.device.resolve import DeviceLike
from roundpipe.wrappers.pipe import RoundPipe
from roundpipe.wrappers.session import Program

TIMED_RUNS = 3


class Pipe(RoundPipe):
    """A pipeline over an ``nn.Sequential`` with stages of given sizes.

    All of a `RoundPipe`'s methods are there. As in any `RoundPipe`, the weights stay in host memory, and the stages go
    round the devices: no device owns one.

    Args:
        module: each child is a layer.
        chunks: microbatches per batch.
        balance: layers of each stage; their sum is the number of layers. None: one stage per device, by
            `balance_by_size`.
        devices: the rotation; see `RoundPipe`.
        **options: ``optim_dtype``, ``name`` and ``pin_model`` of a `RoundPipe`.

    Raises:
        ConfigError: the module is no ``nn.Sequential``, ``balance`` does not cover its layers, or another argument
            can't be used.
    """

    def __init__(
        self,
        module: nn.Sequential | Program,
        chunks: int = 4,
        balance: Iterable[int] | None = None,
        devices: Sequence[DeviceLike] | DeviceLike | None = None,
        **options: Any,
    ) -> None:
        if isinstance(module, Program):  # a copy, whose options say all
            super().__init__(module, devices=devices, **options)
            return
        layers = _layers_of(module, type(self).__name__)
        check_count("chunks", chunks, "the number of microbatches, at least 1")
        if balance is None:
            num_devices = len(devices) if isinstance(devices, Sequence) and not isinstance(devices, str) else 1
            num_devices = max(num_devices, 1)  # none at all is refused below
            balance = balance_by_size(min(num_devices, len(layers)), module)
        sizes = items_of("balance", balance, "the number of layers of each stage, such as [2, 2]")
        plan = _plan(sizes, len(layers))
        config = RoundPipeRunConfig(num_microbatch=chunks, execute_plan=plan)
        super().__init__(module, model_run_config=config, devices=devices, **options)


def _plan(balance: list[int], num_layers: int) -> ExecutePlan:
    if not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in balance):
        raise ConfigError(f"balance={balance!r}; give the number of layers of each stage, each at least 1")
    if sum(balance) != num_layers:
        raise ConfigError(
            f"balance={balance!r} covers {sum(balance)} layers, and the nn.Sequential has {num_layers}; the numbers "
            "of layers of all stages add up to that"
        )
    *earlier, last = pairwise(accumulate(balance, initial=0))
    return ExecutePlan(forward=earlier, fused=last, backward=earlier[::-1])


def balance_by_size(num_stages: int, module: nn.Sequential) -> list[int]:
    """Layers per stage, such that the stages have about equal bytes of weights.

    Args:
        num_stages: at most the number of layers.
        module: each child is a layer.

    Raises:
        ConfigError: an argument can't be used.
    """
    return _balance(num_stages, [weight_bytes_of(layer) for layer in _layers_of(module, "balance_by_size")])


def balance_by_time(num_stages: int, module: nn.Sequential, sample: Any) -> list[int]:
    """Layers per stage, such that forward and backward of the stages take about equal time, measured layer by layer.

    Args:
        num_stages: at most the number of layers.
        module: each child is a layer; copies of them run, where their weights are.
        sample: the first layer's argument, such as one microbatch; on the same device.

    Raises:
        ConfigError: an argument can't be used.
    """
    seconds = []
    value = sample
    with preserved_random_state(), torch.enable_grad():
        for layer in _layers_of(module, "balance_by_time"):
            runs = [_timed_run(layer, value) for _ in range(TIMED_RUNS)]
            seconds.append(min(duration for duration, _ in runs))
            value = runs[0][1]
    return _balance(num_stages, seconds)


def _timed_run(layer: nn.Module, value: Any) -> tuple[float, Any]:
    """Seconds of a layer's forward and backward on a copy of it, and what it gives."""
    layer = copy.deepcopy(layer)
    value = trees.map_tensors(value, lambda tensor: tensor.detach().requires_grad_(tensor.is_floating_point()))
    outer = trees.map_tensors(value, lambda tensor: tensor.clone())  # a layer may write into what it is given
    _wait(value)
    begin = time.perf_counter()
    output = layer(outer)
    roots = [tensor for tensor in trees.tensors(output) if tensor.requires_grad]
    torch.autograd.backward(roots, [torch.ones_like(tensor) for tensor in roots])
    _wait(output)
    return time.perf_counter() - begin, trees.map_tensors(output, torch.Tensor.detach)


def _wait(value: Any) -> None:
    for device in {tensor.device for tensor in trees.tensors(value) if tensor.device.type != "cpu"}:
        torch.accelerator.synchronize(device)


def _balance(num_stages: int, weights: Sequence[float]) -> list[int]:
    check_count("num_stages", num_stages, f"1 to {len(weights)}, the number of layers", most=len(weights))
    return [stop - start for start, stop in cut_into(weights, num_stages)]


def _layers_of(module: Any, function: str) -> list[nn.Module]:
    if not isinstance(module, nn.Sequential):
        raise ConfigError(
            f"{function}: module takes an nn.Sequential, got {type(module).__name__}; roundpipe.compile takes any "
            "module"
        )
    if not len(module):
        raise ConfigError(f"{function} got an nn.Sequential without layers")
    return list(module)
