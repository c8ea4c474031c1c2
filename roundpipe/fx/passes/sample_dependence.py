"""Models whose samples depend on each other, so that microbatches can't make up the batch: where a forward mixes them.

The graph runs on fakes of a batch of another size, a multiple of a prime that divides no other size of the model's. So
every dimension that counts samples, or samples and something else, is known by its size, behind any operator and inside
of modules, too. A sum, a softmax or a product over such a dimension mixes samples, and what is computed from it does
not belong to one sample any more. What integers from there are is left open as long as they are places to take values
from, as those of tokens sorted by expert are. Products and the like of two sums are told of, too, if both are made by
weights, such as the load balancing of experts: those of microbatches don't add up to it.

Where the model's code has asked for the number of samples, its graph has it as a constant, and the code runs in its
place. So it does where there is no graph.

Losses of `loss_fn` are looked at in the same way, where `sample_mixing`, which knows more of what is allowed there, has
nothing to tell.

Invariant: an operator without a rule mixes nothing. What is told of was found at the same place with two primes, so
that it is no chance.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from roundpipe.core import trees
from roundpipe.core.layers import Mixing
from roundpipe.core.module_tree import modules_in, named_modules_in
from roundpipe.core.random_state import preserved_random_state
from roundpipe.effects.snapshot import python_restored
from roundpipe.fx.arguments import without_found
from roundpipe.fx.fakes import code_at_other_sizes, fake_of, real_world, recalled, static_mode
from roundpipe.fx.graph.nodes import GraphInterpreter, hint, module_of, producer_of, value_of, writes_buffers
from roundpipe.fx.graph.traced import OutputValue, TracedGraph
from roundpipe.fx.passes.alike import module_key
from roundpipe.fx.passes.alike_calls import alike_calls_shared
from roundpipe.fx.passes.attribute_copies import AttributeCopies
from roundpipe.fx.passes.data_of_fakes import DataOfFakes
from roundpipe.fx.passes.dependence_watch import ROWS, STORED, DependenceWatch, Known
from roundpipe.fx.passes.joined_samples import has_other_parts, shape_of_all
from roundpipe.fx.passes.sample_blocks import Blocks
from roundpipe.fx.passes.sample_dimensions import arguments_of_samples, number_made_for, size_at, symbols_of_samples
from roundpipe.fx.passes.sample_numbers import (
    PER_PRIME,
    WITH_THIRDS,
    Trial,
    is_torchs_own,
    kept_tensors,
    numbers_of,
    trials,
    usable_primes,
)
from roundpipe.fx.sizes import Symbolic, flat_tensors

_CPU = torch.device("cpu")
ONE_SAMPLE_ALONE = "is of one sample alone"
"""What is odd about an output, in words; see `SampleDependence.single`."""


@dataclass(frozen=True, slots=True)
class SampleDependence:
    """How the outputs of a model depend on several samples at once."""

    where: str = ""
    """What mixes samples before they are in an output, in words; empty if nothing shows that any does."""
    bent: frozenset[Node] = frozenset()
    """Scalars that are no linear function of sums over samples which weights have made."""
    blocks: Mapping[trees.Path, Blocks] = field(default_factory=dict)
    """By place in the outputs, how the rows of a tensor's samples are ordered, where they are not side by side."""
    single: frozenset[trees.Path] = frozenset()
    """Places of outputs that are made of one sample alone, as where a list has one for each."""
    changed_buffer: str = ""
    """One, other than torch's own, that the parts of a batch would leave with another value than the batch does."""

    def confirmed_by(self, other: SampleDependence) -> SampleDependence:
        """What was found with another number of samples, too."""
        blocks = {path: each for path, each in self.blocks.items() if other.blocks.get(path) == each}
        where = self.where if other.where == self.where else ""
        buffer = self.changed_buffer if other.changed_buffer == self.changed_buffer else ""
        return SampleDependence(where, self.bent & other.bent, blocks, self.single & other.single, buffer)


def dependence_of_samples(traced: TracedGraph) -> SampleDependence:
    """What a graph shows of that.

    Samples are along the first dimension, as many as that of the first argument that has one. A scalar may be made of
    all of them, such as a loss; what weights make of samples that were mixed before is told of there, too.
    """
    samples = arguments_of_samples(traced)
    if not samples:
        return SampleDependence()
    found = SampleDependence()
    with code_at_other_sizes(), torch.no_grad(), suppress(Exception):  # code may ask for what fakes lack
        for pair in trials(traced, samples, (PER_PRIME, WITH_THIRDS)):
            runs = [_DependenceRun(traced, samples, trial) for trial in pair]
            new = runs[0].found()
            if new != SampleDependence():
                new = new.confirmed_by(runs[1].found())
            if new.where or found == SampleDependence():
                found = new
            is_known = new.where or new != SampleDependence() and not new.changed_buffer
            if is_known or not any(run.has_failed for run in runs):
                break
    if not symbols_of_samples(samples) and (where := where_code_mixes(traced)) is not None:
        found = replace(found, where=where)
    return found


