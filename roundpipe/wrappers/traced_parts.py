"""A module of a model in parts that is traced itself, and so runs as a chain of layers, as a whole model does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from roundpipe.core.attributes import given_attribute
from roundpipe.core.compiled_modules import never_compiled
from roundpipe.core.layers import ChainSource
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
    source: ChainSource
    own_options: RoundPipeRunConfig
    options: CallOptions
    make_fallback: Callable[[Session], Runner]

    def __post_init__(self) -> None:
        config = RoundPipeRunConfig()
        self.runner = ChainRunner(self.session, self.module, self.source, self.name, config, self.make_fallback)
        self.stand_in = StandIn(self.module, self)
        parameters = inspect.signature(self.module.forward).parameters
        self._may_cache = "use_cache" in parameters and given_attribute(self.module, "config") is not None

    @never_compiled  # it is the work of many threads
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's outputs."""
        if self._may_cache and kwargs.get("use_cache") is None:
            kwargs["use_cache"] = False  # what layers fill must not be filled by recomputation
        self.stand_in.give_back()
        try:
            self.session.engine.refuse_inside(f"{self.name}(...)")
            config = overlaid(self.options.forced, self.own_options, self.options.default)
            return self.runner.forward(args, kwargs, config, self.options.first_microbatch)
        finally:
            self.stand_in.take_over()
