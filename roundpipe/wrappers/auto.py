"""`AutoRoundPipe`: models whose own forward runs as Python on the host, around parts that run on the devices."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.caller import warn
from roundpipe.core.errors import ConfigError, GradientNote, RaisedIn, TraceCause, innermost
from roundpipe.core.layers import is_differentiable
from roundpipe.core.modes import autocast_as_on_accelerator
from roundpipe.fx.passes.untraced_code import where_untraced_code_mixes
from roundpipe.fx.source import TracedSource
from roundpipe.reports.partition_table import partition_table
from roundpipe.runtime.config import ResolvedConfig, RoundPipeRunConfig, microbatch_count, resolve
from roundpipe.runtime.engine.finite import check_losses
from roundpipe.runtime.engine.loss_divisors import ends_of
from roundpipe.runtime.engine.losses import LossWeights, Mean, place_of, read_losses, sum_losses
from roundpipe.runtime.microbatch.merge import merge
from roundpipe.runtime.microbatch.split import Split
from roundpipe.wrappers.batch_loss import train_on_batch
from roundpipe.wrappers.batch_warnings import BatchWarnings
from roundpipe.wrappers.by_pieces import ByPieces
from roundpipe.wrappers.calls import flow_back
from roundpipe.wrappers.deferred import call_behind_backward
from roundpipe.wrappers.hook_warnings import HookWarnings
from roundpipe.wrappers.loss_warnings import LossWarnings
from roundpipe.wrappers.module_layers import chain_of_modules
from roundpipe.wrappers.parts import IN_ONE_PIECE, CallOptions, HostTree, Part, overlaid
from roundpipe.wrappers.pipe import RoundPipe
from roundpipe.wrappers.session import Program, Runner, Session
from roundpipe.wrappers.traced_parts import TracedPart
from roundpipe.wrappers.training_arguments import TrainingCall


@dataclass(slots=True)
class PartsProgram(Program):
    """A model in parts."""

    on_devices: Mapping[nn.Module, RoundPipeRunConfig]
    """Modules that become parts, and options of each alone."""
    left: tuple[nn.Module, ...] = ()
    """Modules that are called as they are."""
    splits_inside: bool = True
    """Whether a ``forward`` is split into microbatches part by part, around which the model's own code sees whole
    batches. False runs all of the model microbatch by microbatch."""
    cause: TraceCause | None = None
    """Why it is not cut into layers, if a trace was tried."""
    traced: Mapping[nn.Module, tuple[TracedSource, Callable[[Session], Runner]]] = field(default_factory=dict)
    """Of the modules that become parts, those that are cut into layers, and what makes their fallbacks."""
    make_inner: Callable[[nn.Module, Session], Runner] | None = None
    """Makes what runs a module in parts of its own."""

    def start(self, session: Session) -> HostRunner:
        return HostRunner(session, self, session.config)


@dataclass(eq=False)
class HostRunner(Runner):
    """Runs a model's own forward on the CPU, and parts of it on the devices."""

    session: Session
    parts: PartsProgram
    config: RoundPipeRunConfig

    def __post_init__(self) -> None:
        self.model = self.parts.model
        self.options = CallOptions()
        self._warned = False
        self._warned_of_arguments = False
        self._loss_warnings = LossWarnings(self.model)
        self._batch_warnings = BatchWarnings(type(self.model).__name__)
        self._hook_warnings = HookWarnings(self.model)
        self._mixed: dict[bool, str | None] = {}
        """By mode, what mixes samples in the model's own code; None where nothing tells."""
        self._by_pieces = ByPieces(self.session, self.model, self._batch_warnings, self._run_whole)
        names = {module: name for name, module in self.session.model.named_modules()}
        if gone := next((module for module in self.parts.on_devices if module not in names), None):
            raise ConfigError(
                f"a {type(gone).__name__} was replaced or removed since the model was wrapped; wrap it again"
            )
        lists = [module for module in self.model.modules() if isinstance(module, nn.ModuleList)]
        followed = {element for elements in lists for element in list(elements)[:-1]}
        on_devices: dict[nn.Module, Part | TracedPart] = {}
        for module, own in self.parts.on_devices.items():
            place = self.session, names[module], module
            if module in self.parts.traced:
                source, make_fallback = self.parts.traced[module]
                on_devices[module] = TracedPart(*place, source, own, self.options, make_fallback)
            else:
                opens = self.parts.make_inner if module is not self.model else None
                make_inner = None if opens is None else functools.partial(opens, module, self.session)
                on_devices[module] = Part(*place, own, self.options, module in followed, make_inner)
        self.tree = HostTree(self.model, on_devices, self.parts.left)
        self.tree.attach_loss_functions(self.session, self.options)

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], options: RoundPipeRunConfig) -> Any:
        """``split_input`` and ``merge_output`` are of the whole model's inputs and outputs."""
        return self._forward(args, kwargs, options, self.parts.splits_inside)

    def _forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], options: RoundPipeRunConfig, splits_inside: bool
    ) -> Any:
        config = self._begin(options)
        if not splits_inside:
            config = self._batch_warnings.whole_if_unclear(config, args, kwargs)
            config = self._batch_warnings.whole_if_needed(config, self.parts.cause)
            config = self._batch_warnings.whole_if_mixed(config, lambda: self._where_mixed(args, kwargs), self.model)

        def kept(output: Any) -> Any:
            """What a run returned, in containers of its own: code may fill the same ones in the next run."""
            made = trees.map_tensors(output, lambda tensor: tensor.to(config.output_device))
            return copy.copy(made) if made is output and type(made) in (list, dict) else made

        with torch.set_grad_enabled(config.requires_grad):
            if splits_inside and config.split_input is None and config.merge_output is True:
                outputs = [kept(self._run_tree(args, kwargs, options, RoundPipeRunConfig(), (args, kwargs), None))]
            else:

                def run(pieces: Split, _: bool) -> list[Any]:
                    own = (args, kwargs) if len(pieces.args) == 1 else None
                    parts = enumerate(zip(pieces.args, pieces.kwargs, pieces.events, strict=True))
                    look_at_hooks = self._hook_warnings.begin_on_host([*zip(pieces.args, pieces.kwargs, strict=True)])
                    runs = (self._run_tree(a, k, options, IN_ONE_PIECE, own, m, events) for m, (a, k, events) in parts)
                    made = list(map(kept, runs))
                    look_at_hooks()
                    return made

                outputs = self._by_pieces.run(run, config, args, kwargs)
            self._batch_warnings.look(outputs, config)
            outputs = merge(outputs, config)
        call_behind_backward(outputs, self.session.optimizer.end_call)  # maybe no part has one
        self.session.optimizer.raise_pending()
        return outputs

    def forward_backward(self, training: TrainingCall) -> Any:
        args, kwargs = training.args, training.kwargs
        has_backward = training.has_backward
        config = self._begin(training.options, adds_gradients=has_backward)
        is_mean = config.loss_reduction == "mean"
        if config.loss_scope == "batch":
            forward = functools.partial(self._forward, splits_inside=False)
            return train_on_batch(forward, self.session, training, is_mean=is_mean)
        if has_backward and not self._warned and not self.parts.traced:
            self._warned = True
            warn(
                "forward_backward of an AutoRoundPipe runs the model microbatch by microbatch: "
                "nothing overlaps between layers"
            )
        config = self._batch_warnings.whole_if_unclear(config, args, kwargs, training.label)
        config = self._batch_warnings.whole_if_needed(config, self.parts.cause, has_loss=True)
        config = self._batch_warnings.whole_if_mixed(config, lambda: self._where_mixed(args, kwargs), self.model)
        run = functools.partial(self._train, training, config)
        return self._by_pieces.run(run, config, args, kwargs, training.label, training.loss_fn)

    def _train(self, training: TrainingCall, config: ResolvedConfig, pieces: Split, keeps_apart: bool) -> Any:
        """A call by its pieces; their gradients may be kept apart until all have run."""
        has_backward, is_mean = training.has_backward, config.loss_reduction == "mean"
        if has_backward:
            self._hook_warnings.look(self.model.parameters(), pieces.num_microbatches)
        arguments = [*zip(pieces.args, pieces.kwargs, strict=True)]
        look_at_hooks = self._hook_warnings.begin_on_host(arguments, training.loss_fn)
        device = self.session.engine.backends[0].device
        losses: list[Any] = []
        outputs: list[Any] = []
        leaves: list[tuple[torch.Tensor, torch.Tensor]] = []
        own = (training.args, training.kwargs) if len(pieces.args) == 1 else None

        def cut_off(tensor: torch.Tensor) -> torch.Tensor:
            """The same tensor as a leaf: backward stops there, and goes through what is in front once, at the end."""
            if not (has_backward and is_differentiable(tensor)):
                return tensor
            if not tensor.requires_grad:
                return tensor.detach()  # a forward that writes into its slice must not make the others require grad
            leaf = tensor.detach().requires_grad_()
            leaves.append((tensor, leaf))
            return leaf.view_as(leaf)

        parts = zip(pieces.args, pieces.kwargs, pieces.labels, pieces.events, strict=True)
        share = training.share
        weights = LossWeights(Mean(pieces.shares, pieces.num_microbatches, share=share) if is_mean else None)
        with GradientNote(added=False) as note, contextlib.ExitStack() as apart:
            with torch.set_grad_enabled(has_backward):
                for m, (*piece, events) in enumerate(parts):
                    piece_args, piece_kwargs, target = trees.map_tensors(tuple(piece), cut_off)
                    output = self._run_tree(piece_args, piece_kwargs, training.options, IN_ONE_PIECE, own, m, events)
                    output, target = trees.map_tensors((output, target), lambda tensor: tensor.to(device))
                    number = pieces.num_microbatches
                    with RaisedIn(self._place("loss_fn", m), number), microbatch_count(number):
                        ends = ends_of(output) if is_mean else frozenset()
                        loss = training.loss_fn(output, target)
                        each = read_losses(loss, is_mean=is_mean)
                        is_own = place_of(each.tensors[0], output) is not None
                        weights.apply(each, m, "unknown" if is_own else None, ends=frozenset() if is_own else ends)
                    if config.check_finite:
                        check_losses(each.tensors, f"on the host, microbatch {m}, phase loss_fn")
                    note.added = has_backward
                    if has_backward:
                        self._by_pieces.has_added = not keeps_apart
                        if m == 0 and (keeps_apart or weights.has_given or share is not None):
                            apart.enter_context(self.session.optimizer.gradients_scaled(lambda: weights.gradient_scale))
                        with RaisedIn(self._place("backward", m)):
                            torch.autograd.backward(each.tensors)
                    losses.append(trees.map_tensors(each.detached(), torch.Tensor.cpu))
                    if training.return_outputs:
                        detached = trees.map_tensors(output, lambda tensor: tensor.detach().to(config.output_device))
                        outputs.append(detached)
            apart.close()
            arrived = [leaf.grad for _, leaf in leaves]
            if (scale := weights.gradient_scale) != 1:
                arrived = [None if gradient is None else gradient * scale for gradient in arrived]
            flow_back([tensor for tensor, _ in leaves], arrived)
            if has_backward:
                self.session.optimizer.end_call()
            merged = merge(outputs, config) if training.return_outputs else None
        self.session.optimizer.raise_pending()
        look_at_hooks()
        self._loss_warnings.look([weights], len(losses), training.num_ranks, training.options, self.config)
        if is_mean:
            self._loss_warnings.look_at_mean(pieces.labels, [weights])
        total = sum_losses(losses, weights.scale)
        return (total, merged) if training.return_outputs else total

    def _where_mixed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """What mixes samples in the model's own code, looked at once in each mode, if a trace was tried."""
        mode = self.model.training
        if mode not in self._mixed:
            is_tried = self.parts.cause is not None
            self._mixed[mode] = where_untraced_code_mixes(self.model, args, kwargs) if is_tried else ""
        return self._mixed[mode]

    def _begin(self, call: RoundPipeRunConfig, adds_gradients: bool | None = None) -> ResolvedConfig:
        """The options of a call that runs the tree; returns when the weights may be read on the host."""
        config = resolve(call, self.config, num_devices=self.session.engine.num_workers)
        if config.execute_plan is not None:
            raise ConfigError(
                "execute_plan names the layers of one chain, and this model is several parts; give each its own with "
                "wrap_model_to_roundpipe(..., override_config={module: RoundPipeRunConfig(execute_plan=...)})"
            )
        adds = config.requires_grad if adds_gradients is None else adds_gradients
        self.session.begin_call(adds, has_backward_later=adds_gradients is None)
        self.session.gates.weights.wait(self.model.parameters(), f"the forward of {self.session.name}")
        return config

    def _run_tree(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: RoundPipeRunConfig,
        forced: RoundPipeRunConfig,
        own: tuple[Any, Any] | None,
        microbatch: int | None,
        events: Iterable[Any] = (),
    ) -> Any:
        """Run the whole, or one microbatch, which parts (``forced``) split no further; ``own``: see `_hand_back`."""
        for event in events:
            event.synchronize()
        both = overlaid(call, self.config)
        self.options.forced, self.options.first_microbatch = forced, microbatch or 0
        self.options.default = RoundPipeRunConfig(
            num_microbatch=both.num_microbatch,
            recompute_grain=both.recompute_grain,
            preserve_rng_state=both.preserve_rng_state,
            check_finite=both.check_finite,
        )
        copies = trees.map_tensors((args, kwargs), lambda tensor: tensor if tensor.is_meta else tensor.to("cpu"))
        before = dict(trees.walk(copies))
        with autocast_as_on_accelerator(), RaisedIn(self._place("forward", microbatch)):
            try:
                output = self.tree.run(*copies)
            except Exception as error:
                if microbatch is not None and own is None:  # one of several
                    self._by_pieces.note_failed(error, microbatch)
                raise
        self._hand_back(before, copies, own, output)
        return output

    def _run_whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._run_tree(args, kwargs, RoundPipeRunConfig(), IN_ONE_PIECE, (args, kwargs), 0)

    def _place(self, phase: str, microbatch: int | None) -> Callable[[BaseException], str]:
        """Says where in code on the host an exception was raised."""

        def where(error: BaseException) -> str:
            module = innermost(error, self.tree.names_of(self.model))
            which = "the whole batch" if microbatch is None else f"microbatch {microbatch}"
            return f"{f'module {module}' if module else 'code'} on the host, {which}, phase {phase}"

        return where

    def _hand_back(self, before: dict[trees.Path, Any], copies: Any, own: tuple[Any, Any] | None, output: Any) -> None:
        """Put what the forward put into its arguments, which are copies, into the caller's own.

        Without ``own``, the copies are of one microbatch of several, and what each puts there is lost.
        """
        for path in trees.gained(before, dict(trees.walk(copies))):
            if trees.holds_any(output, trees.above(copies, path, 2)):  # the caller gets it there
                continue
            if own is not None:
                trees.put(own, copies, path)
            elif not self._warned_of_arguments:
                self._warned_of_arguments = True
                warn(
                    f"the forward of {type(self.model).__name__} puts something into its argument {path[1].key}, of "
                    "which each microbatch has a copy: the caller's own stays as it was. Return the value instead, or "
                    "set num_microbatch=1"
                )

    def partition_table(self) -> str:
        if self.model in self.parts.on_devices:
            return self.tree.parts[0].runner.partition_table()
        parts = [(part.name, part.module) for part in self.tree.parts]
        title = f"{self.session.name}: own forward on the CPU, parts on the devices"
        dtypes = self.session.optimizer.copy_dtypes()
        return partition_table(chain_of_modules(parts), None, title=title, optim_dtypes=dtypes)


class AutoRoundPipe(RoundPipe):
    """A model that can't be cut into layers: its own forward runs on the CPU, and parts of it on the devices.

    It offers all that `RoundPipe` does; the optimizer's side has the parameters of modules on the CPU, too.
    `roundpipe.compile` returns one for a model that can't be traced, and so does `roundpipe.wrap_model_to_roundpipe`.
    Constructed directly, the whole model is one part: it must fit on a device as a whole, unless it is an
    ``nn.Sequential``, whose children become layers.

    ``split_input`` and ``merge_output`` apply to the inputs and outputs of the whole model. ``forward_backward``
    runs the model microbatch by microbatch and warns once that nothing overlaps between layers.
    """

    @classmethod
    def _program_of(cls, model: nn.Module) -> PartsProgram:
        return PartsProgram(model, {model: RoundPipeRunConfig()}, widens_half=False)