def where_code_mixes(traced: TracedGraph) -> str | None:
    """What mixes samples in the model's code, which runs in place of its graph, with the graph's arguments.

    Code that has asked for the number of samples may do something else at another number, which no graph tells.

    Returns:
        In words, empty if nothing does; None if it can't run on fakes.
    """
    samples = arguments_of_samples(traced)
    if not samples:
        return ""
    has_run = False
    for pair in trials(traced, samples, (1, PER_PRIME)):
        found: list[str] = []
        for trial in pair:
            with code_at_other_sizes(), torch.no_grad(), suppress(Exception):  # code may ask for what fakes lack
                run = _DependenceRun(traced, samples, trial)
                found.append(run.where_in_code())
                if not found[-1] and not run.has_failed:
                    return ""
            if not any(found):
                break
        if len(found) == 2:
            return found[0] if found[0] == found[1] else ""
        has_run |= bool(found)
    return "" if has_run else None


def mixing_of_samples(
    traced: TracedGraph, scalars: Collection[Node], samples: Collection[Node], outputs: Collection[Node]
) -> Mixing | None:
    """How losses mix samples; what `mixing_of` can't follow, such as merged dimensions, sizes may still tell.

    Args:
        traced: the graph of a `LossCall`.
        scalars: its losses.
        samples: arguments whose first dimension counts samples.
        outputs: those arguments that a model has made.
    """
    found: list[Mixing | None] = []
    for prime in usable_primes(traced, samples)[:2] if samples and outputs else ():
        with code_at_other_sizes(), torch.no_grad(), suppress(Exception):  # code may ask for what fakes lack
            found.append(_DependenceRun(traced, samples, Trial(prime), outputs).mixing(scalars))
    return found[0] if len(found) == 2 and found[0] == found[1] else None


