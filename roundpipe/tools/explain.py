"""`explain`: what tracing makes of a model, without compiling it.

Everything is worked out from one trace on fakes: no weights are read, no threads are started, and a model on
``meta`` will do. A model that can't be traced is no error here, its cause is the explanation.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.checks import check_example, check_type
from roundpipe.core.errors import ConfigError, TraceCause, TraceError, enumerated
from roundpipe.core.layers import LayerChain, LayerCost
from roundpipe.core.modes import autocast_as_on_accelerator
from roundpipe.core.options import with_options
from roundpipe.fx.graph.nodes import module_of, value_bytes
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.guards.guards import GuardedGraph
from roundpipe.fx.passes.cuts import Balance, check_balance
from roundpipe.fx.passes.lower import LowerOptions, lower
from roundpipe.fx.passes.memory import Loss, measure_memory
from roundpipe.fx.source import own_example
from roundpipe.fx.trace.tracer import trace
from roundpipe.planning.candidates import Candidate
from roundpipe.planning.residency import STREAMED
from roundpipe.planning.stage_costs import StageCosts
from roundpipe.reports.memory import DeviceMemory, memory_table
from roundpipe.reports.partition_table import explain_table
from roundpipe.reports.tables import format_bytes
from roundpipe.runtime.device.resolve import DeviceLike, largest_layer_bytes, resolve_devices
from roundpipe.tools.graph_report import check_format, folded, function_name, graph_lines, shape_text, write_graph
from roundpipe.wrappers.pipe import RoundPipe

MAX_NAMES, MAX_GUARDS = 6, 40
"""Values of one cut that are named, and guards that are shown."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What tracing makes of a model; ``str()`` of it is the report."""

    model_name: str
    """The model's class."""
    traced: GuardedGraph | None
    """None if the model's own forward can't be traced."""
    chain: LayerChain | None
    """The layers; None if there are none."""
    cuts: tuple[tuple[tuple[str, int], ...], ...]
    """Per cut between two layers: name and bytes of each value carried over it, at the example's size."""
    error: TraceError | None = None
    """Why the model's own forward can't be traced."""
    own_example: tuple[str, ...] = ()
    """Names of the model's ``dummy_inputs``, if those were the example."""
    costs: tuple[LayerCost, ...] | None = None
    """Of the layers, with the memory that they take for the example as one microbatch, the model's own loss included;
    None: they can't run on fakes."""

    @property
    def opaque(self) -> dict[str, str]:
        """Modules whose inside was not traced, and why."""
        return {} if self.traced is None else dict(self.traced.opaque)

    @property
    def guards(self) -> list[str]:
        """What must hold for the trace to serve a call, in words."""
        return [] if self.traced is None else self.traced.guards.describe()

    @property
    def device_memory(self) -> dict[str, DeviceMemory]:
        """What a device needs while each layer runs as a stage of its own, by stage; empty if that is not known."""
        if self.costs is None:
            return {}
        plan = Candidate.singles(len(self.costs)).plan(len(self.costs))
        return STREAMED.stage_memory(plan, StageCosts(self.costs), 1)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What a notebook shows."""
        printer.text(str(self))

    def __str__(self) -> str:
        if self.traced is None or self.chain is None:
            parts = [f"{self.model_name} can't be cut into layers.", *self._failure()]
            if self.error is None or self.error.cause is not TraceCause.MODEL_ERROR:
                parts.append(
                    "Without a change, compile runs its forward on the CPU and its modules on the devices "
                    "(AutoRoundPipe)."
                )
            return "\n\n".join(parts)
        parts = [
            f"{self.model_name}, traced for {self.traced.example_size}",
            _section("Graph", graph_lines(self.traced)),
            explain_table(self.chain, self.opaque, self.costs),
            *self._memory_sections(),
            *self._sample_sections(),
            _section("Carried over the cuts", self._cut_lines()),
            _section("A call traces again unless", self._guard_lines()),
        ]
        return "\n\n".join(parts)

    def _failure(self) -> Iterator[str]:
        """Why the model can't be traced, and a doubt about an example that nobody gave."""
        yield str(self.error)
        names = ", ".join(self.own_example)
        if self.own_example and self.error is not None and self.error.cause is TraceCause.MODEL_ERROR:
            yield (
                f"Those arguments are the model's own dummy_inputs ({names}), since no others were given, and they "
                "don't fit its forward: give example_args=(...) or example_kwargs={...} like those of a call."
            )
        elif self.own_example:
            yield (
                f"The example was the model's own dummy_inputs ({names}), since no other was given. If calls have "
                "other arguments, give example_args=(...) or example_kwargs={...}."
            )

    def as_json(self) -> dict[str, Any]:
        """The same as plain values, for programs; sizes in bytes, at the example's sizes."""
        if self.traced is None or self.chain is None:
            return {"model": self.model_name, "traced": False, "error": "\n\n".join(self._failure())}
        return {
            "model": self.model_name,
            "traced": True,
            "example_elements": self.traced.example_elements,
            "graph": [
                {
                    "name": node.name,
                    "op": node.op,
                    "target": node.target if isinstance(node.target, str) else function_name(node),
                    "module": str(node.target) if node.op == "call_module" else module_of(node),
                    "value": shape_text(node),
                    "bytes": value_bytes(node),
                    "inputs": [source.name for source in node.all_input_nodes if source.op != "get_attr"],
                }
                for node in (*self.traced.placeholders, *self.traced.body)
            ],
            "outputs": [node.name for node in self.traced.outputs],
            "layers": [
                {"name": spec.name, "modules": list(spec.module_names), **cost.figures()}
                for spec, cost in zip(self.chain.specs, self.costs or self.chain.costs, strict=True)
            ],
            "device_memory": {name: memory._asdict() for name, memory in self.device_memory.items()},
            "cuts": [{"bytes": sum(size for _, size in values), "values": dict(values)} for values in self.cuts],
            "opaque": self.opaque,
            "guards": self.guards,
            "odd_outputs": {f"output{trees.path_string(path)}": why for path, why in self.chain.odd_outputs.items()},
            "takes_samples_as_time": self.chain.takes_samples_as_time,
            "mixes_samples": self.chain.mixes_samples,
            "changed_buffer": self.chain.changed_buffer,
        }

    def _memory_sections(self) -> Iterator[str]:
        if stages := self.device_memory:
            yield _section("Device memory where each layer is a stage, untiled", memory_table(stages).splitlines())

    def _sample_sections(self) -> Iterator[str]:
        assert self.chain is not None
        lines = [
            f"output{trees.path_string(path)} {why}" + ("" if path in self.chain.output_dims else ": see merge_output")
            for path, why in self.chain.odd_outputs.items()
        ]
        if who := self.chain.takes_samples_as_time:
            lines.insert(0, f"{who} takes dimension 0 as time: a batch runs as one microbatch, see split_input")
        if where := self.chain.mixes_samples:
            yield _section("Where the samples of a batch are mixed", [f"{where}: it runs as one microbatch by default"])
        elif buffer := self.chain.changed_buffer:
            yield _section("What each microbatch changes, and not the batch as a whole", [f"the buffer {buffer}"])
        if lines:
            yield _section("Where the samples of a batch are not in dimension 0", lines)

    def _cut_lines(self) -> Iterator[str]:
        assert self.chain is not None
        lines = []
        for index, values in enumerate(self.cuts):
            shown = enumerated([f"{name} {format_bytes(size)}" for name, size in values], MAX_NAMES)
            total = format_bytes(sum(size for _, size in values))
            lines.append(f"behind layer {index} ({self.chain.specs[index].name}): {total}: {shown}")
        yield from folded(lines) if lines else ["there is one layer, and no cut"]

    def _guard_lines(self) -> Iterator[str]:
        yield "structure, dtypes, numbers of dimensions and plain values of the arguments are those of the example"
        guards = list(dict.fromkeys(self.guards))
        yield from guards[:MAX_GUARDS]
        if len(guards) > MAX_GUARDS:
            yield f"and {len(guards) - MAX_GUARDS} more, in .guards"


