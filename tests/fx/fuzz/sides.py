"""Runs a case, in eager PyTorch and through `roundpipe.compile`, and keeps what each call showed."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.fx import Node

import roundpipe
from roundpipe import ExecutePlan, RoundPipeRunConfig, TraceError
from roundpipe.core import trees
from roundpipe.fx.graph.nodes import is_accessor
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.passes.cost import NodeCost
from roundpipe.wrappers.auto import AutoRoundPipe
from tests.fx.fuzz.cases import WIDTH, WORLDS, Case, Scenario, Step, inputs_of, loss_of


@dataclass
class Observed:
    """What one call showed."""

    loss: torch.Tensor | None = None
    outputs: dict[int, Any] = field(default_factory=dict)
    """First sample of the microbatch -> its outputs, detached."""
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)


def observe(model: nn.Module, inputs: dict[str, Any], seen: Observed) -> Observed:
    """Gradients, buffers and Python state as they are now."""
    for name, parameter in model.named_parameters():
        seen.gradients[name] = None if parameter.grad is None else parameter.grad.clone()
    x = inputs["x"]
    seen.gradients["input x"] = None if x.grad is None else x.grad.clone()
    seen.state = {name: buffer.clone() for name, buffer in model.named_buffers()}
    seen.state.update((name, parameter.detach().clone()) for name, parameter in model.named_parameters())
    for name, module in model.named_modules():
        for key in ("count", "state", "history", "gain", "last"):
            value = module.__dict__.get(key)
            value = dict(value) if isinstance(value, dict) else list(value) if isinstance(value, list) else value
            seen.attributes[f"{name}.{key}"] = value.clone() if isinstance(value, torch.Tensor) else value
        if "inner_calls" in module.__dict__:
            seen.attributes[f"{name}.inner_calls"] = module.inner_calls.n
    world = WORLDS[model]
    seen.attributes["CALLS"] = list(world["CALLS"])
    seen.attributes["TABLE"] = dict(world["TABLE"])
    return seen


def _snapshot(outputs: Any) -> Any:
    return [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in trees.leaves(outputs)]


def run_eager(model: nn.Module, case: Case) -> Iterator[Observed]:
    """The loop over microbatches that the contract is written in."""
    for step in case.scenario.steps:
        prepare(model, step)
        inputs = inputs_of(step)
        number = 1 if step.joined or step.quiet else min(case.scenario.num_microbatches, step.batch)
        seen = Observed(torch.zeros((), dtype=torch.float64))
        pieces = {
            name: value.tensor_split(number) if isinstance(value, torch.Tensor) else [value] * number
            for name, value in inputs.items()
        }
        first = 0
        for index in range(number):
            piece = {name: parts[index] for name, parts in pieces.items()}
            piece["ids"], piece["mask"] = piece["ids"].clone(), piece["mask"].clone()
            if not step.needs_grad:
                piece["x"] = piece["x"].clone()
            size = len(piece["x"])
            with torch.set_grad_enabled(not step.quiet):
                outputs = model(**piece)
                loss = loss_of(outputs)
            seen.outputs[first] = _snapshot(outputs)
            if not step.quiet:
                loss.backward()
            assert seen.loss is not None
            seen.loss = seen.loss + loss.detach()
            first += size
        yield observe(model, inputs, seen)


def prepare(model: nn.Module, step: Step) -> None:
    """Mode and attributes as a user would set them between calls."""
    model.train(step.training)
    world = WORLDS[model]
    if step.edit:
        own = [module for module in model.modules() if type(module).__name__.startswith(("Root", "Block"))]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for module in own if step.edits_all else own[:1]:
                exec(step.edit, world, {"m": module})
    if step.gain is not None:
        for module in model.modules():
            if "gain" in module.__dict__:
                module.gain = step.gain
    if step.mean is not None:
        for module in model.modules():
            if "mean" in module._buffers:
                module.mean = torch.full((WIDTH,), step.mean, dtype=torch.float64)


def one_layer_per_stage(num_layers: int) -> ExecutePlan:
    """Every layer its own stage."""
    stages = [(index, index + 1) for index in range(num_layers - 1)]
    return ExecutePlan(stages, (num_layers - 1, num_layers), stages[::-1])


@dataclass
class Compiled:
    """The compiled side of a case."""

    pipe: Any = None
    trace_count: int = 0
    fell_back: bool = False
    opaque: bool = False
    num_layers: int = 0


def run_compiled(model: nn.Module, case: Case, info: Compiled) -> Iterator[Observed]:
    """The same calls through `roundpipe.compile`."""
    scenario = case.scenario
    config = RoundPipeRunConfig(num_microbatch=scenario.num_microbatches, recompute_grain=scenario.grain)
    prepare(model, scenario.steps[0])
    options: dict[str, Any] = {"devices": ["cpu"] * scenario.num_workers, "model_run_config": config, "name": "fuzz"}
    if scenario.with_example:
        options["example_kwargs"] = inputs_of(scenario.steps[0])
    costs = _drawn_costs(scenario.drawn_costs)
    with contextlib.ExitStack() as patches:
        if costs is not None:
            patches.enter_context(mock.patch("roundpipe.fx.passes.lower.measure", costs))
        if scenario.untraced:
            patches.enter_context(mock.patch("roundpipe.fx.source.trace", side_effect=TraceError("not tried")))
        pipe = info.pipe = roundpipe.compile(model, **options)
        yield from _run_steps(pipe, model, scenario, info)


def _drawn_costs(seed: int | None) -> Callable[..., dict[Node, NodeCost]] | None:
    """A stand-in for `roundpipe.fx.passes.cost.measure`; what a node costs decides nothing but where layers end."""
    if seed is None:
        return None
    choose = random.Random(seed)

    def draw(node: Node) -> NodeCost:
        if node.op in ("placeholder", "get_attr") or is_accessor(node):
            return NodeCost()
        seconds = choose.choice([1e-6, 1e-4, 1e-3]) * (0.5 + choose.random())
        return NodeCost(forward_s=seconds, backward_s=2 * seconds)

    def measure(traced: TracedGraph, profile: object) -> dict[Node, NodeCost]:
        return {node: draw(node) for node in traced.graph.nodes if node.op != "output"}

    return measure


def _run_steps(pipe: Any, model: nn.Module, scenario: Scenario, info: Compiled) -> Iterator[Observed]:
    with pipe:
        if scenario.one_layer_per_stage and not isinstance(pipe, AutoRoundPipe):
            # the number of layers is not known before the call
            pipe._runner.builder.plans.plan = lambda call: one_layer_per_stage(len(call.chain))
        for step in scenario.steps:
            prepare(model, step)
            inputs = inputs_of(step)
            yield _compiled_step(pipe, model, step, inputs, info)


def _compiled_step(pipe: Any, model: nn.Module, step: Step, inputs: dict[str, Any], info: Compiled) -> Observed:
    seen = Observed()
    label = torch.arange(step.batch)

    def loss_fn(outputs: Any, start: torch.Tensor) -> torch.Tensor:
        seen.outputs[int(start[0])] = _snapshot(outputs)
        return loss_of(outputs)

    if step.quiet:
        with torch.no_grad():
            loss = loss_fn(pipe(**inputs, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1)), label)
        seen.loss = loss
    elif step.joined:
        loss = loss_fn(pipe(**inputs, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1)), label)
        if loss.requires_grad:  # not if no output depends on a weight or an input, such as a detached leaf
            loss.backward()
        seen.loss = loss.detach()
    else:
        seen.loss = pipe.forward_backward(input_kwargs=inputs, label=label, loss_fn=loss_fn)
    pipe.synchronize()
    runner = pipe._runner  # tables tell layers and stages, not which call ran as it is
    source = getattr(runner, "source", None)
    info.trace_count = max(info.trace_count, pipe.trace_count)
    chain = None if source is None else source.latest
    info.fell_back |= isinstance(pipe, AutoRoundPipe) or chain is None or runner.last_chain is not chain
    info.opaque |= bool(getattr(source, "opaque", {}))
    info.num_layers = max(info.num_layers, 0 if chain is None else len(chain))
    return observe(model, inputs, seen)
