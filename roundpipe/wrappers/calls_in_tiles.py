"""Layers that run in tiles, for a call: what memory they take then, and the tiles themselves."""

from __future__ import annotations

import torch

from roundpipe.core.contexts import garbage_kept
from roundpipe.core.layers import LayerCost
from roundpipe.core.tiling import Tiles
from roundpipe.fx.passes.memory import Loss, measure_memory
from roundpipe.fx.passes.tiles import add_tiles
from roundpipe.runtime.config import microbatch_count
from roundpipe.runtime.engine.spec import Call
from roundpipe.wrappers.variants import JointChain


def memory_of(device: torch.device, call: Call, tiles: Tiles) -> list[LayerCost] | None:
    """Costs with the memory that layers take in tiles for the largest microbatch of a call, its loss included."""
    chain = call.chain
    if isinstance(chain, JointChain):
        own = {number: memory_of(device, each, tiles) for number, each in chain.calls(call).items()}
        known = {number: costs for number, costs in own.items() if costs is not None}
        return chain.joint_costs(known) if len(known) == len(own) else None
    args, kwargs, label = call.largest()
    with garbage_kept(), microbatch_count(call.total_microbatches):
        tail = call.tail if tiles.tail > 1 else None
        loss = None if call.loss_fn is None else Loss(call.loss_fn, label, tail)
        return measure_memory(chain, args, kwargs, loss, device, tiles)


def add_tiles_for(call: Call) -> None:
    """Let a call's layers run in tiles, whatever the sizes of its microbatches."""
    for each in call.chain.calls(call).values() if isinstance(call.chain, JointChain) else (call,):
        for args, kwargs in zip(each.args, each.kwargs, strict=True):
            add_tiles(each.chain, args, kwargs, call.tiles)