def _section(title: str, lines: Iterable[str]) -> str:
    return "\n".join((title, *(f"  {line}" for line in lines)))


@with_options("explain(model, {0}=...)")
def explain(
    model: nn.Module,
    example_args: tuple[Any, ...] = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    graph: str | os.PathLike[str] | None = None,
    devices: Sequence[DeviceLike] | DeviceLike | None = None,
    balance: Balance = "time",
) -> Explanation:
    """What would be traced and cut of a model, and what stands in the way.

    Args:
        model: any module, also on ``meta``; it is not changed.
        example_args: as for `roundpipe.compile`; without any example, the model's own ``dummy_inputs`` are used.
        example_kwargs: likewise.
        graph: a file to write the graph to: ``.dot`` in the DOT language, with one cluster per layer, or ``.png``,
            which needs matplotlib (``pip install roundpipe[plot]``). Nothing is written if the model can't be traced.
        devices: as for `roundpipe.compile`: blocks too large for the memory of one of them are cut inside.
        balance: as for `roundpipe.compile`.

    Returns:
        The explanation; ``print`` it. If the model can't be traced, it says why and what to change.

    Raises:
        ConfigError: there is no example, or an argument can't be used as given.
        PartitionError: ``balance`` can't be used as given.
    """
    if isinstance(model, RoundPipe):
        model = model._target
    check_type("model", model, nn.Module, "the nn.Module to look into")
    check_example(example_args, example_kwargs)
    check_balance(balance)
    own = None
    if not example_args and example_kwargs is None:
        own = own_example(model)
        if own is None:
            raise ConfigError(
                f"{type(model).__name__} has no dummy_inputs; give example_args=(...) or example_kwargs={{...}}"
            )
        example_args, example_kwargs = own
    path = None if graph is None else check_format(graph)
    name = type(model).__name__
    options = LowerOptions(balance, largest_layer_bytes(devices))
    try:
        with torch.inference_mode(False), torch.enable_grad(), autocast_as_on_accelerator():
            traced = trace(model, example_args, example_kwargs or {}, max_leaf_bytes=options.max_layer_bytes)
            lowered = lower(traced, options)
            costs = _with_memory(lowered.chain, example_args, example_kwargs or {}, devices)
    except TypeError as error:
        if own is None:
            raise
        raise ConfigError(
            f"{name}'s own dummy_inputs ({', '.join(own[1])}) don't fit its forward: {error}; give example_args=(...) "
            "or example_kwargs={...}"
        ) from error
    except TraceError as error:
        return Explanation(name, None, None, (), error, () if own is None else tuple(own[1]))
    if path is not None:
        write_graph(path, traced, lowered.partition)
    return Explanation(name, traced, lowered.chain, _cuts(traced, lowered.chain), costs=costs)


