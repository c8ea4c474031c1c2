"""`AutoRoundPipe`: models whose own forward runs as Python on the host, around parts that run on the devices."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.core.caller import warn
from roundpipe.core.errors import ConfigError
from roundpipe.core.layers import FixedChain, LayerChain, is_differentiable
from roundpipe.core.modes import autocast_as_on_accelerator
from roundpipe.reports.tables import partition_table
from roundpipe.runtime.config import ResolvedConfig, RoundPipeRunConfig, microbatch_count, resolve
from roundpipe.runtime.engine.builder import sum_losses
from roundpipe.runtime.engine.stage import LossFunction
from roundpipe.runtime.microbatch import split as microbatch
from roundpipe.wrappers.module_layers import chain_of_modules
from roundpipe.wrappers.parts import IN_ONE_PIECE, CallOptions, HostTree, Part, overlaid
from roundpipe.wrappers.pipe import RoundPipe, check_training_call, flow_back, pass_outputs


@dataclass(frozen=True, slots=True)
class Parts:
    """Which modules of a model run on the devices."""

    on_devices: Mapping[nn.Module, RoundPipeRunConfig]
    """Modules that become parts, and options of each alone."""
    left: tuple[nn.Module, ...]
    """Modules that are called as they are."""
    splits_inside: bool
    """Whether a ``forward`` is split into microbatches part by part, around which the model's own code sees whole
    batches. False runs all of the model microbatch by microbatch."""

    @classmethod
    def whole(cls, model: nn.Module, *, splits_inside: bool) -> Parts:
        """The model as its own only part."""
        return cls({model: RoundPipeRunConfig()}, (), splits_inside)


class AutoRoundPipe(RoundPipe):
    """A model that is not one chain of layers: its own forward runs on the CPU, parts of it on the devices.

    It has everything that `RoundPipe` has (forward, ``forward_backward``, the optimizer's side over all parameters,
    those of modules on the CPU too). Made by `roundpipe.wrap_model_to_roundpipe`, and by `roundpipe.compile` for a
    model that can't be traced. Made directly, the whole model is one part: all of it must fit on a device at once,
    but for an ``nn.Sequential``, whose children are layers.
    """

    @property
    def model(self) -> nn.Module:
        """The wrapped module."""
        return self._target

    @staticmethod
    def _layers_of(model: nn.Module) -> LayerChain:
        """One, whatever the model is."""
        return chain_of_modules([("", model)])

    def _set_up(self, *args: Any) -> None:
        """As for a `RoundPipe`; other parts than the model itself come later."""
        super()._set_up(*args)
        self._run_parts(Parts.whole(self._state.model, splits_inside=True))

    @classmethod
    def of_parts(
        cls,
        model: nn.Module,
        parts: Mapping[nn.Module, RoundPipeRunConfig],
        left: Iterable[nn.Module] = (),
        *,
        splits_inside: bool,
        **settings: Any,
    ) -> Self:
        """A model some modules of which run on the devices.

        Args:
            model: not changed; it keeps the parameters.
            parts: modules of it, and options of each alone.
            left: modules of it that are called as they are.
            splits_inside: whether a ``forward`` is split into microbatches part by part, around which the model's own
                code sees whole batches. False runs all of the model microbatch by microbatch.
            **settings: as for the class.
        """
        auto = cls(model, **settings)
        auto._run_parts(Parts(parts, tuple(left), splits_inside))
        return auto

    @classmethod
    def inside_of(cls, whole: RoundPipe, model: nn.Module, parts: Parts, config: RoundPipeRunConfig) -> Self:
        """What runs another wrapper's model, with that one's workers, weights and optimizer's side.

        Args:
            whole: it is closed, stepped and asked for parameters; this one is only called.
            model: the user's model.
            parts: what of it runs on the devices.
            config: defaults for every call.
        """
        auto = cls.inside(whole, model, FixedChain(chain_of_modules([("", model)])), whole._state.name)
        auto._state.config = config
        auto._run_parts(parts)
        return auto

    def _run_parts(self, parts: Parts) -> None:
        """Put parts on the devices and the rest on the host."""
        model, options = self._target, CallOptions()
        names = {module: name for name, module in model.named_modules()}
        in_lists = _followed_in_lists(model)
        made = {
            one: Part.of(self, names[one], one, given, options, merges_later=one in in_lists)
            for one, given in parts.on_devices.items()
        }
        tree = HostTree(model, {**made, **{module: module for module in parts.left}})
        tree.attach_loss_functions(self, options)
        self._state.model = tree.module
        self.set_original_model(model)
        self.__dict__.update(_warned=False, _warned_of_arguments=False, _parts=parts, _tree=tree, _options=options)

    def _copied(self, memo: dict[int, Any]) -> Self:
        model = copy.deepcopy(self._target, memo)
        pipe = type(self)(model, **self._state.settings)
        pipe._run_parts(copy.deepcopy(self.__dict__["_parts"], memo))
        return pipe

    @torch.compiler.disable(reason="a call of a RoundPipe is the work of many threads")
    def forward(
        self,
        *args: Any,
        roundpipe_run_config: RoundPipeRunConfig = RoundPipeRunConfig(),  # noqa: B008 - frozen
        **kwargs: Any,
    ) -> Any:
        """See `RoundPipe.forward`. ``split_input`` and ``merge_output`` are of the whole model's inputs and outputs."""
        config = self._begin(roundpipe_run_config)
        with torch.set_grad_enabled(config.requires_grad):
            if self.__dict__["_parts"].splits_inside and config.split_input is None and config.merge_output is True:
                outputs = self._run_tree(args, kwargs, roundpipe_run_config, RoundPipeRunConfig(), (args, kwargs))
                outputs = trees.map_tensors(outputs, lambda tensor: tensor.to(config.output_device))
            else:
                pieces = microbatch.split(args, kwargs, None, config)
                given = zip(pieces.args, pieces.kwargs, pieces.events, strict=True)
                own = (args, kwargs) if len(pieces.args) == 1 else None
                made = [self._run_piece(*one, roundpipe_run_config, own) for one in given]
                made = trees.map_tensors(made, lambda tensor: tensor.to(config.output_device))
                outputs = microbatch.merge(made, config)
        self._state.optimizer.raise_pending()
        self._note_call(args, kwargs, config)
        return outputs

    def forward_backward(
        self,
        input_args: tuple[Any, ...] = (),
        input_kwargs: dict[str, Any] = {},  # noqa: B006 - the contract's default, never changed
        label: Any = None,
        loss_fn: LossFunction = pass_outputs,
        return_outputs: bool = False,
        run_config: RoundPipeRunConfig = RoundPipeRunConfig(),  # noqa: B008 - frozen
    ) -> Any:
        """See `RoundPipe.forward_backward`; warns once that nothing overlaps between layers."""
        if not self.__dict__["_warned"]:
            self.__dict__["_warned"] = True
            warn(
                "forward_backward of an AutoRoundPipe runs the model microbatch by microbatch: "
                "nothing overlaps between layers"
            )
        check_training_call(input_args, input_kwargs, loss_fn)
        config = self._begin(run_config)
        pieces = microbatch.split(tuple(input_args), input_kwargs, label, config)
        device = self._state.engine.backends[0].device
        losses: list[Any] = []
        outputs: list[Any] = []
        leaves: list[tuple[torch.Tensor, torch.Tensor]] = []
        own = (tuple(input_args), input_kwargs) if len(pieces.args) == 1 else None

        def cut_off(tensor: torch.Tensor) -> torch.Tensor:
            """The same tensor as a leaf: backward stops there, and goes through what is in front once, at the end."""
            if not is_differentiable(tensor):
                return tensor
            if not tensor.requires_grad:
                return tensor.detach()  # a forward that writes into its slice must not make the others require grad
            leaf = tensor.detach().requires_grad_()
            leaves.append((tensor, leaf))
            return leaf.view_as(leaf)

        with torch.enable_grad():
            for args, kwargs, wanted, events in zip(
                pieces.args, pieces.kwargs, pieces.labels, pieces.events, strict=True
            ):
                args, kwargs, wanted = trees.map_tensors((args, kwargs, wanted), cut_off)
                output = self._run_piece(args, kwargs, events, run_config, own)
                output, wanted = trees.map_tensors((output, wanted), lambda tensor: tensor.to(device))
                with microbatch_count(pieces.num_microbatches):
                    loss = loss_fn(output, wanted)
                torch.autograd.backward(loss)
                losses.append(trees.map_tensors(loss, lambda tensor: tensor.detach().cpu()))
                if return_outputs:
                    outputs.append(trees.map_tensors(output, lambda one: one.detach().to(config.output_device)))
        flow_back([tensor for tensor, _ in leaves], [leaf.grad for _, leaf in leaves])
        self._state.optimizer.raise_pending()
        self._note_call(tuple(input_args), input_kwargs, config)
        total = sum_losses(losses)
        return (total, microbatch.merge(outputs, config)) if return_outputs else total

    def _begin(self, call: RoundPipeRunConfig) -> ResolvedConfig:
        """The options of a call that runs the tree; returns when the weights may be read on the host."""
        config = resolve(call, self._state.config, num_devices=self._state.engine.num_workers)
        if config.execute_plan is not None:
            raise ConfigError(
                "execute_plan names the layers of one chain, and this model is several parts; give each its own with "
                "wrap_model_to_roundpipe(..., override_config={module: RoundPipeRunConfig(execute_plan=...)})"
            )
        state = self._ready(adds_gradients=config.requires_grad)
        state.gates.weights.wait(self._target.parameters(), f"the forward of {state.name}")
        return config

    def _run_piece(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        events: Iterable[Any],
        call: RoundPipeRunConfig,
        own: tuple[Any, Any] | None,
    ) -> Any:
        """One microbatch of the whole; the parts split it no further. ``own``: the caller's, if it is the only one."""
        for event in events:
            event.synchronize()
        return self._run_tree(args, kwargs, call, IN_ONE_PIECE, own)

    def _run_tree(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: RoundPipeRunConfig,
        forced: RoundPipeRunConfig,
        own: tuple[Any, Any] | None,
    ) -> Any:
        tree: HostTree = self.__dict__["_tree"]
        options: CallOptions = self.__dict__["_options"]
        both = overlaid(call, self._state.config)
        options.forced = forced
        options.default = RoundPipeRunConfig(
            num_microbatch=both.num_microbatch,
            recompute_grain=both.recompute_grain,
            preserve_rng_state=both.preserve_rng_state,
        )
        given = trees.map_tensors((args, kwargs), _to_host)
        before = dict(trees.walk(given))
        with autocast_as_on_accelerator():
            output = tree.run(*given)
        self._hand_back(before, given, own, output)
        return output

    def _hand_back(self, before: dict[trees.Path, Any], given: Any, own: tuple[Any, Any] | None, output: Any) -> None:
        """Puts what the forward put into its arguments, which are copies, into the caller's own.

        Args:
            before: what the copies held before.
            given: the copies.
            own: the caller's arguments; None: they are of several microbatches, and what each puts there is lost.
            output: an argument that is returned is looked at there.
        """
        for path in trees.gained(before, dict(trees.walk(given))):
            if trees.holds_any(output, trees.above(given, path, 2)):
                continue
            if own is not None:
                trees.put(own, given, path)
            elif not self.__dict__["_warned_of_arguments"]:
                self.__dict__["_warned_of_arguments"] = True
                warn(
                    f"the forward of {type(self._target).__name__} puts something into its argument {path[1].key}, of "
                    "which each microbatch has a copy: the caller's own stays as it was. Return the value instead, or "
                    "set num_microbatch=1"
                )

    def partition_table(self) -> str:
        """The parts that run on the devices, as a table."""
        tree: HostTree = self.__dict__["_tree"]
        if self._target in self.__dict__["_parts"].on_devices:
            return tree.parts[0].partition_table()
        parts = [(part._state.name, part.model) for part in tree.parts]
        title = f"{self._state.name}: own forward on the CPU, parts on the devices"
        return partition_table(chain_of_modules(parts), None, title=title)


def _followed_in_lists(model: nn.Module) -> set[nn.Module]:
    """The elements of lists of modules, but for the last of each."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return {element for one in lists for element in list(one)[:-1]}


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else tensor.to("cpu")
