"""Where the cuts of a compiled model are among its repeated blocks, and what is carried over them."""

from __future__ import annotations

from torch import nn

from roundpipe.core.layers import LayerChain


def cuts_between_blocks(model: nn.Module, chain: LayerChain) -> tuple[int, int | None]:
    """How many repeated blocks a chain runs, and how many values cross the cuts between them at most."""
    blocks = {
        f"{name}.{index}" if name else index: name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and is_repeated(module)
        for index in module._modules
    }
    covered = [name for spec in chain.specs for name in spec.module_names]
    outermost = {
        name: owner
        for name, owner in blocks.items()
        if not any(name.startswith(other + ".") for other in blocks)
        and any(f"{one}.".startswith(f"{name}.") or f"{name}.".startswith(f"{one}.") for one in covered)
    }
    carried = [
        _num_carried(chain, index)
        for index in range(1, len(chain.specs))
        if _owner(chain, index - 1, -1, outermost) == _owner(chain, index, 0, outermost) is not None
    ]
    return len(outermost), max(carried, default=None)


def is_repeated(module: nn.Module) -> bool:
    """Whether a container holds three or more modules of one class that have weights."""
    kinds = [type(child) for child in module.children() if any(True for _ in child.parameters())]
    return len(kinds) >= 3 and len(set(kinds)) == 1 and any(True for _ in next(module.children()).children())


def _owner(chain: LayerChain, layer_index: int, end: int, blocks: dict[str, str]) -> str | None:
    """The list whose block a layer ends (-1) or starts (0) with."""
    names = chain.specs[layer_index].module_names
    if not names:
        return None
    return next((owner for block, owner in blocks.items() if f"{names[end]}.".startswith(f"{block}.")), None)


def _num_carried(chain: LayerChain, cut: int) -> int:
    """Values made in front of a cut that are read behind it."""
    made = {name for spec in chain.specs[:cut] for name in spec.makes}
    read = {name for spec in chain.specs[cut:] for name in spec.reads} | set(chain.exit.reads)
    return len(made & read)