def _with_memory(
    chain: LayerChain,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    devices: Sequence[DeviceLike] | DeviceLike | None,
) -> tuple[LayerCost, ...] | None:
    """Costs of a chain's layers with the memory that they take on the first device."""
    losses = (Loss(functools.partial(_output, own.path), None) for own in chain.own_losses)
    costs = measure_memory(chain, args, kwargs, next(losses, None), torch.device(resolve_devices(devices)[0].device))
    return None if costs is None else tuple(costs)


def _output(path: trees.Path, outputs: Any, label: Any) -> Any:
    """The loss that the model has computed."""
    return trees.get(outputs, path)


def _cuts(traced: TracedGraph, chain: LayerChain) -> tuple[tuple[tuple[str, int], ...], ...]:
    """The values that are made in front of each cut, or are inputs, and read behind it."""
    nodes = {node.name: node for node in traced.graph.nodes}
    cuts = []
    for index in range(1, len(chain.specs)):
        sources = {name for spec in chain.specs[:index] for name in spec.makes} | set(traced.input_paths)
        reads = dict.fromkeys(name for spec in chain.specs[index:] for name in spec.reads)
        reads.update(dict.fromkeys(chain.exit.reads))
        cuts.append(tuple((name, value_bytes(nodes[name])) for name in reads if name in sources))
    return tuple(cuts)
