"""A module of a model in parts that is traced itself, and so runs as a chain of layers, as a whole model does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.attributes import given_attribute
from roundpipe.core.compiled_modules import never_compiled
from roundpipe.core.watched import is_transformed_here
from roundpipe.effects.places import has_hooks
from roundpipe.fx.arguments import CallForm
from roundpipe.fx.source import TracedSource
from roundpipe.fx.varying import Varying
from roundpipe.runtime.config import RoundPipeRunConfig
from roundpipe.wrappers.calls import ChainRunner
from roundpipe.wrappers.parts import CallOptions, StandIn, overlaid
from roundpipe.wrappers.session import Runner, Session


@dataclass(eq=False)
class TracedPart:
    """Runs the calls of one module by the chains that its source has, or by the fallback that is made for it.

    ``own_options`` are the part's alone, ``options`` those of the whole's running call.
    """

    session: Session
    name: str
    module: nn.Module
    source: TracedSource
    own_options: RoundPipeRunConfig
    options: CallOptions
    make_fallback: Callable[[Session], Runner]

    def __post_init__(self) -> None:
        config = RoundPipeRunConfig()
        self.runner = ChainRunner(self.session, self.module, self.source, self.name, config, self.make_fallback)
        self.stand_in = StandIn(self.module, self)
        self._form = CallForm(self.module)
        self._may_cache = self._form.names("use_cache") and given_attribute(self.module, "config") is not None

    @never_compiled  # it is the work of many threads
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's outputs."""
        if self._may_cache and kwargs.get("use_cache") is None:
            kwargs["use_cache"] = False  # what layers fill must not be filled by recomputation
        self.stand_in.give_back()
        try:
            if is_transformed_here():  # there is no batch that could be split
                return self.module(*args, **kwargs)
            self.session.engine.refuse_inside(f"{self.name}(...)")
            if not self.source.trace_count:
                self.source.varying.note(_lengths_in(*self._form.normalise(args, kwargs)))
            config = overlaid(self.options.forced, self.own_options, self.options.default)
            if has_hooks(self.module):
                return self.runner.in_parts().forward(args, kwargs, config)
            return self.runner.forward(args, kwargs, config, self.options.first_microbatch)
        finally:
            self.stand_in.take_over()


def _lengths_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Varying]:
    """Dimensions of float arguments that are as long as some of integers, as hidden states are as their positions."""
    tensors = [(path, leaf) for path, leaf in trees.walk((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    lengths = {size for _, tensor in tensors if not tensor.is_floating_point() for size in tensor.shape[1:]}
    floats = [(path, tensor) for path, tensor in tensors if tensor.is_floating_point()]
    return [(path, dim) for path, tensor in floats for dim in range(1, tensor.dim()) if tensor.shape[dim] in lengths]
