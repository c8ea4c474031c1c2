"""Outputs that go through later layers only to be returned, where they are most of what is carried."""

from __future__ import annotations

import logging

from torch import nn

from roundpipe.core import trees
from roundpipe.core.attributes import given_attribute
from roundpipe.core.errors import enumerated
from roundpipe.core.layers import LayerChain
from roundpipe.fx.graph.nodes import value_bytes
from roundpipe.fx.graph.traced import OutputValue, TracedGraph

logger = logging.getLogger(__name__)

MOST_RETURNED = 2
"""Bytes of a cut that are carried only to be returned, per byte that later layers read, above which it is said."""
LEAST_RETURNED_BYTES = 1 << 12
"""Below this it is not."""


def cache_advice(model: nn.Module) -> str:
    """What a model that fills a cache can do without, as a sentence to add; empty for others."""
    uses_cache = given_attribute(given_attribute(model, "config"), "use_cache") is True
    return " config.use_cache = False avoids that of the cache." if uses_cache else ""


def warn_of_carried_outputs(model: nn.Module, traced: TracedGraph, chain: LayerChain) -> None:
    """Warn of outputs that go through later layers only to be returned, where they are most of what is carried."""
    sizes = {node.name: value_bytes(node) for node in traced.graph.nodes}
    earlier: set[str] = set()
    worst: tuple[int, int, list[str]] = (0, 0, [])
    for index, spec in enumerate(chain.specs[:-1]):
        earlier.update(spec.makes)
        read = {name for later in chain.specs[index + 1 :] for name in later.reads}
        returned = [name for name in chain.exit.reads if name in earlier and name not in read]
        num_bytes = sum(sizes[name] for name in returned)
        if num_bytes > worst[0]:
            worst = num_bytes, sum(sizes.get(name, 0) for name in read & (earlier | set(traced.input_paths))), returned
    num_bytes, num_read, returned = worst
    if num_bytes <= MOST_RETURNED * num_read or num_bytes < LEAST_RETURNED_BYTES:
        return
    leaves = [(path, leaf) for path, leaf in trees.walk(traced.output) if isinstance(leaf, OutputValue)]
    places = [trees.path_string(path) for path, leaf in leaves if leaf.name in returned]
    logger.warning(
        "%s: %s bytes are carried through later layers only because the forward returns them, where these read %s: "
        "outputs %s. Return less in training, and less has to be moved and kept.%s",
        type(model).__name__,
        f"{num_bytes:,}",
        f"{num_read:,}",
        enumerated(places),
        cache_advice(model),
    )