class _DependenceRun(GraphInterpreter):
    """A graph on fakes of as many samples as a trial has."""

    def __init__(
        self, traced: TracedGraph, samples: Iterable[Node], trial: Trial, learned: Collection[Node] = ()
    ) -> None:
        super().__init__()
        self._learned = learned
        self.has_failed = False
        """Whether something could not run on so many, cut them into more or fewer parts, or lost some."""
        self._traced, self._samples, self._trial = traced, frozenset(samples), trial
        others = (value_of(node) for node in traced.placeholders if node not in self._samples)
        has_others = any(isinstance(each, torch.Tensor) and each.ndim and hint(each.shape[0]) > 1 for each in others)
        self._watch = DependenceWatch(
            trial.prime,
            trial.number,
            has_others=has_others,
            is_of_loss=bool(learned),
            has_lists=_has_lists(traced.arguments, self._samples),
        )
        self._made: dict[Hashable, Any] = {}
        """By kind of module and of what it is called with, what it gives."""
        self._mode = static_mode()
        self._attributes = AttributeCopies(traced, self._fake)
        self._symbols = symbols_of_samples(self._samples)
        self._made_for = number_made_for(self._samples)
        self._buffers = {id(buffer): name for name, buffer in traced.model.named_buffers()}
        self._buffers |= {id(tensor): name for name, tensor in kept_tensors(traced.model).items()}

    def found(self) -> SampleDependence:
        """What the outputs show."""
        self._run()
        outputs = [self.values[node] for node in self._traced.outputs]
        self._note_lost(outputs)
        where = next((where for each in _tensors(outputs) if (where := self._watch.mixed_in(each))), "")
        if not where and not self._symbols:  # a graph for this number of samples, such as of a loop over them
            where = next(
                (where for each in _tensors(outputs) if each.ndim and (where := self._watch.known(each).where)), ""
            )
        where = where or self._watch.decision
        scalars = ((node, value) for node, value in self.values.items() if value_of(node) is not None)
        bent = (node for node, value in scalars for each in _tensors([value]) if self._watch.is_bent(each))
        places = {path: self.values[node] for path, node in self._traced.output_places.items()}
        tensors = {path: value for path, value in places.items() if isinstance(value, torch.Tensor)}
        blocks = {path: self._watch.blocks(tensor) for path, tensor in tensors.items()}
        single = frozenset(path for path, tensor in tensors.items() if self._watch.sample_of(tensor) is not None)
        blocks = {path: each for path, each in blocks.items() if each}
        return SampleDependence(where, frozenset(bent), blocks, single, self._watch.changed_buffer)

    def where_in_code(self) -> str:
        """What the model's own code shows, which runs in place of the graph."""

        def given(leaf: Any) -> Any:
            return values[leaf.name] if isinstance(leaf, OutputValue) else leaf

        twin = self._attributes.twin(self._traced.model)
        buffers = dict(twin.named_buffers())
        for path, tensor in kept_tensors(twin).items():
            if path not in buffers and self._trial.shape(tensor) != [*tensor.shape]:
                owner, _, name = path.rpartition(".")
                vars(twin.get_submodule(owner))[name] = self._fake(tensor)
            elif path not in buffers:
                self._watch.put_buffer(tensor, path, is_torchs=False)
        with recalled(self._mode), self._mode, preserved_random_state(), python_restored(modules_in(twin)):
            values = {node.name: self._example(node) for node in self._traced.placeholders}
            values |= self._traced.number_hints
            args, kwargs = without_found(self._traced.arguments)
            args, kwargs = tuple(trees.map_leaves(arg, given) for arg in args), trees.map_leaves(kwargs, given)
            self._watch.place, self._watch.caller = f"the forward of {type(twin).__name__}", _call.__code__
            try:
                with self._watch, DataOfFakes(self._watch.note_decision), self._alike_shared(twin):
                    out = _call(twin, args, kwargs)
            except Exception:  # it reads a number, say
                if not self._watch.decision:
                    raise
                out = None
        mixed = (where for each in flat_tensors(out) if (where := self._watch.mixed_in(each)))
        self._note_lost(flat_tensors(out))
        return next(mixed, self._watch.decision)

    def _note_lost(self, outputs: Iterable[Any]) -> None:
        """Note that outputs have as many rows as a buffer has, which are fewer than there are samples."""
        lengths = {size for tensor in kept_tensors(self._traced.model).values() for size in tensor.shape}
        rows = {tensor.shape[0] for tensor in _tensors(outputs) if tensor.ndim}
        self.has_failed |= not lengths.isdisjoint(rows) and not any(map(self._watch.dims, _tensors(outputs)))

    def _alike_shared(self, twin: nn.Module) -> AbstractContextManager[None]:
        """Within it, one runs of those nodes of the graph that are modules and alike, as in the graph itself."""
        nodes = self._traced.graph.find_nodes(op="call_module")
        names = dict.fromkeys(str(node.target) for node in nodes if not writes_buffers(node))
        kinds: dict[nn.Module, Hashable] = {}
        for name in names:
            with suppress(AttributeError):
                if not isinstance(module := twin.get_submodule(name), torch.jit.ScriptModule):
                    kinds[module] = module_key(self._traced.attribute(name), name)
        return alike_calls_shared(kinds, self._key)

    def mixing(self, scalars: Iterable[Node]) -> Mixing | None:
        """What losses show."""
        self._run()
        known = [self._watch.known(each) for each in _tensors(self.values[node] for node in scalars)]
        if any(each.level >= ROWS for each in known):
            return "compares samples"
        return "not linear" if any(each.is_bent for each in known) else None

    def _run(self) -> None:
        nodes = [node for node in self._traced.graph.nodes if node.op != "output"]
        with recalled(self._mode), self._mode:
            for node in nodes:
                self.values[node] = self._value(node)

    def _value(self, node: Node) -> Any:
        if isinstance(value_of(node), torch.SymFloat) and (tensors := self._operands_of(node)):
            return tensors[0]  # a number that was read out of a tensor, or is made of such, has what it is made of
        if node.op == "placeholder" or isinstance(value_of(node), Symbolic):
            value = self._example(node)
            if node in self._learned:
                self._watch.put(value, Known(is_learned=True))
            return value
        if node.op == "get_attr":
            return self.run_node(node)
        if producer_of(node) is not node and self.values[producer_of(node)] is None:
            return self._example(node)  # of a structure that could not be made
        self._watch.caller = None
        self._watch.place = f"the forward of {module_of(node) or type(self._traced.model).__name__}"
        try:
            with self._watch:
                value = self.run_node(node)
            self.has_failed |= has_other_parts(node, value)
            return self._all_joined(node, value)
        except Exception:  # it asks for data, or is for batches of the example's size
            self.has_failed = True
            value = self._example(node)
            if isinstance(value, torch.Tensor):
                self._watch.carry(flat_tensors(*self.operands(node.args, node.kwargs)), [value])
                if node.op == "call_module" and writes_buffers(node):
                    self._watch.put_state(value, self._buffers_of(str(node.target)))
            return value

    def _all_joined(self, node: Node, value: Any) -> Any:
        """A node's value; of all samples, where it joins those that the graph was made for."""
        args, kwargs = self.operands(node.args, node.kwargs) if self._made_for else ((), {})
        shape = shape_of_all(node, args, kwargs, self._watch.sample_of, self._made_for, self._trial.number)
        if shape is None:
            return value
        joined = torch.empty(shape, dtype=value.dtype)
        self._watch.put(joined, replace(self._watch.known(value), sample=None))
        return joined

    def _operands_of(self, node: Node) -> list[torch.Tensor]:
        """Tensors that a node takes, those made of several samples first."""
        tensors = flat_tensors(*self.operands(node.args, node.kwargs))
        return sorted(tensors, key=lambda tensor: -self._watch.known(tensor).level)

    def _buffers_of(self, target: str) -> list[str]:
        """Names of the buffers in a module, but for those of torch's own modules."""
        modules = named_modules_in(self._traced.attribute(target))
        own = ((f"{target}.{path}".rstrip("."), each) for path, each in modules.items() if not is_torchs_own(each))
        return [f"{path}.{name}" for path, each in own for name in each._buffers]

    def _example(self, node: Node) -> Any:
        """The node's value at the sizes of the run; None for a structure."""
        value = value_of(node)
        if not isinstance(value, torch.Tensor):
            return self._size(value)
        shape = [*map(self._size, value.shape)]
        if node in self._samples:
            shape[0] = self._trial.number
        return torch.empty(shape, dtype=value.dtype)

    def _size(self, size: Any) -> Any:
        if not isinstance(size, torch.SymFloat | torch.SymBool):
            return size_at(size, self._symbols, self._trial.number)
        found = size.node.expr.subs(dict.fromkeys(self._symbols, self._trial.number))
        return size.node.pytype(found) if found.is_number else size.node.hint

    def get_attr(self, node: Node) -> Any:
        return self._attributes.at(node.target)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        name = self._buffers.get(id(tensor))
        is_torchs = name is not None and is_torchs_own(self._traced.model.get_submodule(name.rpartition(".")[0]))
        if name is not None and not is_torchs and (shape := self._trial.shape(tensor)) != [*tensor.shape]:
            with real_world():
                tensor = torch.empty(shape, dtype=tensor.dtype, device="meta")
        fake = fake_of(self._mode, tensor, _CPU)
        if isinstance(tensor, nn.Parameter) and tensor.numel() > 1:
            self._watch.put(fake, replace(STORED, is_weight=True))
        elif name is not None:
            self._watch.put_buffer(fake, name, is_torchs=is_torchs)
        else:
            self._watch.put(fake, STORED)
        return fake

    def call_module(self, node: Node, args: Any, kwargs: Any) -> Any:
        """What a module gives; of those that are alike, one runs."""
        module = self._traced.attribute(str(node.target))
        key = module_key(module, str(node.target)), tuple(map(self._key, trees.leaves((args, kwargs))))
        if key not in self._made:
            twin = self._attributes.twin(module)
            self._watch.place = f"{node.target}, a {type(module).__name__}"
            self._watch.caller = _call.__code__
            with python_restored(modules_in(twin)):
                before = dict(twin.named_buffers())
                with DataOfFakes(self._watch.note_decision):
                    self._made[key] = _call(twin, args, kwargs)
                self._note_replaced(str(node.target), twin, before)
        return self._made[key]

    def _note_replaced(self, target: str, twin: nn.Module, before: Mapping[str, torch.Tensor]) -> None:
        """Other tensors in place of buffers."""
        for name, buffer in twin.named_buffers() if before else ():
            if buffer is not before.get(name):
                self._watch.note_written(f"{target}.{name}", [buffer])

    def _key(self, leaf: Any) -> Hashable:
        if isinstance(leaf, torch.Tensor):
            return tuple(leaf.shape), leaf.dtype, self._watch.known(leaf)
        return leaf if isinstance(leaf, trees.PLAIN) else id(leaf)


def _has_lists(arguments: Any, samples: Iterable[Node]) -> bool:
    """Whether a list or tuple among arguments has as many entries as there are samples."""
    numbers = numbers_of(samples)

    def is_or_has(value: Any) -> bool:
        if isinstance(value, (list, tuple)) and len(value) in numbers:
            return True
        return any(is_or_has(child) for _, child in trees.children(value) or ())

    args, kwargs = arguments or ((), {})
    return any(map(is_or_has, (*args, *kwargs.values())))


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    return (value for value in values if isinstance(value, torch.Tensor))


def _call(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return module(*args, **kwargs)
